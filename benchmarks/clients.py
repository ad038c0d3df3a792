"""Makes clients on one shared session, as a service with thousands of tenants does, and views with other options."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp

from signing_async import RetryPolicy, SigningClient

from .measure import Table, in_process, interleaved, median, quick, show

_URL = "https://tenant.example.com"
_CLIENTS, _ROUNDS = (10, 1) if quick() else (1000, 31)


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
        samples = await interleaved(candidates, rounds=_ROUNDS, expect=_CLIENTS)
    rows = [[name, f"{median(taken, 'cpu') / _CLIENTS * 1e6:.1f}"] for name, taken in samples.items()]
    note = "Target: a client under 50 µs. Its aiohttp session, connections and TLS context are the shared ones."
    show(Table("a client on a shared session", ("what", "µs of CPU a piece"), rows, note))


def _many(make: Callable[[], SigningClient]) -> Callable[[], Awaitable[object]]:
    return in_process(lambda: len({id(client) for client in [make() for _ in range(_CLIENTS)]}))
