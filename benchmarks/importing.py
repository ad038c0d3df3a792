"""Starts fresh processes that import: this package, its webhooks, a client made ready, aiohttp, other SDKs."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable

from .charts import Bar, Chart, Panel
from .measure import MISSING, in_process, interleaved, median, quick, ratio, spread
from .report import OURS, Table, draw, judge, show

_BARE = "bare Python"
_READY, _WEBHOOKS = f"{OURS}, a client ready", f"{OURS}.webhooks"
_SOURCES = {
    _BARE: "pass",
    OURS: "import signing_async",
    _WEBHOOKS: "import signing_async.webhooks",
    _READY: "from signing_async import SigningClient; client = SigningClient('https://tenant.example.com', 'token')",
}
_PEERS = ("aiohttp", "httpx", "stripe", "openai", "docusign_esign", "dropbox_sign")
_ROUNDS, _SECONDS = 15, 25.0


def main() -> None:
    asyncio.run(_compare())


async def _compare() -> None:
    candidates: dict[str, Callable[[], Awaitable[object]] | None] = {
        name: _started(source) for name, source in _SOURCES.items()
    }
    for name in _PEERS[:2] if quick() else _PEERS:
        candidates[name] = _started(f"import {name}") if importlib.util.find_spec(name) else None
    # The warm-up writes the bytecode that the rounds then load.
    samples = await interleaved(candidates, rounds=_ROUNDS, seconds=_SECONDS, expect=0)
    bare = median(samples[_BARE], "cpu")
    rows = [
        [
            name,
            f"{ratio(samples, name, 'aiohttp'):.2f}",
            f"{ratio(samples, name, 'aiohttp', 'cpu'):.2f}",
            "{:.2f} to {:.2f}".format(*spread(samples, name, "aiohttp", "cpu")),
            f"{median(taken, 'cpu') * 1000:.0f}",
            f"{(median(taken, 'cpu') - bare) * 1000:.1f}",
        ]
        if taken
        else [name, MISSING, "", "", "", ""]
        for name, taken in samples.items()
    ]
    columns = ("import", "wall, to aiohttp", "CPU, to aiohttp", "middle half", "ms of CPU", "above bare Python")
    note = f"Whole processes, the interpreter's start included. Medians of {len(samples[OURS])} rounds."
    show(Table("import, each in a fresh process", columns, rows, note))
    judge("import signing_async: CPU, of import aiohttp", ratio(samples, OURS, "aiohttp", "cpu"), at_most=0.25)
    judge("import with a client ready: CPU, of import aiohttp", ratio(samples, _READY, "aiohttp", "cpu"), at_most=1.15)
    bars = [
        Bar(name, median(taken, "cpu") * 1000 if taken else None, name.startswith(OURS))
        for name, taken in samples.items()
    ]
    axis = "ms of CPU time of a fresh process, the interpreter's start included; shorter is better"
    draw(Chart("importing", "Import", axis, [Panel("import", bars)]))


def _started(source: str) -> Callable[[], Awaitable[object]]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", source]
    return in_process(lambda: subprocess.run(command, env=environment, check=False).returncode)
