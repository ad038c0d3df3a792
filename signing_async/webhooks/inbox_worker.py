"""The worker of an inbox: claims events, runs an attempt for each, and records how it ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ..errors import InboxError
from .event_store import EventClaim, EventStatus, EventStore, StoredEvent

__all__ = ["Outcome", "Worker"]

log: logging.Logger = logging.getLogger("signing_async.webhooks")

_IDLE = 1.0
"""Seconds after which to look for the claims of dead processes."""
_PAUSE = 1.0
"""Seconds to wait while the store fails."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an attempt: a final status, or a retry in some seconds."""

    status: EventStatus = EventStatus.HANDLED
    error: str | None = None
    retry_in: float | None = None


@dataclass(eq=False)
class Worker:
    """Runs up to ``concurrency`` attempts at once until it is cancelled, and then drains.

    To drain, it claims no more events and waits up to ``drain_timeout`` seconds for the running attempts. The remaining
    attempts are cancelled and their events are released. A second cancellation ends the wait.
    """

    _store: EventStore
    _attempt: Callable[[StoredEvent], Awaitable[Outcome | None]]
    _free: int
    """How many more attempts may run now; ``concurrency`` at first."""
    _drain_timeout: float
    _unrecorded: set[str] = field(default_factory=set, init=False)
    """The ids of events whose end the store could not record yet. Until then, a claim might return them again."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def run(self) -> None:
        """Work until cancelled. While the store fails, log it and try again."""
        try:
            while True:
                try:
                    await self._claim_and_wait()
                except InboxError as error:
                    log.warning("cannot claim events now: %s", error)
                    await asyncio.sleep(_PAUSE)
        finally:
            await self._drain()

    async def _claim_and_wait(self) -> None:
        self._changed.clear()
        if self._free and not self._unrecorded:
            for claim in await self._store.claim(self._free):
                self._free -= 1
                task = asyncio.create_task(self._handle(claim), name=f"signing_async event {claim.stored.id}")
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

    async def _handle(self, claim: EventClaim) -> None:
        outcome = None
        try:
            outcome = await self._attempt(claim.stored)
        except asyncio.CancelledError:
            pass  # the worker ends: the event is released
        finally:
            # The outcome is recorded in the same commit as the next claim.
            self._free += 1
            self._changed.set()
        try:
            if not await self._record(claim, outcome):
                log.warning("the claim on event %s was lost: another worker handles it again", claim.stored.id)
        finally:
            self._unrecorded.discard(claim.stored.id)
            self._changed.set()

    async def _record(self, claim: EventClaim, outcome: Outcome | None) -> bool:
        while True:
            try:
                if outcome is None:
                    await self._store.release(claim)
                    return True
                if outcome.retry_in is not None:
                    return await self._store.postpone(claim, outcome.retry_in, outcome.error)
                return await self._store.settle(claim, outcome.status, outcome.error)
            except InboxError as error:
                log.warning("cannot record the end of event %s now: %s", claim.stored.id, error)
                if outcome is None:
                    return True  # the store forgets the claim
                self._unrecorded.add(claim.stored.id)
                await asyncio.sleep(_PAUSE)
            except Exception:  # a mistake in the store
                log.exception("cannot record the end of event %s: it is handled again", claim.stored.id)
                if outcome is None:
                    return True
                outcome = None
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
