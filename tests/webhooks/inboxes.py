"""Helpers of the inbox's tests: an event to add, and a wait for what an inbox should come to hold."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from signing_async.webhooks import EventStatus, HandlerRetryPolicy, Inbox, StoredEvent
from signing_async.webhooks.event import parse_event
from tests.webhooks.deliveries import event_body

AT_ONCE = HandlerRetryPolicy(max_attempts=3, base_delay=0, max_delay=0)


async def add(inbox: Inbox, name: str, signing: str | None = None, kind: str = "signing.completed") -> None:
    """Add an event that the inbox does not know."""
    members = {} if signing is None else {"signing": {"id": signing}}
    body = event_body(name, **members).replace(b"signing.completed", kind.encode())
    assert await inbox.add(parse_event(body, datetime.now(UTC)), body)


async def settled(inbox: Inbox) -> list[StoredEvent]:
    """Return all events once none is pending."""
    async with asyncio.timeout(30):
        while (await inbox.stats()).counts.get(EventStatus.PENDING):
            await asyncio.sleep(0.005)
    return [stored async for stored in inbox.events()]


async def stored(inbox: Inbox, name: str) -> StoredEvent:
    """Return an event that must be known."""
    found = await inbox.get(name)
    assert found is not None
    return found


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other connections from writing to the file."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield
        database.execute("ROLLBACK")
