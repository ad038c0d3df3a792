"""The process that is killed: sweeps until nothing is missing."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

from signing_async import RetryPolicy, SigningClient
from signing_async.archive import Archive, ArchiveStore, FolderStore

UNFINISHED = 3
CONCURRENCY = 4
ARCHIVE, JOURNAL = "archive", "the.journal"

OpenStore = Callable[[Path], AbstractAsyncContextManager[ArchiveStore]]
"""Opens the store of a trial, which may keep its files in the trial's folder."""


def folder_store(folder: Path) -> AbstractAsyncContextManager[ArchiveStore]:
    """Open a store that is a folder."""
    return nullcontext(FolderStore(folder / ARCHIVE))


def work(base_url: str, token: str, folder: str, open_store: OpenStore) -> None:
    """Exit with 0 after a sweep without errors, with `UNFINISHED` if a document failed."""
    logging.getLogger("signing_async").setLevel(logging.CRITICAL)
    sys.exit(asyncio.run(_work(base_url, token, Path(folder), open_store)))


async def _work(base_url: str, token: str, folder: Path, open_store: OpenStore) -> int:
    failed = 0
    async with (
        SigningClient(base_url, token, retry=RetryPolicy(base_delay=0.005, max_delay=0.1)) as client,
        open_store(folder) as store,
        Archive(client, store, journal=folder / JOURNAL, concurrency=CONCURRENCY) as archive,
    ):
        async for result in archive.sweep():
            failed += result.error is not None
    return UNFINISHED if failed else 0
