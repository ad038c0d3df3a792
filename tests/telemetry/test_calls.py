"""The spans and the metrics of calls: attempts, waits, refreshes, reconciliation, outcomes."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from aiohttp import web
from opentelemetry.trace import SpanKind, StatusCode

from signing_async import LocalRateLimiter, OutcomeUnknown, RateLimited, Signing, SigningClient
from signing_async.sandbox import Sandbox
from signing_async.telemetry import names
from tests.auth.oauth_servers import sandbox_oauth
from tests.pdfs import make_pdf
from tests.servers import serving
from tests.telemetry.conftest import Recorded, attributes, events


async def _sendable(client: SigningClient) -> Signing:
    signing = await client.signings.create(name="Lease", language="EN")
    await client.documents.upload(signing, make_pdf(), "lease.pdf")
    await client.recipients.add(signing, email="anna@example.com", first_name="Anna", last_name="Berg", order=1)
    return signing


async def test_call_is_a_span_with_a_client_span_by_the_semantic_conventions(
    sandbox: Sandbox, client: SigningClient, recorded: Recorded
) -> None:
    signing = await client.signings.create(name="Lease", language="EN")
    assert attributes(recorded.one("signings.create"))["signing.id"] == signing.id
    recorded.clear()
    await client.signings.get(signing)
    call = recorded.one("signings.get")
    assert not call.events
    assert call.kind is SpanKind.INTERNAL
    assert call.status.status_code is StatusCode.UNSET
    assert attributes(call) == {
        "signing_async.operation": "signings.get",
        "signing.id": signing.id,
        "signing_async.outcome": "success",
    }
    (attempt,) = recorded.attempts(call)
    template = "/api/1.0/signings/{id}"
    assert attempt.name == f"GET {template}"
    assert attempt.status.status_code is StatusCode.UNSET
    shown = attributes(attempt)
    assert shown.pop("signing.request_id")
    assert shown == {
        "http.request.method": "GET",
        "http.response.status_code": 200,
        "server.address": "127.0.0.1",
        "server.port": int(sandbox.base_url.rpartition(":")[2]),
        "signing.id": signing.id,
        "signing_async.operation": "signings.get",
        "url.full": f"{sandbox.base_url}/api/1.0/signings/{signing.id}",
        "url.template": template,
    }
    assert attempt.instrumentation_scope is not None
    assert attempt.instrumentation_scope.name == "signing_async"


async def test_retried_call_has_a_client_span_for_each_attempt(
    sandbox: Sandbox, client: SigningClient, recorded: Recorded
) -> None:
    sandbox.faults.add("me", "503")
    await client.me()
    call = recorded.one("me")
    assert call.status.status_code is StatusCode.UNSET
    failed, succeeded = recorded.attempts(call)
    assert failed.status.status_code is StatusCode.ERROR
    assert not failed.status.description
    assert attributes(failed)["error.type"] == "503"
    assert attributes(failed)["http.response.status_code"] == 503
    assert "http.request.resend_count" not in attributes(failed)
    assert attributes(succeeded)["http.request.resend_count"] == 1
    (retry,) = events(call, "retry")
    assert retry["error.type"] == "ServerError"
    assert retry["signing_async.retry.delay"] >= 0
    (point,) = recorded.points(names.OPERATION_ATTEMPTS)
    assert (point.count, point.sum) == (1, 2)
    durations = recorded.points(names.REQUEST_DURATION)
    assert {point.attributes.get("error.type") for point in durations} == {"503", None}
    assert recorded.total(names.OPERATION_DURATION, signing_async__outcome="success") == 1


@pytest.mark.parametrize(
    ("fault", "verdicts"), [("drop-after-commit", ["effect"]), ("drop-before-commit", ["no_effect", "verified"])]
)
async def test_lost_response_is_reconciled_with_a_reading_and_a_verdict(
    sandbox: Sandbox, client: SigningClient, recorded: Recorded, fault: str, verdicts: list[str]
) -> None:
    signing = await _sendable(client)
    sandbox.faults.add("signings.send", fault)
    await client.signings.send(signing)
    call = recorded.one("signings.send")
    attempts = recorded.attempts(call)
    assert attributes(attempts[0])["error.type"] == "TransportError"
    assert attempts[0].status.status_code is StatusCode.ERROR
    assert "signings.get" in {attributes(attempt)["signing_async.operation"] for attempt in attempts}
    assert events(call, "reconcile.read")
    assert [event["signing_async.reconcile.verdict"] for event in events(call, "reconcile.verdict")] == verdicts
    assert attributes(call)["signing_async.outcome"] == "success"


async def test_unknown_outcome_is_an_error_and_counted(
    sandbox: Sandbox, client: SigningClient, recorded: Recorded
) -> None:
    signing = await _sendable(client)
    sandbox.faults.add("signings.send", "drop-after-commit")
    sandbox.faults.add("signings.get", "503", times=None)
    with pytest.raises(OutcomeUnknown):
        await client.with_options(timeout=0.5).signings.send(signing)
    call = recorded.one("signings.send")
    assert call.status.status_code is StatusCode.ERROR
    assert attributes(call)["signing_async.outcome"] == "unknown"
    assert attributes(call)["error.type"].startswith("OutcomeUnknown")
    assert events(call, "reconcile.verdict")[-1] == {"signing_async.reconcile.verdict": "unknown"}
    assert recorded.total(names.UNKNOWN_OUTCOMES, signing_async__operation="signings.send") == 1


@pytest.mark.parametrize(("pause", "passed"), [(0.5, True), (60, False)])
async def test_wait_for_the_rate_limiter_is_an_event(
    sandbox: Sandbox, recorded: Recorded, pause: float, passed: bool
) -> None:
    limiter = LocalRateLimiter()
    async with SigningClient(sandbox.base_url, sandbox.access_token(), rate_limiter=limiter, timeout=30) as client:
        limiter.pause(pause)
        with contextlib.nullcontext() if passed else pytest.raises(RateLimited):
            await client.me()
    call = recorded.one("me")
    (wait,) = events(call, "rate_limiter.wait")
    assert wait["signing_async.wait.passed"] is passed
    (point,) = recorded.points(names.WAIT_DURATION)
    assert (point.count, point.sum) == (1, wait["signing_async.wait.duration"])
    assert len(recorded.attempts(call)) == passed


# Tokens


async def test_refresh_shared_by_many_calls_is_one_refresh(sandbox: Sandbox, recorded: Recorded) -> None:
    oauth, authorize = sandbox_oauth(sandbox)
    async with oauth, SigningClient(sandbox.base_url, oauth) as client:
        await oauth.exchange(authorize())
        recorded.clear()
        sandbox.clock.advance(hours=2)
        await asyncio.gather(*(client.me() for _ in range(5)))
    refresh = recorded.one("token.refresh")
    assert attributes(refresh) == {"signing_async.refresh.result": "refreshed"}
    request = recorded.one("oauth.refresh")
    assert request.parent == refresh.context
    assert [attributes(attempt)["url.template"] for attempt in recorded.attempts(request)] == ["/api/oauth/token"]
    calls = recorded.named("me")
    assert refresh.parent in [call.context for call in calls]
    waited = [event for call in calls for event in events(call, "token.refresh")]
    assert 1 <= len(waited) <= 5
    assert {event["signing_async.refresh.result"] for event in waited} == {"succeeded"}
    assert recorded.total(names.REFRESHES) == 1


# How calls end


async def test_cancelled_call_ends_its_spans_as_errors(
    sandbox: Sandbox, client: SigningClient, recorded: Recorded
) -> None:
    sandbox.faults.add("me", "hang")
    task = asyncio.create_task(client.me())
    while not sandbox.requests_of("me"):
        await asyncio.sleep(0.01)
    assert recorded.total(names.ACTIVE_REQUESTS, server__address="127.0.0.1") == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    call = recorded.one("me")
    (attempt,) = recorded.attempts(call)
    for span in (call, attempt):
        assert span.status.status_code is StatusCode.ERROR
        assert attributes(span)["error.type"] == "CancelledError"
        assert not span.events
    assert attributes(call)["signing_async.outcome"] == "cancelled"
    assert recorded.total(names.ACTIVE_REQUESTS) == 0


async def test_bytes_of_both_directions_are_counted(
    sandbox: Sandbox, client: SigningClient, recorded: Recorded
) -> None:
    signing = await _sendable(client)
    content = make_pdf(text="x" * 5000)
    before = recorded.total(names.TRANSFERRED, network__io__direction="transmit")
    await client.documents.upload(signing, content, "second.pdf")
    sent = recorded.total(names.TRANSFERRED, network__io__direction="transmit") - before
    assert len(content) < sent < len(content) + 1000
    await client.signings.send(signing)
    await sandbox.complete(signing.id)
    document = (await client.signings.get(signing)).documents[0]
    before = recorded.total(names.TRANSFERRED, network__io__direction="receive")
    sealed = await client.documents.read_signed(signing, document)
    assert recorded.total(names.TRANSFERRED, network__io__direction="receive") - before == len(sealed)


async def test_value_in_the_path_of_any_endpoint_is_in_no_name_and_no_label(recorded: Recorded) -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.json_response({"id": "1"})

    templates = {
        "/api/1.0/signings/5f2c-17": "/api/1.0/signings/{id}",
        "/api/1.0/signings/Anna/recipients/18/{what}": "/api/1.0/signings/{id}/recipients/{recipient_id}/{what}",
        "/api/1.0/people/Anna": "/api/1.0/people/REDACTED",
        "/api/1.0/signingTemplates": "/api/1.0/signingTemplates",
    }
    async with serving(respond) as server, SigningClient(server.origin, "token") as client:
        for path in templates:
            await client.request("GET", path, path={"what": "x"} if "{" in path else {})
    expected = {f"GET {template}" for template in templates.values()}
    assert {span.name for span in recorded.spans} == expected
    for metric in (names.OPERATION_DURATION, names.OPERATION_ATTEMPTS):
        assert {point.attributes["signing_async.operation"] for point in recorded.points(metric)} == expected
    points = recorded.points(names.REQUEST_DURATION)
    assert {point.attributes["url.template"] for point in points} == set(templates.values())
