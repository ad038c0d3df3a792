"""Processes of their own for the tests of PostgreSQL: ``python -m tests.postgres_workers <task> <arguments>``."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import Any

from signing_async import OAuth, RetryPolicy, SigningClient, Token
from signing_async.postgres import PostgresJournal, PostgresTokenStore


async def hold(dsn: str) -> None:
    """Hold the lock, having read the token; when told to go on, save another."""
    async with PostgresTokenStore(dsn, "anna") as store, store.lock():
        await store.load()
        print("held", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await store.save(Token("late", "refresh-late"))
        print("saved", flush=True)


async def claim(dsn: str) -> None:
    """Claim a package; for every line write it down, until there are no more."""
    async with PostgresJournal(dsn, lease=1.0, timeout=0.3) as journal:
        claimed = await journal.claim("package")
        assert claimed is not None
        print("claimed", claimed.fence, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                await journal.write(claimed, line.strip())
                print("written", flush=True)
            except Exception as error:
                print(type(error).__name__, flush=True)


async def call(dsn: str, base_url: str, client_id: str, client_secret: str, calls: str, ahead: str) -> None:
    """Make calls for a while with the store's token, by a clock that is ahead; print how many worked."""
    clock = time.time
    time.time = lambda: clock() + float(ahead)
    oauth = OAuth(
        base_url,
        client_id=client_id,
        client_secret=client_secret,
        redirect_uri="https://app.example.com/callback",
        store=PostgresTokenStore(dsn, "anna"),
    )
    async with contextlib.AsyncExitStack() as closing:
        closing.push_async_callback(oauth._store.aclose)  # type: ignore[attr-defined]  # the store made above
        await closing.enter_async_context(oauth)
        client = SigningClient(base_url, oauth, retry=RetryPolicy(base_delay=0.01))
        await closing.enter_async_context(client)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        for _ in range(int(calls)):
            await client.me()
            await asyncio.sleep(0.07)
        print("done", flush=True)


if __name__ == "__main__":
    tasks: dict[str, Any] = {"hold": hold, "claim": claim, "call": call}
    asyncio.run(tasks[sys.argv[1]](*sys.argv[2:]))
