"""The types of the public API are what the examples say, for mypy and for pyright."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_EXAMPLES = _HERE / "examples.py"


def _check(checker: str, folder: Path) -> str:
    """What a strict type checker, without the project's settings, prints of the files in a folder; "" if it accepts."""
    arguments = {
        "mypy": ["--strict", "--config-file=", f"--cache-dir={folder / 'cache'}", str(folder)],
        "pyright": ["--project", str(folder / "pyrightconfig.json"), "--pythonpath", sys.executable],
    }
    config = {"typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", checker, *arguments[checker]],
        cwd=_HERE.parents[1],
        env={**os.environ, "MYPYPATH": "", "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr if done.returncode else ""


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_accept_the_examples_and_find_mistakes(checker: str, tmp_path: Path) -> None:
    """Each strict checker agrees with every type that the examples assert, and does look: each mistake is found."""
    mistakes = {
        "misspelled_argument.py": ("signing_order=", "signingOrder="),
        "wrong_type.py": ("assert_type(page, Page[Signing])", "assert_type(page, Page[Recipient])"),
        "misspelled_setting.py": ("cursor_param=", "cursor_parm="),
    }
    text = _EXAMPLES.read_text()
    (tmp_path / _EXAMPLES.name).write_text(text)
    for name, (right, wrong) in mistakes.items():
        assert right in text
        (tmp_path / name).write_text(text.replace(right, wrong, 1))
    found = _check(checker, tmp_path)
    assert _EXAMPLES.name not in found, found
    assert [name for name in mistakes if name not in found] == [], found
