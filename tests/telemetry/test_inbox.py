"""The inbox: handlers linked to their deliveries, across processes, and the events that wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from signing_async.telemetry import names
from signing_async.webhooks import Drop, Event, HandlerRetryPolicy, Inbox, Receiver, RetryLater, WebhookVerifier
from signing_async.webhooks import inbox as inbox_worker  # private: how often the worker reports
from tests.telemetry.recorded import Recorded, attributes
from tests.webhooks.deliveries import SECRET, event_body, signed
from tests.webhooks.inboxes import AT_ONCE, add, fail, settled, until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "inbox.db"


@pytest.fixture
async def inbox(path: Path) -> AsyncIterator[Inbox]:
    async with Inbox(path, retry=AT_ONCE) as opened:
        yield opened


async def test_handler_is_a_consumer_span_that_links_to_its_delivery(inbox: Inbox, recorded: Recorded) -> None:
    seen: list[Event] = []
    inbox.on("signing.*")(seen.append)
    body = event_body("evt_1", signing={"id": "sig_1"})
    assert (await Receiver(WebhookVerifier(SECRET), inbox).receive(signed(body), body)).status == 202
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
    spans = [attributes(span) for span in recorded.named("inbox.handler")]
    outcomes = [
        (span["signing.event_id"], span["signing_async.inbox.attempt"], span["signing_async.inbox.outcome"])
        for span in spans
    ]
    assert sorted(outcomes) == [
        ("dead", 1, "retry"), ("dead", 2, "retry"), ("dead", 3, "dead"), ("dropped", 1, "dropped"),
        ("later", 1, "retry"), ("later", 2, "retry"), ("later", 3, "dead"),
    ]  # fmt: skip
    assert {span.get("error.type") for span in spans if span["signing.event_id"] == "dead"} == {"ValueError"}
    failed = [span for span in recorded.named("inbox.handler") if span.status.status_code is StatusCode.ERROR]
    assert [attributes(span)["error.type"] for span in failed if attributes(span)["signing.event_id"] == "later"] == [
        "dead"
    ]
    settled_at = {
        point.attributes["signing_async.inbox.outcome"]: (point.count, point.sum)
        for point in recorded.points(names.HANDLER_ATTEMPTS)
    }
    assert settled_at == {"dropped": (1, 1), "dead": (2, 6)}
    assert recorded.total(names.HANDLER_DURATION, signing_async__inbox__outcome="retry") == 4
    assert "Anna" not in recorded.text()


# What waits


def _gauges(recorded: Recorded) -> list[list[float]]:
    metrics = (names.PENDING_EVENTS, names.DEAD_LETTERS, names.OLDEST_PENDING)
    return [[point.value for point in recorded.points(metric)] for metric in metrics]


async def test_worker_reports_the_events_that_wait_unless_its_store_fails(
    path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_worker, "_REPORT_EVERY", 0.01)
    go_on = asyncio.Event()
    async with Inbox(path, retry=HandlerRetryPolicy(max_attempts=1)) as inbox:

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
