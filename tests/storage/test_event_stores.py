"""Every store of an inbox passes its suite, and a faulty store does not."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from signing_async.errors import InboxError
from signing_async.storage.events import SqliteEventStore
from signing_async.webhooks import (
    Event,
    EventClaim,
    EventFilter,
    EventStatus,
    EventStore,
    InboxStats,
    StoredEvent,
)
from tests.storage import event_stores
from tests.storage.event_stores import EventStoreConformance, FencedEventStoreConformance

OpenStore = Callable[[], EventStore]


class TestSqliteEventStore(EventStoreConformance, FencedEventStoreConformance):
    """In a file, for one machine."""

    @pytest.fixture
    async def open_store(self, tmp_path: Path) -> AsyncIterator[OpenStore]:
        async with contextlib.AsyncExitStack() as opened:

            def open_store() -> EventStore:
                store = SqliteEventStore(tmp_path / "inbox.db")
                opened.push_async_callback(store.aclose)
                return store

            yield open_store

    @pytest.fixture
    def lapse(self, tmp_path: Path) -> Any:
        async def lapse(store: EventStore) -> None:
            for lock in tmp_path.glob("inbox.db.*.lock"):
                lock.unlink()

        return lapse


# A suite, too, must be seen to fail.


class MemoryEventStore:
    """A store in memory that can be told to break each promise."""

    def __init__(self, rows: list[Any], fault: str) -> None:
        self._rows = rows
        self._fault = fault
        self._closed = False

    async def add(self, event: Event, body: bytes) -> bool:
        if self._closed and self._fault != "never closed":
            raise InboxError("closed")
        if any(row["id"] == event.id for row in self._rows) and self._fault != "no deduplication":
            return False
        if self._fault == "lost bodies":
            body = body[:100_000]
        if self._fault == "text bodies":
            body = body.decode(errors="replace").encode()
        if self._fault == "refused with its neighbours" and len(self._rows) > 2:
            raise InboxError("refused")
        row: dict[str, Any] = {"id": event.id, "type": event.type, "signing_id": event.signing_id, "body": body}
        row |= {"received_at": event.received_at, "due": 0.0, "attempts": 0, "owner": None, "fence": 0}
        row |= {"status": EventStatus.PENDING, "error": None, "settled_at": None}
        self._rows.insert(0 if self._fault == "newest first" else len(self._rows), row)
        return True

    async def claim(self, limit: int) -> list[EventClaim]:
        if self._closed:
            raise InboxError("closed")
        claims: list[EventClaim] = []
        rows = self._rows if self._fault == "oldest first" else sorted(self._rows, key=itemgetter("due"))
        for row in rows:
            if len(claims) < limit and self._can_be_claimed(row):
                row["owner"] = self
                row["attempts"] += self._fault != "no attempts"
                row["fence"] += self._fault != "no fence"
                claims.append(EventClaim(_stored(row), row["fence"]))
        if self._fault == "cancelled claims":
            await asyncio.sleep(0)
        return claims

    def _can_be_claimed(self, row: Any) -> bool:
        if row["status"] is not EventStatus.PENDING or (row["owner"] is not None and self._fault != "claimed twice"):
            return False
        if row["due"] > time.time() and self._fault != "no delay":
            return False
        same = [other for other in self._rows if other["signing_id"] == row["signing_id"] and other is not row]
        if row["signing_id"] is None and self._fault != "one without a signing":
            return True
        earlier = self._rows[: self._rows.index(row)]
        waits = [other for other in same if other in earlier and other["status"] is EventStatus.PENDING]
        held = [other for other in same if other["owner"] is not None]
        return not ((waits and self._fault != "no order") or (held and self._fault not in ("no order", "side by side")))

    async def settle(self, claim: EventClaim, status: EventStatus, error: str | None = None) -> bool:
        return self._end(claim, status=status, error=error, settled_at=datetime.now(UTC))

    async def postpone(self, claim: EventClaim, seconds: float, error: str | None, *, counts: bool = True) -> bool:
        attempts = claim.stored.attempts - (not counts and self._fault != "counted anyway")
        return self._end(claim, due=time.time() + seconds, error=error, attempts=attempts)

    async def release(self, claim: EventClaim) -> None:
        self._end(claim, attempts=claim.stored.attempts - (self._fault != "counted releases"))

    def _end(self, claim: EventClaim, **changes: Any) -> bool:
        row = next(row for row in self._rows if row["id"] == claim.stored.id)
        if (row["owner"], row["fence"]) != (self, claim.fence) and self._fault != "no check":
            return False
        row.update(owner=None, **(changes if self._fault != "no record" else {}))
        return True

    async def wait(self, timeout: float) -> None:
        end = time.monotonic() + (timeout if self._fault != "endless wait" else 3600)
        while time.monotonic() < end and not any(self._can_be_claimed(row) for row in self._rows):
            await asyncio.sleep(0.001)

    async def select(self, selection: EventFilter) -> AsyncIterator[StoredEvent]:
        for row in list(self._rows):
            if self._matches(row, selection):
                yield _stored(row)

    def _matches(self, row: Any, selection: EventFilter) -> bool:
        pattern = selection.type
        of_type = (
            pattern is None or row["type"] == pattern or (pattern[-1] == "*" and row["type"].startswith(pattern[:-1]))
        )
        return (
            (selection.ids is None or row["id"] in selection.ids)
            and selection.status in (None, row["status"])
            and (of_type or self._fault == "all types")
            and (selection.since is None or row["received_at"] >= selection.since)
            and (selection.until is None or row["received_at"] < selection.until)
        )

    async def requeue(self, selection: EventFilter) -> int:
        rows = [row for row in self._rows if row["owner"] is None and self._matches(row, selection)]
        rows = [row for row in rows if row["body"] or self._fault == "purged requeued"]
        for row in rows:
            kept = {"attempts": row["attempts"]} if self._fault == "attempts kept" else {"attempts": 0}
            row.update(status=EventStatus.PENDING, due=0.0, error=None, settled_at=None, **kept)
        return len(rows)

    async def purge(self, settled_before: datetime) -> int:
        statuses = {EventStatus.HANDLED, EventStatus.DROPPED}
        if self._fault == "dead purged":
            statuses.add(EventStatus.DEAD)
        rows = [row for row in self._rows if row["body"] and row["status"] in statuses]
        rows = [row for row in rows if row["settled_at"] < settled_before]
        for row in rows:
            row["body"] = b""
            if self._fault == "forgotten ids":
                self._rows.remove(row)
        return len(rows)

    async def stats(self) -> InboxStats:
        pending = [row["received_at"] for row in self._rows if row["status"] is EventStatus.PENDING]
        oldest = (max if self._fault == "wrong stats" else min)(pending, default=None)
        counts = Counter(row["status"] for row in self._rows)
        statuses = counts if self._fault == "missing counts" else EventStatus
        return InboxStats({status: counts[status] for status in statuses}, oldest)

    async def aclose(self) -> None:
        self._closed = True
        for row in self._rows:
            if row["owner"] is self and self._fault != "kept at the end":
                row["owner"] = None


def _stored(row: Any) -> StoredEvent:
    names = ("id", "type", "signing_id", "body", "received_at", "status", "attempts", "error", "settled_at")
    waits = row["due"] and row["status"] is EventStatus.PENDING and row["owner"] is None
    due_at = datetime.fromtimestamp(row["due"], UTC) if waits else None
    return StoredEvent(**{name: row[name] for name in names}, due_at=due_at)


FAULTS = {
    "": "",
    "no deduplication": "test_known_event_is_not_added_again",
    "lost bodies": "test_added_event_is_claimed_with_all_its_fields",
    "text bodies": "test_body_is_kept_to_the_byte",
    "refused with its neighbours": "test_event_that_the_store_refuses_does_not_fail_those_added_with_it",
    "newest first": "test_events_of_different_signings_are_claimed_in_order_of_arrival",
    "claimed twice": "test_concurrent_workers_claim_each_event_once_and_each_signing_in_order",
    "no attempts": "test_added_event_is_claimed_with_all_its_fields",
    "no fence": "test_postponed_event_is_due_after_its_delay_and_its_signing_waits",
    "cancelled claims": "test_cancelled_claim_leaves_the_event_free",
    "no delay": "test_postponed_event_is_due_after_its_delay_and_its_signing_waits",
    "one without a signing": "test_events_of_different_signings_are_claimed_in_order_of_arrival",
    "no order": "test_one_event_of_a_signing_is_claimed_at_a_time_in_order_of_arrival",
    "side by side": "test_requeued_event_waits_for_a_claimed_one_of_its_signing_and_precedes_the_rest",
    "counted releases": "test_released_event_is_due_at_once_and_its_attempt_does_not_count",
    "counted anyway": "test_attempt_that_is_postponed_without_being_counted_leaves_its_place_to_other_events",
    "oldest first": "test_attempt_that_is_postponed_without_being_counted_leaves_its_place_to_other_events",
    "no check": "test_ended_claim_is_refused",
    "no record": "test_released_event_is_due_at_once_and_its_attempt_does_not_count",
    "endless wait": "test_wait_returns_when_a_postponed_event_is_due_or_after_its_timeout",
    "all types": "test_select_yields_the_matching_events_in_order_of_arrival",
    "purged requeued": "test_purge_forgets_the_bodies_of_handled_and_dropped_events_and_keeps_their_ids",
    "attempts kept": "test_requeued_events_are_due_with_no_attempts_counted",
    "dead purged": "test_purge_forgets_the_bodies_of_handled_and_dropped_events_and_keeps_their_ids",
    "forgotten ids": "test_purge_forgets_the_bodies_of_handled_and_dropped_events_and_keeps_their_ids",
    "wrong stats": "test_stats_count_the_events_and_name_the_oldest_pending_one",
    "missing counts": "test_stats_count_the_events_and_name_the_oldest_pending_one",
    "kept at the end": "test_closing_releases_all_claims",
    "never closed": "test_closing_releases_all_claims",
}
EVERY = [name for name in dir(EventStoreConformance) if name.startswith("test_") and "settled_event" not in name]


@pytest.mark.parametrize("fault", FAULTS)
async def test_suite_detects_each_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stores, "_TIMEOUT", 2.0)
    for name in [FAULTS[fault]] if fault else EVERY:
        rows: list[Any] = []
        finds = pytest.raises((Exception, pytest.fail.Exception)) if fault else contextlib.nullcontext()
        with finds:
            async with asyncio.timeout(3):
                await getattr(EventStoreConformance(), name)(partial(MemoryEventStore, rows, fault))


@pytest.mark.parametrize("fault", ["", "no record"])
async def test_suite_detects_an_end_that_is_not_recorded(fault: str) -> None:
    finds = pytest.raises((AssertionError, ValueError)) if fault else contextlib.nullcontext()
    with finds:
        await EventStoreConformance().test_settled_event_is_not_claimed_again(
            partial(MemoryEventStore, [], fault), EventStatus.DEAD
        )
