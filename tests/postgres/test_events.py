"""The events of an inbox in PostgreSQL: leases, long backlogs, and outages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime

import pytest

from signing_async import InboxError
from signing_async.postgres import PostgresInbox
from signing_async.webhooks import Event, EventStatus, EventStore, HandlerRetryPolicy
from tests.postgres.server import PostgresServer
from tests.storage.event_stores import add, delivery, soon_claimed


async def test_claims_read_few_rows_of_a_long_backlog(
    postgres: PostgresServer, table: str, open_store: Callable[..., EventStore]
) -> None:
    """Not the handled or postponed events, nor all that are due, nor those behind a postponed one of their signing."""

    async def rows_read() -> int:
        schema, _, name = table.partition(".")
        ((read,),) = await postgres.execute(
            "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables"
            f" WHERE schemaname = '{schema}' AND relname = '{name}'"
        )
        return int(read)

    store = open_store(lease=60, timeout=20)
    await postgres.execute(
        f"INSERT INTO {table} (id, signing_id, type, body, received_at)"
        " SELECT 'e' || n, 's', 't', 'x', now() FROM generate_series(1, 15000) AS n"
    )
    (claim,) = await store.claim(1)
    await store.postpone(claim, 3600, None)
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


async def test_text_of_an_error_that_the_database_refuses_blocks_no_other_event(postgres: PostgresServer) -> None:
    """The encoding of the database cannot hold all of Unicode."""
    await postgres.execute("DROP DATABASE IF EXISTS latin1")
    await postgres.execute("CREATE DATABASE latin1 ENCODING 'LATIN1' TEMPLATE template0")
    dsn = postgres.dsn().replace("/postgres?", "/latin1?")
    policy = HandlerRetryPolicy(max_attempts=2, base_delay=0, max_delay=0)
    async with PostgresInbox(dsn, lease=60, timeout=20, retry=policy) as inbox:

        @inbox.on("*")
        async def handle(event: Event) -> None:
            if event.id == "poison":
                raise ValueError("cannot parse ☃ or é")

        await inbox.add(*delivery("poison", "a"))
        await inbox.add(*delivery("next", "a"))
        async with inbox.running(), asyncio.timeout(60):
            while (await inbox.stats()).counts[EventStatus.PENDING]:
                await asyncio.sleep(0.02)
        poison = await inbox.get("poison")
    assert poison is not None
    assert (poison.status, poison.attempts) == (EventStatus.DEAD, 2)
    assert poison.error == r"ValueError: cannot parse \u2603 or \xe9"


async def test_expired_claim_is_not_claimed_again_by_its_own_holder(
    postgres: PostgresServer, table: str, open_store: Callable[..., EventStore]
) -> None:
    """Its handler is still running, and its lease is renewed."""
    one, two = open_store(lease=3, timeout=1), open_store()
    await add(one, "a", "s")
    (claim,) = await one.claim(1)
    await postgres.execute(f"UPDATE {table} SET leased_until = now() - interval '1 s'")
    assert await one.claim(1) == []
    async with asyncio.timeout(20):
        while not await postgres.execute(f"SELECT FROM {table} WHERE leased_until > now()"):
            await asyncio.sleep(0.02)
    assert await two.claim(1) == []
    assert await one.settle(claim, EventStatus.HANDLED)


async def test_claim_that_could_not_be_ended_is_free_when_its_lease_expires(
    postgres: PostgresServer, table: str, open_store: Callable[..., EventStore]
) -> None:
    """Although the store is still open, and renews the lease of its other claim."""

    async def leases() -> tuple[datetime, datetime]:
        a, b = await postgres.execute(f"SELECT leased_until FROM {table} ORDER BY id")
        return a["leased_until"], b["leased_until"]

    one, two = open_store(timeout=1), open_store()
    await add(one, "a", "s")
    await add(one, "b", "t")
    claim, _ = await one.claim(2)
    with postgres.down(), pytest.raises(InboxError):
        await one.settle(claim, EventStatus.HANDLED)
    a, b = await leases()
    async with asyncio.timeout(60):
        while (renewed := await leases())[1] <= b:
            await asyncio.sleep(0.02)
    assert renewed[0] == a
    await postgres.execute(f"UPDATE {table} SET leased_until = now() - interval '1 s' WHERE id = 'a'")
    await one.claim(0)
    assert (await soon_claimed(two)).stored.id == "a"
    assert await two.claim(1) == []
