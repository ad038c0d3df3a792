"""The process that is killed: sweeps until nothing is missing."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import attrs

from signing_async import ArchiveError, JournalError, RetryPolicy, SigningClient, SqliteJournal
from signing_async.archive import Archive, FolderStore, S3Store
from signing_async.postgres import PostgresJournal
from tests.archive.s3_server import CREDENTIALS

UNFINISHED = 3
CONCURRENCY = 4
ARCHIVE, JOURNAL = "archive", "the.journal"


@attrs.frozen
class Place:
    """Where a trial has its archive and its journal: in its folder, unless a bucket or a database is given."""

    folder: Path
    bucket: str = ""
    endpoint_url: str = ""
    dsn: str = ""

    def store(self) -> FolderStore | S3Store:
        """Open the store."""
        if not self.bucket:
            return FolderStore(self.folder / ARCHIVE)
        os.environ.update(CREDENTIALS)
        return S3Store(f"s3://{self.bucket}/archive", endpoint_url=self.endpoint_url)


def work(base_url: str, token: str, place: Place) -> None:
    """Exit with 0 after a sweep without errors, with `UNFINISHED` if a document failed.

    A run also ends unfinished if the bucket or the database fails more often than a request is repeated.
    """
    logging.getLogger("signing_async").setLevel(logging.CRITICAL)
    try:
        sys.exit(asyncio.run(_work(base_url, token, place)))
    except (ArchiveError, JournalError) as error:
        may_fail = place.bucket if isinstance(error, ArchiveError) else place.dsn
        sys.exit(UNFINISHED if error.transient and may_fail else 1)


async def _work(base_url: str, token: str, place: Place) -> int:
    failed = 0
    async with AsyncExitStack() as opened:
        retry = RetryPolicy(base_delay=0.005, max_delay=0.1)
        client = await opened.enter_async_context(SigningClient(base_url, token, retry=retry))
        store = place.store()
        if isinstance(store, S3Store):
            await opened.enter_async_context(store)
        # The leases are short: those of killed processes must expire.
        database = PostgresJournal(place.dsn, lease=3, timeout=1) if place.dsn else None
        journal = await opened.enter_async_context(database or SqliteJournal(place.folder / JOURNAL))
        archive = Archive(client, store, journal=journal, concurrency=CONCURRENCY)
        await opened.enter_async_context(archive)
        async for result in archive.sweep():
            failed += result.error is not None
    return UNFINISHED if failed else 0
