"""The promises of an `EventStore`, in SQLite and in PostgreSQL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from signing_async import InboxError
from signing_async.postgres import PostgresInbox
from signing_async.webhooks import EventClaim, EventFilter, EventStatus, EventStore, Inbox, StoredEvent
from tests.postgres.server import PostgresServer
from tests.storage.event_stores import ALL, RECEIVED, add, delivery, everything, ids, soon_claimed
from tests.storage.leases import leased_storage

OpenStore = Callable[[], EventStore]
LATER = timedelta(days=1)


@pytest.fixture(params=["sqlite", "postgres"])
async def storage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    """The storage of events, and the end of all leases."""
    async with leased_storage(request, tmp_path, Inbox, PostgresInbox, "signing_events") as found:
        yield found


@pytest.fixture
def open_store(storage: Any) -> OpenStore:
    """Open the storage."""
    return lambda: storage.open().store


async def settled(store: EventStore, name: str, status: EventStatus, signing: str | None = None) -> EventClaim:
    """Add an event, and end its first attempt."""
    await add(store, name, signing)
    (claim,) = await store.claim(1)
    assert await store.settle(claim, status, "an error")
    return claim


# Storing


async def test_added_event_is_claimed_with_all_its_fields(open_store: OpenStore) -> None:
    event, body = delivery("evt ☃ '\";--%s{table}$1", "sig ☃", size=200_000)
    assert await open_store().add(event, body)
    (claim,) = await open_store().claim(5)
    assert claim.stored == StoredEvent(event.id, event.type, event.signing_id, body, RECEIVED, attempts=1)


async def test_known_event_is_not_added_again(open_store: OpenStore) -> None:
    """Neither by another process nor after it was handled. Ids are distinct if any character differs."""
    store, other = open_store(), open_store()
    await settled(store, "Event", EventStatus.HANDLED)
    names = ("Event", "event", "Event ", "Eventé", "Evente\u0301")
    assert [await add(other, name) for name in names] == [False, True, True, True, True]
    stores = [store, other, open_store(), open_store()]
    added = await asyncio.gather(*(add(store, f"e{number}") for number in range(10) for store in stores * 2))
    assert sum(added) == 10


async def test_event_that_the_store_refuses_does_not_fail_those_added_with_it(open_store: OpenStore) -> None:
    store = open_store()
    events = [delivery(f"e{number}", "s") for number in range(5)]
    for number, kind in ((1, "a lone \ud800"), (3, "a \0")):
        events[number] = delivery(f"odd{number}", "s", type=kind)
    added = await asyncio.gather(*(store.add(*each) for each in events), return_exceptions=True)
    assert [added[number] for number in (0, 2, 4)] == [True] * 3
    assert all(each is True or isinstance(each, InboxError) for each in added)
    assert sorted(name for name in await ids(store) if not name.startswith("odd")) == ["e0", "e2", "e4"]


# Claiming


async def test_events_are_claimed_in_order_of_arrival_and_one_of_each_signing(open_store: OpenStore) -> None:
    store, other = open_store(), open_store()
    for name, signing in (("a1", "a"), ("a2", "a"), ("x", None), ("b1", "b"), ("y", None), ("b2", "b")):
        await add(store, name, signing)
    handled = []
    while claims := await store.claim(2) + await other.claim(9):
        assert await other.claim(5) == []
        handled.append([claim.stored.id for claim in claims])
        for number, claim in enumerate(claims):
            assert await (store if number < 2 else other).settle(claim, EventStatus.HANDLED)
    assert handled == [["a1", "x", "b1", "y"], ["a2", "b2"]]


async def test_concurrent_workers_claim_each_event_once_and_each_signing_in_order(open_store: OpenStore) -> None:
    for number in range(60):
        await add(open_store(), f"{number:02}", f"s{number % 5}" if number % 5 else None)
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

    async with asyncio.timeout(60):
        await asyncio.gather(*(work(open_store()) for _ in range(4)))
    assert sorted(handled) == [f"{number:02}" for number in range(60)]
    for signing in range(1, 5):
        of_signing = [name for name in handled if int(name) % 5 == signing]
        assert of_signing == sorted(of_signing)


@pytest.mark.parametrize("storage", ["postgres"], indirect=True)
async def test_one_event_of_a_signing_is_claimed_by_workers_that_see_different_snapshots(
    storage: Any, postgres: PostgresServer
) -> None:
    """An earlier event is requeued while the server takes 0.4 s over the claim of a later one."""
    one, two = storage.open().store, storage.open().store
    await settled(one, "a1", EventStatus.DEAD, "a")
    await add(one, "a2", "a")
    schema = storage.table.partition(".")[0]
    await postgres.execute(
        f"CREATE FUNCTION {schema}.slow() RETURNS trigger LANGUAGE plpgsql"
        " AS $$ BEGIN PERFORM pg_sleep(0.4); RETURN NEW; END $$"
    )
    await postgres.execute(
        f"CREATE TRIGGER slow AFTER UPDATE ON {storage.table} FOR EACH ROW"
        f" WHEN (NEW.id = 'a2' AND OLD.owner IS NULL AND NEW.owner IS NOT NULL) EXECUTE FUNCTION {schema}.slow()"
    )
    claiming = asyncio.create_task(one.claim(1))
    async with asyncio.timeout(20):
        while not await postgres.execute("SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep'"):
            await asyncio.sleep(0.01)
    assert await two.requeue(EventFilter(ids=["a1"])) == 1
    late = await two.claim(5)
    (claim,) = await claiming
    assert claim.stored.id == "a2"
    assert late == []
    await one.settle(claim, EventStatus.HANDLED)
    assert (await soon_claimed(two)).stored.id == "a1"


async def test_cancelled_claim_leaves_the_event_free(open_store: OpenStore) -> None:
    store, other = open_store(), open_store()
    await add(store, "a", "s")
    for steps in range(8):
        claiming = asyncio.create_task(store.claim(1))
        for _ in range(steps):
            await asyncio.sleep(0)
        claiming.cancel()
        await asyncio.wait([claiming])
        for claim in [] if claiming.cancelled() else claiming.result():
            await store.release(claim)
        claim = await soon_claimed(other)
        assert claim.stored.attempts == 1
        await other.release(claim)


async def test_claim_that_was_taken_over_or_ended_is_refused(storage: Any) -> None:
    """Another worker may have claimed the event again. An event shows its fence only while it is claimed."""
    late, quick = storage.open().store, storage.open().store
    await add(late, "a", "s")
    (claim,) = await late.claim(1)
    assert [each.fence for each in await everything(late)] == [claim.stored.fence] == [claim.fence]
    await storage.lapse()
    taken = await soon_claimed(quick)
    assert taken.stored.attempts == 2
    assert taken.fence > claim.fence

    async def refuses(store: EventStore, old: EventClaim) -> None:
        before = await everything(quick)
        assert not await store.settle(old, EventStatus.HANDLED)
        assert not await store.postpone(old, 60, "late")
        await store.release(old)
        assert await everything(quick) == before

    await refuses(late, claim)
    assert await storage.open().store.claim(1) == []
    assert await quick.postpone(taken, 0, "first")
    again: list[EventClaim] = []
    for _ in range(2):
        await refuses(late, claim)
        await refuses(quick, taken)
        again = again or await late.claim(1)
    assert await late.settle(again[0], EventStatus.HANDLED)


async def test_event_that_kills_its_process_is_claimed_alone_and_takes_no_other_with_it(
    storage: Any,
) -> None:
    """The others are being handled whenever it kills the process. Their attempts do not count.

    Once the event has failed without that, it is handled with others again.
    """
    names = {"slow1", "slow2", "poison", "slow3"}
    store = storage.open().store
    for name in names:
        await add(store, name, name)
    crashes: list[set[str]] = []
    async with asyncio.timeout(60):
        while len(crashes) < 4:
            claims = {claim.stored.id: claim for claim in await store.claim(8)}
            if "poison" in claims:
                crashes.append(set(claims))
                store = storage.open().store
                await storage.lapse()
            else:
                for claim in claims.values():
                    assert await store.settle(claim, EventStatus.HANDLED)
    assert crashes == [names, names, {"poison"}, {"poison"}]
    attempts = {each.id: each.attempts for each in await everything(store)}
    assert attempts == {"poison": 2, "slow1": 1, "slow2": 1, "slow3": 1}
    (alone,) = await store.claim(8)
    await add(store, "other", "b")
    assert await store.claim(8) == []
    assert await store.postpone(alone, 0, "failed")
    assert {claim.stored.id for claim in await store.claim(8)} == {"poison", "other"}


# The end of an attempt


async def test_settled_event_is_not_claimed_again(open_store: OpenStore) -> None:
    """Its status, its error and the time are kept, and the next event of its signing can be claimed."""
    store = open_store()
    await add(store, "a1", "a")
    await add(store, "a2", "a")
    (claim,) = await store.claim(2)
    assert await store.settle(claim, EventStatus.DEAD, "ValueError: ☃")
    (second,) = await open_store().claim(2)
    assert second.stored.id == "a2"
    first = (await everything(store))[0]
    assert (first.status, first.error, first.attempts, first.due_at) == (EventStatus.DEAD, "ValueError: ☃", 1, None)
    assert first.settled_at is not None
    assert abs(first.settled_at - datetime.now(UTC)) < timedelta(hours=1)


async def test_postponed_event_is_due_after_its_delay_and_its_signing_waits(open_store: OpenStore) -> None:
    """Other signings do not wait."""
    store = open_store()
    for name, signing in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        await add(store, name, signing)
    (first, other) = await store.claim(5)
    assert await store.settle(other, EventStatus.HANDLED)
    started = datetime.now(UTC)
    assert await store.postpone(first, 1, "TimeoutError")
    assert await open_store().claim(5) == []
    postponed = (await everything(open_store()))[0]
    assert (postponed.status, postponed.error, postponed.attempts) == (EventStatus.PENDING, "TimeoutError", 1)
    assert postponed.due_at is not None
    assert timedelta(hours=-1) < postponed.due_at - started < timedelta(hours=1)
    again = await soon_claimed(store)
    assert datetime.now(UTC) - started > timedelta(seconds=0.9)
    assert (again.stored.id, again.stored.attempts) == ("a1", 2)
    assert again.fence > first.fence
    assert await store.settle(again, EventStatus.HANDLED)
    assert (await soon_claimed(store)).stored.id == "a2"


async def test_released_event_is_due_at_once_and_its_attempt_does_not_count(open_store: OpenStore) -> None:
    store = open_store()
    await add(store, "a1", "a")
    await add(store, "a2", "a")
    for _ in range(3):
        (claim,) = await store.claim(1)
        assert (claim.stored.id, claim.stored.attempts) == ("a1", 1)
        await store.release(claim)
    assert [stored.attempts for stored in await everything(store)] == [0, 0]


async def test_wait_returns_when_an_event_is_added_or_after_its_timeout(open_store: OpenStore) -> None:
    """By this object or by another process, during the wait or before it."""
    store = open_store()
    for adding in (store, open_store()):
        waiting = asyncio.create_task(store.wait(60))
        await asyncio.sleep(0.01)
        started = time.monotonic()
        await add(adding, f"e{id(adding)}")
        await waiting
        await store.wait(60)
        assert time.monotonic() - started < 30
        await store.settle(await soon_claimed(store), EventStatus.HANDLED)
    await store.wait(0.01)


async def test_closing_releases_all_claims(open_store: OpenStore) -> None:
    """Stored events stay. A closed store raises; closing it again is harmless."""
    store, other = open_store(), open_store()
    for number in range(3):
        await add(store, f"e{number}", "s" if number else None)
    assert len(await store.claim(5)) == 2
    await store.aclose()
    assert [claim.stored.id for claim in await other.claim(5)] == ["e0", "e1"]
    calls: list[Callable[[], Awaitable[Any]]] = [lambda: add(store, "late"), lambda: store.claim(1)]
    for call in calls:
        with pytest.raises(InboxError, match="closed") as caught:
            await call()
        assert not caught.value.transient
    await store.aclose()


# Managing


async def test_select_yields_the_matching_events_in_order_of_arrival(open_store: OpenStore) -> None:
    store = open_store()
    types = ["signing.sent", "recipient.signed", "recipient.declined", "Signing.sent", "recipient", "re%"]
    for number, kind in enumerate(types):
        await store.add(*delivery(f"e{5 - number}", type=kind, received=RECEIVED + timedelta(hours=number)))
    (claim,) = await store.claim(1)
    await store.settle(claim, EventStatus.DEAD)
    for selection, expected in (
        (ALL, "e5 e4 e3 e2 e1 e0"),
        (EventFilter(ids=["e0", "e3", "none"]), "e3 e0"),
        (EventFilter(ids=[]), ""),
        (EventFilter(status=EventStatus.DEAD), "e5"),
        (EventFilter(type="signing.sent"), "e5"),
        (EventFilter(type="recipient.*"), "e4 e3"),
        (EventFilter(type="re%*"), "e0"),
        (EventFilter(type="*"), "e5 e4 e3 e2 e1 e0"),
        (EventFilter(since=RECEIVED + timedelta(hours=1), until=RECEIVED + timedelta(hours=3)), "e4 e3"),
        (EventFilter(type="recipient.*", ids=["e3"], status=EventStatus.PENDING), "e3"),
    ):
        assert await ids(open_store(), selection) == expected.split(), selection


async def test_many_events_are_selected_requeued_and_purged_in_pages(open_store: OpenStore) -> None:
    store = open_store()
    names = [f"e{number:04}" for number in range(600)]
    for start in range(0, 600, 100):
        await asyncio.gather(*(add(store, name) for name in names[start : start + 100]))
    assert sorted(await ids(store)) == names
    for status in (EventStatus.DROPPED, EventStatus.HANDLED):
        claims = await store.claim(600)
        await asyncio.gather(*(store.settle(claim, status) for claim in claims))
        if status is EventStatus.DROPPED:
            assert await store.requeue(EventFilter(status=status)) == 600
    assert await store.purge(datetime.now(UTC) + LATER) == 600


async def test_requeued_events_are_due_with_no_attempts_counted(open_store: OpenStore) -> None:
    """Whether handled, dropped, dead or postponed. Events that do not match the filter do not change."""
    store = open_store()
    for status in (EventStatus.HANDLED, EventStatus.DROPPED, EventStatus.DEAD):
        await settled(store, status, status, f"s {status}")
    await add(store, "postponed")
    (claim,) = await store.claim(1)
    await store.postpone(claim, 3600, "an error")
    assert await store.requeue(EventFilter(status=EventStatus.DEAD)) == 1
    (claim,) = await open_store().claim(5)
    assert (claim.stored.id, claim.stored.attempts) == ("dead", 1)
    assert (claim.stored.error, claim.stored.settled_at) == (None, None)
    assert await store.requeue(ALL) == 3
    assert sorted(claim.stored.id for claim in await store.claim(5)) == ["dropped", "handled", "postponed"]


async def test_requeued_event_waits_for_a_claimed_one_of_its_signing_and_precedes_the_rest(
    open_store: OpenStore,
) -> None:
    store = open_store()
    await settled(store, "a1", EventStatus.DEAD, "a")
    for name in ("a2", "a3"):
        await add(store, name, "a")
    (second,) = await store.claim(1)
    assert await store.requeue(EventFilter(ids=["a1", "a2"])) == 1
    assert await store.claim(5) == []
    await store.postpone(second, 3600, None)
    for names in (["a1"], ["a2", "a3"]):
        for name in names:
            (claim,) = await store.claim(5)
            assert claim.stored.id == name
            await store.settle(claim, EventStatus.HANDLED)
        assert await store.requeue(EventFilter(ids=["a2"])) == 1


async def test_purge_forgets_the_bodies_of_handled_and_dropped_events_and_keeps_their_ids(
    open_store: OpenStore,
) -> None:
    """The statistics count the events, and name the oldest pending one."""
    store = open_store()
    empty = await store.stats()
    assert (empty.counts, empty.oldest_pending) == (dict.fromkeys(EventStatus, 0), None)
    for status in (EventStatus.HANDLED, EventStatus.DROPPED, EventStatus.DEAD):
        await settled(store, status, status)
    for number, name in enumerate(("pending", "later")):
        await store.add(*delivery(name, received=RECEIVED + timedelta(hours=number + 1)))
    stats = await open_store().stats()
    assert stats.oldest_pending == RECEIVED + timedelta(hours=1)
    assert stats.counts == {**dict.fromkeys(EventStatus, 1), EventStatus.PENDING: 2}
    assert await store.purge(datetime.now(UTC) - LATER) == 0
    assert await open_store().purge(datetime.now(UTC) + LATER) == 2
    kept = {stored.id: bool(stored.body) for stored in await everything(store)}
    assert kept == {"handled": False, "dropped": False, "dead": True, "pending": True, "later": True}
    assert not await add(store, "handled")
    assert await store.requeue(EventFilter(ids=["handled", "dropped"])) == 0


async def test_event_that_must_be_claimed_alone_does_not_block_an_earlier_one_of_its_signing(storage: Any) -> None:
    store = storage.open().store
    await settled(store, "first", EventStatus.DEAD, "a")
    await add(store, "poison", "a")
    for _ in range(2):
        assert len(await store.claim(8)) == 1
        store = storage.open().store
        await storage.lapse()
    await store.claim(0)
    assert await store.requeue(EventFilter(ids=["first"])) == 1
    (first,) = await store.claim(8)
    assert first.stored.id == "first"
    assert await store.settle(first, EventStatus.HANDLED)
    assert [claim.stored.id for claim in await store.claim(8)] == ["poison"]
