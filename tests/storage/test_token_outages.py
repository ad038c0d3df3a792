"""Tokens in Redis and PostgreSQL while their server fails: none is lost, and no refresh token is used twice."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

import pytest
from aiohttp import web
from redis.asyncio import Redis

from signing_async import AuthError, OAuth, SigningError, Token
from signing_async.postgres import PostgresTokenStore
from signing_async.redis import RedisTokenStore
from tests.auth.oauth_servers import Received, Scripted, grants, oauth_for, says
from tests.redis.server import SlowWay, slow_way

OLD = Token("access-old", "refresh-old", datetime(2020, 1, 1, tzinfo=UTC))
NEW = Token("access-new", "refresh-new", datetime(2031, 5, 6, 7, 8, 9, 250000, UTC))
WORKERS = 5


class Engine:
    """A server, and the stores of one token on it."""

    def __init__(self, server: Any, place: str, opened: contextlib.AsyncExitStack) -> None:
        self.server = server
        self._is_redis = place.startswith("redis")
        self._place = place
        self._opened = opened

    def store(self, *, port: int = 0, lease: float = 0.5, **settings: Any) -> Any:
        """Open a store, over another port if one is given."""
        place = self._place.replace(f":{self.server.port}", f":{port or self.server.port}")
        kind: Any = PostgresTokenStore
        if self._is_redis:
            kind, settings = RedisTokenStore, {**settings, "lease": lease}
        store = kind(place, "anna", **settings)
        self._opened.push_async_callback(store.aclose)
        return store

    async def seeded(self, **settings: Any) -> Any:
        """Open a store that holds an expired token, however busy the machine is."""
        store = self.store(**settings)
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(AuthError):
                    if await store.load() is not None:
                        return store
                    await store.save(OLD)

    async def terminate(self) -> None:
        """End all connections."""
        if self._is_redis:
            async with Redis.from_url(self.server.url) as client:
                await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        else:
            clients = "FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            await self.server.execute(f"SELECT pg_terminate_backend(pid) {clients}")


@pytest.fixture(params=["redis", "postgres"])
async def engine(request: pytest.FixtureRequest) -> Any:
    """A server, and token stores on it that do not hold a token yet."""
    server: Any = request.getfixturevalue(request.param)
    async with contextlib.AsyncExitStack() as opened:
        if request.param == "redis":
            async with Redis.from_url(server.url) as client:
                await client.flushall()
        yield Engine(server, server.url if request.param == "redis" else await server.new_schema(), opened)


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


@pytest.mark.parametrize("how", ["frozen", "down"])
async def test_token_refreshed_during_an_outage_is_saved_when_the_server_is_back(how: str, engine: Engine) -> None:
    """The callers get an error in time, and no other worker refreshes before the save."""
    fault = contextlib.ExitStack()

    async def fail(request: web.Request, received: Received) -> web.StreamResponse:
        fault.enter_context(engine.server.outage(how))
        return await grants("new")(request, received)

    one, two = await engine.seeded(timeout=0.5), await engine.seeded(timeout=10)
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


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
async def test_lock_of_a_failed_refresh_is_released_as_soon_as_the_server_is_back(engine: Engine) -> None:
    """No other worker waits for the grace."""
    one, two = await engine.seeded(timeout=0.5), await engine.seeded(timeout=0.5)
    with contextlib.ExitStack() as fault:

        async def fail() -> None:
            fault.enter_context(engine.server.down())
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await refresh(one, fail)
        with pytest.raises(AuthError, match="the lock is not released yet"):
            await refresh(one)
    async with asyncio.timeout(20):
        for store in (two, one):
            assert await loaded_in_the_lock(store) == OLD


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
@pytest.mark.parametrize("unsaved", [True, False])
async def test_closing_with_an_unsaved_token_logs_an_error(
    unsaved: bool, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """With only the lock to release it does not."""
    store = await engine.seeded(timeout=0.5)
    problem = "a refreshed token is not saved yet" if unsaved else "the lock is not released yet"
    with contextlib.ExitStack() as fault:

        async def save() -> None:
            fault.enter_context(engine.server.down())
            if unsaved:
                await store.save(NEW)

        with contextlib.suppress(AuthError):
            await refresh(store, save)
        with pytest.raises(AuthError, match=problem) as caught:
            await refresh(store)
        assert caught.value.transient
        await store.aclose()
    lost = "before a refreshed token was saved: its user may have to authorize again"
    assert (lost in caplog.text) is unsaved
    assert "-new" not in caplog.text
    assert await (await engine.seeded(timeout=10)).load() == OLD


# Reuse


class TokenServer(Scripted):
    """A token server that counts reused refresh tokens: reuse detection would revoke the grant."""

    def __init__(self, seconds: float) -> None:
        super().__init__(self._grant)
        self.seconds = seconds
        self.used: set[str] = set()
        self.reuses = 0
        self.holder = -1
        self.posted = asyncio.Event()

    async def _grant(self, request: web.Request, received: Received) -> web.StreamResponse:
        form = parse_qs(received.body.decode())
        refresh_token = form["refresh_token"][0]
        if refresh_token in self.used:
            self.reuses += 1
            return await says({"error": "invalid_grant"}, 400)(request, received)
        self.used.add(refresh_token)
        self.holder = int(form["client_id"][0])
        self.posted.set()
        await asyncio.sleep(self.seconds)
        return await grants(f"{len(self.used)}")(request, received)


async def hurt(engine: Engine, fault: str, seconds: float, way: SlowWay) -> None:
    """Let the engine fail for so long."""
    if fault in ("down", "frozen"):
        with engine.server.outage(fault):
            await asyncio.sleep(seconds)
    elif fault == "holder cut off":
        way.cut = True
        await engine.terminate()
        await asyncio.sleep(seconds)
        # Drop what the holder sent meanwhile.
        way.cut = False
        await engine.terminate()
    else:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await engine.terminate()
            await asyncio.sleep(seconds / 5)


@pytest.mark.parametrize(
    ("engine", "fault", "seconds", "request_seconds", "begins"),
    [
        ("redis", "down", 0.5, 0.8, 0.0),
        ("redis", "down", 0.5, 0.5, 0.45),
        ("redis", "frozen", 0.6, 0.3, 0.0),
        ("redis", "holder cut off", 1.1, 0.5, 0.0),
        ("postgres", "down", 0.5, 0.8, 0.0),
        ("postgres", "connections terminated", 0.5, 0.8, 0.0),
        ("postgres", "holder cut off", 1.1, 0.5, 0.0),
    ],
    indirect=["engine"],
)
async def test_workers_use_no_refresh_token_twice_in_an_outage(
    engine: Engine, fault: str, seconds: float, request_seconds: float, begins: float
) -> None:
    """The outage begins so long after the token request. In the end every worker has the new token."""
    errors: Counter[str] = Counter()

    async def work(oauth: OAuth) -> None:
        while True:
            try:
                if await oauth.access_token() != OLD.access_token:
                    return
            except SigningError as error:
                errors[f"{type(error).__name__}: {error}"[:150]] += 1
            await asyncio.sleep(0.05)

    async with contextlib.AsyncExitStack() as opened:
        server = await opened.enter_async_context(TokenServer(request_seconds))
        ways, workers = [], []
        for number in range(WORKERS):
            ways.append(await opened.enter_async_context(slow_way(engine.server.port)))
            store = await engine.seeded(port=ways[-1].port, grace=4.5, timeout=0.5)
            oauth = oauth_for(server.base_url, store=store, client_id=str(number))
            workers.append(work(await opened.enter_async_context(oauth)))
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for each in workers:
                tasks.create_task(each)
            await server.posted.wait()
            await asyncio.sleep(begins)
            await hurt(engine, fault, seconds, ways[server.holder])
        assert server.reuses == 0, errors


def refresh_in_a_process(engine: Engine, base_url: str, **settings: Any) -> None:
    """Use the refresh token; the response comes too late."""

    async def run() -> None:
        async with oauth_for(base_url, store=engine.store(**settings), client_id="1") as oauth:
            await oauth.access_token()

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
async def test_killed_refresher_costs_the_grace_and_one_reuse(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """The known limit, also if the server restarts: the other worker waits for the grace, then tries the used refresh
    token once. The new one is lost.
    """
    await engine.seeded()
    async with TokenServer(30) as server:
        process = multiprocessing.get_context("fork").Process(
            target=refresh_in_a_process, args=(engine, server.base_url), kwargs={"lease": 0.3, "grace": 1.5}
        )
        process.start()
        try:
            await asyncio.wait_for(server.posted.wait(), 30)
        finally:
            process.kill()
            process.join()
        killed = time.monotonic()
        with engine.server.down():
            pass
        store = await engine.seeded(lease=0.3, grace=1.5)
        async with oauth_for(server.base_url, store=store, client_id="2") as oauth:
            with pytest.raises(AuthError, match="invalid_grant"):
                await oauth.access_token()
        assert time.monotonic() - killed >= 0.9
        assert server.reuses == 1
    if isinstance(store, RedisTokenStore):
        assert "waiting for the lock, which another worker holds; it expires in " in caplog.text
