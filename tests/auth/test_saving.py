"""Saved, then published: the order of a refresh, other processes, failed saves, logout."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from aiohttp import web

from signing_async import (
    AuthError,
    FileTokenStore,
    MemoryTokenStore,
    SigningClient,
    Token,
)
from signing_async.errors import TokenSuperseded
from signing_async.sandbox import Sandbox
from signing_async.sandbox.profile import Profile
from tests.auth.oauth_servers import (
    Received,
    Scripted,
    WatchedStore,
    expired,
    grants,
    in_seconds,
    nearly_expired,
    oauth_for,
    sandbox_oauth,
    secret_of,
)

ROOT = Path(__file__).parents[2]


async def test_refresh_locks_loads_posts_saves_and_unlocks_in_this_order() -> None:
    store = WatchedStore(expired())

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        store.done.append("post")
        return await grants()(request, received)

    async with Scripted(answer) as server, oauth_for(server.base_url, store=store) as oauth:
        await oauth.token()
    assert store.done == ["load", "lock", "load", "post", "save", "unlock"]


async def test_token_superseded_adopts_the_newer_token_of_the_store() -> None:
    class Overtaken(WatchedStore):
        async def save(self, token: Token) -> None:
            if token.access_token == "access-late":
                self._token = Token("access-theirs", "refresh-theirs", in_seconds(3600))
                raise TokenSuperseded("another worker has saved a newer token")
            await super().save(token)

    store = Overtaken(expired())
    async with Scripted(grants("late"), grants("next")) as server, oauth_for(server.base_url, store=store) as oauth:
        assert await oauth.access_token() == "access-theirs"
        assert len(server.requests) == 1
        assert (await oauth.refresh(rejected="access-theirs")).access_token == "access-next"
        assert parse_qs(server.requests[1].body.decode())["refresh_token"] == ["refresh-theirs"]


async def test_new_token_is_not_used_before_it_is_saved() -> None:
    saving, go = asyncio.Event(), asyncio.Event()

    class Late(MemoryTokenStore):
        async def save(self, token: Token) -> None:
            saving.set()
            await go.wait()
            await super().save(token)

    token = Token("access-old", "refresh-old", in_seconds(3600))
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=Late(token)) as oauth:
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
    async with Scripted(grants("1"), grants("2")) as server, oauth_for(server.base_url, store=store) as oauth:
        for _ in range(2):
            with pytest.raises(AuthError, match="the token store failed: OSError"):
                await oauth.access_token()
        kept = await MemoryTokenStore.load(store)
        assert kept is not None
        assert kept.access_token == "access-old"
        assert len(server.requests) == 1
        assert await oauth.access_token() == "access-1"
        assert len(server.requests) == 1
        assert (await oauth.refresh()).access_token == "access-2"


@pytest.mark.parametrize("current", ["none", "stored", "in use"])
async def test_exchanged_token_is_used_as_soon_as_it_can_be_saved(current: str) -> None:
    store = WatchedStore(None if current == "none" else Token("access-old", "refresh-old", in_seconds(3600)))
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=store) as oauth:
        if current == "in use":
            assert await oauth.access_token() == "access-old"
        store.fail_saves = 3
        with pytest.raises(AuthError, match="do not repeat the exchange") as caught:
            await oauth.exchange("code")
        assert (caught.value.transient, caught.value.client_wide, caught.value.fatal) == (False, False, False)
        assert caught.value.effect == "unknown"
        for _ in range(2):
            with pytest.raises(AuthError, match=r"^the token store failed: OSError$"):
                await oauth.access_token()
        assert await asyncio.gather(*(oauth.access_token() for _ in range(3))) == ["access-new"] * 3
        kept = await store.load()
        assert kept is not None
        assert kept.access_token == "access-new"
        assert len(server.requests) == 1


async def test_exchange_whose_lock_cannot_be_acquired_may_be_repeated() -> None:
    class Unavailable(MemoryTokenStore):
        failures = 1

        def lock(self) -> AbstractAsyncContextManager[None]:
            if self.failures:
                self.failures -= 1
                raise ConnectionError
            return super().lock()

    async with Scripted(grants()) as server, oauth_for(server.base_url, store=Unavailable()) as oauth:
        with pytest.raises(AuthError, match=r"^the token store failed: ConnectionError$") as caught:
            await oauth.exchange("code")
        assert caught.value.transient
        assert (await oauth.exchange("code")).access_token == "access-new"


async def test_refresh_adopts_the_newer_token_of_another_process(tmp_path: Path) -> None:
    path = tmp_path / "token.json"
    await FileTokenStore(path).save(Token("access-old", "refresh-old", in_seconds(3600)))
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=FileTokenStore(path)) as oauth:
        old = await oauth.token()
        newer = Token("access-theirs", "refresh-theirs", in_seconds(3600))
        await FileTokenStore(path).save(newer)
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
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=store) as oauth:
        assert await oauth.access_token() == "access-old"
        path.unlink()
        nearly_expired(monkeypatch, passed=3575 if early else 3605)
        results = await asyncio.gather(*(oauth.access_token() for _ in range(5)), return_exceptions=True)
        assert {str(error) for error in results} == {"the token was removed from its store (logout): authorize again"}
        assert {type(error) for error in results} == {AuthError}
        with pytest.raises(AuthError, match="there is no token yet"):
            await oauth.access_token()
        assert not server.requests
        assert not path.exists()
        await store.save(Token("access-other", "refresh-other", in_seconds(7200)))
        assert await oauth.access_token() == "access-other"


@pytest.mark.parametrize("after", ["refresh", "exchange"])
@pytest.mark.parametrize("who", ["oauth", "client"])
async def test_failed_save_is_repeated_on_close(after: str, who: str) -> None:
    store = WatchedStore(expired() if after == "refresh" else None)
    store.fail_saves = 1
    async with Scripted(grants()) as server:
        oauth = oauth_for(server.base_url, store=store)
        client = SigningClient(server.base_url, oauth)
        with pytest.raises(AuthError, match="the token store failed: OSError"):
            await (oauth.access_token() if after == "refresh" else oauth.exchange("code"))
        await (client if who == "client" else oauth).aclose()
        kept = await store.load()
        assert kept is not None
        assert (kept.access_token, kept.refresh_token) == ("access-new", "refresh-new")
        store.done.clear()
        await client.aclose()
        await oauth.aclose()
        assert (store.done, len(server.requests)) == ([], 1)


@pytest.mark.parametrize("who", ["oauth", "client"])
async def test_lost_token_is_raised_and_logged_on_close(who: str, caplog: pytest.LogCaptureFixture) -> None:
    store = WatchedStore(expired())
    store.fail_saves = 2
    async with Scripted(grants()) as server:
        oauth = oauth_for(server.base_url, store=store)
        client = SigningClient(server.base_url, oauth)
        with pytest.raises(AuthError, match="the token store failed: OSError"):
            await oauth.access_token()
        words = r"^a new token could not be saved and is lost .* to authorize again: the token store failed: OSError$"
        with pytest.raises(AuthError, match=words) as caught:
            await (client if who == "client" else oauth).aclose()
        assert caught.value.__context__ is None
        assert (client._shared.sessions if who == "client" else oauth.current.endpoint.sessions).closed
        [logged] = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert logged == str(caught.value)
        await oauth.aclose()
        await client.aclose()
        kept = await store.load()
        assert kept is not None
        assert kept.refresh_token == "refresh-new"
        assert len(server.requests) == 1


async def test_lost_token_is_a_note_of_the_error_that_the_block_raised() -> None:
    store = WatchedStore(expired())
    store.fail_saves = 3
    async with Scripted(grants()) as server:
        with pytest.raises(AuthError, match="the token store failed: OSError") as caught:
            async with oauth_for(server.base_url, store=store) as oauth:
                await oauth.access_token()
        assert "could not be saved and is lost" in caught.value.__notes__[0]
        with pytest.raises(AuthError, match="could not be saved and is lost"):
            async with oauth:
                pass


@pytest.mark.parametrize("stored", [None, "theirs"], ids=["logout", "another process"])
async def test_unsaved_token_does_not_overwrite_a_changed_store_on_close(stored: str | None) -> None:
    store = WatchedStore(expired())
    store.fail_saves = 1
    async with Scripted(grants()) as server:
        async with oauth_for(server.base_url, store=store) as oauth:
            with pytest.raises(AuthError, match="the token store failed: OSError"):
                await oauth.access_token()
            store._token = None if stored is None else expired(stored)
        kept = await store.load()
        assert kept is None if stored is None else kept is not None and kept.access_token == "access-theirs"


async def test_superseded_token_is_not_saved_on_close() -> None:
    class Overtaken(WatchedStore):
        async def save(self, token: Token) -> None:
            self.done.append("save")
            raise TokenSuperseded("another worker has saved a newer token")

    store = Overtaken(expired())
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=store) as oauth:
        with pytest.raises(TokenSuperseded) as caught:
            await oauth.exchange("code")
        assert (caught.value.client_wide, caught.value.fatal, caught.value.effect) == (False, False, "unknown")
    assert store.done.count("save") == 1


@pytest.mark.parametrize(
    ("where", "fault", "transient"),
    [
        ("load", ConnectionError("S3CR3T"), True),
        ("save", PermissionError(13, "S3CR3T"), False),
        ("lock", sqlite3.DatabaseError("S3CR3T"), False),
        ("acquire", LookupError("S3CR3T"), True),
        ("release", ConnectionError("S3CR3T"), True),
    ],
)
async def test_foreign_error_of_a_token_store_is_an_auth_error_that_hides_it(
    where: str, fault: Exception, transient: bool
) -> None:
    class Foreign(MemoryTokenStore):
        failing = True

        def fail_in(self, step: str) -> None:
            if step == where and self.failing:
                raise fault

        async def load(self) -> Token | None:
            self.fail_in("load")
            return await super().load()

        async def save(self, token: Token) -> None:
            self.fail_in("save")
            await super().save(token)

        def lock(self) -> AbstractAsyncContextManager[None]:
            self.fail_in("lock")
            return self._lock_that_fails()

        @contextlib.asynccontextmanager
        async def _lock_that_fails(self) -> AsyncIterator[None]:
            self.fail_in("acquire")
            async with super().lock():
                yield
            self.fail_in("release")

    store = Foreign(expired())
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=store) as oauth:
        with pytest.raises(AuthError, match=rf"^the token store failed: {type(fault).__name__}$") as caught:
            await oauth.access_token()
        assert (caught.value.transient, caught.value.client_wide) == (transient, True)
        assert "S3CR3T" not in "".join(traceback.format_exception(caught.value))
        assert caught.value.__cause__ is caught.value.__context__ is None
        store.failing = False
        assert await oauth.access_token() == "access-new"
        assert len(server.requests) == 1


async def test_lock_that_is_never_released_is_auth_error() -> None:
    store = MemoryTokenStore(expired())
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=store, timeout=0.05) as oauth:
        async with store.lock():
            with pytest.raises(AuthError, match=r"could not acquire the token store's lock within 0\.1 s") as caught:
                await oauth.access_token()
            assert caught.value.__context__ is None
            assert caught.value.transient
        assert not server.requests


async def test_six_processes_make_one_refresh_per_expiry_and_never_reuse_a_refresh_token(tmp_path: Path) -> None:
    seconds, workers = 4.0, 6
    async with Sandbox(seed=5, profile=Profile(access_token_lifetime=1)) as sandbox:
        path = tmp_path / "token.json"
        oauth, code = sandbox_oauth(sandbox, store=FileTokenStore(path))
        async with oauth:
            await oauth.exchange(code())
        command = [
            *(sys.executable, "-m", "tests.auth.oauth_workers", "call"),
            *(str(path), sandbox.base_url, oauth.client_id, secret_of(oauth), str(seconds)),
        ]
        running = [
            await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for _ in range(workers)
        ]
        try:
            for process in running:
                assert process.stdout is not None
                assert await process.stdout.readline() == b"ready\n"
            began = time.monotonic()
            ended = await asyncio.gather(*(process.communicate(b"\n") for process in running))
            took = time.monotonic() - began
        finally:
            for process in running:
                if process.returncode is None:
                    process.kill()
        for process, (_, complaints) in zip(running, ended, strict=True):
            assert process.returncode == 0, complaints.decode()
        tokens = sandbox.requests_of("oauth.token")
        assert {record.status for record in tokens} == {200}
        refreshes = len(tokens) - 1
        # A token that lives one second is replaced after nine tenths of it.
        assert 2 <= refreshes <= took / 0.9 + 1
        used = [int(output.split()[1]) for output, _ in ended]
        assert max(used) > 1
        assert max(used) <= refreshes + 1
        async with oauth_for(
            sandbox.base_url,
            client_id=oauth.client_id,
            client_secret=secret_of(oauth),
            store=FileTokenStore(path),
        ) as again:
            assert (await again.refresh()).refresh_token
