"""Outages of a token store's engine during a refresh.

Eight workers share an expired token. As soon as the first one has posted the refresh token, the engine fails. The token
server counts reused refresh tokens: with reuse detection each would revoke the grant.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

import attrs
from aiohttp import web

from signing_async import SigningError, Token
from signing_async.postgres import PostgresTokenStore
from signing_async.redis import RedisTokenStore
from tests.auth.oauth_servers import Received, Scripted, oauth_for, says
from tests.postgres.server import PostgresServer
from tests.redis.server import RedisServer, SlowWay, slow_way

EXPIRED = Token("access-0", "refresh-0", datetime(2020, 1, 1, tzinfo=UTC))
WORKERS = 8


@attrs.frozen
class Case:
    """One cell of the matrix."""

    engine: str
    fault: str
    outage: float
    """Seconds of the outage."""
    request: float
    """Seconds until the token server responds."""
    late: bool = False
    """Whether the outage begins just before the response, not with the request."""

    def __str__(self) -> str:
        moment = "response" if self.late else "request"
        return f"{self.engine}, {self.fault} {self.outage:g} s from the {moment}, token request {self.request:g} s"


@attrs.frozen
class Result:
    """What the workers and the token server observed."""

    reuses: int
    served: int
    """The workers that got the new token."""
    errors: Counter[str]


class TokenServer(Scripted):
    """A token server that counts reused refresh tokens."""

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
        number = len(self.used)
        grant = {"access_token": f"access-{number}", "refresh_token": f"refresh-{number}", "expires_in": 3600}
        return await says(grant)(request, received)


class Redis:
    """A Redis server with an append-only file."""

    def __init__(self, server: RedisServer, **settings: Any) -> None:
        self.server = server
        self.port = server.port
        self.settings = settings

    def store(self, port: int) -> RedisTokenStore:
        return RedisTokenStore(f"redis://127.0.0.1:{port}", "user", **self.settings)

    async def seed(self) -> None:
        async with self.store(self.port) as store:
            await first_save(store)

    async def terminate(self) -> None:
        from redis.asyncio import Redis as Client

        async with Client.from_url(self.server.url) as client:
            for kind in ("normal", "pubsub"):
                await client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")  # redis-py leaves it so

    async def stop(self) -> None:
        self.server.kill()

    async def start(self) -> None:
        await asyncio.to_thread(self.server.start)

    async def pause(self) -> None:
        self.server.stop()

    async def wake(self) -> None:
        self.server.wake()


class Postgres:
    """A PostgreSQL server."""

    def __init__(self, server: PostgresServer, **settings: Any) -> None:
        self.server = server
        self.port = server.port
        self.settings = settings
        self._frozen = contextlib.ExitStack()

    def store(self, port: int) -> PostgresTokenStore:
        return PostgresTokenStore(self.server.dsn(port=port), "user", **self.settings)

    async def seed(self) -> None:
        async with self.store(self.port) as store:
            await first_save(store)
        # A server that has just started waits for refreshers of an earlier run.
        await asyncio.sleep(self.settings.get("grace", 45.0))

    async def terminate(self) -> None:
        await self.server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )

    async def stop(self) -> None:
        await asyncio.to_thread(self.server.stop)

    async def start(self) -> None:
        await asyncio.to_thread(self.server.start)

    async def pause(self) -> None:
        self._frozen.enter_context(self.server.frozen())

    async def wake(self) -> None:
        self._frozen.close()


async def hurt(engine: Redis | Postgres, case: Case, way: SlowWay) -> None:
    """Let the engine fail for the duration of the outage."""
    until = time.monotonic() + case.outage
    if case.fault == "stopped":
        await engine.stop()
        await asyncio.sleep(case.outage)
        await engine.start()
    elif case.fault == "paused":
        await engine.pause()
        await asyncio.sleep(case.outage)
        await engine.wake()
    elif case.fault == "holder cut off":
        way.cut = True
        await engine.terminate()
        await asyncio.sleep(case.outage)
        # Drop what the holder sent meanwhile.
        way.cut = False
        await engine.terminate()
    while case.fault in ("restarted", "terminated"):
        if case.fault == "restarted":
            await engine.stop()
            await engine.start()
        else:
            await engine.terminate()
        await asyncio.sleep(min(0.5, case.outage / 5))
        if time.monotonic() > until:
            return


async def refresh(oauth: Any, errors: Counter[str]) -> None:
    """Request a token until there is a new one."""
    while True:
        try:
            if await oauth.access_token() != EXPIRED.access_token:
                return
        except SigningError as error:
            errors[type(error).__name__ + ": " + str(error)[:150]] += 1
        await asyncio.sleep(0.05)


async def first_load(store: RedisTokenStore | PostgresTokenStore) -> None:
    """Load the token, however busy the machine is: every worker knows it before the outage."""
    while True:
        with contextlib.suppress(SigningError):
            assert await store.load() == EXPIRED
            return


async def first_save(store: RedisTokenStore | PostgresTokenStore) -> None:
    """Save the expired token, however busy the machine is."""
    while True:
        with contextlib.suppress(SigningError):
            return await store.save(EXPIRED)


async def run(case: Case, engine: Redis | Postgres, *, patience: float = 100.0) -> Result:
    """Let eight workers refresh one token while the engine fails."""
    errors: Counter[str] = Counter()
    async with AsyncExitStack() as opened:
        server = await opened.enter_async_context(TokenServer(case.request))
        await engine.seed()
        ways, clients = [], []
        for number in range(WORKERS):
            ways.append(await opened.enter_async_context(slow_way(engine.port)))
            store = await opened.enter_async_context(engine.store(urlsplit(ways[-1].url).port or 0))
            await first_load(store)
            clients.append(oauth_for(server.base_url, store=store, client_id=str(number)))
            await opened.enter_async_context(clients[-1])
        workers = [asyncio.create_task(refresh(oauth, errors)) for oauth in clients]
        await server.posted.wait()
        if case.late:
            await asyncio.sleep(case.request * 0.9)
        await hurt(engine, case, ways[server.holder])
        _, late = await asyncio.wait(workers, timeout=patience)
        for worker in late:
            worker.cancel()
        await asyncio.wait(workers)
        return Result(server.reuses, WORKERS - len(late), errors)


@asynccontextmanager
async def running(case: Case, **settings: Any) -> AsyncIterator[Redis | Postgres]:
    """Run a server for this case alone."""
    if case.engine == "postgres":
        server = await asyncio.to_thread(PostgresServer().__enter__)
        try:
            yield Postgres(server, **settings)
        finally:
            await asyncio.to_thread(server.close)
        return
    redis = RedisServer()
    try:
        yield Redis(redis, **settings)
    finally:
        redis.close()
