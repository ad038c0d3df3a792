"""The events of an inbox in PostgreSQL, when connections break and the server fails."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

from signing_async import InboxError
from signing_async.postgres.inbox import PostgresEventStore
from signing_async.webhooks.event_store import EventClaim, EventFilter, EventStatus, EventStore
from tests.postgres.server import PASSWORD, PostgresServer
from tests.storage.event_stores import add, everything, ids, soon_claimed


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


async def test_store_survives_a_restart_of_the_server(
    postgres: PostgresServer, open_store: Callable[[], EventStore]
) -> None:
    """A held claim stays held."""
    one, two = open_store(), open_store()
    await add(one, "a", "s")
    (claim,) = await one.claim(1)
    with postgres.down():
        pass
    assert await one.settle(claim, EventStatus.HANDLED)
    await add(one, "b")
    assert (await soon_claimed(two)).stored.id == "b"


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
    store = open_store(lease=1.5, timeout=0.5)
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


async def test_events_whose_senders_went_during_an_outage_are_not_added_after_it(
    postgres: PostgresServer, open_store: Callable[[], EventStore]
) -> None:
    """Their bodies are not kept: the senders come back with them."""
    store = open_store()
    assert await ids(store) == []
    with postgres.down():
        adding = [asyncio.create_task(add(store, f"e{number}")) for number in range(300)]
        await asyncio.sleep(0.1)
        for each in adding[100:]:
            each.cancel()
        await asyncio.wait(adding)
    assert await add(store, "after")
    assert await ids(store) == ["after"]


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


async def end_claim(store: EventStore, claim: EventClaim, end: str) -> None:
    """End the claim in one of the ways."""
    if end == "release":
        await store.release(claim)
    elif end == "postpone":
        await store.postpone(claim, 0, None)
    else:
        await store.settle(claim, EventStatus.HANDLED)


@pytest.mark.parametrize("end", ["settle", "postpone", "release", "cancelled"])
async def test_claim_that_could_not_be_ended_is_free_when_its_lease_expires(
    end: str, postgres: PostgresServer, table: str, open_store: Callable[..., EventStore]
) -> None:
    """Although the store is still open, and renews the lease of its other claim."""

    async def leases() -> tuple[datetime, datetime]:
        a, b = await postgres.execute(f"SELECT leased_until FROM {table} ORDER BY id")
        return a["leased_until"], b["leased_until"]

    one, two = open_store(lease=12), open_store()
    await add(one, "a", "s")
    await add(one, "b", "t")
    claim, _ = await one.claim(2)
    with postgres.down():
        ending = asyncio.create_task(end_claim(one, claim, end))
        if end == "cancelled":
            await asyncio.sleep(0)
            ending.cancel()
        with pytest.raises((InboxError, asyncio.CancelledError)):
            await ending
    a, b = await leases()
    async with asyncio.timeout(60):
        while (renewed := await leases())[1] <= b:
            await asyncio.sleep(0.02)
    assert renewed[0] == a
    await postgres.execute(f"UPDATE {table} SET leased_until = now() - interval '1 s' WHERE id = 'a'")
    await one.claim(0)
    assert (await soon_claimed(two)).stored.id == "a"
    assert await two.claim(1) == []


async def test_end_that_could_not_be_recorded_can_be_recorded_after_the_outage(
    postgres: PostgresServer, open_store: Callable[..., EventStore]
) -> None:
    """Meanwhile the store does not claim the event again: its handler has ended."""
    store = open_store(lease=60)
    await add(store, "a", "s")
    (claim,) = await store.claim(1)
    with postgres.down():
        for _ in range(2):
            with pytest.raises(InboxError):
                await store.settle(claim, EventStatus.HANDLED)
    assert await store.claim(1) == []
    assert await store.settle(claim, EventStatus.HANDLED)
    assert not await store.settle(claim, EventStatus.HANDLED)


async def test_lost_claim_whose_end_could_not_be_recorded_stays_lost(
    postgres: PostgresServer, open_store: Callable[..., EventStore]
) -> None:
    store = open_store(lease=60)
    await add(store, "a", "s")
    (claim,) = await store.claim(1)
    await store.release(claim)
    with postgres.down(), pytest.raises(InboxError):
        await store.settle(claim, EventStatus.HANDLED)
    assert (await soon_claimed(store)).fence > claim.fence
    assert not await store.settle(claim, EventStatus.HANDLED)
