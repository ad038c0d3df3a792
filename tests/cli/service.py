"""A sandbox in a thread, for commands that run their own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from ssl import SSLContext
from typing import Any, TypeVar

from aiohttp import web

from signing_async import SigningClient
from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf
from tests.servers import Web, another_loop, serving

T = TypeVar("T")


class Service:
    """A sandbox, used from another thread."""

    def __init__(self, sandbox: Sandbox, submit: Callable[[Coroutine[Any, Any, Any]], Future[Any]]) -> None:
        self.sandbox = sandbox
        self._submit = submit

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the sandbox's event loop."""
        done: T = self._submit(work).result(30)
        return done

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

    def recipient(self, signing: str, email: str) -> Any:
        """Return the recipient of a signing with this address."""
        return next(one for one in self.do(self.sandbox.recipients, signing) if one.email == email)

    def requests_of(self, operation: str = "") -> int:
        """Return how many requests of an operation, or of all, the sandbox has received."""
        received = self.do(lambda: [request.operation for request in self.sandbox.requests])
        return received.count(operation) if operation else len(received)

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
    with another_loop() as submit:
        sandbox = submit(Sandbox(**settings).start()).result(30)
        try:
            yield Service(sandbox, submit)
        finally:
            submit(sandbox.aclose()).result(30)


@contextmanager
def listening(respond: Callable[[web.Request], Any], ssl: SSLContext | None = None) -> Iterator[Web]:
    """Run a server. ``respond`` makes a response, or the bytes or the JSON of one; None is not found."""

    async def handle(request: web.Request) -> web.StreamResponse:
        found = await asyncio.to_thread(respond, request)
        if found is None:
            return web.json_response({"code": "not_found"}, status=404)
        if isinstance(found, bytes):
            return web.Response(body=found)
        return found if isinstance(found, web.StreamResponse) else web.json_response(found)

    with another_loop() as submit:
        server = serving(handle, ssl=ssl)
        try:
            yield submit(server.__aenter__()).result(30)
        finally:
            submit(server.__aexit__(None, None, None)).result(30)


def api_path(request: web.Request) -> str:
    """Return the path of a request below that of the API."""
    return request.path.removeprefix("/api/1.0")
