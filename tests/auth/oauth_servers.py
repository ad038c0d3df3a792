"""A server whose answers a test writes itself, for what the sandbox never says; and records of tokens and stores."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from signing_async import MemoryTokenStore, OAuth, RetryPolicy, Token

SECRET = "the-client-secret-7f3a"
REDIRECT = "https://app.example.com/callback"
QUICK = RetryPolicy(base_delay=0.01, settle=0.1)


@dataclass
class Received:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Answer = Callable[[web.Request, Received], Awaitable[web.StreamResponse]]


class Scripted:
    """Answers each request with the next of the answers given; the last one goes on for ever."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[Received] = []

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        received = Received(request.method, request.path_qs, dict(request.headers), await request.read())
        self.requests.append(received)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await answer(request, received)

    @property
    def token_requests(self) -> list[Received]:
        """Those to the token endpoint."""
        return [received for received in self.requests if received.path == "/api/oauth/token"]


def raw(status: int, body: bytes | str = b"", **headers: str) -> Answer:
    """Answers with these very bytes. A header's underscores are kept for request_id, and dashes otherwise."""
    data = body.encode() if isinstance(body, str) else body
    named = {name if name == "request_id" else name.replace("_", "-"): value for name, value in headers.items()}

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        return web.Response(status=status, body=data, headers=named)

    return answer


def says(data: Any, status: int = 200, **headers: str) -> Answer:
    """Answers in JSON."""

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        return web.json_response(data, status=status, headers=headers)

    return answer


def grants(name: str = "new", **fields: Any) -> Answer:
    """Answers with a token."""
    return says({"access_token": f"access-{name}", "refresh_token": f"refresh-{name}", "expires_in": 3600} | fields)


async def drops(request: web.Request, received: Received) -> web.StreamResponse:
    """Reads the request and hangs up."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hangs(request: web.Request, received: Received) -> web.StreamResponse:
    """Never answers."""
    await asyncio.sleep(3600)
    return web.Response()


class WatchedStore(MemoryTokenStore):
    """A store that writes down what is done to it, and fails on demand."""

    def __init__(self, token: Token | None = None) -> None:
        super().__init__(token)
        self.done: list[str] = []
        self.fail_saves = 0

    async def load(self) -> Token | None:
        self.done.append("load")
        await asyncio.sleep(0)
        return await super().load()

    async def save(self, token: Token) -> None:
        self.done.append("save")
        await asyncio.sleep(0)
        if self.fail_saves:
            self.fail_saves -= 1
            raise OSError("no space left")
        await super().save(token)

    def lock(self) -> AbstractAsyncContextManager[None]:
        return self._watched(super().lock())

    @contextlib.asynccontextmanager
    async def _watched(self, lock: AbstractAsyncContextManager[None]) -> AsyncIterator[None]:
        async with lock:
            self.done.append("lock")
            try:
                yield
            finally:
                self.done.append("unlock")


def oauth_for(base_url: str, **settings: Any) -> OAuth:
    """An OAuth that retries without waiting long."""
    known: dict[str, Any] = {
        "client_id": "app-1",
        "client_secret": SECRET,
        "redirect_uri": REDIRECT,
        "retry": QUICK,
    }
    return OAuth(base_url, **known | settings)
