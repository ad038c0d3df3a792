"""The process that is killed: sweeps until nothing is missing."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path

from signing_async import Journal, JournalError, RetryPolicy, SigningClient, SqliteJournal
from signing_async.archive import Archive, ArchiveStore, FolderStore
from signing_async.postgres import PostgresJournal

UNFINISHED = 3
CONCURRENCY = 4
ARCHIVE, JOURNAL = "archive", "the.journal"

OpenStore = Callable[[Path], AbstractAsyncContextManager[ArchiveStore]]
"""Opens the store of a trial, which may keep its files in the trial's folder."""
OpenJournal = Callable[[Path], AbstractAsyncContextManager[Journal]]
"""Opens the journal of a trial, likewise."""


def folder_store(folder: Path) -> AbstractAsyncContextManager[ArchiveStore]:
    """Open a store that is a folder."""
    return nullcontext(FolderStore(folder / ARCHIVE))


def file_journal(folder: Path) -> AbstractAsyncContextManager[Journal]:
    """Open a journal that is a file."""
    return SqliteJournal(folder / JOURNAL)


@asynccontextmanager
async def postgres_journal(folder: Path, dsn: str) -> AsyncIterator[Journal]:
    """Open a journal in PostgreSQL whose leases are short. A run ends if the server does not respond in time."""
    try:
        async with PostgresJournal(dsn, lease=3, timeout=1) as journal:
            yield journal
    except JournalError as error:
        sys.exit(UNFINISHED if error.transient else 1)


def work(
    base_url: str, token: str, folder: str, open_store: OpenStore, open_journal: OpenJournal = file_journal
) -> None:
    """Exit with 0 after a sweep without errors, with `UNFINISHED` if a document failed."""
    logging.getLogger("signing_async").setLevel(logging.CRITICAL)
    sys.exit(asyncio.run(_work(base_url, token, Path(folder), open_store, open_journal)))


async def _work(base_url: str, token: str, folder: Path, open_store: OpenStore, open_journal: OpenJournal) -> int:
    failed = 0
    async with (
        SigningClient(base_url, token, retry=RetryPolicy(base_delay=0.005, max_delay=0.1)) as client,
        open_store(folder) as store,
        open_journal(folder) as journal,
        Archive(client, store, journal=journal, concurrency=CONCURRENCY) as archive,
    ):
        async for result in archive.sweep():
            failed += result.error is not None
    return UNFINISHED if failed else 0
