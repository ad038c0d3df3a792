"""The promises of `SeenEvents`, in memory, in SQLite and in Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from inspect import isawaitable
from pathlib import Path
from typing import Any

import pytest

from signing_async.redis import RedisSeenEvents
from signing_async.webhooks import Claim, MemorySeenEvents, SeenEvents, SQLiteSeenEvents

OpenSeen = Callable[..., SeenEvents]

SHORT, LONG = 0.05, 600.0


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def open_seen(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OpenSeen]:
    """Opens the same storage again, as another receiver would."""
    memory: list[MemorySeenEvents] = []
    url = request.getfixturevalue("redis").url if request.param == "redis" else ""
    async with contextlib.AsyncExitStack() as opened:

        def open_seen(*, ttl: float = LONG, lease: float = LONG) -> SeenEvents:
            if request.param == "memory":
                memory[:] = memory or [MemorySeenEvents(ttl=ttl, lease=lease)]
                return memory[0]
            if request.param == "sqlite":
                file = SQLiteSeenEvents(tmp_path / "seen.db", ttl=ttl, lease=lease)
                opened.callback(file.close)
                return file
            seen = RedisSeenEvents(url, prefix=request.node.name, timeout=30, ttl=ttl, lease=lease)
            opened.push_async_callback(seen.aclose)
            return seen

        yield open_seen


async def claim(seen: SeenEvents, event_id: str) -> Claim:
    """Claim with a method that may be plain or ``async``."""
    result: Any = seen.claim(event_id)
    found: Claim = await result if isawaitable(result) else result
    return found


async def end(seen: SeenEvents, how: str, event_id: str) -> None:
    """Confirm or release."""
    result: Any = getattr(seen, how)(event_id)
    if isawaitable(result):
        await result


@pytest.mark.parametrize("event_id", ["a", "", "Ünïcödé ✓ 漢字", "a b:c*?[d]\n\0e", "x" * 5000, "confirmed", "*"])
async def test_event_is_claimed_once_and_stays_confirmed(open_seen: OpenSeen, event_id: str) -> None:
    """It is new, then pending for all receivers, then confirmed. Other events are not affected."""
    seen, other = open_seen(), open_seen()
    assert seen.lease == LONG
    assert await claim(seen, event_id) is Claim.NEW
    for each in (seen, other):
        assert await claim(each, event_id) is Claim.PENDING
    assert await claim(other, event_id + "2") is Claim.NEW
    await end(seen, "confirm", event_id)
    await end(seen, "release", event_id)
    for each in (seen, other):
        assert await claim(each, event_id) is Claim.CONFIRMED
    assert await claim(seen, event_id + "2") is Claim.PENDING


async def test_released_event_is_new_again(open_seen: OpenSeen) -> None:
    """After a failed handler, any receiver may handle the next delivery. Releasing an unknown event is harmless."""
    seen, other = open_seen(), open_seen()
    await end(seen, "release", "a")
    await claim(seen, "a")
    await end(seen, "release", "a")
    assert await claim(other, "a") is Claim.NEW
    assert await claim(seen, "a") is Claim.PENDING


async def test_claim_expires_with_its_lease_and_a_confirmation_counts_without_it(open_seen: OpenSeen) -> None:
    """A receiver that crashed before its handler ended does not keep the event."""
    seen, other = open_seen(lease=SHORT), open_seen(lease=SHORT)
    await claim(seen, "a")
    await asyncio.sleep(2 * SHORT)
    assert await claim(other, "a") is Claim.NEW
    await asyncio.sleep(2 * SHORT)
    for name in ("a", "b"):
        await end(seen, "confirm", name)
        assert await claim(other, name) is Claim.CONFIRMED


async def test_event_is_forgotten_after_its_ttl(open_seen: OpenSeen) -> None:
    seen = open_seen(ttl=SHORT)
    await claim(seen, "a")
    await end(seen, "confirm", "a")
    await asyncio.sleep(2 * SHORT)
    assert await claim(seen, "a") is Claim.NEW


async def test_one_of_many_concurrent_claims_succeeds(open_seen: OpenSeen) -> None:
    """Eight receivers that get the same fifty events handle each once."""
    receivers = [open_seen() for _ in range(8)]
    claims = await asyncio.gather(*(claim(seen, f"event {n}") for seen in receivers for n in range(50)))
    assert (claims.count(Claim.NEW), claims.count(Claim.PENDING)) == (50, 350)
