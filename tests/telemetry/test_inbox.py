"""The inbox: handlers linked to their deliveries, across processes, and the events that wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from signing_async import InboxError
from signing_async.telemetry import names
from signing_async.webhooks import (
    Drop,
    Event,
    HandlerRetryPolicy,
    Inbox,
    Receiver,
    RetryLater,
    WebhookVerifier,
)
from signing_async.webhooks import inbox as inbox_worker
from tests.telemetry.recorded import Recorded, attributes
from tests.webhooks.deliveries import SECRET, event_body, signed
from tests.webhooks.inboxes import AT_ONCE, add, settled

VERIFIER = WebhookVerifier(SECRET)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "inbox.db"


@pytest.fixture
async def inbox(path: Path) -> AsyncIterator[Inbox]:
    async with Inbox(path, retry=AT_ONCE) as opened:
        yield opened


async def _deliver(inbox: Inbox, name: str = "evt_1") -> None:
    body = event_body(name, signing={"id": "sig_1"})
    assert (await Receiver(VERIFIER, inbox).receive(signed(body), body)).status == 202


def _links(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def _id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


async def _until(found: Any) -> None:
    async with asyncio.timeout(30):
        while not found():
            await asyncio.sleep(0.005)


async def test_handler_is_a_consumer_span_that_links_to_its_delivery(inbox: Inbox, recorded: Recorded) -> None:
    seen: list[Event] = []
    inbox.on("signing.*")(seen.append)
    await _deliver(inbox)
    async with inbox.running():
        await settled(inbox)
    span, delivery = recorded.one("inbox.handler"), recorded.one("webhook.delivery")
    assert span.kind is SpanKind.CONSUMER
    assert span.parent is None
    assert _links(span) == [_id(delivery)]
    assert span.links[0].context.is_remote
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


async def test_worker_reports_the_events_that_wait(
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
            await _until(lambda: _gauges(recorded)[:2] == [[2], [1]])
            (age,) = _gauges(recorded)[2]
            assert 0 < age < 60
            go_on.set()
            await _until(lambda: _gauges(recorded) == [[0], [1], [0]])
        await _until(lambda: _gauges(recorded) == [[], [], []])


@pytest.mark.parametrize("error", [InboxError("the disk is full"), ZeroDivisionError("a mistake in the store")])
async def test_nothing_is_reported_while_the_store_fails(
    error: Exception, path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_worker, "_REPORT_EVERY", 0.01)
    async with Inbox(path) as inbox, inbox.running():
        await _until(lambda: _gauges(recorded)[0] == [0])

        async def fail() -> None:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(inbox.store, "stats", fail)
            await _until(lambda: _gauges(recorded) == [[], [], []])
        await _until(lambda: _gauges(recorded)[0] == [0])
