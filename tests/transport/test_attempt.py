"""One attempt: tokens that are rejected, redirects, hostile responses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web

from signing_async import (
    Assumptions,
    Attempt,
    DecodeError,
    LocalRateLimiter,
    RateLimited,
    RequestTimeout,
    RetryPolicy,
    ServerError,
    SigningClient,
    Token,
    TransportError,
)
from signing_async.sandbox import Profile, Sandbox
from tests.auth.oauth_servers import grants, oauth_on, sandbox_oauth, says
from tests.pdfs import make_pdf
from tests.servers import answering, echo, serving

QUICK = RetryPolicy(base_delay=0.01, settle=0.1)


# Tokens


async def test_rejected_token_is_refreshed_and_the_request_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    """An upload with its whole body; the policy need not allow a retry. The hook and the log are told."""
    seen: list[Attempt] = []
    options: Any = {"retry": RetryPolicy.none(), "assumptions": Assumptions(expired_token_statuses=403)}
    async with Sandbox(profile=Profile(expired_token_status=403)) as sandbox:
        oauth, code = sandbox_oauth(sandbox)
        async with oauth, SigningClient(sandbox.base_url, oauth, on_attempt=seen.append, **options) as client:
            await oauth.exchange(code())
            tokens = [await oauth.access_token()]
            sandbox.clock.advance(days=1)
            with caplog.at_level(logging.DEBUG, "signing_async"):
                signing = await client.signings.create(name="x", language="EN")
            tokens.append(await oauth.access_token())
            refresh, rejected, succeeded = seen
            sandbox.clock.advance(days=1)
            document = await client.documents.upload(signing, make_pdf(), "a.pdf")
            assert sandbox.document_bytes(document.id) == make_pdf()
    assert tokens[0] != tokens[1]
    assert (refresh.operation, refresh.attempt, refresh.status, refresh.error) == ("oauth.refresh", 1, 200, None)
    assert (rejected.attempt, rejected.status, rejected.delay) == (1, 403, 0.0)
    assert rejected.error == "the token was rejected and has been refreshed"
    assert (succeeded.attempt, succeeded.status, succeeded.error) == (2, 201, None)
    assert {record.levelno for record in caplog.records if record.name == "signing_async"} == {logging.DEBUG}
    assert "signings.create attempt 1: 403" in caplog.text
    assert not any(token in caplog.text + repr(seen) for token in tokens)


# Redirects


async def test_get_follows_redirects_to_its_own_origin_with_the_token() -> None:
    async def handle(request: web.Request) -> web.Response:
        if request.path == "/api/1.0/me":
            raise web.HTTPTemporaryRedirect("/api/1.0/elsewhere?who=me")
        if request.query.get("who") == "me":
            raise web.HTTPFound(f"http://{request.host}/final")
        return web.json_response({"id": "1", "authorization": request.headers["Authorization"]})

    async with serving(handle) as server, SigningClient(server.origin, "tok-en") as client:
        assert (await client.me()).extra == {"authorization": "Bearer tok-en"}


# Hostile responses


async def test_record_with_an_unusable_id_is_a_decode_error() -> None:
    raw = b'HTTP/1.1 201 Created\r\nContent-Length: 12\r\n\r\n{"id": ".."}'
    async with answering(raw) as origin, SigningClient(origin, "token") as client:
        with pytest.raises(DecodeError, match="id: "):
            await client.signings.create(name="x", language="EN")


_OK, _BODY = b"HTTP/1.1 200 OK\r\n", b'Content-Length: 11\r\n\r\n{"id": "u"}'


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (b"garbage\r\n\r\n", "it is not valid HTTP"),
        (_OK + b"Content-Length: nonsense\r\n\r\n", "it is not valid HTTP"),
        (_OK + b"X: " + b"t0k3n-value" * 10_000 + b"\r\n" + _BODY, "a header is longer than 64 KiB"),
        (_OK + b"".join(b"X%d: a\r\n" % n for n in range(600)) + _BODY, "it has more than 500 headers"),
        (_OK + b"Content-Encoding: br\r\n" + _BODY, "its Content-Encoding is none of gzip, deflate"),
    ],
    ids=["garbage", "length", "long header", "many headers", "encoding"],
)
async def test_response_that_cannot_be_parsed_is_permanent_and_says_why(raw: bytes, cause: str) -> None:
    with pytest.raises(TransportError, match=f"^me: the response cannot be read: {cause}$") as caught:
        async with answering(raw) as origin, SigningClient(origin, "token", retry=QUICK) as client:
            await client.me()
    assert (caught.value.attempts, caught.value.transient) == (1, False)


async def _hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def test_status_counts_although_the_body_hangs_until_the_deadline_or_is_cut_off() -> None:
    """A refusal is no unknown outcome, and a write succeeds."""
    head = b"HTTP/1.1 %s\r\nRetry-After: 60\r\nContent-Length: 100\r\n\r\n{"
    for then in (_hang, None):
        async with (
            answering(head % b"429 Too Many Requests", then=then) as origin,
            SigningClient(origin, "token", timeout=0.5) as client,
        ):
            with pytest.raises(RateLimited) as caught:
                await client.recipients.remind("s1", "r1")
            assert caught.value.effect == "none"
        async with (
            answering(head % b"202 Accepted", then=then) as origin,
            SigningClient(origin, "token", timeout=0.5, retry=RetryPolicy.none()) as client,
        ):
            await client.signings.send("s1")


# The token and the rate limiter


async def test_token_that_expires_in_the_wait_for_the_rate_limiter_is_refreshed_before_the_request() -> None:
    """Otherwise each waiting call would send a token that the service rejects."""

    class Slow(LocalRateLimiter):
        async def acquire(self, deadline: float) -> bool:
            await asyncio.sleep(0.3)
            return await super().acquire(deadline)

    token = Token("old", "refresh", datetime.now(UTC) + timedelta(seconds=0.2))
    async with (
        oauth_on(grants(), says({"id": "u1"}), token=token) as (oauth, server),
        SigningClient(server.base_url, oauth, rate_limiter=Slow()) as client,
    ):
        await client.me()
    assert [request.headers.get("Authorization") for request in server.requests] == [None, "Bearer access-new"]


async def test_rate_limiter_that_swallows_the_deadlines_cancellation_does_not_unbind_the_call() -> None:
    """Nothing is sent after the deadline."""

    class Swallowing(LocalRateLimiter):
        async def acquire(self, deadline: float) -> bool:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            await asyncio.sleep(0)
            return True

    async with (
        serving(echo) as server,
        SigningClient(server.origin, "token", timeout=0.3, rate_limiter=Swallowing()) as client,
    ):
        async with asyncio.timeout(10):
            with pytest.raises(RequestTimeout) as caught:
                await client.signings.send("s1")
    assert caught.value.effect == "none"
    assert server.requests == []


# Retry-After

_NOW = "Thu, 01 Jan 2026 00:00:00 GMT"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("100", 100.0),
        (" 100.5 ", 100.5),
        ("9" * 400, sys.float_info.max),
        ("Thu, 01 Jan 2026 02:01:40 +0200", 100.0),
        ("Wed, 31 Dec 2025 00:00:00 GMT", 0.0),
        ("Fri, 99 Dec 2026 23:59:59 GMT", None),
        ("-1", None),
        ("x" * 100, None),
    ],
)
async def test_retry_after_is_read_as_seconds_or_as_a_date(value: str, seconds: float | None) -> None:
    """A date is compared with the server's own: a wrong local clock changes nothing."""
    raw = f"HTTP/1.1 503 No\r\nDate: {_NOW}\r\nRetry-After: {value}\r\nContent-Length: 0\r\n\r\n".encode()
    async with answering(raw) as origin, SigningClient(origin, "token", retry=RetryPolicy.none()) as client:
        with pytest.raises(ServerError) as caught:
            await client.me()
    assert caught.value.retry_after == seconds
