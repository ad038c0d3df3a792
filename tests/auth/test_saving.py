"""Saved, then published: the order of a refresh, other processes, failed saves, logout."""

from __future__ import annotations

import asyncio
import sqlite3
import traceback
from pathlib import Path
from unittest.mock import AsyncMock, Mock
from urllib.parse import parse_qs

import pytest
from aiohttp import web

from signing_async import AuthError, FileTokenStore, MemoryTokenStore, SigningClient, Token, TokenSuperseded
from tests.auth.oauth_servers import (
    Received,
    Scripted,
    WatchedStore,
    expired,
    grants,
    in_seconds,
    let_pass,
    oauth_for,
    oauth_on,
    refresh_token_in,
)

FAILED = "the token store failed: OSError"


async def test_refresh_locks_loads_posts_saves_and_unlocks_in_this_order() -> None:
    store = WatchedStore(expired())

    async def respond(request: web.Request, received: Received) -> web.StreamResponse:
        store.done.append("post")
        return await grants()(request, received)

    async with oauth_on(respond, store=store) as (oauth, _):
        await oauth.token()
    assert store.done == ["load", "lock", "load", "post", "save", "unlock"]


async def test_token_superseded_adopts_the_newer_token_of_the_store() -> None:
    class Overtaken(WatchedStore):
        async def save(self, token: Token) -> None:
            if token.access_token == "access-late":
                self.put(Token("access-theirs", "refresh-theirs", in_seconds(3600)))
                raise TokenSuperseded("another worker has saved a newer token")
            await super().save(token)

    async with oauth_on(grants("late"), grants("next"), store=Overtaken(expired())) as (oauth, server):
        assert await oauth.access_token() == "access-theirs"
        assert len(server.requests) == 1
        assert (await oauth.refresh(rejected="access-theirs")).access_token == "access-next"
        assert parse_qs(server.requests[1].body.decode())["refresh_token"] == ["refresh-theirs"]


async def test_exchange_whose_token_was_superseded_says_that_it_took_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryTokenStore()
    monkeypatch.setattr(store, "save", AsyncMock(side_effect=TokenSuperseded("another worker has saved a newer token")))
    async with oauth_on(grants(), store=store) as (oauth, server):
        with pytest.raises(TokenSuperseded) as caught:
            await oauth.exchange("code")
        assert (caught.value.transient, caught.value.effect, caught.value.client_wide) == (False, "unknown", False)
        assert len(server.requests) == 1


async def test_new_token_is_not_used_before_it_is_saved() -> None:
    saving, go = asyncio.Event(), asyncio.Event()

    class Late(MemoryTokenStore):
        async def save(self, token: Token) -> None:
            saving.set()
            await go.wait()
            await super().save(token)

    store = Late(Token("access-old", "refresh-old", in_seconds(3600)))
    async with oauth_on(grants(), store=store) as (oauth, _):
        assert await oauth.access_token() == "access-old"
        refresh = asyncio.create_task(oauth.refresh(rejected="access-old"))
        await saving.wait()
        assert await oauth.access_token() == "access-old"
        go.set()
        await refresh
        assert await oauth.access_token() == "access-new"


async def test_failed_save_is_repeated_by_the_next_refresh_without_a_request() -> None:
    store = WatchedStore(expired())
    store.fail_saves = 2
    async with oauth_on(grants("1"), grants("2"), store=store) as (oauth, server):
        for _ in range(2):
            with pytest.raises(AuthError, match=FAILED):
                await oauth.access_token()
        assert await refresh_token_in(store) == "refresh-old"
        assert len(server.requests) == 1
        assert await oauth.access_token() == "access-1"
        assert len(server.requests) == 1
        assert (await oauth.refresh()).access_token == "access-2"


async def test_exchanged_token_is_used_as_soon_as_it_can_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then, calls use the token that was in use before. A settling that fails does not end the attempts."""
    monkeypatch.setattr("signing_async.auth.refresh._SAVE_INTERVAL", 0.3)
    store = WatchedStore(Token("access-old", "refresh-old", in_seconds(3600)))
    async with oauth_on(grants(), store=store) as (oauth, server):
        assert await oauth.access_token() == "access-old"
        store.fail_saves = 2
        with pytest.raises(AuthError, match="do not repeat the exchange") as caught:
            await oauth.exchange("code")
        assert (caught.value.transient, caught.value.client_wide, caught.value.fatal) == (False, False, False)
        assert caught.value.effect == "unknown"
        with pytest.raises(AuthError, match="could not be saved and is lost"):
            await oauth.settle()
        async with asyncio.timeout(20):
            while store.done.count("save") < 3:
                assert await oauth.access_token() == "access-old"
                await asyncio.sleep(0.01)
        await oauth.settle()
        assert await oauth.access_token() == "access-new"
        assert await refresh_token_in(store) == "refresh-new"
        assert len(server.requests) == 1


async def test_first_token_that_is_not_saved_yet_asks_for_no_other_login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signing_async.auth.refresh._SAVE_INTERVAL", 0.1)
    store = WatchedStore()
    async with oauth_on(grants(), store=store) as (oauth, _):
        store.fail_saves = 1
        with pytest.raises(AuthError, match="do not repeat the exchange"):
            await oauth.exchange("code")
        with pytest.raises(AuthError, match="is not saved yet") as caught:
            await oauth.token()
        assert caught.value.transient
        await oauth.settle()
        assert await oauth.access_token() == "access-new"


async def test_refresh_adopts_the_newer_token_of_another_process() -> None:
    store = MemoryTokenStore(Token("access-old", "refresh-old", in_seconds(3600)))
    async with oauth_on(grants(), store=store) as (oauth, server):
        old = await oauth.token()
        newer = Token("access-theirs", "refresh-theirs", in_seconds(3600))
        await store.save(newer)
        assert await oauth.refresh(rejected=old) == newer
        assert await oauth.token() == newer
        assert not server.requests


@pytest.mark.parametrize("early", [False, True], ids=["after expiry", "ahead of expiry"])
async def test_refresh_after_logout_makes_no_request_and_does_not_restore_the_file(
    early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token.json"
    store = FileTokenStore(path)
    await store.save(Token("access-old", "refresh-old", in_seconds(3600)))
    async with oauth_on(grants(), store=store) as (oauth, server):
        assert await oauth.access_token() == "access-old"
        path.unlink()
        let_pass(monkeypatch, 3575 if early else 3605)
        results = await asyncio.gather(*(oauth.access_token() for _ in range(5)), return_exceptions=True)
        assert {type(error) for error in results} == {AuthError}
        for error in (*results, await asyncio.gather(oauth.access_token(), return_exceptions=True)):
            assert "no token is stored" in str(error)
        assert not server.requests
        assert not path.exists()
        await store.save(Token("access-other", "refresh-other", in_seconds(7200)))
        assert await oauth.access_token() == "access-other"


@pytest.mark.parametrize(("after", "who"), [("refresh", "oauth"), ("exchange", "client")])
async def test_failed_save_is_repeated_on_close(after: str, who: str) -> None:
    store = WatchedStore(expired() if after == "refresh" else None)
    store.fail_saves = 1
    async with Scripted(grants()) as server:
        oauth = oauth_for(server.base_url, store=store)
        client = SigningClient(server.base_url, oauth)
        with pytest.raises(AuthError, match=FAILED):
            await (oauth.access_token() if after == "refresh" else oauth.exchange("code"))
        await (client if who == "client" else oauth).aclose()
        assert await refresh_token_in(store) == "refresh-new"
        store.done.clear()
        await client.aclose()
        await oauth.aclose()
        assert (store.done, len(server.requests)) == ([], 1)


@pytest.mark.parametrize("who", ["oauth", "client"])
async def test_lost_token_is_raised_on_close(who: str) -> None:
    """An error that the block raised gets a note instead."""
    store = WatchedStore(expired())
    store.fail_saves = 3
    async with Scripted(grants()) as server:
        with pytest.raises(AuthError, match=FAILED) as caught:
            async with oauth_for(server.base_url, store=store) as oauth:
                await oauth.access_token()
        assert "could not be saved and is lost" in caught.value.__notes__[0]
        client = SigningClient(server.base_url, oauth)
        words = rf"^a new token could not be saved and is lost .* to authorize again: {FAILED}$"
        with pytest.raises(AuthError, match=words) as caught:
            async with client if who == "client" else oauth:
                pass
        assert caught.value.__context__ is None
        assert client.closed == (who == "client")
        await oauth.aclose()
        await client.aclose()
        assert await refresh_token_in(store) == "refresh-new"
        assert len(server.requests) == 1


@pytest.mark.parametrize("stored", [None, expired("theirs")], ids=["logout", "another process"])
async def test_unsaved_token_does_not_overwrite_a_changed_store_on_close(stored: Token | None) -> None:
    store = WatchedStore(expired())
    store.fail_saves = 1
    async with oauth_on(grants(), store=store) as (oauth, _):
        with pytest.raises(AuthError, match=FAILED):
            await oauth.access_token()
        store.put(stored)
    assert await store.load() == stored


@pytest.mark.parametrize(
    ("where", "fault", "transient"),
    [
        ("load", ConnectionError("S3CR3T"), True),
        ("save", PermissionError(13, "S3CR3T"), False),
        ("load", sqlite3.DatabaseError("S3CR3T"), False),
        ("lock", LookupError("S3CR3T"), True),
    ],
)
async def test_foreign_error_of_a_token_store_is_an_auth_error_that_hides_it(
    where: str, fault: Exception, transient: bool
) -> None:
    store = MemoryTokenStore(expired())
    failing = (Mock if where == "lock" else AsyncMock)(side_effect=fault)
    async with oauth_on(grants(), store=store) as (oauth, server):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, where, failing)
            with pytest.raises(AuthError, match=rf"^the token store failed: {type(fault).__name__}$") as caught:
                await oauth.access_token()
        assert (caught.value.transient, caught.value.client_wide) == (transient, True)
        assert "S3CR3T" not in "".join(traceback.format_exception(caught.value))
        assert caught.value.__cause__ is caught.value.__context__ is None
        assert await oauth.access_token() == "access-new"
        assert len(server.requests) == 1


async def test_lock_that_is_never_released_is_auth_error() -> None:
    store = MemoryTokenStore(expired())
    async with oauth_on(grants(), store=store, timeout=0.05) as (oauth, server):
        async with store.lock():
            with pytest.raises(AuthError, match=r"could not acquire the token store's lock within 0\.1 s") as caught:
                await oauth.access_token()
            assert caught.value.__context__ is None
            assert caught.value.transient
            with pytest.raises(AuthError, match="could not acquire"):
                await oauth.exchange("code")  # which works only once
        assert not server.requests
