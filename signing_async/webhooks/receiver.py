"""The receiver: what to answer to a delivery, and when its event is handed over."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, Protocol

from ..errors import ConfigurationError, InvalidSignature, MalformedEvent
from .event import Event
from .seen import Claim, MemorySeenEvents, SeenEvents
from .verifier import Headers, WebhookVerifier, header_values

log: logging.Logger = logging.getLogger("signing_async.webhooks")


@dataclass(frozen=True, slots=True)
class Decision:
    """What to answer to a delivery; ``event`` is what to hand over before saying 202."""

    status: int
    message: str
    event: Event | None = None
    extra_headers: tuple[tuple[str, str], ...] = ()

    @property
    def body(self) -> bytes:
        """The answer's body: a small JSON object."""
        name = "message" if self.status == 202 else "error"
        return json.dumps({name: self.message}).encode()

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The answer's headers."""
        return [("Content-Type", "application/json"), *self.extra_headers]


CLOSE = (("Connection", "close"),)
TOO_LARGE = Decision(413, "the body is too large", None, CLOSE)
TOO_SLOW = Decision(408, "the body took too long", None, CLOSE)
NOT_POST = Decision(405, "deliveries are sent with POST", None, (("Allow", "POST"), *CLOSE))
COMPRESSED = Decision(415, "the body must not be compressed: its signature covers it as sent", None, CLOSE)
NO_LENGTH = Decision(400, "Content-Length is not a number", None, CLOSE)
NO_END = Decision(411, "the server cannot read a chunked body: send its Content-Length", None, CLOSE)
BROKEN = Decision(400, "the body is incomplete", None, CLOSE)
UNSIGNED = Decision(401, "the signature is not valid")
ACCEPTED = Decision(202, "accepted")
DUPLICATE = Decision(202, "accepted before")


def admit(method: str, headers: Headers, max_body: int) -> Decision | None:
    """What can be refused before the body is read; None when the body is worth reading."""
    if method != "POST":
        return NOT_POST
    encodings, lengths = header_values(headers, "Content-Encoding", "Content-Length")
    if any(value.lower() not in ("", "identity") for value in encodings):
        return COMPRESSED
    for length in filter(None, lengths):
        if not (length.isascii() and length.isdecimal()):
            return NO_LENGTH
        if len(length) > 18 or int(length) > max_body:
            return TOO_LARGE
    return None


def decide(verifier: WebhookVerifier, headers: Headers, body: bytes) -> Decision:
    """From a delivery to a decision; a pure function but for the verifier's clock.

    413, 415, 401 and 400 are final. 202 comes with the event, and may be said once that was handed over.
    """
    if len(body) > verifier.max_body:
        return TOO_LARGE
    if refused := admit("POST", headers, verifier.max_body):
        return refused
    try:
        return Decision(202, "accepted", verifier.parse(body, headers=headers))
    except InvalidSignature as error:
        log.warning("a webhook delivery was refused (%s): %s", error.reason, error)
        return UNSIGNED
    except MalformedEvent as error:
        log.warning("a genuine webhook delivery holds no event: %s", error)
        return Decision(400, str(error))


class EventQueue(Protocol):
    """``asyncio.Queue`` or, where threads serve, ``queue.Queue``."""

    def put_nowait(self, item: Event, /) -> None:
        """Add the event, or raise because the queue is full."""
        ...


HandOff = Callable[[Event], Awaitable[object] | object] | EventQueue


class Receiver:
    """Takes deliveries: verifies, drops duplicates, hands the event over, and only then says 202.

    ``hand_off`` is a callback, plain or ``async``, or a queue. **A callback should return once the event is safe**:
    after 202 the sender forgets it. What waits in a queue dies with the process: that is for events that may be lost.
    When the hand-off raises or finds the queue full, or an ``async`` one takes longer than ``hand_off_timeout``, the
    answer is 503 with ``Retry-After``, and the sender delivers again. A plain callback cannot be cut off: it should be
    quick, and surely within the lease. ``seen`` defaults to :class:`MemorySeenEvents`.

    An adapter makes it an endpoint::

        receiver = Receiver(WebhookVerifier(secret), save_event, seen=SQLiteSeenEvents("seen.db"))
        app.router.add_post("/webhooks", aiohttp_handler(receiver))
    """

    def __init__(
        self,
        verifier: WebhookVerifier,
        hand_off: HandOff,
        *,
        seen: SeenEvents | None = None,
        body_timeout: float = 10.0,
        hand_off_timeout: float = 10.0,
        retry_after: int = 5,
    ) -> None:
        self.verifier = verifier
        self.body_timeout = body_timeout
        self.hand_off_timeout = hand_off_timeout
        self.seen: SeenEvents = MemorySeenEvents() if seen is None else seen
        if hand_off_timeout >= self.seen.lease:
            raise ConfigurationError(
                f"hand_off_timeout ({hand_off_timeout:g} s) must be shorter than seen.lease ({self.seen.lease:g} s):"
                " else an event is handed over again while the first hand-off runs"
            )
        take = hand_off if callable(hand_off) else getattr(hand_off, "put_nowait", None)
        if take is None:
            raise ConfigurationError(f"hand_off must be a callback or a queue, not {hand_off!r}")
        self._queue = hand_off if isinstance(hand_off, asyncio.Queue) else None
        self._hand_off: Callable[[Event], object] = take
        self._later = (("Retry-After", str(retry_after)),)
        self._draining = False
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def handle(self, method: str, headers: Headers, chunks: AsyncIterable[bytes]) -> Decision:
        """The whole way of a request; the body is read only as far as it may be long, and as long as it may take."""
        if refused := admit(method, headers, self.verifier.max_body):
            return refused
        body = bytearray()
        try:
            async with asyncio.timeout(self.body_timeout):
                async for chunk in chunks:
                    body += chunk
                    if len(body) > self.verifier.max_body:
                        return TOO_LARGE
        except TimeoutError:
            return TOO_SLOW
        except ConnectionError:
            return BROKEN
        return await self.receive(headers, bytes(body))

    def handle_blocking(self, method: str, headers: Headers, chunks: Iterable[bytes]) -> Decision:
        """:meth:`handle` for a server of threads.

        The callback runs in the calling thread, and an ``async`` one there in an event loop of its own.
        """
        if refused := admit(method, headers, self.verifier.max_body):
            return refused
        deadline = time.monotonic() + self.body_timeout
        body = bytearray()
        try:
            for chunk in chunks:
                body += chunk
                if len(body) > self.verifier.max_body:
                    return TOO_LARGE
                if time.monotonic() > deadline:
                    return TOO_SLOW
        except OSError:
            return TOO_SLOW if time.monotonic() > deadline else BROKEN
        return TOO_SLOW if time.monotonic() > deadline else self.receive_blocking(headers, bytes(body))

    async def receive(self, headers: Headers, body: bytes) -> Decision:
        """Decide on a delivery that was read, and hand its event over."""
        self._active += 1
        self._idle.clear()
        try:
            return await self._take(decide(self.verifier, headers, body), self._settle)
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    def receive_blocking(self, headers: Headers, body: bytes) -> Decision:
        """:meth:`receive` for a server of threads."""
        if self._queue is not None:
            raise ConfigurationError(
                "an asyncio.Queue cannot be filled from threads: hand over to a queue.Queue or a callback"
            )
        taking = self._take(decide(self.verifier, headers, body), self._settle_blocking)
        try:
            while True:  # with _settle_blocking it never waits, and so ends at once
                taking.send(None)
        except StopIteration as end:
            decision: Decision = end.value
            return decision

    async def drain(self, timeout: float = 30.0) -> bool:
        """For shutdown: answer 503 from now on, let hand-offs end, and wait until the queue's consumer is done with it.

        True when all is done, False when ``timeout`` seconds were not enough. The consumer tells by ``task_done()``.
        """
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
                if self._queue is not None:
                    await self._queue.join()
        except TimeoutError:
            return False
        return True

    async def _take(self, decision: Decision, settle: Callable[[object], Awaitable[Any]]) -> Decision:
        event = decision.event
        if event is None:
            return decision
        if self._draining:
            return self._come_again("shutting down")
        lease_ends = time.monotonic() + self.seen.lease
        try:
            claim = await settle(self.seen.claim(event.id))
        except Exception:
            log.exception("event %s cannot be claimed", event.id)
            return self._come_again("cannot be taken now")
        if claim is not Claim.NEW:
            return DUPLICATE if claim is Claim.CONFIRMED else self._come_again("being handed over")
        return await self._deliver(event, lease_ends, settle)

    async def _deliver(self, event: Event, lease_ends: float, settle: Callable[[object], Awaitable[Any]]) -> Decision:
        try:
            await settle(self._hand_off(event))
        except (asyncio.QueueFull, queue.Full):
            log.warning("event %s finds the queue full", event.id)
            await self._release(event, lease_ends, settle)
            return self._come_again("the queue is full")
        except Exception:
            log.exception("event %s could not be handed over", event.id)
            await self._release(event, lease_ends, settle)
            return self._come_again("could not be handed over")
        except BaseException:
            await self._release(event, lease_ends, settle)
            raise
        try:
            await settle(self.seen.confirm(event.id))
        except Exception:
            # still pending: handed over again when the sender comes after the lease, and never after a 202
            log.exception("event %s was handed over, and that cannot be recorded", event.id)
            return self._come_again("cannot be recorded now")
        return ACCEPTED

    async def _release(self, event: Event, lease_ends: float, settle: Callable[[object], Awaitable[Any]]) -> None:
        if time.monotonic() >= lease_ends:
            return  # the claim may be somebody else's by now
        try:
            await settle(self.seen.release(event.id))
        except Exception:
            log.exception("event %s stays claimed until its lease is over", event.id)

    def _come_again(self, why: str) -> Decision:
        return Decision(503, why, None, self._later)

    async def _settle(self, value: object) -> object:
        if not isawaitable(value):
            return value
        async with asyncio.timeout(self.hand_off_timeout):
            return await value

    async def _settle_blocking(self, value: object) -> object:
        return asyncio.run(self._settle(value)) if isawaitable(value) else value
