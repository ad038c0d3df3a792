"""A sandbox in a thread, for tools outside of an event loop; and a caller of the API."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import aiohttp

from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf

Part = tuple[str | None, str | None, bytes | None]

API = "/api/1.0"


@contextmanager
def in_thread(**settings: Any) -> Iterator[tuple[str, str]]:
    """Run a sandbox in a thread; return its URL and an access token."""
    started: Future[tuple[str, str]] = Future()
    stops: list[Callable[[], object]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        async with Sandbox(**settings) as sandbox:
            stops.append(partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set))
            started.set_result((sandbox.base_url, sandbox.access_token()))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield started.result(30)
    finally:
        stops[0]()
        thread.join(10)


class Caller:
    """Calls the API; `headers` are those of the last response."""

    def __init__(self, sandbox: Sandbox, session: aiohttp.ClientSession) -> None:
        self.sandbox = sandbox
        self.session = session
        self.headers: dict[str, str] = {}

    async def __call__(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        """Return the status and the body: decoded JSON, or bytes."""
        async with self.session.request(method, path, **options) as response:
            self.headers = {name.lower(): value for name, value in response.headers.items()}
            body = await response.read()
            if "json" in response.content_type and body:
                return response.status, await response.json(content_type=None)
            return response.status, body

    async def ok(self, method: str, path: str, **options: Any) -> Any:
        """Return the body of a response that must be a success."""
        status, body = await self(method, path, **options)
        assert 200 <= status < 300, (status, body)
        return body

    async def draft(self, **fields: Any) -> str:
        """Return the id of a new draft."""
        body = await self.ok("POST", f"{API}/signings", json={"name": "A contract", "language": "EN"} | fields)
        return str(body["id"])

    async def upload(self, signing_id: str, data: bytes | None = None, filename: str = "contract.pdf") -> Any:
        """Return the status and body of an upload."""
        form = aiohttp.FormData()
        file = io.BytesIO(make_pdf() if data is None else data)
        form.add_field("selected_file", file, filename=filename, content_type="application/pdf")
        return await self("POST", f"{API}/signings/{signing_id}/documents", data=form)

    async def recipient(self, signing_id: str, **fields: Any) -> str:
        """Return the id of a new recipient."""
        body = {"email": "anna@example.com", "first_name": "Anna", "last_name": "Berg"} | fields
        return str((await self.ok("POST", f"{API}/signings/{signing_id}/recipients", json=body))["id"])

    async def sent(self, recipients: int = 1, **fields: Any) -> tuple[str, str, list[str]]:
        """Return a sent signing's id, its document's, and its recipients'."""
        signing_id = await self.draft(**fields)
        _, document = await self.upload(signing_id)
        people = [await self.recipient(signing_id, email=f"p{n}@example.com") for n in range(recipients)]
        await self.ok("POST", f"{API}/signings/{signing_id}/send")
        return signing_id, document["id"], people


@asynccontextmanager
async def caller(sandbox: Sandbox) -> AsyncIterator[Caller]:
    """Return a caller with the default user's token."""
    headers = {"Authorization": f"Bearer {sandbox.access_token()}"}
    async with aiohttp.ClientSession(sandbox.base_url, headers=headers) as session:
        yield Caller(sandbox, session)


async def begin_upload(
    sandbox: Sandbox, signing_id: str, sent: bytes = b"--b\r\n", size: int = 9000
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send the head and the first bytes of an upload over a connection of its own; wait until it is being received."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(sandbox.base_url.rpartition(":")[2]))
    head = f"POST {API}/signings/{signing_id}/documents HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n"
    head += f"Authorization: Bearer {sandbox.access_token()}\r\n"
    head += "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    before = len(sandbox.requests)
    writer.write(head.encode() + sent)
    async with asyncio.timeout(10):
        while len(sandbox.requests) == before:
            await asyncio.sleep(0.01)
    return reader, writer


def body_of(parts: Sequence[Part], boundary: str = "bOuNdArY") -> tuple[bytes, str]:
    """Return a multipart body and its content type. Parts are name, filename and content (None: a small PDF)."""
    out = b""
    for name, filename, content in parts:
        disposition = "form-data"
        if name is not None:
            disposition += f'; name="{name}"'
        if filename is not None:
            disposition += '; filename="{}"'.format(filename.replace("\\", "\\\\").replace('"', '\\"'))
        out += f"--{boundary}\r\nContent-Disposition: {disposition}\r\n\r\n".encode()
        out += (make_pdf() if content is None else content) + b"\r\n"
    return out + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"
