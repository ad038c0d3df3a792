"""The receiver without a server: what it decides, and that an event is acknowledged only after it was handled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from signing_async import ConfigurationError
from signing_async.webhooks import (
    Claim,
    Decision,
    Event,
    EventFilter,
    Inbox,
    MemorySeenEvents,
    Receiver,
    WebhookVerifier,
    decide,
)
from tests.webhooks.deliveries import SECRET, event_body, hex_of, signed
from tests.webhooks.inboxes import altered_store, fail, settled

VERIFIER = WebhookVerifier(SECRET, max_body=10_000)
LOGGER = "signing_async.webhooks"
BODY = event_body("evt_1")


async def receive(receiver: Receiver, name: str) -> Decision:
    """Deliver a genuine event."""
    body = event_body(name)
    return await receiver.receive(signed(body), body)


@pytest.fixture(params=["async", "blocking"])
def deliver(request: pytest.FixtureRequest) -> Any:
    """Deliver a genuine event to a receiver, with or without an event loop."""

    def run(receiver: Receiver, body: bytes = BODY) -> Decision:
        async def chunks() -> AsyncIterator[bytes]:
            yield body[:9]
            yield body[9:]

        if request.param == "async":
            return asyncio.run(receiver.handle("POST", signed(body), chunks()))
        return receiver.handle_blocking("POST", signed(body), iter((body[:9], body[9:])))

    return run


# The decision


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ([(b"x-signature", hex_of(BODY).encode())], BODY, 202),
        ({**signed(BODY), "Content-Encoding": "identity"}, BODY, 202),
        ({**signed(BODY), "Content-Encoding": "gzip"}, BODY, 415),
        ({**signed(BODY), "content-length": "9" * 5000}, BODY, 413),
        ({}, BODY, 401),
        (signed(b"{}"), b"{}", 400),
        (signed(b" " * 10_000), b" " * 10_000, 400),
        (signed(b" " * 10_001), b" " * 10_001, 413),
    ],
)
def test_decide_maps_a_delivery_to_a_status_and_an_event(headers: Any, body: bytes, status: int) -> None:
    decision = decide(VERIFIER, headers, body)
    assert decision.status == status
    assert (decision.event is not None) == (status == 202)
    assert json.loads(decision.body)["message" if status == 202 else "error"]


def test_rejections_and_duplicates_are_logged_on_one_line_without_secret_signature_or_body(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body, nameless = event_body("a", email="person@example.com"), b'{"email": "person@example.com"}'
    odd = json.dumps({"id": "evt_1", "type": "x\nWARNING forged" + "y" * 1000}).encode()
    receiver = Receiver(VERIFIER, lambda event: None)
    with caplog.at_level(logging.INFO, LOGGER):
        assert decide(VERIFIER, signed(body, "another"), body).status == 401
        assert decide(VERIFIER, signed(nameless), nameless).status == 400
        assert [receiver.receive_blocking(signed(odd), odd).verdict for _ in range(2)] == ["accepted", "duplicate"]
    *rejected, dropped = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert rejected == [
        "rejected a webhook delivery (mismatch): no secret matches the signature",
        "rejected a webhook delivery with a valid signature: the event id is missing",
    ]
    assert "\n" not in dropped
    assert len(dropped) < 200
    for hidden in (SECRET, hex_of(body), hex_of(body, "another"), "person@example.com"):
        assert hidden not in caplog.text


# Handlers, duplicates and failures


def test_delivery_of_an_event_that_is_being_handled_gets_503(deliver: Any) -> None:
    """A 202 would lose the event if the other handler failed."""
    seen, events = MemorySeenEvents(), list[Event]()
    seen.claim("evt_1")
    receiver = Receiver(VERIFIER, events.append, seen=seen)
    decision = deliver(receiver)
    assert (decision.status, decision.message, events) == (503, "the event is being handled", [])
    seen.release("evt_1")
    assert deliver(receiver).status == 202


class FailingStore:
    """An asynchronous store of event ids; one of its steps fails."""

    lease = 60.0

    def __init__(self, failing: str) -> None:
        self.failing = failing
        self.inner = MemorySeenEvents()

    def __getattr__(self, name: str) -> Any:
        async def step(event_id: str) -> Any:
            if name == self.failing:
                raise OSError("no connection")
            return getattr(self.inner, name)(event_id)

        return step


UNAVAILABLE = "cannot deduplicate events now"


@pytest.mark.parametrize(
    ("failing", "error", "message", "claim"),
    [
        ("", None, "accepted", Claim.CONFIRMED),
        ("claim", None, UNAVAILABLE, Claim.NEW),
        ("confirm", None, UNAVAILABLE, Claim.PENDING),
        ("", queue.Full(), "the queue is full", Claim.NEW),
        ("", RuntimeError("no"), "the handler failed", Claim.NEW),
        ("release", RuntimeError("no"), "the handler failed", Claim.PENDING),
    ],
)
def test_each_failure_is_a_503_and_is_logged_with_the_event_id(
    failing: str, error: Exception | None, message: str, claim: Claim, deliver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(event: Event) -> None:
        if error is not None:
            raise error

    store = FailingStore(failing)
    decision = deliver(Receiver(VERIFIER, handle, seen=store, retry_after=7))
    assert (decision.status, decision.message) == (202 if message == "accepted" else 503, message)
    assert decision.status == 202 or ("Retry-After", "7") in decision.headers
    assert store.inner.claim("evt_1") is claim
    logged = [] if message == "accepted" else [f"event evt_1 must be delivered again: {message}"]
    assert [record.getMessage() for record in caplog.records if record.name == LOGGER] == logged


@pytest.mark.parametrize(("failing", "claim"), [("", Claim.NEW), ("release", Claim.PENDING)])
async def test_cancelled_handler_releases_its_claim(failing: str, claim: Claim) -> None:
    """A server may cancel its request handlers at shutdown. The cancellation is raised even if the release fails."""
    started, seen = asyncio.Event(), FailingStore(failing)

    async def endless(event: Event) -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(receive(Receiver(VERIFIER, endless, seen=seen), "a"))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    notes = getattr(caught.value, "__notes__", [])
    assert ["the claim was not released: OSError" in note for note in notes] == [True] * bool(failing)
    assert seen.inner.claim("a") is claim


async def test_handler_that_exceeds_its_timeout_releases_its_claim() -> None:
    async def endless(event: Event) -> None:
        await asyncio.Event().wait()

    seen = MemorySeenEvents()
    assert (await receive(Receiver(VERIFIER, endless, seen=seen, hand_off_timeout=0.02), "a")).status == 503
    assert seen.claim("a") is Claim.NEW


async def test_failure_after_the_lease_does_not_release_the_claim_of_another_receiver() -> None:
    class Recording(MemorySeenEvents):
        def release(self, event_id: str) -> None:
            released.append(event_id)

    def fail(event: Event) -> None:
        time.sleep(0.05 if event.id == "slow" else 0)
        raise RuntimeError("down")

    released: list[str] = []
    for name, lease in (("slow", 0.04), ("quick", 60.0)):
        receiver = Receiver(VERIFIER, fail, seen=Recording(lease=lease), hand_off_timeout=0.02)
        assert (await receive(receiver, name)).status == 503
    assert released == ["quick"]


# Inboxes and tenants


def test_delivery_is_acknowledged_once_it_is_stored_and_a_failing_store_is_a_503(
    deliver: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The body is stored as it was received; a duplicate is acknowledged and stored once."""
    path, methods = tmp_path / "inbox.db", dict[str, Any]()
    inbox = Inbox(altered_store(path, methods))
    receiver = Receiver(VERIFIER, inbox, retry_after=7)
    body, other = event_body("evt_1", padding="ö ").replace(b", ", b"  ,\t"), event_body("evt_2")

    def stored() -> list[tuple[str, bytes]]:
        """Return what another process sees in the inbox."""
        with contextlib.closing(sqlite3.connect(path)) as database:
            return database.execute("SELECT id, body FROM events ORDER BY seq").fetchall()

    for message in ("accepted", "duplicate"):
        decision = deliver(receiver, body)
        assert (decision.status, decision.body) == (202, b'{"message": "%s"}' % message.encode())
        assert stored() == [("evt_1", body)]
    methods["add"] = fail
    decision = deliver(receiver, other)
    assert (decision.status, decision.body) == (503, b'{"error": "cannot store events now"}')
    assert ("Retry-After", "7") in decision.headers
    assert "event evt_2 must be delivered again: cannot store events now" in caplog.text
    methods.clear()
    assert deliver(receiver, other).message == "accepted"
    assert stored() == [("evt_1", body), ("evt_2", other)]
    asyncio.run(inbox.aclose())


async def test_equal_ids_of_two_tenants_are_two_events_of_two_signings(tmp_path: Path) -> None:
    body = event_body("evt_1", signing={"id": "sig_1"})
    handled: set[tuple[str | None, str, str | None]] = set()
    both = asyncio.Barrier(2)
    async with Inbox(tmp_path / "inbox.db", key=b"k" * 32) as inbox:

        @inbox.on("*")
        async def handle(event: Event) -> None:
            handled.add((event.namespace, event.id, event.signing_id))
            await both.wait()  # neither waits for the other's signing

        for tenant in ("acme", "globex"):
            receiver = Receiver(VERIFIER, inbox, namespace=tenant)
            messages = [(await receiver.receive(signed(body), body)).message for _ in range(2)]
            assert messages == ["accepted", "duplicate"]
        async with inbox.running():
            events = await settled(inbox)
        assert handled == {("acme", "evt_1", "sig_1"), ("globex", "evt_1", "sig_1")}
        assert [event.id for event in events] == ["acme:evt_1", "globex:evt_1"]
        assert await inbox.retry(EventFilter(ids=["acme:evt_1"])) == 1


async def test_receivers_that_share_a_store_of_seen_events_keep_their_tenants_apart() -> None:
    handled, seen = list[Event](), MemorySeenEvents()
    for tenant in ("acme", "globex", "acme"):
        receiver = Receiver(VERIFIER, handled.append, seen=seen, namespace=tenant)
        assert (await receiver.receive(signed(BODY), BODY)).status == 202
    assert [(event.namespace, event.key) for event in handled] == [("acme", "acme:evt_1"), ("globex", "globex:evt_1")]


# Queues and draining


async def test_drain_waits_for_the_consumer_of_an_asyncio_queue() -> None:
    events: asyncio.Queue[Event] = asyncio.Queue(maxsize=1)
    receiver = Receiver(VERIFIER, events)
    assert [(await receive(receiver, name)).status for name in ("a", "b")] == [202, 503]
    assert not await receiver.drain(timeout=0.01)
    draining = asyncio.create_task(receiver.drain())
    await events.get()
    events.task_done()
    assert await draining
    with pytest.raises(ConfigurationError, match=r"^hand_off: an asyncio\.Queue cannot be filled from threads"):
        receiver.receive_blocking(signed(BODY), BODY)


async def test_drain_waits_for_every_running_handler_and_refuses_later_deliveries() -> None:
    started = {"a": asyncio.Event(), "b": asyncio.Event()}
    proceed = {"a": asyncio.Event(), "b": asyncio.Event()}

    async def slow(event: Event) -> None:
        started[event.id].set()
        await proceed[event.id].wait()

    receiver = Receiver(VERIFIER, slow)
    deliveries = [asyncio.create_task(receive(receiver, name)) for name in started]
    for event in started.values():
        await event.wait()
    draining = asyncio.create_task(receiver.drain())
    proceed["a"].set()
    assert (await deliveries[0]).status == 202
    assert await receiver.drain(0.02) is False
    assert not draining.done()
    proceed["b"].set()
    assert await draining
    assert (await deliveries[1]).status == 202
    for late in (await receive(receiver, "c"), receiver.receive_blocking(signed(BODY), BODY)):
        assert (late.status, late.message) == (503, "shutting down")


@pytest.mark.parametrize(
    ("hand_off", "settings", "message"),
    [
        ("tasks.handle", {}, r"hand_off: must be an inbox, a function or a queue, got 'tasks\.handle'"),
        (print, {"body_timeout": 0}, "body_timeout: must be a number above 0, got 0"),
        (print, {"hand_off_timeout": 60}, r"hand_off_timeout: must be below seen\.lease \(60 s\), got 60 s: .*"),
        (Inbox("inbox.db"), {"seen": MemorySeenEvents()}, "seen: must be None with an inbox, which deduplicates .*"),
        *((print, {"namespace": name}, "namespace: must be .*") for name in ("a:b", "å", 5)),
    ],
)
def test_invalid_setting_is_refused(hand_off: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{message}$"):
        Receiver(VERIFIER, hand_off, **settings)
