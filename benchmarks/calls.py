"""Small calls, 1 and 50 at a time: what `me()` costs above the same basics by hand; httpx, and the least of aiohttp."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import attrs
import orjson

from signing_async import SigningClient

from .charts import Chart
from .measure import Sample, comparison, interleaved, median, panel, quick, ratio
from .report import OURS, draw, judge, notice, show
from .rivals import HEADERS, TOKEN, aiohttp_session, httpx, httpx_client
from .server import Server, running

_PATH = "/api/1.0/me"
_CALLS = 20 if quick() else 200
_ROUNDS, _SECONDS = 101, 15.0
_MANY = 50
_BY_HAND = "aiohttp + orjson + asyncio.timeout + attrs"
_LIMIT, _HTTPX = "aiohttp + orjson, no deadline", "httpx + orjson"


def main() -> None:
    with running() as server:
        asyncio.run(_compare(server))


async def _compare(server: Server) -> None:
    url = server.plain + _PATH
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp_session())
        client = await stack.enter_async_context(SigningClient(server.plain, TOKEN, session=session))
        calls: dict[str, Callable[[], Awaitable[str]] | None] = {
            OURS: lambda: _typed(client),
            _BY_HAND: lambda: _by_hand(session, url),
            _LIMIT: lambda: _bare(session, url),
            _HTTPX: None,
        }
        if httpx is not None:
            other = await stack.enter_async_context(httpx_client())
            calls[_HTTPX] = lambda: _getting(other, url)
        samples, many = [await _sampled(server, calls, at_once) for at_once in (1, _MANY)]
    show(comparison(f"me(), {_CALLS} calls one after the other", samples, _BY_HAND, count=_CALLS))
    judge(f"small calls: CPU, of {_BY_HAND}", ratio(samples, OURS, _BY_HAND, "cpu"), at_most=1.12)
    show(comparison(f"me(), {_CALLS} calls, {_MANY} at a time", many, _BY_HAND, count=_CALLS))
    judge(f"small calls, {_MANY} at a time: CPU, of {_BY_HAND}", ratio(many, OURS, _BY_HAND, "cpu"), at_most=1.2)
    above = (median(samples[OURS], "cpu") - median(samples[_BY_HAND], "cpu")) / _CALLS * 1e6
    notice(f"A small call takes {above:.0f} µs of CPU time above the same call by hand with aiohttp.")
    axis = f"CPU time relative to {_BY_HAND}; shorter is better"
    panels = [
        panel("me(), one after the other", samples, _BY_HAND, "cpu", target=1.12),
        panel(f"me(), {_MANY} at a time", many, _BY_HAND, "cpu", target=1.2),
    ]
    draw(Chart("calls", "A small call", axis, panels))


async def _sampled(
    server: Server, calls: dict[str, Callable[[], Awaitable[str]] | None], at_once: int
) -> dict[str, list[Sample]]:
    runs = {name: _repeated(call, at_once) if call else None for name, call in calls.items()}
    expect = _CALLS * len("ada@example.com")
    return await interleaved(runs, rounds=_ROUNDS, seconds=_SECONDS, expect=expect, server=server.cpu)


def _repeated(call: Callable[[], Awaitable[str]], at_once: int) -> Callable[[], Awaitable[int]]:
    async def run() -> int:
        left = iter(range(_CALLS))

        async def worker() -> int:
            size = 0
            for _ in left:
                size += len(await call())
            return size

        return sum(await asyncio.gather(*(worker() for _ in range(at_once))))

    return run


async def _typed(client: SigningClient) -> str:
    return (await client.me()).email or ""


@attrs.frozen(slots=False)
class _User:
    """The record of `_by_hand`, with the fields of the package's."""

    id: str | None
    email: str | None
    name: str | None
    extra: dict[str, Any]


async def _by_hand(session: aiohttp.ClientSession, url: str) -> str:
    async with asyncio.timeout(60), session.get(url, headers=HEADERS) as response:
        response.raise_for_status()
        data = orjson.loads(await response.read())
    user = _User(data.pop("id", None), data.pop("email", None), data.pop("name", None), data)
    return user.email or ""


async def _bare(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url, headers=HEADERS) as response:
        response.raise_for_status()
        email: str = orjson.loads(await response.read())["email"]
        return email


async def _getting(client: Any, url: str) -> str:
    response = await client.get(url)
    response.raise_for_status()
    email: str = orjson.loads(response.content)["email"]
    return email
