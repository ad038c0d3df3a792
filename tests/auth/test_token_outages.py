"""No refresh token is used twice in an engine's outage: a part of the matrix, and the known limit."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from signing_async import AuthError, TokenStore
from signing_async.postgres import PostgresTokenStore
from signing_async.redis import RedisTokenStore
from tests.auth.oauth_servers import oauth_for
from tests.auth.token_outages import EXPIRED, Case, TokenServer, running
from tests.auth.token_outages import run as run_case
from tests.postgres.server import PostgresServer
from tests.redis.server import RedisServer, running_redis

ROOT = Path(__file__).parents[2]
# A tenth of the durations of the full matrix.
REDIS = {"lease": 0.5, "timeout": 1.0}
POSTGRES = {"grace": 3.0, "timeout": 1.0}


@pytest.mark.parametrize(
    "cases",
    [
        [
            Case("redis", "stopped", 1.0, 1.5),
            Case("redis", "stopped", 0.7, 0.5, late=True),
            Case("redis", "paused", 1.0, 0.5),
            Case("redis", "restarted", 1.0, 1.5),
        ],
        [
            Case("redis", "terminated", 1.0, 1.5),
            Case("redis", "holder cut off", 2.0, 1.0),
        ],
        [
            Case("postgres", "stopped", 1.0, 1.5),
            Case("postgres", "restarted", 1.0, 1.5),
            Case("postgres", "terminated", 1.0, 1.5),
            Case("postgres", "holder cut off", 2.0, 1.0),
        ],
    ],
    ids=["redis", "redis-connections", "postgres"],
)
async def test_eight_workers_use_no_refresh_token_twice_in_an_outage(cases: list[Case]) -> None:
    """In the end every worker has the new token."""

    async def one(case: Case) -> None:
        settings = POSTGRES if case.engine == "postgres" else REDIS
        async with running(case, **settings) as engine:
            result = await run_case(case, engine, patience=60)
        assert (str(case), result.reuses, result.served) == (str(case), 0, 8), result.errors

    await asyncio.gather(*(one(case) for case in cases))


# The known limit: a worker that is killed with the new token


@asynccontextmanager
async def redis_store(url: str, grace: float = 2.0) -> AsyncIterator[TokenStore]:
    async with RedisTokenStore(url, "user", lease=0.3, grace=grace) as store:
        yield store


@asynccontextmanager
async def postgres_store(dsn: str, grace: float = 2.0) -> AsyncIterator[TokenStore]:
    async with PostgresTokenStore(dsn, "user", grace=grace) as store:
        yield store


STORES: dict[str, Callable[..., contextlib.AbstractAsyncContextManager[TokenStore]]] = {
    "redis": redis_store,
    "postgres": postgres_store,
}


async def refresh(kind: str, where: str, base_url: str) -> None:
    async with STORES[kind](where) as store, oauth_for(base_url, store=store, client_id="1") as oauth:
        await oauth.access_token()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """A Redis server for all tests that leave it intact."""
    with running_redis() as server:
        yield server


@pytest.fixture(params=["redis", "postgres"])
async def kind_and_place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """An engine and its URL."""
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis")
        return "redis", server.url
    postgres: PostgresServer = request.getfixturevalue("postgres")
    return "postgres", await postgres.new_schema()


async def test_killed_refresher_costs_the_grace_and_one_reuse(kind_and_place: tuple[str, str]) -> None:
    """The other worker waits for the grace, then tries the used refresh token once: the new one is lost."""
    kind, where = kind_and_place
    async with TokenServer(30) as server, STORES[kind](where) as store:
        await store.save(EXPIRED)
        command = [sys.executable, "-m", "tests.auth.test_token_outages", kind, where, server.base_url]
        with subprocess.Popen(command, cwd=ROOT) as process:
            try:
                await asyncio.wait_for(server.posted.wait(), 30)
                process.send_signal(signal.SIGKILL)
                killed = time.monotonic()
                async with oauth_for(server.base_url, store=store, client_id="2") as oauth:
                    with pytest.raises(AuthError, match="invalid_grant"):
                        await oauth.access_token()
            finally:
                process.kill()
    assert time.monotonic() - killed >= 1.5
    assert server.reuses == 1


async def test_failed_refresh_releases_the_lock_at_once(kind_and_place: tuple[str, str]) -> None:
    kind, where = kind_and_place
    async with STORES[kind](where, 60) as store, STORES[kind](where, 60) as other:
        await store.save(EXPIRED)
        with contextlib.suppress(ZeroDivisionError):
            async with store.lock():
                await store.load()
                raise ZeroDivisionError
        async with asyncio.timeout(20), other.lock():
            assert await other.load() == EXPIRED


if __name__ == "__main__":
    asyncio.run(refresh(*sys.argv[1:]))
