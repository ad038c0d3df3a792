"""The whole client against a server that may respond with any bytes, over real sockets."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from signing_async import MemoryTokenStore, OAuth, RetryPolicy, SigningClient, SigningError, Token
from tests.fuzz.promises import TOKEN, check_error
from tests.fuzz.running import Attack, Target
from tests.pdfs import make_pdf
from tests.servers import talking

PDF = make_pdf()
ONCE = RetryPolicy(max_attempts=1, max_retry_after=0.0)
PLACE = b"ELSEWHERE"
Operate = Callable[[SigningClient, OAuth, Path], Awaitable[Any]]


async def _streamed(client: SigningClient) -> int:
    async with client.documents.stream_signed("s1", "d1") as chunks:
        return sum([len(chunk) async for chunk in chunks])


OPERATIONS: tuple[Operate, ...] = (
    lambda client, oauth, folder: client.me(),
    lambda client, oauth, folder: client.signings.get("s1"),
    lambda client, oauth, folder: client.signings.create(name="x", language="EN"),
    lambda client, oauth, folder: client.signings.list(),
    lambda client, oauth, folder: client.signings.send("s1"),
    lambda client, oauth, folder: client.documents.upload("s1", PDF, "a.pdf"),
    lambda client, oauth, folder: client.documents.read_signed("s1", "d1"),
    lambda client, oauth, folder: client.documents.download_signed("s1", "d1", folder / "sealed.pdf"),
    lambda client, oauth, folder: _streamed(client),
    lambda client, oauth, folder: client.recipients.add("s1", email="a@example.com"),
    lambda client, oauth, folder: client.recipients.remind("s1", "r1"),
    lambda client, oauth, folder: client.recipients.remind_pending("s1"),
    lambda client, oauth, folder: oauth.exchange("a-code"),
    lambda client, oauth, folder: oauth.refresh(),
)


class _Server:
    """Responds to every request with the same bytes, and hangs up; another one counts who comes to it by mistake."""

    raw = b""
    strangers = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                await reader.readexactly(int(line.partition(b":")[2]))
        writer.write(self.raw)
        await writer.drain()

    async def turn_away(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.strangers += 1


async def _attack(server: _Server, origin: str, elsewhere: str, folder: Path, data: bytes) -> None:
    operate = OPERATIONS[data[0] % len(OPERATIONS) if data else 0]
    server.raw = data[1:].replace(PLACE, elsewhere.encode())
    store = MemoryTokenStore(Token(TOKEN, TOKEN + "-refresh"))
    app = {"client_id": "app", "client_secret": TOKEN + "-secret", "redirect_uri": "https://app.example.com/"}
    oauth = OAuth(origin, **app, store=store, retry=ONCE, timeout=5.0)
    async with SigningClient(origin, oauth, retry=ONCE, timeout=5.0) as client:
        assert await oauth.access_token() == TOKEN
        try:
            found = await operate(client, oauth, folder)
        except SigningError as error:
            check_error(error, data)
        else:
            assert repr(found)
        connector = client._shared.sessions.get().connector
        assert connector is not None
        assert not connector._acquired
    await oauth.aclose()
    assert server.strangers == 0
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("signing_async")]
    assert all(path.name == "sealed.pdf" for path in folder.iterdir())


@contextmanager
def attacking() -> Iterator[Attack]:
    server = _Server()
    own, other = talking(server.talk), talking(server.turn_away)
    with tempfile.TemporaryDirectory() as name, asyncio.Runner() as runner:
        origin, elsewhere = runner.run(own.__aenter__()), runner.run(other.__aenter__())
        try:
            yield lambda data: runner.run(_attack(server, origin, elsewhere, Path(name), data))
        finally:
            for running in (own, other):
                runner.run(running.__aexit__(None, None, None))


def _json(body: bytes, *, status: bytes = b"200 OK", head: bytes = b"") -> bytes:
    top = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n"
    return top % (status, head, len(body)) + body


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n"
SIGNING = b'{"id": "s1", "name": "x", "is_draft": true, "documents": [{"id": "d1", "name": "a"}]}'
SEEDS = (
    b"\x00" + _json(b'{"id": "u1", "email": "a@b"}', head=b"X-Request-Id: r1\r\n"),
    b"\x01" + CHUNKED + b"%x\r\n%s\r\n0\r\nX: y\r\n\r\n" % (len(SIGNING), SIGNING),
    b"\x02" + _json(SIGNING),
    b"\x03" + _json(b'{"data": [%s], "next": "?cursor=2"}' % SIGNING, head=b"Link: <?c=3>; rel=next\r\n"),
    b"\x04HTTP/1.1 204 No Content\r\n\r\n",
    b"\x05" + _json(b'{"id": "d1", "documents": []}', status=b"201 Created"),
    b"\x06HTTP/1.1 200 OK\r\nContent-Type: application/pdf\r\nContent-Length: %d\r\n\r\n" % len(PDF) + PDF,
    b"\x07HTTP/1.0 200 OK\r\n\r\n" + PDF,
    b"\x08" + CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(PDF), PDF),
    b"\x09" + _json(b'{"code": "cannot_be_sent", "request_id": "r"}', status=b"400 Bad Request"),
    b"\x0aHTTP/1.1 429 Too Many\r\nRetry-After: 3\r\nContent-Length: 0\r\n\r\n",
    b"\x0b" + _json(b'{"data": [{"id": "r1", "email": "a@b"}]}'),
    b"\x0c" + _json(b'{"access_token": "new", "refresh_token": "r", "expires_in": 60}'),
    b"\x0d" + _json(b'{"error": "invalid_grant"}', status=b"400 Bad Request", head=b"request_id: 5\r\n"),
    b"\x00HTTP/1.1 302 Found\r\nLocation: " + PLACE + b"/x\r\nContent-Length: 0\r\n\r\n",
    b"\x01HTTP/1.1 307 Moved\r\nLocation: /api/1.0/me?x=y\r\nSet-Cookie: a=b\r\nContent-Length: 0\r\n\r\n",
    b"\x02HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: <x>\r\n\r\n" + _json(SIGNING),
    b"\x00" + _json(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xab\xae\x05\x00C\xbf\xa6\xa3\x02\x00\x00\x00",
                    head=b"Content-Encoding: gzip\r\n"),
    b"\x00" + _json(b'{"id": {}, "request_id": "' + TOKEN.encode() + b'"}', head=b"X-T: " + TOKEN.encode() + b"\r\n"),
    b"\x00HTTP/1.1 401 " + TOKEN.encode() + b"\r\nContent-Length: 0\r\n\r\n",
)  # fmt: skip
WORDS = (
    b"HTTP/1.1 ", b"HTTP/1.0 ", b"HTTP/9.9 ", b"200", b"101", b"204", b"304", b"400", b"401", b"404", b"413", b"429",
    b"999", b"500", b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\r\n ", b": ", b"Content-Length: ",
    b"Transfer-Encoding: chunked\r\n", b"Content-Encoding: gzip\r\n", b"Content-Encoding: br\r\n",
    b"Content-Encoding: deflate\r\n", b"Connection: close\r\n", b"Location: ", PLACE, b"//", b"file:///etc/passwd",
    b"https://", b"@", b"Retry-After: ", b"Link: <", b"-1", b"0", b"0x", b"9" * 20, b"ffffffffffffffff", b"\x00",
    b"\x1b[31m", b"\xff", b"\xc2\x9b", b"X-Request-Id: ", TOKEN.encode(), b'"id":', b"{", b"}", b"[", b"]", b'"',
    b"null", b"Set-Cookie: =;=", b"Upgrade: websocket\r\n", b"a" * 9000, b"X: y\r\n" * 200, b"%PDF-", b"%%EOF",
    b"\xef\xbb\xbf", b"\xff\xfe", b"\\u001b", b"Date: ", b"charset=utf-16",
)  # fmt: skip
TARGET = Target("exchange", attacking, SEEDS, WORDS)
