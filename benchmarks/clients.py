"""Makes clients on one shared session, as a service with thousands of tenants does, and views with other options."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp

from signing_async import RetryPolicy, SigningClient

from .measure import in_process, interleaved, median, quick
from .report import Table, judge, show

_URL = "https://tenant.example.com"
_CLIENTS = 10 if quick() else 1000


def main() -> None:
    asyncio.run(_compare())


async def _compare() -> None:
    async with aiohttp.ClientSession() as session:
        client = SigningClient(_URL, "token", session=session)
        other = RetryPolicy(max_attempts=2)
        ways = {
            "SigningClient(url, token, session=session)": lambda: SigningClient(_URL, "token", session=session),
            "client.with_options(timeout=5)": lambda: client.with_options(timeout=5),
            "client.with_options(retry=...)": lambda: client.with_options(retry=other),
        }
        candidates = {name: _many(make) for name, make in ways.items()}
        samples = await interleaved(candidates, rounds=31, seconds=4.0, expect=_CLIENTS)
    rows = [[name, f"{median(taken, 'cpu') / _CLIENTS * 1e6:.1f}"] for name, taken in samples.items()]
    note = "Its aiohttp session, connections and TLS context are the shared ones."
    show(Table("a client on a shared session", ("what", "µs of CPU a piece"), rows, note))
    judge("a client on a shared session", float(rows[0][1]), at_most=50, unit=" µs of CPU")


def _many(make: Callable[[], SigningClient]) -> Callable[[], Awaitable[object]]:
    return in_process(lambda: len({id(client) for client in [make() for _ in range(_CLIENTS)]}))
