"""The Python versions that the README, the metadata, the workflows and the CI script name are the same."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.needs import missing

ROOT = Path(__file__).parent.parent


def text_of(path: str) -> str:
    """Return the text of a file, or skip the test: the sdist has no dotfiles."""
    if not (ROOT / path).exists():
        missing(f"the file {path}")
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.fixture
def project() -> dict[str, Any]:
    return tomllib.loads(text_of("pyproject.toml"))["project"]  # type: ignore[no-any-return]


@pytest.fixture
def versions(project: dict[str, Any]) -> list[str]:
    """The versions of the classifiers."""
    prefix = "Programming Language :: Python :: 3."
    return [one.rpartition(" ")[2] for one in project["classifiers"] if one.startswith(prefix)]


def test_lowest_classifier_is_the_lowest_python_that_can_install_the_package(
    project: dict[str, Any], versions: list[str]
) -> None:
    assert project["requires-python"] == f">={versions[0]}"


def test_support_policy_names_the_pythons_of_the_classifiers(versions: list[str]) -> None:
    found = re.search(r"- Python (3\.\d+) and later; tested on ([^.]*(?:\.\d+[^.]*)*)\. A Python", text_of("README.md"))
    assert found
    assert found[1] == versions[0]
    assert re.findall(r"3\.\d+", found[2]) == versions


def test_workflow_runs_on_the_pythons_of_the_classifiers(versions: list[str]) -> None:
    found = re.search(r"^ +python: (\[.*\])$", text_of(".github/workflows/tests.yml"), re.MULTILINE)
    assert found
    assert json.loads(found[1]) == versions


def test_ci_script_runs_on_the_pythons_above_the_lowest(versions: list[str]) -> None:
    found = re.search(r"^for version in (3\..*); do$", text_of(".ci/run"), re.MULTILINE)
    assert found
    assert found[1].split() == versions[1:]


def test_selection_for_other_pythons_exists() -> None:
    selected = text_of(".ci/selection.txt").split()
    assert selected == sorted(set(selected))
    assert [path for path in selected if not (ROOT / path).is_file()] == []
