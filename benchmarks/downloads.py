"""Downloads of signed files to disk: against the best loop one writes by hand with aiohttp, and the memory they take.

The loop by hand promises nothing: a file may be half of one, or an error page. Written with the same promises (checked,
hashed, flushed to the disk, put in place at once), but in the event loop, it is shown as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import attrs

from signing_async import SigningClient

from .measure import COMPARED, Table, compared, in_child, interleaved, quick, ratio, show
from .server import Server, pdf_bytes, running

_TOKEN = "benchmark"
_HEADERS = {"Accept": "application/json", "Authorization": f"Bearer {_TOKEN}"}
_PATH = "/api/1.0/signings/s1/documents/d1/download-signed"
_OURS, _BY_HAND, _PROMISING = "signing_async", "aiohttp by hand", "by hand, same promises"
_TARGET = 0.95
_SIZE = 1_000_000
_FILES, _ROUNDS = (9, 1) if quick() else (100, 21)

Download = Callable[[Path], Awaitable[object]]


def main() -> None:
    with running() as server:
        server.configure(download_bytes=_SIZE)
        for at_once in (1, 8):
            with tempfile.TemporaryDirectory() as folder:
                asyncio.run(_compare(server, Path(folder), at_once))
        _compare_memory(server)


@contextlib.asynccontextmanager
async def _session() -> AsyncIterator[aiohttp.ClientSession]:
    # As the client makes its own session: no cookies, no limit of aiohttp's own.
    session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), timeout=aiohttp.ClientTimeout(total=None))
    async with session:
        yield session


@contextlib.asynccontextmanager
async def _ours(origin: str) -> AsyncIterator[Download]:
    async with _session() as session:
        client = SigningClient(origin, _TOKEN, session=session)
        yield lambda path: client.documents.download_signed("s1", "d1", path)


@contextlib.asynccontextmanager
async def _by_hand(origin: str) -> AsyncIterator[Download]:
    async with _session() as session:

        async def download(path: Path) -> None:
            async with session.get(origin + _PATH, headers=_HEADERS) as response:
                response.raise_for_status()
                with path.open("wb", buffering=0) as file:
                    async for chunk in response.content.iter_any():
                        file.write(chunk)

        yield download


@contextlib.asynccontextmanager
async def _promising(origin: str) -> AsyncIterator[Download]:
    async with _session() as session:

        async def download(path: Path) -> str:
            part, digest = path.with_suffix(".part"), hashlib.sha256()
            async with session.get(origin + _PATH, headers=_HEADERS) as response:
                response.raise_for_status()
                with part.open("wb", buffering=0) as file:
                    async for chunk in response.content.iter_any():
                        digest.update(chunk)
                        file.write(chunk)
                    os.fsync(file.fileno())
            part.replace(path)
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
            return digest.hexdigest()

        yield download


_CANDIDATES = {_OURS: _ours, _BY_HAND: _by_hand, _PROMISING: _promising}


async def _all(download: Download, folder: Path, files: int, at_once: int) -> int:
    """Download so many files, so many at a time; the bytes that are on the disk then."""
    waiting = iter([folder / f"signed-{number}.pdf" for number in range(files)])

    async def work() -> int:
        size = 0
        for path in waiting:
            await download(path)
            size += path.stat().st_size
        return size

    return sum(await asyncio.gather(*(work() for _ in range(at_once))))


async def _compare(server: Server, folder: Path, at_once: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        candidates: dict[str, Callable[[], Awaitable[object]]] = {}
        for name, candidate in _CANDIDATES.items():
            download = await stack.enter_async_context(candidate(server.plain))
            candidates[name] = _run(download, folder, at_once)
        samples = await interleaved(candidates, rounds=_ROUNDS, expect=_FILES * _SIZE)
    if any(path.read_bytes() != pdf_bytes(_SIZE) for path in folder.glob("*.pdf")):
        raise AssertionError("what was written is not what was sent")
    speeds = [f"{ratio(samples, other, _OURS):.2f} of {other}" for other in (_BY_HAND, _PROMISING)]
    note = f"Speed of {_OURS}: {', '.join(speeds)} (target: {_TARGET} of the former)."
    title = f"{_FILES} downloads of {_SIZE // 1000} KB, {at_once} at a time"
    show(Table(title, COMPARED, compared(samples, _BY_HAND, count=_FILES), note))


def _run(download: Download, folder: Path, at_once: int) -> Callable[[], Awaitable[object]]:
    return lambda: _all(download, folder, _FILES, at_once)


def _compare_memory(server: Server) -> None:
    rows = []
    for size in (_SIZE, 10 * _SIZE):
        server.configure(download_bytes=size)
        for name in _CANDIDATES:
            child = in_child(download_all, name, server.plain)
            mb = [f"{value / 1e6:.1f}" for value in attrs.astuple(child)[2:]]
            rows.append([f"{name}, {size // 10**6} MB", *mb, f"{child.grown / 1e6:.1f}"])
    note = "Resident memory in MB of a process that downloads them, 8 at a time."
    show(Table("Memory of downloads", ("candidate", "imported", "peak", "more"), rows, note))


async def download_all(name: str, origin: str) -> int:
    """For a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        async with _CANDIDATES[name](origin) as download:
            return await _all(download, Path(folder), min(_FILES, 40), 8)
