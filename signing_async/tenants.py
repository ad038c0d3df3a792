"""Clients for many tenants that share one session."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

import aiohttp
import attrs

from . import _checks
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
    """A tenant's origin, and the application registered there."""

    base_url: str
    client_id: str
    client_secret: str = attrs.field(repr=False)
    redirect_uri: str


class Tenants:
    """A cache of clients, one for each tenant. ::

        async with aiohttp.ClientSession() as session, Tenants(store_of, app_of, session) as tenants:
            async with tenants.client("acme") as client:
                await client.signings.send(signing_id)

    ``app_factory`` returns a tenant's `TenantApp`, ``store_factory`` its `TokenStore`, and ``gate_factory`` its `Gate`
    (by default each client has its own). Each is called with the tenant's id and may be ``async``. A store must outlive
    its client: return the same `MemoryTokenStore` each time.

    At most ``max_clients`` are kept, or more while more are in use. The least recently used client is closed first,
    never while it is in use, and only after a token refresh in progress has ended. A closed client is created again
    when it is needed.

    Tenants share ``session``: its connections and its settings, such as a proxy. They do not share tokens, rate limits,
    retry budgets or what their clients know of signings. No cookies are kept, whatever the session's cookie jar. The
    session is never closed here. The other options are those of `SigningClient`.
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
        self._store_factory = store_factory
        self._app_factory = app_factory
        self._gate_factory = _no_gate if gate_factory is None else gate_factory
        for name in ("store_factory", "app_factory", "gate_factory"):
            factory = getattr(self, f"_{name}")
            if not callable(factory):
                raise ConfigurationError(f"{name}: must be callable with a tenant's id, got {factory!r}")
        if not isinstance(session, aiohttp.ClientSession):
            raise ConfigurationError(f"session: must be an aiohttp.ClientSession, got {type(session).__name__}")
        self._given = session
        self._session: aiohttp.ClientSession | None = None
        self._max_clients = _checks.integer("max_clients", max_clients)
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
        """Yield the tenant's client, which stays open during the block."""
        async with self._lent(tenant_id) as (client, _):
            yield client

    @asynccontextmanager
    async def oauth(self, tenant_id: str) -> AsyncIterator[OAuth]:
        """Yield the tenant's `OAuth`, which its client uses too, to authorize a user and to exchange the code. ::

        async with tenants.oauth("acme") as oauth:
            await oauth.exchange(callback_url, state=remembered_state)
        """
        async with self._lent(tenant_id) as (_, oauth):
            yield oauth

    async def aclose(self) -> None:
        """Close all clients, also those in use, after their token refreshes have ended."""
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

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @asynccontextmanager
    async def _lent(self, tenant_id: str) -> AsyncIterator[tuple[SigningClient, OAuth]]:
        _checks.string("tenant_id", tenant_id, error=InvalidRequest)
        if self._closed:
            raise ClientClosed("the tenants' clients are closed")
        tenant = self._in_use.get(tenant_id) or self._idle.pop(tenant_id, None)
        if tenant is None or tenant.is_unusable:
            tenant = _Tenant(tenant_id, asyncio.create_task(self._create(tenant_id), name="signing_async tenant"))
        self._in_use[tenant_id] = tenant
        tenant.users += 1
        self._users += 1
        self._trim()
        try:
            yield await tenant.ready()
        finally:
            self._return(tenant)

    def _return(self, tenant: _Tenant) -> None:
        tenant.users -= 1
        self._users -= 1
        if self._closed and not self._users:
            self._detach()
        # The tenant was replaced because a user closed its client, or all clients were closed.
        if tenant.users or self._in_use.get(tenant.id) is not tenant:
            return
        del self._in_use[tenant.id]
        if not tenant.is_unusable:
            self._idle[tenant.id] = tenant
            self._trim()

    def _detach(self) -> None:
        """Detach the copied session, only without users: a request that waits for a connection would fail."""
        if self._session is not None and self._session is not self._given:
            self._session.detach()

    def _trim(self) -> None:
        while self._idle and len(self._in_use) + len(self._idle) > self._max_clients:
            _, tenant = self._idle.popitem(last=False)
            self._retire(tenant)

    def _retire(self, tenant: _Tenant) -> None:
        task = asyncio.create_task(tenant.close(), name="signing_async tenant closing")
        self._closing[tenant.id] = task
        task.add_done_callback(lambda task: self._forget(tenant.id, task))

    def _forget(self, tenant_id: str, task: asyncio.Task[None]) -> None:
        # The tenant's next client may be closing by now.
        if self._closing.get(tenant_id) is task:
            del self._closing[tenant_id]

    async def _create(self, tenant_id: str) -> tuple[SigningClient, OAuth]:
        closing = self._closing.get(tenant_id)
        if closing is not None:
            # Otherwise two `OAuth` objects could refresh the same token.
            await asyncio.wait([closing])
        app = await _awaited(self._app_factory(tenant_id))
        if not isinstance(app, TenantApp):
            raise ConfigurationError(f"app_factory: must return a TenantApp, got {type(app).__name__}")
        store = await _awaited(self._store_factory(tenant_id))
        gate = await _awaited(self._gate_factory(tenant_id))
        session = self._shared_session()
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

    def _shared_session(self) -> aiohttp.ClientSession:
        """Return a session with the given one's connections and without its cookies, which tenants must not share."""
        if self._session is None:
            given = self._given
            if given.closed:
                raise ClientClosed("the session of the tenants is closed")
            self._session = given
            if not isinstance(given.cookie_jar, aiohttp.DummyCookieJar):
                # A copy keeps all other settings; aiohttp has no accessors for the proxy, middlewares and limits.
                self._session = copy.copy(given)
                self._session._cookie_jar = aiohttp.DummyCookieJar()
                self._session._connector_owner = False
        return self._session


class _Tenant:
    """A tenant's client, or the task that creates it, and its number of users."""

    def __init__(self, tenant_id: str, creating: asyncio.Task[tuple[SigningClient, OAuth]]) -> None:
        self.id = tenant_id
        self.users = 0
        self._creating = creating

    @property
    def is_unusable(self) -> bool:
        """Whether the client could not be created, or was closed by a user."""
        creating = self._creating
        if not creating.done():
            return False
        return creating.cancelled() or creating.exception() is not None or creating.result()[0].closed

    async def ready(self) -> tuple[SigningClient, OAuth]:
        """Return the client and its `OAuth`. A cancelled caller does not cancel their creation."""
        await asyncio.wait([self._creating])
        return self._creating.result()

    async def close(self) -> None:
        await asyncio.wait([self._creating])
        if not self.is_unusable:
            client, _ = self._creating.result()
            # The loss of a token is already logged.
            with contextlib.suppress(AuthError):
                await client.aclose()


def _no_gate(tenant_id: str) -> None:
    """Return no gate: each client then has its own rate limiter."""


async def _awaited(value: T | Awaitable[T]) -> T:
    return await value if inspect.isawaitable(value) else value
