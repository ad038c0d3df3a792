"""The rate limiter alone and in a client; the retry budget."""

from __future__ import annotations

import asyncio
import math
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from aiohttp import web

from signing_async import (
    ConfigurationError,
    LocalRateLimiter,
    OutcomeUnknown,
    RateLimited,
    RateLimiter,
    RequestTimeout,
    RetryPolicy,
    SigningClient,
    TransportError,
)
from signing_async.sandbox import Sandbox
from tests.servers import serving

FOREVER = 1e9


def now() -> float:
    """Return the loop time."""
    return asyncio.get_running_loop().time()


async def run_loop(turns: int = 5) -> None:
    """Let everything run that is ready, without waiting."""
    for _ in range(turns):
        await asyncio.sleep(0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow start waits for responses for as long as they take."""
    monkeypatch.setattr("signing_async.transport.rate_limit.RateController.PATIENCE", FOREVER)


async def fill(limiter: LocalRateLimiter) -> None:
    """Have as many requests in flight as slow start allows."""
    for _ in range(8):
        assert await limiter.acquire(FOREVER)


# The limiter alone


async def test_requests_wait_for_the_end_of_the_longest_pause() -> None:
    limiter, loop = LocalRateLimiter(), asyncio.get_running_loop()
    assert await limiter.acquire(now() + 60)
    limiter.release(now(), True)
    began = now()
    limiter.pause(0.2)
    limiter.pause(0.01)
    loop.call_later(0.1, limiter.pause, 0.2)
    assert await limiter.acquire(began + 60)
    assert now() - began >= 0.3
    assert limiter.next_at <= now()


async def test_request_whose_deadline_is_within_the_pause_is_rejected_at_once() -> None:
    """Also if the pause is extended while the request waits."""
    limiter = LocalRateLimiter()
    limiter.pause(0.05)
    asyncio.get_running_loop().call_later(0.02, limiter.pause, 60)
    began = now()
    assert await limiter.acquire(began + 10) is False
    assert await limiter.acquire(began + 10) is False
    assert now() - began < 5
    async with asyncio.timeout(20):
        assert await limiter.acquire(limiter.next_at) is False


@pytest.mark.usefixtures("patient")
async def test_waiter_proceeds_as_soon_as_another_request_ends() -> None:
    """With or without a response, and one waiter for each request."""
    limiter = LocalRateLimiter()
    await fill(limiter)
    first, second = (asyncio.create_task(limiter.acquire(FOREVER)) for _ in range(2))
    await run_loop()
    assert not first.done()
    limiter.release(now(), True)
    await run_loop()
    assert first.done()
    assert not second.done()
    limiter.release(now(), None)
    await run_loop()
    assert second.done()


@pytest.mark.usefixtures("patient")
async def test_cancelled_waiter_leaves_its_place_to_another() -> None:
    """Whether it was cancelled before it may proceed, or after that and before it ran."""
    limiter = LocalRateLimiter()
    await fill(limiter)
    first, second, third = (asyncio.create_task(limiter.acquire(FOREVER)) for _ in range(3))
    await run_loop()
    first.cancel()
    limiter.release(now(), None)
    await run_loop(2)  # the second was told to proceed, and has not run
    second.cancel()
    async with asyncio.timeout(20):
        assert await third
    assert first.cancelled()
    assert second.cancelled()
    fourth, fifth = (asyncio.create_task(limiter.acquire(FOREVER)) for _ in range(2))
    await run_loop()
    limiter.release(now(), None)
    await run_loop(1)
    fourth.cancel()  # the timer fires before it runs
    async with asyncio.timeout(20):
        assert await fifth
    assert fourth.cancelled()
    assert "0 waiting" in repr(limiter)


def test_limiter_works_in_the_event_loop_after_the_first() -> None:
    """Requests that waited when the first loop ended hold up no others."""
    limiter = LocalRateLimiter()

    async def wait_and_end() -> None:
        limiter.pause(0.05)
        waiting = [asyncio.create_task(limiter.acquire(math.inf)) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()

    async def acquire() -> bool:
        async with asyncio.timeout(20):
            return await limiter.acquire(math.inf)

    asyncio.run(wait_and_end())
    assert asyncio.run(acquire())


# The limiter in a client


async def test_limiter_is_told_how_each_request_ends(sandbox: Sandbox) -> None:
    """Once for each request, and before the pause."""
    limiter = Mock(wraps=LocalRateLimiter())
    sandbox.faults.add("me", "429", retry_after=0.01)
    sandbox.faults.add("me", "503")
    async with SigningClient(
        sandbox.base_url, sandbox.access_token(), retry=RetryPolicy(base_delay=0), rate_limiter=limiter
    ) as client:
        await client.me()
        sandbox.faults.add("me", "hang")
        with pytest.raises(RequestTimeout):
            await client.with_options(timeout=0.2).me()
    calls = [name if name == "acquire" else arguments[-1] for name, arguments, _ in limiter.mock_calls]
    assert calls == ["acquire", False, 0.01, "acquire", True, "acquire", True, "acquire", None]
    assert all(ended.args[0] <= now() for ended in limiter.release.mock_calls)


async def test_next_at_of_a_limiter_is_the_retry_after_of_the_error(sandbox: Sandbox) -> None:
    limiter = Mock(acquire=AsyncMock(return_value=False), next_at=now() + 100)
    async with SigningClient(sandbox.base_url, sandbox.access_token(), rate_limiter=limiter, timeout=30) as client:
        with pytest.raises(RateLimited, match="it was not sent") as caught:
            await client.me()
    assert caught.value.retry_after is not None
    assert 60 < caught.value.retry_after <= 100
    assert (sandbox.requests_of("me"), limiter.release.called, limiter.pause.called) == ([], False, False)


@pytest.mark.parametrize("limiter", [LocalRateLimiter, object()])
def test_object_without_the_methods_of_a_limiter_is_rejected(limiter: Any) -> None:
    """Nor is a class."""
    with pytest.raises(ConfigurationError, match=r"rate_limiter: must be a RateLimiter, such as LocalRateLimiter\(\)"):
        SigningClient("https://tenant.example.com", "token", rate_limiter=limiter)


async def test_429_of_one_client_pauses_all_clients_with_the_same_limiter(sandbox: Sandbox) -> None:
    limiter: RateLimiter = LocalRateLimiter()
    token = sandbox.access_token()
    async with (
        SigningClient(sandbox.base_url, token, rate_limiter=limiter) as first,
        SigningClient(sandbox.base_url, token, rate_limiter=limiter, timeout=5) as second,
        SigningClient(sandbox.base_url, token) as stranger,
    ):
        sandbox.faults.add("me", "429", retry_after=30)
        with pytest.raises(RateLimited):
            await first.with_options(timeout=10).me()
        with pytest.raises(RateLimited, match="it was not sent"):
            await second.me()
        await stranger.me()
    assert len(sandbox.requests_of("me")) == 2


async def test_429s_are_not_counted_as_attempts_while_other_requests_are_accepted() -> None:
    """The call is retried until its deadline, however often it is rejected."""
    rejections = 3

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal rejections
        if "signings" in request.path or not rejections:
            return web.json_response({"id": "one"})
        rejections -= 1
        await client.signings.get("one")
        return web.Response(status=429, headers={"Retry-After": "0.01"})

    async with (
        serving(respond) as server,
        SigningClient(server.origin, "token", retry=RetryPolicy(max_attempts=2, base_delay=0)) as client,
    ):
        await client.me()
    assert rejections == 0
    assert [request.path for request in server.requests].count("/api/1.0/me") == 4


async def test_calls_behind_hanging_requests_time_out_unsent(sandbox: Sandbox) -> None:
    """None of them as rate limited."""
    sandbox.faults.add("signings.send", "hang", times=None)
    async with SigningClient(sandbox.base_url, sandbox.access_token(), timeout=0.3, retry=RetryPolicy.none()) as client:
        ends = await asyncio.gather(
            *(client.signings.send("00000000-0000-4000-8000-000000000000") for _ in range(60)), return_exceptions=True
        )
    # On a slow machine some get no connection.
    unsent = [end for end in ends if type(end) in (RequestTimeout, TransportError)]
    assert all(isinstance(end, TransportError | OutcomeUnknown) for end in ends)
    # A request that was cut off may not have arrived, but one that arrived is never called unsent.
    assert len(unsent) <= 60 - len(sandbox.requests_of("signings.send"))
    assert unsent


async def test_request_behind_too_many_others_is_rejected_at_its_deadline() -> None:
    """`next_at` says when a request made now could be sent."""
    limiter, began = LocalRateLimiter(), now()
    assert await limiter.acquire(FOREVER)
    limiter.release(began, False)
    limiter.pause(0.01)
    others = [asyncio.create_task(limiter.acquire(FOREVER)) for _ in range(50)]
    await asyncio.sleep(0)
    assert await limiter.acquire(began + 0.05) is False
    assert limiter.next_at > began + 0.5
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert "0 waiting" in repr(limiter)
