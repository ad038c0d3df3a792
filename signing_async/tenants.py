"""Clients for many tenants that share one session."""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

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
        factories: dict[str, Any] = {"store_factory": store_factory, "app_factory": app_factory}
        if rate_limiter_factory is not None:
            factories["rate_limiter_factory"] = rate_limiter_factory
        for name, factory in factories.items():
            if not callable(factory):
                raise ConfigurationError(f"{name}: must be callable with a tenant's id, got {factory!r}")
        if not isinstance(session, aiohttp.ClientSession):
            raise ConfigurationError(f"session: must be an aiohttp.ClientSession, got {type(session).__name__}")
        if not isinstance(session.cookie_jar, aiohttp.DummyCookieJar):
            raise ConfigurationError(
                "session: tenants would share its cookies: make it with cookie_jar=aiohttp.DummyCookieJar()"
            )
        self._factories = factories
        self._session = session
        self._max_clients = _checks.integer("max_clients", max_clients)
        self._assumptions = assumptions
        self._options: dict[str, Any] = {"retry": retry, "timeout": timeout, "on_attempt": on_attempt}
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        """The least recently used first."""
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    def __repr__(self) -> str:
        # Some tracebacks show an object whose constructor raised.
        return f"<Tenants: {len(getattr(self, '_tenants', ()))} clients>"

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
        await asyncio.gather(*(self._close(*item) for item in self._tenants.items()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @asynccontextmanager
    async def _lent(self, tenant_id: str) -> AsyncIterator[tuple[SigningClient, OAuth]]:
        _checks.string("tenant_id", tenant_id, error=InvalidRequest)
        tenant = self._tenants.setdefault(tenant_id, _Tenant())
        tenant.users += 1
        try:
            async with tenant.lock:
                if self._closed or self._session.closed:
                    raise ClientClosed("the tenants' clients, or their session, are closed")
                if tenant.made is None or tenant.made[0].closed:
                    tenant.made = await self._create(tenant_id)
                made = tenant.made
            yield made
        finally:
            tenant.users -= 1
            self._tenants.move_to_end(tenant_id)
            if tenant.made is None and not tenant.users:
                del self._tenants[tenant_id]
            self._trim()

    def _trim(self) -> None:
        """Close idle clients, the least recently used first, until ``max_clients`` are left."""
        idle = [each for each, tenant in self._tenants.items() if not tenant.users and each not in self._closing]
        excess = len(self._tenants) - len(self._closing) - self._max_clients
        for tenant_id in idle[: max(0, excess)]:
            self._closing[tenant_id] = asyncio.create_task(self._close(tenant_id, self._tenants[tenant_id]))

    async def _close(self, tenant_id: str, tenant: _Tenant) -> None:
        # A caller who needs the client meanwhile waits for the lock, and creates another one.
        async with tenant.lock:
            if tenant.made is not None and (self._closed or not tenant.users):
                with suppress(AuthError):  # the loss of a token is already logged
                    await tenant.made[0].aclose()
            self._closing.pop(tenant_id, None)
            if not tenant.users:
                self._tenants.pop(tenant_id, None)

    async def _create(self, tenant_id: str) -> tuple[SigningClient, OAuth]:
        made: dict[str, Any] = {}
        for name, factory in self._factories.items():
            value = factory(tenant_id)
            made[name] = await value if inspect.isawaitable(value) else value
        app = made["app_factory"]
        if not isinstance(app, TenantApp):
            raise ConfigurationError(f"app_factory: must return a TenantApp, got {type(app).__name__}")
        shared: dict[str, Any] = {"session": self._session, "assumptions": self._assumptions}
        oauth = OAuth(
            app.base_url,
            client_id=app.client_id,
            client_secret=app.client_secret,
            redirect_uri=app.redirect_uri,
            store=made["store_factory"],
            **shared,
        )
        limiter = made.get("rate_limiter_factory")
        return SigningClient(app.base_url, oauth, rate_limiter=limiter, **shared, **self._options), oauth


@attrs.define(eq=False)
class _Tenant:
    """A tenant's client with its `OAuth`, and its number of users."""

    users: int = 0
    lock: asyncio.Lock = attrs.field(factory=asyncio.Lock)
    """Held while the client is created or closed."""
    made: tuple[SigningClient, OAuth] | None = None
