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
def tenant(sandbox: Sandbox, client: SigningClient, folder: Path, tmp_path: Path) -> Tenant:
    """The sandbox's tenant."""
    return Tenant(sandbox, client, folder, tmp_path / "the.journal")


@pytest.fixture
async def archive(tenant: Tenant) -> AsyncIterator[Archive]:
    """An empty archive of the sandbox's tenant."""
    async with tenant.archive() as ready:
        yield ready


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture(scope="module")
def s3(s3_server: S3Server) -> Iterator[S3Server]:
    """An S3, with the credentials for it in the environment. Its clients send each request at most twice."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {**CREDENTIALS, "AWS_MAX_ATTEMPTS": "2"}.items():
            patched.setenv(name, value)
        yield s3_server
