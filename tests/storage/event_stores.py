"""Events for the tests of their stores."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime

from signing_async.webhooks import Event, EventClaim, EventFilter, EventStore, StoredEvent

RECEIVED = datetime(2031, 3, 31, 20, 29, 44, tzinfo=UTC)
ALL = EventFilter()


def delivery(
    name: str,
    signing: str | None = None,
    *,
    type: str = "signing.completed",
    received: datetime = RECEIVED,
    size: int = 0,
) -> tuple[Event, bytes]:
    """Return an event and its body."""
    payload = {"event": {"id": name, "type": type}, "padding": "x" * size}
    if signing is not None:
        payload["signing"] = {"id": signing}
    body = json.dumps(payload).encode()
    return StoredEvent(name, type, signing, body, received).event, body


async def add(store: EventStore, name: str, signing: str | None = None) -> bool:
    """Add an event."""
    return await store.add(*delivery(name, signing))


async def everything(store: EventStore, selection: EventFilter = ALL) -> list[StoredEvent]:
    """Return the selected events."""
    return [stored async for stored in store.select(selection)]


async def ids(store: EventStore, selection: EventFilter = ALL) -> list[str]:
    """Return the ids of the selected events."""
    return [stored.id for stored in await everything(store, selection)]


async def soon_claimed(store: EventStore) -> EventClaim:
    """Claim an event that must become free."""
    async with asyncio.timeout(20):
        while not (claims := await store.claim(1)):
            await asyncio.sleep(0.01)
    return claims[0]
