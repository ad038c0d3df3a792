"""The token store in Redis: killed and cut off holders, restarts, and outages of Redis."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from signing_async import AuthError, Token
from signing_async.redis import RedisTokenStore
from tests.auth.oauth_servers import Scripted, grants, oauth_for
from tests.redis.server import RedisServer, running_redis, slow_way

ROOT = Path(__file__).parents[2]
OLD = Token("access-old", "refresh-old", datetime(2020, 1, 1, tzinfo=UTC))
NEW = Token("access-new", "refresh-new", datetime(2031, 5, 6, 7, 8, 9, 250000, UTC))
TOKEN_KEY, LOCK_KEY = "signing:token:a", "signing:token-lock:a"


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis for one test, which may stop it."""
    # By default the last second of acknowledged writes may be lost.
    with running_redis("--appendfsync", "always") as server:
        yield server


async def ask(server: RedisServer, *command: Any) -> Any:
    """Return the response to one command."""
    from redis.asyncio import Redis

    async with Redis.from_url(server.url) as client:
        response: Any = client.execute_command(*command)  # redis-py leaves it so
        return await response


@contextlib.asynccontextmanager
async def two_stores(server: RedisServer, **settings: Any) -> AsyncIterator[tuple[RedisTokenStore, RedisTokenStore]]:
    """Open the store of one expired token twice."""
    settings = {"timeout": 5, **settings}
    one, two = RedisTokenStore(server.url, "a", **settings), RedisTokenStore(server.url, "a", **settings)
    async with one, two:
        await ask(server, "DEL", TOKEN_KEY, LOCK_KEY)
        await one.save(OLD)
        yield one, two


async def loaded_in_the_lock(store: RedisTokenStore) -> Token | None:
    """Load as a refresh does."""
    async with store.lock():
        return await store.load()


async def test_lock_is_renewed_while_it_is_held_and_waiting_for_it_is_logged_once(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """So the token request of a living worker may take longer than the grace."""
    async with two_stores(redis, lease=0.5, grace=1) as (one, two), one.lock():
        waiting = asyncio.create_task(loaded_in_the_lock(two))
        await asyncio.wait([waiting], timeout=2.5)
        assert not waiting.done()
        await one.save(NEW)
        waiting.cancel()
    (record,) = caplog.records
    assert "'a'): waiting for the lock, which another worker holds; it expires in " in record.message


async def refresh(url: str, base_url: str, lease: str, grace: str, rejected: str) -> None:
    """Replace the token, in a process of its own."""
    async with (
        RedisTokenStore(url, "a", lease=float(lease), grace=float(grace)) as store,
        oauth_for(base_url, store=store) as oauth,
    ):
        await oauth.refresh(rejected)


@pytest.mark.parametrize("rejected", ["access-old", "access-valid"])
async def test_no_worker_refreshes_within_the_grace_after_one_was_killed_in_a_refresh(
    rejected: str, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """This holds for a new `OAuth` and after a restart of Redis, too. A warning says how long."""
    requested, grant = asyncio.Event(), grants("new")
    valid = Token("access-valid", "refresh-valid", datetime.now(UTC) + timedelta(hours=1))

    async def hang_once(request: Any, received: Any) -> Any:
        if requested.is_set():
            return await grant(request, received)
        requested.set()
        return await asyncio.sleep(60)

    async with Scripted(hang_once) as server, two_stores(redis, lease=0.3, grace=6) as (store, _):
        await store.save(OLD if rejected == "access-old" else valid)
        command = [sys.executable, "-m", "tests.redis.test_tokens", redis.url, server.base_url, "0.3", "6", rejected]
        with subprocess.Popen(command, cwd=ROOT) as process:
            try:
                await asyncio.wait_for(requested.wait(), 60)
            finally:
                process.kill()
        killed = time.monotonic()
        redis.restart()
        async with oauth_for(server.base_url, store=store) as oauth:
            assert (await oauth.refresh(rejected)).access_token == "access-new"
        assert time.monotonic() - killed > 4
        assert len(server.token_requests) == 2
    assert "waiting for the lock, which another worker holds" in caplog.text


@pytest.mark.parametrize("fault", ["stopped", "killed"])
@pytest.mark.parametrize("given", ["url", "client"])
async def test_every_operation_fails_soon_during_an_outage(redis: RedisServer, fault: str, given: str) -> None:
    """Also with a given client that retries and waits longer. The error keeps no other error."""
    from redis.asyncio import Redis

    async with Redis.from_url(redis.url, decode_responses=True) as client:
        place: Any = redis.url if given == "url" else client
        async with RedisTokenStore(place, "a", timeout=1) as store, RedisTokenStore(place, "a", timeout=1) as other:
            await store.save(NEW)
            redis.stop() if fault == "stopped" else redis.kill()
            for work in (store.load(), store.save(OLD), other.lock().__aenter__()):
                async with asyncio.timeout(10):
                    with pytest.raises(AuthError, match=r"redis://127\.0\.0\.1:|the given client") as caught:
                        await work
                assert caught.value.__context__ is None
                assert caught.value.transient
            redis.wake() if fault == "stopped" else redis.start()
        assert await client.ping()


@pytest.mark.parametrize(
    ("command", "transient"),
    [
        (["CONFIG", "SET", "maxmemory", "1"], True),
        (["ACL", "SETUSER", "default", "-evalsha", "-eval"], False),
    ],
    ids=["out of memory", "not permitted"],
)
async def test_refused_script_is_permanent_unless_redis_cannot_be_written_for_now(
    redis: RedisServer, command: list[str], transient: bool
) -> None:
    async with RedisTokenStore(redis.url, "a") as store:
        await ask(redis, *command)
        with pytest.raises(AuthError) as caught:
            await store.save(NEW)
    assert caught.value.transient is transient


async def test_save_whose_response_was_lost_is_repeated_safely(redis: RedisServer) -> None:
    async with slow_way(redis.port) as way, RedisTokenStore(way.url, "a", timeout=0.4) as store:
        await store.save(OLD)
        async with store.lock():
            await store.load()
            way.delay = 0.3
            with pytest.raises(AuthError, match="no response within"):
                await store.save(NEW)
        way.delay = 0.0
        async with asyncio.timeout(20), store.lock():
            assert await store.load() == NEW


async def test_caller_that_is_cancelled_before_the_response_leaves_no_lock(redis: RedisServer) -> None:
    async with two_stores(redis) as (_, other):
        async with slow_way(redis.port, 0.2) as way, RedisTokenStore(way.url, "a", timeout=5) as slow:
            await slow.load()
            waiting = asyncio.create_task(loaded_in_the_lock(slow))
            while not await ask(redis, "EXISTS", LOCK_KEY):
                await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.wait([waiting])
        async with asyncio.timeout(5):
            assert await loaded_in_the_lock(other) == OLD


if __name__ == "__main__":
    asyncio.run(refresh(*sys.argv[1:]))
