"""How cost grows: with the number of uploads, with how many of them go on at once, and with the number of tenants.

Each figure is of a process of its own. Memory is to stay flat, and time to grow no faster than the work.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TypeVar

import attrs

from signing_async import MemoryTokenStore, SigningClient, TenantApp, Tenants, Token

from .charts import Bar, Chart, Panel
from .measure import Child, in_child, quick
from .report import Table, draw, judge, show
from .rivals import TOKEN, aiohttp_session
from .server import pdf_bytes, running

T = TypeVar("T")

_SIZE = 50_000
_FILES = 100
_UPLOADS = (2, 4) if quick() else (10, 100, 1000, 10_000)
_AT_ONCE = (2,) if quick() else (1, 2, 4, 8, 16, 32, 64)
_AT_ONCE_UPLOADS = 4 if quick() else 640
_TENANTS = (1, 10) if quick() else (1, 10, 100, 1000, 10_000)
_ROUNDS = 1 if quick() else 3


@attrs.frozen
class _Cost:
    """Of one upload or tenant, and of the whole process."""

    micros: float
    grown: float
    """MB above the import, at the peak."""


def main() -> None:
    with running() as server, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(_FILES):
            (folder / f"lease-{number}.pdf").write_bytes(pdf_bytes(_SIZE, number))
        where = (server.port, name)
        uploads = _costs(_UPLOADS, lambda count: in_child(upload, *where, count, 8))
        at_once = _costs(_AT_ONCE, lambda count: in_child(upload, *where, _AT_ONCE_UPLOADS, count))
        tenants = _costs(_TENANTS, lambda count: in_child(call_tenants, server.port, count))
        assert server.counts()["uploads"] >= _ROUNDS * sum(_UPLOADS)
    kilobytes = _SIZE // 1000
    _shown("uploads", f"Uploads of {kilobytes} KB, 8 at a time", uploads)
    _shown("uploads at once", f"{_AT_ONCE_UPLOADS} uploads of {kilobytes} KB, so many at a time", at_once)
    _shown("tenants", "Tenants on one session, a call by each; at most 1000 of their clients are kept", tenants)
    most, fewer = uploads[_UPLOADS[-1]], uploads[_UPLOADS[-2]]
    what = f"scale: {_UPLOADS[-1]} uploads"
    judge(f"{what}: time of one, to that of {_UPLOADS[-2]}", most.micros / fewer.micros, at_most=1.1)
    judge(f"{what}: memory above that of {_UPLOADS[-2]}", most.grown - fewer.grown, at_most=5, unit=" MB")
    wide = at_once[_AT_ONCE[-1]].grown
    judge(f"scale: memory of {_AT_ONCE[-1]} uploads at once, above the import", wide, at_most=20, unit=" MB")
    many, few = tenants[_TENANTS[-1]], tenants[_TENANTS[-2]]
    what = f"scale: {_TENANTS[-1]} tenants: time of one, to that of {_TENANTS[-2]}"
    judge(what, many.micros / few.micros, at_most=1.1)
    what = f"scale: {_TENANTS[-1]} tenants: memory above that of {_TENANTS[-2]}"
    judge(what, many.grown - few.grown, at_most=5, unit=" MB")
    grown = {"uploads": uploads, "uploads at a time": at_once, "tenants": tenants}
    axis = "µs for each; bars of one length: time grows no faster than the work"
    panels = [Panel(name, _bars(costs, lambda cost: cost.micros)) for name, costs in grown.items()]
    draw(Chart("scale-time", "Time at scale", axis, panels))
    panels = [Panel(name, _bars(costs, lambda cost: cost.grown)) for name, costs in grown.items()]
    draw(Chart("scale-memory", "Memory at scale", "MB above the import, at the peak", panels))


def _costs(counts: Sequence[int], run: Callable[[int], Child]) -> dict[int, _Cost]:
    """The medians over the rounds; the counts take turns."""
    found: dict[int, list[_Cost]] = {count: [] for count in counts}
    for _ in range(_ROUNDS):
        for count in counts:
            child = run(count)
            found[count].append(_Cost(child.work * 1e6, child.grown / 1e6))
    return {
        count: _Cost(statistics.median(cost.micros for cost in costs), statistics.median(cost.grown for cost in costs))
        for count, costs in found.items()
    }


def _shown(what: str, title: str, costs: Mapping[int, _Cost]) -> None:
    rows = [[f"{count}", f"{cost.micros:.0f}", f"{cost.grown:.1f}"] for count, cost in costs.items()]
    show(Table(title, (what, "µs for each", "MB above the import"), rows, f"Medians of {_ROUNDS} rounds."))


def _bars(costs: Mapping[int, _Cost], of: Callable[[_Cost], float]) -> list[Bar]:
    return [Bar(f"{count}", of(cost), ours=True) for count, cost in costs.items()]


# In processes of their own


async def upload(port: int, folder: str, count: int, at_once: int) -> float:
    """Upload so many files, so many at a time; seconds for each."""
    paths = sorted(Path(folder).iterdir())
    async with aiohttp_session() as session, SigningClient(_origin(port), TOKEN, session=session) as client:
        signing = await client.signings.create(name="Leases", language="EN")

        async def upload_all(some: Iterable[Path]) -> None:
            async for result in client.documents.upload_many(signing, some, concurrency=at_once):
                if result.error is not None:
                    raise result.error

        # The first ones import and connect.
        await upload_all(paths[:at_once])
        return await _timed(upload_all(islice(cycle(paths), count))) / count


async def call_tenants(port: int, count: int) -> float:
    """A call for each of so many tenants, a thousand of whose clients at most are kept; seconds for each."""
    app = TenantApp(_origin(port), "client", "secret", "https://app.example.com/callback")
    async with aiohttp_session() as session, Tenants(_store, lambda tenant: app, session) as tenants:
        called = set()

        async def one(number: int) -> None:
            async with tenants.client(f"tenant-{number}") as client:
                await client.me()
                called.add(number)

        # The first ones import and connect.
        await _in_turns(range(-8, 0), 8, one)
        called.clear()
        seconds = await _timed(_in_turns(range(count), 8, one))
    assert len(called) == count
    return seconds / count


def _store(tenant: str) -> MemoryTokenStore:
    return MemoryTokenStore(Token(f"{TOKEN}-{tenant}"))


def _origin(port: int) -> str:
    return f"http://127.0.0.1:{port}"


async def _timed(work: Awaitable[None]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def _in_turns(things: Iterable[T], at_once: int, do: Callable[[T], Awaitable[None]]) -> None:
    waiting = iter(things)

    async def work() -> None:
        for thing in waiting:
            await do(thing)

    await asyncio.gather(*(work() for _ in range(at_once)))
