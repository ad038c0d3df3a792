"""The events of an inbox in PostgreSQL: leases, concurrent claimers, notifications, and outages."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import ANY
from urllib.parse import urlsplit

import asyncpg  # type: ignore[import-untyped]  # it is typed, but has no py.typed marker
import pytest

from signing_async import ConfigurationError, InboxError
from signing_async.postgres.event_store import PostgresEventStore
from signing_async.testing import EventStoreConformance, FencedEventStoreConformance
from signing_async.testing.event_stores import add, delivery, everything, ids, soon_claimed
from signing_async.webhooks.event_store import EventFilter, EventStatus, EventStore
from tests.postgres.server import PASSWORD, PostgresServer
from tests.redis.server import slow_way


@pytest.fixture
async def dsn(postgres: PostgresServer) -> str:
    """An empty schema."""
    return await postgres.new_schema()


@pytest.fixture
def table(dsn: str) -> str:
    """The table of the events, with its schema."""
    return f"{dsn.rpartition('=')[2]}.signing_events"


@pytest.fixture
async def open_store(dsn: str) -> AsyncIterator[Callable[[], EventStore]]:
    """Open stores with short leases, and close them in the end."""
    async with contextlib.AsyncExitStack() as opened:

        def open_store(**settings: float) -> EventStore:
            store = PostgresEventStore(dsn, **{"lease": 1.5, "timeout": 0.5, **settings})
            opened.push_async_callback(store.aclose)
            return store

        yield open_store


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


async def test_event_whose_sender_has_gone_is_stored_with_the_others(open_store: Callable[..., EventStore]) -> None:
    store = open_store()
    adding = [asyncio.create_task(add(store, name)) for name in ("a", "b", "c")]
    await asyncio.sleep(0)
    adding[1].cancel()
    assert await asyncio.gather(*adding, return_exceptions=True) == [True, ANY, True]
    assert adding[1].cancelled()
    assert await ids(store) == ["a", "b", "c"]


async def test_workers_claim_different_events_without_waiting_for_each_other(
    postgres: PostgresServer, table: str, open_store: Callable[..., EventStore]
) -> None:
    one, two = (open_store(lease=60, timeout=20) for _ in range(2))
    for name in ("e1", "e2"):
        await add(one, name)
    await slow_down(postgres, table, "e1")
    claiming = asyncio.create_task(one.claim(1))
    await claim_under_way(postgres)
    assert [claim.stored.id for claim in await two.claim(5)] == ["e2"]
    assert not claiming.done()
    assert [claim.stored.id for claim in await claiming] == ["e1"]


# Leases


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


async def test_expired_claim_is_taken_over_before_an_earlier_event_that_was_requeued(
    postgres: PostgresServer, table: str, open_store: Callable[[], EventStore]
) -> None:
    one, two = open_store(), open_store()
    for name in ("a1", "a2"):
        await add(one, name, "a")
    (claim,) = await one.claim(1)
    await one.settle(claim, EventStatus.DEAD)
    await one.claim(1)
    await one.requeue(EventFilter(ids=["a1"]))
    await postgres.execute(f"UPDATE {table} SET leased_until = now() - interval '1 s' WHERE owner IS NOT NULL")
    claim = await soon_claimed(two)
    assert claim.stored.id == "a2"
    assert await two.settle(claim, EventStatus.HANDLED)
    assert (await soon_claimed(two)).stored.id == "a1"


# Connections


async def test_add_claim_and_settle_are_repeated_after_their_responses_were_lost(
    postgres: PostgresServer, table: str, open_store: Callable[[], EventStore], dsn: str
) -> None:
    """A repeated claim counts one attempt, and a repeated settlement is no lost claim."""
    async with lossy(postgres, dsn) as (store, lose_response):
        await store.create_table()
        lose_response()
        await add(store, "a", "s")
        lose_response()
        (claim,) = await store.claim(5)
        assert (claim.stored.attempts, claim.fence) == (1, 2)
        assert await store.claim(5) == []
        lose_response()
        assert await store.settle(claim, EventStatus.HANDLED)
        assert await open_store().claim(5) == []


async def test_claim_that_failed_after_it_took_effect_is_returned_by_the_next_one(
    postgres: PostgresServer, dsn: str
) -> None:
    async with lossy(postgres, dsn) as (store, lose_response):
        await add(store, "a", "s")
        lose_response(ValueError("the response is lost"))
        with pytest.raises(InboxError, match="the response is lost"):
            await store.claim(5)
        (claim,) = await store.claim(5)
        assert claim.stored.attempts == 1
        assert await store.claim(5) == []
        assert await store.settle(claim, EventStatus.HANDLED)


async def test_claim_of_a_cancelled_caller_that_cannot_be_released_is_returned_by_the_next_one(
    postgres: PostgresServer, table: str, open_store: Callable[[], EventStore]
) -> None:
    store = open_store()
    await add(store, "a", "s")
    schema = table.partition(".")[0]
    await postgres.execute(
        f"CREATE FUNCTION {schema}.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no release'; END $$"
    )
    await postgres.execute(
        f"CREATE TRIGGER fail BEFORE UPDATE ON {table} FOR EACH ROW"
        f" WHEN (NEW.owner IS NULL) EXECUTE FUNCTION {schema}.fail()"
    )
    claiming = asyncio.create_task(store.claim(5))
    await asyncio.sleep(0)
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    assert (await soon_claimed(store)).stored.attempts == 1
    assert await store.claim(5) == []


async def test_expired_claim_is_not_claimed_again_by_its_own_holder(
    postgres: PostgresServer, table: str, open_store: Callable[[], EventStore]
) -> None:
    """Its handler is still running, and its lease is renewed."""
    one, two = open_store(), open_store()
    await add(one, "a", "s")
    (claim,) = await one.claim(1)
    await postgres.execute(f"UPDATE {table} SET leased_until = now() - interval '1 s'")
    assert await one.claim(1) == []
    async with asyncio.timeout(20):
        while not await postgres.execute(f"SELECT FROM {table} WHERE leased_until > now()"):
            await asyncio.sleep(0.02)
    assert await two.claim(1) == []
    assert await one.settle(claim, EventStatus.HANDLED)


@contextlib.asynccontextmanager
async def lossy(postgres: PostgresServer, dsn: str) -> AsyncIterator[tuple[PostgresEventStore, Callable[..., None]]]:
    """Open a store, and yield it with a function after which the server's next result does not reach it."""
    failure: Exception | None = None

    class Losing:
        """A pool whose connections break after the next statement."""

        def __init__(self, pool: Any) -> None:
            self._pool = pool

        def __getattr__(self, name: str) -> Any:
            return getattr(self._pool, name)

        async def acquire(self, *, timeout: float | None = None) -> Any:
            return Connection(await self._pool.acquire(timeout=timeout))

        async def release(self, connection: Any, *, timeout: float | None = None) -> None:
            await self._pool.release(connection.real, timeout=timeout)

    class Connection:
        def __init__(self, real: Any) -> None:
            self.real = real

        def __getattr__(self, name: str) -> Any:
            method = getattr(self.real, name)
            if name not in ("fetch", "fetchval"):
                return method

            async def call(*arguments: Any) -> Any:
                nonlocal failure
                result = await method(*arguments)
                if failure is not None:
                    lost, failure = failure, None
                    raise lost
                return result

            return call

    def lose(error: Exception | None = None) -> None:
        nonlocal failure
        failure = error or ConnectionResetError("the response is lost")

    async with asyncpg.create_pool(dsn, min_size=0, max_size=3) as pool:
        store = PostgresEventStore(Losing(pool), lease=60)
        yield store, lose
        await store.aclose()


async def test_store_survives_a_restart_of_the_server(
    postgres: PostgresServer, open_store: Callable[[], EventStore]
) -> None:
    """A held claim stays held, and the notifications come back."""
    one, two = open_store(), open_store()
    await add(one, "a", "s")
    (claim,) = await one.claim(1)
    await listening(postgres, two)
    with postgres.down():
        pass
    assert await one.settle(claim, EventStatus.HANDLED)
    await listening(postgres, two)
    await add(one, "b")
    assert (await soon_claimed(two)).stored.id == "b"


async def listening(postgres: PostgresServer, store: EventStore) -> None:
    """Wait until the store is listening."""
    async with asyncio.timeout(20):
        while not await postgres.execute("SELECT FROM pg_stat_activity WHERE query LIKE 'LISTEN %'"):
            await store.wait(0.01)


async def test_terminated_listener_connection_is_replaced_and_meanwhile_the_store_polls(
    postgres: PostgresServer, open_store: Callable[[], EventStore]
) -> None:
    one, two = open_store(), open_store()
    await listening(postgres, two)
    await postgres.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN %'")
    await add(one, "a")
    async with asyncio.timeout(10):
        while not await two.claim(1):
            await two.wait(60)
    await listening(postgres, two)


async def test_worker_without_notifications_polls(dsn: str) -> None:
    """A pool with one connection has none to spare for them."""
    async with asyncpg.create_pool(dsn, min_size=0, max_size=1) as pool:
        store = PostgresEventStore(pool)
        waiting = asyncio.create_task(store.wait(60))
        await add(store, "a")
        async with asyncio.timeout(10):
            await waiting
        assert len(await store.claim(1)) == 1
        await store.aclose()
        assert await pool.fetchval("SELECT count(*) FROM signing_events") == 1


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_every_operation_fails_in_time_during_an_outage(
    how: str, postgres: PostgresServer, open_store: Callable[[], EventStore]
) -> None:
    """The error shows no secret."""
    store = open_store()
    for name in ("a", "b", "c"):
        await add(store, name)
    a, b, c = await store.claim(5)
    with postgres.frozen() if how == "stopped" else postgres.down():
        calls: list[Callable[[], Any]] = [
            lambda: add(store, "d"),
            lambda: store.claim(5),
            lambda: store.settle(a, EventStatus.HANDLED),
            lambda: store.postpone(b, 1, None),
            lambda: store.release(c),
            lambda: everything(store),
            lambda: store.requeue(EventFilter()),
            lambda: store.purge(datetime.now(UTC)),
            store.stats,
        ]
        for call in calls:
            async with asyncio.timeout(10):
                with pytest.raises(InboxError, match=r"^PostgreSQL at .*, for 0.5 s$") as caught:
                    await call()
            assert caught.value.transient
            assert PASSWORD not in "".join(traceback.format_exception(caught.value))
    assert await store.settle(a, EventStatus.HANDLED)
    assert await store.postpone(b, 0, None)
    await store.release(c)
    # The server may have executed the addition when it resumed.
    assert {"b", "c"} <= {claim.stored.id for claim in await store.claim(5)} <= {"b", "c", "d"}


async def test_sender_that_goes_during_an_outage_does_not_affect_the_others(
    postgres: PostgresServer, open_store: Callable[[], EventStore]
) -> None:
    store = open_store()
    assert await ids(store) == []
    with postgres.down():
        adding = [asyncio.create_task(add(store, name)) for name in ("a", "b", "c")]
        await asyncio.sleep(0.1)
        adding[1].cancel()
        async with asyncio.timeout(10):
            first, _, third = await asyncio.gather(*adding, return_exceptions=True)
    assert isinstance(first, InboxError)
    assert isinstance(third, InboxError)
    assert await add(store, "a")


async def test_closing_during_an_outage_leaves_claims_to_their_leases(
    postgres: PostgresServer, dsn: str, open_store: Callable[[], EventStore], caplog: pytest.LogCaptureFixture
) -> None:
    store = PostgresEventStore(dsn, lease=1.5, timeout=0.5)
    await add(store, "a")
    await store.claim(1)
    with postgres.down():
        await store.aclose()
    assert "the remaining claims end when their lease expires: PostgreSQL at" in caplog.text
    assert (await soon_claimed(open_store())).stored.attempts == 2


async def test_store_works_with_a_slow_server(postgres: PostgresServer, dsn: str) -> None:
    """Concurrent adds are committed together."""
    async with slow_way(postgres.port, 0.02) as way:
        slow = dsn.replace(f":{postgres.port}/", f":{urlsplit(way.url).port}/")
        store = PostgresEventStore(slow)
        await add(store, "first")
        async with asyncio.timeout(2):  # one after the other they would take at least 20 seconds
            assert all(await asyncio.gather(*(add(store, f"e{number}") for number in range(500))))
        await store.aclose()


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


async def test_claims_are_quick_with_a_long_backlog(
    postgres: PostgresServer, table: str, open_store: Callable[[], EventStore]
) -> None:
    """Neither handled nor postponed events are read for a claim."""
    store = open_store()
    assert await ids(store) == []
    for status, due in (("handled", "now()"), ("pending", "now() + interval '1 h'"), ("pending", "now()")):
        await postgres.execute(
            f"INSERT INTO {table} (id, signing_id, type, body, received_at, status, due_at)"
            f" SELECT gen_random_uuid(), gen_random_uuid(), 't', 'x', now(), '{status}', {due}"
            " FROM generate_series(1, 20000) AS n"
        )
    async with asyncio.timeout(10):
        for _ in range(50):
            assert len(await store.claim(8)) == 8


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


async def test_event_waits_for_its_own_next_attempt_when_an_earlier_one_was_handled(
    open_store: Callable[[], EventStore],
) -> None:
    store = open_store()
    await add(store, "a1", "a")
    await add(store, "a2", "a")
    (claim,) = await store.claim(1)
    await store.settle(claim, EventStatus.DEAD)
    (claim,) = await store.claim(1)
    await store.postpone(claim, 3600, None)
    await store.requeue(EventFilter(ids=["a1"]))
    (claim,) = await store.claim(5)
    assert claim.stored.id == "a1"
    await store.settle(claim, EventStatus.HANDLED)
    assert await store.claim(5) == []


# Threads


async def test_threads_add_events_without_an_event_loop(dsn: str, open_store: Callable[[], EventStore]) -> None:
    store = PostgresEventStore(dsn)
    events = [delivery(f"e{number}") for number in range(40)]
    added = await asyncio.gather(*(asyncio.to_thread(store.add_blocking, *each) for each in events + events))
    assert sum(added) == 40
    await store.aclose()
    assert len(await ids(open_store())) == 40
    assert not await asyncio.to_thread(store.add_blocking, *events[0])
    await store.aclose()


async def test_threads_need_a_dsn(dsn: str) -> None:
    async with asyncpg.create_pool(dsn, min_size=0) as pool:
        store = PostgresEventStore(pool)
        with pytest.raises(ConfigurationError, match="postgres: a threaded server needs a DSN"):
            store.add_blocking(*delivery("a"))


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
    await store.create_table()
    pool = store._database._pool
    with pytest.warns(ResourceWarning, match="PostgresEventStore.* was not closed"):
        del store
    pool.terminate()
