"""Endpoints for aiohttp, ASGI, WSGI and Django: each passes a request to a receiver and returns its response."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import ExitStack, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from .receiver import NO_LENGTH, Decision, Receiver
from .verifier import Headers

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment
    from aiohttp import web
    from django.http import HttpRequest, HttpResponse

CHUNK = 8 * 1024  # bytes per read; some inputs block until they have read this many

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def aiohttp_handler(receiver: Receiver) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler for ``app.router.add_post(path, aiohttp_handler(receiver))``.

    Call ``receiver.drain()`` in ``app.on_shutdown``.
    """
    from aiohttp import web

    async def handler(request: web.Request) -> web.Response:
        decision = await receiver.handle(request.method, request.headers, _aiohttp_chunks(request))
        response = web.Response(status=decision.status, body=decision.body, headers=decision.headers)
        if "Connection" in response.headers:
            response.force_close()
        return response

    return handler


async def _aiohttp_chunks(request: web.Request) -> AsyncIterator[bytes]:
    if request.can_read_body:
        async for chunk in request.content.iter_any():
            yield chunk
    else:  # a middleware may have read the body: `read` returns it again
        yield await request.read()


class ASGIReceiver:
    """The ASGI application that `asgi_app` returns. Starlette would treat a function as a request handler."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self._receiver.drain()
            await send({"type": "lifespan.shutdown.complete"})
            return
        decision = await self._receiver.handle(scope["method"], scope["headers"], _asgi_chunks(receive))
        headers = [(name.lower().encode(), value.encode()) for name, value in decision.headers]
        headers.append((b"content-length", str(len(decision.body)).encode()))
        await send({"type": "http.response.start", "status": decision.status, "headers": headers})
        await send({"type": "http.response.body", "body": decision.body})


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
        chunks = _wsgi_chunks(environ) if _is_chunked(environ) else iter(lambda: request.read(CHUNK), b"")
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
    exposed: Any = environ.get("gunicorn.socket") or environ.get("werkzeug.socket") or environ.get("wsgi.input")
    with ExitStack() as stack:
        with suppress(AttributeError, OSError):  # the server does not expose its socket
            # A duplicate: the server's own socket stays open. The family does not matter for a shutdown.
            connection = socket.fromfd(exposed.fileno(), socket.AF_INET, socket.SOCK_STREAM)
            stack.enter_context(connection)
            # Ends a blocking read, later than the receiver's own deadline, so that the receiver reports a timeout.
            timer = threading.Timer(receiver.body_timeout + 0.1, _shut_down_reading, [connection])
            timer.daemon = True
            timer.start()
            stack.callback(timer.cancel)
        return receiver.handle_blocking(method, headers, chunks)


def _shut_down_reading(connection: socket.socket) -> None:
    with suppress(OSError):  # the sender disconnected meanwhile, or it is a file
        connection.shutdown(socket.SHUT_RD)


def _is_chunked(environ: WSGIEnvironment) -> bool:
    return bool(environ.get("HTTP_TRANSFER_ENCODING")) and not environ.get("CONTENT_LENGTH")


def _wsgi_headers(environ: WSGIEnvironment) -> list[tuple[str, str]]:
    names = {name: name.removeprefix("HTTP_") for name in environ if name.startswith(("HTTP_", "CONTENT_"))}
    return [(plain.replace("_", "-"), environ[name]) for name, plain in names.items()]


def _wsgi_chunks(environ: WSGIEnvironment) -> Iterator[bytes]:
    request: Any = environ.get("werkzeug.request")  # Flask's: its stream ends with the body, and it may keep the body
    stream = environ["wsgi.input"] if request is None else request.stream
    is_terminated = request is not None or environ.get("wsgi.input_terminated")
    # read1 returns what has arrived; read blocks until it has everything.
    read = getattr(stream, "read1", stream.read)
    length = left = int(environ.get("CONTENT_LENGTH") or 0)
    while size := CHUNK if is_terminated else min(left, CHUNK):
        chunk = read(size)
        if not chunk:
            break
        left -= len(chunk)
        yield chunk
    if request is not None:
        yield request.get_data()
    elif 0 < left < length:
        raise ConnectionError("the sender disconnected")
