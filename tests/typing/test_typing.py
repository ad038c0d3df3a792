"""What users write passes strict type checkers, and has the types that the examples assert."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import guides

_EXAMPLES = Path(__file__).parent / "examples.py"
_APPS = sorted((guides.ROOT / "tests/examples").glob("[!_t]*.py"))
_MISTAKES = {
    "misspelled_argument.py": ("signing_order=", "signingOrder="),
    "wrong_type.py": ("assert_type(page, Page[Signing])", "assert_type(page, Page[Recipient])"),
    "wrong_source.py": ("upload_many(signing, [", "upload_many(signing, [5, "),
    "wrong_pair.py": ("(signing, folder), (signing, file)", "(signing, folder), (signing, 5)"),
    "misspelled_setting.py": ("cursor_param=", "cursor_parm="),
}


def _check(folder: Path, checker: str, *arguments: str) -> str:
    """Return what a strict checker, without the project's settings, prints of the files in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", checker, *arguments],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(guides.ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the examples, and a copy with each of the mistakes."""
    text = _EXAMPLES.read_text()
    (tmp_path / _EXAMPLES.name).write_text(text)
    for name, (right, wrong) in _MISTAKES.items():
        assert right in text
        (tmp_path / name).write_text(text.replace(right, wrong, 1))
    return tmp_path


def _with_errors(shown: str, folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.py") if path.name in shown}


def test_mypy_accepts_guides_apps_and_examples_and_finds_mistakes(folder: Path) -> None:
    for path in (guides.README, *guides.GUIDES):
        name = "_".join(("session", *path.relative_to(guides.ROOT).with_suffix("").parts))
        (folder / f"{name}.py").write_text(guides.as_module(path))
        for file, content in guides.files(path).items():
            assert not (folder / file).exists(), f"two guides have a file {file}"
            (folder / file).write_text(content, "utf-8")
    for path in _APPS:
        assert not (folder / path.name).exists(), f"an app and a guide have a file {path.name}"
        shutil.copy(path, folder)
    options = ("--ignore-missing-imports", "--disable-error-code=unused-ignore", "--cache-dir=cache")
    shown = _check(folder, "mypy", "--strict", "--config-file=", *options, ".")
    assert _with_errors(shown, folder) == set(_MISTAKES), shown


def test_pyright_accepts_the_examples_and_finds_mistakes(folder: Path) -> None:
    config = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "extraPaths": [str(guides.ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    shown = _check(folder, "pyright", "--project", "pyrightconfig.json", "--pythonpath", sys.executable)
    assert _with_errors(shown, folder) == set(_MISTAKES), shown
