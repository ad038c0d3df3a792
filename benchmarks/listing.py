"""Lists 100 pages of 100 signings: against loops that return plain dicts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import aiohttp
import orjson

from signing_async import SigningClient

from .charts import Chart, Panel
from .measure import Samples, comparison, interleaved, panel, quick, ratio
from .report import OURS, draw, judge, notice, show
from .rivals import HEADERS, TOKEN, aiohttp_session, httpx, httpx_client
from .server import Server, running

_PATH = "/api/1.0/signings"
_PAGES, _PAGE_SIZE = (3, 10) if quick() else (100, 100)
_ROUNDS, _SECONDS = 21, 20.0
_LATENCY = _WORK = 0.005
_BARE, _HTTPX = "aiohttp + orjson, dicts", "httpx + orjson, dicts"

Pages = Callable[[], AsyncGenerator[Sequence[object], None]]


def main() -> None:
    with running() as server:
        panels = asyncio.run(_compare(server))
    axis = "time relative to a loop written by hand with aiohttp and orjson; shorter is better"
    draw(Chart("listing", f"Lists of {_PAGES} pages of {_PAGE_SIZE} signings", axis, panels))


async def _compare(server: Server) -> list[Panel]:
    url = server.plain + _PATH
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp_session())
        client = await stack.enter_async_context(SigningClient(server.plain, TOKEN, session=session))
        everyone: dict[str, Pages | None] = {
            OURS: lambda: _typed(client),
            _BARE: lambda: _bare(session, url),
            _HTTPX: None,
        }
        if httpx is not None:
            other = await stack.enter_async_context(httpx_client())
            everyone[_HTTPX] = lambda: _getting(other, url)
        samples = await _sampled(server, everyone, latency=0, work=0)
        without = f"{_PAGES} pages of {_PAGE_SIZE} signings, no latency"
        show(comparison(f"{without}", samples, _BARE, count=_PAGES * _PAGE_SIZE))
        if samples[_HTTPX]:
            judge("listing: records, times as fast as httpx with dicts", ratio(samples, _HTTPX, OURS), at_least=1.05)
        late = await _sampled(server, everyone, latency=_LATENCY, work=_WORK)
        both = f"{_LATENCY * 1000:g} ms of latency and {_WORK * 1000:g} ms of work on each page"
        show(comparison(f"the same, with {both}", late, _BARE, count=_PAGES * _PAGE_SIZE))
        what = "listing: times as fast as the loop by hand, with latency and work (2 is the bound)"
        speed = ratio(late, _BARE, OURS)
        notice(
            f"A list whose pages arrive and are worked on in 5 ms each is read {speed:.1f} times as fast as by hand."
        )
        judge(what, speed, at_least=1.84)
    return [panel("no latency", samples, _BARE), panel(both, late, _BARE)]


async def _sampled(server: Server, everyone: dict[str, Pages | None], *, latency: float, work: float) -> Samples:
    server.configure(pages=_PAGES, page_size=_PAGE_SIZE, latency=latency)
    runs = {name: _read(pages, work) if pages else None for name, pages in everyone.items()}
    return await interleaved(
        runs, rounds=_ROUNDS, seconds=_SECONDS, expect=(_PAGES * _PAGE_SIZE, _last()), server=server.cpu
    )


def _last() -> str:
    return f"Lease {_PAGES * _PAGE_SIZE - 1}"


def _read(pages: Pages, work: float) -> Callable[[], Awaitable[object]]:
    """Read all pages, wait on each as a consumer that awaits something does; how many signings, and the last name."""

    async def run() -> object:
        count, last = 0, None
        async with aclosing(pages()) as read:
            async for items in read:
                count += len(items)
                last = items[-1]
                if work:
                    await asyncio.sleep(work)
        return count, last["name"] if isinstance(last, dict) else getattr(last, "name", None)

    return run


async def _typed(client: SigningClient) -> AsyncGenerator[Sequence[object], None]:
    async with aclosing(client.signings.list().pages()) as pages:
        async for page in pages:
            yield page.items


async def _bare(session: aiohttp.ClientSession, url: str) -> AsyncGenerator[Sequence[object], None]:
    cursor: str | None = "0"
    while cursor is not None:
        async with session.get(url, params={"cursor": cursor}, headers=HEADERS) as response:
            response.raise_for_status()
            data = orjson.loads(await response.read())
        yield data["data"]
        cursor = data["meta"]["next_cursor"]


async def _getting(client: Any, url: str) -> AsyncGenerator[Sequence[object], None]:
    cursor: str | None = "0"
    while cursor is not None:
        response = await client.get(url, params={"cursor": cursor})
        response.raise_for_status()
        data = orjson.loads(response.content)
        yield data["data"]
        cursor = data["meta"]["next_cursor"]
