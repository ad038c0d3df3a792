"""The inbox: events are stored before they are acknowledged, and handled afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from inspect import isawaitable, iscoroutinefunction
from typing import Any, Literal, NamedTuple, Self, TypeVar

from .. import _checks
from .._encryption import Keys, Sealer, hide_keys
from .._tasks import finish
from ..errors import ConfigurationError, InboxError
from ..storage.events import SqliteEventStore
from ..telemetry import Telemetry, active, is_enabled, names
from .event import Event
from .event_store import (
    EventClaim,
    EventFilter,
    EventStatus,
    EventStore,
    InboxStats,
    StoredEvent,
    check_pattern,
    event_error,
)
from .wakeups import Wakeups

__all__ = ["Drop", "EventHandler", "HandlerRetryPolicy", "Inbox", "RetryLater"]

log: logging.Logger = logging.getLogger("signing_async.webhooks")

EventHandler = Callable[[Event], Awaitable[object] | object]
H = TypeVar("H", bound=EventHandler)

_DAY = 86_400.0
_PURGE_EVERY = 3600.0
_REPORT_EVERY = 10.0
_IDLE = 1.0
_PAUSE = 1.0  # seconds to wait while the store fails
# An event whose attempt did not count is due again behind the other due events, and later each time.
_UNCOUNTED_PAUSE, _LONGEST_PAUSE = 5.0, 600.0
_LONGEST = 1e9  # seconds, about 30 years: a longer span leads to dates that cannot be represented
_MAX_TEXT = 1000


class Drop(Exception):
    """Raised by a handler to drop its event: it is not handled again. The text is kept as the reason."""


class RetryLater(Exception):
    """Raised by a handler to be called again in ``seconds``. The attempt counts like any other."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        super().__init__(seconds, reason)
        self.seconds: float = _checks.number("seconds", seconds, at_least=0, at_most=_LONGEST)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason or f"retry in {self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class HandlerRetryPolicy:
    """How often, and after which delays, the handler of an event is called again after it failed.

    The delay doubles from ``base_delay`` up to ``max_delay`` seconds, with jitter. After ``max_attempts`` the event is
    a dead letter. The defaults retry for about two hours.
    """

    max_attempts: int = 12
    base_delay: float = 5.0
    max_delay: float = 3600.0

    def __post_init__(self) -> None:
        _checks.integer("max_attempts", self.max_attempts)
        _checks.number("base_delay", self.base_delay, at_least=0, at_most=_LONGEST)
        _checks.number("max_delay", self.max_delay, at_least=self.base_delay, at_most=_LONGEST)

    def delay(self, attempts: int) -> float:
        """Return the seconds to wait after this number of attempts."""
        longest = min(self.base_delay * 2.0 ** min(attempts - 1, 64), self.max_delay)
        return random.uniform(longest / 2, longest)


class _Outcome(NamedTuple):
    """The end of an attempt: a status, or a retry in some seconds whose attempt counts or not."""

    name: EventStatus | Literal["retry", "not_counted"]
    error: str | None = None
    error_type: str | None = None
    retry_in: float = 0.0


class Inbox:
    """Stores verified events durably, and calls a handler for each of them, at least once. ::

        inbox = Inbox("inbox.db")

        @inbox.on("signing.completed")
        async def archive(event: Event) -> None: ...

        receiver = Receiver(WebhookVerifier(secret), inbox)
        async with inbox, inbox.running():
            await serve(receiver)

    ``store`` is the path of a SQLite file, or an `EventStore`. Any number of receivers and workers may share it; all
    workers must have the same handlers. The events of one signing are handled one at a time and in order of arrival,
    those of different signings side by side.

    ``key`` encrypts the bodies of events at rest; several keys allow rotation. After ``retention`` seconds, or never if
    it is None, the bodies of handled and dropped events are purged; their ids stay, so duplicates are recognized
    forever. After ``handler_timeout`` seconds an ``async`` handler is cancelled and tried again; a plain function runs
    in a thread and cannot be interrupted. No attempt is counted if an error is ``client_wide``, such as `Unauthorized`,
    or if the event cannot be decrypted. ``wakeups`` gets every event when its handling begins.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | EventStore,
        *,
        key: Keys = None,
        retention: float | None = 30 * _DAY,
        retry: HandlerRetryPolicy | None = None,
        handler_timeout: float = 360.0,
        wakeups: Wakeups | None = None,
    ) -> None:
        key = hide_keys(key)
        self._sealer = Sealer(key, owner="Inbox")
        if retention is not None:
            _checks.number("retention", retention, above=0, at_most=_LONGEST)
        self.retention: float | None = retention
        self.retry_policy: HandlerRetryPolicy = retry or HandlerRetryPolicy()
        self.handler_timeout: float = _checks.number("handler_timeout", handler_timeout, above=0)
        if isinstance(store, str | os.PathLike):
            store = SqliteEventStore(store)
        elif not hasattr(store, "claim"):
            raise ConfigurationError(f"inbox: must be a path or an EventStore, got {store!r}")
        self.store: EventStore = store
        self.wakeups: Wakeups | None = wakeups
        self._handlers: dict[str, EventHandler] = {}
        self._pauses: dict[str, float] = {}
        """The last pauses of events whose attempt did not count, by their ids."""
        self._telemetry = is_enabled()

    def __repr__(self) -> str:
        return f"Inbox({self.store!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the store."""
        await self.store.aclose()

    # Storing

    async def add(self, event: Event, body: bytes) -> bool:
        """Store an event durably; return False if its id is known. Raises `InboxError` if it could not be stored."""
        # Databases cannot hold every text; the body keeps the type as it was received.
        storable = event if event.type.isprintable() else replace(event, type=_clean(event.type))
        return await self.store.add(storable, self._sealer.seal(body, f"inbox:{event.key}"))

    # Handling

    def on(self, pattern: str) -> Callable[[H], H]:
        """Register a handler for a type, for all types with the same start (``"recipient.*"``), or for all (``"*"``).

        One handler is called for each event: that of its type, or else that of the longest pattern. An event without a
        handler counts as handled. The handler is plain or ``async``, and idempotent: if the process dies before the end
        of the attempt is recorded, it is called again.
        """
        check_pattern("pattern", pattern, ConfigurationError)

        def register(handler: H) -> H:
            if pattern in self._handlers:
                raise ConfigurationError(f"pattern: {pattern!r} has a handler already, {self._handlers[pattern]!r}")
            self._handlers[pattern] = handler
            return handler

        return register

    async def run(self, *, concurrency: int = 8, drain_timeout: float = 30.0) -> None:
        """Handle events until cancelled, ``concurrency`` at once.

        When it is cancelled, it claims no more events and waits up to ``drain_timeout`` seconds for running handlers.
        Then it cancels them, and their attempts do not count; it waits until plain handlers return. Raises `InboxError`
        if the store cannot be opened, or fails for good later. A transient failure is logged and retried.
        """
        _checks.integer("concurrency", concurrency)
        _checks.number("drain_timeout", drain_timeout, at_least=0)
        await self.store.claim(0)
        threads = ThreadPoolExecutor(concurrency, thread_name_prefix="signing-handler")
        helpers = [asyncio.create_task(work) for work in (self._purge_regularly(), self._report_backlog())]
        attempts: set[asyncio.Task[None]] = set()
        try:
            while True:
                for claim in await self._claim(concurrency - len(attempts)):
                    attempt = asyncio.create_task(self._handle(claim, threads))
                    attempts.add(attempt)
                    attempt.add_done_callback(attempts.discard)
                if len(attempts) == concurrency:
                    await asyncio.wait(attempts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for helper in helpers:
                helper.cancel()
            await finish(_drain(attempts, drain_timeout))
            threads.shutdown(wait=False)

    @contextlib.asynccontextmanager
    async def running(self, *, concurrency: int = 8, drain_timeout: float = 30.0) -> AsyncIterator[None]:
        """Handle events for the duration of the block, like `run`, and drain at its end."""
        await self.store.claim(0)
        task = asyncio.create_task(self.run(concurrency=concurrency, drain_timeout=drain_timeout))
        try:
            yield
        finally:
            task.cancel()
            await finish(asyncio.wait([task]))
            if not task.cancelled():
                task.result()

    # Managing

    async def events(self, selection: EventFilter | None = None) -> AsyncIterator[StoredEvent]:
        """Yield the selected events, or all, in order of arrival. Raises `InboxError` if one cannot be decrypted."""
        async for stored in self.store.select(selection or EventFilter()):
            yield self.decrypt(stored)

    async def get(self, event_id: str) -> StoredEvent | None:
        """Return an event by its id; None if it is not known."""
        return await anext(aiter(self.events(EventFilter(ids=[event_id]))), None)

    def decrypt(self, stored: StoredEvent) -> StoredEvent:
        """Return an event of the store with its body decrypted; raise a transient `InboxError` if no key opens it."""
        if not stored.body:
            return stored
        try:
            return replace(stored, body=self._sealer.unseal(stored.body, f"inbox:{stored.id}"))
        except ValueError as error:
            # Another worker may have the key.
            message = f"the body of event {stored.id} cannot be decrypted: {error}"
            raise event_error(message, transient=True) from None

    async def retry(self, selection: EventFilter) -> int:
        """Handle the selected events again, now and as if for the first time; return how many.

        Purged events, and events that are being handled, are left as they are.
        """
        return await self.store.requeue(selection)

    async def purge(self, *, older_than: float) -> int:
        """Delete the bodies of events handled or dropped more than ``older_than`` seconds ago; return how many."""
        _checks.number("older_than", older_than, at_least=0, at_most=_LONGEST)
        return await self.store.purge(datetime.now(UTC) - timedelta(seconds=older_than))

    async def stats(self) -> InboxStats:
        """Count the events."""
        return await self.store.stats()

    # Attempts

    async def _claim(self, limit: int) -> list[EventClaim]:
        """Return the claimed events. Without any, wait until one may be due."""
        try:
            claims = await self.store.claim(limit)
            if not claims:
                await self.store.wait(_IDLE)
            return claims
        except InboxError as error:
            if not error.transient:
                log.error("no more events are handled: %s", error)  # noqa: TRY400  # it is raised
                raise
            log.warning("cannot claim events now: %s", error)
        await asyncio.sleep(_PAUSE)
        return []

    async def _handle(self, claim: EventClaim, threads: ThreadPoolExecutor) -> None:
        """Run an attempt, and record how it ended. A claim whose attempt is cancelled is released."""
        stored, recorder, outcome = claim.stored, active(self._telemetry), None
        attributes = {names.HANDLER: self._pattern_of(stored.type)}
        about = {names.EVENT_ID: stored.id, names.SIGNING_ID: stored.signing_id, names.ATTEMPT_NUMBER: stored.attempts}
        with (
            contextlib.suppress(asyncio.CancelledError),
            recorder.span(names.HANDLER_SPAN, {**about, **attributes}, links=[stored.trace_context]) as span,
        ):
            outcome = await self._attempt(stored, threads)
            if outcome.name != "not_counted":
                self._pauses.pop(stored.id, None)
            attributes[names.HANDLER_OUTCOME] = outcome.name
            span.set({names.HANDLER_OUTCOME: outcome.name})
            if outcome.error_type is not None:
                span.fail(outcome.error_type)
            if isinstance(outcome.name, EventStatus):
                recorder.record(names.HANDLER_ATTEMPTS, stored.attempts, attributes)
        await finish(self._record(claim, outcome, asyncio.current_task()))

    async def _record(self, claim: EventClaim, outcome: _Outcome | None, attempt: asyncio.Task[Any] | None) -> None:
        """Record the end of an attempt. While the store fails, try again until the attempt is cancelled."""
        while True:
            try:
                if outcome is None:
                    return await self.store.release(claim)
                if isinstance(outcome.name, EventStatus):
                    is_held = await self.store.settle(claim, outcome.name, outcome.error)
                else:
                    counts = outcome.name == "retry"
                    is_held = await self.store.postpone(claim, outcome.retry_in, outcome.error, counts=counts)
                if not is_held:
                    log.warning("the claim on event %s was lost: the event may be handled again", claim.stored.id)
                return None
            except InboxError as error:
                if outcome is not None and not error.transient and not (outcome.error or "").isascii():
                    # The database may have an encoding that lacks a character.
                    outcome = outcome._replace(error=str(outcome.error).encode("ascii", "backslashreplace").decode())
                    continue
                log.warning("cannot record the end of event %s: %s", claim.stored.id, error)
                if not error.transient or (attempt is not None and attempt.cancelling()):
                    return None  # the event is handled again when its claim has ended
            await asyncio.sleep(_PAUSE)

    async def _attempt(self, stored: StoredEvent, threads: ThreadPoolExecutor) -> _Outcome:
        """Call the handler and return how it ended."""
        try:
            stored = self.decrypt(stored)
        except InboxError as error:  # the cause is the worker's keys, not the event
            return self._failed(stored, str(error), error, counts=False)
        if stored.attempts > self.retry_policy.max_attempts:
            return self._failed(stored, stored.error or "the process ended during the attempt")
        try:
            event = stored.event
            if self.wakeups is not None:
                self.wakeups.publish(event)
            pattern = self._pattern_of(event.type)
            if pattern is None:
                log.debug("no handler for event %s (type %.100r)", event.id, event.type)
                return _Outcome(EventStatus.HANDLED, "no handler")
            await self._call(self._handlers[pattern], event, threads)
        except Drop as drop:
            log.info("the handler dropped event %s: %s", stored.id, _clean(str(drop)))
            return _Outcome(EventStatus.DROPPED, _clean(str(drop)) or None)
        except RetryLater as later:
            return self._failed(stored, str(later), delay=later.seconds)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # such as a panic in an extension module
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            text = type(error).__name__
            with contextlib.suppress(Exception):  # a bug in the exception's class
                text = f"{text}: {error}".removesuffix(": ")
            return self._failed(stored, text, error, counts=not getattr(error, "client_wide", False))
        return _Outcome(EventStatus.HANDLED)

    async def _call(self, handler: EventHandler, event: Event, threads: ThreadPoolExecutor) -> None:
        result: Any
        if iscoroutinefunction(handler):
            result = handler(event)
        else:
            loop, message = asyncio.get_running_loop(), "the handler of event %s has taken more than %g s"
            warning = loop.call_later(self.handler_timeout, log.warning, message, event.id, self.handler_timeout)
            running = loop.run_in_executor(threads, contextvars.copy_context().run, _call_plain, handler, event)
            # A thread cannot be interrupted: hold the claim until it ends, even if this task is cancelled.
            while not running.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            warning.cancel()
            result = running.result()
        if isawaitable(result):
            try:
                async with asyncio.timeout(self.handler_timeout) as deadline:
                    await result
            except TimeoutError:
                if deadline.expired():
                    raise TimeoutError(f"the handler took longer than {self.handler_timeout:g} s") from None
                raise

    def _pattern_of(self, event_type: str) -> str | None:
        """Return the pattern whose handler is called for the type."""
        if event_type in self._handlers:
            return event_type
        matching = [name for name in self._handlers if name.endswith("*") and event_type.startswith(name[:-1])]
        return max(matching, key=len, default=None)

    def _failed(
        self,
        stored: StoredEvent,
        text: str,
        error: BaseException | None = None,
        *,
        delay: float | None = None,
        counts: bool = True,
    ) -> _Outcome:
        text, kind = _clean(text), None if error is None else type(error).__qualname__
        delay = self.retry_policy.delay(stored.attempts) if delay is None else delay
        if not counts:
            pause = self._pauses[stored.id] = min(2 * self._pauses.get(stored.id, _UNCOUNTED_PAUSE / 2), _LONGEST_PAUSE)
            delay = max(delay, pause)
            log.error("event %s is retried in %.1f s, no attempt is counted: %s", stored.id, delay, text)
            return _Outcome("not_counted", text, kind, delay)
        if stored.attempts >= self.retry_policy.max_attempts:
            log.error("event %s is dead after %d attempts: %s", stored.id, stored.attempts, text, exc_info=error)
            return _Outcome(EventStatus.DEAD, text, kind or "dead")
        message = "attempt %d of event %s failed, next in %.1f s: %s"
        log.warning(message, stored.attempts, stored.id, delay, text, exc_info=error)
        return _Outcome("retry", text, kind, delay)

    # Beside the attempts

    async def _report_backlog(self) -> None:
        recorder = Telemetry()
        try:
            while True:
                recorder = active(self._telemetry)
                await recorder.measure(id(self.store), self._measure)
                await asyncio.sleep(_REPORT_EVERY)
        finally:
            recorder.forget(id(self.store))

    async def _measure(self) -> Mapping[names.Metric, float]:
        """Count the events that need attention; return nothing if that fails: an old value would hide the failure."""
        try:
            stats = await self.store.stats()
        except Exception as error:
            log.warning("cannot count the pending events now: %s", error)
            return {}
        now = datetime.now(UTC)
        return {
            names.PENDING_EVENTS: stats.counts[EventStatus.PENDING],
            names.DEAD_LETTERS: stats.counts[EventStatus.DEAD],
            names.OLDEST_PENDING: max((now - (stats.oldest_pending or now)).total_seconds(), 0.0),
        }

    async def _purge_regularly(self) -> None:
        while self.retention is not None:
            try:
                await self.purge(older_than=self.retention)
            except InboxError as error:
                log.warning("cannot purge events now: %s", error)
            await asyncio.sleep(_PURGE_EVERY)


async def _drain(attempts: set[asyncio.Task[None]], timeout: float) -> None:
    if attempts:
        await asyncio.wait(attempts, timeout=timeout)
    for attempt in list(attempts):
        attempt.cancel()
    await asyncio.gather(*attempts, return_exceptions=True)


def _call_plain(handler: EventHandler, event: Event) -> object:
    try:
        return handler(event)
    except StopIteration as error:  # the future of a thread cannot hold it before Python 3.12, and would never end
        raise RuntimeError("the handler raised StopIteration") from error


def _clean(text: str) -> str:
    """Return a text that any database can hold."""
    return text[:_MAX_TEXT].encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")[:_MAX_TEXT]
