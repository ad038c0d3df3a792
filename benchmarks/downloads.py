"""Downloads of signed files to disk: against what else one would fetch them with, and the best loop written by hand.

The loops by hand promise nothing: a file may be half of one, or an error page. The best of them is shown once more with
the same promises as this package (hashed, flushed to the disk, put in its place at once), but in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from signing_async import SigningClient

from .charts import Chart, Panel
from .measure import comparison, in_child, interleaved, on_both_cores, panel, peer, quick, ratio
from .report import OURS, Table, draw, judge, show
from .rivals import HEADERS, TOKEN, aiohttp_session, has_curl, httpx, httpx_client
from .server import Server, pdf_bytes, running

_PATH = "/api/1.0/signings/s1/documents/d1/download-signed"
_BY_HAND, _PROMISING = "aiohttp by hand, iter_any", "the same, with our promises"
_AIOFILES, _HTTPX, _CURL = "aiohttp and aiofiles", "httpx", "curl -Z"
_SIZE = 1_000_000
_FILES = 9 if quick() else 100
_CHARTED = 8
_TMPFS = Path("/dev/shm")
_TO_TMPFS, _ON_BOTH = "to tmpfs", "the client on both cores"

aiofiles: Any = peer("aiofiles")

Download = Callable[[Path], Awaitable[object]]
DownloadAll = Callable[[Sequence[Path]], Awaitable[object]]


@attrs.frozen
class _Case:
    secure: bool
    at_once: int
    rounds: int
    seconds: float
    more: str = ""
    """What differs from the usual: ``_TO_TMPFS``, ``_ON_BOTH`` or nothing."""

    @property
    def kind(self) -> str:
        kind = f"{_FILES} × {_SIZE // 1000} KB, {'TLS' if self.secure else 'plain'}"
        return f"{kind}, {self.more}" if self.more else kind


def _cases() -> Iterator[_Case]:
    kinds = [_ON_BOTH, *([_TO_TMPFS] if _TMPFS.is_dir() else [])]
    if quick():
        yield _Case(secure=False, at_once=_CHARTED, rounds=1, seconds=0)
        yield _Case(secure=True, at_once=_CHARTED, rounds=1, seconds=0)
        for more in kinds:
            yield _Case(secure=False, at_once=_CHARTED, rounds=1, seconds=0, more=more)
        return
    for secure in (False, True):
        for at_once in (1, _CHARTED, 50):
            rounds, seconds = (15, 12.0) if at_once == _CHARTED else (3, 0.0)
            yield _Case(secure, at_once, rounds, seconds)
        for more in kinds:
            yield _Case(secure, _CHARTED, rounds=7, seconds=8.0, more=more)


def main() -> None:
    panels: list[Panel] = []
    fast = _TMPFS if _TMPFS.is_dir() else None
    with (
        running() as server,
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=fast) as in_tmpfs,
    ):
        server.configure(download_bytes=_SIZE)
        for case in _cases():
            target = Path(in_tmpfs if case.more == _TO_TMPFS else folder)
            with on_both_cores() if case.more == _ON_BOTH else contextlib.nullcontext():
                panels += asyncio.run(_compare(server, case, target))
        _compare_memory(server)
    axis = "time relative to the best loop written by hand; shorter is better"
    draw(Chart("downloads", f"Downloads to disk, {_CHARTED} at a time", axis, panels))


# The candidates


@contextlib.asynccontextmanager
async def _ours(server: Server, secure: bool) -> AsyncIterator[Download]:
    async with aiohttp_session(server.ssl_context()) as session:
        client = SigningClient(server.origin(secure=secure), TOKEN, session=session)
        yield lambda path: client.documents.download_signed("s1", "d1", path)


@contextlib.asynccontextmanager
async def _by_hand(server: Server, secure: bool) -> AsyncIterator[Download]:
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


@contextlib.asynccontextmanager
async def _with_aiofiles(server: Server, secure: bool) -> AsyncIterator[Download]:
    async with aiohttp_session(server.ssl_context()) as session:

        async def download(path: Path) -> None:
            async with session.get(server.origin(secure=secure) + _PATH, headers=HEADERS) as response:
                response.raise_for_status()
                async with aiofiles.open(path, "wb") as file:
                    async for chunk in response.content.iter_chunked(64 * 1024):
                        await file.write(chunk)

        yield download


@contextlib.asynccontextmanager
async def _with_httpx(server: Server, secure: bool) -> AsyncIterator[Download]:
    async with httpx_client(server.ssl_context()) as client:

        async def download(path: Path) -> None:
            async with client.stream("GET", server.origin(secure=secure) + _PATH) as response:
                response.raise_for_status()
                with path.open("wb", buffering=0) as file:
                    async for chunk in response.aiter_bytes():
                        file.write(chunk)

        yield download


_ASYNC = {OURS: _ours, _BY_HAND: _by_hand, _PROMISING: _promising}
if aiofiles is not None:
    _ASYNC[_AIOFILES] = _with_aiofiles
if httpx is not None:
    _ASYNC[_HTTPX] = _with_httpx


async def _all(download: Download, at_once: int, paths: Sequence[Path]) -> None:
    """Download to all these places, so many at a time."""
    waiting = iter(paths)

    async def work() -> None:
        for path in waiting:
            await download(path)

    await asyncio.gather(*(work() for _ in range(at_once)))


async def _with_curl(server: Server, secure: bool, at_once: int, paths: Sequence[Path]) -> None:
    """One process for all files."""
    common = [f'header = "{name}: {value}"' for name, value in HEADERS.items()]
    common += ["fail", "silent", f'cacert = "{server.authority}"', f'url = "{server.origin(secure=secure)}{_PATH}"']
    each = "\nnext\n".join("\n".join([*common, f'output = "{path}"']) for path in paths)
    command = ["curl", "--parallel", "--parallel-max", str(at_once), "--no-progress-meter", "--config", "-"]
    subprocess.run(command, input=each.encode(), check=True, stderr=subprocess.DEVNULL)


@contextlib.asynccontextmanager
async def _everyone(server: Server, case: _Case) -> AsyncIterator[dict[str, DownloadAll | None]]:
    """All candidates, connected; None for one that is missing."""
    async with contextlib.AsyncExitStack() as stack:
        found: dict[str, DownloadAll | None] = dict.fromkeys([OURS, _BY_HAND, _PROMISING, _AIOFILES, _HTTPX, _CURL])
        for name, make in _ASYNC.items():
            download = await stack.enter_async_context(make(server, case.secure))
            found[name] = partial(_all, download, case.at_once)
        if has_curl():
            found[_CURL] = partial(_with_curl, server, case.secure, case.at_once)
        yield found


# What is measured


async def _compare(server: Server, case: _Case, folder: Path) -> list[Panel]:
    paths = [folder / f"signed-{number}.pdf" for number in range(_FILES)]
    async with _everyone(server, case) as everyone:
        await _check(everyone, paths)
        runs = {name: partial(_run, download, paths) if download else None for name, download in everyone.items()}
        # The check has warmed them up.
        samples = await interleaved(
            runs,
            rounds=case.rounds,
            seconds=case.seconds,
            warm_up=0,
            expect=_FILES * _SIZE,
            server=server.cpu,
            prepare=partial(_remove, paths),
        )
    title = f"{case.kind}, {case.at_once} at a time"
    show(comparison(title, samples, _BY_HAND, count=_FILES))
    if case.more == _ON_BOTH:
        judge(f"downloads, {title}: speed, of the best loop by hand", ratio(samples, _BY_HAND, OURS), at_least=0.9)
    if case.at_once != _CHARTED or case.more:
        return []
    judge(f"downloads, {title}: speed, of the same promises by hand", ratio(samples, _PROMISING, OURS), at_least=1.0)
    judge(f"downloads, {title}: speed, of the best loop by hand", ratio(samples, _BY_HAND, OURS), at_least=0.95)
    if samples[_HTTPX]:
        judge(f"downloads, {title}: times as fast as httpx", ratio(samples, _HTTPX, OURS), at_least=2.0)
    return [panel(case.kind, samples, _BY_HAND)]


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


def _compare_memory(server: Server) -> None:
    rows = []
    for size in (_SIZE,) if quick() else (_SIZE, 10 * _SIZE):
        server.configure(download_bytes=size)
        for name in [OURS] if quick() else _ASYNC:
            child = in_child(download_all, name, server.pid, server.port, server.tls_port, str(server.authority))
            mb = [f"{value / 1e6:.1f}" for value in (child.imported, child.peak, child.grown)]
            rows.append([f"{name}, {size // 10**6} MB", *mb])
    note = "Resident memory in MB (peak: VmHWM) of a process that downloads them, 8 at a time."
    show(Table("Memory of downloads", ("candidate", "imported", "peak", "more"), rows, note))


async def download_all(name: str, pid: int, plain: int, tls: int, authority: str) -> int:
    """For a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"signed-{number}.pdf") for number in range(min(_FILES, 40))]
        async with _ASYNC[name](Server(pid, plain, tls, Path(authority)), False) as download:
            await _all(download, 8, paths)
    return len(paths)
