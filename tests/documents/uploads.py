"""Uploads as a server receives them, byte by byte."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
from aiohttp import web
from multidict import CIMultiDictProxy

from signing_async import Assumptions, RetryPolicy, SigningClient
from tests.servers import serving

LARGE = 2_500_000
BLOCK = 2**20
QUICK = RetryPolicy(base_delay=0.01, settle=0.1)


@attrs.frozen
class Received:
    """A request as it was received."""

    line: str
    headers: CIMultiDictProxy[str]
    body: bytes

    @property
    def file(self) -> bytes:
        """The content of the form's only part."""
        return self.body.partition(b"\r\n\r\n")[2].rpartition(b"\r\n--")[0]

    def header(self, name: str) -> str | None:
        """Return the value of a header, which must occur once."""
        found = self.headers.getall(name, [])
        assert len(found) <= 1
        return found[0] if found else None


class Recorder:
    """A server that records uploads."""

    def __init__(self) -> None:
        self.uploads: list[Received] = []
        self.origin = ""
        self.statuses: list[int] = []
        """Statuses of responses to uploads, before 201."""
        self.documents: list[dict[str, str]] = []

    async def respond(self, request: web.Request) -> web.Response:
        if request.method != "POST":
            return web.json_response({"id": "s1", "documents": self.documents})
        line = f"{request.method} {request.raw_path} HTTP/{request.version.major}.{request.version.minor}"
        self.uploads.append(Received(line, request.headers, await request.read()))
        document = {"id": "d1", "name": "lease.pdf"}
        status = self.statuses.pop(0) if self.statuses else 201
        if status == 201:
            self.documents = [document]
        return web.json_response(document, status=status)


@asynccontextmanager
async def recording() -> AsyncIterator[Recorder]:
    recorder = Recorder()
    async with serving(recorder.respond) as server:
        recorder.origin = server.origin
        yield recorder


async def uploads_of(
    source: Any,
    filename: str | None = None,
    *,
    statuses: tuple[int, ...] = (),
    max_bytes: int = 10 * 2**20,
    **options: Any,
) -> list[Received]:
    """Return the recorded requests of an upload."""
    assumptions = Assumptions(max_pdf_bytes=max_bytes)
    async with (
        recording() as recorder,
        SigningClient(recorder.origin, "token", retry=QUICK, assumptions=assumptions) as client,
    ):
        recorder.statuses = list(statuses)
        await client.documents.upload("s1", source, filename, **options)
        return recorder.uploads


async def upload(source: Any, filename: str | None = None, **options: Any) -> Received:
    """Return the only recorded request of an upload."""
    (received,) = await uploads_of(source, filename, **options)
    return received


async def in_chunks(data: bytes, size: int = 100_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def open_files() -> list[str]:
    """Return the names of the open files of this process."""
    gc.collect()  # left over by other tests
    found = []
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208  # a descriptor may be closed meanwhile
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))  # noqa: PTH115  # a link to a pipe leads to no path
    return sorted(name for name in found if name.startswith("/") and not name.startswith("/dev/"))
