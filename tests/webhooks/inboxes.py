"""Helpers of the inbox's tests: events to add, stores that fail, and a wait for what an inbox should come to hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from signing_async import InboxError
from signing_async.webhooks import Event, EventStatus, HandlerRetryPolicy, Inbox, StoredEvent, WebhookVerifier
from tests.webhooks.deliveries import SECRET, event_body, signed

AT_ONCE = HandlerRetryPolicy(max_attempts=3, base_delay=0, max_delay=0)


def delivery(name: str, signing: str | None = None, kind: str = "signing.completed") -> tuple[Event, bytes]:
    """Return an event and its body."""
    members = {} if signing is None else {"signing": {"id": signing}}
    body = event_body(name, **members).replace(b"signing.completed", kind.encode())
    return WebhookVerifier(SECRET).parse(body, headers=signed(body)), body


async def add(inbox: Inbox, name: str, signing: str | None = None, kind: str = "signing.completed") -> None:
    """Add an event that the inbox does not know."""
    assert await inbox.add(*delivery(name, signing, kind))


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


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition is true."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def fail(*_: object, **__: object) -> Any:
    """Fail as a store does that is locked."""
    raise InboxError("locked", transient=True)


def altered_store(path: Path, methods: dict[str, Any]) -> Any:
    """Return the store of a file; ``methods`` replace its own, and may change."""
    inner = Inbox(path).store

    class Altered:
        def __getattr__(self, name: str) -> Any:
            return methods.get(name) or getattr(inner, name)

    return Altered()
