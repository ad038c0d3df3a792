"""Starts fresh processes that import: nothing, this package, a client made ready, aiohttp, httpx, stripe."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable

from .charts import Chart
from .measure import comparison, in_process, interleaved, panel, quick, ratio
from .report import OURS, draw, judge, show

_BARE = "bare Python"
_READY = f"{OURS}, a client ready"
_SOURCES = {
    _BARE: "pass",
    OURS: "import signing_async",
    _READY: "from signing_async import SigningClient; client = SigningClient('https://tenant.example.com', 'token')",
}
_PEERS = ("aiohttp",) if quick() else ("aiohttp", "httpx", "stripe")
_ROUNDS, _SECONDS = 15, 25.0


def main() -> None:
    asyncio.run(_compare())


async def _compare() -> None:
    candidates: dict[str, Callable[[], Awaitable[object]] | None] = {
        name: _started(source) for name, source in _SOURCES.items()
    }
    for name in _PEERS:
        candidates[name] = _started(f"import {name}") if importlib.util.find_spec(name) else None
    # The warm-up writes the bytecode that the rounds then load.
    samples = await interleaved(candidates, rounds=_ROUNDS, seconds=_SECONDS, expect=0)
    show(comparison("import, each in a fresh process, the interpreter's start included", samples, "aiohttp"))
    judge("import signing_async: CPU, of import aiohttp", ratio(samples, OURS, "aiohttp", "cpu"), at_most=0.25)
    judge("import with a client ready: CPU, of import aiohttp", ratio(samples, _READY, "aiohttp", "cpu"), at_most=1.12)
    axis = "CPU time of a fresh process relative to import aiohttp; shorter is better"
    draw(Chart("importing", "Import", axis, [panel("import", samples, "aiohttp", "cpu")]))


def _started(source: str) -> Callable[[], Awaitable[object]]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", source]
    return in_process(lambda: subprocess.run(command, env=environment, check=False).returncode)
