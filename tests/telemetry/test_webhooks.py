"""Deliveries of webhooks, the handlers of an inbox, and the events that wait in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from signing_async.telemetry import names
from signing_async.webhooks import Drop, Event, Inbox, Receiver, RetryLater, WebhookVerifier, aiohttp_handler
from signing_async.webhooks import inbox as inbox_worker  # private: how often the worker reports
from tests.telemetry.conftest import Recorded, attributes
from tests.webhooks.deliveries import SECRET, event_body, signed
from tests.webhooks.inboxes import AT_ONCE, add, fail, settled, until

VERIFIER = WebhookVerifier(SECRET)
BODY = event_body("evt_1", signing={"id": "sig_1"})


def _verdicts(recorded: Recorded) -> dict[str, float]:
    points = recorded.points(names.DELIVERIES)
    return {point.attributes["signing_async.webhook.verdict"]: point.value for point in points}


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


async def test_refusal_is_counted_by_its_verdict_and_only_a_delivery_that_must_be_repeated_is_an_error(
    recorded: Recorded,
) -> None:
    def fail(_: Event) -> None:
        raise RuntimeError("Anna Berg")

    async def chunks() -> AsyncIterator[bytes]:
        yield BODY

    expected = []
    for method, headers, status, verdict in (
        ("PUT", {}, 405, "not_post"),
        ("POST", {}, 401, "signature_missing"),
        ("POST", signed(BODY), 503, "handler_failed"),
    ):
        decision = await Receiver(VERIFIER, fail).handle(method, headers, chunks())
        assert (decision.status, decision.verdict) == (status, verdict)
        expected.append({"http.response.status_code": status, "signing_async.webhook.verdict": verdict})
    expected[2] |= {"signing.event_id": "evt_1", "signing.id": "sig_1", "error.type": "503"}
    spans = recorded.named("webhook.delivery")
    assert [attributes(span) for span in spans] == expected
    assert [span.status.status_code for span in spans] == [StatusCode.UNSET, StatusCode.UNSET, StatusCode.ERROR]
    assert _verdicts(recorded) == {"not_post": 1, "signature_missing": 1, "handler_failed": 1}
    assert "Anna" not in recorded.text()


# Inboxes


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[Inbox]:
    async with Inbox(tmp_path / "inbox.db", retry=AT_ONCE) as opened:
        yield opened


async def test_handler_is_a_consumer_span_that_links_to_its_delivery(inbox: Inbox, recorded: Recorded) -> None:
    seen: list[Event] = []
    inbox.on("signing.*")(seen.append)
    assert (await Receiver(VERIFIER, inbox).receive(signed(BODY), BODY)).status == 202
    async with inbox.running():
        await settled(inbox)
    span, delivery = recorded.one("inbox.handler"), recorded.one("webhook.delivery")
    assert span.kind is SpanKind.CONSUMER
    assert span.parent is None
    (link,) = span.links
    assert delivery.context is not None
    assert (link.context.span_id, link.context.is_remote) == (delivery.context.span_id, True)
    assert attributes(span) == {
        "signing.event_id": "evt_1",
        "signing.id": "sig_1",
        "signing_async.inbox.attempt": 1,
        "signing_async.inbox.handler": "signing.*",
        "signing_async.inbox.outcome": "handled",
    }
    assert seen[0].trace_context is not None
    assert recorded.total(names.HANDLER_DURATION, signing_async__inbox__outcome="handled") == 1
    (point,) = recorded.points(names.HANDLER_ATTEMPTS)
    assert (point.count, point.sum) == (1, 1)


async def test_each_attempt_has_its_outcome(inbox: Inbox, recorded: Recorded) -> None:
    @inbox.on("*")
    def handle(event: Event) -> None:
        if event.id == "dropped":
            raise Drop("Anna Berg")
        if event.id == "later":
            raise RetryLater(0, "Anna Berg")
        raise ValueError("Anna Berg")

    for name in ("dropped", "later", "dead"):
        await add(inbox, name)
    async with inbox.running():
        await settled(inbox)
    spans = recorded.named("inbox.handler")
    told = ("signing.event_id", "signing_async.inbox.attempt", "signing_async.inbox.outcome", "error.type")
    assert sorted([attributes(span).get(name) for name in told] for span in spans) == [
        ["dead", 1, "retry", "ValueError"],
        ["dead", 2, "retry", "ValueError"],
        ["dead", 3, "dead", "ValueError"],
        ["dropped", 1, "dropped", None],
        ["later", 1, "retry", None],
        ["later", 2, "retry", None],
        ["later", 3, "dead", "dead"],
    ]
    for span in spans:
        assert (span.status.status_code is StatusCode.ERROR) == ("error.type" in attributes(span))
    settled_at = {
        point.attributes["signing_async.inbox.outcome"]: (point.count, point.sum)
        for point in recorded.points(names.HANDLER_ATTEMPTS)
    }
    assert settled_at == {"dropped": (1, 1), "dead": (2, 6)}
    assert recorded.total(names.HANDLER_DURATION, signing_async__inbox__outcome="retry") == 4
    assert "Anna" not in recorded.text()


def _gauges(recorded: Recorded) -> list[list[float]]:
    metrics = (names.PENDING_EVENTS, names.DEAD_LETTERS, names.OLDEST_PENDING)
    return [[point.value for point in recorded.points(metric)] for metric in metrics]


async def test_worker_reports_the_events_that_wait_unless_its_store_fails(
    inbox: Inbox, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_worker, "_REPORT_EVERY", 0.01)
    go_on = asyncio.Event()

    @inbox.on("*")
    async def handle(event: Event) -> None:
        if event.id == "dead":
            raise ValueError
        await go_on.wait()

    for name in ("dead", "one", "two"):
        await add(inbox, name)
    async with inbox.running():
        await until(lambda: _gauges(recorded)[:2] == [[2], [1]])
        (age,) = _gauges(recorded)[2]
        assert 0 < age < 60
        go_on.set()
        await until(lambda: _gauges(recorded) == [[0], [1], [0]])
        with monkeypatch.context() as patched:
            patched.setattr(inbox.store, "stats", fail)
            await until(lambda: _gauges(recorded) == [[], [], []])
        await until(lambda: _gauges(recorded)[0] == [0])
    await until(lambda: _gauges(recorded) == [[], [], []])
