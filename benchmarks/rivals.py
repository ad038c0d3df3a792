"""The HTTP clients that the comparisons are made with, made in one way each, so that none is slow for its settings."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from .measure import peer
from .server import Server

TOKEN = "benchmark"
AT_ONCE = 8
HEADERS = {"Accept": "application/json", "Authorization": f"Bearer {TOKEN}"}

httpx = peer("httpx")


def aiohttp_session(context: ssl.SSLContext | None = None) -> aiohttp.ClientSession:
    """As the package's client makes its own: no cookies, no deadline and no limit of aiohttp's own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=context or True),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
    )


def httpx_client(context: ssl.SSLContext | None = None) -> Any:
    """Without the environment's proxies and authorities, and without a deadline."""
    assert httpx is not None
    return httpx.AsyncClient(verify=context or True, timeout=None, trust_env=False, headers=HEADERS)


def has_curl() -> bool:
    return shutil.which("curl") is not None


async def each(work: Callable[[Path], Awaitable[object]], paths: Sequence[Path]) -> None:
    """Do the work for all paths, `AT_ONCE` at a time."""
    waiting = iter(paths)

    async def worker() -> None:
        for path in waiting:
            await work(path)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))


def run_curl(server: Server, url: str, lines: Sequence[str], *more: str) -> None:
    """Run one curl for all files; each of the lines is of one file, and the others of every file."""
    common = [f'url = "{url}"', "fail", "silent", f'cacert = "{server.authority}"', *more]
    common += [f'header = "{name}: {value}"' for name, value in HEADERS.items()]
    config = "\nnext\n".join("\n".join([*common, line]) for line in lines)
    command = ["curl", "--parallel", "--parallel-max", str(AT_ONCE), "--no-progress-meter", "--config", "-"]
    subprocess.run(command, input=config.encode(), check=True, stderr=subprocess.DEVNULL)
