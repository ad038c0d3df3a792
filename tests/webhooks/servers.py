"""Real servers on real sockets, one for each framework, each with a receiver."""

from __future__ import annotations

import contextlib
import inspect
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import flask
import uvicorn
from aiohttp import web
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.urls import path
from fastapi import FastAPI
from starlette.routing import Route
from werkzeug.serving import WSGIRequestHandler as WerkzeugHandler
from werkzeug.serving import make_server as make_werkzeug

from signing_async.webhooks import Receiver, aiohttp_handler, asgi_app, django_view, wsgi_app
from tests.servers import another_loop

PATH = "/hooks/"
ASYNC = ("aiohttp", "fastapi")
THREADED = ("wsgi", "flask", "django")
Before = Callable[[Any], Any]


@contextlib.contextmanager
def serve(kind: str, receiver: Receiver, before: Before = id) -> Iterator[int]:
    """Serve the receiver at PATH in a thread, and yield the port.

    ``before`` is the application's own middleware or hook: it gets the framework's request first.
    """
    with _STARTERS[kind](receiver, before) as port:
        yield port


async def _call(before: Before, request: Any) -> None:
    result = before(request)
    if inspect.isawaitable(result):
        await result


@contextlib.contextmanager
def _aiohttp(receiver: Receiver, before: Before) -> Iterator[int]:
    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> Any:
        await _call(before, request)
        return await handler(request)

    app = web.Application(middlewares=[middleware])
    app.router.add_route("*", PATH, aiohttp_handler(receiver))
    runner = web.AppRunner(app, shutdown_timeout=1)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port: int = runner.addresses[0][1]
        return port

    with another_loop() as run:
        try:
            yield run(start()).result(30)
        finally:
            run(runner.cleanup()).result(30)


@contextlib.contextmanager
def _fastapi(receiver: Receiver, before: Before) -> Iterator[int]:
    app = FastAPI(routes=[Route(path, asgi_app(receiver)) for path in (PATH, PATH.rstrip("/"))])

    async def middleware(request: Any, call_next: Any) -> Any:
        await _call(before, request)
        return await call_next(request)

    if before is not id:
        app.middleware("http")(middleware)
    config = uvicorn.Config(app, log_level="critical", ws="none", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(30)


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


class _QuietWerkzeug(WerkzeugHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:
        pass


class _Threading(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 64


@contextlib.contextmanager
def _running(server: Any) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()


def _wsgi(receiver: Receiver, before: Before) -> Any:
    return _running(make_server("127.0.0.1", 0, wsgi_app(receiver), _Threading, _Quiet))


def _flask(receiver: Receiver, before: Before) -> Any:
    app = flask.Flask("receiver")

    @app.before_request
    def call_before() -> None:
        before(flask.request)

    app.add_url_rule(PATH, view_func=lambda: wsgi_app(receiver), endpoint="hooks", methods=["POST"])
    return _running(make_werkzeug("127.0.0.1", 0, app, threaded=True, request_handler=_QuietWerkzeug))


def django_middleware(respond: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Call what the server of the request has set, and route to its receiver."""

    def middleware(request: Any) -> Any:
        request.environ["tests.before"](request)
        request.urlconf = request.environ["tests.urls"]
        return respond(request)

    return middleware


settings.configure(
    SECRET_KEY="tests",
    ALLOWED_HOSTS=["*"],
    USE_TZ=True,
    MIDDLEWARE=[
        "tests.webhooks.servers.django_middleware",
        "django.middleware.common.CommonMiddleware",
        "django.middleware.csrf.CsrfViewMiddleware",
    ],
    LOGGING_CONFIG=None,
    ROOT_URLCONF="set by the middleware",
)


def _django(receiver: Receiver, before: Before) -> Any:
    urls = ModuleType("urls")
    urls.urlpatterns = [path(PATH.removeprefix("/"), django_view(receiver))]  # type: ignore[attr-defined]  # the name that Django looks for
    app, given = get_wsgi_application(), {"tests.before": before, "tests.urls": urls}
    serving = make_server("127.0.0.1", 0, lambda environ, start: app(environ | given, start), _Threading, _Quiet)
    return _running(serving)


_STARTERS: dict[str, Callable[[Receiver, Before], Any]] = {
    "aiohttp": _aiohttp,
    "fastapi": _fastapi,
    "wsgi": _wsgi,
    "flask": _flask,
    "django": _django,
}
