"""Deduplication: remembers which events were handled, without losing one to a crash."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Protocol

from .. import _checks
from ..errors import StorageError
from ..storage.sqlite import FileFormat, SharedDatabase, is_new_file, set_up

DAY = 86_400.0
TIMEOUT = 2.0  # seconds to wait for another process that keeps the file locked
TABLE = (
    "CREATE TABLE IF NOT EXISTS seen_events"
    " (seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, until REAL NOT NULL, confirmed INTEGER NOT NULL)"
)
FORMAT = FileFormat("store of seen events", "SQLiteSeenEvents", 0x53696773, 1, "seen_events", (TABLE,), StorageError)
# The oldest rows have the lowest seq. A run examines twice as many rows as this object can have added since the last.
PRUNE_EVERY = 100
PRUNE = "DELETE FROM seen_events WHERE until <= ? AND seq IN (SELECT seq FROM seen_events ORDER BY seq LIMIT 200)"
WRITE = "INSERT INTO seen_events (id, until, confirmed) VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE"
CLAIM = f"{WRITE} SET until = excluded.until, confirmed = 0 WHERE until <= ?"
CONFIRM = f"{WRITE} SET until = excluded.until, confirmed = 1"


class Claim(Enum):
    """The result of `SeenEvents.claim`."""

    NEW = "new"
    """The caller holds the claim: handle the event, then confirm or release it."""
    PENDING = "pending"
    """Another receiver is handling the event, or crashed while it did: ask the sender to deliver again."""
    CONFIRMED = "confirmed"
    """The event was handled: acknowledge the duplicate and do nothing."""


class SeenEvents(Protocol):
    """A store of event ids: claim before the handler runs, confirm or release afterwards.

    Methods may be plain or ``async``.

    A claim is a lease: if its holder dies before it confirms, the event can be claimed again once the lease expires.
    ``lease`` must be longer than the handler may take.
    """

    lease: float

    def claim(self, event_id: str) -> Claim | Awaitable[Claim]:
        """Claim the event, unless it is claimed or confirmed already."""
        ...

    def confirm(self, event_id: str) -> Awaitable[None] | None:
        """Record that the event was handled."""
        ...

    def release(self, event_id: str) -> Awaitable[None] | None:
        """Give up a pending claim after the handler failed; a confirmed event stays confirmed."""
        ...


class MemorySeenEvents:
    """Deduplicates within this process, for ``ttl`` seconds and at most ``max_events`` events.

    The oldest confirmed events are forgotten first. Pending events are never forgotten early: if ``max_events`` are
    pending, new events cannot be claimed.
    """

    def __init__(
        self,
        *,
        ttl: float = DAY,
        lease: float = 60.0,
        max_events: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ttl: float = _checks.number("ttl", ttl, above=0)
        self.lease: float = _checks.number("lease", lease, above=0)
        self.max_events: int = _checks.integer("max_events", max_events)
        self._clock = clock
        self._lock = threading.Lock()
        # Event id to expiry time, in order of expiry: all entries have the same lifetime.
        self._pending: OrderedDict[str, float] = OrderedDict()
        self._confirmed: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pending) + len(self._confirmed)

    def claim(self, event_id: str) -> Claim:
        with self._lock:
            now = self._clock()
            for events in (self._pending, self._confirmed):
                while events and next(iter(events.values())) <= now:
                    events.popitem(last=False)
            if event_id in self._confirmed:
                return Claim.CONFIRMED
            if event_id in self._pending or len(self._pending) >= self.max_events:
                return Claim.PENDING
            self._pending[event_id] = now + self.lease
            self._shrink()
            return Claim.NEW

    def confirm(self, event_id: str) -> None:
        with self._lock:
            self._pending.pop(event_id, None)
            self._confirmed[event_id] = self._clock() + self.ttl
            self._confirmed.move_to_end(event_id)
            self._shrink()

    def release(self, event_id: str) -> None:
        with self._lock:
            self._pending.pop(event_id, None)

    def _shrink(self) -> None:
        while self._confirmed and len(self) > self.max_events:
            self._confirmed.popitem(last=False)


class SQLiteSeenEvents:
    """Deduplicates in a SQLite file, which survives restarts and is shared by every process that opens it.

    Each call runs one to three short, atomic statements in the caller's thread. A confirmed event survives the death of
    the process; with ``power_safe=True`` also a power failure, at the cost of a disk flush per write.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        ttl: float = 30 * DAY,
        lease: float = 60.0,
        power_safe: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path: Path = Path(path)
        self.ttl: float = _checks.number("ttl", ttl, above=0)
        self.lease: float = _checks.number("lease", lease, above=0)
        self._clock = clock
        self._claims = count()
        synchronous = f"PRAGMA synchronous = {'FULL' if power_safe else 'NORMAL'}"

        def prepare(connection: sqlite3.Connection) -> None:
            is_new = is_new_file(connection, f"the {FORMAT.name} {self.path}", FORMAT)
            for statement in ("PRAGMA journal_mode = WAL", "PRAGMA wal_autocheckpoint = 4000", synchronous):
                connection.execute(statement)
            if is_new:
                set_up(connection, FORMAT)

        self._database = SharedDatabase(self.path, prepare, timeout=TIMEOUT)

    def claim(self, event_id: str) -> Claim:
        now = self._clock()
        with self._database.connected() as connection:
            if next(self._claims) % PRUNE_EVERY == 0:
                connection.execute(PRUNE, [now])
            if connection.execute(CLAIM, [event_id, now + self.lease, 0, now]).rowcount:
                return Claim.NEW
            confirmed = connection.execute("SELECT 1 FROM seen_events WHERE id = ? AND confirmed = 1", [event_id])
            return Claim.PENDING if confirmed.fetchone() is None else Claim.CONFIRMED

    def confirm(self, event_id: str) -> None:
        with self._database.connected() as connection:
            connection.execute(CONFIRM, [event_id, self._clock() + self.ttl, 1])

    def release(self, event_id: str) -> None:
        with self._database.connected() as connection:
            connection.execute("DELETE FROM seen_events WHERE id = ? AND confirmed = 0", [event_id])

    def close(self) -> None:
        """Close the file. The next call opens it again."""
        self._database.close()
