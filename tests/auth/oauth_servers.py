"""A server with scripted responses, which the sandbox never gives; a store that records its use; helpers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import pytest
from aiohttp import web

from signing_async import MemoryTokenStore, OAuth, RetryPolicy, Token, TokenStore
from signing_async.sandbox import Sandbox
from tests.servers import serving

BASE = "https://tenant.example.com"
SECRET = "the-client-secret-7f3a"
REDIRECT = "https://app.example.com/callback"
QUICK = RetryPolicy(base_delay=0.01, settle=0.1)


@dataclass
class Received:
    """A request as received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


ScriptedResponse = Callable[[web.Request, Received], Awaitable[web.StreamResponse]]


class Scripted(contextlib.AbstractAsyncContextManager["Scripted"]):
    """A server that gives one scripted response after the other; the last one repeats."""

    def __init__(self, *responses: ScriptedResponse) -> None:
        self.responses = list(responses)
        self.requests: list[Received] = []
        self._running = serving(self._serve)

    async def __aenter__(self) -> Self:
        self.base_url = (await self._running.__aenter__()).origin
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._running.__aexit__(None, None, None)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        received = Received(request.method, request.path_qs, dict(request.headers), await request.read())
        self.requests.append(received)
        respond = self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]
        return await respond(request, received)


def raw(status: int, body: bytes | str = b"", **headers: str) -> ScriptedResponse:
    """Respond with these bytes. Underscores in header names become dashes, except in request_id."""
    data = body.encode() if isinstance(body, str) else body
    named = {name if name == "request_id" else name.replace("_", "-"): value for name, value in headers.items()}

    async def respond(request: web.Request, received: Received) -> web.StreamResponse:
        return web.Response(status=status, body=data, headers=named)

    return respond


def says(data: Any, status: int = 200, **headers: str) -> ScriptedResponse:
    """Respond with JSON."""

    async def respond(request: web.Request, received: Received) -> web.StreamResponse:
        return web.json_response(data, status=status, headers=headers)

    return respond


def grants(name: str = "new", **fields: Any) -> ScriptedResponse:
    """Respond with a token."""
    return says({"access_token": f"access-{name}", "refresh_token": f"refresh-{name}", "expires_in": 3600} | fields)


async def drops(request: web.Request, received: Received) -> web.StreamResponse:
    """Read the request and close the connection."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hangs(request: web.Request, received: Received) -> web.StreamResponse:
    """Never respond."""
    await asyncio.sleep(3600)
    return web.Response()


class WatchedStore(MemoryTokenStore):
    """A store that records its use, and fails on demand."""

    def __init__(self, token: Token | None = None) -> None:
        super().__init__(token)
        self.done: list[str] = []
        self.fail_saves = 0

    def put(self, token: Token | None) -> None:
        """Change the token as another process does; None is a logout."""
        self._token = token

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

    @asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        async with super().lock():
            self.done.append("lock")
            try:
                yield
            finally:
                self.done.append("unlock")


def oauth_for(base_url: str, **settings: Any) -> OAuth:
    """Return an `OAuth` with short retry delays."""
    known: dict[str, Any] = {
        "client_id": "app-1",
        "client_secret": SECRET,
        "redirect_uri": REDIRECT,
        "retry": QUICK,
    }
    return OAuth(base_url, **known | settings)


@asynccontextmanager
async def oauth_on(
    *responses: ScriptedResponse, token: Token | None = None, **settings: Any
) -> AsyncIterator[tuple[OAuth, Scripted]]:
    """Run a server with these responses, and an `OAuth` for it; ``token`` is in its store."""
    async with (
        Scripted(*responses) as server,
        oauth_for(server.base_url, **{"store": MemoryTokenStore(token), **settings}) as oauth,
    ):
        yield oauth, server


def secret_of(oauth: OAuth) -> str:
    """Return the client secret."""
    return next(iter(oauth.current.endpoint.secrets()))


def in_seconds(seconds: float) -> datetime:
    """Return the time so many seconds from now."""
    return datetime.now(UTC) + timedelta(seconds=seconds)


def expired(name: str = "old") -> Token:
    """Return an expired token with a refresh token."""
    return Token(f"access-{name}", f"refresh-{name}", in_seconds(-1))


async def refresh_token_in(store: TokenStore) -> str | None:
    """Return the stored refresh token."""
    token = await store.load()
    return None if token is None else token.refresh_token


def sandbox_oauth(sandbox: Sandbox, **settings: Any) -> tuple[OAuth, Callable[[], str]]:
    """Return an `OAuth` for a new app, and a function that returns authorization codes."""
    app = sandbox.register_app(REDIRECT)
    assert app.client_secret is not None
    oauth = oauth_for(sandbox.base_url, client_id=app.client_id, client_secret=app.client_secret, **settings)
    return oauth, lambda: sandbox.authorize(app)


class Slow:
    """A response that waits for ``go``."""

    def __init__(self, then: Callable[..., Awaitable[web.StreamResponse]]) -> None:
        self.then = then
        self.begun = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, request: web.Request, received: Received) -> web.StreamResponse:
        self.begun.set()
        await self.go.wait()
        return await self.then(request, received)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the package's warnings and errors."""
    own = [record for record in caplog.records if record.name.startswith("signing_async")]
    return [record.getMessage() for record in own if record.levelno >= logging.WARNING]


def let_pass(monkeypatch: pytest.MonkeyPatch, passed: float) -> None:
    """Move the clock forward by so many seconds."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + passed)
