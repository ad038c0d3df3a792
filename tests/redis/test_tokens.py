"""The token store in Redis: bounded operations, refused scripts, slow networks. The rest is in `tests.storage`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from signing_async import AuthError, Token
from signing_async.redis import RedisTokenStore
from tests.redis.server import RedisServer, running_redis, slow_way

TOKEN = Token("access", "refresh")


@pytest.mark.parametrize(("how", "given"), [("frozen", "url"), ("down", "client")])
async def test_every_operation_fails_soon_during_an_outage(redis: RedisServer, how: str, given: str) -> None:
    """Also with a given client that retries and waits longer. The error keeps no other error."""
    async with Redis.from_url(redis.url, decode_responses=True) as client:
        place: Any = redis.url if given == "url" else client
        async with RedisTokenStore(place, how, timeout=1) as store, RedisTokenStore(place, how, timeout=1) as other:
            await store.save(TOKEN)
            with redis.outage(how):
                async with asyncio.timeout(20):
                    calls = store.load(), store.save(TOKEN), other.lock().__aenter__()
                    errors = await asyncio.gather(*calls, return_exceptions=True)
            for error in errors:
                assert isinstance(error, AuthError)
                assert str(error).partition(": ")[2].startswith((redis.url, "the given client"))
                assert error.__context__ is None
                assert error.transient
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
    command: list[str], transient: bool
) -> None:
    with running_redis() as server:
        async with RedisTokenStore(server.url, "a") as store, Redis.from_url(server.url) as client:
            await client.execute_command(*command)
            with pytest.raises(AuthError) as caught:
                await store.save(TOKEN)
    assert caught.value.transient is transient


async def test_caller_that_is_cancelled_before_the_response_leaves_no_lock(redis: RedisServer) -> None:
    async def locked_load(store: RedisTokenStore) -> Token | None:
        async with store.lock():
            return await store.load()

    async with RedisTokenStore(redis.url, "slow", timeout=5) as other, Redis.from_url(redis.url) as client:
        await other.save(TOKEN)
        async with slow_way(redis.port, 0.2) as way, RedisTokenStore(way.url, "slow", timeout=5) as slow:
            await slow.load()
            waiting = asyncio.create_task(locked_load(slow))
            while not await client.exists("signing:token-lock:slow"):
                await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.wait([waiting])
        async with asyncio.timeout(5):
            assert await locked_load(other) == TOKEN
