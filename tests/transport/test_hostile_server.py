"""A server that does everything wrong: the calls end in time, with the package's errors, and nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import struct
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from signing_async import (
    APIError,
    Assumptions,
    BadRequest,
    DecodeError,
    MemoryTokenStore,
    OAuth,
    OutcomeUnknown,
    RequestTimeout,
    RetryPolicy,
    SigningClient,
    SigningError,
    Token,
    TransportError,
)
from signing_async.webhooks.check import CheckResult, check_receiver
from tests.fuzz.promises import TOKEN, check_error, check_record
from tests.pdfs import make_pdf

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
        self.server.sent += len(data)
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
        self.sent = 0
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
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(server.serve(reader, writer), name="hostile")
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    server.origin = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listening.wait_closed()


def saying(raw: bytes) -> Behave:
    """Answers every request with these bytes, and hangs up."""

    async def behave(talk: Conversation) -> None:
        await talk.request()
        await talk.send(raw)

    return behave


@asynccontextmanager
async def connected(server: Hostile, **options: Any) -> AsyncIterator[SigningClient]:
    """A client of the server, which is looked at afterwards: nothing of it may be left."""
    store = MemoryTokenStore(Token(TOKEN, TOKEN + "-refresh"))
    oauth = OAuth(
        server.origin,
        client_id="app",
        client_secret=TOKEN + "-secret",
        redirect_uri="https://app.example.com/",
        store=store,
        retry=QUICK,
        timeout=5.0,
    )
    await oauth.access_token()
    files = _files()
    settings: dict[str, Any] = {"retry": QUICK, "timeout": 5.0}
    async with SigningClient(server.origin, oauth, **(settings | options)) as client:
        yield client
        connector = client._shared.sessions.get().connector
        assert connector is not None
        assert not connector._acquired
    await oauth.aclose()
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert not [name for name in names if name.startswith("signing_async")]
    for _ in range(200):
        if not server.open and _files() <= files:
            break
        await asyncio.sleep(0.01)
    assert not server.open
    assert _files() <= files


def _files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def oauth_of(client: SigningClient) -> OAuth:
    assert isinstance(client._shared.auth, OAuth)
    return client._shared.auth


async def _stream(client: SigningClient, folder: Path) -> object:
    async with client.documents.stream_signed("s1", "d1") as chunks:
        return [chunk async for chunk in chunks]


Operate = Callable[[SigningClient, Path], Awaitable[Any]]
READS: dict[str, Operate] = {
    "me": lambda client, folder: client.me(),
    "get": lambda client, folder: client.signings.get("s1"),
    "list": lambda client, folder: client.signings.list(),
    "recipients": lambda client, folder: client.recipients.list("s1"),
    "read_signed": lambda client, folder: client.documents.read_signed("s1", "d1"),
    "download_signed": lambda client, folder: client.documents.download_signed("s1", "d1", folder / "sealed.pdf"),
    "stream_signed": _stream,
}
WRITES: dict[str, Operate] = {
    "create": lambda client, folder: client.signings.create(name="x", language="EN"),
    "send": lambda client, folder: client.signings.send("s1"),
    "upload": lambda client, folder: client.documents.upload("s1", PDF, "a.pdf"),
    "add": lambda client, folder: client.recipients.add("s1", email="a@example.com"),
    "remind": lambda client, folder: client.recipients.remind("s1", "r1"),
}
TOKENS: dict[str, Operate] = {
    "exchange": lambda client, folder: oauth_of(client).exchange("a-code"),
    "refresh": lambda client, folder: oauth_of(client).refresh(),
}
OPERATIONS = READS | WRITES | TOKENS
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


# Answers that are wrong from the first to the last byte

OK = b"HTTP/1.1 200 OK\r\n"
JSON = OK + b"Content-Type: application/json\r\n"


def _sized(body: bytes, head: bytes = JSON) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _packed(data: bytes, wbits: int) -> bytes:
    packer = zlib.compressobj(9, wbits=wbits)
    return packer.compress(data) + packer.flush()


RAW = {
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "HTTP/0.9": b"<html>hello</html>",
    "HTTP/2.0": b"HTTP/2.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "TLS": bytes.fromhex("15030100020228"),
    "a length that is too long": _sized(SIGNING).replace(b"Content-Length: ", b"Content-Length: 9"),
    "a length that is too short": JSON + b"Content-Length: 10\r\n\r\n" + SIGNING,
    "a negative length": JSON + b"Content-Length: -5\r\n\r\n" + SIGNING,
    "a length with a sign": JSON + b"Content-Length: +5\r\n\r\n" + SIGNING,
    "a hexadecimal length": JSON + b"Content-Length: 0x10\r\n\r\n" + SIGNING,
    "an endless length": JSON + b"Content-Length: 99999999999999999999999\r\n\r\n" + SIGNING,
    "two lengths": JSON + b"Content-Length: 5\r\nContent-Length: 90\r\n\r\n" + SIGNING,
    "a list of lengths": JSON + b"Content-Length: 5, 90\r\n\r\n" + SIGNING,
    "an empty length": JSON + b"Content-Length:\r\n\r\n" + SIGNING,
    "length and chunks": JSON + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunks of no size": JSON + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n",
    "chunks of a negative size": JSON + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
    "chunks of an endless size": JSON + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffff\r\n{}\r\n0\r\n\r\n",
    "chunks that are too long": JSON + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n",
    "chunks that end early": JSON + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
    "a long chunk extension": JSON + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"x" * 100_000 + b"\r\n{}\r\n0\r\n\r\n",
    "many trailers": JSON + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
    "another transfer encoding": JSON + b"Transfer-Encoding: identity, gzip\r\n\r\n" + SIGNING,
    "a folded header": JSON + b"X-Request-Id: a\r\n b\r\nContent-Length: 2\r\n\r\n{}",
    "a header without a name": JSON + b": x\r\nContent-Length: 2\r\n\r\n{}",
    "a header without a colon": JSON + b"Nonsense\r\nContent-Length: 2\r\n\r\n{}",
    "a space before the colon": JSON + b"Content-Length : 2\r\n\r\n{}",
    "a NUL in a header": JSON + b"X-Request-Id: a\0b\r\nContent-Length: 2\r\n\r\n{}",
    "a NUL in the reason": b"HTTP/1.1 200 O\0K\r\nContent-Length: 2\r\n\r\n{}",
    "an escape in a header": JSON + b"X-Request-Id: \x1b[31m\r\nContent-Length: 2\r\n\r\n{}",
    "line feeds alone": b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}",
    "returns alone": b"HTTP/1.1 200 OK\rContent-Length: 2\r\r{}",
    "a header of a megabyte": JSON + b"X-Request-Id: " + b"a" * 2**20 + b"\r\nContent-Length: 2\r\n\r\n{}",
    "ten thousand headers": JSON + b"X: y\r\n" * 10_000 + b"Content-Length: 2\r\n\r\n{}",
    "a request id of 8000": JSON + b"X-Request-Id: " + b"a" * 8_000 + b"\r\nContent-Length: 2\r\n\r\n[}",
    "status 099": b"HTTP/1.1 099 Odd\r\nContent-Length: 2\r\n\r\n{}",
    "status 1000": b"HTTP/1.1 1000 Odd\r\nContent-Length: 2\r\n\r\n{}",
    "status 999": b"HTTP/1.1 999 Odd\r\nContent-Length: 2\r\n\r\n{}",
    "no status": b"HTTP/1.1 OK\r\nContent-Length: 2\r\n\r\n{}",
    "101": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n\x81\x02hi",
    "a hundred 100s": b"HTTP/1.1 100 Continue\r\n\r\n" * 100,
    "204 with a body": b"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\n{}",
    "205 with a body": b"HTTP/1.1 205 Reset Content\r\nContent-Length: 2\r\n\r\n{}",
    "304 with a body": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 2\r\n\r\n{}",
    "206": b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-1/9\r\nContent-Length: 2\r\n\r\n{}",
    "a shower of cookies": JSON + b"Set-Cookie: \x01=;;=\xff\r\n" * 50 + b"Content-Length: 2\r\n\r\n{}",
    "no type": OK + b"Content-Length: 2\r\n\r\n{}",
    "HTML": _sized(b"<html>Sign in</html>", OK + b"Content-Type: text/html\r\n"),
    "a type that is none": _sized(SIGNING, OK + b"Content-Type: ;;==;charset=\xff\r\n"),
    "an unknown charset": _sized(SIGNING, OK + b"Content-Type: application/json; charset=klingon\r\n"),
    "a byte order mark": _sized(b"\xef\xbb\xbf" + SIGNING),
    "two byte order marks": _sized(b"\xef\xbb\xbf" * 2 + SIGNING),
    "UTF-16": _sized(SIGNING.decode().encode("utf-16")),
    "UTF-32": _sized(SIGNING.decode().encode("utf-32-be")),
    "Latin-1": _sized('{"id": "é"}'.encode("latin-1")),
    "half a character pair": _sized(rb'{"id": "\ud800", "message": "\udfff"}'),
    "NULs": _sized(b"\0" * 5_000),
    "an empty answer": _sized(b""),
    "deep nesting": _sized(b"[" * 100_000),
    "deep nesting that ends": _sized(b'{"id": "s1", "x": ' + b"[" * 900 + b"]" * 900 + b"}"),
    "a number of a megabyte": _sized(b'{"id": %s}' % (b"9" * 2**20)),
    "numbers that are none": _sized(b'{"id": NaN, "order": -Infinity, "x": 1e999}'),
    "the same key twice": _sized(b'{"id": "a", "id": {"id": null}, "documents": 1, "documents": null}'),
    "null": _sized(b"null"),
    "a number": _sized(b"17"),
    "a list of everything": _sized(b'[null, 1, "x", [], {}]'),
    "wrong types": _sized(b'{"id": ["s1"], "documents": {"0": 1}, "is_draft": "no", "access_token": 5}'),
    "no gzip": _sized(b"not gzip", JSON + b"Content-Encoding: gzip\r\n"),
    "half a gzip": _sized(gzip.compress(SIGNING * 50)[:-30], JSON + b"Content-Encoding: gzip\r\n"),
    "gzip and more": _sized(gzip.compress(SIGNING) + b"more", JSON + b"Content-Encoding: gzip\r\n"),
    "gzip twice": _sized(gzip.compress(gzip.compress(SIGNING)), JSON + b"Content-Encoding: gzip, gzip\r\n"),
    "no deflate": _sized(b"\xff" * 50, JSON + b"Content-Encoding: deflate\r\n"),
    "brotli": _sized(b"\x0b\x02\x80{}\n\x03", JSON + b"Content-Encoding: br\r\n"),
    "an unknown encoding": _sized(SIGNING, JSON + b"Content-Encoding: rot13\r\n"),
    "two answers": _sized(SIGNING) + _sized(b'{"id": "of somebody else"}'),
    "an error of escapes": b"HTTP/1.1 400 \x1b[31mBad\r\nContent-Length: 18\r\n\r\n\x1b]0;t\x07\x1b[2J\r\nOwned\x9b31m",
    "a 429 of ages": b"HTTP/1.1 429 Slow\r\nRetry-After: 99999999999999999999\r\nContent-Length: 0\r\n\r\n",
    "a 429 of the past": b"HTTP/1.1 429 X\r\nRetry-After: Thu, 01 Jan 1970 00:00:00 GMT\r\nContent-Length: 0\r\n\r\n",
    "a 401 for ever": b"HTTP/1.1 401 No\r\nWWW-Authenticate: Bearer realm=\xff\r\nContent-Length: 0\r\n\r\n",
    "a 403 that echoes": _sized(b'{"code": "%s", "message": "no %s"}' % (TOKEN.encode(), TOKEN.encode()),
                               b"HTTP/1.1 403 %s\r\nX-Request-Id: %s\r\n" % (TOKEN.encode(), TOKEN.encode())),
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + SIGNING,
    "trailers": JSON + b"Transfer-Encoding: chunked\r\nTrailer: X\r\n\r\n%x\r\n%s\r\n0\r\nX: y\r\n\r\n" % (
        len(SIGNING), SIGNING),
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
async def test_any_answer_ends_every_call(name: str, tmp_path: Path) -> None:
    """With a record or with a typed error, in time; what could take effect twice is sent once."""
    async with hostile(saying(RAW[name])) as server:
        for operate in OPERATIONS.values():
            server.heads.clear()
            async with connected(server) as client:
                found = await outcome(operate, client, tmp_path)
            if name not in ("nothing", "a 429 of the past") and isinstance(found, OutcomeUnknown):
                assert found.attempts == 1
            if name not in ("a 429 of ages", "a 429 of the past", "a 401 for ever"):  # refused, not lost
                for beginning in ONLY_ONCE:
                    assert server.count(beginning) <= 1, beginning
            assert all(b"Cookie" not in head for head in server.heads)


@pytest.mark.parametrize("name", ["HTTP/1.0", "trailers", "a byte order mark", "no type", "an unknown charset"])
async def test_what_is_odd_but_right_is_read(name: str) -> None:
    """Answers of old or sloppy servers that can be understood are."""
    async with hostile(saying(RAW[name])) as server, connected(server) as client:
        user = await client.me()
        assert name == "no type" or user.id == "s1"
        check_record(user)


async def test_an_echo_shows_no_secret(tmp_path: Path) -> None:
    """A token that the server repeats in status line, headers and body is in no error."""
    async with hostile(saying(RAW["a 403 that echoes"])) as server:
        for operate in OPERATIONS.values():
            async with connected(server) as client:
                error = await outcome(operate, client, tmp_path)
            assert isinstance(error, SigningError)
            assert "[redacted]" in str(error)


async def test_an_error_of_escapes_is_shown_in_a_line() -> None:
    """What would change a terminal's title, clear it or begin a new line of a log is left out."""
    async with hostile(saying(RAW["an error of escapes"])) as server, connected(server) as client:
        with pytest.raises((BadRequest, TransportError)) as caught:
            await client.me()
        assert str(caught.value).isprintable()


async def test_a_request_id_of_thousands_is_none() -> None:
    """No log line becomes as long as a server likes."""
    async with hostile(saying(RAW["a request id of 8000"])) as server, connected(server) as client:
        with pytest.raises(DecodeError) as caught:
            await client.me()
        assert caught.value.request_id is None
        assert len(str(caught.value)) < 300


# Answers without end


def trickling(head: bytes, part: bytes) -> Behave:
    """A head at once, and then a little at a time, for ever."""

    async def behave(talk: Conversation) -> None:
        await talk.request()
        await talk.send(head)
        await talk.endless(part, 0.02)

    return behave


DRIPS = {
    "silence": trickling(b"", b""),
    "a head": trickling(b"HTTP/1.1 200 OK\r\nX: ", b"y"),
    "headers": trickling(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "a body": trickling(b"HTTP/1.1 200 OK\r\nContent-Length: 90000\r\n\r\n%PDF-1.7", b" "),
    "chunks": trickling(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "an error": trickling(b"HTTP/1.1 503 No\r\nContent-Length: 90000\r\n\r\n", b"x"),
    "continuing": trickling(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}


@pytest.mark.parametrize("name", DRIPS)
async def test_a_drip_is_not_waited_for(name: str, tmp_path: Path) -> None:
    """Byte after byte, each within every idle limit: the deadline of the whole call holds, for all at once."""
    async with hostile(DRIPS[name]) as server, connected(server, timeout=0.5) as client:
        oauth_of(client)._timeout = 0.5
        began = time.monotonic()
        found = await asyncio.gather(*(outcome(operate, client, tmp_path) for operate in OPERATIONS.values()))
        assert time.monotonic() - began < 15
        for operation, one in zip(OPERATIONS, found, strict=True):
            told = operation in ("send", "remind") and name in ("a body", "chunks")  # the status says it all
            # Chunks of nothing but white space are no PDF, which is seen at once.
            # Where a write was sent, and there was no time left to read, its outcome is unknown.
            expected = RequestTimeout | DecodeError | APIError | OutcomeUnknown
            assert told or isinstance(one, expected), (operation, one)
        for beginning in ONLY_ONCE:
            assert server.count(beginning) <= 2  # "recipients" begins an addition and a reminder


def flooding(head: bytes, part: bytes) -> Behave:
    """A head, and then as much as fits through."""

    async def behave(talk: Conversation) -> None:
        await talk.request()
        await talk.send(head)
        await talk.endless(part)

    return behave


FLOODS = {
    "headers": flooding(b"HTTP/1.1 200 OK\r\n", b"X-Some-Header: of some length\r\n" * 2_000),
    "one header": flooding(b"HTTP/1.1 200 OK\r\nX: ", b"y" * 65_536),
    "a status line": flooding(b"HTTP/1.1 200 ", b"y" * 65_536),
    "a body": flooding(b"HTTP/1.1 200 OK\r\n\r\n%PDF-", b"x" * 65_536),
    "chunks": flooding(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 10_000),
    "a chunk extension": flooding(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x" * 65_536),
    "trailers": flooding(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n" * 10_000),
    "continuing": flooding(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2_000),
    "an error": flooding(b"HTTP/1.1 400 No\r\n\r\n", b"x" * 65_536),
    "an error that may pass": flooding(b"HTTP/1.1 500 No\r\n\r\n", b"x" * 65_536),
    "a redirect": flooding(b"HTTP/1.1 302 No\r\nLocation: /x\r\n\r\n", b"x" * 65_536),
}


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_is_not_swallowed(name: str, tmp_path: Path) -> None:
    """However much a server sends, a bounded part of it is taken, and the rest is left."""
    limits = Assumptions(max_answer_bytes=2**20, max_sealed_bytes=2**20)
    async with hostile(FLOODS[name]) as server:
        for operation in ("me", "download_signed", "remind", "refresh"):
            async with connected(server, timeout=0.3, retry=RetryPolicy.none(), assumptions=limits) as client:
                oauth_of(client)._retry = RetryPolicy.none()
                oauth_of(client)._timeout = 0.5
                tracemalloc.start()
                try:
                    found = await outcome(OPERATIONS[operation], client, tmp_path)
                    peak = tracemalloc.get_traced_memory()[1]
                finally:
                    tracemalloc.stop()
            assert isinstance(found, SigningError) or operation == "remind"
            assert "larger than" in str(found) or name != "a body" or operation == "remind"
            assert peak < 24 * 2**20, (operation, peak)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("status", [200, 400])
async def test_a_bomb_is_not_unpacked_whole(encoding: str, status: int, tmp_path: Path) -> None:
    """An answer that unpacks to a thousand times its size, 200 MB, is given up in bounded memory."""
    packer = zlib.compressobj(9, wbits=31 if encoding == "gzip" else 15)
    bomb = packer.compress(b'{"id": "')
    bomb += b"".join(packer.compress(b"x" * 2**20) for _ in range(200)) + packer.flush()
    assert len(bomb) * 900 < 200 * 2**20
    raw = _sized(bomb, b"HTTP/1.1 %d X\r\nContent-Encoding: %s\r\n" % (status, encoding.encode()))
    async with hostile(saying(raw)) as server:
        for operation in ("me", "read_signed", "exchange"):
            async with connected(server, retry=RetryPolicy.none()) as client:
                tracemalloc.start()
                try:
                    found = await outcome(OPERATIONS[operation], client, tmp_path)
                    peak = tracemalloc.get_traced_memory()[1]
                finally:
                    tracemalloc.stop()
            assert isinstance(found, DecodeError | TransportError | APIError) or operation == "exchange"
            assert isinstance(found, SigningError)
            assert peak < 100 * 2**20, (operation, peak)


async def test_gzip_answer_is_bounded_by_max_answer_bytes(tmp_path: Path) -> None:
    """Of 0.4 MB that unpack to 400 MB no more is held than a small part above the limit."""
    limits = Assumptions(max_answer_bytes=4 * 2**20)
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(b" " * 2**20) for _ in range(400)) + packer.flush()
    assert len(bomb) < 450_000
    async with hostile(saying(_sized(bomb, JSON + b"Content-Encoding: gzip\r\n"))) as server:
        for operation in ("me", "list", "create"):
            async with connected(server, retry=RetryPolicy.none(), assumptions=limits) as client:
                tracemalloc.start()
                try:
                    found = await outcome(OPERATIONS[operation], client, tmp_path)
                    peak = tracemalloc.get_traced_memory()[1]
                finally:
                    tracemalloc.stop()
            assert "larger than 4194304 bytes" in str(found)
            assert peak < 3 * 4 * 2**20, (operation, peak)


# Where the token goes


FOREIGN = (
    "http://{other}",
    "//{other}",
    "HTTP:",
    "http://localhost",
    "http://user",
    "https:",
    "ftp:",
    "file:",
    "data:",
)


@pytest.mark.parametrize(
    "location",
    [
        "http://{other}/api/1.0/me",
        "//{other}/x",
        "http://localhost:{port}/x",
        "http://{own}@{other}/x",
        "http://user:pass@{own}/x",
        "https://{own}/x",
        "HTTP://{other}",
        "http:\\\\{other}\\x",
        "/\\{other}/x",
        "\\\\{other}/x",
        "ht\ttp://{other}/x",
        " http://{other}/x",
        "http:///{other}/x",
        "http:{other}/x",
        "file:///etc/passwd",
        "ftp://{other}/x",
        "data:application/json,{{}}",
        "javascript:alert(1)",
        "ws://{own}/x",
        "http://{own}.example.com/x",
        "http://{own}%2f@{other}/x",
        "http://127.1:{port}/x",
        "http://0x7f000001:{port}/x",
        "http://[::ffff:127.0.0.1]:{port}/x",
        "http://{other}#{own}",
        "http://{other}?{own}",
        "",
        "?",
        "#",
        "http://",
        "://",
        "http://[",
        "http://{own}:99999/",
        "/x" * 3_000,
    ],
    ids=repr,
)
async def test_a_redirect_takes_the_token_nowhere_else(location: str, tmp_path: Path) -> None:
    """Wherever a redirect points: only the tenant's own origin is asked, and the call ends."""

    async def redirect(talk: Conversation) -> None:
        await talk.request()
        own, strange = server.origin.removeprefix("http://"), other.origin.removeprefix("http://")
        where = location.format(own=own, other=strange, port=own.partition(":")[2])
        await talk.send(b"HTTP/1.1 302 Found\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % where.encode())

    async with hostile(saying(_sized(SIGNING))) as other, hostile(redirect) as server:
        for operate in OPERATIONS.values():
            server.heads.clear()
            async with connected(server) as client:
                error = await outcome(operate, client, tmp_path)
            assert isinstance(error, SigningError)
            # An ambiguous write is followed by one reading.
            reads = [head for head in server.heads if head.startswith(b"GET ")]
            assert len(server.heads) - len(reads) <= 1
            assert len(reads) <= (1 if location.startswith(FOREIGN) else 6)
            host = server.origin.removeprefix("http://").encode()
            assert all(b"\r\nHost: %s\r\n" % host in head for head in server.heads)
        assert other.heads == []


async def test_cookies_are_not_kept() -> None:
    """A client's own session takes no cookies: nothing of one call is sent with the next."""
    raw = _sized(SIGNING, JSON + b"Set-Cookie: session=of-somebody; Path=/\r\n")
    async with hostile(saying(raw)) as server:
        # Of a host without a name nobody keeps cookies.
        async with SigningClient(server.origin.replace("127.0.0.1", "localhost"), TOKEN) as client:
            await client.me()
            await client.me()
        assert all(b"cookie" not in head.lower() for head in server.heads)


async def test_pages_without_end_are_read_as_they_are_used() -> None:
    """Of a list that never ends no more is fetched than one page ahead of the caller."""
    number = 0

    async def behave(talk: Conversation) -> None:
        nonlocal number
        while True:
            await talk.request()
            number += 1
            page = json.dumps({"data": [{"id": f"s{number}"}], "next": f"c{number}"})
            await talk.send(_sized(page.encode()))

    async with hostile(behave) as server, connected(server) as client:
        seen = 0
        async for _ in client.signings.list():
            seen += 1
            if seen == 30:
                break
        await asyncio.sleep(0.05)
        assert len(server.heads) <= 32


# Connections


async def test_an_answer_that_nobody_asked_for() -> None:
    """What comes on a connection that waits in the pool is not taken for the answer to the next request."""
    asked: list[bytes] = []

    async def behave(talk: Conversation) -> None:
        while True:
            asked.append(await talk.request())
            await talk.send(_sized(b'{"id": "right"}'))
            await asyncio.sleep(0.05)
            await talk.send(_sized(b'{"id": "of somebody else"}'))

    async with hostile(behave) as server, connected(server) as client:
        for _ in range(5):
            assert (await client.me()).id == "right"
            await asyncio.sleep(0.15)


async def test_an_answer_before_the_question() -> None:
    """A server that answers each connection before anything was asked confuses nobody for long."""

    async def behave(talk: Conversation) -> None:
        await talk.send(_sized(b'{"id": "early"}'))
        await talk.request()

    async with hostile(behave) as server, connected(server) as client:
        found = await outcome(OPERATIONS["me"], client, Path("/nonexistent").parent)
        assert isinstance(found, TransportError) or found.id == "early"


BIG = make_pdf(4_000_000)


@pytest.mark.parametrize("ending", ["close", "reset", "drain"])
async def test_an_upload_that_is_refused_early(ending: str, tmp_path: Path) -> None:
    """A 413 that comes while the file is still being sent is told as such, or as a broken connection; never a repeat
    without looking."""

    async def behave(talk: Conversation) -> None:
        while True:
            head = await talk.head()
            if head.startswith(b"GET"):
                await talk.send(_sized(b'{"id": "s1", "is_draft": true, "documents": []}'))
                continue
            await talk.reader.readexactly(50_000)
            await talk.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            if ending == "reset":
                talk.reset()
            elif ending == "drain":
                while await talk.reader.read(2**20):
                    pass
            return

    async with hostile(behave) as server, connected(server) as client:
        found = await outcome(lambda client, folder: client.documents.upload("s1", BIG, "a.pdf"), client, tmp_path)
        assert isinstance(found, APIError | TransportError)
        if ending == "drain":
            assert isinstance(found, APIError)
            assert found.status == 413
        if isinstance(found, APIError):
            assert found.status == 413
        # Each repeat is preceded by a reading.
        assert server.count("GET /api/1.0/signings/s1 ") >= server.count("POST")


async def test_a_reset_in_the_middle_of_an_upload(tmp_path: Path) -> None:
    """The signing is read before the file is sent again, and an upload that arrived is not repeated."""
    arrived: list[str] = []

    async def behave(talk: Conversation) -> None:
        while True:
            head = await talk.head()
            if head.startswith(b"GET"):
                documents = [{"id": name, "name": "a.pdf"} for name in arrived]
                await talk.send(_sized(json.dumps({"id": "s1", "is_draft": True, "documents": documents}).encode()))
                continue
            await talk.reader.readexactly(100_000)
            if server.count("POST") == 2:
                arrived.append("d1")
            talk.reset()
            return

    async with hostile(behave) as server, connected(server) as client:
        document = await client.documents.upload("s1", BIG, "a.pdf")
        assert document.id == "d1"
        assert server.count("POST") == 2


async def test_a_write_whose_answer_is_cut_is_not_sent_again(tmp_path: Path) -> None:
    """The connection breaks within the head of the answer: what took effect is found, and counts."""
    done: set[str] = set()

    async def behave(talk: Conversation) -> None:
        while True:
            method, path = (await talk.request()).decode().split(" ")[:2]
            if method == "POST":
                done.add(path.rpartition("/")[2])
                await talk.send(b"HTTP/1.1 200 OK\r\nContent-")
                return talk.reset()
            if path.endswith("recipients"):
                people = [{"id": "r1", "email": "a@example.com"}] if "recipients" in done else []
                await talk.send(_sized(json.dumps(people).encode()))
            else:
                documents = [{"id": "d9", "name": "a.pdf"}] if "documents" in done else []
                answer = {"id": "s1", "is_draft": "send" not in done, "documents": documents}
                await talk.send(_sized(json.dumps(answer).encode()))

    async with hostile(behave) as server, connected(server) as client:
        assert (await client.documents.upload("s1", PDF, "a.pdf")).id == "d9"
        assert (await client.recipients.add("s1", email="a@example.com")).id == "r1"
        await client.signings.send("s1")
        with pytest.raises(OutcomeUnknown):
            await client.recipients.remind("s1", "r1")
        assert server.count("POST") == 4


# The webhook check, which talks to strange servers too


@pytest.mark.parametrize(
    "name", ["nothing", "no HTTP", "a negative length", "a NUL in a header", "a header of a megabyte"]
)
async def test_the_webhook_check_judges_any_endpoint(name: str) -> None:
    """Whatever an endpoint answers, it gets a verdict on every check, and no exception ends it."""
    async with hostile(saying(RAW[name])) as server:
        found = await _judged(server)
    assert len(found) == 9
    assert not all(one.ok for one in found)


@pytest.mark.parametrize("name", ["headers", "a body", "continuing"])
async def test_the_webhook_check_drinks_no_flood(name: str) -> None:
    """An endpoint that answers without end is left."""
    async with hostile(FLOODS[name]) as server:
        assert len(await _judged(server)) == 9


async def _judged(server: Hostile) -> list[CheckResult]:
    checks = check_receiver(f"{server.origin}/hooks", "k", response_timeout=0.2, slow_limit=0.2, over_long=100_000)
    async with contextlib.aclosing(checks) as running:  # type: ignore[type-var]  # an async generator it is
        return [result async for result in running]
