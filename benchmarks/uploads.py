"""Uploads of many files: against what else one would send them with, the least an upload takes, and raw sockets.

Also: the memory they take, and how long the event loop stands still while files are read that are not in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import socket
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import attrs
from aiohttp.abc import AbstractStreamWriter

from signing_async import SigningClient

from .charts import Bar, Chart, Panel
from .measure import MISSING, comparison, in_child, interleaved, on_both_cores, panel, peer, quick, ratio
from .report import OURS, Table, draw, judge, show
from .rivals import HEADERS, TOKEN, aiohttp_session, has_curl, httpx, httpx_client
from .server import Server, pdf_bytes, running

_PATH = "/api/1.0/signings/s1/documents"
_MANY = f"{OURS}, upload_many"
_FORM, _FORM_BYTES, _BY_HAND = "aiohttp FormData, open file", "aiohttp FormData, bytes", "aiohttp, simplest payload"
_HTTPX, _REQUESTS, _CURL, _RAW = "httpx", "requests in threads", "curl -Z", "raw sockets in threads"
_CHARTED = 8
_TMPFS = Path("/dev/shm")
_IN_TMPFS, _ON_BOTH, _PRODUCERS = "from tmpfs", "the client on both cores", "of several producers"
_PIECE = 120 * 1024
"""Of several sizes, the one that takes the least time to send with aiohttp."""

requests: Any = peer("requests")

Upload = Callable[[Path], Awaitable[object]]
UploadAll = Callable[[Sequence[Path]], Awaitable[object]]


@attrs.frozen
class _Case:
    files: int
    size: int
    """Bytes of each file; 0 for files of various sizes."""
    secure: bool
    at_once: int
    rounds: int
    seconds: float
    more: str = ""
    """What differs from the usual: ``_IN_TMPFS``, ``_ON_BOTH``, ``_PRODUCERS`` or nothing."""

    @property
    def kind(self) -> str:
        size = f"× {self.size // 1000} KB" if self.size else "files"
        kind = f"{self.files} {size}, {'TLS' if self.secure else 'plain'}"
        return f"{kind}, {self.more}" if self.more else kind

    @property
    def title(self) -> str:
        return f"{self.kind}, {self.at_once} at a time"


def _cases() -> Iterator[_Case]:
    kinds = [_ON_BOTH, *([_IN_TMPFS] if _TMPFS.is_dir() else [])]
    if quick():
        yield _Case(3, 1_000_000, secure=False, at_once=_CHARTED, rounds=1, seconds=0)
        yield _Case(3, 50_000, secure=True, at_once=2, rounds=1, seconds=0)
        for more in kinds:
            yield _Case(3, 1_000_000, secure=False, at_once=2, rounds=1, seconds=0, more=more)
        yield _Case(9, 0, secure=False, at_once=2, rounds=1, seconds=0, more=_PRODUCERS)
        return
    for files, size in ((200, 1_000_000), (1000, 50_000)):
        for secure in (False, True):
            for at_once in (1, 8, 50):
                rounds, seconds = (15, 15.0) if at_once == _CHARTED else (3, 0.0)
                yield _Case(files, size, secure, at_once, rounds, seconds)
    for more in kinds:
        for secure in (False, True):
            yield _Case(200, 1_000_000, secure, at_once=_CHARTED, rounds=7, seconds=8.0, more=more)
    yield _Case(1000, 0, secure=False, at_once=_CHARTED, rounds=7, seconds=8.0, more=_PRODUCERS)


def main() -> None:
    panels: list[Panel] = []
    fast = _TMPFS if _TMPFS.is_dir() else None
    with (
        running() as server,
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=fast) as in_tmpfs,
    ):
        for case in _cases():
            paths = _files(Path(in_tmpfs if case.more == _IN_TMPFS else folder), case)
            with on_both_cores() if case.more == _ON_BOTH else contextlib.nullcontext():
                panels += asyncio.run(_compare(server, case, paths))
        draw(Chart("uploads", "Uploads, 8 at a time", "time relative to raw sockets; shorter is better", panels))
        case = next(_cases())
        paths = _files(Path(folder), case)
        _compare_memory(server, paths)
        asyncio.run(_compare_pauses(server, paths))


def _files(folder: Path, case: _Case) -> list[Path]:
    """The files to upload, each with a content of its own unless they are those of the producers."""
    if case.more == _PRODUCERS:
        # Not above: the process whose memory is measured imports this module too, and no producers.
        from . import producers

        made = [data for data in producers.files().values() if data is not None]
        paths = [folder / f"producer-{number}.pdf" for number in range(case.files)]
        for path, data in zip(paths, cycle(made)):
            path.write_bytes(data)
        return paths
    paths = [folder / f"lease-{case.size}-{number}.pdf" for number in range(case.files)]
    for number, path in enumerate(paths):
        if not path.exists():
            path.write_bytes(pdf_bytes(case.size, number))
    return paths


# The candidates that send one file after the other in an event loop


@contextlib.asynccontextmanager
async def _ours(server: Server, secure: bool) -> AsyncIterator[Upload]:
    async with _session(server, secure) as session:
        client = SigningClient(server.origin(secure=secure), TOKEN, session=session)
        signing = await client.signings.create(name="Leases", language="EN")

        async def upload(path: Path) -> object:
            return await client.documents.upload(signing, path)

        yield upload


@contextlib.asynccontextmanager
async def _many(server: Server, secure: bool, at_once: int) -> AsyncIterator[UploadAll]:
    async with _session(server, secure) as session:
        client = SigningClient(server.origin(secure=secure), TOKEN, session=session)
        signing = await client.signings.create(name="Leases", language="EN")

        async def upload_all(paths: Sequence[Path]) -> None:
            async for result in client.documents.upload_many(signing, paths, concurrency=at_once):
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
async def _by_hand(server: Server, secure: bool) -> AsyncIterator[Upload]:
    async with _session(server, secure) as session:

        async def upload(path: Path) -> object:
            with path.open("rb", buffering=0) as file:
                return await _post(session, server.origin(secure=secure), _Payload(file.fileno(), path.name))

        yield upload


@contextlib.asynccontextmanager
async def _with_httpx(server: Server, secure: bool) -> AsyncIterator[Upload]:
    async with httpx_client(server.ssl_context() if secure else None) as client:

        async def upload(path: Path) -> object:
            with path.open("rb") as file:
                part = {"selected_file": (path.name, file, "application/pdf")}
                response = await client.post(server.origin(secure=secure) + _PATH, files=part)
            response.raise_for_status()
            return response.json()["id"]

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


_ASYNC = {OURS: _ours, _BY_HAND: _by_hand, _FORM: _form, _FORM_BYTES: _form_bytes}
if httpx is not None:
    _ASYNC[_HTTPX] = _with_httpx


async def _all(upload: Upload, at_once: int, paths: Sequence[Path]) -> None:
    """Upload them all, so many at a time."""
    waiting = iter(paths)

    async def work() -> None:
        for path in waiting:
            await upload(path)

    await asyncio.gather(*(work() for _ in range(at_once)))


# The candidates that do it in threads, or in another process


@contextlib.contextmanager
def _in_threads(at_once: int, make: Callable[[contextlib.ExitStack], Callable[[Path], object]]) -> Iterator[UploadAll]:
    """``make`` makes what uploads a file, for each thread."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(at_once) as pool:
        uploads = [make(stack) for _ in range(at_once)]

        async def upload_all(paths: Sequence[Path]) -> None:
            waiting, loop = iter(paths), asyncio.get_running_loop()

            def work(upload: Callable[[Path], object]) -> None:
                for path in waiting:
                    upload(path)

            await asyncio.gather(*(loop.run_in_executor(pool, work, upload) for upload in uploads))

        yield upload_all


def _with_requests(server: Server, secure: bool, stack: contextlib.ExitStack) -> Callable[[Path], object]:
    session = stack.enter_context(requests.Session())
    session.trust_env = False  # else the environment's authorities take the place of the session's
    session.verify = str(server.authority)
    session.headers.update(HEADERS)

    def upload(path: Path) -> object:
        with path.open("rb") as file:
            part = {"selected_file": (path.name, file, "application/pdf")}
            response = session.post(server.origin(secure=secure) + _PATH, files=part)
        response.raise_for_status()
        return response.json()["id"]

    return upload


def _with_sockets(server: Server, secure: bool, stack: contextlib.ExitStack) -> Callable[[Path], object]:
    """The limit: what the system and OpenSSL take, and next to nothing of Python."""
    connection = socket.create_connection(("127.0.0.1", server.tls_port if secure else server.port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if secure:
        connection = server.ssl_context().wrap_socket(connection, server_hostname="localhost")
    stack.enter_context(contextlib.closing(connection))

    def upload(path: Path) -> None:
        head, tail, kind = _form_around(path.name)
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            lines = f"POST {_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
            lines += f"Content-Length: {len(head) + size + len(tail)}\r\n\r\n"
            connection.sendall(lines.encode() + head)
            if isinstance(connection, ssl.SSLSocket):
                while block := file.read(256 * 1024):
                    connection.sendall(block)
            else:
                connection.sendfile(file)
            connection.sendall(tail)
        response = connection.recv(65536)
        if not response.startswith(b"HTTP/1.1 200 "):
            raise AssertionError(f"{_RAW}: {response!r}")

    return upload


async def _with_curl(server: Server, secure: bool, at_once: int, paths: Sequence[Path]) -> None:
    """One process for all files: what to send is in a configuration on its standard input."""
    common = [f'url = "{server.origin(secure=secure)}{_PATH}"', 'header = "Expect:"', "fail", "silent"]
    common += [f'header = "{name}: {value}"' for name, value in HEADERS.items()]
    common += [f'cacert = "{server.authority}"', 'output = "/dev/null"']
    each = "\nnext\n".join(
        "\n".join([*common, f'form = "selected_file=@{path};type=application/pdf"']) for path in paths
    )
    command = ["curl", "--parallel", "--parallel-max", str(at_once), "--no-progress-meter", "--config", "-"]
    subprocess.run(command, input=each.encode(), check=True, stderr=subprocess.DEVNULL)


@contextlib.asynccontextmanager
async def _everyone(server: Server, case: _Case) -> AsyncIterator[dict[str, UploadAll | None]]:
    """All candidates, connected; None for one that is missing."""
    secure, at_once = case.secure, case.at_once
    async with contextlib.AsyncExitStack() as stack:
        order = [OURS, _MANY, _BY_HAND, _FORM, _FORM_BYTES, _HTTPX, _REQUESTS, _CURL, _RAW]
        found: dict[str, UploadAll | None] = dict.fromkeys(order)
        for name, make in _ASYNC.items():
            found[name] = partial(_all, await stack.enter_async_context(make(server, secure)), at_once)
        found[_MANY] = await stack.enter_async_context(_many(server, secure, at_once))
        found[_RAW] = stack.enter_context(_in_threads(at_once, partial(_with_sockets, server, secure)))
        if requests is not None:
            found[_REQUESTS] = stack.enter_context(_in_threads(at_once, partial(_with_requests, server, secure)))
        if has_curl():
            found[_CURL] = partial(_with_curl, server, secure, at_once)
        yield found


# What is measured


async def _compare(server: Server, case: _Case, paths: Sequence[Path]) -> list[Panel]:
    async with _everyone(server, case) as everyone:
        await _check(server, everyone, paths)
        server.configure()
        runs = {name: partial(_run, upload, paths) if upload else None for name, upload in everyone.items()}
        # The check has warmed them up.
        samples = await interleaved(
            runs, rounds=case.rounds, seconds=case.seconds, warm_up=0, expect=len(paths), server=server.cpu
        )
    counts, runs_done = server.counts(), sum(len(taken) for taken in samples.values())
    size = sum(path.stat().st_size for path in paths)
    if counts["uploads"] != runs_done * len(paths) or counts["upload_bytes"] < runs_done * size:
        raise AssertionError(f"not all of it arrived: {counts}")
    show(comparison(case.title, samples, _RAW, count=len(paths)))
    if case.at_once != _CHARTED or case.more:
        return []
    faster = ratio(samples, _FORM, OURS)
    judge(f"{case.title}: times as fast as {_FORM}", faster, at_least=2.0 if case.secure else 2.5)
    if case.size == 1_000_000 and samples[_CURL]:
        judge(f"{case.title}: speed, of {_CURL}", ratio(samples, _CURL, OURS), at_least=0.95)
    return [panel(case.kind, samples, _RAW)]


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


def _compare_memory(server: Server, paths: Sequence[Path]) -> None:
    rows, bars = [], []
    for name in [OURS] if quick() else [*_ASYNC, *({_HTTPX} - _ASYNC.keys())]:
        if name not in _ASYNC:
            rows.append([name, MISSING, "", ""])
            continue
        where = (server.pid, server.port, server.tls_port, str(server.authority))
        child = in_child(upload_all, name, *where, [str(path) for path in paths])
        rows.append([name, f"{child.imported / 1e6:.1f}", f"{child.peak / 1e6:.1f}", f"{child.grown / 1e6:.1f}"])
        bars.append(Bar(name, child.grown / 1e6, name == OURS))
        if name == OURS:
            judge("memory of uploads, above the import", child.grown / 1e6, at_most=10, unit=" MB")
    note = "Resident memory in MB (peak: VmHWM) of a process that uploads them all, 8 at a time."
    show(Table(f"Memory: {len(paths)} uploads of 1 MB, plain", ("candidate", "imported", "peak", "more"), rows, note))
    panels = [Panel(f"{len(paths)} uploads of 1 MB, 8 at a time", bars, 10)]
    draw(Chart("uploads-memory", "Memory of uploads", "MB above the import, at the peak; shorter is better", panels))


async def upload_all(name: str, pid: int, plain: int, tls: int, authority: str, paths: list[str]) -> int:
    """For a process of its own."""
    async with _ASYNC[name](Server(pid, plain, tls, Path(authority)), False) as upload:
        await _all(upload, 8, [Path(path) for path in paths])
    return len(paths)


async def _compare_pauses(server: Server, paths: Sequence[Path]) -> None:
    rows = []
    for name, candidate in _ASYNC.items():
        pauses = []
        async with candidate(server, False) as upload:
            for _ in range(1 if quick() else 7):
                _forget(paths)
                pauses.append(await _longest_pause(_all(upload, 8, paths)))
        rows.append([name, f"{sorted(pauses)[len(pauses) // 2] * 1e3:.1f}", f"{max(pauses) * 1e3:.1f}"])
    note = "Milliseconds for which nothing else ran in the event loop; the files have to be read from the disk."
    columns = ("candidate", "median run", "worst run")
    show(Table(f"Longest pause: {len(paths)} uploads of 1 MB, 8 at a time, plain", columns, rows, note))


def _forget(paths: Sequence[Path]) -> None:
    """Have the system drop the files from its memory."""
    for path in paths:
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
