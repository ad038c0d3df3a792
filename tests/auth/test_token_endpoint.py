"""Token requests: fields, responses, errors, retries."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qsl, quote

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
    drops,
    expired,
    grants,
    hangs,
    oauth_for,
    oauth_on,
    raw,
    refresh_token_in,
    says,
)
from tests.redis.server import free_port


@pytest.mark.parametrize(
    ("callback", "token_format", "code"),
    [
        (f"{REDIRECT}?code={quote('c+ö &/=')}&state=s", "form", "c+ö &/="),
        ("code=the-code&state=s", "json", "the-code"),
        (" the-code\n", "form", "the-code"),
    ],
    ids=["URL", "query", "bare code"],
)
async def test_exchange_posts_the_documented_fields_as_form_or_json(
    callback: str, token_format: Any, code: str
) -> None:
    async with oauth_on(grants(), token_format=token_format, client_secret="s&c=r/å t") as (oauth, server):
        token = await oauth.exchange(callback, state="s")
        [request] = server.requests
    assert (request.method, request.path) == ("POST", "/api/oauth/token")
    assert "Authorization" not in request.headers
    assert request.headers["Accept"] == "application/json"
    if token_format == "json":
        assert request.headers["Content-Type"] == "application/json"
        sent = json.loads(request.body)
    else:
        assert request.headers["Content-Type"] == "application/x-www-form-urlencoded"
        sent = dict(parse_qsl(request.body.decode(), strict_parsing=True))
    assert sent == {
        "grant_type": "authorization_code",
        "client_id": "app-1",
        "client_secret": "s&c=r/å t",
        "redirect_uri": REDIRECT,
        "code": code,
    }
    assert (token.access_token, token.refresh_token) == ("access-new", "refresh-new")


@pytest.mark.parametrize(
    ("expires_in", "unit", "seconds"),
    [
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
    async with oauth_on(raw(200, body), assumptions=Assumptions(expires_in_seconds=unit)) as (oauth, _):
        token = await oauth.exchange("code")
        assert await oauth.access_token() == "a"
    if seconds is None:
        assert token.expires_at is None
    else:
        assert token.expires_at is not None
        assert timedelta(0) <= token.expires_at - before - timedelta(seconds=seconds) <= timedelta(seconds=30)


async def test_refresh_posts_the_documented_fields_and_keeps_an_unreplaced_refresh_token() -> None:
    """A lost response is retried."""
    store = MemoryTokenStore(expired())
    async with oauth_on(drops, says({"access_token": "access-new", "expires_in": 60}), store=store) as (oauth, server):
        assert await oauth.access_token() == "access-new"
        assert len(server.requests) == 2
        assert dict(parse_qsl(server.requests[1].body.decode(), strict_parsing=True)) == {
            "grant_type": "refresh_token",
            "client_id": "app-1",
            "client_secret": SECRET,
            "refresh_token": "refresh-old",
        }
        assert await refresh_token_in(store) == "refresh-old"


async def test_429_delays_the_next_token_request() -> None:
    async with oauth_on(says({}, 429, **{"Retry-After": "0.3"}), grants(), retry=RetryPolicy.none()) as (oauth, _):
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(AuthError):
            await oauth.exchange("one")
        await oauth.exchange("two")
        assert loop.time() - began >= 0.3


@pytest.mark.parametrize("retry_after", ["61", "31"], ids=["cap", "deadline"])
async def test_429_with_too_long_retry_after_raises_and_later_requests_are_not_sent(retry_after: str) -> None:
    response = says({"error": "slow_down"}, 429, **{"Retry-After": retry_after})
    async with oauth_on(response, token=expired(), timeout=30) as (oauth, server):
        with pytest.raises(AuthError) as caught:
            await oauth.access_token()
        assert (caught.value.status, caught.value.retry_after) == (429, float(retry_after))
        with pytest.raises(AuthError, match="it was not sent") as caught:
            await oauth.access_token()
        assert caught.value.status == 429
        assert caught.value.retry_after is not None
        assert 20 < caught.value.retry_after <= 60
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("response", "kind", "words", "requests"),
    [
        (raw(503), AuthError, r"^HTTP 503 on oauth\.refresh", 5),
        (drops, TransportError, r"^oauth\.refresh: the connection was closed", 2),
        (hangs, RequestTimeout, r"^oauth\.refresh: no .* 0\.2 s", 1),
        (None, TransportError, r"^oauth\.refresh: ", 0),
    ],
    ids=["503", "lost response", "timeout", "refused connection"],
)
async def test_unavailable_endpoint_is_a_transient_failure_of_every_call(
    response: Any, kind: type[SigningError], words: str, requests: int
) -> None:
    """A lost response is retried once, a timeout is not. The token is not touched."""
    store, timeout = MemoryTokenStore(expired()), 0.2 if response is hangs else 20
    async with oauth_on(response or grants(), store=store, timeout=timeout) as (oauth, server):
        base_url = server.base_url if response else f"http://127.0.0.1:{free_port()}"
        async with (
            oauth_for(base_url, store=store, timeout=timeout) as oauth,
            SigningClient(base_url, oauth) as client,
        ):
            with pytest.raises(kind, match=words) as caught:
                await client.me()
        assert len(server.requests) == requests
    error = caught.value
    assert (error.transient, error.client_wide, error.fatal) == (True, True, False)
    assert await refresh_token_in(store) == "refresh-old"


@pytest.mark.parametrize(
    ("response", "kind", "code"),
    [
        (says({"error": {"code": "invalid_grant", "message": "gone"}}, 400), RefreshRejected, "invalid_grant"),
        (says({"error": "INVALID_GRANT"}, 400), RefreshRejected, "INVALID_GRANT"),
        (says({"error": "", "code": "invalid_client"}, 401), AuthError, "invalid_client"),
        (raw(302, b"", Location="https://elsewhere.example.com/"), AuthError, None),
        (raw(404, "<html><title>Not here</title>"), AuthError, None),
    ],
    ids=range(5),
)
async def test_refused_refresh_token_is_refresh_rejected_and_other_refusals_are_auth_errors(
    response: Any, kind: type[AuthError], code: str | None
) -> None:
    store = MemoryTokenStore(expired())
    async with oauth_on(response, store=store) as (oauth, server):
        with pytest.raises(AuthError, match=r"^HTTP \d+ on oauth\.refresh") as caught:
            await oauth.access_token()
        assert (type(caught.value), caught.value.code) == (kind, code)
        assert len(server.requests) == 1
        assert await refresh_token_in(store) == "refresh-old"


async def test_codes_that_reject_a_refresh_token_can_be_replaced() -> None:
    assumptions = Assumptions(refresh_rejected_codes=["Invalid_Request"])
    responses = says({"error": "invalid_grant"}, 400), says({"error": "invalid_request"}, 401)
    async with oauth_on(*responses, token=expired(), assumptions=assumptions) as (oauth, server):
        with pytest.raises(AuthError) as caught:
            await oauth.access_token()
        assert type(caught.value) is AuthError
        for _ in range(3):
            with pytest.raises(RefreshRejected):
                await oauth.access_token()
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    "response",
    [
        raw(200, b"<html>Hello</html>"),
        says([]),
        says({}, request_id="r-1"),
        says({"access_token": "a", "refresh_token": 5}),
        raw(204),
    ],
    ids=range(5),
)
async def test_success_without_token_is_auth_error_and_not_retried(response: Any) -> None:
    words = r"^oauth\.exchange: the response holds no usable token \(HTTP 20[04](, request id r-1)?\)$"
    async with oauth_on(response) as (oauth, server):
        with pytest.raises(AuthError, match=words) as caught:
            await oauth.exchange("code")
        assert caught.value.status in {200, 204}
        assert len(server.requests) == 1
