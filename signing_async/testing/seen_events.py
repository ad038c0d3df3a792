"""What every memory of seen webhook events has to hold, as tests that an implementation can run on itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from inspect import isawaitable
from typing import Protocol, TypeVar

import pytest

from ..webhooks import Claim, SeenEvents

__all__ = ["OpenSeenEvents", "SeenEventsConformance"]

T = TypeVar("T")

_SHORT = 0.05
_LONG = 600.0


class OpenSeenEvents(Protocol):
    """Opens the memory: each time another object, as another receiver would have it, on the same storage."""

    def __call__(self, *, ttl: float = ..., lease: float = ...) -> SeenEvents:
        """With so many seconds for a confirmed event to be remembered, and for a hand-off to end."""
        ...


async def _settled(value: T | Awaitable[T]) -> T:
    return await value if isawaitable(value) else value


async def _claim(seen: SeenEvents, event_id: str) -> Claim:
    return await _settled(seen.claim(event_id))


async def _confirm(seen: SeenEvents, event_id: str) -> None:
    await _settled(seen.confirm(event_id))


async def _release(seen: SeenEvents, event_id: str) -> None:
    await _settled(seen.release(event_id))


class SeenEventsConformance:
    """The promises of the `SeenEvents` protocol, by which a receiver takes every event, and none of them twice.

    Subclass it with a fixture ``open_seen`` that gives a function: each call, with ``ttl`` and ``lease`` in seconds,
    opens the memory once more, another object on the same storage, which is empty when a test begins. (What lives in
    one object gives that again where the settings are the same.) The tests are ``async`` and need pytest-asyncio. ::

        class TestMySeenEvents(SeenEventsConformance):
            @pytest.fixture
            def open_seen(self, tmp_path):
                return lambda ttl=60, lease=60: MySeenEvents(tmp_path / "seen", ttl=ttl, lease=lease)
    """

    pytestmark = pytest.mark.asyncio

    async def test_an_event_is_claimed_once_and_stays_confirmed(self, open_seen: OpenSeenEvents) -> None:
        """New, then pending for everybody else, then confirmed; other events do not matter."""
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

    async def test_a_released_event_is_new_again(self, open_seen: OpenSeenEvents) -> None:
        """After a failed hand-off the next delivery is handed over, by whoever gets it."""
        seen, other = (open_seen(ttl=_LONG, lease=_LONG) for _ in range(2))
        await _claim(seen, "a")
        await _release(seen, "a")
        assert await _claim(other, "a") is Claim.NEW
        assert await _claim(seen, "a") is Claim.PENDING

    async def test_a_confirmed_event_cannot_be_released(self, open_seen: OpenSeenEvents) -> None:
        """A late failure elsewhere does not undo what was acknowledged; nor does it harm what was never seen."""
        seen = open_seen(ttl=_LONG, lease=_LONG)
        await _claim(seen, "a")
        await _confirm(seen, "a")
        await _release(seen, "a")
        await _release(seen, "never seen")
        assert await _claim(seen, "a") is Claim.CONFIRMED
        assert await _claim(seen, "never seen") is Claim.NEW

    async def test_a_lease_ends(self, open_seen: OpenSeenEvents) -> None:
        """Who crashed between claim and hand-off holds the event only for so long."""
        seen, other = (open_seen(ttl=_LONG, lease=_SHORT) for _ in range(2))
        await _claim(seen, "a")
        await asyncio.sleep(2 * _SHORT)
        assert await _claim(other, "a") is Claim.NEW

    async def test_a_confirmation_counts_without_a_claim_and_after_the_lease(self, open_seen: OpenSeenEvents) -> None:
        """What was handed over was handed over, even when the claim was lost meanwhile."""
        seen = open_seen(ttl=_LONG, lease=_SHORT)
        await _claim(seen, "a")
        await asyncio.sleep(2 * _SHORT)
        await _confirm(seen, "a")
        await _confirm(seen, "b")
        assert await _claim(seen, "a") is Claim.CONFIRMED
        assert await _claim(seen, "b") is Claim.CONFIRMED

    async def test_what_is_too_old_is_forgotten(self, open_seen: OpenSeenEvents) -> None:
        """An id may come again when its time is over."""
        seen = open_seen(ttl=_SHORT, lease=_LONG)
        await _claim(seen, "a")
        await _confirm(seen, "a")
        await asyncio.sleep(2 * _SHORT)
        assert await _claim(seen, "a") is Claim.NEW

    async def test_of_many_claims_one_wins(self, open_seen: OpenSeenEvents) -> None:
        """Eight receivers that get the same fifty events at once hand each of them over once."""
        receivers = [open_seen(ttl=_LONG, lease=_LONG) for _ in range(8)]
        names = [f"event {number}" for number in range(50)]
        claims = await asyncio.gather(*(_claim(seen, name) for seen in receivers for name in names))
        assert claims.count(Claim.NEW) == 50
        assert claims.count(Claim.PENDING) == 350

    @pytest.mark.parametrize("event_id", ["", "Ünïcödé ✓ 漢字", "a b:c*?[d]\n\0e", "x" * 5000, "confirmed", "*"])
    async def test_any_text_is_an_id(self, open_seen: OpenSeenEvents, event_id: str) -> None:
        """What the sender calls its events is its own affair."""
        seen = open_seen(ttl=_LONG, lease=_LONG)
        assert await _claim(seen, event_id) is Claim.NEW
        assert await _claim(seen, event_id) is Claim.PENDING
        assert await _claim(seen, event_id + "2") is Claim.NEW
        await _confirm(seen, event_id)
        assert await _claim(seen, event_id) is Claim.CONFIRMED
