"""A small and fast HTTP/1.1 server in a process of its own, on the other core: it must not be the bottleneck.

::

    with running() as server:
        server.configure(pages=100, page_size=100, latency=0.005)
        ...  # server.plain and server.tls are origins, and server.ssl_context() trusts the latter
        assert server.counts()["uploads"] == 200

It speaks the service's paths and is no model of the service: every signing exists, every upload is taken and only
counted, every download gives the same file (`pdf_bytes`). `Settings` says what can be chosen, `counts` what is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import http.client
import json
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs

import attrs
import trustme

from .measure import other_core, pin, process_cpu

try:
    import uvloop
except ModuleNotFoundError:
    uvloop = None

_ROOM = 256 * 1024
_HOST = "127.0.0.1"


@attrs.frozen
class Settings:
    """How the server responds from now on."""

    latency: float = 0.0
    """Seconds before each response."""
    pages: int = 100
    """Pages of a list of signings; cursors are ``"1"``, ``"2"``, ..."""
    page_size: int = 100
    """Signings of a page, whatever limit is asked for."""
    download_bytes: int = 1_000_000
    """The size of every signed file."""
    hashes: bool = False
    """Keep uploads long enough to know the SHA-256 of the file in each, for ``counts()["hashes"]``; slower."""


def pdf_bytes(size: int, seed: int = 0) -> bytes:
    """A PDF of this size, from 1000 bytes: an empty page and a stream of filler. The same one for each seed."""
    filler = hashlib.shake_128(b"filler %d" % seed).digest(4096).replace(b"e", b"_")
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]>>",
    ]
    data = b"%PDF-1.7\n"
    offsets = []
    for number, content in enumerate(objects, 1):
        offsets.append(len(data))
        data += b"%d 0 obj%s\nendobj\n" % (number, content)
    offsets.append(len(data))
    # The stream takes what the rest, which is written with ten digits wherever a size shows, leaves of the size.
    length = size - len(data) - 220
    stream = (filler * (length // len(filler) + 1))[:length]
    data += b"4 0 obj<</Length %010d>>stream\n%s\nendstream\nendobj\n" % (length, stream)
    rows = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    table = b"xref\n0 5\n0000000000 65535 f \n" + rows
    end = b"trailer<</Size 5/Root 1 0 R>>\nstartxref\n%010d\n%%%%EOF\n" % len(data)
    return data + table + end


def signing(number: int) -> dict[str, Any]:
    """One of the signings in the lists: two documents, timestamps, and fields that the specification does not name."""
    stamp = f"2031-{number % 12 + 1:02}-{number % 28 + 1:02}T10:{number % 60:02}:00.123456Z"
    done = number % 3 == 0
    documents = [
        {
            "id": f"0d1f7c6e-0000-4000-8000-{number:06}{part:06}",
            "name": f"lease-{number}-{part}.pdf",
            "completed_at": stamp if done else None,
            "pages": 4,
        }
        for part in (1, 2)
    ]
    return {
        "id": f"5a0b2c9e-0000-4000-8000-{number:012}",
        "name": f"Lease {number}",
        "language": "SV" if number % 2 else "EN",
        "signing_order": "sequential",
        "message": "Please sign the lease until the end of the month.",
        "is_draft": number % 3 == 1,
        "is_completed": done,
        "cancelled_at": None,
        "updated_at": stamp,
        "created_by": {"id": f"u{number % 10}", "name": "Ada Lovelace"},
        "documents": documents,
    }


class _Counts:
    def __init__(self) -> None:
        self.requests = 0
        self.uploads = 0
        self.upload_bytes = 0
        self.downloads = 0
        self.connections = 0
        self.hashes: list[str] = []


class _Service:
    """The responses, built beforehand where possible."""

    def __init__(self) -> None:
        self.counts = _Counts()
        self._me = _answer(json.dumps({"id": "u1", "email": "ada@example.com", "name": "Ada Lovelace"}).encode())
        self.configure(Settings())

    def configure(self, settings: Settings) -> None:
        self.settings = settings
        self._pages: dict[int, bytes] = {}
        self._download = _answer(pdf_bytes(settings.download_bytes), "application/pdf")

    def respond(self, method: str, target: str, body: bytes, upload_type: str, size: int) -> bytes:
        """Return the bytes of the response; ``body`` is kept only if it is inspected."""
        self.counts.requests += 1
        if target.endswith("/documents") and method == "POST":
            return self._uploaded(body, upload_type, size)
        if target.endswith("/download-signed"):
            self.counts.downloads += 1
            return self._download
        if target == "/api/1.0/me":
            return self._me
        path, _, query = target.partition("?")
        if path == "/api/1.0/signings" and method == "GET":
            return self._page(int(parse_qs(query).get("cursor", ["0"])[0]))
        draft = {**signing(1), "id": path.rpartition("/")[2], "is_draft": True, "documents": []}
        return _answer(json.dumps(draft if path.count("/") <= 4 else {"id": "r1"}).encode())

    def _uploaded(self, body: bytes, content_type: str, size: int) -> bytes:
        self.counts.uploads += 1
        self.counts.upload_bytes += size
        if self.settings.hashes:
            self.counts.hashes.append(hashlib.sha256(_file(body, content_type)).hexdigest())
        return _answer(b'{"id": "d%d", "name": "lease.pdf", "completed_at": null}' % self.counts.uploads)

    def _page(self, number: int) -> bytes:
        page = self._pages.get(number)
        if page is None:
            first = number * self.settings.page_size
            following = str(number + 1) if number + 1 < self.settings.pages else None
            data = {
                "data": [signing(first + index) for index in range(self.settings.page_size)],
                "meta": {"next_cursor": following},
            }
            page = self._pages[number] = _answer(json.dumps(data, separators=(",", ":")).encode())
        return page

    def control(self, method: str, body: bytes) -> bytes:
        """PUT: new settings, and counts from zero. GET: the counts. Neither is counted or late."""
        if method == "PUT":
            self.counts = _Counts()
            self.configure(Settings(**json.loads(body)))
            for number in range(self.settings.pages):
                self._page(number)
        return _answer(json.dumps(vars(self.counts)).encode())


def _answer(body: bytes, content_type: str = "application/json", status: str = "200 OK", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def _file(body: bytes, content_type: str) -> bytes:
    """The content of the only part of a multipart body."""
    boundary = content_type.partition("boundary=")[2].strip('"').encode()
    start = body.index(b"\r\n\r\n") + 4
    return body[start : body.rindex(b"\r\n--" + boundary)]


class _Connection(asyncio.BufferedProtocol):
    """Reads requests into one buffer and counts the bytes of bodies, and keeps only the bodies that are inspected."""

    def __init__(self, service: _Service) -> None:
        self._service = service
        self._room = memoryview(bytearray(_ROOM))
        self._head = bytearray()
        self._kept: bytearray | None = None
        self._missing = 0
        self._size = 0
        self._method = self._target = self._type = ""
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's transports are not of that class
        self._service.counts.connections += 1

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, size: int) -> None:
        used = self._take_body(self._room[:size]) if self._missing else 0
        if used == size:
            return
        self._head += self._room[used:size]
        while (end := self._head.find(b"\r\n\r\n")) >= 0:
            head, rest = bytes(self._head[:end]), bytes(self._head[end + 4 :])
            self._begin(head)
            used = self._take_body(memoryview(rest)) if self._missing else 0
            self._head = bytearray(rest[used:])

    def _begin(self, head: bytes) -> None:
        line, *fields = head.decode("latin-1").split("\r\n")
        self._method, self._target, _ = line.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        self._size = self._missing = int(headers.get("content-length", 0))
        self._type = headers.get("content-type", "")
        looked_at = self._service.settings.hashes or self._target == "/control"
        self._kept = bytearray() if looked_at else None
        if "transfer-encoding" in headers:
            self._transport.write(_answer(b"", status="411 Length Required", more="Connection: close\r\n"))
            self._transport.close()
        elif not self._missing:
            self._answer()
        elif headers.get("expect") == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _take_body(self, data: memoryview) -> int:
        used = min(len(data), self._missing)
        self._missing -= used
        if self._kept is not None:
            self._kept += data[:used]
        if not self._missing:
            self._answer()
        return used

    def _answer(self) -> None:
        body = bytes(self._kept or b"")
        if self._target == "/control":
            self._transport.write(self._service.control(self._method, body))
            return
        response = self._service.respond(self._method, self._target, body, self._type, self._size)
        if self._service.settings.latency:
            self._loop.call_later(self._service.settings.latency, self._write, response)
        else:
            self._transport.write(response)

    def _write(self, response: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(response)


async def _serve(directory: Path) -> None:
    loop = asyncio.get_running_loop()
    service = _Service()
    make = partial(_Connection, service)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(directory / "server.pem")
    plain = await loop.create_server(make, _HOST, 0, backlog=1024)
    tls = await loop.create_server(make, _HOST, 0, backlog=1024, ssl=context)
    ports = {name: server.sockets[0].getsockname()[1] for name, server in (("plain", plain), ("tls", tls))}
    print(json.dumps(ports), flush=True)
    # The parent holds the other end of the standard input: that it is gone is the sign to stop.
    await loop.run_in_executor(None, sys.stdin.read)


class Server:
    """A server that runs: where it is, and how to steer it."""

    def __init__(self, pid: int, plain_port: int, tls_port: int, authority: Path) -> None:
        self.pid = pid
        self.port = plain_port
        self.tls_port = tls_port
        self.plain = f"http://{_HOST}:{plain_port}"
        self.tls = f"https://localhost:{tls_port}"
        self.authority = authority
        """The PEM file of the authority that signed the certificate, for clients of other kinds."""

    def origin(self, *, secure: bool) -> str:
        return self.tls if secure else self.plain

    def cpu(self) -> float:
        """Seconds of CPU time that it has used so far, for `interleaved`."""
        return process_cpu(self.pid)

    def ssl_context(self) -> ssl.SSLContext:
        """A client's context that trusts this server."""
        return ssl.create_default_context(cafile=str(self.authority))

    def configure(self, **settings: Any) -> None:
        """Take these `Settings`, the defaults for all others, and count from zero."""
        self._control("PUT", json.dumps(attrs.asdict(Settings(**settings))))

    def counts(self) -> dict[str, Any]:
        """What came since `configure`: requests, uploads, upload_bytes (of whole bodies), downloads,
        connections, hashes (of the uploaded files, where asked for)."""
        counts: dict[str, Any] = self._control("GET", "")
        return counts

    def _control(self, method: str, body: str) -> Any:
        with contextlib.closing(http.client.HTTPConnection(_HOST, self.port, timeout=30)) as connection:
            connection.request(method, "/control", body)
            return json.loads(connection.getresponse().read())


@contextlib.contextmanager
def running() -> Iterator[Server]:
    """Start a server, and stop it in the end."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        authority = trustme.CA()
        authority.cert_pem.write_to_path(directory / "authority.pem")
        authority.issue_cert("localhost", _HOST).private_key_and_cert_chain_pem.write_to_path(directory / "server.pem")
        command = [sys.executable, "-m", "benchmarks.server", str(directory), str(other_core())]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                ports = json.loads(process.stdout.readline())
                yield Server(process.pid, ports["plain"], ports["tls"], directory / "authority.pem")
            finally:
                process.stdin.close()


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("core", type=int)
    arguments = parser.parse_args()
    pin(arguments.core)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop is not None else None) as runner:
        runner.run(_serve(arguments.directory))


if __name__ == "__main__":
    _main()
