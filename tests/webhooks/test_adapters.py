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

BODY = event_body("a")
SCOPE = {"type": "http", "method": "POST", "headers": [(b"x-signature", hex_of(BODY).encode())]}


def receiver(**settings: Any) -> Receiver:
    """Create a receiver that discards events."""
    return Receiver(WebhookVerifier(SECRET), lambda event: None, **settings)


def respond(body: bytes, app: Any = None, **extra: Any) -> tuple[str, dict[str, str], bytes]:
    """Pass a genuine delivery to a WSGI application and return status, headers and body."""
    environ = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": str(len(body)), "HTTP_X_SIGNATURE": hex_of(body)}
    environ = {**environ, "wsgi.input": io.BytesIO(body), **extra}
    started: list[Any] = []
    text = b"".join((app or wsgi_app(receiver()))(environ, lambda *arguments: started.append(arguments)))
    [(status, headers)] = started
    return status, dict(headers), text


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


async def test_asgi_disconnect_is_a_400() -> None:
    sent = await asgi(SCOPE, {"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"})
    assert sent[0]["status"] == 400


async def test_asgi_shutdown_waits_for_running_handlers() -> None:
    started, proceed = asyncio.Event(), asyncio.Event()

    async def slow(event: Event) -> None:
        started.set()
        await proceed.wait()

    app = asgi_app(Receiver(WebhookVerifier(SECRET), slow))
    delivery = asyncio.create_task(asgi(SCOPE, {"type": "http.request", "body": BODY}, app=app))
    await started.wait()
    stopping = {"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}
    life = asyncio.create_task(asgi({"type": "lifespan"}, *stopping, app=app))
    await asyncio.sleep(0)
    assert not life.done()
    proceed.set()
    assert await life == [{"type": "lifespan.startup.complete"}, {"type": "lifespan.shutdown.complete"}]
    assert (await delivery)[0]["status"] == 202


def test_wsgi_response_has_a_length_and_no_connection_header() -> None:
    """PEP 3333 leaves Connection to the server."""
    status, headers, text = respond(BODY)
    assert (status, text, headers["Content-Length"]) == ("202 Accepted", b'{"message": "accepted"}', str(len(text)))
    status, headers, text = respond(BODY, REQUEST_METHOD="PUT")
    assert (status, headers["Allow"]) == ("405 Method Not Allowed", "POST")
    assert "Connection" not in headers


@pytest.mark.parametrize(
    ("extra", "status"),
    [
        ({"CONTENT_LENGTH": str(len(BODY) + 1)}, "400"),  # a lost connection, not a wrong signature
        ({"CONTENT_LENGTH": str(len(BODY) + 1), "wsgi.input_terminated": True}, "400"),
        ({"CONTENT_LENGTH": ""}, "401"),
        ({"HTTP_X_SIGNATURE": "", "X_SIGNATURE": hex_of(BODY)}, "401"),  # an environment variable is not a header
    ],
)
def test_wsgi_length_and_headers_are_read_from_the_environ(extra: dict[str, Any], status: str) -> None:
    assert respond(BODY, **extra)[0].startswith(status)


def test_body_that_the_server_cannot_read_gets_400() -> None:
    """Servers have exceptions of their own for malformed chunks, such as gunicorn's InvalidChunkSize."""

    class Malformed(io.BytesIO):
        def read1(self, size: int | None = -1, /) -> bytes:
            raise ValueError("bad chunk size")

    chunked = {"wsgi.input": Malformed(), "CONTENT_LENGTH": "", "wsgi.input_terminated": True}
    status, _, text = respond(b"{}", **chunked)
    assert (status, text) == ("400 Bad Request", b'{"error": "the body is incomplete"}')


def test_stalled_body_is_cut_off_where_the_server_exposes_its_socket() -> None:
    """gunicorn does; its input does not."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as stream:

        class Hidden:
            """An input that reads from a socket without exposing it."""

            read = read1 = stream.read1

        before = len(list(Path("/proc/self/fd").iterdir()))
        theirs.sendall(BODY[:5])
        began = time.monotonic()
        app = wsgi_app(receiver(body_timeout=0.1))
        assert respond(BODY, app, **{"wsgi.input": Hidden(), "gunicorn.socket": ours})[0] == "408 Request Timeout"
        assert time.monotonic() - began >= 0.1
        assert len(list(Path("/proc/self/fd").iterdir())) <= before
        # The socket is still open for writing the response.
        ours.sendall(b"HTTP/1.1 408")
        assert theirs.recv(100) == b"HTTP/1.1 408"
