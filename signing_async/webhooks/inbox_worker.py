"""The worker of an inbox: claims events, runs an attempt for each, and records how it ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

from .._tasks import finish
from ..errors import InboxError
from ..telemetry import Telemetry, active
from ..telemetry.names import (
    ATTEMPT_NUMBER,
    DEAD_LETTERS,
    EVENT_ID,
    HANDLER,
    HANDLER_ATTEMPTS,
    HANDLER_OUTCOME,
    HANDLER_SPAN,
    OLDEST_PENDING,
    PENDING_EVENTS,
    SIGNING_ID,
    Metric,
)
from .event_store import Backlog, EventClaim, EventStatus, EventStore, MeasuredStore, StoredEvent

__all__ = ["MAX_TEXT", "Outcome", "Worker"]

log: logging.Logger = logging.getLogger("signing_async.webhooks")

MAX_TEXT = 1000
"""Characters of an outcome's error."""
_IDLE = 1.0
"""Seconds after which to look for the claims of dead processes."""
_PAUSE = 1.0
"""Seconds to wait while the store fails."""
_REPORT_EVERY = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an attempt: a final status, or a retry in some seconds."""

    status: EventStatus = EventStatus.HANDLED
    error: str | None = None
    retry_in: float | None = None
    counts: bool = True
    """Whether a retried attempt counts."""
    error_type: str | None = None
    """The name of the exception's class."""

    @property
    def name(self) -> str:
        """The status, ``retry`` or ``not_counted``."""
        if self.retry_in is None:
            return self.status
        return "retry" if self.counts else "not_counted"


class Worker:
    """Runs up to ``concurrency`` attempts at once until it is cancelled, and then drains.

    To drain, it claims no more events and waits up to ``drain_timeout`` seconds for the running attempts. The remaining
    attempts are cancelled and their events are released. Further cancellations change nothing: anyio repeats them.
    """

    def __init__(
        self,
        store: EventStore,
        attempt: Callable[[StoredEvent], Awaitable[Outcome]],
        *,
        concurrency: int,
        drain_timeout: float,
        pattern_of: Callable[[str], str | None],
        telemetry: bool,
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._free = concurrency
        self._drain_timeout = drain_timeout
        self._pattern_of = pattern_of
        self._telemetry = telemetry
        self._unrecorded: set[str] = set()
        """The ids of events whose end the store could not record yet. Until it has, a claim might return them again."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._recording: set[asyncio.Task[None]] = set()
        """The tasks whose attempts have ended but are not recorded yet."""
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled. Log a transient error of the store and retry; raise any other error of the store."""
        reporting = asyncio.create_task(self._report_backlog(), name="signing_async backlog")
        try:
            while True:
                try:
                    await self._claim_and_wait()
                except InboxError as error:
                    if not error.transient:
                        log.error("no more events are handled: %s", error)  # noqa: TRY400  # it is raised
                        raise
                    log.warning("cannot claim events now: %s", error)
                    await asyncio.sleep(_PAUSE)
        finally:
            reporting.cancel()
            await finish(self._drain())

    async def _claim_and_wait(self) -> None:
        self._changed.clear()
        if self._free and not self._unrecorded:
            # New handlers start only after these attempts are recorded. After a crash, no more handlers run again than
            # can run at once.
            earlier = frozenset(self._recording)
            for claim in await self._store.claim(self._free):
                self._free -= 1
                handling = self._handle(claim, earlier)
                task = asyncio.create_task(handling, name=f"signing_async event {claim.stored.id}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if self._free and not self._unrecorded:
            await self._wait()
        else:
            await self._changed.wait()

    async def _wait(self) -> None:
        """Wait until an attempt ends, or an event may be due."""
        changed = asyncio.create_task(self._changed.wait())
        due = asyncio.create_task(self._store.wait(_IDLE))
        try:
            await asyncio.wait([changed, due], return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
            due.cancel()
            await asyncio.wait([changed, due])
        if not due.cancelled():
            due.result()

    async def _handle(self, claim: EventClaim, earlier: frozenset[asyncio.Task[None]]) -> None:
        """Run an attempt once the ``earlier`` ones are recorded, and record how it ended."""
        outcome: Outcome | None = None
        recording = asyncio.current_task()
        assert recording is not None
        try:
            if earlier:
                await asyncio.wait(earlier)
            outcome = await self._run_attempt(claim.stored)
        except asyncio.CancelledError:
            pass  # the worker ends: the event is released
        finally:
            # Free the slot before the outcome is recorded: both the outcome and the next claim are then in one commit.
            self._recording.add(recording)
            self._free += 1
            self._changed.set()
        try:
            if not await self._record(claim, outcome):
                log.warning("the claim on event %s was lost: another worker handles it again", claim.stored.id)
        finally:
            self._recording.discard(recording)
            self._unrecorded.discard(claim.stored.id)
            self._changed.set()

    async def _run_attempt(self, stored: StoredEvent) -> Outcome:
        recorder, handler = active(self._telemetry), self._pattern_of(stored.type)
        about = {EVENT_ID: stored.id, SIGNING_ID: stored.signing_id, HANDLER: handler, ATTEMPT_NUMBER: stored.attempts}
        with recorder.span(HANDLER_SPAN, about, links=[stored.trace_context]) as span:
            outcome = await self._attempt(stored)
            span.set({HANDLER_OUTCOME: outcome.name})
            if outcome.error_type is not None:
                span.fail(outcome.error_type)
            if outcome.retry_in is None:
                attributes = {HANDLER: handler, HANDLER_OUTCOME: outcome.name}
                recorder.record(HANDLER_ATTEMPTS, stored.attempts, attributes)
            return outcome

    async def _report_backlog(self) -> None:
        """Report the events that need attention, until cancelled."""
        recorder = Telemetry()
        try:
            while True:
                recorder = active(self._telemetry)
                await recorder.measure(id(self._store), partial(_measure, self._store))
                await asyncio.sleep(_REPORT_EVERY)
        finally:
            recorder.forget(id(self._store))

    async def _record(self, claim: EventClaim, outcome: Outcome | None) -> bool:
        while True:
            try:
                if outcome is None:
                    await self._store.release(claim)
                    return True
                if outcome.retry_in is not None:
                    return await self._store.postpone(claim, outcome.retry_in, outcome.error, counts=outcome.counts)
                return await self._store.settle(claim, outcome.status, outcome.error)
            except InboxError as error:
                if not error.transient:
                    if outcome is None or outcome.error is None or outcome.error.isascii():
                        # If the store has failed for good, the next claim fails too, and ends the run.
                        log.error(  # noqa: TRY400  # a traceback says nothing more
                            "cannot record the end of event %s: %s; it is handled again when its claim has ended",
                            claim.stored.id,
                            error,
                        )
                        return True
                    # The store may refuse the text.
                    text = outcome.error.encode("ascii", "backslashreplace").decode()
                    outcome = replace(outcome, error=text[:MAX_TEXT])
                log.warning("cannot record the end of event %s: %s", claim.stored.id, error)
                if outcome is None:
                    return True
                # Until the end is recorded, no other event is claimed.
                self._unrecorded.add(claim.stored.id)
                await asyncio.sleep(_PAUSE)

    async def _drain(self) -> None:
        if not self._tasks:
            return
        try:
            await asyncio.wait(self._tasks, timeout=self._drain_timeout)
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _measure(store: EventStore) -> Mapping[Metric, float]:
    """Count the events that need attention; return nothing if the store fails: an old value would hide the failure."""
    try:
        if isinstance(store, MeasuredStore):
            backlog = await store.backlog()
        else:
            stats = await store.stats()
            backlog = Backlog(stats.counts[EventStatus.PENDING], stats.counts[EventStatus.DEAD], stats.oldest_pending)
    except Exception as error:  # also a bug in the store
        log.warning("cannot count the pending events now: %s", error)
        return {}
    age = 0.0 if backlog.oldest_pending is None else (datetime.now(UTC) - backlog.oldest_pending).total_seconds()
    return {PENDING_EVENTS: backlog.pending, DEAD_LETTERS: backlog.dead, OLDEST_PENDING: max(age, 0.0)}
