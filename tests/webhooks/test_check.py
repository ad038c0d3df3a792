"""The conformance check passes a good receiver, and names what a bad one does wrong."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from aiohttp import web

from signing_async import ConfigurationError, TransportError
from signing_async.webhooks import (
    STRIPE,
    Event,
    Receiver,
    Scheme,
    WebhookVerifier,
    aiohttp_handler,
)

# The command line renders the results; only the function yields them.
from signing_async.webhooks.check import CheckResult, check_receiver
from tests.servers import Handler, serving
from tests.webhooks.deliveries import SECRET, hex_of

ELSEWHERE = "is plain http to another machine; use https, or allow plain http"
FORGERY = {"wrong signature", "no signature", "re-encoded body"}
LIMITS = {"over-long body", "slow body"}
FAST: dict[str, Any] = {"secret": SECRET, "slow_limit": 10.0, "over_long": 300_000}
SILENCE = "no response in time"
PAIRS = {"duplicate", "reordered pair"}
NAMES = FORGERY | LIMITS | PAIRS | {"valid delivery", "unusual JSON layout"}


async def check(handler: Handler, **settings: Any) -> dict[str, CheckResult]:
    """Return the results by name."""
    async with serving(handler) as server:
        # A host name, because cookies are never sent back to an address.
        url = server.origin.replace("127.0.0.1", "localhost")
        return {one.name: one async for one in check_receiver(url, **{**FAST, **settings})}


def failed(results: dict[str, CheckResult]) -> set[str]:
    """Return the names of the failed checks; each gives its advice."""
    assert results.keys() == NAMES
    assert all(one.advice for one in results.values())
    return {name for name, one in results.items() if not one.ok}


@pytest.mark.parametrize(
    ("settings", "event_type"),
    [({}, "webhook.check"), ({"scheme": STRIPE, "event_type": "only.a.check"}, "only.a.check")],
)
async def test_receiver_of_this_package_passes_every_check(settings: dict[str, Any], event_type: str) -> None:
    """Each genuine event is a new one, and no cookie is sent back."""
    events: list[Event] = []
    verifier = WebhookVerifier(SECRET, settings.get("scheme", Scheme()), max_body=100_000)
    receive = aiohttp_handler(Receiver(verifier, events.append, body_timeout=0.3))

    async def handler(request: web.Request) -> web.StreamResponse:
        assert (request.content_type, request.cookies) == ("application/json", {})
        response = await receive(request)
        response.set_cookie("session", "mine")
        return response

    results = await check(handler, **settings)
    assert failed(results) == set()
    assert results["over-long body"].got in ("413", "the connection was closed")
    assert results["slow body"].got in ("408", "the connection was closed")
    assert [event.payload.get("sequence") for event in events] == [None, None, 2, 1, None]
    assert {event.type for event in events} == {event_type}


async def accept_everything(request: web.Request) -> web.StreamResponse:
    await request.read()
    return web.Response(status=200)


async def never_respond(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


async def verify_reencoded_json(request: web.Request) -> web.StreamResponse:
    async with asyncio.timeout(0.3):
        body = await request.read()
    reencoded = json.dumps(json.loads(body), separators=(",", ":")).encode()
    return web.Response(status=202 if request.headers.get("X-Signature") == hex_of(reencoded) else 401)


async def redirect_or_fail(request: web.Request) -> web.StreamResponse:
    """Redirect an unsigned delivery, fail for a forged one and for events in a pair, and reset a long body."""
    if (request.content_length or 0) > 100_000:
        assert request.transport
        request.transport.abort()
    body = await request.read()
    if "X-Signature" not in request.headers:
        raise web.HTTPTemporaryRedirect("http://192.0.2.1/")  # it is not followed
    if request.headers["X-Signature"] != hex_of(body):
        raise web.HTTPInternalServerError
    raise web.HTTPConflict if b"sequence" in body else web.HTTPNoContent


@pytest.mark.parametrize(
    ("handler", "settings", "expected", "got"),
    [
        (accept_everything, {"slow_limit": 0.1}, FORGERY | LIMITS, {"wrong signature": "200", "slow body": SILENCE}),
        (never_respond, {"slow_limit": 0.1, "response_timeout": 0.03}, NAMES, dict.fromkeys(NAMES, SILENCE)),
        (verify_reencoded_json, {}, {"unusual JSON layout", "re-encoded body", "over-long body"}, {"slow body": "504"}),
        (
            redirect_or_fail,
            {"slow_limit": 0.1},
            FORGERY | {"reordered pair", "slow body"},
            {"reordered pair": "409", "no signature": "307", "over-long body": "the connection was closed"},
        ),
    ],
)
async def test_bad_endpoint_fails_the_checks_that_name_its_faults(
    handler: Handler, settings: dict[str, float], expected: set[str], got: dict[str, str]
) -> None:
    results = await check(handler, **settings)
    assert failed(results) == expected
    for name, outcome in got.items():
        assert set(results[name].got.split(", ")) == {outcome}
    assert json.loads(json.dumps(results["wrong signature"].as_dict()))["ok"] is ("wrong signature" not in expected)


@pytest.mark.parametrize(
    ("status", "place", "advice"),
    [
        (307, "/webhooks/", "redirects to /webhooks/: register that address"),
        (302, "", "redirects, but names no address"),
        (404, "", "no endpoint at this path"),
    ],
)
async def test_check_stops_at_a_redirect_or_a_missing_endpoint(status: int, place: str, advice: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers={"Location": place} if place else {})

    [only] = (await check(handler)).values()
    assert (only.name, only.ok, only.got, only.advice) == ("valid delivery", False, str(status), advice)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:8000/hooks", "url: must be an http or https URL, got 'localhost:8000/hooks'"),
        ("http://[::1", "url: 'http://[::1' is not a URL: Invalid"),
        ("http://192.0.2.1/hooks", f"url: 'http://192.0.2.1/hooks' {ELSEWHERE}"),
        ("http://localhost.example.com/", f"url: 'http://localhost.example.com/' {ELSEWHERE}"),
    ],
)
async def test_bad_or_plain_http_url_is_refused_before_connecting(url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}"):
        await anext(check_receiver(url, SECRET))


async def test_unreachable_endpoint_is_a_transport_error() -> None:
    with pytest.raises(
        TransportError, match=r"^could not connect to http://localhost:1/: Connection refused$"
    ) as caught:
        await anext(check_receiver("http://localhost:1/", SECRET))
    assert caught.value.transient
