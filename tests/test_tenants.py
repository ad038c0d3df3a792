"""Clients of many tenants: a bounded number of clients, none closed in use, nothing shared but connections."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from signing_async import (
    AuthError,
    ClientClosed,
    ConfigurationError,
    InvalidRequest,
    LocalRateLimiter,
    MemoryTokenStore,
    RateLimited,
    SigningClient,
    TenantApp,
    Tenants,
    Token,
    TokenStore,
)
from tests.auth.oauth_servers import refresh_token_in
from tests.servers import serving


class Registry:
    """The tenants of an application."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.stores: dict[str, MemoryTokenStore] = {}
        self.created: list[str] = []

    def store(self, tenant_id: str) -> TokenStore:
        fresh = MemoryTokenStore(Token(f"access-{tenant_id}", f"refresh-{tenant_id}"))
        return self.stores.setdefault(tenant_id, fresh)

    def app(self, tenant_id: str) -> TenantApp:
        self.created.append(tenant_id)
        return TenantApp(self.origin, f"client-{tenant_id}", f"secret-{tenant_id}", "https://app.example.com/callback")


class Unlocked(MemoryTokenStore):
    """A store whose lock excludes nobody."""

    @asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        yield


class Service:
    """A service for all tenants: `me` returns the tenant of the access token, and sets a cookie."""

    origin: str

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.refreshing = asyncio.Event()
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.refreshes: list[str] = []

    async def respond(self, request: web.Request) -> web.StreamResponse:
        assert "Cookie" not in request.headers
        if request.path == "/api/oauth/token":
            form = await request.post()
            tenant = str(form["client_id"]).removeprefix("client-")
            self.refreshes.append(tenant)
            self.refreshing.set()
            await self.may_finish.wait()
            assert form["client_secret"] == f"secret-{tenant}"
            assert str(form["refresh_token"]).startswith(f"refresh-{tenant}")
            return web.json_response({"access_token": f"access-{tenant}-new", "refresh_token": f"refresh-{tenant}-new"})
        token = request.headers["Authorization"].removeprefix("Bearer ")
        if token in self.refused:
            return web.json_response({}, status=401)
        response = web.json_response({"id": token.removeprefix("access-"), "cookie": "set"})
        response.set_cookie("session", token)
        return response


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    """The service, running."""
    service = Service()
    async with serving(service.respond) as running:
        service.origin = running.origin
        yield service


@pytest.fixture
def registry(service: Service) -> Registry:
    """Tenants of the service."""
    return Registry(service.origin)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A session without cookies."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as made:
        yield made


async def ask(tenants: Tenants, tenant_id: str = "acme") -> str | None:
    """Return the tenant as whom a call is made."""
    async with tenants.client(tenant_id) as client:
        return (await client.me()).id


async def trimmed(tenants: Tenants, most: int) -> None:
    """Wait until at most ``most`` clients are kept."""
    async with asyncio.timeout(30):
        while int(repr(tenants).split()[1]) > most:
            await asyncio.sleep(0.001)


async def test_concurrent_tenants_use_their_own_tokens_and_no_cookies(
    registry: Registry, session: aiohttp.ClientSession
) -> None:
    """More clients than the maximum may be in use; afterwards no more than the maximum are kept."""
    async with Tenants(registry.store, registry.app, session, max_clients=5) as tenants:
        names = [f"t{number % 20}" for number in range(100)]
        assert await asyncio.gather(*(ask(tenants, name) for name in names)) == names
        assert sorted(registry.created) == sorted(set(names))
        await trimmed(tenants, 5)
    assert not session.closed
    assert len(session.cookie_jar) == 0
    with pytest.raises(ClientClosed, match="the tenants' clients, or"):
        await ask(tenants)


async def test_client_is_created_once_for_concurrent_users(registry: Registry, session: aiohttp.ClientSession) -> None:

    async def app(tenant_id: str) -> TenantApp:
        await asyncio.sleep(0.01)
        return registry.app(tenant_id)

    async def store(tenant_id: str) -> TokenStore:
        return registry.store(tenant_id)

    async with Tenants(store, app, session) as tenants:

        async def get() -> SigningClient:
            async with tenants.client("acme") as client:
                return client

        first = asyncio.create_task(get())
        await asyncio.sleep(0)
        first.cancel()
        clients = await asyncio.gather(*(get() for _ in range(10)))
        assert len({id(client) for client in [*clients, await get()]}) == 1
        assert first.cancelled()
        assert repr(tenants) == "<Tenants: 1 clients>"
    assert registry.created == ["acme"]
    assert clients[0].closed


async def test_least_recently_used_client_is_closed_first_and_none_in_use(
    registry: Registry, session: aiohttp.ClientSession
) -> None:
    seen: dict[str, SigningClient] = {}
    async with Tenants(registry.store, registry.app, session, max_clients=3) as tenants:

        async def touch(tenant_id: str) -> None:
            async with tenants.client(tenant_id) as client:
                seen[tenant_id] = client
            await trimmed(tenants, 3)

        async with tenants.client("long") as used:
            for tenant_id in ("a", "b", "a", "c"):
                await touch(tenant_id)
            assert [tenant_id for tenant_id, client in seen.items() if client.closed] == ["b"]
            for number in range(5):
                await touch(f"more-{number}")
            assert not used.closed
            await used.me()
        await touch("last")
        assert not used.closed
        assert sum(not client.closed for client in seen.values()) == 2
        await touch("b")
        assert registry.created.count("b") == 2
        assert not seen["b"].closed


async def test_refresh_in_progress_ends_before_the_client_is_replaced(
    registry: Registry, service: Service, session: aiohttp.ClientSession
) -> None:
    registry.stores["acme"] = Unlocked(Token("access-acme", "refresh-acme"))
    service.refused.add("access-acme")
    service.may_finish.clear()
    async with Tenants(registry.store, registry.app, session, max_clients=1) as tenants:
        first = asyncio.create_task(ask(tenants))
        await service.refreshing.wait()
        first.cancel()
        await asyncio.wait([first])
        assert await ask(tenants, "other") == "other"
        again = asyncio.create_task(ask(tenants))
        await asyncio.sleep(0.02)
        assert not again.done()
        service.may_finish.set()
        assert await again == "acme-new"
    assert service.refreshes == ["acme"]
    assert await refresh_token_in(registry.stores["acme"]) == "refresh-acme-new"


async def test_factory_error_is_raised_to_all_users_and_not_remembered(
    registry: Registry, session: aiohttp.ClientSession
) -> None:
    fails = True

    def app(tenant_id: str) -> TenantApp:
        if fails:
            raise LookupError(f"there is no tenant {tenant_id}")
        return registry.app(tenant_id)

    async with Tenants(registry.store, app, session) as tenants:
        errors = await asyncio.gather(ask(tenants), ask(tenants), return_exceptions=True)
        assert [str(error) for error in errors] == ["there is no tenant acme"] * 2
        assert repr(tenants) == "<Tenants: 0 clients>"
        fails = False
        assert await ask(tenants) == "acme"


@pytest.mark.parametrize("fails", [False, True])
async def test_client_that_is_created_during_closing_is_closed(
    fails: bool, registry: Registry, session: aiohttp.ClientSession
) -> None:
    """If its factory raises an error, the closing does not."""
    go_on = asyncio.Event()
    got: list[SigningClient] = []

    async def app(tenant_id: str) -> TenantApp:
        await go_on.wait()
        if fails:
            raise LookupError("no such tenant")
        return registry.app(tenant_id)

    async def use() -> None:
        async with tenants.client("acme") as client:
            got.append(client)

    tenants = Tenants(registry.store, app, session)
    first, second = asyncio.create_task(use()), asyncio.create_task(use())
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(tenants.aclose())
    await asyncio.sleep(0)
    go_on.set()
    await closing
    errors = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(error) for error in errors] == [LookupError if fails else type(None), ClientClosed]
    assert [client.closed for client in got] == [True] * (not fails)


async def test_closing_does_not_wait_forever_for_a_client_whose_creation_has_not_begun(
    registry: Registry, session: aiohttp.ClientSession
) -> None:
    tenants = Tenants(registry.store, registry.app, session)

    async with asyncio.timeout(30):
        await asyncio.gather(ask(tenants), tenants.aclose(), return_exceptions=True)


async def test_client_closed_by_its_user_is_created_again(registry: Registry, session: aiohttp.ClientSession) -> None:
    async with Tenants(registry.store, registry.app, session) as tenants:
        async with tenants.client("acme") as client, tenants.client("acme") as same:
            assert same is client
            await client.aclose()
            async with tenants.client("acme") as other:
                await other.me()
            with pytest.raises(ClientClosed):
                await client.me()
        async with tenants.client("acme") as third:
            assert third is other
            await third.aclose()
        async with tenants.client("acme") as fourth:
            await fourth.me()
        assert repr(tenants) == "<Tenants: 1 clients>"


async def test_oauth_of_a_tenant_is_shared_with_its_client(
    registry: Registry, service: Service, session: aiohttp.ClientSession
) -> None:
    async with Tenants(registry.store, registry.app, session) as tenants:
        async with tenants.oauth("acme") as oauth:
            assert "client_id=client-acme" in oauth.authorization_request().url
            await oauth.refresh()
        assert await ask(tenants) == "acme-new"
    assert service.refreshes == ["acme"]


@pytest.mark.parametrize("is_shared", [False, True])
async def test_rate_limits_are_separate_unless_a_limiter_is_shared(
    session: aiohttp.ClientSession, is_shared: bool
) -> None:
    limiter = LocalRateLimiter()

    async def refuse(request: web.Request) -> web.StreamResponse:
        if request.headers["Authorization"] == "Bearer access-loud":
            return web.json_response({}, status=429, headers={"Retry-After": "30"})
        return web.json_response({"id": "quiet"})

    async def give(tenant_id: str) -> LocalRateLimiter:
        return limiter

    async with serving(refuse) as server:
        registry = Registry(server.origin)
        factory = give if is_shared else None
        async with Tenants(registry.store, registry.app, session, rate_limiter_factory=factory, timeout=5) as tenants:
            with pytest.raises(RateLimited):
                await ask(tenants, "loud")
            if is_shared:
                with pytest.raises(RateLimited, match="it was not sent"):
                    await ask(tenants, "quiet")
            else:
                assert await ask(tenants, "quiet") == "quiet"


async def test_token_that_cannot_be_saved_on_close_is_logged(
    registry: Registry, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    """The other clients are closed."""

    class Full(MemoryTokenStore):
        async def save(self, token: Token) -> None:
            raise OSError("no space left")

    registry.stores["a"] = Full(Token("access-a", "refresh-a"))
    tenants = Tenants(registry.store, registry.app, session)
    async with tenants.client("b") as other:
        await other.me()
    async with tenants.oauth("a") as oauth:
        with pytest.raises(AuthError, match="the token store failed: OSError"):
            await oauth.refresh()
    await tenants.aclose()
    assert other.closed
    del tenants, oauth, other
    gc.collect()
    [logged] = [record for record in caplog.records if record.name == "signing_async"]
    assert (logged.levelname, "could not be saved and is lost" in logged.getMessage()) == ("ERROR", True)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"app_factory": None}, "app_factory: must be callable with a tenant's id, got None"),
        ({"rate_limiter_factory": 5}, "rate_limiter_factory: must be callable with a tenant's id, got 5"),
        ({"session": 5}, "session: must be an aiohttp.ClientSession, got int"),
        ({"max_clients": 0}, "max_clients: must be an integer of at least 1, got 0"),
    ],
)
async def test_invalid_arguments_are_rejected_at_once(
    session: aiohttp.ClientSession, wrong: dict[str, Any], words: str
) -> None:
    registry = Registry("https://tenant.example.com")
    arguments: dict[str, Any] = {"store_factory": registry.store, "app_factory": registry.app, "session": session}
    with pytest.raises(ConfigurationError) as caught:
        Tenants(**{**arguments, **wrong})
    assert str(caught.value) == words


async def test_invalid_options_sessions_and_factory_results_are_rejected(session: aiohttp.ClientSession) -> None:
    registry = Registry("https://tenant.example.com")
    wrong: Any = 5
    async with aiohttp.ClientSession() as with_cookies:
        with pytest.raises(ConfigurationError, match=r"make it with cookie_jar=aiohttp\.DummyCookieJar\(\)"):
            Tenants(registry.store, registry.app, with_cookies)
    async with Tenants(registry.store, registry.app, session, retry=wrong) as tenants:
        with pytest.raises(ConfigurationError, match="retry: must be RetryPolicy, got 5"):
            await ask(tenants)
    mapping: Any = {"client_secret": "hidden"}
    async with Tenants(registry.store, lambda tenant_id: mapping, session) as tenants:
        with pytest.raises(ConfigurationError, match="app_factory: must return a TenantApp, got dict"):
            await ask(tenants)
        tenant_id: Any
        for tenant_id in ("", None, wrong):
            with pytest.raises(InvalidRequest, match="tenant_id: must be a non-empty string, got "):
                await ask(tenants, tenant_id)
        await session.close()
        with pytest.raises(ClientClosed, match="or their session, are closed"):
            await ask(tenants)


async def test_client_needed_again_before_it_is_closed_stays_open(
    registry: Registry, session: aiohttp.ClientSession
) -> None:
    async with Tenants(registry.store, registry.app, session, max_clients=1) as tenants:
        for tenant_id in ("a", "b"):
            async with tenants.client(tenant_id):
                pass
        async with tenants.client("a") as client:
            assert (await client.me()).id == "a"
            assert not client.closed
        assert registry.created == ["a", "b"]
