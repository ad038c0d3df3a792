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
        async with RedisTokenStore(place, how, timeout=0.5) as store, RedisTokenStore(place, how, timeout=0.5) as other:
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


async def locked_load(store: RedisTokenStore) -> Token | None:
    """Load as a refresh does."""
    async with store.lock():
        return await store.load()


async def test_refused_save_is_repeated_before_another_worker_has_the_lock() -> None:
    """Redis is out of memory, which is transient: it still releases locks. A script that is not permitted is not."""
    newer = Token("newer", "refresh-2")
    with running_redis() as server:
        async with (
            RedisTokenStore(server.url, "a", timeout=5) as one,
            RedisTokenStore(server.url, "a", timeout=5) as other,
            Redis.from_url(server.url) as client,
        ):
            await one.save(TOKEN)
            async with one.lock():
                await one.load()
                await client.config_set("maxmemory", "1")
                with pytest.raises(AuthError) as caught:
                    await one.save(newer)
            assert caught.value.transient
            await client.config_set("maxmemory", "0")
            waiting = asyncio.create_task(locked_load(other))
            await asyncio.wait([waiting], timeout=0.3)
            assert not waiting.done()
            assert await locked_load(one) == newer
            assert await asyncio.wait_for(waiting, 60) == newer
            await client.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")
            with pytest.raises(AuthError) as caught:
                await one.save(TOKEN)
            assert not caught.value.transient


async def test_caller_that_is_cancelled_before_the_response_leaves_no_lock(redis: RedisServer) -> None:
    async with RedisTokenStore(redis.url, "slow", timeout=5) as other, Redis.from_url(redis.url) as client:
        await other.save(TOKEN)
        async with slow_way(redis.port, 0.1) as way, RedisTokenStore(way.url, "slow", timeout=5) as slow:
            await slow.load()
            waiting = asyncio.create_task(locked_load(slow))
            while not await client.exists("signing:token-lock:slow"):
                await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.wait([waiting])
        async with asyncio.timeout(5):
            assert await locked_load(other) == TOKEN
