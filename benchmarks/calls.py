"""Small calls, 1 and 50 at a time: what `me()` costs above aiohttp + orjson by hand; httpx and niquests."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

import aiohttp
import orjson

from signing_async import SigningClient

from .charts import Chart
from .measure import MISSING, Sample, comparison, interleaved, panel, quick, ratio
from .report import OURS, Table, draw, judge, show
from .rivals import HEADERS, TOKEN, aiohttp_session, httpx, httpx_client, niquests, niquests_session
from .server import Server, running

_PATH = "/api/1.0/me"
_CALLS = 20 if quick() else 200
_ROUNDS, _SECONDS = 101, 15.0
_MANY = 50
_TENANTS = 5 if quick() else 50
_BARE, _UNBOUNDED = "aiohttp + orjson", "aiohttp + orjson, no deadline"
_HTTPX, _NIQUESTS = "httpx + orjson", "niquests + orjson"


def main() -> None:
    with running() as server:
        asyncio.run(_compare(server))
        asyncio.run(_count_contexts(server))


async def _compare(server: Server) -> None:
    url = server.plain + _PATH
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp_session())
        client = await stack.enter_async_context(SigningClient(server.plain, TOKEN, session=session))
        # No call of this package goes without a deadline, and a deadline of aiohttp's has its cost.
        deadline = aiohttp.ClientTimeout(total=300, sock_connect=30)
        calls: dict[str, Callable[[], Awaitable[str]] | None] = {
            OURS: lambda: _typed(client),
            _BARE: lambda: _bare(session, url, deadline),
            _UNBOUNDED: lambda: _bare(session, url, session.timeout),
            _HTTPX: None,
            _NIQUESTS: None,
        }
        if httpx is not None:
            other = await stack.enter_async_context(httpx_client())
            calls[_HTTPX] = lambda: _getting(other, url)
        if niquests is not None:
            third = await stack.enter_async_context(niquests_session())
            calls[_NIQUESTS] = lambda: _getting(third, url)
        samples, many = [await _sampled(server, calls, at_once) for at_once in (1, _MANY)]
    show(comparison(f"me(), {_CALLS} calls one after the other (a piece is a call)", samples, _BARE, count=_CALLS))
    judge(f"small calls: CPU, of {_BARE}", ratio(samples, OURS, _BARE, "cpu"), at_most=1.2)
    show(comparison(f"me(), {_CALLS} calls, {_MANY} at a time (a piece is a call)", many, _BARE, count=_CALLS))
    judge(f"small calls, {_MANY} at a time: CPU, of {_BARE}", ratio(many, OURS, _BARE, "cpu"), at_most=1.2)
    axis = f"CPU time relative to {_BARE}; shorter is better"
    panels = [
        panel("me(), one after the other", samples, _BARE, "cpu", target=1.2),
        panel(f"me(), {_MANY} at a time", many, _BARE, "cpu", target=1.2),
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


async def _bare(session: aiohttp.ClientSession, url: str, timeout: aiohttp.ClientTimeout) -> str:
    async with session.get(url, headers=HEADERS, timeout=timeout) as response:
        response.raise_for_status()
        email: str = orjson.loads(await response.read())["email"]
        return email


async def _getting(client: Any, url: str) -> str:
    response = await client.get(url)
    response.raise_for_status()
    email: str = orjson.loads(response.content)["email"]
    return email


async def _count_contexts(server: Server) -> None:
    """How many TLS contexts are made when many clients, each with a session of its own, make a call."""
    own = await _contexts(_own_sessions, server)
    other = MISSING if httpx is None else str(await _contexts(_httpx_clients, server))
    rows = [[f"{OURS}, each with its own session", str(own)], ["httpx.AsyncClient()", other]]
    note = "Beyond the one that importing aiohttp makes. Loading the authorities takes some 10 ms and 0.5 MB for each."
    show(Table(f"TLS contexts that {_TENANTS} clients make", ("clients", "contexts"), rows, note))
    judge("TLS contexts for all clients, with the one of aiohttp", 1 + own, at_most=1)


async def _contexts(make: Callable[[Server], Awaitable[None]], server: Server) -> int:
    with mock.patch("ssl.create_default_context", side_effect=ssl.create_default_context) as counted:
        await make(server)
    return counted.call_count


async def _own_sessions(server: Server) -> None:
    for _ in range(_TENANTS):
        async with SigningClient(server.plain, TOKEN) as client:
            await client.me()


async def _httpx_clients(server: Server) -> None:
    assert httpx is not None
    for _ in range(_TENANTS):
        async with httpx.AsyncClient() as client:
            await client.get(server.plain + _PATH, headers=HEADERS)
