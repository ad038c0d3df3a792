"""The receiver: decides on the response to a delivery, deduplicates events and passes them to the handler."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Generator, Iterable
from dataclasses import dataclass, replace
from inspect import isawaitable
from typing import Any

from .. import _checks
from ..errors import ConfigurationError, InvalidSignature, MalformedEvent
from ..telemetry import Span, active, is_enabled
from ..telemetry.names import DELIVERY_SPAN, EVENT_ID, SIGNING_ID, STATUS_CODE, WEBHOOK_VERDICT
from .event import Event
from .inbox import Inbox
from .seen import Claim, MemorySeenEvents, SeenEvents
from .verifier import Headers, WebhookVerifier, header_values

log: logging.Logger = logging.getLogger("signing_async.webhooks")

_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process: a fork does not inherit the thread
_loops_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Decision:
    """The response to a delivery, and the ``event`` to handle before the response is sent."""

    status: int
    message: str
    event: Event | None = None
    extra_headers: tuple[tuple[str, str], ...] = ()
    verdict: str = ""
    """A code for the decision, such as ``accepted``, ``duplicate`` or ``signature_too_old``."""

    @property
    def body(self) -> bytes:
        """The response's body: a small JSON object."""
        name = "message" if self.status == 202 else "error"
        return json.dumps({name: self.message}).encode()

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The response's headers."""
        return [("Content-Type", "application/json"), *self.extra_headers]


CLOSE = (("Connection", "close"),)
TOO_LARGE = Decision(413, "the body is too large", None, CLOSE, "too_large")
TOO_SLOW = Decision(408, "the body took too long", None, CLOSE, "too_slow")
NOT_POST = Decision(405, "deliveries must use POST", None, (("Allow", "POST"), *CLOSE), "not_post")
COMPRESSED = Decision(
    415, "the body must not be compressed: the signature covers the raw body", None, CLOSE, "compressed"
)
BAD_LENGTH = Decision(400, "Content-Length is not a number", None, CLOSE, "bad_length")
NO_LENGTH = Decision(411, "this server cannot read a chunked body: send a Content-Length", None, CLOSE, "no_length")
INCOMPLETE = Decision(400, "the body is incomplete", None, CLOSE, "incomplete")
ALREADY_READ = Decision(503, "the body was read before the webhook receiver", None, (("Retry-After", "5"),), "consumed")
ACCEPTED = Decision(202, "accepted", verdict="accepted")
DUPLICATE = Decision(202, "duplicate", verdict="duplicate")


def check_head(method: str, headers: Headers, max_body: int) -> Decision | None:
    """Return the refusal if the method or the headers are unacceptable; None if the body must be read."""
    if method != "POST":
        return NOT_POST
    if any(value.lower() not in ("", "identity") for value in header_values(headers, "Content-Encoding")):
        return COMPRESSED
    for length in filter(None, header_values(headers, "Content-Length")):
        if not (length.isascii() and length.isdecimal()):
            return BAD_LENGTH
        if len(length) > 18 or int(length) > max_body:
            return TOO_LARGE
    return None


def decide(verifier: WebhookVerifier, headers: Headers, body: bytes) -> Decision:
    """Verify and parse a delivery. Pure, except for the verifier's clock.

    400, 401, 413 and 415 are final. 202 carries the event: send the response only after the event was handled.
    """
    if len(body) > verifier.max_body:
        return TOO_LARGE
    if refusal := check_head("POST", headers, verifier.max_body):
        return refusal
    try:
        return replace(ACCEPTED, event=verifier.parse(body, headers=headers))
    except InvalidSignature as error:
        log.warning("rejected a webhook delivery (%s): %s", error.reason, error)
        return Decision(401, "the signature is not valid", verdict=f"signature_{error.reason}")
    except MalformedEvent as error:
        log.warning("rejected a webhook delivery with a valid signature: %s", error)
        return Decision(400, str(error), verdict="malformed")


Handler = Callable[[Event], Awaitable[object] | object] | asyncio.Queue[Event] | queue.Queue[Event]
Steps = Generator[Any, Any, Decision]
"""Yields what a handler or a store returned, and is sent the result, awaited if need be. Ends with the decision. An
event loop and a thread drive the same steps."""


class Receiver:
    """Verifies and deduplicates deliveries, passes each event to the handler, and only then responds with 202.

    ``hand_off`` is an `Inbox`, which stores each event durably and calls its handlers later, or the handler itself: a
    function, plain or ``async``, or a queue. **A handler should return once the event is safe**, because after a 202
    the sender forgets the event. A queue dies with the process: use one only for events that may be lost. If the
    handler raises, if an ``async`` handler takes longer than ``hand_off_timeout``, if the queue is full, or if the
    inbox cannot store the event, the response is 503 with ``Retry-After`` and the sender delivers again. A plain
    function cannot be interrupted: it must return within ``seen.lease`` (60 s). ``seen`` defaults to
    `MemorySeenEvents`; an inbox deduplicates by itself. Receivers of several tenants that share an inbox or a store
    each have a ``namespace``.

    An adapter turns the receiver into an endpoint::

        receiver = Receiver(WebhookVerifier(secret), Inbox("inbox.db"))
        app.router.add_post("/webhooks", aiohttp_handler(receiver))
    """

    def __init__(
        self,
        verifier: WebhookVerifier,
        hand_off: Inbox | Handler,
        *,
        seen: SeenEvents | None = None,
        namespace: str | None = None,
        body_timeout: float = 10.0,
        hand_off_timeout: float = 10.0,
        retry_after: int = 5,
    ) -> None:
        self.verifier: WebhookVerifier = verifier
        self.namespace: str | None = namespace
        if namespace is not None and not re.fullmatch(r"[\w.-]+", _checks.string("namespace", namespace), re.ASCII):
            raise ConfigurationError(f"namespace: must be letters, digits, '_', '.' and '-', got {namespace!r}")
        self.body_timeout: float = _checks.number("body_timeout", body_timeout, above=0)
        self.hand_off_timeout: float = _checks.number("hand_off_timeout", hand_off_timeout, above=0)
        self._inbox = hand_off if isinstance(hand_off, Inbox) else None
        if self._inbox is not None and seen is not None:
            raise ConfigurationError("seen: must be None with an inbox, which deduplicates by itself")
        self.seen: SeenEvents = MemorySeenEvents() if seen is None else seen
        if hand_off_timeout >= self.seen.lease and self._inbox is None:
            raise ConfigurationError(
                f"hand_off_timeout: must be below seen.lease ({self.seen.lease:g} s), got {hand_off_timeout:g} s:"
                " otherwise an event could be delivered again while its handler still runs"
            )
        self._handler: Any = hand_off if callable(hand_off) else getattr(hand_off, "put_nowait", None)
        if self._handler is None and self._inbox is None:
            raise ConfigurationError(f"hand_off: must be an inbox, a function or a queue, got {hand_off!r}")
        self._queue = hand_off if isinstance(hand_off, asyncio.Queue) else None
        self._retry_after = (("Retry-After", str(retry_after)),)
        self._draining = False
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._telemetry = is_enabled()

    async def handle(self, method: str, headers: Headers, chunks: AsyncIterable[bytes]) -> Decision:
        """Handle a request: read the body within the limits of size and time, then `receive` it."""
        body = check_head(method, headers, self.verifier.max_body) or await self._read(headers, chunks)
        return self.refuse(body) if isinstance(body, Decision) else await self.receive(headers, body)

    async def receive(self, headers: Headers, body: bytes) -> Decision:
        """Decide on a delivery whose body was read, and deliver its event to the handler."""
        self._active += 1
        self._idle.clear()
        try:
            steps, advance = self._process(headers, body), _Advance()
            while not advance(steps):
                with advance:
                    advance.value = await self._resolve(advance.value)
            return advance.decision
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    def handle_blocking(self, method: str, headers: Headers, chunks: Iterable[bytes]) -> Decision:
        """Handle a request in a threaded server, like `handle`.

        A plain handler runs in the calling thread, an ``async`` one in an event loop that all threads share.
        """
        body = check_head(method, headers, self.verifier.max_body) or self._read_blocking(headers, chunks)
        return self.refuse(body) if isinstance(body, Decision) else self.receive_blocking(headers, body)

    def receive_blocking(self, headers: Headers, body: bytes) -> Decision:
        """Receive in a threaded server, like `receive`."""
        if self._queue is not None:
            raise ConfigurationError(
                "hand_off: an asyncio.Queue cannot be filled from threads, use a queue.Queue or a function"
            )

        steps, advance = self._process(headers, body), _Advance()
        while not advance(steps):
            with advance:
                if isawaitable(advance.value):
                    resolving = asyncio.run_coroutine_threadsafe(self._resolve(advance.value), thread_loop())
                    advance.value = resolving.result()
        return advance.decision

    def refuse(self, decision: Decision) -> Decision:
        """Record and return a decision that was made before the body was read."""
        with active(self._telemetry).span(DELIVERY_SPAN) as span:
            return _record(span, decision)

    async def drain(self, timeout: float = 30.0) -> bool:
        """Shut down gracefully: respond 503 from now on, and wait for running handlers and for an `asyncio.Queue`.

        Return False if ``timeout`` seconds were not enough. The consumer of the queue must call ``task_done()``. A
        `queue.Queue`, and handlers in the threads of a threaded server, are not waited for.
        """
        _checks.number("timeout", timeout, at_least=0)
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
                if self._queue is not None:
                    await self._queue.join()
        except TimeoutError:
            return False
        return True

    async def _read(self, headers: Headers, chunks: AsyncIterable[bytes]) -> bytes | Decision:
        body, is_broken = bytearray(), False
        try:
            async with asyncio.timeout(self.body_timeout):
                async for chunk in chunks:
                    body += chunk
                    if len(body) > self.verifier.max_body:
                        return TOO_LARGE
        except TimeoutError:
            return TOO_SLOW
        except Exception:  # the sender disconnected
            log.debug("the body of a delivery broke off", exc_info=True)
            is_broken = True
        return INCOMPLETE if is_broken else _check_length(headers, body)

    def _read_blocking(self, headers: Headers, chunks: Iterable[bytes]) -> bytes | Decision:
        deadline = time.monotonic() + self.body_timeout
        body, is_broken = bytearray(), False
        try:
            for chunk in chunks:
                body += chunk
                if len(body) > self.verifier.max_body:
                    return TOO_LARGE
                if time.monotonic() > deadline:
                    break
        except Exception:  # the sender disconnected, or a server's own, such as gunicorn's InvalidChunkSize
            log.debug("the body of a delivery broke off", exc_info=True)
            is_broken = True
        if time.monotonic() > deadline:
            return TOO_SLOW
        return INCOMPLETE if is_broken else _check_length(headers, body)

    def _process(self, headers: Headers, body: bytes) -> Steps:
        with active(self._telemetry).span(DELIVERY_SPAN) as span:
            decision = decide(self.verifier, headers, body)
            if decision.event is not None:
                span.set({EVENT_ID: decision.event.id, SIGNING_ID: decision.event.signing_id})
                event = replace(decision.event, trace_context=span.context, namespace=self.namespace)
                if self._draining:
                    decision = self._unavailable("shutting down", "shutting_down")
                else:
                    decision = yield from self._deliver(event, body)
                if decision is DUPLICATE:
                    log.info("dropped a duplicate of event %s (type %.100r)", event.id, event.type)
            return _record(span, decision)

    def _deliver(self, event: Event, body: bytes) -> Steps:
        """Store or handle the event. Until that has succeeded, the response is a failure."""
        failure = self._unavailable("cannot deduplicate events now", "not_deduplicated")
        try:
            if self._inbox is not None:
                failure = self._unavailable("cannot store events now", "not_stored")
                return ACCEPTED if (yield self._inbox.add(event, body)) else DUPLICATE
            lease_end = time.monotonic() + self.seen.lease
            claim = yield self.seen.claim(event.key)
            if claim is Claim.CONFIRMED:
                return DUPLICATE
            if claim is Claim.PENDING:
                return self._unavailable("the event is being handled", "in_progress")
            try:
                yield self._handler(event)
            except BaseException as error:
                failure = self._unavailable("the handler failed", "handler_failed")
                if isinstance(error, asyncio.QueueFull | queue.Full):
                    failure = self._unavailable("the queue is full", "queue_full")
                if time.monotonic() < lease_end:  # afterwards another receiver may hold the claim
                    try:
                        yield self.seen.release(event.key)
                    except Exception as failed:  # the handler's own exception, maybe a cancellation, is raised
                        error.add_note(f"the claim was not released: {failed!r}")
                raise
            # If this fails, the claim stays pending. A delivery after the lease is handled again.
            yield self.seen.confirm(event.key)
        except Exception:
            log.exception("event %s must be delivered again: %s", event.id, failure.message)
            return failure
        return ACCEPTED

    async def _resolve(self, value: Any) -> Any:
        if not isawaitable(value):
            return value
        async with asyncio.timeout(self.hand_off_timeout):
            return await value

    def _unavailable(self, reason: str, verdict: str) -> Decision:
        return Decision(503, reason, None, self._retry_after, verdict)


class _Advance:
    """Drives steps: call it for the next value to resolve, and resolve ``value`` in a ``with`` block."""

    value: Any = None
    decision: Decision
    _error: BaseException | None = None

    def __call__(self, steps: Steps) -> bool:
        """Continue the steps with the result, or with its error; return whether they have ended."""
        try:
            self.value = steps.send(self.value) if self._error is None else steps.throw(self._error)
        except StopIteration as end:
            self.decision = end.value
            return True
        return False

    def __enter__(self) -> None:
        self._error = None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        self._error = error
        return True


def _check_length(headers: Headers, body: bytearray) -> bytes | Decision:
    """Return the body, or the refusal if it is shorter than its announced length."""
    length = next(filter(None, header_values(headers, "Content-Length")), 0)
    is_chunked = bool(header_values(headers, "Transfer-Encoding"))
    if len(body) >= (int(length) or is_chunked):
        return bytes(body)
    log.error(
        "a delivery must be repeated: a middleware or hook has read the body before the webhook receiver, and the"
        " framework has not kept it; or the sender disconnected"
    )
    return ALREADY_READ


def thread_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all threaded receivers of this process, which runs in a thread of its own.

    A gevent worker runs greenlets in one thread, where only one loop can run. A forked child has a loop of its own.
    """
    with _loops_lock:
        if os.getpid() not in _loops:
            _loops[os.getpid()] = loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="signing_async webhooks", daemon=True).start()
        return _loops[os.getpid()]


def _record(span: Span, decision: Decision) -> Decision:
    span.set({STATUS_CODE: decision.status, WEBHOOK_VERDICT: decision.verdict})
    if decision.status >= 500:  # only a delivery that has to be repeated is an error
        span.fail(str(decision.status))
    return decision
