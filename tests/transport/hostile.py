"""A server that misbehaves, a client of it, and every operation."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from signing_async import MemoryTokenStore, OAuth, RetryPolicy, SigningClient, SigningError, Token
from tests.auth.oauth_servers import oauth_for
from tests.fuzz.promises import TOKEN, check_error
from tests.pdfs import make_pdf
from tests.servers import Web, talking

QUICK = RetryPolicy(max_attempts=3, base_delay=0.001, settle=0.1)
PDF = make_pdf(2_000)
SIGNING = b'{"id": "s1", "name": "x", "is_draft": true, "documents": [{"id": "d1", "name": "a"}], "email": "a@b.se"}'


class Conversation:
    """One connection of somebody to the server."""

    def __init__(self, server: Hostile, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.reader = reader
        self.writer = writer

    async def head(self) -> bytes:
        """The next request's head."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        self.server.heads.append(head)
        return head

    async def request(self) -> bytes:
        """The next request's head, when its body has come too."""
        head = await self.head()
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                await self.reader.readexactly(int(line.partition(b":")[2]))
        return head

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def endless(self, part: bytes, pause: float = 0.0) -> None:
        """Send this for ever."""
        while not self.reader.at_eof():
            await self.send(part)
            await asyncio.sleep(pause)

    def reset(self) -> None:
        """Hang up with a RST."""
        own = self.writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Behave = Callable[[Conversation], Awaitable[None]]


class Hostile:
    """The server; every connection is given to ``behave``."""

    def __init__(self, behave: Behave) -> None:
        self.behave = behave
        self.heads: list[bytes] = []
        self.open = 0
        self.origin = ""

    def count(self, beginning: str) -> int:
        """How many requests began like this."""
        return sum(head.startswith(beginning.encode()) for head in self.heads)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            await self.behave(Conversation(self, reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def hostile(behave: Behave) -> AsyncIterator[Hostile]:
    """A server on a free port."""
    server = Hostile(behave)
    async with talking(server.serve) as server.origin:
        yield server
        await _wait_until(lambda: not server.open)


def saying(raw: bytes) -> Behave:
    """Responds to every request with these bytes, and hangs up."""

    async def behave(talk: Conversation) -> None:
        await talk.request()
        await talk.send(raw)

    return behave


_OAUTHS: WeakKeyDictionary[SigningClient, OAuth] = WeakKeyDictionary()


@asynccontextmanager
async def connected(server: Hostile | Web, **options: Any) -> AsyncIterator[SigningClient]:
    """A client of the server, with a session of its own or the given one: afterwards nothing of it may be left."""
    settings: dict[str, Any] = {"retry": QUICK, "timeout": 5.0} | options
    oauth = oauth_for(
        server.origin,
        client_secret=TOKEN + "-secret",
        store=MemoryTokenStore(Token(TOKEN, TOKEN + "-refresh")),
        **{name: settings.get(name) for name in ("session", "retry", "timeout")},
    )
    await oauth.access_token()
    files = _open_files()
    async with SigningClient(server.origin, oauth, **settings) as client:
        _OAUTHS[client] = oauth
        yield client
        connector = client._shared.sessions.get().connector
        assert connector is not None
        assert not connector._acquired
    await oauth.aclose()
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert not [name for name in names if name.startswith("signing_async")]
    await _wait_until(lambda: _open_files() <= files)


async def _wait_until(is_done: Callable[[], bool]) -> None:
    for _ in range(200):
        if is_done():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("a connection or a file stays open")


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def _stream(client: SigningClient, folder: Path) -> object:
    async with client.documents.stream_signed("s1", "d1") as chunks:
        return [chunk async for chunk in chunks]


Operate = Callable[[SigningClient, Path], Awaitable[Any]]
OPERATIONS: dict[str, Operate] = {
    "me": lambda client, folder: client.me(),
    "get": lambda client, folder: client.signings.get("s1"),
    "list": lambda client, folder: client.signings.list(),
    "recipients": lambda client, folder: client.recipients.list("s1"),
    "read_signed": lambda client, folder: client.documents.read_signed("s1", "d1"),
    "download_signed": lambda client, folder: client.documents.download_signed("s1", "d1", folder / "sealed.pdf"),
    "stream_signed": _stream,
    "create": lambda client, folder: client.signings.create(name="x", language="EN"),
    "send": lambda client, folder: client.signings.send("s1"),
    "upload": lambda client, folder: client.documents.upload("s1", PDF, "a.pdf"),
    "add": lambda client, folder: client.recipients.add("s1", email="a@example.com"),
    "remind": lambda client, folder: client.recipients.remind("s1", "r1"),
    "exchange": lambda client, folder: _OAUTHS[client].exchange("a-code"),
    "refresh": lambda client, folder: _OAUTHS[client].refresh(),
}
ONLY_ONCE = ("POST /api/1.0/signings/s1/send", "POST /api/1.0/signings/s1/documents", "POST /api/1.0/signings/s1/rec")


async def outcome(operate: Operate, client: SigningClient, folder: Path) -> Any:
    """What an operation comes to; an error has to be one of the package that can be shown."""
    began = time.monotonic()
    try:
        found = await operate(client, folder)
    except SigningError as error:
        check_error(error)
        found = error
    else:
        assert repr(found)
    assert time.monotonic() - began < 30
    assert not [path for path in folder.iterdir() if path.suffix == ".part"]
    return found


OK = b"HTTP/1.1 200 OK\r\n"
JSON = OK + b"Content-Type: application/json\r\n"


def sized(body: bytes, head: bytes = JSON) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
