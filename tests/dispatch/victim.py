"""The process that is killed: one run over all packages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from pathlib import Path

from signing_async import RetryPolicy, SigningClient
from signing_async.postgres import PostgresJournal
from tests.dispatch.parcels import make_parcel

UNFINISHED = 3
CONCURRENCY = 8
JOURNAL = "the.journal"


def work(base_url: str, token: str, folder: str, packages: int, seed: int, dsn: str = "") -> None:
    """Exit with 0 if all packages were sent, with `UNFINISHED` if some failed."""
    logging.getLogger("signing_async").setLevel(logging.ERROR)
    sys.exit(asyncio.run(_work(base_url, token, Path(folder), packages, seed, dsn)))


async def _work(base_url: str, token: str, folder: Path, packages: int, seed: int, dsn: str) -> int:
    todo = (make_parcel(number, folder, seed).package for number in range(packages))
    failed = 0
    policy = RetryPolicy(base_delay=0.005, max_delay=0.1, settle=0.3)
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(SigningClient(base_url, token, retry=policy))
        opened = await stack.enter_async_context(PostgresJournal(dsn, lease=3, timeout=1)) if dsn else folder / JOURNAL
        async for result in client.dispatch_many(todo, journal=opened, concurrency=CONCURRENCY):
            failed += result.error is not None
    return UNFINISHED if failed else 0
