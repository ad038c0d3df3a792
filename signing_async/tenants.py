"""Clients for many tenants that share one session."""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
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
        self._rate_limiter_factory = rate_limiter_factory
        for name in ("store_factory", "app_factory", "rate_limiter_factory"):
            factory = getattr(self, f"_{name}")
            if not callable(factory) and (name != "rate_limiter_factory" or factory is not None):
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
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        """The least recently used first."""
        self._closing: dict[asyncio.Task[None], str] = {}
        self._closed = False

    def __repr__(self) -> str:
        # Some tracebacks show an object whose constructor raised.
        tenants = getattr(self, "_tenants", {}).values()
        in_use = sum(tenant.users > 0 for tenant in tenants)
        return f"<Tenants: {in_use} clients in use, {len(tenants) - in_use} kept>"

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
        while self._tenants:
            self._retire(*self._tenants.popitem())
        while self._closing:
            await asyncio.wait([*self._closing])

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
        tenant = self._tenants.setdefault(tenant_id, _Tenant())
        tenant.users += 1
        self._tenants.move_to_end(tenant_id)
        self._trim()
        try:
            async with tenant.lock:
                if tenant.made is None or tenant.made[0].closed:
                    tenant.made = await self._create(tenant_id)
                made = tenant.made
            yield made
        finally:
            tenant.users -= 1
            if self._tenants.get(tenant_id) is tenant:
                self._tenants.move_to_end(tenant_id)
                if not tenant.users and (tenant.made is None or tenant.made[0].closed):
                    del self._tenants[tenant_id]
            self._trim()

    def _trim(self) -> None:
        """Close idle clients, the least recently used first, until ``max_clients`` are left."""
        while len(self._tenants) > self._max_clients:
            idle = next((tenant_id for tenant_id, tenant in self._tenants.items() if not tenant.users), None)
            if idle is None:
                return
            self._retire(idle, self._tenants.pop(idle))

    def _retire(self, tenant_id: str, tenant: _Tenant) -> None:
        task = asyncio.create_task(tenant.close(), name="signing_async tenant closing")
        self._closing[task] = tenant_id
        task.add_done_callback(self._closing.pop)

    async def _create(self, tenant_id: str) -> tuple[SigningClient, OAuth]:
        if self._closed:  # then the task that closes this tenant waits for its lock
            raise ClientClosed("the tenants' clients are closed")
        if closing := [task for task, closed in self._closing.items() if closed == tenant_id]:
            # Otherwise two `OAuth` objects could refresh the same token.
            await asyncio.wait(closing)
        app = await _awaited(self._app_factory(tenant_id))
        if not isinstance(app, TenantApp):
            raise ConfigurationError(f"app_factory: must return a TenantApp, got {type(app).__name__}")
        store = await _awaited(self._store_factory(tenant_id))
        limiter = None if self._rate_limiter_factory is None else await _awaited(self._rate_limiter_factory(tenant_id))
        oauth = OAuth(
            app.base_url,
            client_id=app.client_id,
            client_secret=app.client_secret,
            redirect_uri=app.redirect_uri,
            store=store,
            session=self._session,
            assumptions=self._options["assumptions"],
        )
        client = SigningClient(app.base_url, oauth, session=self._session, rate_limiter=limiter, **self._options)
        return client, oauth


@attrs.define(eq=False)
class _Tenant:
    """A tenant's client with its `OAuth`, and its number of users."""

    users: int = 0
    lock: asyncio.Lock = attrs.field(factory=asyncio.Lock)
    """Held while the client is created or closed."""
    made: tuple[SigningClient, OAuth] | None = None

    async def close(self) -> None:
        async with self.lock:
            if self.made is not None:
                # The loss of a token is already logged.
                with suppress(AuthError):
                    await self.made[0].aclose()


async def _awaited(value: T | Awaitable[T]) -> T:
    return await value if inspect.isawaitable(value) else value
