"""The Python versions that the README, the metadata, the workflows and the CI script name are the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from tests.needs import missing

ROOT = Path(__file__).parent.parent


def text_of(path: str) -> str:
    """Return the text of a file, or skip the test: the sdist has no dotfiles."""
    if not (ROOT / path).exists():
        missing(f"the file {path}")
    return (ROOT / path).read_text(encoding="utf-8")


def test_pythons_are_those_of_the_classifiers() -> None:
    project: dict[str, Any] = tomllib.loads(text_of("pyproject.toml"))["project"]
    prefix = "Programming Language :: Python :: 3."
    versions = [one.rpartition(" ")[2] for one in project["classifiers"] if one.startswith(prefix)]
    assert project["requires-python"] == f">={versions[0]}"
    for path, pattern, first in (
        ("README.md", r"- Python 3\.11 and later; tested on ([^.]*(?:\.\d+[^.]*)*)\. A Python", 0),
        (".github/workflows/tests.yml", r"^ +python: \[(.*)\]$", 0),
        (".ci/run", r"^for version in (3\..*); do$", 1),  # the tests themselves run on the lowest
    ):
        found = re.search(pattern, text_of(path), re.MULTILINE)
        assert found
        assert re.findall(r"3\.\d+", found[1]) == versions[first:]


def test_selection_for_other_pythons_exists() -> None:
    selected = text_of(".ci/selection.txt").split()
    assert selected == sorted(set(selected))
    assert [path for path in selected if not (ROOT / path).is_file()] == []
