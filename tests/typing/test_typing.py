"""The types of the public API are what the examples say, for mypy and for pyright."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_EXAMPLES = _HERE / "examples.py"


def _check(checker: str, file: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """What a type checker says of a file, strictly, whatever the project's own settings are."""
    arguments = {
        "mypy": ["--strict", "--config-file=", f"--cache-dir={folder / 'cache'}", str(file)],
        "pyright": ["--project", str(folder / "pyrightconfig.json")],
    }
    config = f'{{"include": ["{file}"], "typeCheckingMode": "strict", "pythonVersion": "3.11"}}'
    (folder / "pyrightconfig.json").write_text(config)
    return subprocess.run(
        [sys.executable, "-m", checker, *arguments[checker]],
        cwd=_HERE.parents[1],
        env={**os.environ, "MYPYPATH": "", "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_accept_the_examples(checker: str, tmp_path: Path) -> None:
    """Each strict checker agrees with every type that the examples assert."""
    done = _check(checker, _EXAMPLES, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("signing_order=", "signingOrder="),
        ("assert_type(page, Page[Signing])", "assert_type(page, Page[Recipient])"),
        ("cursor_param=", "cursor_parm="),
    ],
    ids=["misspelled argument", "wrong type", "misspelled setting"],
)
def test_type_checkers_find_a_mistake(checker: str, right: str, wrong: str, tmp_path: Path) -> None:
    """The checkers do look: a misspelled argument or a wrong type fails."""
    text = _EXAMPLES.read_text()
    assert right in text
    (tmp_path / "mistaken.py").write_text(text.replace(right, wrong, 1))
    done = _check(checker, tmp_path / "mistaken.py", tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "mistaken.py" in done.stdout
