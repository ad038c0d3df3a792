"""The events of an inbox in PostgreSQL: concurrent claimers, leases, and long backlogs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from unittest.mock import ANY

import pytest

from signing_async import ConfigurationError, InboxError
from signing_async.postgres import PostgresInbox
from signing_async.postgres.inbox import PostgresEventStore
from signing_async.webhooks import Event, HandlerRetryPolicy
from signing_async.webhooks import inbox as inbox_worker
from signing_async.webhooks.event_store import EventFilter, EventStatus, EventStore
from signing_async.webhooks.receiver import thread_loop
from tests.postgres.server import PostgresServer
from tests.storage.event_stores import (
    EventStoreConformance,
    FencedEventStoreConformance,
    add,
    delivery,
    everything,
    ids,
    soon_claimed,
)


class TestPostgresEventStore(EventStoreConformance, FencedEventStoreConformance):
    """It passes the suite."""

    @pytest.fixture
    async def open_store(self, dsn: str) -> AsyncIterator[Callable[[], EventStore]]:
        async with contextlib.AsyncExitStack() as opened:

            def open_store() -> EventStore:
                store = PostgresEventStore(dsn)
                opened.push_async_callback(store.aclose)
                return store

            yield open_store

    @pytest.fixture
    def lapse(self, postgres: PostgresServer, table: str) -> Any:
        async def lapse(store: EventStore) -> None:
            await postgres.execute(f"UPDATE {table} SET leased_until = now() - interval '1 s'")

        return lapse


# Concurrent workers


async def test_one_event_of_a_signing_is_claimed_by_workers_that_see_different_snapshots(
    postgres: PostgresServer, table: str, open_store: Callable[..., EventStore]
) -> None:
    """An earlier event is requeued while the claim of a later one is not committed yet."""
    one, two = (open_store(lease=60, timeout=20) for _ in range(2))
    await add(one, "a1", "a")
    await add(one, "a2", "a")
    (claim,) = await one.claim(1)
    await one.settle(claim, EventStatus.DEAD)
    await slow_down(postgres, table, "a2")
    claiming = asyncio.create_task(one.claim(1))
    await claim_under_way(postgres)
    assert await two.requeue(EventFilter(ids=["a1"])) == 1
    late = await two.claim(5)
    (claim,) = await claiming
    assert claim.stored.id == "a2"
    assert late == []
    await one.settle(claim, EventStatus.HANDLED)
    assert (await soon_claimed(two)).stored.id == "a1"


async def slow_down(postgres: PostgresServer, table: str, name: str) -> None:
    """Let the server take half a second over each claim of this event."""
    schema = table.partition(".")[0]
    await postgres.execute(
        f"CREATE FUNCTION {schema}.slow() RETURNS trigger LANGUAGE plpgsql"
        " AS $$ BEGIN PERFORM pg_sleep(0.4); RETURN NEW; END $$"
    )
    await postgres.execute(
        f"CREATE TRIGGER slow AFTER UPDATE ON {table} FOR EACH ROW"
        f" WHEN (NEW.id = '{name}' AND OLD.owner IS NULL AND NEW.owner IS NOT NULL) EXECUTE FUNCTION {schema}.slow()"
    )


async def claim_under_way(postgres: PostgresServer) -> None:
    """Wait until the server sleeps over a claim."""
    sleeping = "SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
    async with asyncio.timeout(20):
        while not await postgres.execute(sleeping):
            await asyncio.sleep(0.01)


# Leases


async def test_fence_of_a_claim_is_shown_until_the_claim_ends(open_store: Callable[..., EventStore]) -> None:
    """A released attempt is not counted, but the next one has another fence."""
    store = open_store()
    await add(store, "a")
    fences = set()
    for _ in range(2):
        (claim,) = await store.claim(1)
        assert [each.fence for each in await everything(store)] == [claim.stored.fence] == [claim.fence]
        fences.add(claim.fence)
        await store.release(claim)
        assert [each.fence for each in await everything(store)] == [None]
    assert len(fences) == 2


async def test_lease_is_renewed_until_the_claim_ends(open_store: Callable[[], EventStore]) -> None:
    one, two = open_store(), open_store()
    await add(one, "a1", "a")
    await add(one, "a2", "a")
    (claim,) = await one.claim(5)
    for _ in range(5):
        await asyncio.sleep(0.5)
        assert await two.claim(5) == []
    assert await one.settle(claim, EventStatus.HANDLED)
    assert (await soon_claimed(two)).stored.id == "a2"


async def test_event_that_kills_its_process_is_dead_after_its_attempts_and_takes_no_other_with_it(
    postgres: PostgresServer, table: str, open_store: Callable[..., EventStore]
) -> None:
    """The others are being handled whenever it kills the process. Each time the next one starts much later."""
    names = {"slow1", "slow2", "poison", "slow3"}
    store = open_store(lease=60, timeout=20)
    for name in names:
        await add(store, name, name)
    crashes: list[set[str]] = []
    async with asyncio.timeout(60):
        while len(crashes) < 4:
            claims = {claim.stored.id: claim for claim in await store.claim(8)}
            if "poison" in claims:
                crashes.append(set(claims))
                store = open_store(lease=60, timeout=20)
                held = ", ".join(f"'{name}'" for name in claims)
                await postgres.execute(f"UPDATE {table} SET leased_until = now() - interval '1 h' WHERE id IN ({held})")
            else:
                for claim in claims.values():
                    assert await store.settle(claim, EventStatus.HANDLED)
            await asyncio.sleep(0.01)
    assert crashes == [names, names, {"poison"}, {"poison"}]
    attempts = {each.id: each.attempts for each in await everything(store)}
    assert attempts == {"poison": 2, "slow1": 1, "slow2": 1, "slow3": 1}


async def test_all_claims_of_a_worker_end_with_its_last_lease_and_no_attempt_counts(
    postgres: PostgresServer, table: str, open_store: Callable[..., EventStore]
) -> None:
    one, two = (open_store(lease=60, timeout=20) for _ in range(2))
    for name in ("a", "b"):
        await add(one, name, name)
    assert len(await one.claim(2)) == 2
    await postgres.execute(f"UPDATE {table} SET leased_until = now() - interval '1 s' WHERE id = 'b'")
    assert await two.claim(5) == []
    await postgres.execute(f"UPDATE {table} SET leased_until = now() - interval '1 s'")
    assert [(claim.stored.id, claim.stored.attempts) for claim in await two.claim(5)] == [("a", 1), ("b", 1)]


# Data


async def test_many_events_are_requeued_and_purged_in_batches(
    postgres: PostgresServer, table: str, open_store: Callable[[], EventStore]
) -> None:
    store = open_store()
    assert await ids(store) == []
    await postgres.execute(
        f"INSERT INTO {table} (id, type, body, received_at, status, settled_at)"
        " SELECT 'e' || n, 't', 'x', now(), 'handled', now() FROM generate_series(1, 2500) AS n"
    )
    assert await store.requeue(EventFilter(type="t")) == 2500
    await postgres.execute(f"UPDATE {table} SET status = 'handled', settled_at = now()")
    assert await store.purge(datetime.now(UTC) + timedelta(days=1)) == 2500
    assert await store.requeue(EventFilter()) == 0


async def test_claims_read_few_rows_of_a_long_backlog(
    postgres: PostgresServer, table: str, open_store: Callable[..., EventStore]
) -> None:
    """Neither handled nor postponed events are read for a claim, nor all the events that are due."""

    async def rows_read() -> int:
        schema, _, name = table.partition(".")
        ((read,),) = await postgres.execute(
            "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables"
            f" WHERE schemaname = '{schema}' AND relname = '{name}'"
        )
        return int(read)

    store = open_store(lease=60, timeout=20)
    assert await ids(store) == []
    for status, due in (("handled", "now()"), ("pending", "now() + interval '1 h'"), ("pending", "now()")):
        await postgres.execute(
            f"INSERT INTO {table} (id, signing_id, type, body, received_at, status, due_at)"
            f" SELECT gen_random_uuid(), gen_random_uuid(), 't', 'x', now(), '{status}', {due}"
            " FROM generate_series(1, 20000) AS n"
        )
    # As the server does by itself within a minute.
    await postgres.execute(f"ANALYZE {table}")
    before = await rows_read()
    for _ in range(50):
        assert len(await store.claim(8)) == 8
    await store.aclose()
    # The server counts what a connection has read when the connection ends, or a second later.
    async with asyncio.timeout(60):
        while (read := await rows_read() - before) <= 400:
            await asyncio.sleep(0.05)
    # The store's own claims are read: 8 by the second call, 392 by the last one.
    assert read < 250_000


async def test_claims_are_quick_while_many_events_wait_for_a_postponed_one(
    postgres: PostgresServer, table: str, dsn: str
) -> None:
    """Once that is requeued and handled, the next one is due."""
    store = PostgresEventStore(dsn, timeout=20, lease=60)
    assert await ids(store) == []
    await postgres.execute(
        f"INSERT INTO {table} (id, signing_id, type, body, received_at)"
        " SELECT 'e' || n, 's', 't', 'x', now() FROM generate_series(1, 15000) AS n"
    )
    (claim,) = await store.claim(1)
    await store.postpone(claim, 3600, None)
    async with asyncio.timeout(20):
        for _ in range(300):
            assert await store.claim(1) == []
    await store.requeue(EventFilter(ids=["e1"]))
    for name in ("e1", "e2", "e3"):
        (claim,) = await store.claim(5)
        assert claim.stored.id == name
        await store.settle(claim, EventStatus.HANDLED)
    await store.aclose()


async def test_large_bodies_are_stored_together(open_store: Callable[..., EventStore]) -> None:
    store = open_store(lease=60, timeout=20)
    events = [delivery(f"e{number}", size=1_000_000) for number in range(20)]
    assert all(await asyncio.gather(*(store.add(*each) for each in events)))
    assert await ids(store) == [event.id for event, _ in events]


# Threads


async def test_threads_add_events_in_their_own_event_loop(dsn: str, open_store: Callable[[], EventStore]) -> None:
    store = PostgresEventStore(dsn)

    def add_from_thread(event: Event, body: bytes) -> bool:
        return asyncio.run_coroutine_threadsafe(store.add(event, body), thread_loop()).result()

    assert await asyncio.to_thread(add_from_thread, *delivery("first"))
    assert await ids(store) == ["first"]
    assert not await store.add(*delivery("first"))
    events = [delivery(f"e{number}") for number in range(40)]
    added = await asyncio.gather(*(asyncio.to_thread(add_from_thread, *each) for each in events + events))
    assert sum(added) == 40
    await store.aclose()
    assert len(await ids(open_store())) == 41
    with pytest.raises(InboxError, match="is closed") as caught:
        await asyncio.to_thread(add_from_thread, *delivery("late"))
    assert not caught.value.transient
    await store.aclose()


# Settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lease": 0}, "lease: must be a number above 0, got 0"),
        ({"lease": 5, "timeout": 2}, "lease: must be at least three times the timeout of 2 s, got 5"),
        ({"postgres": "sqlite:///inbox"}, "invalid DSN: must begin with postgresql://"),
        ({"postgres": None}, "postgres: must be a DSN or an asyncpg.Pool, got None"),
        ({"table": "Events"}, "table: must be a lower-case identifier"),
        ({"table": "t" * 51}, "table: must have at most 50 characters"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], words: str) -> None:
    known: dict[str, Any] = {"postgres": "postgresql://db/app"}
    with pytest.raises(ConfigurationError, match=f"^{words}"):
        PostgresEventStore(**known | settings)


async def test_unclosed_store_warns_when_collected(dsn: str) -> None:
    store = PostgresEventStore(dsn)
    await store.engine.create_table()
    pool = store.engine._pool
    with pytest.warns(ResourceWarning, match="PostgresEventStore.* was not closed"):
        del store
    pool.terminate()


# What the database refuses


async def test_event_that_the_database_refuses_fails_alone(latin1: str) -> None:
    async with contextlib.aclosing(PostgresEventStore(latin1, lease=60, timeout=20)) as store:
        names = ["e0", "☃", "e1", "é"]
        added = await asyncio.gather(*(add(store, name, "s") for name in names), return_exceptions=True)
        assert [added[number] for number in (0, 2, 3)] == [True] * 3
        assert isinstance(added[1], InboxError)
        assert (added[1].transient, added[1].client_wide) == (False, False)
        assert await ids(store) == ["e0", "e1", "é"]


async def test_text_of_an_error_that_the_database_refuses_blocks_no_other_event(
    latin1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_worker, "_PAUSE", 0.01)
    policy = HandlerRetryPolicy(max_attempts=2, base_delay=0, max_delay=0)
    async with PostgresInbox(latin1, lease=60, timeout=20, retry=policy) as inbox:

        @inbox.on("*")
        async def handle(event: Event) -> None:
            if event.id == "poison":
                raise ValueError("cannot parse ☃ or é")

        await inbox.add(*delivery("poison", "a"))
        for number in range(6):
            await inbox.add(*delivery(f"a{number}", "a"))
            await inbox.add(*delivery(f"b{number}", "b"))
        async with inbox.running(concurrency=2), asyncio.timeout(60):
            while (await inbox.stats()).counts[EventStatus.HANDLED] < 12:
                await asyncio.sleep(0.02)
        poison = await inbox.get("poison")
    assert poison is not None
    assert (poison.status, poison.attempts) == (EventStatus.DEAD, 2)
    assert poison.error == r"ValueError: cannot parse \u2603 or \xe9"


async def test_addition_ends_whatever_a_given_pool_raises() -> None:
    class Broken:
        def get_max_size(self) -> int:
            return 1

        async def acquire(self) -> None:
            raise RuntimeError("a mistake in the pool")

    async with contextlib.aclosing(PostgresEventStore(cast("Any", Broken()))) as store:
        with pytest.raises(RuntimeError, match="a mistake in the pool"):
            async with asyncio.timeout(20):
                await add(store, "a", "s")


async def test_event_whose_sender_has_gone_is_stored_with_the_others(open_store: Callable[..., EventStore]) -> None:
    store = open_store()
    adding = [asyncio.create_task(add(store, name)) for name in ("a", "b", "c")]
    await asyncio.sleep(0)
    adding[1].cancel()
    assert await asyncio.gather(*adding, return_exceptions=True) == [True, ANY, True]
    assert adding[1].cancelled()
    assert await ids(store) == ["a", "b", "c"]
