"""The sandbox's own figures: start-up, uploads a second, memory over thousands of uploads, whole signings a minute.

Run it with ``python -m benchmarks.sandbox [--uploads 5000] [--signings 200]``. The sandbox is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

COMMAND = (sys.executable, "-c", "from signing_async.cli import main; main()", "sandbox", "--port", "0")
API = "/api/1.0"


@dataclass
class Server:
    """A running sandbox: where it is, how to get in, how long it took to listen."""

    pid: int
    base_url: str
    token: str
    seconds: float

    def memory(self, name: str) -> float:
        """VmRSS or VmHWM of the process, in MB."""
        found = re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())
        assert found
        return int(found[1]) / 1024

    def loaded(self, library: str) -> bool:
        """Whether a native library is mapped into the process."""
        return library in Path(f"/proc/{self.pid}/maps").read_text()


@contextlib.contextmanager
def running(*options: str) -> Iterator[Server]:
    """Start the command, and stop it."""
    started = time.perf_counter()
    process = subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        url = re.search(r"http://\S+", process.stdout.readline())
        seconds = time.perf_counter() - started
        lines = [process.stdout.readline() for _ in range(4)]
        token = re.search(r"access_\S+", "".join(lines))
        assert url
        assert token
        yield Server(process.pid, url[0], token[0], seconds)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(10)


def document(size: int) -> bytes:
    """A valid PDF of exactly so many bytes, or a few more."""
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 595 842]>>",
        b"<</Length %d>>stream\n" % max(0, size - 500) + b"x" * max(0, size - 500) + b"\nendstream",
    ]
    out = bytearray(b"%PDF-1.7\n")
    starts = []
    for number, body in enumerate(objects, 1):
        starts.append(len(out))
        out += b"%d 0 obj\n" % number + body + b"\nendobj\n"
    at = len(out)
    out += b"xref\n0 5\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % start for start in starts)
    out += b"trailer\n<</Size 5/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % at
    return bytes(out)


async def ok(session: aiohttp.ClientSession, method: str, path: str, **options: object) -> dict[str, str]:
    """The JSON of an answer that must be a success."""
    async with session.request(method, path, **options) as response:  # type: ignore[arg-type]  # aiohttp's own names
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


async def in_parallel(count: int, workers: int, work: object) -> None:
    """Call `work(n)` for every n below `count`, so many at once."""
    numbers = iter(range(count))

    async def run() -> None:
        for number in numbers:
            await work(number)  # type: ignore[operator]  # an async function of one number

    await asyncio.gather(*(run() for _ in range(workers)))


async def measure_uploads(server: Server, count: int) -> None:
    """Uploads of 50 KB, eight at once, with the server's memory on the way."""
    data = document(50_000)
    async with connect(server) as session:
        ids = [
            (await ok(session, "POST", f"{API}/signings", json={"name": "x", "language": "EN"}))["id"]
            for _ in "12345678"
        ]

        async def one(number: int) -> None:
            await upload(session, ids[number % 8], data)

        done = 0
        for step in (min(1000, count), *[1000] * ((count - 1) // 1000)):
            started = time.perf_counter()
            await in_parallel(step, 8, one)
            seconds = time.perf_counter() - started
            done += step
            print(f"  {done:6} uploads   {step / seconds:6.0f} a second   {server.memory('VmRSS'):6.1f} MB")


async def measure_signings(server: Server, count: int) -> None:
    """Whole signings with two documents and two recipients: created, uploaded, sent, signed, sealed, fetched."""
    data = document(50_000)
    async with connect(server) as session:

        async def one(number: int) -> None:
            body = {"name": f"Contract {number}", "language": "EN", "signing_order": "sequential"}
            signing = f"{API}/signings/{(await ok(session, 'POST', f'{API}/signings', json=body))['id']}"
            documents = [await upload(session, signing.rpartition("/")[2], data) for _ in range(2)]
            for person in ("anna", "bo"):
                await ok(session, "POST", f"{signing}/recipients", json={"email": f"{person}@example.com"})
            await ok(session, "POST", f"{signing}/send")
            await ok(session, "POST", f"/sandbox/api/signings/{signing.rpartition('/')[2]}/complete", json={})
            for document_id in documents:
                async with session.get(f"{signing}/documents/{document_id}/download-signed") as response:
                    sealed = await response.read()
                assert response.status == 200
                assert hashlib.sha256(sealed[: len(data)]).digest() == hashlib.sha256(data).digest()

        started = time.perf_counter()
        await in_parallel(count, 8, one)
        print(f"  {count} signings in {time.perf_counter() - started:.1f} s, {server.memory('VmHWM'):.0f} MB at most")


def main() -> None:
    """Run them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uploads", type=int, default=5000)
    parser.add_argument("--signings", type=int, default=200)
    asked = parser.parse_args()
    starts = []
    for _ in range(5):
        with running() as server:
            starts.append(server.seconds)
            heavy = [name for name in ("pikepdf", "cryptography") if server.loaded(name)]
    print(
        f"Start to listening: {sorted(starts)[2]:.2f} s (median of 5); loaded by then of the heavy libraries: {heavy}"
    )
    print("Uploads of 50 KB, temporary:")
    with running() as server:
        asyncio.run(measure_uploads(server, asked.uploads))
    print("Uploads of 50 KB, kept (--data):")
    with tempfile.TemporaryDirectory() as folder, running("--data", folder) as server:
        asyncio.run(measure_uploads(server, min(1000, asked.uploads)))
    print("Whole signings, each with two documents and two recipients:")
    with running() as server:
        asyncio.run(measure_signings(server, asked.signings))


if __name__ == "__main__":
    main()
