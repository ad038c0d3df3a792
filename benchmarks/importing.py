"""Starts fresh processes that import: this package, its webhooks, a client made ready, aiohttp, other SDKs."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable

from .measure import Table, in_process, interleaved, median, quick, ratio, show

_READY = "from signing_async import SigningClient; client = SigningClient('https://tenant.example.com', 'token')"
_OURS = {
    "bare Python": "pass",
    "aiohttp": "import aiohttp",
    "signing_async": "import signing_async",
    "signing_async.webhooks": "import signing_async.webhooks",
    "signing_async, a client ready": _READY,
    "httpx": "import httpx",
}
_PEERS = ("stripe", "openai", "docusign_esign", "dropbox_sign")
_ROUNDS = 1 if quick() else 31


def main() -> None:
    asyncio.run(_compare())


async def _compare() -> None:
    installed = [peer for peer in _PEERS if importlib.util.find_spec(peer) is not None]
    sources = _OURS if quick() else _OURS | {peer: f"import {peer}" for peer in installed}
    candidates = {name: _started(source) for name, source in sources.items()}
    # The warm-up writes the bytecode that the rounds then load.
    samples = await interleaved(candidates, rounds=_ROUNDS, expect=0)
    bare = median(samples["bare Python"], "cpu")
    rows = [
        [
            name,
            f"{ratio(samples, name, 'aiohttp'):.2f}",
            f"{ratio(samples, name, 'aiohttp', 'cpu'):.2f}",
            f"{median(taken, 'cpu') * 1000:.0f}",
            f"{(median(taken, 'cpu') - bare) * 1000:.1f}",
        ]
        for name, taken in samples.items()
    ]
    package = ratio(samples, "signing_async", "aiohttp", "cpu")
    ready = ratio(samples, "signing_async, a client ready", "aiohttp", "cpu")
    columns = ("import", "wall, to aiohttp", "CPU, to aiohttp", "ms of CPU", "above bare Python")
    note = (
        f"The package takes {package:.2f} of what aiohttp takes (target: at most 0.25), "
        f"with a client ready {ready:.2f} (target: at most 1.15). Whole processes, the interpreter's start included."
    )
    show(Table("import, each in a fresh process", columns, rows, note))


def _started(source: str) -> Callable[[], Awaitable[object]]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", source]
    return in_process(lambda: subprocess.run(command, env=environment, check=False).returncode)
