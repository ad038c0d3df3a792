"""What the adapters say to their servers, to the letter, and what they leave behind: nothing."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from signing_async.webhooks import Event, Receiver, WebhookVerifier, asgi_app, wsgi_app
from tests.webhooks.deliveries import SECRET, event_body, hex_of


def receiver(**settings: Any) -> Receiver:
    """A receiver whose events go nowhere."""
    return Receiver(WebhookVerifier(SECRET), lambda event: None, **settings)


def posted(body: bytes, **more: Any) -> dict[str, Any]:
    """The environment of a genuine delivery by WSGI."""
    known = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": str(len(body)), "HTTP_X_SIGNATURE": hex_of(body)}
    return {**known, "wsgi.input": io.BytesIO(body), **more}


def answer(app: Any, environ: dict[str, Any]) -> tuple[str, dict[str, str], bytes]:
    """Call a WSGI application: status, headers, body."""
    said: list[Any] = []
    body = b"".join(app(environ, lambda *arguments: said.append(arguments)))
    [(status, headers)] = said
    return status, dict(headers), body


async def asgi(scope: dict[str, Any], *messages: dict[str, Any], app: Any = None) -> list[dict[str, Any]]:
    """Call an ASGI application with these messages; what it sends."""
    waiting, sent = list(messages), []

    async def receive() -> dict[str, Any]:
        return waiting.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await (app or asgi_app(receiver()))(scope, receive, send)
    assert not waiting
    return sent


async def test_an_asgi_answer() -> None:
    """Status and headers as ASGI wants them, and the body; a piece may have no body, and the last one no mark."""
    body = event_body("a")
    headers = [(b"x-signature", hex_of(body).encode()), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "headers": headers}
    sent = await asgi(
        scope,
        {"type": "http.request", "more_body": True},
        {"type": "http.request", "body": body[:9], "more_body": True},
        {"type": "http.request", "body": body[9:]},
    )
    assert sent == [
        {"type": "http.response.start", "status": 202, "headers": sent[0]["headers"]},
        {"type": "http.response.body", "body": sent[1]["body"]},
    ]
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(sent[1]["body"])).encode()
    assert sent[1]["body"] == b'{"message": "accepted"}'
    refused = await asgi({**scope, "method": "PUT"})
    assert refused[0]["status"] == 405
    named = dict(refused[0]["headers"])
    assert named[b"allow"] == b"POST"
    assert named[b"connection"] == b"close"
    assert all(name == name.lower() for name in named)


async def test_an_asgi_lifespan() -> None:
    """It starts at once, and ends when the hand-offs have ended."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow(event: Event) -> None:
        begun.set()
        await go.wait()

    app = asgi_app(Receiver(WebhookVerifier(SECRET), slow))
    body = event_body("a")
    scope = {"type": "http", "method": "POST", "headers": [(b"x-signature", hex_of(body).encode())]}
    delivery = asyncio.create_task(asgi(scope, {"type": "http.request", "body": body}, app=app))
    async with asyncio.timeout(5):
        await begun.wait()
    stopping = {"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}
    life = asyncio.create_task(asgi({"type": "lifespan"}, *stopping, app=app))
    await asyncio.sleep(0.02)
    assert not life.done()
    go.set()
    assert await life == [{"type": "lifespan.startup.complete"}, {"type": "lifespan.shutdown.complete"}]
    assert (await delivery)[0]["status"] == 202
    with pytest.raises(ValueError, match=r"^a webhook receiver speaks http, not websocket$"):
        await asgi({"type": "websocket"}, app=app)


def test_a_wsgi_answer() -> None:
    """A status line, the length, and no Connection, which is the server's own."""
    body = event_body("a")
    status, headers, text = answer(wsgi_app(receiver()), posted(body))
    assert status == "202 Accepted"
    assert headers["Content-Length"] == str(len(text))
    assert text == b'{"message": "accepted"}'
    status, headers, text = answer(wsgi_app(receiver()), posted(body, REQUEST_METHOD="PUT"))
    assert status == "405 Method Not Allowed"
    assert (headers["Allow"], headers["Content-Length"]) == ("POST", str(len(text)))
    assert "Connection" not in headers


def test_what_wsgi_names_otherwise() -> None:
    """Length and encoding are read from where WSGI puts them, and dashes from underscores."""
    body = event_body("a")
    app = wsgi_app(Receiver(WebhookVerifier(SECRET, max_body=1000), lambda event: None))
    assert answer(app, posted(body, HTTP_CONTENT_ENCODING="gzip"))[0].startswith("415 ")
    assert answer(app, posted(body, CONTENT_LENGTH="1001"))[0].startswith("413 ")
    assert answer(app, posted(body, CONTENT_LENGTH="x"))[0].startswith("400 ")
    # Some servers put their process's own environment into it: that is no header.
    environ = posted(body)
    environ["X_SIGNATURE"] = environ.pop("HTTP_X_SIGNATURE")
    assert answer(app, environ)[0].startswith("401 ")


def test_wsgi_reads_no_more_than_the_length() -> None:
    """In pieces of at most 8 KiB, by ``read1`` where there is that: what follows belongs to the next request."""
    body = event_body("a", pad="x" * 20_000)

    class Watched(io.BytesIO):
        asked: list[int]

        def read1(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            self.asked.append(size)
            return super().read1(size)

        def read(self, size: int | None = -1, /) -> bytes:
            raise AssertionError("read waits for all of it")

    stream = Watched(body + b"the next request")
    stream.asked = []
    assert answer(wsgi_app(receiver()), posted(body, **{"wsgi.input": stream}))[0] == "202 Accepted"
    assert stream.asked == [8192, 8192, len(body) - 2 * 8192]
    assert stream.tell() == len(body)
    stream = Watched(body)
    stream.asked = []
    assert (
        answer(wsgi_app(receiver()), posted(body, **{"wsgi.input": stream, "wsgi.input_terminated": True}))[0][:3]
        == "202"
    )
    assert stream.asked == [8192] * 4


def test_wsgi_reads_to_the_last_byte_and_nothing_without_a_length() -> None:
    """A body may come byte by byte; where no length is said there is none to read."""
    body = event_body("a")

    class Trickle(io.BytesIO):
        def read1(self, size: int | None = -1, /) -> bytes:
            return self.read(1)

    assert answer(wsgi_app(receiver()), posted(body, **{"wsgi.input": Trickle(body)}))[0] == "202 Accepted"
    for length in ("", "0"):
        stream = Trickle(body)
        assert (
            answer(wsgi_app(receiver()), posted(body, CONTENT_LENGTH=length, **{"wsgi.input": stream}))[0][:3] == "401"
        )
        assert stream.tell() == 0


class Piped:
    """An input over a socket, which itself cannot be got at."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")

    def read1(self, size: int) -> bytes:
        return self._file.read1(size)

    def read(self, size: int) -> bytes:
        return self._file.read(size)

    def close(self) -> None:
        self._file.close()


@pytest.mark.parametrize("key", ["gunicorn.socket", "werkzeug.socket", "wsgi.input"])
def test_a_body_that_stands_still_is_cut_off(key: str) -> None:
    """Wherever the server lets the adapter at its socket; nothing is left open."""
    body = event_body("a")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        piped = Piped(ours)
        stream: Any = ours.makefile("rb") if key == "wsgi.input" else piped
        environ = posted(body, **{"wsgi.input": stream})
        if key != "wsgi.input":
            environ[key] = ours
        before = len(list(Path("/proc/self/fd").iterdir()))
        theirs.sendall(body[:5])
        began = time.monotonic()
        assert answer(wsgi_app(receiver(body_timeout=0.1)), environ)[0] == "408 Request Timeout"
        assert time.monotonic() - began >= 0.1
        assert len(list(Path("/proc/self/fd").iterdir())) <= before
        # The way out is still open, for the answer.
        ours.sendall(b"HTTP/1.1 408")
        assert theirs.recv(100) == b"HTTP/1.1 408"
        stream.close()
        piped.close()


def test_a_connection_that_is_gone_by_itself() -> None:
    """Cutting it off comes too late then, and makes no noise."""
    others = set(threading.enumerate())

    class Late(io.BytesIO):
        def read1(self, size: int | None = -1, /) -> bytes:
            deadline = time.monotonic() + 20
            while any(isinstance(one, threading.Timer) for one in set(threading.enumerate()) - others):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            return b""

    body = event_body("a")
    with socket.socket() as never_connected:
        environ = posted(body, **{"wsgi.input": Late(), "gunicorn.socket": never_connected})
        assert answer(wsgi_app(receiver(body_timeout=0.05)), environ)[0] == "408 Request Timeout"


def test_a_body_that_came_leaves_no_timer() -> None:
    """What would have cut it off is called off at once."""
    body = event_body("a")
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as stream:
        theirs.sendall(body)
        threads = set(threading.enumerate())
        assert answer(wsgi_app(receiver(body_timeout=60)), posted(body, **{"wsgi.input": stream}))[0] == "202 Accepted"
        for left in set(threading.enumerate()) - threads:
            assert left.daemon
            left.join(20)
            assert not left.is_alive()
        theirs.sendall(b"more")
        assert stream.read1(4) == b"more"


def test_a_pipe_is_no_socket() -> None:
    """An input that has a number and is no socket is read, and not cut off; its number is given back."""
    body = event_body("a")
    reading, writing = os.pipe()
    os.write(writing, body)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        before = len(list(Path("/proc/self/fd").iterdir()))
        assert answer(wsgi_app(receiver()), posted(body, **{"wsgi.input": stream}))[0] == "202 Accepted"
        assert len(list(Path("/proc/self/fd").iterdir())) <= before
