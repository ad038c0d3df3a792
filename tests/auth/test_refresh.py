"""Single-flight refresh: one for all callers, early, forced, cancelled, rejected."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from signing_async import (
    AuthError,
    MemoryTokenStore,
    RefreshRejected,
    RetryPolicy,
    SigningClient,
    Token,
    Unauthorized,
)
from signing_async.sandbox import Sandbox
from tests.auth.oauth_servers import (
    Scripted,
    Slow,
    WatchedStore,
    expired,
    grants,
    in_seconds,
    nearly_expired,
    oauth_for,
    sandbox_oauth,
    says,
)


async def test_cancelled_exchange_still_saves_its_token() -> None:
    store, slow = MemoryTokenStore(), Slow(grants())
    async with Scripted(slow) as server, oauth_for(server.base_url, store=store) as oauth:
        task = asyncio.create_task(oauth.exchange("code"))
        await slow.begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        slow.go.set()
        await oauth.settle()
        assert await oauth.access_token() == "access-new"
        assert await store.load() is not None


async def test_calls_before_authorization_raise_auth_error_without_a_request() -> None:
    async with Scripted(grants()) as server, oauth_for(server.base_url) as oauth:
        for call in (oauth.access_token, oauth.refresh):
            with pytest.raises(AuthError, match=r"no token is stored: .*authorization_request\(\)\.url.*exchange\(\)"):
                await call()
        assert not server.requests


@pytest.mark.parametrize("origin", ["https://y.com", "https://x.com:8443", "http://x.com"])
async def test_stored_token_of_another_tenant_is_refused(origin: str) -> None:
    store = MemoryTokenStore(Token("access", origin=origin))
    async with oauth_for("https://x.com", store=store) as oauth:
        with pytest.raises(AuthError, match=rf"^the stored token is for {origin}, not for https://x\.com: use another"):
            await oauth.access_token()
        await store.save(Token("access", origin="https://x.com"))
        assert await oauth.access_token() == "access"


@pytest.mark.parametrize(
    ("lifetime", "refreshed"), [(3600, False), (100, False), (28, False), (5, False), (-1, True), (None, False)]
)
async def test_stored_token_is_refreshed_only_after_expiry(lifetime: float | None, refreshed: bool) -> None:
    token = Token("access-old", "refresh-old", None if lifetime is None else in_seconds(lifetime))
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=MemoryTokenStore(token)) as oauth:
        assert await oauth.access_token() == ("access-new" if refreshed else "access-old")


async def test_token_without_refresh_token_is_used_until_it_expires(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    token = Token("access-old", None, in_seconds(100))
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=MemoryTokenStore(token)) as oauth:
        assert await oauth.access_token() == "access-old"
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 95)
        assert await oauth.access_token() == "access-old"
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        monkeypatch.setattr(time, "time", lambda: now() + 105)
        with pytest.raises(AuthError, match="no refresh token; authorize again"):
            await oauth.access_token()
        assert not server.requests


async def test_200_concurrent_calls_with_rejected_token_make_one_refresh(sandbox: Sandbox) -> None:
    oauth, code = sandbox_oauth(sandbox)
    async with oauth, SigningClient(sandbox.base_url, oauth) as client:
        await oauth.exchange(code())
        sandbox.clock.advance(hours=2)
        users = await asyncio.gather(*(client.me() for _ in range(200)))
        assert len(users) == 200
        assert len(sandbox.requests_of("oauth.token")) == 2
        assert [record.status for record in sandbox.requests_of("me")].count(200) == 200


@pytest.mark.parametrize("cancelled", [[0], [1, 3], list(range(7))], ids=str)
async def test_cancelled_caller_stops_neither_the_refresh_nor_other_callers(cancelled: list[int]) -> None:
    store, slow = MemoryTokenStore(expired()), Slow(grants())
    async with Scripted(slow) as server, oauth_for(server.base_url, store=store) as oauth:
        tasks = [asyncio.create_task(oauth.token()) for _ in range(7)]
        await slow.begun.wait()
        for number in cancelled:
            tasks[number].cancel()
        await asyncio.sleep(0)
        slow.go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await oauth.settle()
        for number, result in enumerate(results):
            if number in cancelled:
                assert isinstance(result, asyncio.CancelledError)
            else:
                assert isinstance(result, Token)
                assert result.access_token == "access-new"
        kept = await store.load()
        assert kept is not None
        assert kept.access_token == "access-new"
        assert await oauth.access_token() == "access-new"
        assert len(server.requests) == 1


async def test_failed_refresh_raises_a_separate_error_for_each_caller_and_is_not_cached() -> None:
    async with (
        Scripted(says({"error": "invalid_client"}, 401), grants()) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(expired())) as oauth,
    ):
        errors = await asyncio.gather(*(oauth.token() for _ in range(20)), return_exceptions=True)
        assert {type(error) for error in errors} == {AuthError}
        assert {str(error) for error in errors} == {str(errors[0])}
        assert len({id(error) for error in errors}) == 20
        assert len(server.requests) == 1
        assert await oauth.access_token() == "access-new"


async def test_cancelled_refresh_task_is_auth_error_for_its_callers(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow(grants())
    async with (
        Scripted(slow, grants()) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(expired())) as oauth,
    ):
        task = asyncio.create_task(oauth.token())
        await slow.begun.wait()
        [refresh] = [task for task in asyncio.all_tasks() if task.get_name() == "signing_async token refresh"]
        refresh.cancel()
        with pytest.raises(AuthError, match=r"^the token request was cancelled$") as caught:
            await task
        assert caught.value.transient
        slow.go.set()
        assert await oauth.access_token() == "access-new"
    assert not [record for record in caplog.records if record.name == "asyncio" and record.levelno >= logging.ERROR]


async def test_refresh_is_keyed_on_the_rejected_token() -> None:
    store = WatchedStore(expired("0"))
    async with (
        Scripted(grants("1"), grants("2"), grants("3")) as server,
        oauth_for(server.base_url, store=store) as oauth,
    ):
        first = await oauth.refresh(rejected="access-0")
        assert first.access_token == "access-1"
        store.done.clear()
        assert (await oauth.refresh(rejected=Token("access-0"))).access_token == "access-1"
        assert (await oauth.refresh(rejected="access-0")).access_token == "access-1"
        assert len(server.requests) == 1
        assert not store.done
        assert (await oauth.refresh(rejected=first)).access_token == "access-2"
        assert (await oauth.refresh()).access_token == "access-3"
        assert len(server.requests) == 3


async def test_caller_that_rejects_the_new_token_gets_a_second_refresh() -> None:
    slow = Slow(grants("2"))
    store = MemoryTokenStore(expired("0"))
    async with Scripted(slow, grants("3")) as server, oauth_for(server.base_url, store=store) as oauth:
        first = asyncio.create_task(oauth.refresh(rejected="access-0"))
        await slow.begun.wait()
        second = asyncio.create_task(oauth.refresh(rejected="access-2"))
        third = asyncio.create_task(oauth.refresh(rejected="access-0"))
        await asyncio.sleep(0)
        slow.go.set()
        assert (await first).access_token == "access-2"
        assert (await second).access_token == "access-3"
        assert (await third).access_token in {"access-2", "access-3"}
        assert len(server.requests) == 2


async def test_rejected_token_without_refresh_token_is_unauthorized_unless_the_store_has_another() -> None:
    store = MemoryTokenStore(Token("access-old"))
    async with (
        Scripted(says({"message": "no"}, 401), says({"message": "no"}, 401), says({"id": "u"})) as server,
        oauth_for(server.base_url, store=store) as oauth,
        SigningClient(server.base_url, oauth) as client,
    ):
        with pytest.raises(Unauthorized):
            await client.me()
        await store.save(Token("access-newer"))
        await client.me()
        assert [received.headers["Authorization"] for received in server.requests] == [
            "Bearer access-old",
            "Bearer access-old",
            "Bearer access-newer",
        ]


async def test_failed_early_refresh_returns_the_old_token_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        Scripted(grants("old"), says({"error": "server_error"}, 503)) as server,
        oauth_for(server.base_url, retry=RetryPolicy.none()) as oauth,
    ):
        await oauth.exchange("code")
        nearly_expired(monkeypatch)
        tokens = await asyncio.gather(*(oauth.access_token() for _ in range(50)))
        assert set(tokens) == {"access-old"}
        assert await oauth.access_token() == "access-old"
        assert len(server.requests) == 2
        warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warned) == 1
        assert "HTTP 503" in warned[0]
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 11)
        assert await oauth.access_token() == "access-old"
        assert len(server.requests) == 3
        monkeypatch.setattr(time, "time", lambda: now() + 21)
        with pytest.raises(AuthError, match="HTTP 503"):
            await oauth.access_token()


async def test_slow_early_refresh_returns_the_old_token_and_completes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(grants())
    monkeypatch.setattr("signing_async.auth.refresh._EARLY_REFRESH_TIMEOUT", 0.05)
    async with Scripted(grants("old"), slow) as server, oauth_for(server.base_url) as oauth:
        await oauth.exchange("code")
        nearly_expired(monkeypatch)
        async with asyncio.timeout(5):
            assert set(await asyncio.gather(*(oauth.access_token() for _ in range(20)))) == {"access-old"}
        slow.go.set()
        await oauth.settle()
        assert await oauth.access_token() == "access-new"
        assert len(server.requests) == 2


async def test_rejected_refresh_token_is_sent_once_until_the_store_holds_another() -> None:
    store = MemoryTokenStore(expired())
    answers = [says({"error": "invalid_grant"}, 400, request_id="req-9"), grants("1"), says({"error": "x"}, 400)]
    async with Scripted(*answers) as server, oauth_for(server.base_url, store=store) as oauth:
        rejections = []
        for _ in range(50):
            with pytest.raises(RefreshRejected, match="invalid_grant") as caught:
                await oauth.access_token()
            rejections.append(caught.value)
        assert len(server.requests) == 1
        assert {(error.code, error.request_id, str(error)) for error in rejections} == {
            ("invalid_grant", "req-9", str(rejections[0]))
        }
        assert len({id(error) for error in rejections}) == 50
        await store.save(expired("authorized-again"))
        assert await oauth.access_token() == "access-1"
        assert len(server.requests) == 2
        for _ in range(2):
            with pytest.raises(AuthError, match="code x"):
                await oauth.refresh()
        assert len(server.requests) == 4


@pytest.mark.parametrize("status", [429, 503])
async def test_invalid_grant_with_429_or_5xx_is_not_final(status: int) -> None:
    answers = [says({"error": "invalid_grant"}, status), grants()]
    async with (
        Scripted(*answers) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(expired()), retry=RetryPolicy.none()) as oauth,
    ):
        with pytest.raises(AuthError, match="invalid_grant") as caught:
            await oauth.access_token()
        assert type(caught.value) is AuthError
        assert await oauth.access_token() == "access-new"


@pytest.mark.parametrize(("passed", "refreshed"), [(0, False), (3560, False), (3575, True), (3700, True)])
async def test_one_hour_token_is_refreshed_in_its_last_30_seconds(
    passed: float, refreshed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Scripted(grants("first"), grants("second")) as server, oauth_for(server.base_url) as oauth:
        await oauth.exchange("code")
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + passed)
        assert await oauth.access_token() == ("access-second" if refreshed else "access-first")


async def test_token_rejected_again_after_refresh_is_unauthorized(sandbox: Sandbox) -> None:
    oauth, code = sandbox_oauth(sandbox)
    async with oauth, SigningClient(sandbox.base_url, oauth) as client:
        await oauth.exchange(code())
        sandbox.faults.add("me", "expired-token", times=None)
        with pytest.raises(Unauthorized):
            await client.me()
        assert len(sandbox.requests_of("oauth.token")) == 2
        assert len(sandbox.requests_of("me")) == 2


async def test_slow_load_does_not_overwrite_a_newer_token() -> None:
    release = asyncio.Event()

    class Late(MemoryTokenStore):
        async def load(self) -> Token | None:
            kept = await super().load()
            await release.wait()
            return kept

    old = Token("access-old", "refresh-old", in_seconds(3600))
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=Late(old)) as oauth:
        loading = asyncio.create_task(oauth.token())
        await asyncio.sleep(0)
        await oauth.exchange("code")
        release.set()
        assert (await loading).access_token == "access-new"
        assert len(server.requests) == 1
