"""Clients of many tenants: a bounded number of clients, none closed in use, nothing shared but connections."""

from __future__ import annotations

import asyncio
import gc
import logging
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
    RetryPolicy,
    SigningClient,
    TenantApp,
    Tenants,
    Token,
    TokenStore,
)
from tests.auth.oauth_servers import refresh_token_in
from tests.servers import Web, serving


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
def service() -> Service:
    """The service's state."""
    return Service()


@pytest.fixture
async def server(service: Service) -> AsyncIterator[Web]:
    """The service, running."""
    async with serving(service.respond) as running:
        yield running


@pytest.fixture
def registry(server: Web) -> Registry:
    """Tenants of the service."""
    return Registry(server.origin)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A session without cookies."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as made:
        yield made


async def ask(tenants: Tenants, tenant_id: str = "acme") -> str | None:
    """Return the tenant as whom a call is made."""
    async with tenants.client(tenant_id) as client:
        return (await client.me()).id


async def test_concurrent_tenants_use_their_own_tokens_and_no_cookies(
    registry: Registry, session: aiohttp.ClientSession
) -> None:
    async with Tenants(registry.store, registry.app, session, max_clients=5) as tenants:
        names = [f"t{number % 20}" for number in range(100)]
        assert await asyncio.gather(*(ask(tenants, name) for name in names)) == names
    assert not session.closed
    assert len(session.cookie_jar) == 0


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
            await asyncio.sleep(0.005)

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


async def test_more_clients_than_the_maximum_may_be_in_use(registry: Registry, session: aiohttp.ClientSession) -> None:
    """Afterwards no more than the maximum are kept."""
    async with Tenants(registry.store, registry.app, session, max_clients=2) as tenants:
        everyone = asyncio.Barrier(6)

        async def use(number: int) -> None:
            async with tenants.client(f"t{number}") as client:
                await everyone.wait()
                await client.me()

        await asyncio.gather(*(use(number) for number in range(6)))
        await asyncio.sleep(0.05)
        assert repr(tenants) == "<Tenants: 2 clients>"


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


async def test_closing_waits_for_a_refresh_in_progress(
    registry: Registry, service: Service, session: aiohttp.ClientSession
) -> None:
    service.refused.add("access-acme")
    service.may_finish.clear()
    tenants = Tenants(registry.store, registry.app, session)

    asking = asyncio.create_task(ask(tenants))
    await service.refreshing.wait()
    closing = asyncio.create_task(tenants.aclose())
    await asyncio.sleep(0.02)
    assert not closing.done()
    service.may_finish.set()
    await closing
    await asyncio.gather(asking, return_exceptions=True)
    assert await refresh_token_in(registry.stores["acme"]) == "refresh-acme-new"
    with pytest.raises(ClientClosed, match="the tenants' clients, or"):
        await ask(tenants)


async def test_factory_error_is_raised_to_all_users_and_not_remembered(
    registry: Registry, session: aiohttp.ClientSession
) -> None:
    fails = True

    def app(tenant_id: str) -> Any:
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


async def test_rate_limits_are_separate_unless_a_limiter_is_shared(session: aiohttp.ClientSession) -> None:

    async def refuse(request: web.Request) -> web.StreamResponse:
        if request.headers["Authorization"] == "Bearer access-loud":
            return web.json_response({}, status=429, headers={"Retry-After": "30"})
        return web.json_response({"id": "quiet"})

    async with serving(refuse) as server:
        registry = Registry(server.origin)
        shared = LocalRateLimiter()

        async def one_limiter(tenant_id: str) -> LocalRateLimiter:
            return shared

        for factory, held in ((None, False), (one_limiter, True)):
            async with Tenants(
                registry.store, registry.app, session, rate_limiter_factory=factory, timeout=5
            ) as tenants:
                with pytest.raises(RateLimited):
                    await ask(tenants, "loud")
                if held:
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
    [logged] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert (logged.name, "could not be saved and is lost" in logged.getMessage()) == ("signing_async", True)


async def test_session_with_cookies_or_closed_is_an_error(registry: Registry) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ConfigurationError, match=r"make it with cookie_jar=aiohttp\.DummyCookieJar\(\)"):
            Tenants(registry.store, registry.app, session)
    session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
    await session.close()
    async with Tenants(registry.store, registry.app, session) as tenants:
        with pytest.raises(ClientClosed, match="or their session, are closed"):
            await ask(tenants)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"store_factory": 5}, "store_factory: must be callable with a tenant's id, got 5"),
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


async def test_invalid_options_and_factory_results_are_rejected(session: aiohttp.ClientSession) -> None:
    registry = Registry("https://tenant.example.com")

    def mapping(tenant_id: str) -> Any:
        return {"client_secret": "hidden"}

    async with Tenants(registry.store, registry.app, session, retry=5) as tenants:  # type: ignore[arg-type]  # the test
        with pytest.raises(ConfigurationError, match="retry: must be RetryPolicy, got 5"):
            await ask(tenants)
    async with Tenants(registry.store, mapping, session, retry=RetryPolicy.none()) as tenants:
        with pytest.raises(ConfigurationError, match="app_factory: must return a TenantApp, got dict"):
            await ask(tenants)
        for tenant_id in ("", None, 5):
            with pytest.raises(InvalidRequest, match="tenant_id: must be a non-empty string, got "):
                await ask(tenants, tenant_id)  # type: ignore[arg-type]  # that is the test


async def test_client_needed_again_before_it_is_closed_stays_open(
    registry: Registry, session: aiohttp.ClientSession
) -> None:
    async with Tenants(registry.store, registry.app, session, max_clients=1) as tenants:
        for tenant_id in ("a", "b"):
            async with tenants.client(tenant_id):
                pass
        assert await ask(tenants, "a") == "a"
