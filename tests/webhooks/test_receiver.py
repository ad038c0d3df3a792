"""The receiver without a server: what it decides, and that an event is acknowledged only after it was handled."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from signing_async import ConfigurationError
from signing_async.webhooks import Claim, Decision, Event, MemorySeenEvents, Receiver, WebhookVerifier, decide
from tests.webhooks.deliveries import SECRET, event_body, hex_of, signed

VERIFIER = WebhookVerifier(SECRET, max_body=10_000)
LOGGER = "signing_async.webhooks"
BODY = event_body("evt_1")


async def receive(receiver: Receiver, name: str) -> Decision:
    """Deliver a genuine event."""
    body = event_body(name)
    return await receiver.receive(signed(body), body)


async def in_parts(*parts: bytes) -> AsyncIterator[bytes]:
    """Yield a body in parts."""
    for part in parts:
        yield part


@pytest.fixture(params=["async", "blocking"])
def deliver(request: pytest.FixtureRequest) -> Any:
    """Deliver a genuine event to a receiver, with or without an event loop."""

    def run(receiver: Receiver, event_id: str = "evt_1") -> Decision:
        body = event_body(event_id)
        if request.param == "async":
            return asyncio.run(receiver.handle("POST", signed(body), in_parts(body[:9], body[9:])))
        return receiver.handle_blocking("POST", signed(body), iter((body[:9], body[9:])))

    return run


# The decision


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        (signed(BODY), BODY, 202),
        ([(b"x-signature", hex_of(BODY).encode())], BODY, 202),
        ({**signed(BODY), "Content-Encoding": "identity"}, BODY, 202),
        ({**signed(BODY), "Content-Encoding": "gzip"}, BODY, 415),
        ({**signed(BODY), "content-length": "10000"}, BODY, 202),
        ({**signed(BODY), "content-length": "9" * 5000}, BODY, 413),
        ({**signed(BODY), "content-length": "nonsense"}, BODY, 400),
        (signed(event_body("b")), BODY, 401),
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
    body = event_body("a", email="person@example.com")
    odd = json.dumps({"id": "evt_1", "type": "x\nWARNING forged" + "y" * 1000}).encode()
    receiver = Receiver(VERIFIER, lambda event: None)
    with caplog.at_level(logging.INFO, LOGGER):
        assert decide(VERIFIER, signed(body, "another"), body).status == 401
        assert decide(VERIFIER, signed(b'{"email": "person@example.com"}'), b'{"email": "person@example.com"}').status
        assert [receiver.receive_blocking(signed(odd), odd).verdict for _ in range(2)] == ["accepted", "duplicate"]
    *rejected, dropped = [record.getMessage() for record in caplog.records]
    assert rejected == [
        "rejected a webhook delivery (mismatch): no secret matches the signature",
        "rejected a webhook delivery with a valid signature: the event id is missing",
    ]
    assert "\n" not in dropped
    assert len(dropped) < 200
    for hidden in (SECRET, hex_of(body), hex_of(body, "another"), "person@example.com"):
        assert hidden not in caplog.text


# Handlers, duplicates and failures


@pytest.mark.parametrize("is_async", [False, True])
def test_duplicate_is_acknowledged_but_not_handled_again(is_async: bool, deliver: Any) -> None:
    ids: list[str] = []

    async def handle(event: Event) -> None:
        await asyncio.sleep(0)
        ids.append(event.id)

    receiver = Receiver(VERIFIER, handle if is_async else lambda event: ids.append(event.id))
    responses = [deliver(receiver), deliver(receiver), deliver(receiver, "evt_2")]
    assert [(one.status, one.message) for one in responses] == [
        (202, "accepted"),
        (202, "duplicate"),
        (202, "accepted"),
    ]
    assert ids == ["evt_1", "evt_2"]


def test_threads_run_plain_handlers_themselves_and_async_handlers_in_one_loop() -> None:
    threads: list[threading.Thread] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def handle(event: Event) -> None:
        loops.append(asyncio.get_running_loop())

    def deliver_all() -> None:
        for handler in (lambda event: threads.append(threading.current_thread()), handle):
            assert Receiver(VERIFIER, handler).receive_blocking(signed(BODY), BODY).status == 202

    callers = [threading.Thread(target=deliver_all) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert set(threads) == set(callers)
    assert len(loops) == 2
    assert len(set(loops)) == 1


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

    async def claim(self, event_id: str) -> Claim:
        return self._step("claim").claim(event_id)

    async def confirm(self, event_id: str) -> None:
        self._step("confirm").confirm(event_id)

    async def release(self, event_id: str) -> None:
        self._step("release").release(event_id)

    def _step(self, name: str) -> MemorySeenEvents:
        if name == self.failing:
            raise OSError("no connection")
        return self.inner


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
    failing: str,
    error: Exception | None,
    message: str,
    claim: Claim,
    deliver: Any,
    caplog: pytest.LogCaptureFixture,
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


async def test_handler_that_is_cancelled_or_exceeds_its_timeout_releases_the_claim() -> None:
    """A server may cancel its request handlers at shutdown."""
    started, seen = asyncio.Event(), MemorySeenEvents()

    async def endless(event: Event) -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(receive(Receiver(VERIFIER, endless, seen=seen), "a"))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await receive(Receiver(VERIFIER, endless, seen=seen, hand_off_timeout=0.02), "a")).status == 503
    assert seen.claim("a") is Claim.NEW


async def test_cancellation_is_raised_although_the_claim_cannot_be_released() -> None:
    started = asyncio.Event()

    async def endless(event: Event) -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(receive(Receiver(VERIFIER, endless, seen=FailingStore("release")), "a"))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert "the claim was not released: OSError" in caught.value.__notes__[0]


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


# Queues and draining


async def test_drain_waits_for_the_consumer_of_an_asyncio_queue_and_refuses_the_rest() -> None:
    events: asyncio.Queue[Event] = asyncio.Queue(maxsize=1)
    receiver = Receiver(VERIFIER, events)
    assert [(await receive(receiver, name)).status for name in ("a", "b")] == [202, 503]
    assert not await receiver.drain(timeout=0.01)
    draining = asyncio.create_task(receiver.drain())
    await events.get()
    events.task_done()
    assert await draining
    late = await receive(receiver, "b")
    assert (late.status, late.message) == (503, "shutting down")
    with pytest.raises(ConfigurationError, match=r"^hand_off: an asyncio\.Queue cannot be filled from threads"):
        receiver.receive_blocking(signed(BODY), BODY)


@pytest.mark.parametrize(
    ("hand_off", "settings", "message"),
    [
        ("tasks.handle", {}, r"hand_off: must be an inbox, a function or a queue, got 'tasks\.handle'"),
        (print, {"body_timeout": 0}, "body_timeout: must be a number above 0, got 0"),
        (print, {"hand_off_timeout": -1}, "hand_off_timeout: must be a number above 0, got -1"),
        (print, {"hand_off_timeout": 60}, r"hand_off_timeout: must be below seen\.lease \(60 s\), got 60 s: .*"),
        *((print, {"namespace": name}, "namespace: must be .*") for name in ("", "a:b", "å", 5)),
    ],
)
def test_invalid_setting_is_refused(hand_off: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{message}$"):
        Receiver(VERIFIER, hand_off, **settings)


# Reading the body


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {}, 405),
        ("POST", {"Content-Length": "10001"}, 413),
        ("POST", {"Content-Length": "+9"}, 400),
        ("POST", {"Content-Encoding": "br"}, 415),
    ],
)
async def test_request_refused_by_its_head_is_not_read_and_closes_the_connection(
    method: str, headers: dict[str, str], status: int
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        raise AssertionError("it is read")
        yield b""

    receiver = Receiver(VERIFIER, print)
    decision = await receiver.handle(method, headers, chunks())
    assert decision == receiver.handle_blocking(method, headers, (1 // 0 for _ in "read"))  # type: ignore[misc]
    assert decision.status == status
    assert ("Connection", "close") in decision.headers


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
    async def chunks(error: Exception | None) -> AsyncIterator[bytes]:
        yield b"{"
        if error is not None:
            raise error
        await asyncio.Event().wait()

    def chunks_blocking(error: Exception | None) -> Iterator[bytes]:
        yield b"{"
        time.sleep(0 if error else 0.3)
        if error is not None:
            raise error
        yield b"}"

    receiver = Receiver(VERIFIER, print, body_timeout=0.2)
    for error, status in ((None, 408), (ConnectionResetError(), 400)):
        assert (await receiver.handle("POST", {}, chunks(error))).status == status
        assert receiver.handle_blocking("POST", {}, chunks_blocking(error)).status == status


async def test_drain_waits_for_every_running_handler() -> None:
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
