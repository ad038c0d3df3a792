"""Separate processes for the tests: ``python -m tests.postgres.workers <task> <arguments>``."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

from signing_async import Token
from signing_async.postgres import PostgresInbox, PostgresJournal, PostgresTokenStore
from signing_async.webhooks import Event


async def hold(dsn: str) -> None:
    """Load inside the lock; on a line of input, save another token."""
    async with PostgresTokenStore(dsn, "anna") as store, store.lock():
        await store.load()
        print("held", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await store.save(Token("late", "refresh-late"))
        print("saved", flush=True)


async def claim(dsn: str) -> None:
    """Claim a package; write every line of input to the journal."""
    async with PostgresJournal(dsn, lease=1.5, timeout=0.5) as journal:
        claimed = await journal.claim("package")
        assert claimed is not None
        print("claimed", claimed.fence, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                await journal.write(claimed, line.strip())
                print("written", flush=True)
            except Exception as error:
                print(type(error).__name__, flush=True)


async def handle(dsn: str) -> None:
    """Handle events one at a time; each handler ends with a line of input. Print the package's log too."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    async with PostgresInbox(dsn, lease=3, timeout=1) as inbox:

        @inbox.on("*")
        async def handle(event: Event) -> None:
            print("started", event.id, flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            print("ended", event.id, flush=True)

        await inbox.run(concurrency=1)


if __name__ == "__main__":
    tasks: dict[str, Any] = {"hold": hold, "claim": claim, "handle": handle}
    asyncio.run(tasks[sys.argv[1]](*sys.argv[2:]))
