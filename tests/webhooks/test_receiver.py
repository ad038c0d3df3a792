"""The receiver without a server: what it decides, and that an event is acknowledged only after it was handled."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import queue
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from signing_async.errors import ConfigurationError
from signing_async.webhooks import (
    Claim,
    Decision,
    Event,
    MemorySeenEvents,
    Receiver,
    WebhookVerifier,
)
from tests.webhooks.deliveries import SECRET, event_body, signed

VERIFIER = WebhookVerifier(SECRET, max_body=10_000)


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    """Yield a body in parts."""
    for part in parts:
        yield part


class Ledger:
    """A handler that records event ids, and raises the errors it was given first."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.errors: list[BaseException] = []

    def plain(self, event: Event) -> None:
        """Handle the event as a plain function."""
        if self.errors:
            raise self.errors.pop(0)
        self.ids.append(event.id)

    async def coroutine(self, event: Event) -> None:
        """Handle the event as a coroutine function."""
        await asyncio.sleep(0)
        self.plain(event)


@pytest.fixture
def ledger() -> Ledger:
    """An empty ledger."""
    return Ledger()


@pytest.fixture(params=["plain", "coroutine"])
def handler(request: pytest.FixtureRequest, ledger: Ledger) -> Any:
    """A handler of each kind."""
    return getattr(ledger, request.param)


@pytest.fixture(params=["async", "blocking"])
def deliver(request: pytest.FixtureRequest) -> Any:
    """Deliver a genuine event to a receiver, with or without an event loop."""

    def run(receiver: Receiver, event_id: str = "evt_1") -> Decision:
        body = event_body(event_id)
        if request.param == "async":
            return asyncio.run(receiver.handle("POST", signed(body), chunks(body[:9], body[9:])))
        return receiver.handle_blocking("POST", signed(body), iter((body[:9], body[9:])))

    return run


def test_duplicate_is_acknowledged_but_not_handled_again(ledger: Ledger, handler: Any, deliver: Any) -> None:
    receiver = Receiver(VERIFIER, handler)
    responses = [deliver(receiver), deliver(receiver), deliver(receiver, "evt_2")]
    assert [(one.status, one.message) for one in responses] == [
        (202, "accepted"),
        (202, "duplicate"),
        (202, "accepted"),
    ]
    assert ledger.ids == ["evt_1", "evt_2"]


def test_event_type_cannot_forge_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps({"id": "evt_1", "type": "x\nWARNING forged" + "y" * 1000}).encode()
    receiver = Receiver(VERIFIER, lambda event: None)
    with caplog.at_level(logging.INFO, "signing_async.webhooks"):
        receiver.receive_blocking(signed(body), body)
        receiver.receive_blocking(signed(body), body)
    assert "\n" not in caplog.messages[0]
    assert len(caplog.messages[0]) < 200


def test_delivery_of_an_event_that_is_being_handled_gets_503(ledger: Ledger, deliver: Any) -> None:
    """A 202 would lose the event if the other handler failed."""
    seen = MemorySeenEvents()
    seen.claim("evt_1")
    receiver = Receiver(VERIFIER, ledger.plain, seen=seen)
    decision = deliver(receiver)
    assert (decision.status, decision.message) == (503, "the event is being handled")
    seen.release("evt_1")
    assert deliver(receiver).status == 202
    assert ledger.ids == ["evt_1"]


class FailingStore:
    """An asynchronous store of event ids; one of its steps fails."""

    lease = 60.0

    def __init__(self, failing: str) -> None:
        self.failing = failing
        self.inner = MemorySeenEvents()

    async def claim(self, event_id: str) -> Claim:
        claim: Claim = self._step("claim")(event_id)
        return claim

    async def confirm(self, event_id: str) -> None:
        self._step("confirm")(event_id)

    async def release(self, event_id: str) -> None:
        self._step("release")(event_id)

    def _step(self, name: str) -> Any:
        if name == self.failing:
            raise OSError("no connection")
        return getattr(self.inner, name)


def _succeed(event: Event) -> None:
    pass


def _fail(event: Event) -> None:
    raise RuntimeError("no")


def _queue_full(event: Event) -> None:
    raise queue.Full


@pytest.mark.parametrize(
    ("failing", "handler", "status", "message", "claim", "logged"),
    [
        ("", _succeed, 202, "accepted", Claim.CONFIRMED, []),
        ("claim", _succeed, 503, "cannot deduplicate events now", Claim.NEW, ["could not claim event evt_1"]),
        (
            "",
            _queue_full,
            503,
            "the queue is full",
            Claim.NEW,
            ["the queue is full: event evt_1 must be delivered again"],
        ),
        (
            "",
            _fail,
            503,
            "the handler failed",
            Claim.NEW,
            ["the handler failed for event evt_1: it must be delivered again"],
        ),
        (
            "confirm",
            _succeed,
            503,
            "cannot deduplicate events now",
            Claim.PENDING,
            ["event evt_1 was handled but could not be confirmed"],
        ),
        (
            "release",
            _fail,
            503,
            "the handler failed",
            Claim.PENDING,
            [
                "could not release event evt_1: it stays claimed until its lease expires",
                "the handler failed for event evt_1: it must be delivered again",
            ],
        ),
    ],
    ids=["accepted", "claim", "queue full", "handler", "confirm", "release"],
)
def test_each_failure_is_a_503_and_is_logged_with_the_event_id(
    failing: str,
    handler: Any,
    status: int,
    message: str,
    claim: Claim,
    logged: list[str],
    deliver: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FailingStore(failing)
    decision = deliver(Receiver(VERIFIER, handler, seen=store))
    assert (decision.status, decision.message) == (status, message)
    assert store.inner.claim("evt_1") is claim
    assert [record.getMessage() for record in caplog.records if record.name == "signing_async.webhooks"] == logged


def test_claim_is_released_when_the_handler_is_cancelled() -> None:
    """A server may cancel its request handlers at shutdown."""

    async def run() -> Claim:
        started = asyncio.Event()

        async def endless(event: Event) -> None:
            started.set()
            await asyncio.Event().wait()

        seen = MemorySeenEvents()
        body = event_body("a")
        task = asyncio.create_task(Receiver(VERIFIER, endless, seen=seen).receive(signed(body), body))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return seen.claim("a")

    assert asyncio.run(run()) is Claim.NEW


async def test_async_handler_that_exceeds_its_timeout_is_cancelled_and_the_claim_released() -> None:
    calls = 0

    async def slow_once(event: Event) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await asyncio.Event().wait()

    receiver = Receiver(VERIFIER, slow_once, hand_off_timeout=0.02)
    body = event_body("a")
    assert (await receiver.receive(signed(body), body)).status == 503
    assert (await receiver.receive(signed(body), body)).status == 202
    assert calls == 2


async def test_failure_after_the_lease_does_not_release_the_claim_of_another_receiver() -> None:
    released: list[str] = []

    class Recording(MemorySeenEvents):
        def release(self, event_id: str) -> None:
            released.append(event_id)

    def fail(event: Event) -> None:
        time.sleep(0.05 if event.id == "slow" else 0)
        raise RuntimeError("down")

    for name, lease in (("slow", 0.04), ("quick", 60.0)):
        receiver = Receiver(VERIFIER, fail, seen=Recording(lease=lease), hand_off_timeout=0.02)
        body = event_body(name)
        assert (await receiver.receive(signed(body), body)).status == 503
        assert receiver.receive_blocking(signed(body), body).status == 503
    assert released == ["quick"]


# Queues and draining


def test_full_queue_means_503_and_the_event_is_not_lost(deliver: Any) -> None:
    events: queue.Queue[Event] = queue.Queue(maxsize=1)
    receiver = Receiver(VERIFIER, events)
    assert deliver(receiver, "a").status == 202
    full = deliver(receiver, "b")
    assert full.status == 503
    assert ("Retry-After", "5") in full.headers
    assert events.get().id == "a"
    assert deliver(receiver, "b").status == 202


async def test_drain_waits_for_the_consumer_of_an_asyncio_queue() -> None:
    events: asyncio.Queue[Event] = asyncio.Queue(maxsize=1)
    receiver = Receiver(VERIFIER, events)
    first, second = event_body("a"), event_body("b")
    assert (await receiver.receive(signed(first), first)).status == 202
    assert (await receiver.receive(signed(second), second)).status == 503
    assert not await receiver.drain(timeout=0.01)

    async def consume() -> None:
        await events.get()
        events.task_done()

    consumer = asyncio.create_task(consume())
    assert await receiver.drain()
    await consumer
    late = await receiver.receive(signed(second), second)
    assert (late.status, late.message) == (503, "shutting down")
    assert (await receiver.receive({}, second)).status == 401


async def test_drain_waits_for_every_running_handler_and_starts_no_new_one() -> None:
    started = {"a": asyncio.Event(), "b": asyncio.Event()}
    proceed = {"a": asyncio.Event(), "b": asyncio.Event()}

    async def slow(event: Event) -> None:
        started[event.id].set()
        await proceed[event.id].wait()

    receiver = Receiver(VERIFIER, slow)
    bodies = [event_body(name) for name in started]
    deliveries = [asyncio.create_task(receiver.receive(signed(body), body)) for body in bodies]
    for event in started.values():
        await event.wait()
    draining = asyncio.create_task(receiver.drain())
    await asyncio.sleep(0)
    late = event_body("c")
    assert (await receiver.receive(signed(late), late)).status == 503
    proceed["a"].set()
    assert (await deliveries[0]).status == 202
    assert await receiver.drain(0.02) is False
    assert not draining.done()
    proceed["b"].set()
    assert await draining
    assert (await deliveries[1]).status == 202


# Arguments


def test_asyncio_queue_is_refused_in_threads() -> None:
    body = event_body("a")
    with pytest.raises(ConfigurationError) as caught:
        Receiver(VERIFIER, asyncio.Queue()).receive_blocking(signed(body), body)
    assert (
        str(caught.value) == "hand_off: an asyncio.Queue cannot be filled from threads, use a queue.Queue or a function"
    )


@pytest.mark.parametrize("handler", [None, "tasks.handle", []])
def test_handler_must_be_a_function_or_a_queue(handler: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^hand_off: must be an inbox, a function or a queue, got "):
        Receiver(VERIFIER, handler)


@pytest.mark.parametrize("value", [0, -1, math.nan, True, "5"])
@pytest.mark.parametrize("name", ["body_timeout", "hand_off_timeout"])
def test_timeout_that_is_no_number_above_0_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name}: must be a number above 0, got "):
        Receiver(VERIFIER, print, **{name: value})


def test_handler_timeout_must_be_below_the_lease() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Receiver(VERIFIER, print, hand_off_timeout=60)
    assert str(caught.value) == (
        "hand_off_timeout: must be below seen.lease (60 s), got 60 s:"
        " otherwise an event could be delivered again while its handler still runs"
    )


# Reading the body


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {}, 405),
        ("PUT", {}, 405),
        ("POST", {"Content-Length": "10001"}, 413),
        ("POST", {"Content-Length": "9" * 19}, 413),
        ("POST", {"Content-Length": "+9"}, 400),
        ("POST", {"Content-Encoding": "br"}, 415),
    ],
)
async def test_request_refused_by_its_head_is_not_read_and_closes_the_connection(
    method: str, headers: dict[str, str], status: int
) -> None:
    read: list[str] = []

    async def watched() -> AsyncIterator[bytes]:
        read.append("async")
        yield b""

    def watched_blocking() -> Iterator[bytes]:
        read.append("blocking")
        yield b""

    receiver = Receiver(VERIFIER, print)
    decision = await receiver.handle(method, headers, watched())
    assert decision == receiver.handle_blocking(method, headers, watched_blocking())
    assert decision.status == status
    assert ("Connection", "close") in decision.headers
    assert read == []


async def test_endless_body_is_read_only_up_to_the_limit() -> None:
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1000
            yield b"x" * 1000

    async def endless_async() -> AsyncIterator[bytes]:
        for chunk in endless():
            yield chunk

    receiver = Receiver(VERIFIER, print)
    assert (await receiver.handle("POST", {}, endless_async())).status == 413
    assert receiver.handle_blocking("POST", {}, endless()).status == 413
    assert taken == 22_000


async def test_slow_body_gets_408_and_a_broken_one_400() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async def broken() -> AsyncIterator[bytes]:
        yield b"{"
        raise ConnectionResetError

    receiver = Receiver(VERIFIER, print, body_timeout=0.01)
    assert (await receiver.handle("POST", {}, slow())).status == 408
    assert (await receiver.handle("POST", {}, broken())).status == 400


def test_slow_body_gets_408_and_a_broken_one_400_in_threads() -> None:
    def broken(seconds: float) -> Iterator[bytes]:
        yield b"{"
        time.sleep(seconds)
        raise ConnectionResetError

    receiver = Receiver(VERIFIER, print, body_timeout=60)
    assert receiver.handle_blocking("POST", {}, broken(0)).status == 400
    receiver.body_timeout = 0.05
    assert receiver.handle_blocking("POST", {}, broken(0.1)).status == 408
    receiver.body_timeout = -1
    assert receiver.handle_blocking("POST", {}, [b"{", b"}"]).status == 408
    assert receiver.handle_blocking("POST", {}, []).status == 408
