"""The token store in PostgreSQL: lost connections, killed and paused holders, outages, and small pools."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime

import asyncpg
import pytest

from signing_async import AuthError, Token
from signing_async.postgres import PostgresTokenStore
from tests.auth.oauth_servers import Scripted, grants, oauth_for
from tests.auth.store_races import Race, kill_outside_a_refresh, race
from tests.postgres.processes import next_line, worker, write_line
from tests.postgres.server import PostgresServer

OLD = Token("access-old", "refresh-old", datetime(2020, 1, 1, tzinfo=UTC))
NEW = Token("access-new", "refresh-new", datetime(2031, 5, 6, 7, 8, 9, 250000, UTC))


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[PostgresTokenStore]:
    """A store whose table exists."""
    async with two_stores(dsn) as (opened, _):
        yield opened


@contextlib.asynccontextmanager
async def two_stores(dsn: str) -> AsyncIterator[tuple[PostgresTokenStore, PostgresTokenStore]]:
    """Open the store of one token twice."""
    async with PostgresTokenStore(dsn, "anna", timeout=60) as patient:
        await patient.create_table()
    async with PostgresTokenStore(dsn, "anna", timeout=5) as one, PostgresTokenStore(dsn, "anna", timeout=5) as two:
        yield one, two


async def test_refresh_that_fails_as_it_takes_the_lock_leaves_the_lock_free(postgres: PostgresServer, dsn: str) -> None:
    """As after a failover, while the new server is read-only."""
    schema = dsn.rpartition("=")[2]
    async with two_stores(dsn) as (one, two):
        await postgres.execute(
            f"CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'read-only' USING ERRCODE = '25006'; END $$"
        )
        await postgres.execute(
            f"CREATE TRIGGER refuse BEFORE INSERT ON {schema}.signing_tokens"
            f" FOR EACH ROW EXECUTE FUNCTION {schema}.refuse()"
        )
        with pytest.raises(AuthError, match="read-only"):
            async with one.lock():
                pass
        await postgres.execute(f"DROP TRIGGER refuse ON {schema}.signing_tokens")
        async with asyncio.timeout(20), two.lock():
            await two.save(NEW)
        assert await one.load() == NEW


async def test_paused_holder_keeps_the_lock(dsn: str, store: PostgresTokenStore) -> None:
    """It may have used the refresh token. When it resumes, it saves the new one."""
    await store.save(OLD)
    async with PostgresTokenStore(dsn, "anna", timeout=5, grace=0.01) as hasty:
        with worker("hold", dsn) as process:
            await next_line(process, "held")
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.5), hasty.lock():
                    pass
            assert await hasty.load() == OLD
            process.send_signal(signal.SIGCONT)
            write_line(process)
            async with asyncio.timeout(30), hasty.lock():
                kept = await hasty.load()
                assert kept is not None
                assert kept.access_token == "late"


async def test_eight_processes_refresh_once_per_expiry_despite_a_kill_and_a_pause(dsn: str) -> None:
    """One clock is an hour fast."""

    async def disturb(run: Race) -> None:
        await run.quiet()
        await kill_outside_a_refresh(run, 1, "postgres", dsn)
        await run.quiet()
        run.send(2, signal.SIGSTOP)
        await asyncio.sleep(1.5)
        run.send(2, signal.SIGCONT)

    run = await race("postgres", dsn, every=0.08, wrong_clocks=(3600.0,), meanwhile=disturb)
    assert (run.refused, run.errors, sorted(run.done)) == (0, [], [12, *[50] * 6])
    assert len(run.refreshes) >= 3
    assert run.doubled == 0


@pytest.mark.timeout(300)
async def test_eight_processes_get_their_tokens_while_the_server_restarts(postgres: PostgresServer, dsn: str) -> None:
    """It is stopped, killed, started and frozen: there is no replay."""

    async def disturb(run: Race) -> None:
        for hurt in (postgres.restart, postgres.kill):
            await run.quiet()
            hurt()
            await asyncio.sleep(0.2)
        postgres.start()
        await run.quiet()
        with postgres.frozen():
            await asyncio.sleep(0.5)

    # Enough calls for the processes to be at work until the end of the disturbance.
    run = await race("postgres", dsn, calls=100, every=0.08, meanwhile=disturb)
    assert (run.refused, run.errors, run.done) == (0, [], [100] * 8)
    assert run.doubled == 0


async def test_exhausted_pool_is_a_transient_error(dsn: str, store: PostgresTokenStore) -> None:
    async with asyncpg.create_pool(dsn, min_size=0, max_size=1) as pool:
        one, two = (PostgresTokenStore(pool, name, timeout=1) for name in ("one", "two"))
        async with one.lock():
            with pytest.raises(AuthError, match=r"all connections of the pool are in use, for 1 s") as caught:
                await two.load()
            assert caught.value.transient
        assert await two.load() is None


async def test_refreshes_of_many_tenants_share_a_small_pool(dsn: str) -> None:
    async with (
        Scripted(grants()) as server,
        asyncpg.create_pool(dsn, min_size=0, max_size=2) as pool,
        AsyncExitStack() as opened,
    ):
        refreshes = []
        for number in range(6):
            store = await opened.enter_async_context(PostgresTokenStore(pool, f"tenant-{number}"))
            await store.save(OLD)
            oauth = await opened.enter_async_context(oauth_for(server.base_url, store=store))
            refreshes.append(oauth.access_token())
        await asyncio.gather(*refreshes)
        assert len(server.requests) == 6
