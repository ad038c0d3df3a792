"""A refresh in an outage of Redis or PostgreSQL: its token is saved when the server is back, and none is used twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from signing_async import AuthError, Token
from signing_async.postgres import PostgresTokenStore
from signing_async.redis import RedisTokenStore
from tests.auth.oauth_servers import Scripted, grants, oauth_for
from tests.redis.server import running_redis

OLD = Token("access-old", "refresh-old", datetime(2020, 1, 1, tzinfo=UTC))
NEW = Token("access-new", "refresh-new", datetime(2031, 5, 6, 7, 8, 9, 250000, UTC))


@pytest.fixture(params=["redis", "postgres"])
async def storage(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """The store of an expired token: ``open`` opens it, ``outage`` makes its server fail."""
    async with contextlib.AsyncExitStack() as opened:
        if request.param == "redis":
            # By default the last second of acknowledged writes may be lost.
            server: Any = opened.enter_context(running_redis("--appendfsync", "always"))
        else:
            server = request.getfixturevalue("postgres")
            dsn = await server.new_schema()

        async def open_store(timeout: float = 2.0) -> Any:
            store: Any = (
                RedisTokenStore(server.url, "anna", lease=0.5, timeout=timeout)
                if request.param == "redis"
                else PostgresTokenStore(dsn, "anna", timeout=timeout)
            )
            opened.push_async_callback(store.aclose)
            async with asyncio.timeout(60):
                while await store.load() is None:
                    await store.save(OLD)
            return store

        @contextlib.contextmanager
        def outage(how: str) -> Iterator[None]:
            if request.param == "postgres":
                with server.frozen() if how == "stopped" else server.down():
                    yield
                return
            server.stop() if how == "stopped" else server.kill()
            try:
                yield
            finally:
                server.wake() if how == "stopped" else server.start()

        yield SimpleNamespace(open=open_store, outage=outage)


async def refresh(store: Any, work: Callable[[], Awaitable[None]] | None = None) -> Token | None:
    """Load in the lock, and do the rest of a refresh."""
    async with store.lock():
        found: Token | None = await store.load()
        if work is not None:
            await work()
        return found


async def loaded_in_the_lock(store: Any) -> Token | None:
    """Load as a refresh does, as soon as the server is back."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(AuthError):
                return await refresh(store)
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_token_refreshed_during_an_outage_is_saved_when_the_server_is_back(how: str, storage: Any) -> None:
    """The callers get an error in time, and no other worker refreshes before the save."""
    fault = contextlib.ExitStack()

    async def fail(request: Any, received: Any) -> Any:
        fault.enter_context(storage.outage(how))
        return await grants("new")(request, received)

    one, two = await storage.open(), await storage.open(10)
    async with (
        Scripted(fail, grants("wrong")) as server,
        oauth_for(server.base_url, store=one) as first,
        oauth_for(server.base_url, store=two) as second,
    ):
        with fault:
            for _ in range(2):
                async with asyncio.timeout(20):
                    with pytest.raises(AuthError) as caught:
                        await first.access_token()
                assert caught.value.transient
        assert await loaded_in_the_lock(two) != OLD
        assert await second.access_token() == await first.access_token() == "access-new"
        assert len(server.requests) == 1


@pytest.mark.parametrize("storage", ["postgres"], indirect=True)
@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_lock_of_a_failed_refresh_is_released_as_soon_as_the_server_is_back(how: str, storage: Any) -> None:
    """No other worker waits for the grace."""
    one, two = await storage.open(), await storage.open()
    with contextlib.ExitStack() as fault:

        async def fail() -> None:
            fault.enter_context(storage.outage(how))
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await refresh(one, fail)
        with pytest.raises(AuthError, match="the lock is not released yet"):
            await refresh(one)
    async with asyncio.timeout(20):
        for store in (two, one):
            assert await loaded_in_the_lock(store) == OLD


@pytest.mark.parametrize("storage", ["postgres"], indirect=True)
async def test_closing_with_an_unsaved_token_logs_an_error(storage: Any, caplog: pytest.LogCaptureFixture) -> None:
    store = await storage.open(0.5)
    with contextlib.ExitStack() as fault:

        async def save() -> None:
            fault.enter_context(storage.outage("killed"))
            await store.save(NEW)

        with pytest.raises(AuthError):
            await refresh(store, save)
        with pytest.raises(AuthError, match="a refreshed token is not saved yet") as caught:
            await refresh(store)
        assert caught.value.transient
        await store.aclose()
    assert "before a refreshed token was saved: its user may have to authorize again" in caplog.text
    assert "-new" not in caplog.text
    assert await (await storage.open(10)).load() == OLD
