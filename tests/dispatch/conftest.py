"""Fixtures of the tests of a dispatch."""

from __future__ import annotations

from pathlib import Path

import pytest

from signing_async import SigningClient
from signing_async.sandbox import Sandbox
from tests.dispatch.observing import Office


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the journal is."""
    return tmp_path / "the.journal"


@pytest.fixture
def office(sandbox: Sandbox, client: SigningClient, path: Path) -> Office:
    """A client of the sandbox, with a journal."""
    return Office(sandbox, client, path)
