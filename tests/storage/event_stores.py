"""Conformance suites for event stores, which keep the events of an inbox."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest

from signing_async.errors import InboxError
from signing_async.webhooks.event import Event, parse_event
from signing_async.webhooks.event_store import EventClaim, EventFilter, EventStatus, EventStore, StoredEvent

__all__ = ["EventStoreConformance", "FencedEventStoreConformance", "OpenStore"]

OpenStore = Callable[[], EventStore]
"""Opens the same storage again, as another process would: a new object each time."""

_RECEIVED = datetime(2031, 3, 31, 20, 29, 44, tzinfo=UTC)
_ALL = EventFilter()
_LATER = timedelta(days=1)
_TIMEOUT = 20.0


class _ManagementConformance:
    """The part of `EventStoreConformance` about selecting, requeuing and purging stored events."""

    async def test_select_yields_the_matching_events_in_order_of_arrival(self, open_store: OpenStore) -> None:
        store = open_store()
        types = ["signing.sent", "recipient.signed", "recipient.declined", "Signing.sent", "recipient", "re%"]
        for number, kind in enumerate(types):
            event, body = delivery(f"e{5 - number}", type=kind, received=_RECEIVED + timedelta(hours=number))
            await store.add(event, body)
        (claim,) = await store.claim(1)
        await store.settle(claim, EventStatus.DEAD)
        for selection, expected in (
            (_ALL, "e5 e4 e3 e2 e1 e0"),
            (EventFilter(ids=["e0", "e3", "none"]), "e3 e0"),
            (EventFilter(ids=[]), ""),
            (EventFilter(status=EventStatus.DEAD), "e5"),
            (EventFilter(status=EventStatus.PENDING), "e4 e3 e2 e1 e0"),
            (EventFilter(type="signing.sent"), "e5"),
            (EventFilter(type="recipient.*"), "e4 e3"),
            (EventFilter(type="re%*"), "e0"),
            (EventFilter(type="*"), "e5 e4 e3 e2 e1 e0"),
            (EventFilter(since=_RECEIVED + timedelta(hours=1), until=_RECEIVED + timedelta(hours=3)), "e4 e3"),
            (EventFilter(type="recipient.*", ids=["e3"], status=EventStatus.PENDING), "e3"),
            (EventFilter(type="recipient.*", ids=["e5"]), ""),
        ):
            assert await ids(open_store(), selection) == expected.split(), selection

    async def test_select_pages_through_many_events(self, open_store: OpenStore) -> None:
        """A consumer may stop early."""
        store = open_store()
        names = [f"e{number}" for number in range(1200)]
        for start in range(0, 1200, 100):
            await asyncio.gather(*(add(store, name) for name in names[start : start + 100]))
        assert sorted(await ids(store)) == sorted(names)
        assert (await anext(store.select(_ALL))).id in names

    async def test_requeued_events_are_due_with_no_attempts_counted(self, open_store: OpenStore) -> None:
        """Whether handled, dropped, dead or postponed. Events that do not match the filter do not change."""
        store = open_store()
        for status in (EventStatus.HANDLED, EventStatus.DROPPED, EventStatus.DEAD):
            await add(store, status, f"s {status}")
            (claim,) = await store.claim(1)
            await store.settle(claim, status, "an error")
        await add(store, "postponed")
        (claim,) = await store.claim(1)
        await store.postpone(claim, 3600, "an error")
        assert await store.requeue(EventFilter(status=EventStatus.DEAD)) == 1
        (claim,) = await open_store().claim(5)
        assert (claim.stored.id, claim.stored.attempts) == ("dead", 1)
        assert (claim.stored.error, claim.stored.settled_at) == (None, None)
        assert await store.requeue(EventFilter(ids=["none"])) == 0
        assert await store.requeue(_ALL) == 3
        assert sorted(claim.stored.id for claim in await store.claim(5)) == ["dropped", "handled", "postponed"]

    async def test_requeued_event_waits_for_a_claimed_one_of_its_signing_and_precedes_the_rest(
        self, open_store: OpenStore
    ) -> None:
        store = open_store()
        for name in ("a1", "a2", "a3"):
            await add(store, name, "a")
        (first,) = await store.claim(1)
        await store.settle(first, EventStatus.DEAD)
        (second,) = await store.claim(1)
        assert await store.requeue(EventFilter(ids=["a1", "a2"])) == 1
        assert await store.claim(5) == []
        assert await store.settle(second, EventStatus.HANDLED)
        for name in ("a1", "a3"):
            (claim,) = await store.claim(5)
            assert claim.stored.id == name
            await store.settle(claim, EventStatus.HANDLED)

    async def test_refused_postponement_delays_no_other_event(self, open_store: OpenStore) -> None:
        store = open_store()
        await add(store, "a1", "a")
        await add(store, "a2", "a")
        (first,) = await store.claim(1)
        await store.settle(first, EventStatus.HANDLED)
        assert await store.postpone(first, 3600, None) is False
        (claim,) = await store.claim(5)
        assert claim.stored.id == "a2"

    async def test_postponed_event_waits_for_an_earlier_one_that_was_requeued(self, open_store: OpenStore) -> None:
        store = open_store()
        await add(store, "a1", "a")
        await add(store, "a2", "a")
        (first,) = await store.claim(1)
        await store.settle(first, EventStatus.DEAD)
        (second,) = await store.claim(1)
        await store.requeue(EventFilter(ids=["a1"]))
        await store.postpone(second, 3600, None)
        (claim,) = await store.claim(5)
        assert claim.stored.id == "a1"

    async def test_purge_forgets_the_bodies_of_handled_and_dropped_events_and_keeps_their_ids(
        self, open_store: OpenStore
    ) -> None:
        store = open_store()
        for status in (EventStatus.HANDLED, EventStatus.DROPPED, EventStatus.DEAD):
            await add(store, status)
            (claim,) = await store.claim(1)
            await store.settle(claim, status)
        await add(store, "pending")
        assert await store.purge(datetime.now(UTC) - _LATER) == 0
        assert await open_store().purge(datetime.now(UTC) + _LATER) == 2
        assert await store.purge(datetime.now(UTC) + _LATER) == 0
        kept = {stored.id: bool(stored.body) for stored in await everything(store)}
        assert kept == {"handled": False, "dropped": False, "dead": True, "pending": True}
        assert not await add(store, "handled")
        assert await store.requeue(EventFilter(ids=["handled", "dropped"])) == 0

    async def test_stats_count_the_events_and_name_the_oldest_pending_one(self, open_store: OpenStore) -> None:
        store = open_store()
        empty = await store.stats()
        assert (empty.counts, empty.oldest_pending) == (dict.fromkeys(EventStatus, 0), None)
        for number in range(4):
            event, body = delivery(f"e{number}", received=_RECEIVED + timedelta(hours=number))
            await store.add(event, body)
        for claim in await store.claim(2):
            await store.settle(claim, EventStatus.HANDLED)
        stats = await open_store().stats()
        assert stats.oldest_pending == _RECEIVED + timedelta(hours=2)
        assert stats.counts == {
            EventStatus.PENDING: 2,
            EventStatus.HANDLED: 2,
            EventStatus.DROPPED: 0,
            EventStatus.DEAD: 0,
        }


class _AddingConformance:
    """The part of `EventStoreConformance` about storing events."""

    async def test_added_event_is_claimed_with_all_its_fields(self, open_store: OpenStore) -> None:
        event, body = delivery("evt ☃ '\";--%s{table}$1", "sig ☃", type="signing.completed", size=200_000)
        assert await open_store().add(event, body)
        (claim,) = await open_store().claim(5)
        assert claim.stored == StoredEvent(event.id, event.type, event.signing_id, body, _RECEIVED, attempts=1)

    async def test_body_is_kept_to_the_byte(self, open_store: OpenStore) -> None:
        """The body may be encrypted, so it need not be text."""
        store = open_store()
        body = bytes(range(256)) * 4
        await store.add(delivery("a")[0], body)
        assert [stored.body async for stored in store.select(_ALL)] == [body]

    async def test_known_event_is_not_added_again(self, open_store: OpenStore) -> None:
        """Neither by another process nor after it was handled. Ids are distinct if any character differs."""
        store, other = open_store(), open_store()
        assert await add(store, "Event")
        assert [await add(other, name) for name in ("Event", "event", "Event ", "Eventé", "Evente\u0301")] == [
            False,
            True,
            True,
            True,
            True,
        ]
        (claim,) = await store.claim(1)
        assert await store.settle(claim, EventStatus.HANDLED)
        assert not await add(other, "Event")

    async def test_one_of_many_concurrent_adds_of_an_event_succeeds(self, open_store: OpenStore) -> None:
        stores = [open_store() for _ in range(4)]
        added = await asyncio.gather(*(add(store, f"e{number}") for number in range(10) for store in stores * 2))
        assert sum(added) == 10
        assert sorted(await ids(stores[0])) == sorted(f"e{number}" for number in range(10))

    async def test_event_that_the_store_refuses_does_not_fail_those_added_with_it(self, open_store: OpenStore) -> None:
        """The store may also accept such an event, or change its type."""
        store = open_store()
        events = [delivery(f"e{number}", "s") for number in range(5)]
        for number, kind in ((1, "a lone \ud800"), (3, "a \0")):
            events[number] = delivery(f"odd{number}", "s", type=kind)
        added = await asyncio.gather(*(store.add(*each) for each in events), return_exceptions=True)
        assert [added[number] for number in (0, 2, 4)] == [True] * 3
        assert all(each is True or isinstance(each, InboxError) for each in added)
        assert [name for name in await ids(store) if not name.startswith("odd")] == ["e0", "e2", "e4"]


class EventStoreConformance(_AddingConformance, _ManagementConformance):
    """Tests the promises of the `EventStore` protocol, which let an `Inbox` lose no event.

    Subclass it with a fixture ``open_store`` that returns a function. Each call of the function opens the same storage
    as a new object; the storage is empty when a test begins, and the fixture closes the objects. The tests need
    pytest-asyncio. ::

        class TestMyStore(EventStoreConformance):
            @pytest.fixture
            async def open_store(self, tmp_path):
                async with contextlib.AsyncExitStack() as opened:
                    def open_store():
                        store = MyStore(tmp_path / "inbox")
                        opened.push_async_callback(store.aclose)
                        return store
                    yield open_store
    """

    pytestmark: pytest.MarkDecorator = pytest.mark.asyncio

    # Claiming

    async def test_events_of_different_signings_are_claimed_in_order_of_arrival(self, open_store: OpenStore) -> None:
        store = open_store()
        for number in range(7):
            await add(store, f"e{number}", f"s{number}" if number % 2 else None)
        claims = await store.claim(4) + await open_store().claim(9)
        assert [claim.stored.id for claim in claims] == [f"e{number}" for number in range(7)]
        assert await store.claim(1) == []

    async def test_one_event_of_a_signing_is_claimed_at_a_time_in_order_of_arrival(self, open_store: OpenStore) -> None:
        store, other = open_store(), open_store()
        for name, signing in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("a3", "a"), ("b2", "b")):
            await add(store, name, signing)
        handled = []
        while claims := await store.claim(5):
            assert await other.claim(5) == []
            handled.append([claim.stored.id for claim in claims])
            for claim in claims:
                assert await store.settle(claim, EventStatus.HANDLED)
        assert handled == [["a1", "b1"], ["a2", "b2"], ["a3"]]

    async def test_concurrent_workers_claim_each_event_once_and_each_signing_in_order(
        self, open_store: OpenStore
    ) -> None:
        await asyncio.gather(*(add(open_store(), f"{n:02}", f"s{n % 5}" if n % 5 else None) for n in range(8)))
        for number in range(8, 60):
            await add(open_store(), f"{number:02}", f"s{number % 5}" if number % 5 else None)
        arrived = await ids(open_store())
        running: set[str] = set()
        handled: list[str] = []

        async def work(store: EventStore) -> None:
            while len(handled) < 60:
                for claim in await store.claim(3):
                    signing = claim.stored.signing_id
                    assert signing not in running
                    if signing is not None:
                        running.add(signing)
                    await asyncio.sleep(0)
                    running.discard(signing or "")
                    handled.append(claim.stored.id)
                    assert await store.settle(claim, EventStatus.HANDLED)
                await asyncio.sleep(0.001)

        async with asyncio.timeout(_TIMEOUT):
            await asyncio.gather(*(work(open_store()) for _ in range(4)))
        assert sorted(handled) == sorted(arrived)
        for signing in range(1, 5):
            of_signing = [name for name in arrived if int(name) % 5 == signing]
            assert [name for name in handled if name in of_signing] == of_signing

    async def test_cancelled_claim_leaves_the_event_free(self, open_store: OpenStore) -> None:
        store, other = open_store(), open_store()
        await add(store, "a", "s")
        for steps in range(8):
            claiming = asyncio.create_task(store.claim(1))
            for _ in range(steps):
                await asyncio.sleep(0)
            claiming.cancel()
            await asyncio.wait([claiming])
            # It may be empty: an earlier cancelled claim may take the event late, and give it back.
            for claim in [] if claiming.cancelled() else claiming.result():
                await store.release(claim)
            claim = await soon_claimed(other)
            assert claim.stored.attempts == 1
            await other.release(claim)

    # The end of an attempt

    @pytest.mark.parametrize("status", [EventStatus.HANDLED, EventStatus.DROPPED, EventStatus.DEAD])
    async def test_settled_event_is_not_claimed_again(self, open_store: OpenStore, status: EventStatus) -> None:
        """Its status, its error and the time are kept, and the next event of its signing can be claimed."""
        store = open_store()
        await add(store, "a1", "a")
        await add(store, "a2", "a")
        (claim,) = await store.claim(2)
        assert await store.settle(claim, status, "ValueError: ☃")
        (second,) = await open_store().claim(2)
        assert second.stored.id == "a2"
        first = (await everything(store))[0]
        assert (first.status, first.error, first.attempts, first.due_at) == (status, "ValueError: ☃", 1, None)
        assert first.settled_at is not None
        assert abs(first.settled_at - datetime.now(UTC)) < timedelta(hours=1)

    async def test_ended_claim_is_refused(self, open_store: OpenStore) -> None:
        """Whether or not the event was claimed again."""
        store, other = open_store(), open_store()
        await add(store, "a")
        (claim,) = await store.claim(1)
        assert await store.postpone(claim, 0, "first")
        for _ in range(2):
            before = await everything(store)
            assert not await store.settle(claim, EventStatus.HANDLED)
            assert not await store.postpone(claim, 60, "late")
            await store.release(claim)
            assert await everything(store) == before
            held = await other.claim(1)
        assert held == []

    async def test_postponed_event_is_due_after_its_delay_and_its_signing_waits(self, open_store: OpenStore) -> None:
        """Other signings do not wait."""
        store = open_store()
        for name, signing in (("a1", "a"), ("a2", "a"), ("b1", "b")):
            await add(store, name, signing)
        (first, other) = await store.claim(5)
        assert await store.settle(other, EventStatus.HANDLED)
        started = datetime.now(UTC)
        assert await store.postpone(first, 0.3, "TimeoutError")
        assert await open_store().claim(5) == []
        postponed = (await everything(open_store()))[0]
        assert (postponed.status, postponed.error, postponed.attempts) == (EventStatus.PENDING, "TimeoutError", 1)
        assert postponed.due_at is not None
        assert timedelta(hours=-1) < postponed.due_at - started < timedelta(hours=1)
        again = await soon_claimed(store)
        assert datetime.now(UTC) - started > timedelta(seconds=0.29)
        assert (again.stored.id, again.stored.attempts) == ("a1", 2)
        assert again.fence > first.fence
        assert await store.settle(again, EventStatus.HANDLED)
        assert (await soon_claimed(store)).stored.id == "a2"

    async def test_released_event_is_due_at_once_and_its_attempt_does_not_count(self, open_store: OpenStore) -> None:
        store = open_store()
        await add(store, "a1", "a")
        await add(store, "a2", "a")
        for _ in range(3):
            (claim,) = await store.claim(1)
            assert (claim.stored.id, claim.stored.attempts) == ("a1", 1)
            await store.release(claim)
        assert [stored.attempts for stored in await everything(store)] == [0, 0]

    async def test_attempt_that_is_postponed_without_being_counted_leaves_its_place_to_other_events(
        self, open_store: OpenStore
    ) -> None:
        """Even without a delay: events that became due earlier are claimed first."""
        store = open_store()
        for name, signing in (("a1", "a"), ("a2", "a"), ("b1", "b")):
            await add(store, name, signing)
        handled = []
        for _ in range(3):
            (claim,) = await store.claim(1)
            handled.append((claim.stored.id, claim.stored.attempts))
            if claim.stored.id == "a1":
                assert await store.postpone(claim, 0, "no key", counts=False)
            else:
                assert await store.settle(claim, EventStatus.HANDLED)
        assert handled == [("a1", 1), ("b1", 1), ("a1", 1)]
        waiting = (await everything(store))[0]
        assert (waiting.status, waiting.attempts, waiting.error) == (EventStatus.PENDING, 0, "no key")
        (claim,) = await store.claim(5)
        assert await store.postpone(claim, 3600, "no key", counts=False)
        assert await open_store().claim(5) == []

    # Waiting

    async def test_wait_returns_when_an_event_is_added(self, open_store: OpenStore) -> None:
        """By this object or by another process, during the wait or before it."""
        store = open_store()
        for adding in (store, open_store()):
            waiting = asyncio.create_task(store.wait(_TIMEOUT))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            started = time.monotonic()
            await add(adding, f"e{id(adding)}")
            await waiting
            await store.wait(_TIMEOUT)
            assert time.monotonic() - started < _TIMEOUT / 2
            (claim,) = await store.claim(1)
            await store.settle(claim, EventStatus.HANDLED)

    async def test_wait_returns_when_a_postponed_event_is_due_or_after_its_timeout(self, open_store: OpenStore) -> None:
        store = open_store()
        await add(store, "a")
        (claim,) = await store.claim(1)
        await store.postpone(claim, 0.2, None)
        started = time.monotonic()
        while not await store.claim(1):
            await store.wait(_TIMEOUT)
        assert time.monotonic() - started < _TIMEOUT / 2
        await store.wait(0.01)

    # Closing

    async def test_closing_releases_all_claims(self, open_store: OpenStore) -> None:
        """Stored events stay. A closed store raises; closing it again is harmless."""
        store, other = open_store(), open_store()
        for number in range(3):
            await add(store, f"e{number}", "s" if number else None)
        claims = await store.claim(5)
        assert len(claims) == 2
        await store.aclose()
        assert [claim.stored.id for claim in await other.claim(5)] == ["e0", "e1"]
        event, body = delivery("late")
        with pytest.raises(InboxError, match="closed"):
            await store.add(event, body)
        with pytest.raises(InboxError):
            await store.claim(1)
        await store.aclose()


class FencedEventStoreConformance:
    """Tests a store whose claims can expire while their holder lives, because the holder was paused or cut off.

    Besides ``open_store`` (see `EventStoreConformance`) it needs a fixture ``lapse``: an ``async`` function that takes
    a store and returns as soon as others can claim its events.
    """

    pytestmark: pytest.MarkDecorator = pytest.mark.asyncio

    async def test_former_holder_cannot_end_the_claim_after_a_takeover(
        self, open_store: OpenStore, lapse: Callable[[EventStore], Awaitable[None]]
    ) -> None:
        late, quick = open_store(), open_store()
        await add(late, "a", "s")
        (claim,) = await late.claim(1)
        await lapse(late)
        taken = await soon_claimed(quick)
        assert taken.stored.attempts == 2
        assert taken.fence > claim.fence
        before = await everything(quick)
        assert not await late.settle(claim, EventStatus.HANDLED)
        assert not await late.postpone(claim, 60, "late")
        await late.release(claim)
        assert await everything(quick) == before
        assert await open_store().claim(1) == []
        assert await quick.settle(taken, EventStatus.HANDLED)


def delivery(
    name: str,
    signing: str | None = None,
    *,
    type: str = "signing.completed",
    received: datetime = _RECEIVED,
    size: int = 0,
) -> tuple[Event, bytes]:
    """Return an event and its body."""
    payload = {"event": {"id": name, "type": type}, "padding": "x" * size}
    if signing is not None:
        payload["signing"] = {"id": signing}
    body = json.dumps(payload).encode()
    return parse_event(body, received), body


async def add(store: EventStore, name: str, signing: str | None = None) -> bool:
    """Add an event."""
    return await store.add(*delivery(name, signing))


async def everything(store: EventStore, selection: EventFilter = _ALL) -> list[StoredEvent]:
    """Return the selected events."""
    return [stored async for stored in store.select(selection)]


async def ids(store: EventStore, selection: EventFilter = _ALL) -> list[str]:
    """Return the ids of the selected events."""
    return [stored.id for stored in await everything(store, selection)]


async def soon_claimed(store: EventStore) -> EventClaim:
    """Claim an event that must become free."""
    async with asyncio.timeout(_TIMEOUT):
        while not (claims := await store.claim(1)):
            await asyncio.sleep(0.01)
    return claims[0]
