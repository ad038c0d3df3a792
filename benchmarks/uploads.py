"""Uploads of many files, 8 at a time: by hand with FormData, curl, and the least that aiohttp takes.

Also: how long the event loop stands still in the first upload of a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import attrs
from aiohttp.abc import AbstractStreamWriter

from signing_async import SigningClient

from .charts import Chart, Panel
from .measure import comparison, interleaved, own_core, panel, pin, quick, ratio
from .report import OURS, Table, draw, judge, notice, show
from .rivals import AT_ONCE, HEADERS, TOKEN, aiohttp_session, each, has_curl, run_curl
from .server import Server, pdf_bytes, running

_PATH = "/api/1.0/signings/s1/documents"
_MANY = f"{OURS}, upload_many"
_FORM, _FORM_BYTES, _LIMIT = "aiohttp FormData, open file", "aiohttp FormData, bytes", "aiohttp, simplest payload"
_CURL = "curl -Z"
_PIECE = 120 * 1024
"""Of several sizes, the one that takes the least time to send with aiohttp."""

Upload = Callable[[Path], Awaitable[object]]
UploadAll = Callable[[Sequence[Path]], Awaitable[object]]


@attrs.frozen
class _Case:
    files: int
    size: int
    secure: bool
    of_form: float
    """How many times as fast as a form with open files it is to be."""

    @property
    def kind(self) -> str:
        return f"{self.files} × {self.size // 1000} KB, {'TLS' if self.secure else 'plain'}"

    @property
    def title(self) -> str:
        return f"{self.kind}, {AT_ONCE} at a time"


_LARGE, _SMALL = (3, 3) if quick() else (200, 1000)
_CASES = (
    _Case(_LARGE, 1_000_000, secure=False, of_form=2.2),
    _Case(_LARGE, 1_000_000, secure=True, of_form=1.8),
    _Case(_SMALL, 50_000, secure=False, of_form=1.8),
    _Case(_SMALL, 50_000, secure=True, of_form=1.7),
)[:: 3 if quick() else 1]


def main() -> None:
    with running() as server, tempfile.TemporaryDirectory() as folder:
        panels = [asyncio.run(_compare(server, case, _files(Path(folder), case))) for case in _CASES]
        draw(Chart("uploads", "Uploads, 8 at a time", f"time relative to {_FORM}; shorter is better", panels))
        _compare_pauses(server, _files(Path(folder), _CASES[0])[0])


def _files(folder: Path, case: _Case) -> list[Path]:
    """The files to upload, each with a content of its own."""
    paths = [folder / f"lease-{case.size}-{number}.pdf" for number in range(case.files)]
    for number, path in enumerate(paths):
        if not path.exists():
            path.write_bytes(pdf_bytes(case.size, number))
    return paths


# The candidates


@contextlib.asynccontextmanager
async def _ours(server: Server, secure: bool) -> AsyncIterator[Upload]:
    async with _session(server, secure) as session:
        client = SigningClient(server.origin(secure=secure), TOKEN, session=session)
        signing = await client.signings.create(name="Leases", language="EN")

        async def upload(path: Path) -> object:
            return await client.documents.upload(signing, path)

        yield upload


@contextlib.asynccontextmanager
async def _many(server: Server, secure: bool) -> AsyncIterator[UploadAll]:
    async with _session(server, secure) as session:
        client = SigningClient(server.origin(secure=secure), TOKEN, session=session)
        signing = await client.signings.create(name="Leases", language="EN")

        async def upload_all(paths: Sequence[Path]) -> None:
            async for result in client.documents.upload_many(signing, paths, concurrency=AT_ONCE):
                if result.error is not None:
                    raise result.error

        yield upload_all


@contextlib.asynccontextmanager
async def _form(server: Server, secure: bool) -> AsyncIterator[Upload]:
    async with _session(server, secure) as session:

        async def upload(path: Path) -> object:
            with path.open("rb") as file:
                return await _post(session, server.origin(secure=secure), _form_of(path, file))

        yield upload


@contextlib.asynccontextmanager
async def _form_bytes(server: Server, secure: bool) -> AsyncIterator[Upload]:
    async with _session(server, secure) as session:

        async def upload(path: Path) -> object:
            return await _post(session, server.origin(secure=secure), _form_of(path, path.read_bytes()))

        yield upload


@contextlib.asynccontextmanager
async def _limit(server: Server, secure: bool) -> AsyncIterator[Upload]:
    async with _session(server, secure) as session:

        async def upload(path: Path) -> object:
            with path.open("rb", buffering=0) as file:
                return await _post(session, server.origin(secure=secure), _Payload(file.fileno(), path.name))

        yield upload


def _session(server: Server, secure: bool) -> aiohttp.ClientSession:
    return aiohttp_session(server.ssl_context() if secure else None)


def _form_of(path: Path, content: Any) -> aiohttp.FormData:
    form = aiohttp.FormData()
    form.add_field("selected_file", content, filename=path.name, content_type="application/pdf")
    return form


async def _post(session: aiohttp.ClientSession, origin: str, data: object) -> object:
    async with session.post(origin + _PATH, data=data, headers=HEADERS) as response:
        response.raise_for_status()
        return (await response.json())["id"]


class _Payload(aiohttp.Payload):
    """The least that an upload takes: no preflight, no repeat, and the disk is waited for in the event loop."""

    def __init__(self, handle: int, name: str) -> None:
        head, tail, kind = _form_around(name)
        super().__init__(None, content_type=kind)
        self._head, self._tail = head, tail
        self._handle = handle
        self._file_size = os.fstat(handle).st_size
        self._size = len(head) + self._file_size + len(tail)

    async def write(self, writer: AbstractStreamWriter) -> None:
        await writer.write(self._head)
        for at in range(0, self._file_size, _PIECE):
            await writer.write(os.pread(self._handle, _PIECE, at))
        await writer.write(self._tail)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return ""


def _form_around(name: str) -> tuple[bytes, bytes, str]:
    """What goes before and after a file in a form, and the form's type."""
    boundary = secrets.token_hex(16)
    disposition = f'form-data; name="selected_file"; filename="{name}"'
    head = f"--{boundary}\r\nContent-Disposition: {disposition}\r\nContent-Type: application/pdf\r\n\r\n"
    return head.encode(), f"\r\n--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


_ONE_BY_ONE = {OURS: _ours, _FORM: _form, _FORM_BYTES: _form_bytes, _LIMIT: _limit}


async def _with_curl(server: Server, secure: bool, paths: Sequence[Path]) -> None:
    forms = [f'form = "selected_file=@{path};type=application/pdf"' for path in paths]
    run_curl(server, server.origin(secure=secure) + _PATH, forms, 'header = "Expect:"', 'output = "/dev/null"')


# What is measured


async def _compare(server: Server, case: _Case, paths: Sequence[Path]) -> Panel:
    async with contextlib.AsyncExitStack() as stack:
        everyone: dict[str, UploadAll | None] = {}
        for name, make in _ONE_BY_ONE.items():
            everyone[name] = partial(each, await stack.enter_async_context(make(server, case.secure)))
        everyone[_MANY] = await stack.enter_async_context(_many(server, case.secure))
        everyone[_CURL] = partial(_with_curl, server, case.secure) if has_curl() else None
        await _check(server, everyone, paths)
        server.configure()
        runs = {name: partial(_run, upload, paths) if upload else None for name, upload in everyone.items()}
        # The check has warmed them up.
        samples = await interleaved(runs, rounds=15, seconds=15.0, warm_up=0, expect=len(paths), server=server.cpu)
    counts, runs_done = server.counts(), sum(len(taken) for taken in samples.values())
    size = sum(path.stat().st_size for path in paths)
    if counts["uploads"] != runs_done * len(paths) or counts["upload_bytes"] < runs_done * size:
        raise AssertionError(f"not all of it arrived: {counts}")
    show(comparison(case.title, samples, _FORM, count=len(paths)))
    judge(f"{case.title}: times as fast as {_FORM}", ratio(samples, _FORM, OURS), at_least=case.of_form)
    if case.size == 50_000 and not case.secure:
        judge(f"{case.title}: times as fast as {_FORM_BYTES}", ratio(samples, _FORM_BYTES, OURS), at_least=1.05)
    judge(f"{case.title}: speed of upload_many, of upload", ratio(samples, OURS, _MANY), at_least=0.97)
    if case.secure:
        speed = ratio(samples, _FORM, OURS)
        notice(
            f"An upload of {case.size // 1000} KB over TLS is {speed:.1f} times as fast as a form with an open file."
        )
    return panel(case.kind, samples, _FORM)


async def _run(upload: UploadAll, paths: Sequence[Path]) -> int:
    await upload(paths)
    return len(paths)


async def _check(server: Server, everyone: dict[str, UploadAll | None], paths: Sequence[Path]) -> None:
    """That each candidate sends the very bytes of each of the files."""
    some = paths[:32]
    expected = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in some)
    for name, upload in everyone.items():
        if upload is None:
            continue
        server.configure(hashes=True)
        await upload(some)
        if sorted(server.counts()["hashes"]) != expected:
            raise AssertionError(f"{name} sent something else than the files")


def _compare_pauses(server: Server, path: Path) -> None:
    rows = []
    where = [str(path), str(server.pid), str(server.port), str(server.tls_port), str(server.authority)]
    for name in [OURS] if quick() else _ONE_BY_ONE:
        pauses = []
        for _ in range(1 if quick() else 7):
            _forget(path)
            command = [sys.executable, "-m", "benchmarks.uploads", name, *where]
            pauses.append(float(subprocess.run(command, capture_output=True, check=True).stdout) * 1e3)
        rows.append([name, f"{statistics.median(pauses):.1f}", f"{max(pauses):.1f}"])
        if name == OURS:
            judge("longest pause in a process's first upload", statistics.median(pauses), at_most=3, unit=" ms")
    note = (
        "Milliseconds for which nothing else ran in the event loop of a fresh process; the file is read from the disk."
    )
    show(Table("Longest pause in the first upload, 1 MB, plain", ("candidate", "median run", "worst run"), rows, note))


async def _first_pause(name: str, path: str, pid: str, plain: str, tls: str, authority: str) -> float:
    """Return the longest pause in seconds; for a process of its own."""
    pin(own_core())
    async with _ONE_BY_ONE[name](Server(int(pid), int(plain), int(tls), Path(authority)), False) as upload:
        return await _longest_pause(upload(Path(path)))


def _forget(path: Path) -> None:
    """Have the system drop the file from its memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def _longest_pause(work: Awaitable[object]) -> float:
    clock = asyncio.get_running_loop().time
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        last = clock()
        while True:
            await asyncio.sleep(0)
            longest, last = max(longest, clock() - last), clock()

    watching = asyncio.create_task(watch())
    await work
    watching.cancel()
    return longest


if __name__ == "__main__":
    print(asyncio.run(_first_pause(*sys.argv[1:])))
