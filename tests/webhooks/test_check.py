"""The conformance check judges a good receiver right and each bad one wrong, for what it does wrong."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from signing_async.errors import ConfigurationError, TransportError
from signing_async.webhooks import (
    GITHUB,
    STANDARD_WEBHOOKS,
    STRIPE,
    Event,
    Receiver,
    Scheme,
    WebhookVerifier,
    aiohttp_handler,
)
from signing_async.webhooks.check import CheckResult, check_receiver
from tests.webhooks.deliveries import SECRET

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
QUICK: dict[str, Any] = {"slow_limit": 1.0, "over_long": 300_000}


@asynccontextmanager
async def endpoint(handler: Handler) -> AsyncIterator[str]:
    """An endpoint on this machine; its URL."""
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/hooks", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/hooks"
    finally:
        await runner.cleanup()


async def check(handler: Handler, **settings: Any) -> dict[str, CheckResult]:
    """The results by name."""
    async with endpoint(handler) as url:
        return {one.name: one async for one in check_receiver(url, SECRET, **{**QUICK, **settings})}


def good(body: bytes, signature: str | None) -> bool:
    """A right verification, written by hand."""
    return hmac.compare_digest(hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest(), signature or "")


def status_of(request: web.Request, ok: bool) -> web.Response:
    """Accepted or refused."""
    return web.Response(status=202 if ok else 401)


@pytest.mark.parametrize(
    "scheme",
    [Scheme(), GITHUB, replace(STRIPE, key_encoding="utf-8"), replace(STANDARD_WEBHOOKS, key_encoding="utf-8")],
)
async def test_this_packages_receiver_handles_all_rightly(scheme: Scheme) -> None:
    """In every scheme; each genuine event is handed over once, and nothing else is."""
    events: list[Event] = []
    receiver = Receiver(WebhookVerifier(SECRET, scheme, max_body=100_000), events.append, body_timeout=0.3)
    results = await check(aiohttp_handler(receiver), scheme=scheme, event_type="only.a.check")
    assert [(one.name, one.got) for one in results.values() if not one.ok] == []
    assert len(results) == 9
    assert results["over-long body"].got in ("413", "the connection was closed")
    assert results["slow body"].got in ("408", "the connection was closed")
    assert len(events) == 5
    assert {event.type for event in events} == {"only.a.check"}
    assert [event.payload.get("sequence") for event in events] == [None, None, 2, 1, None]


async def test_an_endpoint_that_accepts_everything() -> None:
    """Forgeries, changed bodies and endless ones are named."""

    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response(status=200)

    results = await check(handler)
    wrong = {name for name, one in results.items() if not one.ok}
    assert wrong == {"wrong signature", "no signature", "re-encoded body", "over-long body", "slow body"}
    assert results["wrong signature"].got == "200"
    assert "forge" in results["wrong signature"].advice
    assert results["slow body"].got == "no answer in time"
    assert json.loads(json.dumps(results["slow body"].as_dict()))["ok"] is False


async def test_an_endpoint_that_verifies_over_json_written_again() -> None:
    """The common mistake is found from both sides."""

    async def handler(request: web.Request) -> web.StreamResponse:
        async with asyncio.timeout(0.3):
            body = await request.read()
        if len(body) > 100_000:
            return web.Response(status=413)
        again = json.dumps(json.loads(body), separators=(",", ":")).encode()
        return status_of(request, good(again, request.headers.get("X-Signature")))

    results = await check(handler)
    assert {name for name, one in results.items() if not one.ok} == {
        "unusual layout, signed as sent",
        "re-encoded body",
    }
    assert "bytes as received" in results["re-encoded body"].advice
    assert results["slow body"].got == "504"


async def test_an_endpoint_that_refuses_duplicates_and_forgets_its_status() -> None:
    """A duplicate must be acknowledged; a redirect is not followed and no acknowledgement; a 500 is no refusal."""
    seen: set[bytes] = set()

    async def handler(request: web.Request) -> web.StreamResponse:
        if (request.content_length or 0) > 100_000:
            assert request.transport
            request.transport.abort()
        body = await request.read()
        if not good(body, request.headers.get("X-Signature")):
            raise (
                web.HTTPInternalServerError
                if "X-Signature" in request.headers
                else web.HTTPTemporaryRedirect("http://192.0.2.1/")
            )
        if body in seen:
            raise web.HTTPConflict
        seen.add(body)
        return web.Response(status=204)

    results = await check(handler)
    assert {name for name, one in results.items() if not one.ok} == {
        "duplicate",
        "wrong signature",
        "no signature",
        "re-encoded body",
        "slow body",
    }
    assert results["duplicate"].got == "204, 409"
    assert results["no signature"].got == "307"
    assert results["over-long body"].got == "the connection was closed"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://localhost/", "not an http or https URL"),
        ("localhost:8000/hooks", "not an http or https URL"),
        ("/hooks", "not an http or https URL"),
        ("http://", "not a"),
        ("http://[::1", "not a URL"),
        ("http://example.com/hooks", "plain http to another machine"),
        ("http://192.0.2.1/hooks", "plain http to another machine"),
    ],
)
async def test_where_nothing_may_be_sent(url: str, words: str) -> None:
    """The error names the URL; no connection is tried."""
    with pytest.raises(ConfigurationError, match=words):
        await anext(check_receiver(url, SECRET))


@pytest.mark.parametrize(
    "url", ["http://localhost:1/", "http://127.0.0.1:1/", "http://[::1]:1/", "https://127.0.0.1:1/"]
)
async def test_an_endpoint_that_is_not_there(url: str) -> None:
    """A TransportError, not a verdict about a receiver."""
    with pytest.raises(TransportError, match="cannot be reached"):
        await anext(check_receiver(url, SECRET))


async def test_plain_http_elsewhere_can_be_allowed() -> None:
    """Where the integrator says so; 0.0.0.0 is this machine under a name that is not loopback."""
    with pytest.raises(TransportError, match="cannot be reached"):
        await anext(check_receiver("http://0.0.0.0:1/", SECRET, plain_http=True))
