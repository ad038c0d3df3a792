"""Endpoints for aiohttp, ASGI, WSGI and Django: each passes a request to a receiver and returns its response."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from .receiver import NO_LENGTH, TOO_SLOW, Decision, Receiver
from .verifier import Headers

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment
    from aiohttp import web
    from django.http import HttpRequest, HttpResponse

log: logging.Logger = logging.getLogger("signing_async.webhooks")

CHUNK = 8 * 1024  # bytes per read; some inputs block until they have read this many
ALREADY_READ = Decision(503, "the body was read before the webhook receiver", None, (("Retry-After", "5"),), "consumed")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class AlreadyRead(Exception):  # never leaves the module
    """The application has read the body, or a part of it, and its framework has not kept it."""


def aiohttp_handler(receiver: Receiver) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler for ``app.router.add_post(path, aiohttp_handler(receiver))``.

    Call ``receiver.drain()`` in ``app.on_shutdown``.
    """
    from aiohttp import web

    async def handler(request: web.Request) -> web.Response:
        try:
            decision = await receiver.handle(request.method, request.headers, _aiohttp_chunks(request))
        except AlreadyRead:
            decision = _refuse_already_read()
        response = web.Response(status=decision.status, body=decision.body, headers=decision.headers)
        if "Connection" in response.headers:
            response.force_close()
        return response

    return handler


async def _aiohttp_chunks(request: web.Request) -> AsyncIterator[bytes]:
    received = 0
    async for chunk in request.content.iter_any():
        received += len(chunk)
        yield chunk
    if not received:
        # A middleware may have read the body: `read` returns it again.
        body = await request.read()
        received = len(body)
        yield body
    if received < (request.content_length or request.body_exists):
        raise AlreadyRead


class ASGIReceiver:
    """The ASGI application that `asgi_app` returns. Starlette would treat a function as a request handler."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            decision = await self._receiver.handle(scope["method"], scope["headers"], _asgi_chunks(receive))
            headers = [(name.lower().encode(), value.encode()) for name, value in decision.headers]
            headers.append((b"content-length", str(len(decision.body)).encode()))
            await send({"type": "http.response.start", "status": decision.status, "headers": headers})
            await send({"type": "http.response.body", "body": decision.body})
        else:
            raise ValueError(f"a webhook receiver accepts only http, got {scope['type']}")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._receiver.drain()
        await send({"type": "lifespan.shutdown.complete"})


def asgi_app(receiver: Receiver) -> ASGIReceiver:
    """Return an ASGI application: ``FastAPI(routes=[Route("/webhooks", asgi_app(receiver))])``, Starlette too.

    ``app.mount`` would redirect deliveries to ``/webhooks/``, and senders don't follow redirects.

    Served on its own, it drains at shutdown. If it is mounted, call ``receiver.drain()`` in the lifespan of the outer
    application.
    """
    return ASGIReceiver(receiver)


async def _asgi_chunks(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the sender disconnected")
        yield message.get("body", b"")
        more = message.get("more_body", False)


def wsgi_app(receiver: Receiver) -> WSGIApplication:
    """Return a WSGI application. A Flask view may return it: ``app.post(path)(lambda: wsgi_app(receiver))``."""

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        decision = _handle(receiver, environ["REQUEST_METHOD"], _wsgi_headers(environ), environ, _wsgi_chunks(environ))
        length = ("Content-Length", str(len(decision.body)))
        # PEP 3333 leaves the Connection header to the server.
        headers = [*(pair for pair in decision.headers if pair[0] != "Connection"), length]
        start_response(f"{decision.status} {HTTPStatus(decision.status).phrase}", headers)
        return [decision.body]

    return app


def django_view(receiver: Receiver) -> Callable[[HttpRequest], HttpResponse]:
    """Return a view for ``path("webhooks", django_view(receiver))``. CSRF-exempt: the signature authenticates."""
    from django.http import HttpResponse

    def view(request: HttpRequest) -> HttpResponse:
        environ = getattr(request, "environ", {})  # an ASGI request has none
        # Django reads only Content-Length bytes, so nothing of a chunked body.
        chunks = _wsgi_chunks(environ) if _is_chunked(environ) else _django_chunks(request)
        headers: Any = request.headers
        decision = _handle(receiver, request.method or "", headers, environ, chunks)
        response_headers = {name: value for name, value in decision.headers if name != "Connection"}
        return HttpResponse(decision.body, status=decision.status, headers=response_headers)

    view.csrf_exempt = True  # type: ignore[attr-defined]  # the attribute that Django looks for
    return view


def _handle(
    receiver: Receiver, method: str, headers: Headers, environ: WSGIEnvironment, chunks: Iterator[bytes]
) -> Decision:
    if _is_chunked(environ) and not environ.get("wsgi.input_terminated"):
        return receiver.refuse(NO_LENGTH)
    began = time.monotonic()
    with _read_timeout(environ, receiver.body_timeout):
        try:
            return receiver.handle_blocking(method, headers, chunks)
        except AlreadyRead:
            return TOO_SLOW if time.monotonic() - began > receiver.body_timeout else _refuse_already_read()


def _refuse_already_read() -> Decision:
    log.error(
        "a delivery must be repeated: a middleware or hook has read the body before the webhook receiver, and the"
        " framework has not kept it; or the sender disconnected"
    )
    return ALREADY_READ


def _is_chunked(environ: WSGIEnvironment) -> bool:
    return bool(environ.get("HTTP_TRANSFER_ENCODING")) and not environ.get("CONTENT_LENGTH")


def _wsgi_headers(environ: WSGIEnvironment) -> list[tuple[str, str]]:
    names = {name: name.removeprefix("HTTP_") for name in environ if name.startswith(("HTTP_", "CONTENT_"))}
    return [(plain.replace("_", "-"), environ[name]) for name, plain in names.items()]


def _wsgi_chunks(environ: WSGIEnvironment) -> Iterator[bytes]:
    """Yield the body; raise `OSError` if it is malformed or ends early."""
    stream = environ["wsgi.input"]
    # read1 returns what has arrived; read blocks until it has everything.
    read = getattr(stream, "read1", stream.read)
    length = int(environ.get("CONTENT_LENGTH") or 0)
    request: Any = environ.get("werkzeug.request")
    # Flask's request keeps its stream, which knows its end, and the body from `get_data` on.
    was_read = "stream" in getattr(request, "__dict__", ())
    if was_read:
        read = request.stream.read
    is_terminated = was_read or environ.get("wsgi.input_terminated")
    received = 0
    try:
        while (size := CHUNK if is_terminated else min(length - received, CHUNK)) and (chunk := read(size)):
            received += len(chunk)
            yield chunk
        if was_read and not received:
            body = request.get_data()
            received = len(body)
            yield body
    except OSError:
        raise
    except Exception as error:
        # A server's own exception for a malformed chunk, such as gunicorn's InvalidChunkSize.
        raise OSError(f"the body cannot be read: {type(error).__name__}") from error
    if received < length:
        raise OSError("the body is shorter than its Content-Length") if received and not was_read else AlreadyRead


def _django_chunks(request: HttpRequest) -> Iterator[bytes]:
    received = 0
    while chunk := request.read(CHUNK):
        received += len(chunk)
        yield chunk
    if received < int(request.headers.get("Content-Length") or 0):
        raise AlreadyRead


@contextmanager
def _read_timeout(environ: WSGIEnvironment, seconds: float) -> Iterator[None]:
    """End a blocking read after ``seconds`` by shutting down the socket for reading, if the server exposes it."""
    connection = _duplicate_socket(environ)
    if connection is None:
        yield
        return
    with connection:
        # Later than the receiver's own deadline, so that the receiver reports a timeout and not a lost sender.
        timer = threading.Timer(seconds + 0.1, _shut_down_reading, [connection])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _duplicate_socket(environ: WSGIEnvironment) -> socket.socket | None:
    exposed: Any = environ.get("gunicorn.socket") or environ.get("werkzeug.socket") or environ.get("wsgi.input")
    try:
        connection = socket.socket(fileno=exposed.fileno())
        try:
            return connection.dup()  # os.dup does not work for the sockets of Windows
        finally:
            connection.detach()
    except (AttributeError, OSError):  # not exposed, or a file or a pipe
        return None


def _shut_down_reading(connection: socket.socket) -> None:
    with suppress(OSError):  # the sender disconnected meanwhile
        connection.shutdown(socket.SHUT_RD)
