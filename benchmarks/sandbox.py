"""The sandbox's own figures: its start, uploads a second, memory over thousands of uploads, whole signings."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import attrs

from .measure import other_core, peak_memory, quick, resident
from .report import Table, show
from .server import pdf_bytes

COMMAND = (sys.executable, "-c", "from signing_async.cli import main; main()", "sandbox", "--port", "0")
API = "/api/1.0"
_UPLOADS, _KEPT, _SIGNINGS, _STARTS = (20, 10, 2, 1) if quick() else (5000, 1000, 100, 5)
_STEP = 1000
_SIZE = 50_000


@attrs.frozen
class Server:
    """A running sandbox: where it is, how to get in, how long it took to listen."""

    pid: int
    base_url: str
    token: str
    seconds: float

    def loaded(self, library: str) -> bool:
        """Whether a native library is mapped into the process."""
        return library in Path(f"/proc/{self.pid}/maps").read_text()


@contextlib.contextmanager
def running(*options: str) -> Iterator[Server]:
    """Start the command, and stop it."""
    started = time.perf_counter()
    process = subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    os.sched_setaffinity(process.pid, {other_core()})
    assert process.stdout
    try:
        url = re.search(r"http://\S+", process.stdout.readline())
        seconds = time.perf_counter() - started
        lines = list(iter(process.stdout.readline, "Press Ctrl-C to stop.\n"))
        token = re.search(r"access_\S+", "".join(lines))
        assert url
        assert token
        yield Server(process.pid, url[0], token[0], seconds)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(10)


async def ok(session: aiohttp.ClientSession, method: str, path: str, **options: Any) -> dict[str, str]:
    """Return the JSON of a successful response."""
    async with session.request(method, path, **options) as response:
        body: dict[str, str] = await response.json()
        assert response.ok, body
        return body


async def upload(session: aiohttp.ClientSession, signing_id: str, data: bytes) -> str:
    """Upload one document; its id."""
    form = aiohttp.FormData()
    form.add_field("selected_file", data, filename="contract.pdf", content_type="application/pdf")
    return (await ok(session, "POST", f"{API}/signings/{signing_id}/documents", data=form))["id"]


def connect(server: Server) -> aiohttp.ClientSession:
    """A session with the token."""
    return aiohttp.ClientSession(server.base_url, headers={"Authorization": f"Bearer {server.token}"})


async def in_parallel(count: int, work: Callable[[int], Awaitable[object]]) -> float:
    """Call `work(n)` for every n below `count`, eight at once; the seconds that it took."""
    numbers, began = iter(range(count)), time.perf_counter()

    async def run() -> None:
        for number in numbers:
            await work(number)

    await asyncio.gather(*(run() for _ in range(8)))
    return time.perf_counter() - began


async def measure_uploads(server: Server, count: int, what: str) -> list[list[str]]:
    """Rows of uploads, eight at once, with the server's memory on the way."""
    data, rows = pdf_bytes(_SIZE), []
    async with connect(server) as session:
        body = {"name": "x", "language": "EN"}
        ids = [(await ok(session, "POST", f"{API}/signings", json=body))["id"] for _ in range(8)]
        for begin in range(0, count, _STEP):
            step = min(_STEP, count - begin)
            seconds = await in_parallel(step, lambda number: upload(session, ids[number % 8], data))
            row = [f"{step / seconds:.0f}", f"{resident(server.pid) / 1e6:.1f}"]
            rows.append([f"{what}, to the {begin + step}th", *row])
    return rows


async def measure_signings(server: Server, count: int) -> float:
    """Whole signings with two documents and two recipients: created, uploaded, sent, signed, sealed, fetched."""
    data = pdf_bytes(_SIZE)
    async with connect(server) as session:

        async def one(number: int) -> None:
            body = {"name": f"Contract {number}", "language": "EN", "signing_order": "sequential"}
            signing_id = (await ok(session, "POST", f"{API}/signings", json=body))["id"]
            signing = f"{API}/signings/{signing_id}"
            documents = [await upload(session, signing_id, data) for _ in range(2)]
            for person in ("anna", "bo"):
                await ok(session, "POST", f"{signing}/recipients", json={"email": f"{person}@example.com"})
            await ok(session, "POST", f"{signing}/send")
            await ok(session, "POST", f"/sandbox/api/signings/{signing_id}/complete", json={})
            for document_id in documents:
                async with session.get(f"{signing}/documents/{document_id}/download-signed") as response:
                    sealed = await response.read()
                assert response.status == 200
                assert hashlib.sha256(sealed[: len(data)]).digest() == hashlib.sha256(data).digest()

        return await in_parallel(count, one)


def main() -> None:
    starts = []
    for _ in range(_STARTS):
        with running() as server:
            starts.append(server.seconds)
            assert not any(server.loaded(name) for name in ("pikepdf", "cryptography")), "heavy libraries at the start"
    with running() as server:
        rows = asyncio.run(measure_uploads(server, _UPLOADS, "kept in memory"))
    with tempfile.TemporaryDirectory() as folder, running("--data", folder) as server:
        rows += asyncio.run(measure_uploads(server, _KEPT, "kept in files"))
    columns = (f"uploads of {_SIZE // 1000} KB", "a second", "resident, MB")
    show(Table("The sandbox: uploads, 8 at a time, by bare aiohttp on the other core", columns, rows))
    with running() as server:
        seconds = asyncio.run(measure_signings(server, _SIGNINGS))
        most = peak_memory(server.pid) / 1e6
    facts = [
        ["seconds from the command to listening", f"{statistics.median(starts):.2f}"],
        [f"whole signings a second, of {_SIGNINGS}", f"{_SIGNINGS / seconds:.1f}"],
        ["resident at the peak, MB", f"{most:.0f}"],
    ]
    note = "A whole signing: two documents, two recipients, sent, signed, sealed, and both sealed PDFs fetched."
    show(Table("The sandbox: its start, and whole signings", ("what", "figure"), facts, note))
