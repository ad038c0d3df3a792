"""Token requests: fields, responses, errors, retries."""

from __future__ import annotations

import asyncio
import json
import socket
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, quote

import pytest

from signing_async import (
    Assumptions,
    AuthError,
    MemoryTokenStore,
    RefreshRejected,
    RequestTimeout,
    RetryPolicy,
    SigningClient,
    SigningError,
    TransportError,
)
from tests.auth.oauth_servers import (
    REDIRECT,
    SECRET,
    Scripted,
    drops,
    expired,
    grants,
    hangs,
    oauth_for,
    raw,
    says,
)


@pytest.fixture
def unused_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("token_format", ["form", "json"])
async def test_exchange_posts_the_documented_fields_as_form_or_json(token_format: Any) -> None:
    async with (
        Scripted(grants()) as server,
        oauth_for(server.base_url, token_format=token_format, client_secret="s&c=r/å t") as oauth,
    ):
        token = await oauth.exchange(f"{REDIRECT}?code={quote('c+ö &/=')}&state=s", state="s")
        [request] = server.requests
    assert (request.method, request.path) == ("POST", "/api/oauth/token")
    assert "Authorization" not in request.headers
    assert request.headers["Accept"] == "application/json"
    if token_format == "json":
        assert request.headers["Content-Type"] == "application/json"
        sent = json.loads(request.body)
    else:
        assert request.headers["Content-Type"] == "application/x-www-form-urlencoded"
        sent = {name: values[0] for name, values in parse_qs(request.body.decode(), strict_parsing=True).items()}
    assert sent == {
        "grant_type": "authorization_code",
        "client_id": "app-1",
        "client_secret": "s&c=r/å t",
        "redirect_uri": REDIRECT,
        "code": "c+ö &/=",
    }
    assert token.access_token == "access-new"
    assert token.refresh_token == "refresh-new"


@pytest.mark.parametrize(
    "callback", ["the-code", " the-code\n", f"{REDIRECT}?code=the-code&state=s", "code=the-code&state=s"]
)
async def test_exchange_accepts_callback_url_query_and_bare_code(callback: str) -> None:
    async with Scripted(grants()) as server, oauth_for(server.base_url) as oauth:
        await oauth.exchange(callback, state="s")
        assert parse_qs(server.requests[0].body.decode())["code"] == ["the-code"]


@pytest.mark.parametrize(
    ("expires_in", "unit", "seconds"),
    [
        (3600, 1, 3600),
        ("3600", 1, 3600),
        (60, 60, 3600),
        (None, 1, None),
        ("soon", 1, None),
        (True, 1, None),
        (1e300, 1, None),
    ],
    ids=lambda value: str(value)[:12],
)
async def test_expires_in_is_read_as_number_in_the_assumed_unit_or_ignored(
    expires_in: Any, unit: float, seconds: float | None
) -> None:
    before = datetime.now(UTC)
    body = json.dumps({"access_token": "a", "expires_in": expires_in})
    async with (
        Scripted(raw(200, body)) as server,
        oauth_for(server.base_url, assumptions=Assumptions(expires_in_seconds=unit)) as oauth,
    ):
        token = await oauth.exchange("code")
        assert await oauth.access_token() == "a"
    if seconds is None:
        assert token.expires_at is None
    else:
        assert token.expires_at is not None
        assert timedelta(0) <= token.expires_at - before - timedelta(seconds=seconds) <= timedelta(seconds=30)


async def test_refresh_posts_the_documented_fields_and_keeps_an_unreplaced_refresh_token() -> None:
    store = MemoryTokenStore(expired())
    async with (
        Scripted(says({"access_token": "access-new", "expires_in": 60})) as server,
        oauth_for(server.base_url, store=store) as oauth,
    ):
        assert await oauth.access_token() == "access-new"
        assert parse_qs(server.requests[0].body.decode(), strict_parsing=True) == {
            "grant_type": ["refresh_token"],
            "client_id": ["app-1"],
            "client_secret": [SECRET],
            "refresh_token": ["refresh-old"],
        }
        kept = await store.load()
        assert kept is not None
        assert kept.refresh_token == "refresh-old"


async def test_429_delays_the_next_token_request() -> None:
    async with (
        Scripted(says({}, 429, **{"Retry-After": "1"}), grants()) as server,
        oauth_for(server.base_url, retry=RetryPolicy.none()) as oauth,
    ):
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(AuthError):
            await oauth.exchange("one")
        await oauth.exchange("two")
        assert loop.time() - began >= 1.0


@pytest.mark.parametrize("retry_after", ["61", "31"], ids=["cap", "deadline"])
async def test_429_with_too_long_retry_after_raises_and_later_requests_are_not_sent(retry_after: str) -> None:
    async with (
        Scripted(says({"error": "slow_down"}, 429, **{"Retry-After": retry_after})) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(expired()), timeout=30) as oauth,
    ):
        with pytest.raises(AuthError) as caught:
            await oauth.access_token()
        assert (caught.value.status, caught.value.retry_after) == (429, float(retry_after))
        with pytest.raises(AuthError, match="it was not sent") as caught:
            await oauth.access_token()
        assert caught.value.status == 429
        assert caught.value.retry_after is not None
        assert 20 < caught.value.retry_after <= 60
        assert len(server.requests) == 1


@pytest.mark.parametrize("kind", ["503", "lost response", "timeout", "refused connection"])
async def test_unavailable_endpoint_is_a_transient_failure_of_every_call(unused_port: int, kind: str) -> None:
    answers = {"503": raw(503), "lost response": drops, "timeout": hangs}
    async with Scripted(answers.get(kind, drops)) as server:
        base_url = f"http://127.0.0.1:{unused_port}" if kind == "refused connection" else server.base_url
        store = MemoryTokenStore(expired())
        async with (
            oauth_for(base_url, store=store, timeout=0.2 if kind == "timeout" else 20) as oauth,
            SigningClient(base_url, oauth) as client,
        ):
            with pytest.raises(SigningError, match=r"oauth\.refresh") as caught:
                await client.me()
    error = caught.value
    assert (error.transient, error.client_wide, error.fatal) == (True, True, False)


async def test_lost_response_is_retried_once() -> None:
    async with (
        Scripted(drops, grants()) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(expired())) as oauth,
    ):
        assert await oauth.access_token() == "access-new"
        assert len(server.requests) == 2
    async with (
        Scripted(drops) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(expired())) as oauth,
    ):
        with pytest.raises(TransportError, match=r"oauth\.refresh: the connection was closed") as caught:
            await oauth.access_token()
        assert caught.value.attempts == 2
        assert len(server.requests) == 2


async def test_token_request_without_response_within_timeout_is_request_timeout() -> None:
    """An endpoint that hangs gets one request, and the token is not touched."""
    store = MemoryTokenStore(expired())
    async with Scripted(hangs) as server, oauth_for(server.base_url, store=store, timeout=0.2) as oauth:
        with pytest.raises(RequestTimeout, match=r"^oauth\.refresh: no .* 0\.2 s") as caught:
            await oauth.access_token()
        assert (caught.value.operation, caught.value.attempts) == ("oauth.refresh", 1)
        assert len(server.requests) == 1
        kept = await store.load()
        assert kept is not None
        assert kept.access_token == "access-old"


@pytest.mark.parametrize(
    ("answer", "kind", "code"),
    [
        (says({"error": "invalid_grant", "error_description": "gone"}, 400), RefreshRejected, "invalid_grant"),
        (says({"error": "invalid_grant", "code": 400}, 400), RefreshRejected, "invalid_grant"),
        (says({"error": {"code": "invalid_grant", "message": "gone"}}, 400), RefreshRejected, "invalid_grant"),
        (says({"error": "INVALID_GRANT"}, 400), RefreshRejected, "INVALID_GRANT"),
        (says({"error": "", "code": "invalid_client"}, 401), AuthError, "invalid_client"),
        (raw(403, b""), AuthError, None),
        (raw(302, b"", Location="https://elsewhere.example.com/"), AuthError, None),
        (raw(404, "<html><title>Not here</title>"), AuthError, None),
    ],
    ids=range(8),
)
async def test_refused_refresh_token_is_refresh_rejected_and_other_refusals_are_auth_errors(
    answer: Any, kind: type[AuthError], code: str | None
) -> None:
    store = MemoryTokenStore(expired())
    async with Scripted(answer) as server, oauth_for(server.base_url, store=store) as oauth:
        with pytest.raises(AuthError, match=r"^HTTP \d+ on oauth\.refresh") as caught:
            await oauth.access_token()
        assert type(caught.value) is kind
        assert caught.value.code == code
        assert len(server.requests) == 1
        kept = await store.load()
        assert kept is not None
        assert kept.refresh_token == "refresh-old"


async def test_codes_that_reject_a_refresh_token_can_be_replaced() -> None:
    assumptions = Assumptions(refresh_rejected_codes=["Invalid_Request"])
    answers = (says({"error": "invalid_grant"}, 400), says({"error": "invalid_request"}, 401))
    store = MemoryTokenStore(expired())
    async with (
        Scripted(*answers) as server,
        oauth_for(server.base_url, store=store, assumptions=assumptions) as oauth,
    ):
        with pytest.raises(AuthError) as caught:
            await oauth.access_token()
        assert type(caught.value) is AuthError
        for _ in range(3):
            with pytest.raises(RefreshRejected):
                await oauth.access_token()
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    "answer",
    [
        raw(200, b""),
        raw(200, b"<html>Hello</html>"),
        says([]),
        says({}, request_id="r-1"),
        says({"access_token": "a\nb"}),
        says({"access_token": "a", "refresh_token": 5}),
        raw(204),
    ],
    ids=range(7),
)
async def test_success_without_token_is_auth_error_and_not_retried(answer: Any) -> None:
    async with Scripted(answer) as server, oauth_for(server.base_url) as oauth:
        with pytest.raises(
            AuthError, match=r"^oauth\.exchange: the response holds no usable token \(HTTP 20[04](, request id r-1)?\)$"
        ) as caught:
            await oauth.exchange("code")
        assert caught.value.status in {200, 204}
        assert len(server.requests) == 1
