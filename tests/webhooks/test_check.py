"""The conformance check judges a good receiver right and each bad one wrong, for what it does wrong."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
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
    InvalidSignature,
    Receiver,
    Scheme,
    WebhookVerifier,
    aiohttp_handler,
)
from signing_async.webhooks.check import Answer, CheckResult, check_receiver
from tests.webhooks.deliveries import SECRET

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ELSEWHERE = "is plain http to another machine: use https, or allow it explicitly"
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
        # By a name, since an address is given no cookies back in any case.
        url = url.replace("127.0.0.1", "localhost")
        return {one.name: one async for one in check_receiver(url, **{"secret": SECRET, **QUICK, **settings})}


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


async def test_the_usual_length_is_too_long_for_the_usual_receiver() -> None:
    """Without any setting the long body is 16 MiB and some, and a receiver without any setting refuses it."""
    lengths: list[int] = []
    receiver = Receiver(WebhookVerifier(SECRET), lambda event: None, body_timeout=0.3)
    take = aiohttp_handler(receiver)

    async def handler(request: web.Request) -> web.StreamResponse:
        lengths.append(request.content_length or 0)
        return await take(request)

    async with endpoint(handler) as url:
        results = {one.name: one async for one in check_receiver(url, SECRET, slow_limit=1.0)}
    assert [one for one in results.values() if not one.ok] == []
    assert 0 < max(lengths) - 16 * 1024 * 1024 < 1000


@pytest.mark.parametrize(
    ("status", "words", "right"),
    [
        (199, "199", {"cut off"}),
        (200, "200", {"accepted"}),
        (299, "299", {"accepted"}),
        (300, "300", {"cut off"}),
        (399, "399", {"cut off"}),
        (400, "400", {"refused", "turned away", "cut off"}),
        (499, "499", {"refused", "turned away", "cut off"}),
        (500, "500", {"cut off"}),
        (None, "the connection was closed", {"turned away", "cut off"}),
        (None, "no answer in time", set()),
    ],
)
def test_what_an_answer_counts_as(status: int | None, words: str, right: set[str]) -> None:
    """Only 2xx accepts, only 4xx refuses; a body that must not be read to its end may be ended in other ways too."""
    answer = Answer(status, words, 0.0)
    judged = {
        "accepted": answer.accepted(),
        "refused": answer.refused(),
        "turned away": answer.turned_away(),
        "cut off": answer.cut_off(),
    }
    assert {name for name, holds in judged.items() if holds} == right


async def test_what_is_sent() -> None:
    """Nine checks, each as it says; every event with an id of its own, no cookie given back, JSON announced."""
    got: list[tuple[bytes, web.BaseRequest]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        trickles = request.content_length == 1000
        got.append((await (request.content.readexactly(5) if trickles else request.read()), request))
        response = web.Response(status=408 if trickles else 200)
        response.set_cookie("session", "mine")
        return response

    results = await check(handler, scheme=STANDARD_WEBHOOKS, secret="whsec_" + "a2V5" * 8, over_long=150_000)
    assert {name: one.expected for name, one in results.items()} == {
        "valid delivery": "2xx",
        "duplicate": "2xx both times",
        "reordered pair": "2xx both times",
        "unusual layout, signed as sent": "2xx",
        "wrong signature": "4xx, best 401",
        "no signature": "4xx, best 401",
        "re-encoded body": "4xx, best 401",
        "over-long body": "413, or closed",
        "slow body": "408, or closed",
    }
    assert {request.method for _, request in got} == {"POST"}
    assert {request.headers["Content-Type"] for _, request in got} == {"application/json"}
    assert not [request for _, request in got if "Cookie" in request.headers]
    valid, first, second, later, earlier, odd, forged, unsigned, again, long, slow = got
    assert first[0] == second[0]
    assert first[1].headers["webhook-signature"] == second[1].headers["webhook-signature"]
    assert [json.loads(body)["sequence"] for body, _ in (later, earlier)] == [2, 1]
    assert odd[0] == json.dumps(json.loads(odd[0]), indent=3).encode() + b"\r\n"
    assert json.loads(odd[0])["text"] == "\u00e5\u00e4\u00f6 \u20ac"
    assert again[0] == json.dumps(json.loads(again[0]), indent=2).encode()
    assert json.loads(long[0])["padding"] == "x" * 150_000
    assert int(long[1].headers["Content-Length"]) == len(long[0])
    assert slow[0] == b" " * 5
    events = [json.loads(body)["event"] for body, _ in got[:-1]]
    assert {event["type"] for event in events} == {"webhook.check"}
    assert len({event["id"] for event in events}) == len(events) - 1
    assert all(re.fullmatch("check_[0-9a-f]{32}", event["id"]) for event in events)
    named = [request.headers["webhook-id"] for _, request in got]
    assert len(set(named)) == len(named) - 1
    assert all(re.fullmatch("msg_[0-9a-f]{32}", name) for name in named)
    verifier = WebhookVerifier("whsec_" + "a2V5" * 8, STANDARD_WEBHOOKS)
    for body, request in (valid, first, later, earlier, odd, long):
        verifier.verify(body, request.headers["webhook-signature"], headers=request.headers)
    for body, request in (forged, again):
        with pytest.raises(InvalidSignature, match="no secret matches"):
            verifier.verify(body, request.headers["webhook-signature"], headers=request.headers)
    assert "webhook-signature" not in unsigned[1].headers
    assert "webhook-timestamp" in unsigned[1].headers


async def test_an_endpoint_that_hangs() -> None:
    """Each delivery gets the time that was allowed for an answer, and is judged by that."""

    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    results = await check(handler, answer_limit=0.15, slow_limit=0.2)
    assert {one.got for one in results.values()} <= {"no answer in time", "no answer in time, no answer in time"}
    assert not any(one.ok for one in results.values())
    assert all(0.1 < one.seconds < 20 for one in results.values())
    assert results["duplicate"].seconds > 0.25
    assert results["valid delivery"].advice == "genuine events are refused"
    assert results["duplicate"].advice.startswith("a duplicate must be acknowledged, and not handled again")
    assert results["reordered pair"].advice.startswith("events may come in another order than they happened")
    assert results["wrong signature"].advice == results["no signature"].advice == "anybody can forge an event"
    assert (
        results["unusual layout, signed as sent"].advice
        == results["re-encoded body"].advice
        == ("the signature is checked over JSON that was written again: check it over the bytes as received")
    )
    assert results["over-long body"].advice.startswith("any length is read: set a limit")
    assert results["slow body"].advice.startswith("a body that trickles in is waited for: set a time limit")


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
        ("ftp://localhost/", "'ftp://localhost/' is not an http or https URL"),
        ("localhost:8000/hooks", "'localhost:8000/hooks' is not an http or https URL"),
        ("/hooks", "'/hooks' is not an http or https URL"),
        ("http://", "'http://' is not a"),
        ("http://[::1", "'http://[::1' is not a URL: Invalid"),
        ("http://example.com/hooks", f"'http://example.com/hooks' {ELSEWHERE}"),
        ("http://192.0.2.1/hooks", f"'http://192.0.2.1/hooks' {ELSEWHERE}"),
        ("http://localhost.example.com/", f"'http://localhost.example.com/' {ELSEWHERE}"),
    ],
)
async def test_where_nothing_may_be_sent(url: str, words: str) -> None:
    """The error names the URL; no connection is tried."""
    with pytest.raises(ConfigurationError, match=f"^{re.escape(words)}"):
        await anext(check_receiver(url, SECRET))


@pytest.mark.parametrize(
    "url", ["http://localhost:1/", "http://127.0.0.1:1/", "http://[::1]:1/", "https://127.0.0.1:1/"]
)
async def test_an_endpoint_that_is_not_there(url: str) -> None:
    """A TransportError, not a verdict about a receiver."""
    with pytest.raises(TransportError, match=f"^{re.escape(url)} cannot be reached: "):
        await anext(check_receiver(url, SECRET))


async def test_https_may_go_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no permission."""

    async def nobody(*arguments: object, **settings: object) -> list[object]:
        raise OSError("no such name")

    monkeypatch.setattr("aiohttp.resolver.DefaultResolver.resolve", nobody)
    with pytest.raises(TransportError, match=r"^https://hooks\.example\.com/ cannot be reached: "):
        await anext(check_receiver("https://hooks.example.com/", SECRET))


async def test_plain_http_elsewhere_can_be_allowed() -> None:
    """Where the integrator says so; 0.0.0.0 is this machine under a name that is not loopback."""
    with pytest.raises(TransportError, match="cannot be reached"):
        await anext(check_receiver("http://0.0.0.0:1/", SECRET, plain_http=True))
