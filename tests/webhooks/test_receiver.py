"""The receiver without a server: what it decides, and that an event is acknowledged only when it is safe."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from signing_async.errors import ConfigurationError
from signing_async.webhooks import (
    STANDARD_WEBHOOKS,
    Claim,
    Decision,
    Event,
    MemorySeenEvents,
    Receiver,
    WebhookVerifier,
    decide,
    sign,
)
from signing_async.webhooks.receiver import BROKEN, TOO_LARGE, TOO_SLOW, admit
from tests.webhooks.deliveries import SECRET, event_body, hex_of, signed

VERIFIER = WebhookVerifier(SECRET, max_body=10_000)


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        (signed(event_body("a")), event_body("a"), 202),
        ([(b"x-signature", hex_of(event_body("a")).encode())], event_body("a"), 202),
        ({**signed(event_body("a")), "Content-Encoding": "identity"}, event_body("a"), 202),
        ({**signed(event_body("a")), "Content-Encoding": "gzip"}, event_body("a"), 415),
        ({**signed(event_body("a")), "content-length": "10001"}, event_body("a"), 413),
        ({**signed(event_body("a")), "content-length": "9" * 5000}, event_body("a"), 413),
        ({**signed(event_body("a")), "content-length": "nonsense"}, event_body("a"), 400),
        (signed(event_body("b")), event_body("a"), 401),
        ({}, event_body("a"), 401),
        ({"X-Signature": "é"}, event_body("a"), 401),
        (signed(b"nonsense"), b"nonsense", 400),
        (signed(b"{}"), b"{}", 400),
        (signed(b" " * 10_001), b" " * 10_001, 413),
    ],
)
def test_one_pure_function_decides(headers: Any, body: bytes, status: int) -> None:
    """From headers and body to a status, and to an event where there is one to hand over."""
    decision = decide(VERIFIER, headers, body)
    assert decision.status == status
    assert (decision.event is not None) == (status == 202)
    assert json.loads(decision.body)["message" if status == 202 else "error"]


def test_other_schemes_get_all_headers() -> None:
    """A scheme that signs id and timestamp works in a receiver as it is."""
    body = event_body("a")
    headers = sign(b"key", body, STANDARD_WEBHOOKS, id="msg_1")
    assert decide(WebhookVerifier(b"key", STANDARD_WEBHOOKS), headers, body).status == 202


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=80), max_size=5), st.binary(max_size=200))
def test_any_delivery_gets_a_decision(headers: dict[str, str], body: bytes) -> None:
    """No headers and no body make it raise, and none of these is accepted."""
    assert decide(VERIFIER, headers, body).status in (400, 401, 413, 415)  # 400: a Content-Length that is no number
    assert decide(VERIFIER, {**headers, **signed(body)}, body).status in (400, 413, 415)


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    """A body in pieces."""
    for part in parts:
        yield part


class Ledger:
    """A hand-off that notes the events, and fails when told to."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.errors: list[BaseException] = []

    def plain(self, event: Event) -> None:
        """A plain callback."""
        if self.errors:
            raise self.errors.pop(0)
        self.ids.append(event.id)

    async def coroutine(self, event: Event) -> None:
        """The same, asynchronous."""
        await asyncio.sleep(0)
        self.plain(event)


@pytest.fixture
def ledger() -> Ledger:
    """An empty ledger."""
    return Ledger()


@pytest.fixture(params=["plain", "coroutine"])
def hand_off(request: pytest.FixtureRequest, ledger: Ledger) -> Any:
    """A callback of each kind."""
    return getattr(ledger, request.param)


@pytest.fixture(params=["async", "blocking"])
def deliver(request: pytest.FixtureRequest) -> Any:
    """Delivers a genuine event to a receiver, in an event loop or without one."""

    def run(receiver: Receiver, event_id: str = "evt_1") -> Decision:
        body = event_body(event_id)
        if request.param == "async":
            return asyncio.run(receiver.handle("POST", signed(body), chunks(body[:9], body[9:])))
        return receiver.handle_blocking("POST", signed(body), iter((body[:9], body[9:])))

    return run


def test_an_event_is_handed_over_once(ledger: Ledger, hand_off: Any, deliver: Any) -> None:
    """A duplicate of a confirmed event is acknowledged without a second hand-off."""
    receiver = Receiver(VERIFIER, hand_off)
    assert [deliver(receiver).status, deliver(receiver).status, deliver(receiver, "evt_2").status] == [202, 202, 202]
    assert ledger.ids == ["evt_1", "evt_2"]


def test_a_failed_hand_off_comes_again(ledger: Ledger, hand_off: Any, deliver: Any, caplog: Any) -> None:
    """503 with Retry-After, the claim is given back, and the next delivery is handed over; the log names the event."""
    ledger.errors = [RuntimeError("database is down"), TimeoutError()]
    receiver = Receiver(VERIFIER, hand_off, retry_after=7)
    with caplog.at_level(logging.CRITICAL, "signing_async.webhooks"):
        first, second, third = deliver(receiver), deliver(receiver), deliver(receiver)
    assert [first.status, second.status, third.status] == [503, 503, 202]
    assert ("Retry-After", "7") in first.headers
    assert ledger.ids == ["evt_1"]


def test_a_duplicate_of_a_pending_event_comes_again(ledger: Ledger, deliver: Any) -> None:
    """While another worker hands it over, the answer is 503, so that the event is not lost if that one fails."""
    seen = MemorySeenEvents()
    seen.claim("evt_1")
    receiver = Receiver(VERIFIER, ledger.plain, seen=seen)
    assert deliver(receiver).status == 503
    seen.release("evt_1")
    assert deliver(receiver).status == 202
    assert ledger.ids == ["evt_1"]


class BrokenSeen:
    """A guard that fails in one of its steps; asynchronous, as one over a network is."""

    lease = 60.0

    def __init__(self, broken: str) -> None:
        self.broken = broken
        self.inner = MemorySeenEvents()

    async def claim(self, event_id: str) -> Claim:
        """As promised, or not."""
        claim: Claim = self._step("claim")(event_id)
        return claim

    async def confirm(self, event_id: str) -> None:
        """As promised, or not."""
        self._step("confirm")(event_id)

    async def release(self, event_id: str) -> None:
        """As promised, or not."""
        self._step("release")(event_id)

    def _step(self, name: str) -> Any:
        if name == self.broken:
            raise OSError("no connection")
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    ("step", "handed", "fails"), [("", 1, False), ("claim", 0, False), ("confirm", 1, False), ("release", 0, True)]
)
def test_a_broken_guard_never_acknowledges(step: str, handed: int, fails: bool, ledger: Ledger, deliver: Any) -> None:
    """Whichever step fails, the sender is asked to come again; an async guard works everywhere."""
    ledger.errors = [RuntimeError("down")] if fails else []
    seen = BrokenSeen(step)
    receiver = Receiver(VERIFIER, ledger.plain, seen=seen)
    assert deliver(receiver).status == (503 if step else 202)
    assert len(ledger.ids) == handed
    if step in ("confirm", "release"):
        assert seen.inner.claim("evt_1") is Claim.PENDING


def test_a_full_queue_asks_to_come_again(deliver: Any) -> None:
    """A queue.Queue works from threads and from a loop; what does not fit is not lost."""
    events: queue.Queue[Event] = queue.Queue(maxsize=1)
    receiver = Receiver(VERIFIER, events)
    assert deliver(receiver, "a").status == 202
    full = deliver(receiver, "b")
    assert full.status == 503
    assert ("Retry-After", "5") in full.headers
    assert events.get().id == "a"
    assert deliver(receiver, "b").status == 202


async def test_an_asyncio_queue() -> None:
    """Events go to the consumer; full means 503; drain waits for the consumer, and afterwards nothing is taken."""
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


def test_an_asyncio_queue_is_refused_where_threads_serve() -> None:
    """It is not made for threads, and would lose wake-ups silently."""
    receiver = Receiver(VERIFIER, asyncio.Queue())
    body = event_body("a")
    with pytest.raises(ConfigurationError, match=r"queue\.Queue"):
        receiver.receive_blocking(signed(body), body)


async def test_drain_before_any_delivery() -> None:
    """There is nothing to wait for."""
    assert await Receiver(VERIFIER, print).drain(timeout=0.5)


async def test_drain_waits_for_hand_offs_under_way() -> None:
    """A hand-off that has begun is finished and acknowledged, a new delivery is not begun."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    done: list[str] = []

    async def slow(event: Event) -> None:
        begun.set()
        await go_on.wait()
        done.append(event.id)

    receiver = Receiver(VERIFIER, slow)
    body, other = event_body("a"), event_body("b")
    delivery = asyncio.create_task(receiver.receive(signed(body), body))
    await begun.wait()
    draining = asyncio.create_task(receiver.drain())
    await asyncio.sleep(0)
    assert (await receiver.receive(signed(other), other)).status == 503
    assert not draining.done()
    go_on.set()
    assert await draining
    assert (await delivery).status == 202
    assert done == ["a"]


async def test_a_hand_off_that_takes_too_long_is_cut_off() -> None:
    """503, and the claim is given back."""
    times = 0

    async def slow_once(event: Event) -> None:
        nonlocal times
        times += 1
        if times == 1:
            await asyncio.Event().wait()

    receiver = Receiver(VERIFIER, slow_once, hand_off_timeout=0.02)
    body = event_body("a")
    assert (await receiver.receive(signed(body), body)).status == 503
    assert (await receiver.receive(signed(body), body)).status == 202
    assert times == 2


async def test_a_failure_after_the_lease_releases_nothing() -> None:
    """By then the claim may be somebody else's, who is handing the event over: it must stay theirs."""
    released: list[str] = []

    class Seen(MemorySeenEvents):
        def release(self, event_id: str) -> None:
            released.append(event_id)

    def fail(event: Event) -> None:
        time.sleep(0.05 if event.id == "slow" else 0)
        raise RuntimeError("down")

    for name, lease in (("slow", 0.04), ("quick", 60.0)):
        receiver = Receiver(VERIFIER, fail, seen=Seen(lease=lease), hand_off_timeout=0.02)
        body = event_body(name)
        assert (await receiver.receive(signed(body), body)).status == 503
        assert receiver.receive_blocking(signed(body), body).status == 503
    assert released == ["quick"]


async def test_a_cancelled_hand_off_gives_its_claim_back() -> None:
    """A server that cancels its handlers at shutdown leaves no event claimed."""
    begun = asyncio.Event()

    async def endless(event: Event) -> None:
        begun.set()
        await asyncio.Event().wait()

    seen = MemorySeenEvents()
    receiver = Receiver(VERIFIER, endless, seen=seen)
    body = event_body("a")
    task = asyncio.create_task(receiver.receive(signed(body), body))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen.claim("a") is Claim.NEW


@pytest.mark.parametrize("hand_off", [None, "tasks.handle", []])
def test_a_hand_off_is_a_callback_or_a_queue(hand_off: Any) -> None:
    """Anything else is told when the receiver is made, and not by the first delivery."""
    with pytest.raises(ConfigurationError, match=r"^hand_off must be a callback or a queue, not "):
        Receiver(VERIFIER, hand_off)


def test_a_hand_off_must_fit_into_the_lease() -> None:
    """Else an event would be handed over twice at once."""
    with pytest.raises(ConfigurationError, match=r"hand_off_timeout \(60 s\) must be shorter than seen.lease \(60 s\)"):
        Receiver(VERIFIER, print, hand_off_timeout=60)


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {}, 405),
        ("PUT", {}, 405),
        ("POST", {"Content-Length": "10001"}, 413),
        ("POST", {"Content-Encoding": "br"}, 415),
    ],
)
async def test_what_can_be_refused_is_refused_before_the_body_is_read(
    method: str, headers: dict[str, str], status: int
) -> None:
    """Not one byte of the body is asked for, and the connection is closed."""

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


async def test_an_endless_body_is_read_up_to_the_limit() -> None:
    """Without a length it is counted while it comes."""
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1000
            yield b"x" * 1000

    async def endless_async() -> AsyncIterator[bytes]:
        for piece in endless():
            yield piece

    receiver = Receiver(VERIFIER, print)
    assert (await receiver.handle("POST", {}, endless_async())).status == 413
    assert receiver.handle_blocking("POST", {}, endless()).status == 413
    assert taken == 22_000


async def test_a_slow_or_broken_body_ends() -> None:
    """408 when it takes too long, 400 when the sender is gone."""

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async def broken() -> AsyncIterator[bytes]:
        yield b"{"
        raise ConnectionResetError

    receiver = Receiver(VERIFIER, print, body_timeout=0.01)
    assert (await receiver.handle("POST", {}, slow())).status == 408
    assert (await receiver.handle("POST", {}, broken())).status == 400


def test_a_slow_or_broken_body_ends_without_a_loop_too() -> None:
    """The same where threads serve, whether the last piece is late or any other."""

    def broken() -> Iterator[bytes]:
        yield b"{"
        raise ConnectionResetError

    receiver = Receiver(VERIFIER, print, body_timeout=30)
    assert receiver.handle_blocking("POST", {}, broken()).status == 400
    receiver.body_timeout = -1
    assert receiver.handle_blocking("POST", {}, [b"{", b"}"]).status == 408
    assert receiver.handle_blocking("POST", {}, []).status == 408


def test_the_log_names_the_kind_and_not_the_content(caplog: pytest.LogCaptureFixture) -> None:
    """A refused delivery can be looked into; secrets, signatures and bodies stay out of the log."""
    body = event_body("a", email="person@example.com")
    with caplog.at_level(logging.INFO, "signing_async.webhooks"):
        decide(VERIFIER, signed(body, "another"), body)
        decide(VERIFIER, signed(b'{"email": "person@example.com"}'), b'{"email": "person@example.com"}')
    assert "mismatch" in caplog.text
    assert "no id" in caplog.text
    for hidden in (SECRET, hex_of(body), hex_of(body, "another"), "person@example.com"):
        assert hidden not in caplog.text


class Guard(MemorySeenEvents):
    """A guard whose steps fail on demand."""

    def __init__(self, *failing: str) -> None:
        super().__init__()
        self.failing = failing

    def claim(self, event_id: str) -> Claim:
        self._fail("claim")
        return super().claim(event_id)

    def confirm(self, event_id: str) -> None:
        self._fail("confirm")
        super().confirm(event_id)

    def release(self, event_id: str) -> None:
        self._fail("release")
        super().release(event_id)

    def _fail(self, step: str) -> None:
        if step in self.failing:
            raise OSError("disk full")


def _fails(event: Event) -> None:
    raise RuntimeError("no")


def _full(event: Event) -> None:
    raise queue.Full


@pytest.mark.parametrize(
    ("failing", "hand_off", "status", "message", "logged"),
    [
        ((), lambda event: None, 202, {"message": "accepted"}, []),
        (("claim",), lambda event: None, 503, {"error": "cannot be taken now"}, ["event e1 cannot be claimed"]),
        ((), _full, 503, {"error": "the queue is full"}, ["event e1 finds the queue full"]),
        ((), _fails, 503, {"error": "could not be handed over"}, ["event e1 could not be handed over"]),
        (
            ("confirm",),
            lambda event: None,
            503,
            {"error": "cannot be recorded now"},
            ["event e1 was handed over, and that cannot be recorded"],
        ),
        (
            ("release",),
            _fails,
            503,
            {"error": "could not be handed over"},
            ["event e1 could not be handed over", "event e1 stays claimed until its lease is over"],
        ),
    ],
    ids=["accepted", "claim", "full", "fails", "confirm", "release"],
)
def test_what_a_receiver_says(
    failing: tuple[str, ...],
    hand_off: Any,
    status: int,
    message: dict[str, str],
    logged: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """To the sender in the answer's body, to its operator in the log, with the event's id."""
    body = event_body("e1")
    receiver = Receiver(VERIFIER, hand_off, seen=Guard(*failing))
    decision = receiver.receive_blocking(signed(body), body)
    assert (decision.status, json.loads(decision.body)) == (status, message)
    assert [record.getMessage() for record in caplog.records] == logged


@pytest.mark.parametrize("hand_off", [_full, _fails])
def test_a_claim_is_given_back_at_once(hand_off: Any) -> None:
    """The sender's next delivery of the event finds it free, and not for the end of a lease."""
    body, seen = event_body("e1"), MemorySeenEvents()
    Receiver(VERIFIER, hand_off, seen=seen).receive_blocking(signed(body), body)
    assert seen.claim("e1") is Claim.NEW
    assert json.loads(Receiver(VERIFIER, hand_off, seen=seen).receive_blocking(signed(body), body).body) == {
        "error": "being handed over"
    }


def test_a_claim_is_given_back_when_the_program_ends(caplog: pytest.LogCaptureFixture) -> None:
    """What is no error of the hand-off, such as Ctrl-C, gives the claim back too."""

    def stop(event: Event) -> None:
        raise KeyboardInterrupt

    body, seen = event_body("e1"), MemorySeenEvents()
    with pytest.raises(KeyboardInterrupt):
        Receiver(VERIFIER, stop, seen=seen).receive_blocking(signed(body), body)
    assert seen.claim("e1") is Claim.NEW
    assert caplog.records == []


def test_what_is_refused_is_logged_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """A forged delivery by its reason, a genuine one without event by what is wrong with it."""
    assert decide(VERIFIER, {"X-Signature": "0" * 64}, b"{}").status == 401
    decision = decide(VERIFIER, signed(b"{}"), b"{}")
    assert (decision.status, decision.message) == (400, "the event has no id")
    assert [record.getMessage() for record in caplog.records] == [
        "a webhook delivery was refused (mismatch): no secret matches the signature",
        "a genuine webhook delivery holds no event: the event has no id",
    ]


def test_what_is_admitted_to_the_byte() -> None:
    """A body of just the size is, one byte more is not; an empty encoding is none."""
    body = event_body("e1")
    exact = WebhookVerifier(SECRET, max_body=len(body))
    assert (decide(exact, signed(body), body).status, decide(exact, signed(body), body).message) == (202, "accepted")
    assert decide(exact, signed(body + b" "), body + b" ") is TOO_LARGE
    assert admit("POST", {"Content-Length": "10", "Content-Encoding": ""}, 10) is None
    assert admit("POST", {"Content-Length": "11"}, 10) is TOO_LARGE
    assert admit("POST", {"Content-Length": "9" * 18}, 10**18) is None
    assert admit("POST", {"Content-Length": "9" * 19}, 10**20) is TOO_LARGE


def test_a_connection_that_breaks_before_and_after_the_deadline() -> None:
    """In time it is a broken body; later it is one that took too long."""

    def chunks(seconds: float) -> Iterator[bytes]:
        yield b"{"
        time.sleep(seconds)
        raise ConnectionResetError

    for timeout, pause, answer in ((60.0, 0.0, BROKEN), (0.05, 0.1, TOO_SLOW)):
        receiver = Receiver(VERIFIER, lambda event: None, body_timeout=timeout)
        assert receiver.handle_blocking("POST", {}, chunks(pause)) is answer


async def test_drain_waits_for_every_hand_off() -> None:
    """With two under way, the end of one is not the end."""
    release = {"e1": asyncio.Event(), "e2": asyncio.Event()}

    async def hand_off(event: Event) -> None:
        await release[event.id].wait()

    receiver = Receiver(VERIFIER, hand_off)
    bodies = [event_body(name) for name in release]
    under_way = [asyncio.create_task(receiver.receive(signed(body), body)) for body in bodies]
    await asyncio.sleep(0.01)
    release["e1"].set()
    assert (await under_way[0]).status == 202
    assert await receiver.drain(0.05) is False
    release["e2"].set()
    assert await receiver.drain(5.0) is True
    assert (await under_way[1]).status == 202


def test_the_words_about_a_queue_and_a_lease() -> None:
    """They say what to do instead."""
    body = event_body()
    with pytest.raises(ConfigurationError) as caught:
        Receiver(VERIFIER, asyncio.Queue()).receive_blocking(signed(body), body)
    assert str(caught.value) == (
        "an asyncio.Queue cannot be filled from threads: hand over to a queue.Queue or a callback"
    )
    with pytest.raises(ConfigurationError) as caught:
        Receiver(VERIFIER, _fails, hand_off_timeout=60)
    assert str(caught.value) == (
        "hand_off_timeout (60 s) must be shorter than seen.lease (60 s):"
        " else an event is handed over again while the first hand-off runs"
    )
