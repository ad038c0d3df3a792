"""A receiver as an endpoint of aiohttp, of any ASGI or WSGI server, and of Django: a few lines each."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from .receiver import NO_END, Decision, Receiver
from .verifier import Headers

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment
    from aiohttp import web
    from django.http import HttpRequest, HttpResponse  # type: ignore[import-untyped]  # Django ships no types

CHUNK = 8 * 1024  # some inputs wait until they have all of it

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def aiohttp_handler(receiver: Receiver) -> Callable[[web.Request], Awaitable[web.Response]]:
    """For ``app.router.add_post(path, aiohttp_handler(receiver))``; add ``receiver.drain()`` to ``app.on_shutdown``."""
    from aiohttp import web

    async def handler(request: web.Request) -> web.Response:
        decision = await receiver.handle(request.method, request.headers, request.content.iter_any())
        response = web.Response(status=decision.status, body=decision.body, headers=decision.headers)
        if "Connection" in response.headers:
            response.force_close()
        return response

    return handler


class ASGIReceiver:
    """What :func:`asgi_app` makes: an ASGI application. An object, since Starlette takes a function for a handler."""

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
            raise ValueError(f"a webhook receiver speaks http, not {scope['type']}")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._receiver.drain()
        await send({"type": "lifespan.shutdown.complete"})


def asgi_app(receiver: Receiver) -> ASGIReceiver:
    """For ``Route(path, asgi_app(receiver))`` in Starlette, ``app.mount(path, ...)`` in FastAPI, or on its own.

    On its own it drains at shutdown; mounted in another application, add ``receiver.drain()`` to that one's lifespan.
    """
    return ASGIReceiver(receiver)


async def _asgi_chunks(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the sender is gone")
        yield message.get("body", b"")
        more = message.get("more_body", False)


def wsgi_app(receiver: Receiver) -> WSGIApplication:
    """A WSGI application; a Flask view may return it: ``app.post(path)(lambda: wsgi_app(receiver))``."""

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        decision = _handle(receiver, environ["REQUEST_METHOD"], _wsgi_headers(environ), environ, _wsgi_chunks(environ))
        length = ("Content-Length", str(len(decision.body)))
        # Connection belongs to the server here (PEP 3333)
        headers = [*(pair for pair in decision.headers if pair[0] != "Connection"), length]
        start_response(f"{decision.status} {HTTPStatus(decision.status).phrase}", headers)
        return [decision.body]

    return app


def django_view(receiver: Receiver) -> Callable[[HttpRequest], HttpResponse]:
    """For ``path("webhooks", django_view(receiver))``; exempt from the CSRF check, since the signature is the proof."""
    from django.http import HttpResponse

    def view(request: HttpRequest) -> HttpResponse:
        environ = getattr(request, "environ", {})  # ASGI has none
        # Django reads Content-Length bytes, and so nothing of a chunked body.
        chunks = _wsgi_chunks(environ) if _is_chunked(environ) else iter(lambda: request.read(CHUNK), b"")
        headers: Any = request.headers
        decision = _handle(receiver, request.method or "", headers, environ, chunks)
        answered = {name: value for name, value in decision.headers if name != "Connection"}
        return HttpResponse(decision.body, status=decision.status, headers=answered)

    view.csrf_exempt = True  # type: ignore[attr-defined]  # how Django is told
    return view


def _handle(
    receiver: Receiver, method: str, headers: Headers, environ: WSGIEnvironment, chunks: Iterator[bytes]
) -> Decision:
    if _is_chunked(environ) and not environ.get("wsgi.input_terminated"):
        return NO_END
    with _cut_off(environ, receiver.body_timeout):
        return receiver.handle_blocking(method, headers, chunks)


def _is_chunked(environ: WSGIEnvironment) -> bool:
    return bool(environ.get("HTTP_TRANSFER_ENCODING")) and not environ.get("CONTENT_LENGTH")


def _wsgi_headers(environ: WSGIEnvironment) -> list[tuple[str, str]]:
    names = {name: name.removeprefix("HTTP_") for name in environ if name.startswith(("HTTP_", "CONTENT_"))}
    return [(plain.replace("_", "-"), environ[name]) for name, plain in names.items()]


def _wsgi_chunks(environ: WSGIEnvironment) -> Iterator[bytes]:
    stream = environ["wsgi.input"]
    # read1 gives what is there, where read waits for all of it
    read = getattr(stream, "read1", stream.read)
    if environ.get("wsgi.input_terminated"):
        yield from iter(lambda: read(CHUNK), b"")
        return
    left = int(environ.get("CONTENT_LENGTH") or 0)
    while left > 0 and (chunk := read(min(left, CHUNK))):
        left -= len(chunk)
        yield chunk


@contextmanager
def _cut_off(environ: WSGIEnvironment, seconds: float) -> Iterator[None]:
    """End a blocking read that takes too long by shutting the connection's way in, where the server lets us at it."""
    connection = _connection(environ)
    if connection is None:
        yield
        return
    with connection:
        # a little later than the receiver's own deadline, by which it then tells this from a sender that left
        timer = threading.Timer(seconds + 0.1, _shut, [connection])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _connection(environ: WSGIEnvironment) -> socket.socket | None:
    known: Any = environ.get("gunicorn.socket") or environ.get("werkzeug.socket") or environ.get("wsgi.input")
    try:
        copy = os.dup(known.fileno())
    except (AttributeError, OSError):
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:  # a file or a pipe
        os.close(copy)
        return None


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # gone by itself meanwhile
        connection.shutdown(socket.SHUT_RD)
