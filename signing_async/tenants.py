"""Clients for many tenants that share one session."""

from __future__ import annotations

import asyncio
import contextlib
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
from .transport.operation import Attempt, Timeouts
from .transport.rate_limit import RateLimiter
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

        session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        async with session, Tenants(store_of, app_of, session) as tenants:
            async with tenants.client("acme") as client:
                await client.signings.send(signing_id)

    ``app_factory`` returns a tenant's `TenantApp`, ``store_factory`` its `TokenStore`, and ``rate_limiter_factory`` its
    `RateLimiter` (by default each client has its own). Each is called with the tenant's id and may be ``async``. A
    store must outlive its client: return the same `MemoryTokenStore` each time.

    At most ``max_clients`` are kept, or more while more are in use. The least recently used client is closed first,
    never while it is in use, and only after a token refresh in progress has ended. A closed client is created again
    when it is needed.

    Tenants share ``session``: its connections and its settings, such as a proxy. They do not share tokens, rate limits,
    retry budgets or what their clients know of signings. The session must keep no cookies, and is never closed here.
    The other options are those of `SigningClient`.
    """

    def __init__(
        self,
        store_factory: Callable[[str], TokenStore | Awaitable[TokenStore]],
        app_factory: Callable[[str], TenantApp | Awaitable[TenantApp]],
        session: aiohttp.ClientSession,
        *,
        max_clients: int = 1000,
        rate_limiter_factory: Callable[[str], RateLimiter | Awaitable[RateLimiter]] | None = None,
        retry: RetryPolicy = _DEFAULT_RETRY,
        timeout: float | Timeouts = _DEFAULT_TIMEOUTS,
        assumptions: Assumptions = _DEFAULT_ASSUMPTIONS,
        on_attempt: Callable[[Attempt], None] | None = None,
    ) -> None:
        self._store_factory = store_factory
        self._app_factory = app_factory
        self._rate_limiter_factory: Callable[[str], RateLimiter | Awaitable[RateLimiter] | None]
        self._rate_limiter_factory = (lambda tenant_id: None) if rate_limiter_factory is None else rate_limiter_factory
        for name in ("store_factory", "app_factory", "rate_limiter_factory"):
            factory = getattr(self, f"_{name}")
            if not callable(factory):
                raise ConfigurationError(f"{name}: must be callable with a tenant's id, got {factory!r}")
        if not isinstance(session, aiohttp.ClientSession):
            raise ConfigurationError(f"session: must be an aiohttp.ClientSession, got {type(session).__name__}")
        if not isinstance(session.cookie_jar, aiohttp.DummyCookieJar):
            raise ConfigurationError(
                "session: tenants would share its cookies: make it with cookie_jar=aiohttp.DummyCookieJar()"
            )
        self._session = session
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
        self._closed = False

    def __repr__(self) -> str:
        # Some tracebacks show an object whose constructor raised.
        in_use, idle = (len(getattr(self, name, ())) for name in ("_in_use", "_idle"))
        return f"<Tenants: {in_use} clients in use, {idle} kept>"

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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @asynccontextmanager
    async def _lent(self, tenant_id: str) -> AsyncIterator[tuple[SigningClient, OAuth]]:
        _checks.string("tenant_id", tenant_id, error=InvalidRequest)
        if self._closed:
            raise ClientClosed("the tenants' clients are closed")
        if self._session.closed:
            raise ClientClosed("the session of the tenants is closed")
        tenant = self._in_use.get(tenant_id) or self._idle.pop(tenant_id, None)
        if tenant is None or tenant.is_unusable:
            tenant = _Tenant(tenant_id, asyncio.create_task(self._create(tenant_id), name="signing_async tenant"))
        self._in_use[tenant_id] = tenant
        tenant.users += 1
        self._trim()
        try:
            yield await tenant.ready()
        finally:
            self._return(tenant)

    def _return(self, tenant: _Tenant) -> None:
        tenant.users -= 1
        # The tenant was replaced because a user closed its client, or all clients were closed.
        if tenant.users or self._in_use.get(tenant.id) is not tenant:
            return
        del self._in_use[tenant.id]
        if not tenant.is_unusable:
            self._idle[tenant.id] = tenant
            self._trim()

    def _trim(self) -> None:
        while self._idle and len(self._in_use) + len(self._idle) > self._max_clients:
            _, tenant = self._idle.popitem(last=False)
            self._retire(tenant)

    def _retire(self, tenant: _Tenant) -> None:
        def forget(task: asyncio.Task[None]) -> None:
            # The tenant's next client may be closing by now.
            if self._closing.get(tenant.id) is task:
                del self._closing[tenant.id]

        task = self._closing[tenant.id] = asyncio.create_task(tenant.close(), name="signing_async tenant closing")
        task.add_done_callback(forget)

    async def _create(self, tenant_id: str) -> tuple[SigningClient, OAuth]:
        closing = self._closing.get(tenant_id)
        if closing is not None:
            # Otherwise two `OAuth` objects could refresh the same token.
            await asyncio.wait([closing])
        app = await _awaited(self._app_factory(tenant_id))
        if not isinstance(app, TenantApp):
            raise ConfigurationError(f"app_factory: must return a TenantApp, got {type(app).__name__}")
        store = await _awaited(self._store_factory(tenant_id))
        rate_limiter = await _awaited(self._rate_limiter_factory(tenant_id))
        oauth = OAuth(
            app.base_url,
            client_id=app.client_id,
            client_secret=app.client_secret,
            redirect_uri=app.redirect_uri,
            store=store,
            session=self._session,
            assumptions=self._options["assumptions"],
        )
        client = SigningClient(app.base_url, oauth, session=self._session, rate_limiter=rate_limiter, **self._options)
        return client, oauth


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


async def _awaited(value: T | Awaitable[T]) -> T:
    return await value if inspect.isawaitable(value) else value
