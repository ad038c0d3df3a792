"""The token store in PostgreSQL: refused statements and small pools. The rest is in `tests.storage`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import asyncpg
import pytest

from signing_async import AuthError, Token
from signing_async.postgres import PostgresTokenStore
from tests.auth.oauth_servers import Scripted, grants, oauth_for
from tests.postgres.server import PostgresServer

OLD = Token("access-old", "refresh-old", datetime(2020, 1, 1, tzinfo=UTC))
NEW = Token("access-new", "refresh-new", datetime(2031, 5, 6, 7, 8, 9, 250000, UTC))


@contextlib.asynccontextmanager
async def refusing(postgres: PostgresServer, dsn: str, when: str, code: str) -> AsyncIterator[None]:
    """Let the server refuse changes of the tokens with this SQLSTATE."""
    schema = dsn.rpartition("=")[2]
    await postgres.execute(
        f"CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '{code}'; END $$"
    )
    await postgres.execute(
        f"CREATE TRIGGER refuse BEFORE {when} ON {schema}.signing_tokens FOR EACH ROW"
        f" EXECUTE FUNCTION {schema}.refuse()"
    )
    yield
    await postgres.execute(f"DROP TRIGGER refuse ON {schema}.signing_tokens")


@contextlib.asynccontextmanager
async def two_stores(dsn: str) -> AsyncIterator[tuple[PostgresTokenStore, PostgresTokenStore]]:
    """Open the store of one expired token twice."""
    async with PostgresTokenStore(dsn, "anna", timeout=60) as patient:
        await patient.save(OLD)
    async with PostgresTokenStore(dsn, "anna", timeout=1) as one, PostgresTokenStore(dsn, "anna", timeout=20) as two:
        yield one, two


async def test_refresh_that_fails_as_it_takes_the_lock_leaves_the_lock_free(postgres: PostgresServer, dsn: str) -> None:
    """As after a failover, while the new server is read-only."""
    async with two_stores(dsn) as (one, two):
        async with refusing(postgres, dsn, "INSERT", "25006"):
            with pytest.raises(AuthError, match="refused"):
                await refresh(one)
        async with asyncio.timeout(20), two.lock():
            await two.save(NEW)
        assert await one.load() == NEW


async def refresh(store: PostgresTokenStore) -> None:
    """Replace the token."""
    async with store.lock():
        await store.load()
        await store.save(NEW)


async def test_refused_save_is_repeated_and_the_error_says_why(postgres: PostgresServer, dsn: str) -> None:
    """No other worker uses the refresh token before."""
    words = r"refused \(\w+\), and a refreshed token is not saved yet$"
    async with two_stores(dsn) as (one, two):
        async with refusing(postgres, dsn, "UPDATE OF token", "42501"):
            for _ in range(2):
                with pytest.raises(AuthError, match=words) as caught:
                    await refresh(one)
                assert not caught.value.transient
        async with asyncio.timeout(20), two.lock():
            assert await two.load() == NEW


async def test_refreshes_of_many_tenants_share_a_small_pool(dsn: str) -> None:
    """While all of its connections are in use, an operation fails with a transient error."""
    async with (
        Scripted(grants()) as server,
        asyncpg.create_pool(dsn, min_size=0, max_size=2) as pool,
        contextlib.AsyncExitStack() as opened,
    ):
        one, two, three = (PostgresTokenStore(pool, name, timeout=1) for name in ("one", "two", "three"))
        await one.save(OLD)
        async with one.lock(), two.lock():
            with pytest.raises(AuthError, match=r"all connections of the pool are in use, for 1 s") as caught:
                await three.load()
            assert caught.value.transient
        assert await three.load() is None
        refreshes = []
        for number in range(6):
            store = await opened.enter_async_context(PostgresTokenStore(pool, f"tenant-{number}"))
            await store.save(OLD)
            oauth = await opened.enter_async_context(oauth_for(server.base_url, store=store))
            refreshes.append(oauth.access_token())
        await asyncio.gather(*refreshes)
        assert len(server.requests) == 6
