"""Calls at concurrency 32 through the gate that workers share in Redis: what it costs above the local one."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator

from signing_async import LocalRateLimiter, RateLimiter, SigningClient
from signing_async.redis import RedisRateLimiter

from .measure import comparison, interleaved, quick, ratio
from .report import OURS, judge, show
from .rivals import TOKEN
from .server import Server, running

_CONCURRENCY = 32
_CALLS = 64 if quick() else 1600
_ROUNDS, _SECONDS = 41, 15.0
_LOCAL, _CLOSINGS = "LocalGate", "RedisGate without a rate"
# More than any client here can make, so the rate never limits one.
_PER_SECOND = 100_000


def main() -> None:
    with running() as server, _redis() as url:
        if url is None:
            print("no redis-server on this machine: nothing to compare\n")
            return
        asyncio.run(_compare(server, url))


async def _compare(server: Server, url: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        limiters: dict[str, RateLimiter] = {
            _LOCAL: LocalRateLimiter(),
            _CLOSINGS: await stack.enter_async_context(RedisRateLimiter(url, "closings")),
            OURS: await stack.enter_async_context(RedisRateLimiter(url, "rate", rate=_PER_SECOND)),
        }
        runs: dict[str, Callable[[], Awaitable[object]] | None] = {}
        for name, limiter in limiters.items():
            client = SigningClient(server.plain, TOKEN, rate_limiter=limiter)
            runs[name] = _at_once(await stack.enter_async_context(client))
        samples = await interleaved(runs, rounds=_ROUNDS, seconds=_SECONDS, expect=_CALLS, server=server.cpu)
    show(
        comparison(
            f"{_CALLS} calls, {_CONCURRENCY} at a time; {OURS}: RedisGate with a rate (a piece is a call)",
            samples,
            _LOCAL,
            count=_CALLS,
        )
    )
    judge("shared gate: throughput, of the local gate's", ratio(samples, _LOCAL, _CLOSINGS), at_least=0.9)
    judge("shared gate with a rate: throughput, of the local gate's", ratio(samples, _LOCAL, OURS), at_least=0.9)


def _at_once(client: SigningClient) -> Callable[[], Awaitable[object]]:
    async def run() -> object:
        left = iter(range(_CALLS))

        async def worker() -> int:
            done = 0
            for _ in left:
                await client.me()
                done += 1
            return done

        return sum(await asyncio.gather(*(worker() for _ in range(_CONCURRENCY))))

    return run


@contextlib.contextmanager
def _redis() -> Iterator[str | None]:
    """The URL of a Redis in a process of its own; None where the machine has none."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            _await_port(port)
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _await_port(port: int) -> None:
    until = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    main()
