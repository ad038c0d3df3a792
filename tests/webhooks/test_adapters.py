"""The adapters against bare ASGI and WSGI interfaces: responses, reads, timeouts, and no leaked descriptors."""

from __future__ import annotations

import asyncio
import io
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from signing_async.webhooks import Event, Receiver, WebhookVerifier, asgi_app, wsgi_app
from tests.webhooks.deliveries import SECRET, event_body, hex_of


def receiver(**settings: Any) -> Receiver:
    """Create a receiver that discards events."""
    return Receiver(WebhookVerifier(SECRET), lambda event: None, **settings)


def posted(body: bytes, **extra: Any) -> dict[str, Any]:
    """Return the WSGI environ of a genuine delivery."""
    environ = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": str(len(body)), "HTTP_X_SIGNATURE": hex_of(body)}
    return {**environ, "wsgi.input": io.BytesIO(body), **extra}


def respond(app: Any, environ: dict[str, Any]) -> tuple[str, dict[str, str], bytes]:
    """Call a WSGI application and return status, headers and body."""
    started: list[Any] = []
    body = b"".join(app(environ, lambda *arguments: started.append(arguments)))
    [(status, headers)] = started
    return status, dict(headers), body


async def asgi(scope: dict[str, Any], *messages: dict[str, Any], app: Any = None) -> list[dict[str, Any]]:
    """Call an ASGI application with these messages and return what it sends."""
    waiting, sent = list(messages), []

    async def receive() -> dict[str, Any]:
        return waiting.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await (app or asgi_app(receiver()))(scope, receive, send)
    assert not waiting
    return sent


async def test_asgi_response_and_a_body_in_parts() -> None:
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


async def test_asgi_shutdown_waits_for_running_handlers() -> None:
    started, proceed = asyncio.Event(), asyncio.Event()

    async def slow(event: Event) -> None:
        started.set()
        await proceed.wait()

    app = asgi_app(Receiver(WebhookVerifier(SECRET), slow))
    body = event_body("a")
    scope = {"type": "http", "method": "POST", "headers": [(b"x-signature", hex_of(body).encode())]}
    delivery = asyncio.create_task(asgi(scope, {"type": "http.request", "body": body}, app=app))
    async with asyncio.timeout(5):
        await started.wait()
    stopping = {"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}
    life = asyncio.create_task(asgi({"type": "lifespan"}, *stopping, app=app))
    await asyncio.sleep(0.02)
    assert not life.done()
    proceed.set()
    assert await life == [{"type": "lifespan.startup.complete"}, {"type": "lifespan.shutdown.complete"}]
    assert (await delivery)[0]["status"] == 202


def test_wsgi_response_has_a_length_and_no_connection_header() -> None:
    """PEP 3333 leaves Connection to the server."""
    body = event_body("a")
    status, headers, text = respond(wsgi_app(receiver()), posted(body))
    assert status == "202 Accepted"
    assert headers["Content-Length"] == str(len(text))
    assert text == b'{"message": "accepted"}'
    status, headers, text = respond(wsgi_app(receiver()), posted(body, REQUEST_METHOD="PUT"))
    assert status == "405 Method Not Allowed"
    assert (headers["Allow"], headers["Content-Length"]) == ("POST", str(len(text)))
    assert "Connection" not in headers


def test_wsgi_length_and_encoding_are_read_from_the_environ_and_headers_only() -> None:
    body = event_body("a")
    app = wsgi_app(Receiver(WebhookVerifier(SECRET, max_body=1000), lambda event: None))
    assert respond(app, posted(body, HTTP_CONTENT_ENCODING="gzip"))[0].startswith("415 ")
    assert respond(app, posted(body, CONTENT_LENGTH="1001"))[0].startswith("413 ")
    assert respond(app, posted(body, CONTENT_LENGTH="x"))[0].startswith("400 ")
    # Some servers add their process's environment variables, which are not headers.
    environ = posted(body)
    environ["X_SIGNATURE"] = environ.pop("HTTP_X_SIGNATURE")
    assert respond(app, environ)[0].startswith("401 ")


def test_wsgi_reads_no_more_than_content_length() -> None:
    """What follows belongs to the next request. read1 is used where there is one, because read blocks."""
    body = event_body("a", pad="x" * 20_000)

    class Watched(io.BytesIO):
        asked: list[int]

        def read1(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            self.asked.append(size)
            return super().read1(size)

        def read(self, size: int | None = -1, /) -> bytes:
            raise AssertionError("read() blocks until it has everything")

    stream = Watched(body + b"the next request")
    stream.asked = []
    assert respond(wsgi_app(receiver()), posted(body, **{"wsgi.input": stream}))[0] == "202 Accepted"
    assert stream.asked == [8192, 8192, len(body) - 2 * 8192]
    assert stream.tell() == len(body)
    stream = Watched(body)
    stream.asked = []
    assert (
        respond(wsgi_app(receiver()), posted(body, **{"wsgi.input": stream, "wsgi.input_terminated": True}))[0][:3]
        == "202"
    )
    assert stream.asked == [8192] * 4


def test_wsgi_reads_a_trickling_body_to_its_end_and_nothing_without_a_length() -> None:
    body = event_body("a")

    class Trickle(io.BytesIO):
        def read1(self, size: int | None = -1, /) -> bytes:
            return self.read(1)

    assert respond(wsgi_app(receiver()), posted(body, **{"wsgi.input": Trickle(body)}))[0] == "202 Accepted"
    for length in ("", "0"):
        stream = Trickle(body)
        assert (
            respond(wsgi_app(receiver()), posted(body, CONTENT_LENGTH=length, **{"wsgi.input": stream}))[0][:3] == "401"
        )
        assert stream.tell() == 0


@pytest.mark.parametrize("error", [ValueError("bad chunk size"), ConnectionResetError()])
@pytest.mark.parametrize("framing", [{}, {"CONTENT_LENGTH": "", "wsgi.input_terminated": True}])
def test_body_that_the_server_cannot_read_gets_400(error: Exception, framing: dict[str, Any]) -> None:
    """Servers have exceptions of their own for malformed chunks, such as gunicorn's InvalidChunkSize."""

    class Malformed(io.BytesIO):
        def read1(self, size: int | None = -1, /) -> bytes:
            raise error

    status, _, body = respond(wsgi_app(receiver()), posted(b"{}", **{"wsgi.input": Malformed()}, **framing))
    assert (status, body) == ("400 Bad Request", b'{"error": "the body is incomplete"}')


@pytest.mark.parametrize("extra", [{}, {"wsgi.input_terminated": True}])
def test_body_shorter_than_its_content_length_gets_400(extra: dict[str, Any]) -> None:
    """Not 401, which would blame the signature for a lost connection."""
    body = event_body("a")
    environ = posted(body, **{"wsgi.input": io.BytesIO(body[:-1])}, **extra)
    assert respond(wsgi_app(receiver()), environ)[0] == "400 Bad Request"


class Piped:
    """An input that reads from a socket without exposing it."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")

    def read1(self, size: int) -> bytes:
        return self._file.read1(size)

    def read(self, size: int) -> bytes:
        return self._file.read(size)

    def close(self) -> None:
        self._file.close()


@pytest.mark.parametrize("key", ["gunicorn.socket", "werkzeug.socket", "wsgi.input"])
def test_stalled_body_is_cut_off_where_the_server_exposes_its_socket(key: str) -> None:
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
        assert respond(wsgi_app(receiver(body_timeout=0.1)), environ)[0] == "408 Request Timeout"
        assert time.monotonic() - began >= 0.1
        assert len(list(Path("/proc/self/fd").iterdir())) <= before
        # The socket is still open for writing the response.
        ours.sendall(b"HTTP/1.1 408")
        assert theirs.recv(100) == b"HTTP/1.1 408"
        stream.close()
        piped.close()
