"""Which events were handed over already: a replay guard that loses no event to a crash."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Protocol

from .._sqlite import SharedDatabase
from ..errors import ConfigurationError

DAY = 86_400.0
TIMEOUT = 2.0  # seconds for which another process may keep the file locked
SETUP = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA wal_autocheckpoint = 4000",
    "CREATE TABLE IF NOT EXISTS seen_events"
    " (seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, until REAL NOT NULL, confirmed INTEGER NOT NULL)",
)
# The oldest rows have the lowest seq. Twice as many are looked at as can have come since the last time.
PRUNE_EVERY = 100
PRUNE = "DELETE FROM seen_events WHERE until <= ? AND seq IN (SELECT seq FROM seen_events ORDER BY seq LIMIT 200)"


class Claim(Enum):
    """What :meth:`SeenEvents.claim` found."""

    NEW = "new"
    """Yours now: hand the event over, then confirm or release it."""
    PENDING = "pending"
    """Somebody is handing it over, or crashed while doing so: ask the sender to come again."""
    CONFIRMED = "confirmed"
    """It was handed over: acknowledge it, and do nothing."""


class SeenEvents(Protocol):
    """Remembers events by id, in two steps around the hand-off. A method may be plain or ``async``.

    A claim is a lease: when its holder dies between claim and hand-off, the event can be claimed again once the lease
    is over. ``lease`` has to be longer than a hand-off may take; a receiver cuts its hand-offs off in time.
    """

    lease: float

    def claim(self, event_id: str) -> Claim | Awaitable[Claim]:
        """Take the event for handing it over, unless it is taken or was handed over already."""
        ...

    def confirm(self, event_id: str) -> Awaitable[None] | None:
        """Record that the event was handed over."""
        ...

    def release(self, event_id: str) -> Awaitable[None] | None:
        """Give a pending claim back after a failed hand-off; a confirmed event stays confirmed."""
        ...


class MemorySeenEvents:
    """Remembers in this process, for ``ttl`` seconds and at most ``max_events``: the oldest are forgotten first.

    Pending events are never forgotten early: when they alone fill it, no new one can be claimed for now.
    """

    def __init__(
        self,
        *,
        ttl: float = DAY,
        lease: float = 60.0,
        max_events: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_times(ttl, lease)
        if max_events < 1:
            raise ConfigurationError(f"max_events must be at least 1, not {max_events!r}")
        self.ttl = ttl
        self.lease = lease
        self.max_events = max_events
        self._clock = clock
        self._lock = threading.Lock()
        # id -> when it is over. Each is in order of that time, since what is added lasts equally long.
        self._pending: OrderedDict[str, float] = OrderedDict()
        self._confirmed: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pending) + len(self._confirmed)

    def claim(self, event_id: str) -> Claim:
        with self._lock:
            now = self._clock()
            _forget(self._pending, now)
            _forget(self._confirmed, now)
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


def _forget(events: OrderedDict[str, float], now: float) -> None:
    while events and next(iter(events.values())) <= now:
        events.popitem(last=False)


class SQLiteSeenEvents:
    """Remembers in a SQLite file: survives a restart, and is shared by every process that opens the file.

    Each step is one short statement on the caller's thread, atomic by itself. What was confirmed survives the death of
    the process; with ``power_safe=True`` it also survives a power cut, at the price of a disk flush for each step.
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
        _check_times(ttl, lease)
        self.path: Path = Path(path)
        self.ttl = ttl
        self.lease = lease
        prepare = partial(_prepare, synchronous="FULL" if power_safe else "NORMAL")
        self._database = SharedDatabase(self.path, prepare, timeout=TIMEOUT)
        self._clock = clock
        self._claims = 0

    def claim(self, event_id: str) -> Claim:
        now = self._clock()
        if self._claims % PRUNE_EVERY == 0:
            self._run(PRUNE, now)
        self._claims += 1
        taken = self._run(
            "INSERT INTO seen_events (id, until, confirmed) VALUES (?, ?, 0) ON CONFLICT (id) DO UPDATE"
            " SET until = excluded.until, confirmed = 0 WHERE until <= ?",
            event_id,
            now + self.lease,
            now,
        )
        if taken.rowcount == 1:
            return Claim.NEW
        confirmed = self._run("SELECT 1 FROM seen_events WHERE id = ? AND confirmed = 1", event_id).fetchone()
        return Claim.CONFIRMED if confirmed else Claim.PENDING

    def confirm(self, event_id: str) -> None:
        self._run(
            "INSERT INTO seen_events (id, until, confirmed) VALUES (?, ?, 1) ON CONFLICT (id) DO UPDATE"
            " SET until = excluded.until, confirmed = 1",
            event_id,
            self._clock() + self.ttl,
        )

    def release(self, event_id: str) -> None:
        self._run("DELETE FROM seen_events WHERE id = ? AND confirmed = 0", event_id)

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        self._database.close()

    def _run(self, statement: str, *values: object) -> sqlite3.Cursor:
        with self._database.connected() as connection:
            return connection.execute(statement, values)


def _prepare(connection: sqlite3.Connection, synchronous: str) -> None:
    for statement in (*SETUP, f"PRAGMA synchronous = {synchronous}"):
        connection.execute(statement)


def _check_times(ttl: float, lease: float) -> None:
    if not ttl > 0:
        raise ConfigurationError(f"ttl must be more than 0 seconds, not {ttl!r}")
    if not lease > 0:
        raise ConfigurationError(f"lease must be more than 0 seconds, not {lease!r}")
