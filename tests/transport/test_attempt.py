"""One attempt: tokens that are rejected, redirects, hostile responses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web

from signing_async import (
    APIError,
    Assumptions,
    Attempt,
    DecodeError,
    Forbidden,
    LocalRateLimiter,
    MemoryTokenStore,
    OAuth,
    RateLimited,
    RequestTimeout,
    RetryPolicy,
    ServerError,
    SigningClient,
    Token,
    TransportError,
    Unauthorized,
)
from signing_async.sandbox import Profile, Sandbox
from tests.pdfs import make_pdf
from tests.servers import answering, serving

QUICK = RetryPolicy(base_delay=0.01, settle=0.1)


# Tokens


async def test_401_with_a_fixed_token_is_raised_at_once(sandbox: Sandbox) -> None:
    async with SigningClient(sandbox.base_url, "wrong", retry=QUICK) as client:
        with pytest.raises(Unauthorized, match="HTTP 401 on me"):
            await client.me()
    assert len(sandbox.requests) == 1


@pytest.mark.parametrize("status", [401, 403])
async def test_rejected_token_is_refreshed_and_the_request_sent_again(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An upload with its whole body; the policy need not allow a retry. The hook and the log are told."""
    seen: list[Attempt] = []
    once, assumptions = RetryPolicy.none(), Assumptions(expired_token_statuses=status)
    async with Sandbox(profile=Profile(expired_token_status=status)) as sandbox:
        app = sandbox.register_app(redirect_uri="http://127.0.0.1:1/cb")
        settings = {"client_id": app.client_id, "client_secret": app.client_secret, "redirect_uri": app.redirect_uri}
        async with (
            OAuth(sandbox.base_url, **settings) as oauth,
            SigningClient(
                sandbox.base_url, oauth, on_attempt=seen.append, retry=once, assumptions=assumptions
            ) as client,
        ):
            await oauth.exchange(sandbox.authorize(app))
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
    assert (rejected.attempt, rejected.status, rejected.delay) == (1, status, 0.0)
    assert rejected.error == "the token was rejected and has been refreshed"
    assert (succeeded.attempt, succeeded.status, succeeded.error) == (2, 201, None)
    assert {record.levelno for record in caplog.records if record.name == "signing_async"} == {logging.DEBUG}
    assert f"signings.create attempt 1: {status}" in caplog.text
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


async def test_sixth_redirect_is_an_error() -> None:
    async def handle(request: web.Request) -> web.Response:
        raise web.HTTPFound("/api/1.0/me")

    async with serving(handle) as server, SigningClient(server.origin, "token") as client:
        with pytest.raises(APIError, match="more than 5 redirects"):
            await client.me()
        assert len(server.requests) == 6


async def test_lost_response_after_a_redirect_has_no_status() -> None:
    async def handle(request: web.Request) -> web.Response:
        if request.path == "/api/1.0/me":
            raise web.HTTPFound("/elsewhere", headers={"request_id": "of-the-redirect"})
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with serving(handle) as server, SigningClient(server.origin, "token", retry=RetryPolicy.none()) as client:
        with pytest.raises(TransportError) as caught:
            await client.me()
    assert (caught.value.status, caught.value.request_id) == (None, None)


# Hostile responses


@pytest.mark.parametrize("bad", ["", ".."])
async def test_record_with_an_unusable_id_is_a_decode_error(bad: str) -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response({"id": bad, "name": "x"})

    async with serving(handle) as server, SigningClient(server.origin, "token") as client:
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


async def test_send_succeeds_by_its_status_although_the_body_is_cut_off() -> None:
    raw = b"HTTP/1.1 202 Accepted\r\nContent-Length: 100\r\n\r\n{"
    async with answering(raw) as origin, SigningClient(origin, "token", retry=RetryPolicy.none()) as client:
        await client.signings.send("id")


async def _hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(b"403 Forbidden", Forbidden), (b"401 Unauthorized", Unauthorized), (b"429 Too Many Requests", RateLimited)],
)
async def test_refusal_counts_although_its_body_hangs_until_the_deadline(status: bytes, kind: type[APIError]) -> None:
    """A short deadline does not make it an unknown outcome; a success counts too."""
    head = b"HTTP/1.1 %s\r\nRetry-After: 60\r\nContent-Length: 100\r\n\r\n{"
    async with answering(head % status, then=_hang) as origin, SigningClient(origin, "token", timeout=0.5) as client:
        with pytest.raises(kind) as caught:
            await client.recipients.remind("s1", "r1")
        assert caught.value.effect == "none"
    async with answering(head % b"200 OK", then=_hang) as origin, SigningClient(origin, "token", timeout=0.5) as client:
        await client.recipients.remind("s1", "r1")


# The token and the rate limiter


async def test_token_that_expires_in_the_wait_for_the_rate_limiter_is_refreshed_before_the_request() -> None:
    """Otherwise each waiting call would send a token that the service rejects."""

    async def handle(request: web.Request) -> web.Response:
        if request.path == "/api/oauth/token":
            return web.json_response({"access_token": "new", "expires_in": 3600})
        return web.json_response({"id": "u1"})

    class Slow(LocalRateLimiter):
        async def acquire(self, deadline: float) -> bool:
            await asyncio.sleep(0.6)
            return await super().acquire(deadline)

    store = MemoryTokenStore(Token("old", "refresh", datetime.now(UTC) + timedelta(seconds=0.4)))
    async with serving(handle) as server:
        oauth = OAuth(server.origin, client_id="id", client_secret="x", redirect_uri="https://app/cb", store=store)
        async with oauth, SigningClient(server.origin, oauth, rate_limiter=Slow()) as client:
            await client.me()
    sent = [request.headers.get("Authorization") for request in server.requests if request.path.endswith("/me")]
    assert sent == ["Bearer new"]


async def test_rate_limiter_that_swallows_the_deadlines_cancellation_does_not_unbind_the_call() -> None:
    """Nothing is sent after the deadline."""

    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    class Swallowing(LocalRateLimiter):
        async def acquire(self, deadline: float) -> bool:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            await asyncio.sleep(0)
            return True

    async with (
        serving(hang) as server,
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
        ("Thu, 01 Jan 2026 00:01:40 GMT", 100.0),
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
