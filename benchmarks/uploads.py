"""Uploads of many files at once: against aiohttp's FormData with open files, a hand-written payload, and `curl -Z`.

Also: the memory they take, and how long the event loop stands still while files are read that are not in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import attrs
from aiohttp.abc import AbstractStreamWriter

from signing_async import SigningClient

from .measure import COMPARED, Table, compared, in_child, in_process, interleaved, quick, ratio, show
from .server import Server, pdf_bytes, running

_TOKEN = "benchmark"
_HEADERS = {"Accept": "application/json", "Authorization": f"Bearer {_TOKEN}"}
_PATH = "/api/1.0/signings/s1/documents"
_AT_ONCE = 8
_OURS, _FORM, _BY_HAND, _CURL = "signing_async", "aiohttp FormData", "aiohttp, hand-written payload", "curl -Z"

Upload = Callable[[Path], Awaitable[object]]


@attrs.frozen
class _Case:
    files: int
    size: int
    secure: bool
    target: float
    """How many times as fast as FormData it is to be."""
    rounds: int

    @property
    def title(self) -> str:
        return (
            f"{self.files} uploads of {self.size // 1000} KB, {_AT_ONCE} at a time, {'TLS' if self.secure else 'plain'}"
        )


_CASES = [
    _Case(200, 1_000_000, secure=False, target=2.5, rounds=21),
    _Case(200, 1_000_000, secure=True, target=2.0, rounds=15),
    _Case(1000, 50_000, secure=False, target=2.4, rounds=15),
]
if quick():
    _CASES = [attrs.evolve(case, files=9, rounds=1) for case in _CASES]


def main() -> None:
    with running() as server:
        for case in _CASES:
            with _files(case.files, case.size) as paths:
                asyncio.run(_check(server, case, paths[:3]))
                asyncio.run(_compare(server, case, paths))
        with _files(_CASES[0].files, _CASES[0].size) as paths:
            _compare_memory(server, paths)
            asyncio.run(_compare_pauses(server, paths))


@contextlib.contextmanager
def _files(count: int, size: int) -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"lease-{number}.pdf") for number in range(count)]
        for path in paths:
            path.write_bytes(pdf_bytes(size))
        yield paths


# The candidates


@contextlib.asynccontextmanager
async def _session(server: Server, secure: bool) -> AsyncIterator[aiohttp.ClientSession]:
    # As the client makes its own session: no cookies, no limit of aiohttp's own.
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=server.ssl_context() if secure else True),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
    )
    async with session:
        yield session


def _origin(server: Server, secure: bool) -> str:
    return server.tls if secure else server.plain


@contextlib.asynccontextmanager
async def _ours(server: Server, secure: bool) -> AsyncIterator[Upload]:
    async with _session(server, secure) as session:
        client = SigningClient(_origin(server, secure), _TOKEN, session=session)
        signing = await client.signings.create(name="Leases", language="EN")

        async def upload(path: Path) -> object:
            return await client.documents.upload(signing, path)

        yield upload


@contextlib.asynccontextmanager
async def _form(server: Server, secure: bool) -> AsyncIterator[Upload]:
    async with _session(server, secure) as session:

        async def upload(path: Path) -> object:
            with path.open("rb") as file:
                form = aiohttp.FormData()
                form.add_field("selected_file", file, filename=path.name, content_type="application/pdf")
                return await _post(session, _origin(server, secure), form)

        yield upload


@contextlib.asynccontextmanager
async def _by_hand(server: Server, secure: bool) -> AsyncIterator[Upload]:
    async with _session(server, secure) as session:

        async def upload(path: Path) -> object:
            with path.open("rb", buffering=0) as file:
                return await _post(session, _origin(server, secure), _Payload(file.fileno(), path.name))

        yield upload


async def _post(session: aiohttp.ClientSession, origin: str, data: object) -> object:
    async with session.post(origin + _PATH, data=data, headers=_HEADERS) as response:
        response.raise_for_status()
        return (await response.json())["id"]


class _Payload(aiohttp.Payload):
    """The least that an upload takes: no preflight, no repeat, and the disk is waited for in the event loop."""

    def __init__(self, handle: int, name: str) -> None:
        boundary = secrets.token_hex(16)
        super().__init__(None, content_type=f"multipart/form-data; boundary={boundary}")
        disposition = f'form-data; name="selected_file"; filename="{name}"'
        self._head = f"--{boundary}\r\nContent-Disposition: {disposition}\r\nContent-Type: application/pdf\r\n\r\n"
        self._tail = f"\r\n--{boundary}--\r\n"
        self._handle = handle
        self._file_size = os.fstat(handle).st_size
        self._size = len(self._head) + self._file_size + len(self._tail)

    async def write(self, writer: AbstractStreamWriter) -> None:
        await writer.write(self._head.encode())
        for at in range(0, self._file_size, 256 * 1024):
            await writer.write(os.pread(self._handle, 256 * 1024, at))
        await writer.write(self._tail.encode())

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return ""


def _curl(server: Server, case: _Case, paths: list[Path]) -> None:
    """One process for all files: what to send is in a configuration on its standard input."""
    common = [
        f'url = "{_origin(server, case.secure)}{_PATH}"',
        'header = "Expect:"',
        "fail",
        "silent",
    ]
    common += [f'header = "{name}: {value}"' for name, value in _HEADERS.items()]
    common += [f'cacert = "{server.authority}"', 'output = "/dev/null"']
    each = "\nnext\n".join(
        "\n".join([*common, f'form = "selected_file=@{path};type=application/pdf"']) for path in paths
    )
    command = ["curl", "--parallel", "--parallel-max", str(_AT_ONCE), "--no-progress-meter", "--config", "-"]
    subprocess.run(command, input=each.encode(), check=True, stderr=subprocess.DEVNULL)


_ASYNC = {_OURS: _ours, _FORM: _form, _BY_HAND: _by_hand}


def _has_curl() -> bool:
    return shutil.which("curl") is not None


async def _all(paths: list[Path], upload: Upload) -> int:
    """Upload them all, so many at a time; how many."""
    waiting = iter(paths)

    async def work() -> int:
        done = 0
        for path in waiting:
            await upload(path)
            done += 1
        return done

    return sum(await asyncio.gather(*(work() for _ in range(_AT_ONCE))))


# What is measured


async def _check(server: Server, case: _Case, paths: list[Path]) -> None:
    """That each candidate sends the very bytes of the files."""
    expected = [hashlib.sha256(paths[0].read_bytes()).hexdigest()] * len(paths)
    for name, candidate in _ASYNC.items():
        server.configure(hashes=True)
        async with candidate(server, case.secure) as upload:
            await _all(paths, upload)
        if server.counts()["hashes"] != expected:
            raise AssertionError(f"{name} sent something else than the files")
    if _has_curl():
        server.configure(hashes=True)
        _curl(server, case, paths)
        if server.counts()["hashes"] != expected:
            raise AssertionError(f"{_CURL} sent something else than the files")


async def _compare(server: Server, case: _Case, paths: list[Path]) -> None:
    server.configure()
    async with contextlib.AsyncExitStack() as stack:
        candidates: dict[str, Callable[[], Awaitable[object]]] = {}
        for name, candidate in _ASYNC.items():
            upload = await stack.enter_async_context(candidate(server, case.secure))
            candidates[name] = lambda upload=upload: _all(paths, upload)  # type: ignore[misc]  # bound here and now
        if _has_curl():
            candidates[_CURL] = in_process(lambda: _curl(server, case, paths))
        samples = await interleaved(candidates, rounds=case.rounds)
    counts, runs = server.counts(), len(candidates) * (case.rounds + 1)
    if counts["uploads"] != runs * len(paths) or counts["upload_bytes"] < counts["uploads"] * case.size:
        raise AssertionError(f"not all of it arrived: {counts}")
    note = f"{ratio(samples, _FORM, _OURS):.2f} times as fast as {_FORM} (target: {case.target:g})"
    if _has_curl():
        note += f", {ratio(samples, _CURL, _OURS):.2f} times as fast as {_CURL}"
    show(Table(case.title, COMPARED, compared(samples, _FORM, count=len(paths)), f"{note}."))


def _compare_memory(server: Server, paths: list[Path]) -> None:
    rows = []
    for name in _ASYNC:
        child = in_child(upload_all, name, server.port, server.tls_port, str(server.authority), list(map(str, paths)))
        rows.append([name, f"{child.imported / 1e6:.1f}", f"{child.peak / 1e6:.1f}", f"{child.grown / 1e6:.1f}"])
    note = "Resident memory in MB of a process that uploads them all (target: at most 10 MB more than after importing)."
    show(Table(f"Memory: {_CASES[0].title}", ("candidate", "imported", "peak", "more"), rows, note))


async def upload_all(name: str, plain_port: int, tls_port: int, authority: str, paths: list[str]) -> int:
    """For a process of its own."""
    server = Server(plain_port, tls_port, Path(authority))
    async with _ASYNC[name](server, False) as upload:
        return await _all([Path(path) for path in paths], upload)


async def _compare_pauses(server: Server, paths: list[Path]) -> None:
    rows = []
    for name, candidate in _ASYNC.items():
        pauses = []
        async with candidate(server, False) as upload:
            for _ in range(1 if quick() else 9):
                _forget(paths)
                pauses.append(await _longest_pause(_all(paths, upload)))
        rows.append([name, f"{sorted(pauses)[len(pauses) // 2] * 1e3:.1f}", f"{max(pauses) * 1e3:.1f}"])
    note = "Milliseconds for which nothing else ran in the event loop; the files have to be read from the disk."
    show(Table(f"Longest pause: {_CASES[0].title}", ("candidate", "median run", "worst run"), rows, note))


def _forget(paths: list[Path]) -> None:
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
