"""Clients for many tenants over one pooled session: a bounded number at a time, each with nothing of another's."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import attrs

from .assumptions import Assumptions
from .auth.oauth import OAuth
from .auth.token_stores import TokenStore
from .client import SigningClient
from .errors import AuthError, ClientClosed, ConfigurationError, InvalidRequest
from .transport.call import Attempt, Timeouts
from .transport.rate_limit import Gate
from .transport.retry import RetryPolicy

__all__ = ["TenantApp", "Tenants"]

T = TypeVar("T")

_DEFAULT_RETRY = RetryPolicy()
_DEFAULT_TIMEOUTS = Timeouts()
_DEFAULT_ASSUMPTIONS = Assumptions()


@attrs.frozen
class TenantApp:
    """A tenant's own host, and the application that is registered there."""

    base_url: str
    client_id: str
    client_secret: str = attrs.field(repr=False)
    redirect_uri: str


class Tenants:
    """Hands out a client for each tenant, made when it is needed and kept for the next time. ::

        async with aiohttp.ClientSession() as session, Tenants(store_of, app_of, session) as tenants:
            async with tenants.client("acme") as client:
                await client.signings.send(signing_id)

    ``app_factory`` gives a tenant's `TenantApp`, ``store_factory`` its `TokenStore`, and ``gate_factory`` its `Gate` if
    that is not to be one of its client's own; each is called with the tenant's id, and may be ``async``. A store must
    outlive the client: a `MemoryTokenStore` is to be the same one each time.

    No more than ``max_clients`` are kept: the least recently used is closed first, none while it is in use, and each
    when its token refresh, should one be under way, has come to its end. So there are more only if more are in use.
    One that was closed is made anew when it is asked for, and begins as in a new process.

    Tenants share ``session``, its connections and what is set on it, such as a proxy, and nothing else: tokens, gates,
    retry budgets and what is known of signings are each tenant's own, and no cookie is kept, whatever the session's
    jar. The session is never closed here.
    The other options are those of every client.
    """

    def __init__(
        self,
        store_factory: Callable[[str], TokenStore | Awaitable[TokenStore]],
        app_factory: Callable[[str], TenantApp | Awaitable[TenantApp]],
        session: aiohttp.ClientSession,
        *,
        max_clients: int = 1000,
        gate_factory: Callable[[str], Gate | Awaitable[Gate]] | None = None,
        retry: RetryPolicy = _DEFAULT_RETRY,
        timeout: float | Timeouts = _DEFAULT_TIMEOUTS,
        assumptions: Assumptions = _DEFAULT_ASSUMPTIONS,
        on_attempt: Callable[[Attempt], None] | None = None,
    ) -> None:
        for name, factory in (("store_factory", store_factory), ("app_factory", app_factory)):
            if not callable(factory):
                raise ConfigurationError(f"{name}: must be callable with a tenant's id, not {factory!r}")
        if gate_factory is not None and not callable(gate_factory):
            raise ConfigurationError(f"gate_factory: must be callable with a tenant's id, not {gate_factory!r}")
        if not isinstance(session, aiohttp.ClientSession):
            raise ConfigurationError(f"session: must be an aiohttp.ClientSession, not {type(session).__name__}")
        if isinstance(max_clients, bool) or not isinstance(max_clients, int) or max_clients < 1:
            raise ConfigurationError(f"max_clients: must be a whole number from 1, not {max_clients!r}")
        self._store_factory = store_factory
        self._app_factory = app_factory
        self._gate_factory = gate_factory
        self._given = session
        self._session: aiohttp.ClientSession | None = None
        self._most = max_clients
        self._options: dict[str, Any] = {
            "retry": retry,
            "timeout": timeout,
            "assumptions": assumptions,
            "on_attempt": on_attempt,
        }
        self._in_use: dict[str, _Tenant] = {}
        self._idle: OrderedDict[str, _Tenant] = OrderedDict()
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._users = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<Tenants: {len(self._in_use)} clients in use, {len(self._idle)} kept>"

    @asynccontextmanager
    async def client(self, tenant_id: str) -> AsyncIterator[SigningClient]:
        """The tenant's client, open at least for as long as it is used in ``async with``."""
        async with self._used(tenant_id) as (client, _):
            yield client

    @asynccontextmanager
    async def oauth(self, tenant_id: str) -> AsyncIterator[OAuth]:
        """The tenant's `OAuth`, which its client uses: to send a user to authorize, and to exchange the code. ::

        async with tenants.oauth("acme") as oauth:
            await oauth.exchange(callback_url, state=remembered_state)
        """
        async with self._used(tenant_id) as (_, oauth):
            yield oauth

    async def aclose(self) -> None:
        """Close all clients, those in use too, when their token refreshes have come to their ends."""
        self._closed = True
        for tenant in (*self._in_use.values(), *self._idle.values()):
            self._retire(tenant)
        self._in_use.clear()
        self._idle.clear()
        while self._closing:
            await asyncio.wait(tuple(self._closing.values()))
        if not self._users:
            self._detach()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @asynccontextmanager
    async def _used(self, tenant_id: str) -> AsyncIterator[tuple[SigningClient, OAuth]]:
        if not isinstance(tenant_id, str) or not tenant_id:
            raise InvalidRequest(f"tenant_id: must be a tenant's id, not {tenant_id!r}")
        if self._closed:
            raise ClientClosed("the tenants' clients are closed")
        tenant = self._in_use.get(tenant_id) or self._idle.pop(tenant_id, None)
        if tenant is None or tenant.is_spent:
            tenant = _Tenant(tenant_id, asyncio.create_task(self._make(tenant_id), name="signing_async tenant"))
        self._in_use[tenant_id] = tenant
        tenant.users += 1
        self._users += 1
        self._trim()
        try:
            yield await tenant.ready()
        finally:
            self._leave(tenant)

    def _leave(self, tenant: _Tenant) -> None:
        tenant.users -= 1
        self._users -= 1
        if self._closed and not self._users:
            self._detach()
        # Another may have taken its place: it was closed by hand, or all were.
        if tenant.users or self._in_use.get(tenant.id) is not tenant:
            return
        del self._in_use[tenant.id]
        if not tenant.is_spent:
            self._idle[tenant.id] = tenant
            self._trim()

    def _detach(self) -> None:
        """Let go of the connections. Not while a request may be on its way to one: it would fall over that."""
        if self._session is not None and self._session is not self._given:
            self._session.detach()

    def _trim(self) -> None:
        while self._idle and len(self._in_use) + len(self._idle) > self._most:
            _, tenant = self._idle.popitem(last=False)
            self._retire(tenant)

    def _retire(self, tenant: _Tenant) -> None:
        task = asyncio.create_task(tenant.close(), name="signing_async tenant's end")
        self._closing[tenant.id] = task
        task.add_done_callback(lambda task: self._let_go(tenant.id, task))

    def _let_go(self, tenant_id: str, task: asyncio.Task[None]) -> None:
        # Its successor may be closing by now.
        if self._closing.get(tenant_id) is task:
            del self._closing[tenant_id]

    async def _make(self, tenant_id: str) -> tuple[SigningClient, OAuth]:
        closing = self._closing.get(tenant_id)
        if closing is not None:
            # Two that refresh one token would know nothing of each other.
            await asyncio.wait([closing])
        app = await _given(self._app_factory(tenant_id))
        if not isinstance(app, TenantApp):
            raise ConfigurationError(f"app_factory: must give a TenantApp, not {type(app).__name__}")
        store = await _given(self._store_factory(tenant_id))
        gate = None if self._gate_factory is None else await _given(self._gate_factory(tenant_id))
        session = self._pooled()
        oauth = OAuth(
            app.base_url,
            client_id=app.client_id,
            client_secret=app.client_secret,
            redirect_uri=app.redirect_uri,
            store=store,
            session=session,
            assumptions=self._options["assumptions"],
        )
        return SigningClient(app.base_url, oauth, session=session, gate=gate, **self._options), oauth

    def _pooled(self) -> aiohttp.ClientSession:
        """A session on the given one's connections, without its cookies: one tenant's could be sent to another."""
        if self._session is None:
            given = self._given
            if given.closed:
                raise ClientClosed("the session that was given to the tenants is closed")
            self._session = given
            if not isinstance(given.cookie_jar, aiohttp.DummyCookieJar):
                # A copy has all else that was set, much of which aiohttp shows nobody: a proxy, middlewares, bounds.
                self._session = copy.copy(given)
                self._session._cookie_jar = aiohttp.DummyCookieJar()
                self._session._connector_owner = False
        return self._session


class _Tenant:
    """A tenant's client, or the making of it, and how many use it."""

    def __init__(self, tenant_id: str, making: asyncio.Task[tuple[SigningClient, OAuth]]) -> None:
        self.id = tenant_id
        self.users = 0
        self._making = making

    @property
    def is_spent(self) -> bool:
        """Whether it is of no use any more: it could not be made, or was closed by whoever used it."""
        making = self._making
        if not making.done():
            return False
        return making.cancelled() or making.exception() is not None or making.result()[0].closed

    async def ready(self) -> tuple[SigningClient, OAuth]:
        """The client; who waits for it and is cancelled does not take the others along."""
        await asyncio.wait([self._making])
        return self._making.result()

    async def close(self) -> None:
        await asyncio.wait([self._making])
        if not self.is_spent:
            client, _ = self._making.result()
            # Of a token that could not be saved the log tells.
            with contextlib.suppress(AuthError):
                await client.aclose()


async def _given(value: T | Awaitable[T]) -> T:
    return await value if inspect.isawaitable(value) else value
