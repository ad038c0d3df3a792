"""The events of an inbox, and the protocol of their store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from .. import _checks
from ..errors import InboxError, InvalidRequest
from .event import Event, parse_event


class EventStatus(StrEnum):
    """The state of an event in an inbox."""

    PENDING = "pending"
    """Not handled yet: new, claimed by a worker, or waiting for its next attempt."""
    HANDLED = "handled"
    DROPPED = "dropped"
    """A handler raised `Drop`."""
    DEAD = "dead"
    """Its handler failed too often."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event as an inbox keeps it. ``id`` and ``signing_id`` are the ``key`` and the ``signing_key`` of the event."""

    id: str
    type: str
    signing_id: str | None
    body: bytes = field(repr=False)
    """The raw body of the delivery, or its ciphertext; empty once it was purged."""
    received_at: datetime
    status: EventStatus = EventStatus.PENDING
    attempts: int = 0
    """How many attempts began, counted before the handler starts: one that kills its process counts if it ran alone."""
    due_at: datetime | None = None
    """The time of the next attempt, if a pending event waits for one."""
    error: str | None = None
    """Why the last attempt failed, why a handler dropped the event, or that the event had no handler."""
    settled_at: datetime | None = None
    fence: int | None = field(default=None, compare=False)
    """The fencing token of the event's claim, different for each attempt; None if the event is not claimed."""
    trace_context: str | None = field(default=None, repr=False, compare=False)

    @property
    def event(self) -> Event:
        """The event as handlers get it. Raises `InboxError` if it was purged."""
        if not self.body:
            raise event_error(f"event {self.id} has no body: the event was purged")
        event = parse_event(self.body, self.received_at, max_body=len(self.body))
        namespace = self.id.removesuffix(event.id).removesuffix(":") or None
        return replace(event, trace_context=self.trace_context, namespace=namespace)


@dataclass(frozen=True, slots=True)
class EventClaim:
    """The exclusive right to handle an event. While it is held, no other event of the signing can be claimed."""

    stored: StoredEvent
    fence: int
    """The fencing token: a stale holder's writes are refused."""


@dataclass(frozen=True, slots=True)
class InboxStats:
    """How many events an inbox holds, with every status as a key, and when the oldest pending one was received."""

    counts: dict[EventStatus, int]
    oldest_pending: datetime | None


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Selects stored events, received from ``since`` on and before ``until``. The empty filter selects all."""

    ids: Sequence[str] | None = None
    status: EventStatus | None = None
    type: str | None = None
    """A type, or the start of a type followed by ``*``, such as ``recipient.*``."""
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ids, str):
            raise InvalidRequest(f"ids: must be a sequence of event ids, got the string {self.ids!r}")
        for name, moment in (("since", self.since), ("until", self.until)):
            if moment is not None and not _checks.is_aware(moment):
                raise InvalidRequest(f"{name}: must be a datetime with a time zone, got {moment!r}")
        if self.type is not None:
            check_pattern("type", self.type, InvalidRequest)


def check_pattern(name: str, pattern: object, error: type[Exception]) -> None:
    """Raise ``error`` unless the pattern is a type, or the start of a type followed by ``*``."""
    if not isinstance(pattern, str) or not pattern or "*" in pattern[:-1]:
        raise error(f"{name}: must be an event type, or the start of one and '*', got {pattern!r}")


def event_error(message: str, *, transient: bool = False) -> InboxError:
    """Return an error that concerns one event: others can be read and written."""
    return InboxError(message, transient=transient, client_wide=False)


class EventStore(Protocol):
    """Keeps events durably and lets one worker at a time handle the events of a signing.

    Failures are raised as `InboxError`. ``settle`` and ``postpone`` return False if the claim was lost.
    """

    async def add(self, event: Event, body: bytes) -> bool:
        """Store an event durably; return False if its id is known, even if the event was purged."""

    async def claim(self, limit: int) -> list[EventClaim]:
        """Claim up to ``limit`` due events, the longest due first; count an attempt for each.

        An event can be claimed if no earlier event of its signing is pending, and no event of its signing is claimed.
        An event without a signing waits for no other. The claims of a dead process are free. Its attempt counts if
        it was the only one; after two deaths an event is claimed alone, while its owner holds no other claim.
        """

    async def settle(self, claim: EventClaim, status: EventStatus, error: str | None = None) -> bool:
        """Record the end of an event."""

    async def postpone(self, claim: EventClaim, seconds: float, error: str | None, *, counts: bool = True) -> bool:
        """Release the claim and make the event due in ``seconds``. The attempt counts only if ``counts`` is true."""

    async def release(self, claim: EventClaim) -> None:
        """Release a claim whose handler did not run; its attempt does not count."""

    async def wait(self, timeout: float) -> None:
        """Return once an event may have become due, or after ``timeout`` seconds."""

    def select(self, selection: EventFilter) -> AsyncIterator[StoredEvent]:
        """Yield the selected events in order of arrival."""

    async def requeue(self, selection: EventFilter) -> int:
        """Make the selected events pending, due and untried, except claimed and purged ones; return how many."""

    async def purge(self, settled_before: datetime) -> int:
        """Delete the bodies, not the ids, of events handled or dropped before this time; return how many."""

    async def stats(self) -> InboxStats:
        """Count the events."""

    async def aclose(self) -> None:
        """Release all claims and close the store."""
