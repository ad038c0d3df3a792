"""A conformance suite for the deduplication of webhook events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from inspect import isawaitable
from typing import Protocol, TypeVar

import pytest

from signing_async.webhooks import Claim, SeenEvents

__all__ = ["OpenSeenEvents", "SeenEventsConformance"]

T = TypeVar("T")

_SHORT = 0.05
_LONG = 600.0


class OpenSeenEvents(Protocol):
    """Opens the same storage again, as another receiver would: a new object each time."""

    def __call__(self, *, ttl: float = ..., lease: float = ...) -> SeenEvents:
        """Return an object that remembers confirmed events for ``ttl`` seconds, and claims for ``lease`` seconds."""
        ...


async def _awaited(value: T | Awaitable[T]) -> T:
    return await value if isawaitable(value) else value


async def _claim(seen: SeenEvents, event_id: str) -> Claim:
    return await _awaited(seen.claim(event_id))


async def _confirm(seen: SeenEvents, event_id: str) -> None:
    await _awaited(seen.confirm(event_id))


async def _release(seen: SeenEvents, event_id: str) -> None:
    await _awaited(seen.release(event_id))


class SeenEventsConformance:
    """Tests the promises of the `SeenEvents` protocol, which let a receiver handle every event, and none twice.

    Subclass it with a fixture ``open_seen`` that returns a function. Each call of the function, with ``ttl`` and
    ``lease`` in seconds, opens the same storage as a new object; the storage is empty when a test begins. (If the
    storage is one object in memory, return that object again for the same settings.) The tests need pytest-asyncio. ::

        class TestMySeenEvents(SeenEventsConformance):
            @pytest.fixture
            def open_seen(self, tmp_path):
                return lambda ttl=60, lease=60: MySeenEvents(tmp_path / "seen", ttl=ttl, lease=lease)
    """

    pytestmark: pytest.MarkDecorator = pytest.mark.asyncio

    async def test_event_is_claimed_once_and_stays_confirmed(self, open_seen: OpenSeenEvents) -> None:
        """It is new, then pending for all receivers, then confirmed. Other events are not affected."""
        seen, other = (open_seen(ttl=_LONG, lease=_LONG) for _ in range(2))
        assert seen.lease == _LONG
        assert await _claim(seen, "a") is Claim.NEW
        assert await _claim(seen, "a") is Claim.PENDING
        assert await _claim(other, "a") is Claim.PENDING
        assert await _claim(other, "b") is Claim.NEW
        await _confirm(seen, "a")
        assert await _claim(seen, "a") is Claim.CONFIRMED
        assert await _claim(other, "a") is Claim.CONFIRMED
        assert await _claim(seen, "b") is Claim.PENDING

    async def test_released_event_is_new_again(self, open_seen: OpenSeenEvents) -> None:
        """After a failed handler, any receiver may handle the next delivery."""
        seen, other = (open_seen(ttl=_LONG, lease=_LONG) for _ in range(2))
        await _claim(seen, "a")
        await _release(seen, "a")
        assert await _claim(other, "a") is Claim.NEW
        assert await _claim(seen, "a") is Claim.PENDING

    async def test_confirmed_event_cannot_be_released(self, open_seen: OpenSeenEvents) -> None:
        """A receiver that fails later changes nothing. Releasing an unknown event is harmless."""
        seen = open_seen(ttl=_LONG, lease=_LONG)
        await _claim(seen, "a")
        await _confirm(seen, "a")
        await _release(seen, "a")
        await _release(seen, "never seen")
        assert await _claim(seen, "a") is Claim.CONFIRMED
        assert await _claim(seen, "never seen") is Claim.NEW

    async def test_claim_expires_with_its_lease(self, open_seen: OpenSeenEvents) -> None:
        """A receiver that crashed before its handler ended does not keep the event."""
        seen, other = (open_seen(ttl=_LONG, lease=_SHORT) for _ in range(2))
        await _claim(seen, "a")
        await asyncio.sleep(2 * _SHORT)
        assert await _claim(other, "a") is Claim.NEW

    async def test_confirmation_counts_without_a_claim_and_after_the_lease(self, open_seen: OpenSeenEvents) -> None:
        """The event was handled, even if the claim was lost meanwhile."""
        seen = open_seen(ttl=_LONG, lease=_SHORT)
        await _claim(seen, "a")
        await asyncio.sleep(2 * _SHORT)
        await _confirm(seen, "a")
        await _confirm(seen, "b")
        assert await _claim(seen, "a") is Claim.CONFIRMED
        assert await _claim(seen, "b") is Claim.CONFIRMED

    async def test_event_is_forgotten_after_its_ttl(self, open_seen: OpenSeenEvents) -> None:
        seen = open_seen(ttl=_SHORT, lease=_LONG)
        await _claim(seen, "a")
        await _confirm(seen, "a")
        await asyncio.sleep(2 * _SHORT)
        assert await _claim(seen, "a") is Claim.NEW

    async def test_one_of_many_concurrent_claims_succeeds(self, open_seen: OpenSeenEvents) -> None:
        """Eight receivers that get the same fifty events handle each once."""
        receivers = [open_seen(ttl=_LONG, lease=_LONG) for _ in range(8)]
        names = [f"event {number}" for number in range(50)]
        claims = await asyncio.gather(*(_claim(seen, name) for seen in receivers for name in names))
        assert claims.count(Claim.NEW) == 50
        assert claims.count(Claim.PENDING) == 350

    @pytest.mark.parametrize("event_id", ["", "Ünïcödé ✓ 漢字", "a b:c*?[d]\n\0e", "x" * 5000, "confirmed", "*"])
    async def test_any_string_is_an_event_id(self, open_seen: OpenSeenEvents, event_id: str) -> None:
        seen = open_seen(ttl=_LONG, lease=_LONG)
        assert await _claim(seen, event_id) is Claim.NEW
        assert await _claim(seen, event_id) is Claim.PENDING
        assert await _claim(seen, event_id + "2") is Claim.NEW
        await _confirm(seen, event_id)
        assert await _claim(seen, event_id) is Claim.CONFIRMED
