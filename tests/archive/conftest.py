"""Fixtures of the tests of an archive."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from signing_async import SigningClient
from signing_async.archive import Archive
from signing_async.sandbox import Sandbox
from tests.archive.s3_server import CREDENTIALS, S3Server
from tests.archive.tenants import Tenant


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


@pytest.fixture
def tenant(sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path) -> Tenant:
    """The sandbox's tenant."""
    return Tenant(sandbox, client, folder, journal)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An S3, and the credentials for it in the environment."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return s3_server
