"""What a test needs from the machine: without it the test is skipped, and in CI it fails instead."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import NoReturn

import pytest


def needs(program: str) -> str:
    """The path of a program; the test is skipped where there is none, and fails if it is CI that has none."""
    path = shutil.which(program)
    if path is None:
        missing(f"the program {program}")
    return path


def needs_module(name: str) -> None:
    """Skip the test where the module cannot be imported; in CI fail."""
    if importlib.util.find_spec(name) is None:
        missing(f"the Python module {name}")


def missing(what: str) -> NoReturn:
    """Skip for want of something, or fail in CI: what is never run there is not tested at all."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} is missing here, and in CI nothing may be")
    pytest.skip(f"{what} is missing here")
