"""Downloads of signed files to disk, 8 at a time: by hand with this package's promises, curl, and the barest loop.

The bare loop promises nothing: it may leave half a file, or an error page. The loop with the same promises hashes the
file, flushes it to disk and replaces the target atomically, but blocks the event loop meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from signing_async import SigningClient

from .charts import Chart, Panel
from .measure import comparison, interleaved, panel, quick, ratio
from .report import OURS, draw, judge, notice, show
from .rivals import AT_ONCE, HEADERS, TOKEN, aiohttp_session, each, has_curl, run_curl
from .server import Server, pdf_bytes, running

_PATH = "/api/1.0/signings/s1/documents/d1/download-signed"
_PROMISING, _LIMIT, _CURL = "aiohttp by hand, our promises", "aiohttp by hand, no promise", "curl -Z"
_SIZE = 1_000_000
_FILES = 3 if quick() else 100

Download = Callable[[Path], Awaitable[object]]
DownloadAll = Callable[[Sequence[Path]], Awaitable[object]]


def main() -> None:
    with running() as server, tempfile.TemporaryDirectory() as folder:
        server.configure(download_bytes=_SIZE)
        kinds = (True,) if quick() else (False, True)
        panels = [asyncio.run(_compare(server, secure, Path(folder))) for secure in kinds]
    axis = "time relative to a loop written by hand with the same promises; shorter is better"
    draw(Chart("downloads", f"Downloads to disk, {AT_ONCE} at a time", axis, panels))


# The candidates


@contextlib.asynccontextmanager
async def _ours(server: Server, secure: bool) -> AsyncIterator[Download]:
    async with aiohttp_session(server.ssl_context()) as session:
        client = SigningClient(server.origin(secure=secure), TOKEN, session=session)
        yield lambda path: client.documents.download_signed("s1", "d1", path)


@contextlib.asynccontextmanager
async def _limit(server: Server, secure: bool) -> AsyncIterator[Download]:
    async with aiohttp_session(server.ssl_context()) as session:

        async def download(path: Path) -> None:
            async with session.get(server.origin(secure=secure) + _PATH, headers=HEADERS) as response:
                response.raise_for_status()
                with path.open("wb", buffering=0) as file:
                    async for chunk in response.content.iter_any():
                        file.write(chunk)

        yield download


@contextlib.asynccontextmanager
async def _promising(server: Server, secure: bool) -> AsyncIterator[Download]:
    async with aiohttp_session(server.ssl_context()) as session:

        async def download(path: Path) -> str:
            part, digest = path.with_suffix(".part"), hashlib.sha256()
            async with session.get(server.origin(secure=secure) + _PATH, headers=HEADERS) as response:
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


_ONE_BY_ONE = {OURS: _ours, _PROMISING: _promising, _LIMIT: _limit}


async def _with_curl(server: Server, secure: bool, paths: Sequence[Path]) -> None:
    run_curl(server, server.origin(secure=secure) + _PATH, [f'output = "{path}"' for path in paths])


# What is measured


async def _compare(server: Server, secure: bool, folder: Path) -> Panel:
    paths = [folder / f"signed-{number}.pdf" for number in range(_FILES)]
    async with contextlib.AsyncExitStack() as stack:
        everyone: dict[str, DownloadAll | None] = {}
        for name, make in _ONE_BY_ONE.items():
            everyone[name] = partial(each, await stack.enter_async_context(make(server, secure)))
        everyone[_CURL] = partial(_with_curl, server, secure) if has_curl() else None
        await _check(everyone, paths)
        runs = {name: partial(_run, download, paths) if download else None for name, download in everyone.items()}
        # The check has warmed them up.
        samples = await interleaved(
            runs,
            rounds=15,
            seconds=12.0,
            warm_up=0,
            expect=_FILES * _SIZE,
            server=server.cpu,
            prepare=partial(_remove, paths),
        )
    kind = f"{_FILES} × {_SIZE // 1000} KB, {'TLS' if secure else 'plain'}"
    title = f"{kind}, {AT_ONCE} at a time"
    show(comparison(title, samples, _PROMISING, count=_FILES))
    judge(f"downloads, {title}: speed, of the same promises by hand", ratio(samples, _PROMISING, OURS), at_least=1.0)
    if secure:
        speed = ratio(samples, _PROMISING, OURS)
        notice(f"A download over TLS is {speed:.1f} times as fast as a loop by hand that hashes and flushes the file.")
    return panel(kind, samples, _PROMISING)


async def _run(download: DownloadAll, paths: Sequence[Path]) -> int:
    await download(paths)
    return sum(path.stat().st_size for path in paths)


async def _check(everyone: dict[str, DownloadAll | None], paths: Sequence[Path]) -> None:
    """That each candidate writes the very bytes that are sent."""
    expected = hashlib.sha256(pdf_bytes(_SIZE)).digest()
    for name, download in everyone.items():
        _remove(paths)
        if download is not None:
            await download(paths)
            if any(hashlib.sha256(path.read_bytes()).digest() != expected for path in paths):
                raise AssertionError(f"{name} wrote something else than what was sent")


def _remove(paths: Sequence[Path]) -> None:
    """Before every run: a file that is written over is flushed to the disk by some file systems when it is closed."""
    for path in paths:
        path.unlink(missing_ok=True)
