"""The conformance check passes a good receiver, and names what a bad one does wrong."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from signing_async import ConfigurationError, TransportError
from signing_async.webhooks import (
    STANDARD_WEBHOOKS,
    STRIPE,
    Event,
    InvalidSignature,
    Receiver,
    Scheme,
    WebhookVerifier,
    aiohttp_handler,
)

# The command line renders the results; only the function yields them.
from signing_async.webhooks.check import CheckResult, check_receiver
from tests.webhooks.deliveries import SECRET

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ELSEWHERE = "is plain http to another machine; use https, or allow plain http"
FORGERY = {"wrong signature", "no signature", "re-encoded body"}
FAST: dict[str, Any] = {"slow_limit": 1.0, "over_long": 300_000}
ADVICE = {
    "valid delivery": "valid deliveries are rejected: check the secret",
    "duplicate": "acknowledge a duplicate, and do not handle it again",
    "reordered pair": "events may arrive out of order: accept each",
    "unusual JSON layout": "the signature is verified over re-encoded JSON: verify it over the bytes",
    "wrong signature": "anyone can forge an event",
    "no signature": "anyone can forge an event",
    "re-encoded body": "the signature is verified over re-encoded JSON: verify it over the bytes",
    "over-long body": "a body of any size is read: set a limit",
    "slow body": "a body that trickles in is read to its end: set a timeout",
}
"""The start of the advice of each check."""


async def check(handler: Handler, **settings: Any) -> dict[str, CheckResult]:
    """Return the results by name."""
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/hooks", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    # A host name, because cookies are never sent back to an address.
    url = f"http://localhost:{runner.addresses[0][1]}/hooks"
    try:
        return {one.name: one async for one in check_receiver(url, **{"secret": SECRET, **FAST, **settings})}
    finally:
        await runner.cleanup()


def failed(results: dict[str, CheckResult]) -> set[str]:
    """Return the names of the failed checks; each gives its advice."""
    names = {name for name, one in results.items() if not one.ok}
    assert [name for name in names if not results[name].advice.startswith(ADVICE[name])] == []
    return names


def is_genuine(body: bytes, signature: str | None) -> bool:
    """Verify a signature, independently of the package."""
    return hmac.compare_digest(hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest(), signature or "")


@pytest.mark.parametrize("scheme", [Scheme(), STRIPE])
async def test_receiver_of_this_package_passes_every_check(scheme: Scheme) -> None:
    events: list[Event] = []
    receiver = Receiver(WebhookVerifier(SECRET, scheme, max_body=100_000), events.append, body_timeout=0.3)
    results = await check(aiohttp_handler(receiver), scheme=scheme, event_type="only.a.check", slow_limit=10.0)
    assert failed(results) == set()
    assert len(results) == 9
    assert results["over-long body"].got in ("413", "the connection was closed")
    assert results["slow body"].got in ("408", "the connection was closed")
    assert [event.payload.get("sequence") for event in events] == [None, None, 2, 1, None]  # each genuine event once
    assert {event.type for event in events} == {"only.a.check"}


async def test_nine_checks_send_what_they_say() -> None:
    """Every event has an id of its own, no cookie is sent back, and the content type is JSON."""
    got: list[tuple[bytes, web.BaseRequest]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        trickles = request.content_length == 1000
        got.append((await (request.content.readexactly(5) if trickles else request.read()), request))
        response = web.Response(status=408 if trickles else 200)
        response.set_cookie("session", "mine")
        return response

    secret = "whsec_" + "a2V5" * 8
    await check(handler, scheme=STANDARD_WEBHOOKS, secret=secret, over_long=150_000)
    for _, request in got:
        assert (request.method, request.headers["Content-Type"]) == ("POST", "application/json")
        assert "Cookie" not in request.headers
    valid, first, second, later, earlier, odd, forged, unsigned, again, long, slow = got
    assert first[0] == second[0]
    assert [json.loads(body)["sequence"] for body, _ in (later, earlier)] == [2, 1]
    assert odd[0] == json.dumps(json.loads(odd[0]), indent=3).encode() + b"\r\n"
    assert again[0] == json.dumps(json.loads(again[0]), indent=2).encode()
    assert json.loads(long[0])["padding"] == "x" * 150_000
    assert slow[0] == b" " * 5
    events = [json.loads(body)["event"] for body, _ in got[:-1]]
    assert {event["type"] for event in events} == {"webhook.check"}
    assert len({event["id"] for event in events}) == len(events) - 1
    verifier = WebhookVerifier(secret, STANDARD_WEBHOOKS)
    for body, request in (valid, first, later, earlier, odd, long):
        verifier.verify(body, None, headers=request.headers)
    for body, request in (forged, again, unsigned):
        with pytest.raises(InvalidSignature, match=r"no secret matches|missing or empty"):
            verifier.verify(body, None, headers=request.headers)


async def test_endpoint_that_accepts_everything_fails_the_checks_for_forgery_and_limits() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response(status=200)

    results = await check(handler)
    assert failed(results) == FORGERY | {"over-long body", "slow body"}
    assert (results["wrong signature"].got, results["slow body"].got) == ("200", "no response in time")
    assert json.loads(json.dumps(results["slow body"].as_dict()))["ok"] is False


async def test_endpoint_that_never_responds_fails_every_check() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    results = await check(handler, response_timeout=0.05, slow_limit=0.05)
    assert failed(results) == ADVICE.keys()
    assert {outcome for one in results.values() for outcome in one.got.split(", ")} == {"no response in time"}


async def test_endpoint_that_verifies_reencoded_json_fails_both_ways() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        async with asyncio.timeout(0.3):
            body = await request.read()
        reencoded = json.dumps(json.loads(body), separators=(",", ":")).encode()
        return web.Response(status=202 if is_genuine(reencoded, request.headers.get("X-Signature")) else 401)

    results = await check(handler)
    assert failed(results) == {"unusual JSON layout", "re-encoded body", "over-long body"}
    assert results["slow body"].got == "504"


async def test_conflict_redirect_and_server_error_are_not_acknowledgements_or_rejections() -> None:
    """A redirect is not followed."""
    seen: set[bytes] = set()

    async def handler(request: web.Request) -> web.StreamResponse:
        if (request.content_length or 0) > 100_000:
            assert request.transport
            request.transport.abort()
        body = await request.read()
        if "X-Signature" not in request.headers:
            raise web.HTTPTemporaryRedirect("http://192.0.2.1/")
        if not is_genuine(body, request.headers["X-Signature"]):
            raise web.HTTPInternalServerError
        if body in seen:
            raise web.HTTPConflict
        seen.add(body)
        return web.Response(status=204)

    results = await check(handler)
    assert failed(results) == FORGERY | {"duplicate", "slow body"}
    assert (results["duplicate"].got, results["no signature"].got) == ("204, 409", "307")
    assert results["over-long body"].got == "the connection was closed"


@pytest.mark.parametrize(
    ("status", "location", "advice"),
    [
        (307, "/webhooks/", "redirects to /webhooks/: register that address"),
        (404, None, "no endpoint at this path"),
    ],
)
async def test_check_stops_at_a_redirect_or_a_missing_endpoint(status: int, location: str | None, advice: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers={"Location": location} if location else {})

    [only] = (await check(handler)).values()
    assert (only.name, only.ok, only.got, only.advice) == ("valid delivery", False, str(status), advice)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:8000/hooks", "url: must be an http or https URL, got 'localhost:8000/hooks'"),
        ("http://", "url: "),
        ("http://[::1", "url: 'http://[::1' is not a URL: Invalid"),
        ("http://192.0.2.1/hooks", f"url: 'http://192.0.2.1/hooks' {ELSEWHERE}"),
        ("http://localhost.example.com/", f"url: 'http://localhost.example.com/' {ELSEWHERE}"),
    ],
)
async def test_bad_or_plain_http_url_is_refused_before_connecting(url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}"):
        await anext(check_receiver(url, SECRET))


async def test_unreachable_endpoint_is_a_transport_error() -> None:
    with pytest.raises(TransportError, match=r"^could not connect to http://localhost:1/: ") as caught:
        await anext(check_receiver("http://localhost:1/", SECRET))
    assert caught.value.transient


async def test_limit_that_is_no_number_above_0_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"^slow_limit: must be a number above 0, got 0$"):
        await anext(check_receiver("http://127.0.0.1:1/", SECRET, slow_limit=0))
