"""What users write passes strict type checkers, and has the types that the examples assert."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import guides

_EXAMPLES = Path(__file__).parent / "examples.py"
_APPS = sorted((guides.ROOT / "tests/examples").glob("[!_t]*.py"))
_MISTAKES = """
from pathlib import Path
from typing import assert_type

from signing_async import Assumptions, Page, Recipient, Signing, SigningClient


async def mistakes(client: SigningClient, signing: Signing, folder: Path) -> None:
    Assumptions(cursor_parm="after")  # mistake
    await client.signings.create(name="Lease", language="EN", signingOrder="parallel")  # mistake
    page = await client.signings.list()
    assert_type(page, Page[Recipient])  # mistake
    print(client.documents.upload_many(signing, [5, "lease.pdf", folder / "a.pdf"]))  # mistake
    print(client.documents.upload_many(None, [(signing, folder), (signing, 5)]))  # mistake
"""
# Another run of mypy checks the package. No value of the other packages is in what users write.
_SETTINGS = """
[mypy]
strict = True
[mypy-signing_async.*]
ignore_errors = True
[mypy-cryptography.*,jinja2.*,opentelemetry.*,pydantic.*,pydantic_core.*,pyhanko.*,pyhanko_certvalidator.*,redis.*]
follow_imports = skip
"""

pytestmark = pytest.mark.timeout(300)


def _errors(folder: Path, checker: str, *arguments: str) -> tuple[set[tuple[str, int]], str]:
    """Return file and line of each error that a strict checker, without the project's settings, finds in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", checker, *arguments],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(guides.ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
    )
    shown = done.stdout + done.stderr
    return {(file, int(line)) for file, line in re.findall(r"(\w+\.py):(\d+)(?::\d+)?(?: -|:) error", shown)}, shown


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the examples and the mistakes."""
    shutil.copy(_EXAMPLES, tmp_path)
    (tmp_path / "mistakes.py").write_text(_MISTAKES)
    return tmp_path


@pytest.fixture
def expected() -> set[tuple[str, int]]:
    lines = enumerate(_MISTAKES.splitlines(), start=1)
    return {("mistakes.py", number) for number, line in lines if line.endswith("# mistake")}


def test_mypy_accepts_guides_apps_and_examples_and_finds_mistakes(folder: Path, expected: object) -> None:
    for path in (guides.README, *guides.GUIDES):
        name = "_".join(("session", *path.relative_to(guides.ROOT).with_suffix("").parts))
        (folder / f"{name}.py").write_text(guides.as_module(path))
        for file, content in guides.files(path).items():
            assert not (folder / file).exists(), f"two guides have a file {file}"
            (folder / file).write_text(content, "utf-8")
    for path in _APPS:
        shown = folder / path.name
        assert not shown.exists() or shown.read_bytes() == path.read_bytes(), f"a guide has another file {path.name}"
        shutil.copy(path, folder)
    (folder / "mypy.ini").write_text(_SETTINGS)
    options = ("--ignore-missing-imports", "--disable-error-code=unused-ignore", "--cache-dir=/dev/null")
    found, shown = _errors(folder, "mypy", *options, ".")
    assert found == expected, shown


def test_pyright_accepts_the_examples_and_finds_mistakes(folder: Path, expected: object) -> None:
    config = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "extraPaths": [str(guides.ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    found, shown = _errors(folder, "pyright", "--project", "pyrightconfig.json", "--pythonpath", sys.executable)
    assert found == expected, shown
