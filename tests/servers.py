"""Small real servers for what the sandbox does not do: odd responses, raw bytes, silence."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from ssl import SSLContext
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Web:
    """A running server: its origin, and the requests it got."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.requests: list[web.Request] = []


@asynccontextmanager
async def serving(handler: Handler, *, ssl: SSLContext | None = None, host: str = "127.0.0.1") -> AsyncIterator[Web]:
    """A server that responds to every request with ``handler``."""
    server = Web("")

    async def watch(request: web.Request) -> web.StreamResponse:
        server.requests.append(request)
        return await handler(request)

    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_route("*", "/{path:.*}", watch)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, 0, ssl_context=ssl).start()
        server.origin = f"{'https' if ssl else 'http'}://{host}:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()


async def echo(request: web.Request) -> web.Response:
    """Respond with what was received."""
    told = {
        "method": request.method,
        "path": request.raw_path,
        "headers": {name.lower(): value for name, value in request.headers.items()},
        "body": (await request.read()).decode("latin-1"),
    }
    return web.json_response(told, headers={"X-Request-Id": "req_1", "X-RateLimit-Remaining": "7"})


@asynccontextmanager
async def answering(
    raw: bytes, *, then: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None
) -> AsyncIterator[str]:
    """A server that responds to the first request on a connection with these bytes; gives its origin."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        if then is not None:
            await then(writer)

    async with talking(respond) as origin:
        yield origin


@asynccontextmanager
async def talking(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A server that does this on each connection, until that is gone or the test is over; gives its origin."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            tasks.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


@contextmanager
def another_loop() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Future[Any]]]:
    """An event loop in a thread of its own; gives a function that runs a coroutine there."""
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def wait() -> None:
        ended = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), ended))
        await ended.wait()

    # `asyncio.run` lets the tasks end that are still there, such as those of connections that a server has closed.
    thread = threading.Thread(target=asyncio.run, args=(wait(),))
    thread.start()
    loop, ended = started.result(30)
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
