"""Uploads to a service that allows so many requests a second: against a loop of as many tasks that retries after a 429.

The service accepts a second's worth at once, and rejects the others with 429 and ``Retry-After: 1``. And what the rate
limiter costs if no request is rejected: the same uploads with a limiter that does nothing.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

import aiohttp

from signing_async import PdfSource, SigningClient

from .charts import Bar, Chart, Panel
from .measure import comparison, interleaved, quick, ratio
from .report import OURS, Table, draw, judge, show
from .rivals import HEADERS, TOKEN, aiohttp_session
from .server import Server, pdf_bytes, running

_RATE, _AT_ONCE = (200, 32) if quick() else (50, 32)
_UPLOADS, _ROUNDS = (220, 1) if quick() else (500, 3)
_UNLIMITED = "without a rate limiter"
_NAIVE = "aiohttp, a loop with retry"
_PDF = pdf_bytes(50_000)
_PATH = "/api/1.0/signings/s1/documents"


def main() -> None:
    with running() as server:
        asyncio.run(_compare(server))
        asyncio.run(_compare_unlimited(server))


async def _compare(server: Server) -> None:
    # A second's worth is accepted at once.
    ideal = (_UPLOADS - _RATE) / _RATE
    seconds: dict[str, list[float]] = {OURS: [], _NAIVE: []}
    refused: dict[str, list[float]] = {OURS: [], _NAIVE: []}
    for _ in range(_ROUNDS):
        for name, run in ((OURS, _ours), (_NAIVE, _naive)):
            server.configure(rate=_RATE)
            began = time.perf_counter()
            await run(server)
            seconds[name].append(time.perf_counter() - began)
            counts = server.counts()
            assert counts["uploads"] == _UPLOADS, counts
            refused[name].append(counts["refused"] / counts["requests"])
    rows = [
        [
            name,
            f"{statistics.median(taken):.1f}",
            f"{statistics.median(taken) / ideal:.2f}",
            f"{_share(refused, name):.1%}",
        ]
        for name, taken in seconds.items()
    ]
    note = (
        f"The ideal is {ideal:.1f} s: a second's worth at once, and then {_RATE} a second. Medians of {_ROUNDS} rounds."
    )
    title = f"{_UPLOADS} uploads, {_AT_ONCE} at a time, of which {_RATE} per second are accepted"
    show(Table(title, ("candidate", "seconds", "of the ideal", "rejected"), rows, note))
    judge("limited uploads: time, of the ideal", statistics.median(seconds[OURS]) / ideal, at_most=1.15)
    judge("limited uploads: rejected, %", 100 * _share(refused, OURS), at_most=3, unit=" %")
    bars = [Bar(name, 100 * _share(refused, name), name == OURS) for name in seconds]
    draw(
        Chart(
            "limited",
            "Uploads within a rate limit",
            "% of requests rejected; shorter is better",
            [Panel(title, bars, 3)],
        )
    )


def _share(refused: dict[str, list[float]], name: str) -> float:
    return statistics.median(refused[name])


async def _ours(server: Server) -> None:
    async with SigningClient(server.plain, TOKEN) as client:
        sources = (PdfSource(_PDF, f"lease-{number}.pdf") for number in range(_UPLOADS))
        async for result in client.documents.upload_many("s1", sources, concurrency=_AT_ONCE):
            if result.error is not None:
                raise result.error


async def _naive(server: Server) -> None:
    numbers = iter(range(_UPLOADS))
    async with aiohttp_session() as session:

        async def work() -> None:
            for number in numbers:
                while not await _sent(session, server.plain + _PATH, f"lease-{number}.pdf"):
                    pass

        await asyncio.gather(*(work() for _ in range(_AT_ONCE)))


async def _sent(session: aiohttp.ClientSession, url: str, name: str) -> bool:
    """Return whether the upload was accepted; if not, after the Retry-After."""
    form = aiohttp.FormData()
    form.add_field("selected_file", _PDF, filename=name, content_type="application/pdf")
    async with session.post(url, data=form, headers=HEADERS) as response:
        await response.read()
        if response.status != 429:
            response.raise_for_status()
            return True
    await asyncio.sleep(float(response.headers["Retry-After"]))
    return False


# Without rejections


class _Open:
    """A rate limiter that does nothing."""

    next_at = 0.0

    async def acquire(self, deadline: float) -> bool:
        return True

    def release(self, acquired_at: float, accepted: bool | None) -> None:
        pass

    def pause(self, seconds: float) -> None:
        raise AssertionError("no request is rejected")


async def _compare_unlimited(server: Server) -> None:
    server.configure()

    def candidate(*, limited: bool) -> Callable[[], Awaitable[int]]:
        async def run() -> int:
            # A new client each time: slow start counts.
            async with SigningClient(server.plain, TOKEN, rate_limiter=None if limited else _Open()) as client:
                calls = iter(range(_UPLOADS))

                async def work() -> None:
                    for number in calls:
                        await client.documents.upload("s1", PdfSource(_PDF, f"lease-{number}.pdf"))

                await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
            return _UPLOADS

        return run

    runs = {OURS: candidate(limited=True), _UNLIMITED: candidate(limited=False)}
    samples = await interleaved(runs, rounds=21, seconds=15.0, expect=_UPLOADS, server=server.cpu)
    title = f"{_UPLOADS} uploads, {_AT_ONCE} at a time, none rejected"
    show(comparison(title, samples, _UNLIMITED, count=_UPLOADS))
    judge("uploads without rejections: speed, of unlimited", ratio(samples, _UNLIMITED, OURS), at_least=0.97)
