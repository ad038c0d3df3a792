"""The rate limit shared through Redis: one worker's 429 pauses all, one rate for all, and outages of Redis."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys

import pytest

from signing_async import RateLimited, RateLimiter, SigningClient
from signing_async.redis import RedisRateLimiter
from tests.auth.oauth_servers import Scripted, says
from tests.redis.server import RedisServer, slow_way

ME = {"id": "1", "name": "Ada", "email": "ada@example.com"}


def now() -> float:
    """Return the loop time."""
    return asyncio.get_running_loop().time()


async def open_for(limiter: RateLimiter, seconds: float) -> bool:
    """Return whether a request may be sent within ``seconds``; it ends at once."""
    passed = await limiter.acquire(now() + seconds)
    if passed:
        limiter.release(now(), True)
    return passed


async def closed_soon(limiter: RateLimiter) -> float:
    """Wait until the rate limiter has learnt of a pause, and return how long it lasts."""
    async with asyncio.timeout(60):
        while await open_for(limiter, 0.05) or limiter.next_at <= now():
            await asyncio.sleep(0.02)
    return limiter.next_at - now()


async def test_429_for_one_worker_pauses_all_workers(redis: RedisServer) -> None:
    """Another worker's call waits for the Retry-After without sending a request."""
    async with (
        Scripted(says({}, 429, **{"Retry-After": "2"}), says(ME)) as server,
        RedisRateLimiter(redis.url, "429") as limiter,
        RedisRateLimiter(redis.url, "429") as other,
        SigningClient(server.base_url, "token", rate_limiter=limiter) as client,
        SigningClient(server.base_url, "token", rate_limiter=other, timeout=0.3) as hasty,
        SigningClient(server.base_url, "token", rate_limiter=other) as patient,
    ):
        await open_for(other, 5)
        call = asyncio.create_task(client.me())
        assert 0.3 < await closed_soon(other) <= 2.1
        with pytest.raises(RateLimited) as caught:
            await hasty.me()
        assert caught.value.retry_after is not None
        assert len(server.requests) == 1
        began = now()
        waits = other.next_at - began
        await patient.me()
        assert now() - began >= waits - 0.01
        await call


async def test_pause_applies_to_workers_that_start_later(redis: RedisServer) -> None:
    """It reads the pause before its first request; a shorter pause does not replace a longer one."""
    async with (
        RedisRateLimiter(redis.url, "later") as limiter,
        RedisRateLimiter(redis.url, "later") as witness,
        RedisRateLimiter(redis.url, "later") as late,
        RedisRateLimiter(redis.url, "another") as apart,
    ):
        await open_for(limiter, 5)
        limiter.pause(60)
        limiter.pause(2)
        await closed_soon(witness)
        assert not await open_for(late, 20)
        assert 20 < late.next_at - now() <= 60.1
        assert await open_for(apart, 5)


async def spend(limiters: list[RedisRateLimiter], each: int) -> list[float]:
    """Return when each request could be sent, in seconds from now."""
    times: list[float] = []
    began = now()

    async def one(limiter: RedisRateLimiter) -> None:
        assert await open_for(limiter, 60)
        times.append(now())

    await asyncio.gather(*(one(limiter) for limiter in limiters for _ in range(each)))
    return [time - began for time in sorted(times)]


async def test_all_workers_together_keep_to_the_rate(redis: RedisServer) -> None:
    """At any time no more requests were sent than the rate and the burst allow."""
    limiters = [RedisRateLimiter(redis.url, "rate", rate=200, burst=10) for _ in range(3)]
    times = await spend(limiters, 40)
    for limiter in limiters:
        await limiter.aclose()
    assert len(times) == 120
    assert times[-1] >= (120 - 10 - 1) / 200 * 0.95
    for place, time in enumerate(times):
        assert place <= 10 + time * 200 + 2


async def test_request_whose_slot_comes_after_its_deadline_is_rejected_at_once(redis: RedisServer) -> None:
    """It takes no slot, and `next_at` says when the slot is."""
    async with RedisRateLimiter(redis.url, "late", rate=0.5, burst=1) as limiter:
        began = now()
        assert await open_for(limiter, 5)
        assert not await open_for(limiter, 0.5)
        assert not await open_for(limiter, 0.5)
        assert now() - began < 1.5
        assert 1.5 < limiter.next_at - began < 5
        assert await open_for(limiter, 30)
        assert now() - began > 1.5


async def test_no_slots_are_used_during_a_pause(redis: RedisServer) -> None:
    """After the pause, waiting requests are sent at the rate, not all at once."""
    async with RedisRateLimiter(redis.url, "closed", rate=100, burst=1) as limiter:
        await open_for(limiter, 5)
        limiter.pause(1)
        assert not await open_for(limiter, 0.1)
        opens = limiter.next_at
        await spend([limiter], 20)
        # One or two slots may have been fetched ahead.
        assert now() >= opens + 15 / 100


def warned(caplog: pytest.LogCaptureFixture) -> int:
    """Return the number of warnings in the log."""
    return len(
        [
            record
            for record in caplog.records
            if record.name.startswith("signing_async") and record.levelno >= logging.WARNING
        ]
    )


@pytest.mark.parametrize("how", ["frozen", "down"])
async def test_workers_continue_alone_while_redis_is_unavailable(
    redis: RedisServer, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No call hangs; each worker keeps to the rate and its own 429s; the log says it once. When Redis is back, the
    workers share again, and learn of a pause that still lasts.
    """
    caplog.set_level(logging.INFO)
    async with (
        RedisRateLimiter(redis.url, how, rate=100, burst=1, timeout=0.5) as limiter,
        RedisRateLimiter(redis.url, how, timeout=0.5) as other,
    ):
        await spend([limiter], 2)
        await open_for(other, 5)
        caplog.clear()
        with redis.outage(how):
            began = now()
            times = await spend([limiter], 90)
            assert now() - began < 30
            assert times[-1] > 0.5
            async with asyncio.timeout(60):
                while warned(caplog) < 2:
                    await open_for(other, 1)
                    await asyncio.sleep(0.02)
            limiter.pause(60)
            await asyncio.sleep(0.7)
            assert not await open_for(limiter, 1)
            assert await open_for(other, 1)
            assert warned(caplog) == 2
            assert "this worker continues alone" in caplog.text
        assert 1 < await closed_soon(other) < 60
        async with asyncio.timeout(60):
            while caplog.text.count("Redis is back") < 2:
                await open_for(limiter, 0.05)
                await asyncio.sleep(0.02)
        assert warned(caplog) == 2


def test_unclosed_rate_limiter_works_in_a_second_event_loop(redis: RedisServer) -> None:
    """It publishes its own 429 there."""
    code = f"""
import asyncio
from signing_async.redis import RedisRateLimiter

limiter, other = (RedisRateLimiter({redis.url!r}, "loops", rate=200) for _ in range(2))

async def use():
    async with limiter, asyncio.timeout(20):
        limiter.pause(60)
        while await other.acquire(asyncio.get_running_loop().time() + 1):
            await asyncio.sleep(0.01)
        await other.aclose()
        print("published")

asyncio.run(limiter.acquire(1e9))
asyncio.run(use())
"""
    # The connections of the first loop are lost with it, which is a warning.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["published"], done.stderr
    assert "Traceback" not in done.stderr


async def test_request_is_rejected_at_its_deadline_while_slots_are_being_reserved(redis: RedisServer) -> None:
    async with slow_way(redis.port) as way, RedisRateLimiter(way.url, "way", rate=50) as limiter:
        await open_for(limiter, 5)
        await asyncio.sleep(0.25)
        way.delay = 0.3
        passed = [await open_for(limiter, 0.05) for _ in range(3)]
        assert passed[-1] is False
