"""Single-flight refresh: one for all callers, early, forced, cancelled, rejected."""

from __future__ import annotations

import asyncio

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
    Slow,
    WatchedStore,
    expired,
    grants,
    in_seconds,
    let_pass,
    oauth_for,
    oauth_on,
    refresh_token_in,
    sandbox_oauth,
    says,
    warnings_in,
)


async def test_cancelled_exchange_still_saves_its_token() -> None:
    store, slow = MemoryTokenStore(), Slow(grants())
    async with oauth_on(slow, store=store) as (oauth, _):
        task = asyncio.create_task(oauth.exchange("code"))
        await slow.begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        slow.go.set()
        await oauth.settle()
        assert await oauth.access_token() == "access-new"
        assert await refresh_token_in(store) == "refresh-new"


async def test_calls_before_authorization_raise_auth_error_without_a_request() -> None:
    async with oauth_on(grants()) as (oauth, server):
        for call in (oauth.access_token, oauth.refresh):
            with pytest.raises(AuthError, match=r"no token is stored: .*authorization_request\(\)\.url.*exchange\(\)"):
                await call()
        assert not server.requests


async def test_stored_token_of_another_tenant_is_refused() -> None:
    store = MemoryTokenStore(Token("access", origin="https://x.com:8443"))
    async with oauth_for("https://x.com", store=store) as oauth:
        with pytest.raises(AuthError, match=r"^the stored token is for https://x\.com:8443, not for https://x\.com: "):
            await oauth.access_token()
        await store.save(Token("access", origin="https://x.com"))
        assert await oauth.access_token() == "access"


@pytest.mark.parametrize(
    ("lifetime", "passed", "refreshed"),
    [(None, 0, False), (28, 20, False), (28, 27, True), (3600, 3560, False), (3600, 3575, True), (3600, 3700, True)],
)
async def test_token_is_refreshed_in_the_last_30_seconds_or_the_last_tenth_of_its_lifetime(
    lifetime: float | None, passed: float, refreshed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = Token("access-old", "refresh-old", None if lifetime is None else in_seconds(lifetime))
    async with oauth_on(grants(), token=token) as (oauth, _):
        assert await oauth.access_token() == "access-old"
        let_pass(monkeypatch, passed)
        assert await oauth.access_token() == ("access-new" if refreshed else "access-old")


async def test_token_without_refresh_token_is_used_until_it_expires(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with oauth_on(grants(), token=Token("access-old", None, in_seconds(100))) as (oauth, server):
        assert await oauth.access_token() == "access-old"
        let_pass(monkeypatch, 95)
        assert await oauth.access_token() == "access-old"
        assert not warnings_in(caplog)
        let_pass(monkeypatch, 10)
        with pytest.raises(AuthError, match="no refresh token; authorize again"):
            await oauth.access_token()
        assert not server.requests


async def test_200_concurrent_calls_with_rejected_token_make_one_refresh(sandbox: Sandbox) -> None:
    """A token that is rejected again after the refresh is not refreshed once more."""
    oauth, code = sandbox_oauth(sandbox)
    async with oauth, SigningClient(sandbox.base_url, oauth) as client:
        await oauth.exchange(code())
        sandbox.clock.advance(hours=2)
        users = await asyncio.gather(*(client.me() for _ in range(200)))
        assert len(users) == 200
        assert len(sandbox.requests_of("oauth.token")) == 2
        assert [record.status for record in sandbox.requests_of("me")].count(200) == 200
        before = len(sandbox.requests_of("me"))
        sandbox.faults.add("me", "expired-token", times=None)
        with pytest.raises(Unauthorized):
            await client.me()
        assert len(sandbox.requests_of("oauth.token")) == 3
        assert len(sandbox.requests_of("me")) == before + 2


@pytest.mark.parametrize("cancelled", [[0, 3], list(range(7))], ids=str)
async def test_cancelled_caller_stops_neither_the_refresh_nor_other_callers(cancelled: list[int]) -> None:
    store, slow = MemoryTokenStore(expired()), Slow(grants())
    async with oauth_on(slow, store=store) as (oauth, server):
        tasks = [asyncio.create_task(oauth.access_token()) for _ in range(7)]
        await slow.begun.wait()
        for number in cancelled:
            tasks[number].cancel()
        await asyncio.sleep(0)
        slow.go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await oauth.settle()
        for number, result in enumerate(results):
            assert isinstance(result, asyncio.CancelledError) if number in cancelled else result == "access-new"
        assert await refresh_token_in(store) == "refresh-new"
        assert await oauth.access_token() == "access-new"
        assert len(server.requests) == 1


async def test_failed_refresh_raises_a_separate_error_for_each_caller_and_is_not_cached() -> None:
    async with oauth_on(says({"error": "invalid_client"}, 401), grants(), token=expired()) as (oauth, server):
        errors = await asyncio.gather(*(oauth.token() for _ in range(20)), return_exceptions=True)
        assert {type(error) for error in errors} == {AuthError}
        assert {str(error) for error in errors} == {str(errors[0])}
        assert len({id(error) for error in errors}) == 20
        assert len(server.requests) == 1
        assert await oauth.access_token() == "access-new"


async def test_refresh_is_keyed_on_the_rejected_token() -> None:
    store = WatchedStore(expired("0"))
    async with oauth_on(grants("1"), grants("2"), grants("3"), store=store) as (oauth, server):
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
    async with oauth_on(slow, grants("3"), token=expired("0")) as (oauth, server):
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
    store, no = MemoryTokenStore(Token("access-old")), says({"message": "no"}, 401)
    async with (
        oauth_on(no, no, says({"id": "u"}), store=store) as (oauth, server),
        SigningClient(server.base_url, oauth) as client,
    ):
        with pytest.raises(Unauthorized):
            await client.me()
        await store.save(Token("access-newer"))
        await client.me()
        sent = [received.headers["Authorization"].removeprefix("Bearer ") for received in server.requests]
        assert sent == ["access-old", "access-old", "access-newer"]


async def test_failed_early_refresh_returns_the_old_token_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    responses = grants("old"), says({"error": "server_error"}, 503)
    async with oauth_on(*responses, retry=RetryPolicy.none()) as (oauth, server):
        await oauth.exchange("code")
        let_pass(monkeypatch, 3580)
        tokens = await asyncio.gather(*(oauth.access_token() for _ in range(50)))
        assert {*tokens, await oauth.access_token()} == {"access-old"}
        assert len(server.requests) == 2
        (warned,) = warnings_in(caplog)
        assert "HTTP 503" in warned
        let_pass(monkeypatch, 11)
        assert await oauth.access_token() == "access-old"
        assert len(server.requests) == 3
        let_pass(monkeypatch, 10)
        with pytest.raises(AuthError, match="HTTP 503"):
            await oauth.access_token()


async def test_slow_early_refresh_returns_the_old_token_and_completes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """After half of the token's remaining time."""
    slow = Slow(grants())
    async with oauth_on(grants("old"), slow) as (oauth, server):
        await oauth.exchange("code")
        let_pass(monkeypatch, 3599)
        async with asyncio.timeout(5):
            assert set(await asyncio.gather(*(oauth.access_token() for _ in range(20)))) == {"access-old"}
        slow.go.set()
        await oauth.settle()
        assert await oauth.access_token() == "access-new"
        assert len(server.requests) == 2


async def test_rejected_refresh_token_is_sent_once_until_the_store_holds_another() -> None:
    store = MemoryTokenStore(expired())
    responses = [says({"error": "invalid_grant"}, 400, request_id="req-9"), grants("1"), says({"error": "x"}, 400)]
    async with oauth_on(*responses, store=store) as (oauth, server):
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


async def test_invalid_grant_with_a_transient_status_is_not_final() -> None:
    responses = says({"error": "invalid_grant"}, 503), grants()
    async with oauth_on(*responses, token=expired(), retry=RetryPolicy.none()) as (oauth, _):
        with pytest.raises(AuthError, match="invalid_grant") as caught:
            await oauth.access_token()
        assert type(caught.value) is AuthError
        assert await oauth.access_token() == "access-new"


async def test_slow_load_does_not_overwrite_a_newer_token() -> None:
    release = asyncio.Event()

    class Late(MemoryTokenStore):
        async def load(self) -> Token | None:
            kept = await super().load()
            await release.wait()
            return kept

    store = Late(Token("access-old", "refresh-old", in_seconds(3600)))
    async with oauth_on(grants(), store=store) as (oauth, server):
        loading = asyncio.create_task(oauth.token())
        await asyncio.sleep(0)
        await oauth.exchange("code")
        release.set()
        assert (await loading).access_token == "access-new"
        assert len(server.requests) == 1
