"""The process that is killed: sweeps until nothing is missing."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from signing_async import RetryPolicy, SigningClient
from signing_async.archive import Archive

UNFINISHED = 3
CONCURRENCY = 4
ARCHIVE, JOURNAL = "archive", "the.journal"


def work(base_url: str, token: str, folder: str) -> None:
    """Exit with 0 after a sweep without errors, with `UNFINISHED` if a document failed."""
    logging.getLogger("signing_async").setLevel(logging.CRITICAL)
    sys.exit(asyncio.run(_work(base_url, token, Path(folder))))


async def _work(base_url: str, token: str, folder: Path) -> int:
    failed = 0
    async with (
        SigningClient(base_url, token, retry=RetryPolicy(base_delay=0.005, max_delay=0.1)) as client,
        Archive(client, folder / ARCHIVE, journal=folder / JOURNAL, concurrency=CONCURRENCY) as archive,
    ):
        async for result in archive.sweep():
            failed += result.error is not None
    return UNFINISHED if failed else 0
