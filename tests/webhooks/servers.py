"""Real servers on real sockets, one for each framework, each with a receiver."""

from __future__ import annotations

import asyncio
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import uvicorn
from aiohttp import web
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.urls import clear_url_caches, path
from fastapi import FastAPI
from flask import Flask
from starlette.applications import Starlette
from starlette.routing import Route
from werkzeug.serving import WSGIRequestHandler as WerkzeugHandler
from werkzeug.serving import make_server as make_werkzeug

from signing_async.webhooks import Receiver, aiohttp_handler, asgi_app, django_view, wsgi_app

PATH = "/hooks/"
ASYNC = ("aiohttp", "asgi", "starlette", "fastapi")
THREADED = ("wsgi", "flask", "django")


@contextmanager
def serve(kind: str, receiver: Receiver) -> Iterator[int]:
    """Serve the receiver at PATH in a thread, and yield the port."""
    with _STARTERS[kind](receiver) as port:
        yield port


@contextmanager
def _aiohttp(receiver: Receiver) -> Iterator[int]:
    started: list[int] = []
    ready = threading.Event()

    async def main() -> None:
        app = web.Application()
        app.router.add_route("*", PATH, aiohttp_handler(receiver))
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        started.append(runner.addresses[0][1])
        stopping = asyncio.Event()
        stoppers.append(lambda: loop.call_soon_threadsafe(stopping.set))
        loop = asyncio.get_running_loop()
        ready.set()
        await stopping.wait()
        await runner.cleanup()

    stoppers: list[Callable[[], object]] = []
    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(30)
    try:
        yield started[0]
    finally:
        stoppers[0]()
        thread.join(30)


@contextmanager
def _uvicorn(app: Any, lifespan: str = "off") -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", ws="none", lifespan=lifespan, timeout_graceful_shutdown=1)  # type: ignore[arg-type]  # a str where uvicorn declares a Literal
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


def _asgi(receiver: Receiver) -> Any:
    return _uvicorn(asgi_app(receiver), lifespan="on")


def _starlette(receiver: Receiver) -> Any:
    return _uvicorn(Starlette(routes=[Route(PATH, asgi_app(receiver))]))


def _fastapi(receiver: Receiver) -> Any:
    app = FastAPI()
    app.mount(PATH, asgi_app(receiver))
    return _uvicorn(app)


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


class _QuietWerkzeug(WerkzeugHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:
        pass


class _Threading(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True


@contextmanager
def _running(server: Any) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()


def _threads(app: Any) -> Any:
    return _running(make_server("127.0.0.1", 0, app, _Threading, _Quiet))


def _wsgi(receiver: Receiver) -> Any:
    return _threads(wsgi_app(receiver))


def _flask(receiver: Receiver) -> Any:
    app = Flask("receiver")
    app.add_url_rule(PATH, view_func=lambda: wsgi_app(receiver), endpoint="hooks", methods=["POST"])
    return _running(make_werkzeug("127.0.0.1", 0, app, threaded=True, request_handler=_QuietWerkzeug))


def _django(receiver: Receiver) -> Any:
    if not settings.configured:
        settings.configure(
            SECRET_KEY="tests",
            ALLOWED_HOSTS=["*"],
            USE_TZ=True,
            MIDDLEWARE=["django.middleware.common.CommonMiddleware", "django.middleware.csrf.CsrfViewMiddleware"],
            LOGGING_CONFIG=None,
            ROOT_URLCONF="set below",
        )
    urls = ModuleType("urls")
    urls.urlpatterns = [path(PATH.removeprefix("/"), django_view(receiver))]  # type: ignore[attr-defined]  # the name that Django looks for
    settings.ROOT_URLCONF = urls
    clear_url_caches()
    return _threads(get_wsgi_application())


_STARTERS: dict[str, Callable[[Receiver], Any]] = {
    "aiohttp": _aiohttp,
    "asgi": _asgi,
    "starlette": _starlette,
    "fastapi": _fastapi,
    "wsgi": _wsgi,
    "flask": _flask,
    "django": _django,
}
