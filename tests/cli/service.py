"""A sandbox in a thread, for commands that run their own event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

from signing_async import SigningClient
from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf

T = TypeVar("T")


class Service:
    """A sandbox, used from another thread."""

    def __init__(self, sandbox: Sandbox, loop: asyncio.AbstractEventLoop) -> None:
        self.sandbox = sandbox
        self._loop = loop

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the sandbox's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def do(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call a function on the sandbox's event loop."""

        async def work() -> T:
            return function(*arguments, **named)

        return self.call(work())

    @property
    def environment(self) -> dict[str, str]:
        """The settings to reach the sandbox with an access token."""
        return {"SIGNING_BASE_URL": self.sandbox.base_url, "SIGNING_ACCESS_TOKEN": self.do(self.sandbox.access_token)}

    def fault(self, operation: str, kind: str, times: int | None = 1, **settings: Any) -> Any:
        """Add a fault to the sandbox."""
        return self.do(self.sandbox.faults.add, operation, kind, times=times, **settings)

    def requests_of(self, operation: str) -> int:
        """Return how many requests of an operation the sandbox has received."""
        return len(self.do(self.sandbox.requests_of, operation))

    def draft(
        self,
        *documents: str,
        to: tuple[str, ...] = (),
        name: str = "Lease",
        sent: bool = False,
        completed: bool = False,
    ) -> str:
        """Create a signing with these documents and recipients, and return its id."""

        async def make() -> str:
            async with SigningClient(self.sandbox.base_url, self.sandbox.access_token()) as client:
                signing = await client.signings.create(name=name, language="EN", signing_order="parallel")
                for document in documents:
                    await client.documents.upload(signing, make_pdf(text=document[:20]), document)
                for order, email in enumerate(to, start=1):
                    await client.recipients.add(signing, email=email, order=order)
                if sent or completed:
                    await client.signings.send(signing)
                if completed:
                    await self.sandbox.complete(signing.id)
                return signing.id

        return self.call(make())


@contextmanager
def running(**settings: Any) -> Iterator[Service]:
    """Run a sandbox."""
    started = threading.Event()
    services: list[Service] = []
    stop: list[Callable[[], object]] = []

    async def main() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with Sandbox(**settings) as sandbox:
            services.append(Service(sandbox, loop))
            stop.append(lambda: loop.call_soon_threadsafe(ended.set))
            started.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert started.wait(30)
    try:
        yield services[0]
    finally:
        stop[0]()
        thread.join(30)


@contextmanager
def listening(respond: Callable[[str, str], tuple[int, object]]) -> Iterator[str]:
    """Run a server and yield its origin. ``respond`` makes a status, and bytes or JSON, from method and path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = respond(self.command, self.path.partition("?")[0].removeprefix("/api/1.0"))
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815  # the name that http.server calls

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
