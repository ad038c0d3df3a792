"""Fixtures of the tests of an archive."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from signing_async import SigningClient
from signing_async.archive import Archive


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The archive's folder, which does not exist yet."""
    return tmp_path / "archive"


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """The journal's path."""
    return tmp_path / "the.journal"


@pytest.fixture
async def archive(client: SigningClient, folder: Path, journal: Path) -> AsyncIterator[Archive]:
    """An empty archive of the sandbox's tenant."""
    async with Archive(client, folder, journal=journal) as ready:
        yield ready
