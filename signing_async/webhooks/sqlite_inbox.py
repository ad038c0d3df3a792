"""The store of an inbox in a SQLite file, for any number of processes on one machine."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import sqlite3
import time
import warnings
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ..errors import InboxError
from ..storage.sqlite import FileFormat, SqliteEngine, Work
from .event import Event
from .event_store import Backlog, EventClaim, EventFilter, EventStatus, InboxStats, StoredEvent
from .wakeups import Subscription

__all__ = ["SqliteEventStore"]

# A ready event can be claimed once it is due: it is the first pending event of its signing, and no event of the signing
# is claimed. Every change of status or owner keeps this true, so a claim reads only the events that it returns.
_TABLES = (
    "CREATE TABLE events (seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, type TEXT NOT NULL,"
    " signing TEXT, received_at REAL NOT NULL, status TEXT NOT NULL, ready INTEGER NOT NULL, due REAL NOT NULL,"
    " attempts INTEGER NOT NULL DEFAULT 0, owner TEXT, fence INTEGER NOT NULL DEFAULT 0, error TEXT, settled_at REAL,"
    " crashes INTEGER NOT NULL DEFAULT 0, body BLOB, trace_context TEXT)",
    "CREATE INDEX ready_events ON events (due, seq) WHERE ready",
    "CREATE INDEX pending_events ON events (signing, seq) WHERE status = 'pending'",
    "CREATE INDEX claimed_events ON events (signing, owner) WHERE owner IS NOT NULL",
    "CREATE INDEX kept_bodies ON events (settled_at) WHERE settled_at IS NOT NULL AND body IS NOT NULL",
    "CREATE INDEX events_by_status ON events (status, received_at)",
)
_ALONE = 2
"""After how many crashes of its process an event is claimed alone."""
_FORMAT = FileFormat("inbox", "Inbox", 0x5369676F, 2, _TABLES, InboxError)

# Without INDEXED BY, SQLite may read all pending events by their status instead.
_ADD = (
    "INSERT INTO events (id, type, signing, received_at, status, due, body, trace_context, ready)"
    " SELECT ?, ?, ?, ?, 'pending', ?, ?, ?,"
    " NOT EXISTS (SELECT 1 FROM events INDEXED BY pending_events WHERE signing = ? AND status = 'pending')"
    " WHERE true ON CONFLICT (id) DO NOTHING"
)
_COLUMNS = (
    "seq, id, type, signing, body, received_at, status, attempts, due, error, settled_at, owner, trace_context,"
    " crashes, fence"
)
# Every other minute nothing is claimed after an event that must run alone, until its process handles nothing else. In
# the minutes between, that event is passed over: a handler that hangs does not stop all others.
_DUE = (
    f"SELECT {_COLUMNS} FROM events WHERE ready AND due <= :now"  # noqa: S608  # constants
    " AND (crashes < :alone OR :is_idle OR CAST(:now - due AS INTEGER) / 60 % 2 = 0) ORDER BY due, seq LIMIT :limit"
)
_CLAIM = "UPDATE events SET ready = 0, owner = ?, fence = fence + 1, attempts = attempts + 1 WHERE seq = ?"
_SETTLE = "UPDATE events SET status = ?, error = ?, settled_at = ?, owner = NULL, crashes = 0"
_POSTPONE = "UPDATE events SET error = ?, due = ?, attempts = attempts - ?, owner = NULL, crashes = 0"
_RELEASE = "UPDATE events SET attempts = attempts - 1, owner = NULL"
_READY = (
    "UPDATE events SET ready = 1 WHERE seq ="
    " (SELECT seq FROM events INDEXED BY pending_events WHERE signing = ? AND status = 'pending' ORDER BY seq LIMIT 1)"
)
_READY_WITHOUT_SIGNING = "UPDATE events SET ready = 1 WHERE id = ? AND status = 'pending'"
# One of the events under way may have killed its process. After two crashes an event is claimed alone, when its process
# handles nothing else and after all events that were due before; only an attempt that ran alone counts when its process
# dies.
_FREE = (
    "UPDATE events SET owner = NULL, due = ?, error = 'the process ended during the attempt', crashes = crashes + 1,"
    " attempts = attempts - (crashes < ? AND ? > 1) WHERE owner = ?"
)
_IS_MINE = "SELECT 1 FROM events WHERE owner = ?"
_IS_ALONE = "SELECT 1 FROM events INDEXED BY claimed_events WHERE owner = ? AND crashes >= ?"
# Only the first pending event of a signing can be ready.
_NOT_READY = (
    "UPDATE events SET ready = 0 WHERE seq ="
    " (SELECT seq FROM events INDEXED BY pending_events WHERE signing = ? AND status = 'pending' ORDER BY seq LIMIT 1)"
)
_IS_CLAIMED = "SELECT 1 FROM events INDEXED BY claimed_events WHERE signing = ? AND owner IS NOT NULL"
# A first attempt is due when its event arrives: a later time was set before the clock was set back.
_MAKE_DUE = "UPDATE events SET due = ? WHERE status = 'pending' AND fence = 0 AND due > ?"
_REQUEUE = (
    "UPDATE events SET status = 'pending', attempts = 0, crashes = 0, due = ?, error = NULL, settled_at = NULL,"
    " ready = signing IS NULL WHERE seq = ?"
)
_PURGE = (
    "UPDATE events SET body = NULL WHERE seq IN (SELECT seq FROM events WHERE settled_at < ? AND body IS NOT NULL"
    " AND status IN ('handled', 'dropped') LIMIT ?)"
)
_COUNT_OPEN = "SELECT status, count(*) FROM events WHERE status IN ('pending', 'dead') GROUP BY status"
_OLDEST_PENDING = "SELECT min(received_at) FROM events WHERE status = 'pending'"

_POLL = 0.05
"""Seconds between two checks for events that another process added."""
_STEP = 1.0
"""Seconds by which a clock must be set back to be noticed."""
_PAGE = 500
_YIELD = 0.01
"""Seconds between two pages of changes, in which other processes can write."""


class SqliteEventStore:
    """Keeps events in a SQLite file, shared by any number of receivers and workers on one machine.

    An event is on disk when ``add`` returns (WAL, ``synchronous=FULL``); concurrent events are committed together. The
    end of an attempt survives the death of the process, and is written to disk with the next event: after a power cut a
    handler may run again. Each object holds a lock on a file beside the inbox: its claims are free as soon as its
    process is dead, and never before.

    The file must be on a local disk. ``timeout`` is how many seconds to wait while another program locks the file.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 5.0) -> None:
        self._engine = SqliteEngine(path, _FORMAT, timeout=timeout)
        self._waiting: set[Subscription] = set()
        self._held: set[tuple[str, int]] = set()
        """The ids and fences of the claims in use. `_claim` frees every other event that this owner has claimed."""
        self._waits_for_handlers = False
        """Whether the last claim left an event that must run alone."""
        self._clock_ahead = math.inf
        """By how much the wall clock was ahead of the monotonic one at the last claim."""

    def __repr__(self) -> str:
        return f"SqliteEventStore({str(self._engine.path)!r})"

    def __del__(self) -> None:
        commits = getattr(self, "_engine", None)  # the constructor may have raised
        if commits is not None and commits.lock.is_held:
            commits.lock.release()
            warnings.warn(f"{self!r} was not closed: await aclose()", ResourceWarning, stacklevel=2)

    async def add(self, event: Event, body: bytes) -> bool:
        is_new = await self._engine.perform(partial(_insert, event=event, body=body))
        self._wake()
        return is_new

    def add_blocking(self, event: Event, body: bytes) -> bool:
        is_new = self._engine.perform_blocking(partial(_insert, event=event, body=body))
        self._wake()
        return is_new

    async def claim(self, limit: int) -> list[EventClaim]:
        claims: list[EventClaim] = []
        # Claims held now are not freed by this work, even if they end before it runs: the worker may retry the record.
        work = partial(self._claim, limit=limit, claims=claims, held=frozenset(self._held))
        try:
            return await self._engine.perform(work, self._unclaim, durable=False)
        except InboxError:
            self._held.difference_update(map(_key, claims))
            raise

    async def settle(self, claim: EventClaim, status: EventStatus, error: str | None = None) -> bool:
        return await self._finish(claim, self._end(claim, _SETTLE, status, error, time.time()))

    async def postpone(self, claim: EventClaim, seconds: float, error: str | None, *, counts: bool = True) -> bool:
        return await self._finish(claim, self._end(claim, _POSTPONE, error, time.time() + seconds, not counts))

    async def release(self, claim: EventClaim) -> None:
        await self._finish(claim, self._end(claim, _RELEASE))

    async def _finish(self, claim: EventClaim, work: Work[bool]) -> bool:
        try:
            ended = await self._engine.perform(work, durable=False)
        except BaseException as error:
            # If the file refuses the end for good, the handler must not run again at once: hold the claim until the
            # file is closed.
            if not isinstance(error, InboxError) or error.transient:
                self._held.discard(_key(claim))
            raise
        self._held.discard(_key(claim))
        return ended

    async def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        arrival = Subscription(None, asyncio.get_running_loop())
        self._waiting.add(arrival)
        try:
            while (left := deadline - time.monotonic()) > 0 and (
                self._waits_for_handlers or not await self._engine.perform(_is_any_due, durable=False)
            ):
                await arrival.wait(min(_POLL, left))
        finally:
            self._waiting.discard(arrival)

    async def select(self, selection: EventFilter) -> AsyncIterator[StoredEvent]:
        last = 0
        while page := await self._engine.perform(partial(_select, selection=selection, after=last), durable=False):
            for seq, stored in page:
                yield stored
                last = seq

    async def requeue(self, selection: EventFilter) -> int:
        # In pages, with pauses: other processes that wait to write are not queued by SQLite, and need a pause.
        seqs = await self._engine.perform(partial(_find_requeueable, selection=selection), durable=False)
        count = 0
        for start in range(0, len(seqs), _PAGE):
            page = seqs[start : start + _PAGE]
            count += await self._engine.perform(partial(_requeue, selection=selection, seqs=page))
            await asyncio.sleep(_YIELD)
        return count

    async def purge(self, settled_before: datetime) -> int:
        purged = 0
        while count := await self._engine.perform(partial(_purge, before=settled_before.timestamp())):
            purged += count
        return purged

    async def stats(self) -> InboxStats:
        return await self._engine.perform(_stats, durable=False)

    async def backlog(self) -> Backlog:
        return await self._engine.perform(_backlog, durable=False)

    async def aclose(self) -> None:
        await self._engine.aclose()

    def _wake(self) -> None:
        for arrival in list(self._waiting):
            arrival.wake()

    # In the writer's thread

    def _claim(
        self, connection: sqlite3.Connection, limit: int, claims: list[EventClaim], held: frozenset[tuple[str, int]]
    ) -> list[EventClaim]:
        # There are claims already only if an earlier transaction failed.
        self._held.difference_update(map(_key, claims))
        claims.clear()
        mine = self._engine.lock.owner
        owners = connection.execute("SELECT DISTINCT owner FROM events WHERE owner IS NOT NULL").fetchall()
        for (owner,) in owners:
            if owner == mine:
                self._free_mine(connection, held)
            elif not self._engine.lock.is_alive(owner):
                _free(connection, owner)
        ahead = time.time() - time.monotonic()
        if ahead < self._clock_ahead - _STEP:
            connection.execute(_MAKE_DUE, (time.time(), time.time() + _STEP))
        self._clock_ahead = ahead
        rows = self._claimable(connection, limit)
        connection.executemany(_CLAIM, [(mine, row[0]) for row in rows])
        for row in rows:
            fence = row[-1] + 1
            stored = replace(_decode(row), attempts=row[7] + 1, due_at=None, fence=fence)
            claims.append(EventClaim(stored, fence))
        self._held.update(map(_key, claims))
        return claims

    def _claimable(self, connection: sqlite3.Connection, limit: int) -> list[Any]:
        """Return the events before the first that must run alone; that one only if nothing else is claimed."""
        mine = self._engine.lock.owner
        is_idle = connection.execute(_IS_MINE, (mine,)).fetchone() is None
        values = {"now": time.time(), "alone": _ALONE, "is_idle": is_idle, "limit": limit}
        due = connection.execute(_DUE, values).fetchall()
        before = list(itertools.takewhile(lambda row: row[-2] < _ALONE, due))
        if connection.execute(_IS_ALONE, (mine, _ALONE)).fetchone():
            before = []
        elif due and not before and is_idle:
            before = due[:1]
        self._waits_for_handlers = len(before) < len(due)
        return before

    def _free_mine(self, connection: sqlite3.Connection, held: frozenset[tuple[str, int]]) -> None:
        """Free the events of this owner that are not held; their attempts do not count."""
        mine = self._engine.lock.owner
        claimed = connection.execute("SELECT id, fence, signing FROM events WHERE owner = ?", (mine,)).fetchall()
        for event_id, fence, signing in claimed:
            if (event_id, fence) not in held and (event_id, fence) not in self._held:
                connection.execute(f"{_RELEASE} WHERE id = ?", (event_id,))
                _make_ready(connection, event_id, signing)

    def _end(self, claim: EventClaim, statement: str, *values: object) -> Work[bool]:
        """Return work that ends a claim. A stale or ended claim matches no row."""
        end_claim = f"{statement} WHERE id = ? AND fence = ? AND owner = ?"

        def end(connection: sqlite3.Connection) -> bool:
            stored = claim.stored
            mine = self._engine.lock.owner
            if not connection.execute(end_claim, (*values, stored.id, claim.fence, mine)).rowcount:
                return False
            _make_ready(connection, stored.id, stored.signing_id)
            return True

        return end

    def _unclaim(self, claims: list[EventClaim]) -> Work[object]:
        self._held.difference_update(map(_key, claims))
        releases = [self._end(claim, _RELEASE) for claim in claims]
        return lambda connection: [release(connection) for release in releases]


def _key(claim: EventClaim) -> tuple[str, int]:
    return claim.stored.id, claim.fence


def _insert(connection: sqlite3.Connection, event: Event, body: bytes) -> bool:
    signing, received_at = event.signing_key, event.received_at.timestamp()
    values = (event.key, event.type, signing, received_at, time.time(), body, event.trace_context, signing)
    return connection.execute(_ADD, values).rowcount == 1


def _free(connection: sqlite3.Connection, owner: str) -> None:
    claimed = connection.execute("SELECT id, signing FROM events WHERE owner = ?", (owner,)).fetchall()
    connection.execute(_FREE, (time.time(), _ALONE, len(claimed), owner))
    for event_id, signing in claimed:
        _make_ready(connection, event_id, signing)


def _make_ready(connection: sqlite3.Connection, event_id: str, signing: str | None) -> None:
    if signing is None:
        connection.execute(_READY_WITHOUT_SIGNING, (event_id,))
    else:
        connection.execute(_READY, (signing,))


def _is_any_due(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM events WHERE ready AND due <= ?", (time.time(),)).fetchone() is not None


def _select(connection: sqlite3.Connection, selection: EventFilter, after: int) -> list[tuple[int, StoredEvent]]:
    conditions, values = _where(selection)
    query = f"SELECT {_COLUMNS} FROM events WHERE seq > ? AND {conditions} ORDER BY seq LIMIT ?"  # noqa: S608  # constants
    return [(row[0], _decode(row)) for row in connection.execute(query, (after, *values, _PAGE))]


def _find_requeueable(connection: sqlite3.Connection, selection: EventFilter) -> list[int]:
    conditions, values = _where(selection)
    query = f"SELECT seq FROM events WHERE owner IS NULL AND body IS NOT NULL AND {conditions}"  # noqa: S608  # constants
    return [seq for (seq,) in connection.execute(query, values)]


def _requeue(connection: sqlite3.Connection, selection: EventFilter, seqs: list[int]) -> int:
    """Requeue those of the events that still match."""
    conditions, values = _where(selection)
    query = (
        "SELECT seq, signing FROM events NOT INDEXED WHERE seq IN (SELECT value FROM json_each(?))"  # noqa: S608  # constants
        f" AND owner IS NULL AND body IS NOT NULL AND {conditions}"
    )
    rows = connection.execute(query, (json.dumps(seqs), *values)).fetchall()
    signings = {(signing,) for _, signing in rows if signing is not None}
    now = time.time()
    connection.executemany(_NOT_READY, signings)
    connection.executemany(_REQUEUE, [(now, seq) for seq, _ in rows])
    for signing in signings:
        if connection.execute(_IS_CLAIMED, signing).fetchone() is None:
            connection.execute(_READY, signing)
    return len(rows)


def _purge(connection: sqlite3.Connection, before: float) -> int:
    return connection.execute(_PURGE, (before, _PAGE)).rowcount


def _stats(connection: sqlite3.Connection) -> InboxStats:
    rows = connection.execute("SELECT status, count(*) FROM events GROUP BY status").fetchall()
    counts = dict.fromkeys(EventStatus, 0) | {EventStatus(status): count for status, count in rows}
    (oldest,) = connection.execute(_OLDEST_PENDING).fetchone()
    return InboxStats(counts, _moment(oldest))


def _backlog(connection: sqlite3.Connection) -> Backlog:
    counts = dict(connection.execute(_COUNT_OPEN).fetchall())
    (oldest,) = connection.execute(_OLDEST_PENDING).fetchone()
    return Backlog(counts.get(EventStatus.PENDING, 0), counts.get(EventStatus.DEAD, 0), _moment(oldest))


def _where(selection: EventFilter) -> tuple[str, list[object]]:
    """Return the conditions of a filter, and their values."""
    parts: list[tuple[str, list[object]]] = []
    if selection.ids is not None:
        parts.append(("id IN (SELECT value FROM json_each(?))", [json.dumps(list(selection.ids))]))
    if selection.status is not None:
        parts.append(("status = ?", [selection.status]))
    if selection.type is not None and selection.type.endswith("*"):
        start = selection.type[:-1]
        parts.append(("substr(type, 1, ?) = ?", [len(start), start]))
    elif selection.type is not None:
        parts.append(("type = ?", [selection.type]))
    if selection.since is not None:
        parts.append(("received_at >= ?", [selection.since.timestamp()]))
    if selection.until is not None:
        parts.append(("received_at < ?", [selection.until.timestamp()]))
    conditions = " AND ".join(condition for condition, _ in parts) or "true"
    return conditions, [value for _, values in parts for value in values]


def _decode(row: Any) -> StoredEvent:
    _, name, kind, signing, body, received, status, attempts, due, error, settled, owner, context, _, fence = row
    return StoredEvent(
        id=name,
        type=kind,
        signing_id=signing,
        body=body or b"",
        received_at=datetime.fromtimestamp(received, UTC),
        status=EventStatus(status),
        attempts=attempts,
        due_at=_moment(due) if status == EventStatus.PENDING and attempts and owner is None else None,
        error=error,
        settled_at=_moment(settled),
        fence=None if owner is None else fence,
        trace_context=context,
    )


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
