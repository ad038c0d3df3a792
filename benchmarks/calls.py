"""Small calls one after the other: what `me()` costs above bare aiohttp with the same settings, and httpx."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import httpx
import orjson

from signing_async import SigningClient

from .measure import COMPARED, Table, compared, interleaved, quick, ratio, show
from .server import Server, running

_TOKEN = "benchmark"
_PATH = "/api/1.0/me"
_HEADERS = {"Accept": "application/json", "Authorization": f"Bearer {_TOKEN}"}
_CALLS, _ROUNDS = (20, 1) if quick() else (200, 101)


def main() -> None:
    with running() as server:
        asyncio.run(_compare(server))


async def _compare(server: Server) -> None:
    # As the client makes its own session: no cookies.
    session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
    unlimited = aiohttp.ClientTimeout(total=None)
    async with session, httpx.AsyncClient() as peer, SigningClient(server.plain, _TOKEN, session=session) as client:
        calls = {
            "bare aiohttp": lambda: _bare(session, server.plain + _PATH, session.timeout),
            "bare aiohttp, no deadline": lambda: _bare(session, server.plain + _PATH, unlimited),
            "signing_async": lambda: _typed(client),
            "httpx": lambda: _peer(peer, server.plain + _PATH),
        }
        candidates = {name: _repeated(call) for name, call in calls.items()}
        samples = await interleaved(candidates, rounds=_ROUNDS, expect=_CALLS * len("ada@example.com"))
    above = ratio(samples, "signing_async", "bare aiohttp", "cpu") - 1
    unbounded = ratio(samples, "signing_async", "bare aiohttp, no deadline", "cpu") - 1
    note = (
        f"CPU time of a call above bare aiohttp: {above:.1%} (target: at most 15 %), "
        f"and {unbounded:.1%} above one without any deadline, which no call of this package goes without."
    )
    show(Table(f"me(), {_CALLS} calls a round", COMPARED, compared(samples, "bare aiohttp", count=_CALLS), note))


def _repeated(call: Callable[[], Awaitable[str]]) -> Callable[[], Awaitable[int]]:
    async def run() -> int:
        size = 0
        for _ in range(_CALLS):
            size += len(await call())
        return size

    return run


async def _typed(client: SigningClient) -> str:
    return (await client.me()).email or ""


async def _bare(session: aiohttp.ClientSession, url: str, timeout: aiohttp.ClientTimeout) -> str:
    async with session.get(url, headers=_HEADERS, timeout=timeout) as response:
        response.raise_for_status()
        email: str = orjson.loads(await response.read())["email"]
        return email


async def _peer(client: httpx.AsyncClient, url: str) -> str:
    response = await client.get(url, headers=_HEADERS)
    response.raise_for_status()
    email: str = orjson.loads(response.content)["email"]
    return email
