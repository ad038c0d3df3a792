"""Lists 100 pages of 100 signings: against hand-written loops that give plain dicts, and what reading ahead brings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

import aiohttp
import httpx
import orjson

from signing_async import SigningClient

from .measure import COMPARED, Table, compared, interleaved, quick, ratio, show
from .server import Server, running

_TOKEN = "benchmark"
_PATH = "/api/1.0/signings"
_HEADERS = {"Accept": "application/json", "Authorization": f"Bearer {_TOKEN}"}
_PAGES, _PAGE_SIZE, _ROUNDS = (3, 10, 1) if quick() else (100, 100, 15)
_LATENCY = _WORK = 0.005

Pages = Callable[[], AsyncGenerator[Sequence[object], None]]


def main() -> None:
    with running() as server:
        asyncio.run(_compare(server))


async def _compare(server: Server) -> None:
    session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
    async with session, httpx.AsyncClient() as peer, SigningClient(server.plain, _TOKEN, session=session) as client:
        url = server.plain + _PATH
        everyone: dict[str, Pages] = {
            "aiohttp + orjson, dicts": lambda: _bare(session, url),
            "signing_async": lambda: _typed(client, read_ahead=True),
            "signing_async, no read-ahead": lambda: _typed(client, read_ahead=False),
            "httpx + orjson, dicts": lambda: _peer(peer, url),
        }
        server.configure(pages=_PAGES, page_size=_PAGE_SIZE)
        await _without_latency(everyone)
        server.configure(pages=_PAGES, page_size=_PAGE_SIZE, latency=_LATENCY)
        await _with_latency(everyone)


async def _without_latency(everyone: dict[str, Pages]) -> None:
    candidates = {name: _read(pages, work=0) for name, pages in everyone.items()}
    samples = await interleaved(candidates, rounds=_ROUNDS, expect=_PAGES * _PAGE_SIZE)
    cost = ratio(samples, "signing_async", "signing_async, no read-ahead") - 1
    ahead = ratio(samples, "httpx + orjson, dicts", "signing_async")
    show(
        Table(
            f"{_PAGES} pages of {_PAGE_SIZE} signings, no latency (a piece is a signing)",
            COMPARED,
            compared(samples, "aiohttp + orjson, dicts", count=_PAGES * _PAGE_SIZE),
            f"Reading ahead costs {cost:+.1%} (target: nothing measurable). "
            f"Records take {ahead:.2f} times less than httpx's dicts (target: above 1).",
        )
    )


async def _with_latency(everyone: dict[str, Pages]) -> None:
    candidates = {name: _read(pages, work=_WORK) for name, pages in everyone.items()}
    samples = await interleaved(candidates, rounds=_ROUNDS, expect=_PAGES * _PAGE_SIZE)
    gain = ratio(samples, "aiohttp + orjson, dicts", "signing_async")
    show(
        Table(
            f"the same, with {_LATENCY * 1000:g} ms of latency and {_WORK * 1000:g} ms of work on each page",
            COMPARED,
            compared(samples, "aiohttp + orjson, dicts", count=_PAGES * _PAGE_SIZE),
            f"{gain:.2f} times as fast as the hand-written loop (target: at least 1.8; 2 is the bound).",
        )
    )


def _read(pages: Pages, work: float) -> Callable[[], Awaitable[int]]:
    """Read all pages, wait on each as a consumer that awaits something does, and count the signings."""

    async def run() -> int:
        count = 0
        async with aclosing(pages()) as read:
            async for items in read:
                count += len(items)
                if work:
                    await asyncio.sleep(work)
        return count

    return run


async def _typed(client: SigningClient, *, read_ahead: bool) -> AsyncGenerator[Sequence[object], None]:
    async with aclosing(client.signings.list(read_ahead=read_ahead).pages()) as pages:
        async for page in pages:
            yield page.items


async def _bare(session: aiohttp.ClientSession, url: str) -> AsyncGenerator[Sequence[object], None]:
    cursor: str | None = "0"
    while cursor is not None:
        async with session.get(url, params={"cursor": cursor}, headers=_HEADERS) as response:
            response.raise_for_status()
            data = orjson.loads(await response.read())
        yield data["data"]
        cursor = data["meta"]["next_cursor"]


async def _peer(client: httpx.AsyncClient, url: str) -> AsyncGenerator[Sequence[object], None]:
    cursor: str | None = "0"
    while cursor is not None:
        response = await client.get(url, params={"cursor": cursor}, headers=_HEADERS)
        response.raise_for_status()
        data = orjson.loads(response.content)
        yield data["data"]
        cursor = data["meta"]["next_cursor"]
