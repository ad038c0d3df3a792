"""Deliveries of webhooks: a span, a verdict and a duration for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from signing_async.telemetry import names
from signing_async.webhooks import Event, Receiver, WebhookVerifier, aiohttp_handler
from tests.telemetry.recorded import Recorded, attributes
from tests.webhooks.deliveries import SECRET, event_body, signed

VERIFIER = WebhookVerifier(SECRET, max_body=1000)
BODY = event_body("evt_1", signing={"id": "sig_1"})


async def _chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def _accept(_: Event) -> None: ...


def _verdicts(recorded: Recorded) -> dict[str, float]:
    return {
        point.attributes["signing_async.webhook.verdict"]: point.value for point in recorded.points(names.DELIVERIES)
    }


async def test_delivery_is_a_consumer_span_under_that_of_the_server(recorded: Recorded) -> None:
    async def handler(_: Event) -> None:
        with trace.get_tracer("application").start_as_current_span("handler"):
            await asyncio.sleep(0)

    app = web.Application()
    app.router.add_post("/", aiohttp_handler(Receiver(VERIFIER, handler)))
    async with TestClient(TestServer(app)) as client:
        for status in (202, 202):
            assert (await client.post("/", data=BODY, headers=signed(BODY))).status == status
    first, second = recorded.named("webhook.delivery")
    assert first.kind is SpanKind.CONSUMER
    assert first.status.status_code is StatusCode.UNSET
    assert attributes(first) == {
        "signing.event_id": "evt_1",
        "signing.id": "sig_1",
        "http.response.status_code": 202,
        "signing_async.webhook.verdict": "accepted",
    }
    assert attributes(second)["signing_async.webhook.verdict"] == "duplicate"
    assert [span.name for span in recorded.children(first)] == ["handler"]
    assert _verdicts(recorded) == {"accepted": 1, "duplicate": 1}
    assert recorded.total(names.DELIVERY_DURATION, signing_async__webhook__verdict="accepted") == 1


@pytest.mark.parametrize(
    ("method", "body", "status", "verdict"),
    [("PUT", BODY, 405, "not_post"), ("POST", BODY, 401, "signature_missing")],
)
async def test_refusal_is_counted_by_its_verdict_and_is_no_error(
    recorded: Recorded, method: str, body: bytes, status: int, verdict: str
) -> None:
    decision = await Receiver(VERIFIER, _accept).handle(method, {}, _chunks(body))
    assert (decision.status, decision.verdict) == (status, verdict)
    span = recorded.one("webhook.delivery")
    assert attributes(span) == {"http.response.status_code": status, "signing_async.webhook.verdict": verdict}
    assert span.status.status_code is StatusCode.UNSET
    assert _verdicts(recorded) == {verdict: 1}


async def test_delivery_that_must_be_repeated_is_an_error(recorded: Recorded) -> None:
    def fail(_: Event) -> None:
        raise RuntimeError("Anna Berg")

    assert (await Receiver(VERIFIER, fail).receive(signed(BODY), BODY)).status == 503
    span = recorded.one("webhook.delivery")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "503"
    assert _verdicts(recorded) == {"handler_failed": 1}
    assert "Anna" not in recorded.text()
