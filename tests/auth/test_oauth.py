"""`OAuth`: settings, sessions, closing."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from signing_async import AuthError, ClientClosed, ConfigurationError, MemoryTokenStore, SigningClient, Token
from tests.auth.oauth_servers import (
    BASE,
    Received,
    Scripted,
    Slow,
    expired,
    grants,
    oauth_for,
    oauth_on,
    refresh_token_in,
)
from tests.servers import another_loop


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("client_id", None, "a non-empty string, got None"),
        ("redirect_uri", "https://x/\udcff", "a non-empty string, got .*"),
        ("client_secret", "\udcff-secret", r"a non-empty string \(its value is not shown\)"),
        ("token_format", "xml", "'form' or 'json', got 'xml'"),
        ("timeout", math.inf, "a number above 0, got inf"),
        ("store", MemoryTokenStore, "of type TokenStore, got type"),
        ("session", 5, "of type ClientSession, got int"),
    ],
)
def test_invalid_argument_is_refused_with_its_name(name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^OAuth: {name}: must be {words}$"):
        oauth_for(BASE, **{name: value})
    with pytest.raises(ConfigurationError, match="must be https"):
        oauth_for("http://tenant.example.com")


async def test_own_session_is_closed_with_oauth_and_one_left_open_is_a_resource_warning() -> None:
    async with Scripted(grants()) as server:
        async with oauth_for(server.base_url) as oauth:
            await oauth.exchange("code")
            session = oauth.current.endpoint.sessions.get()
        assert session.closed
        with pytest.raises(ClientClosed):
            await oauth.refresh()
        oauth = oauth_for(server.base_url)
        await oauth.exchange("code")
        session = oauth.current.endpoint.sessions.get()
        kept = [oauth]
        del oauth
        with pytest.warns(ResourceWarning, match=r"OAuth\(.*\) was not closed: use `async with`, or await aclose\(\)"):
            kept.clear()
        await session.close()


async def test_callers_session_is_preferred_and_stays_open() -> None:
    async with Scripted(grants()) as server, aiohttp.ClientSession(headers={"X-Mine": "yes"}) as session:
        async with oauth_for(server.base_url, session=session) as oauth, SigningClient(server.base_url, oauth):
            await oauth.exchange("code")
        assert not session.closed
        assert server.requests[0].headers["X-Mine"] == "yes"


async def test_session_of_an_open_client_is_used() -> None:
    async with (
        oauth_on(grants()) as (oauth, server),
        aiohttp.ClientSession(headers={"X-Session": "one"}) as one,
        aiohttp.ClientSession(headers={"X-Session": "two"}) as two,
    ):
        first = SigningClient(server.base_url, oauth, session=one)
        second = SigningClient(server.base_url, oauth, session=two)
        await first.aclose()
        await oauth.exchange("code")
        third = SigningClient(server.base_url, oauth, session=one)
        await second.aclose()
        await oauth.refresh()
        await one.close()
        await oauth.refresh()
        await third.aclose()
        await oauth.refresh()
        used = [received.headers.get("X-Session") for received in server.requests]
    assert used == ["two", "one", None, None]


def test_oauth_works_with_clients_of_several_event_loops() -> None:
    """Its own session, and that of a client left open, are replaced in the next loop."""
    store, earlier = MemoryTokenStore(expired()), []

    async def me(request: web.Request, received: Received) -> web.Response:
        return web.json_response({"id": request.headers["Authorization"]})

    async def work() -> str | None:
        # The lock is waited for in each of the loops.
        async with store.lock():
            refresh = asyncio.create_task(oauth.refresh())
            await asyncio.sleep(0.01)
        await refresh
        async with aiohttp.ClientSession() as session:
            earlier.append(SigningClient(server.base_url, oauth, session=session))
            user = await earlier[-1].me()
        await oauth.refresh()
        # Else aiohttp complains that it is left open.
        await oauth.current.endpoint.sessions.get().close()
        return user.id

    with another_loop() as run:
        server = Scripted(*(response for n in (1, 3, 5) for response in (grants(f"{n}"), me, grants(f"{n + 1}"))))
        run(server.__aenter__()).result()
        oauth = oauth_for(server.base_url, store=store)
        assert [asyncio.run(work()) for _ in range(3)] == ["Bearer access-1", "Bearer access-3", "Bearer access-5"]
        run(server.__aexit__()).result()


@pytest.mark.parametrize("who", ["client", "oauth"])
async def test_cancelled_close_waits_until_the_rotated_refresh_token_is_saved(who: str) -> None:
    store, slow = MemoryTokenStore(expired()), Slow(grants())
    async with oauth_on(slow, store=store) as (oauth, server):
        client = SigningClient(server.base_url, oauth)
        if who == "oauth":
            await client.aclose()
        task = asyncio.create_task(oauth.access_token())
        await slow.begun.wait()
        asyncio.get_running_loop().call_later(0.2, slow.go.set)
        closing = asyncio.create_task(client.aclose() if who == "client" else oauth.aclose())
        for _ in range(5):
            await asyncio.sleep(0.01)
            closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()
        assert slow.go.is_set()
        assert await refresh_token_in(store) == "refresh-new"
        assert await task == "access-new"
        assert client.closed
        assert oauth.current.endpoint.sessions.closed == (who == "oauth")


async def test_cancelled_close_waits_for_a_store_that_hangs_no_longer_than_the_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If the application cancels the refresh too, that is a transient error."""
    saving = asyncio.Event()

    class Hanging(MemoryTokenStore):
        async def save(self, token: Token) -> None:
            saving.set()
            await asyncio.Event().wait()

    async with Scripted(grants()) as server:
        oauth = oauth_for(server.base_url, store=Hanging(expired()), timeout=0.3)
        task = asyncio.create_task(oauth.access_token())
        await saving.wait()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await oauth.aclose()
        assert time.monotonic() - began >= 0.3
        assert oauth.current.endpoint.sessions.closed
        for left in asyncio.all_tasks():
            if left.get_name() == "signing_async token refresh":
                left.cancel()
        with pytest.raises(AuthError, match=r"^the token request was cancelled$") as caught:
            await task
        assert caught.value.transient
    assert not [record for record in caplog.records if record.name == "asyncio" and "token refresh" in record.message]
