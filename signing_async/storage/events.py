"""The events of an inbox, in SQLite or PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

from ..errors import InboxError
from ..webhooks.event import Event
from ..webhooks.event_store import EventClaim, EventFilter, EventStatus, InboxStats, StoredEvent
from ..webhooks.wakeups import Subscription
from .claims import Leases, claim_or_undo
from .engine import Engine
from .sqlite import FileFormat, SqliteEngine

__all__ = ["TABLES", "SqlEventStore", "SqliteEventStore"]

# The planners take `status = 'pending'` for rare, and would sort all pending events: `pending` makes them read an index
# in order. The unique index lets one event of a signing be claimed at a time, whatever concurrent workers see.
TABLES = (
    """\
CREATE TABLE IF NOT EXISTS {table} (
    seq {serial},
    id text NOT NULL UNIQUE,
    type text NOT NULL,
    signing_id text,
    received_at {time} NOT NULL,
    status text NOT NULL DEFAULT 'pending',
    attempts integer NOT NULL DEFAULT 0,
    due_at {time} NOT NULL DEFAULT {moment},
    error text,
    settled_at {time},
    owner text,
    fence bigint NOT NULL DEFAULT 0,
    leased_until {time},
    crashes integer NOT NULL DEFAULT 0,
    trace_context text,
    pending boolean NOT NULL GENERATED ALWAYS AS (status = 'pending') STORED,
    body {bytes}
)""",
    "CREATE UNIQUE INDEX IF NOT EXISTS {name}_claimed ON {table} (signing_id) WHERE owner IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS {name}_leased ON {table} (owner, leased_until) WHERE owner IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS {name}_due ON {table} (due_at, seq) WHERE pending",
    "CREATE INDEX IF NOT EXISTS {name}_pending ON {table} (signing_id, seq) WHERE pending",
    "CREATE INDEX IF NOT EXISTS {name}_crashed ON {table} (due_at) WHERE crashes >= 2",
    "CREATE INDEX IF NOT EXISTS {name}_status ON {table} (status, seq, received_at)",
    "CREATE INDEX IF NOT EXISTS {name}_settled ON {table} (settled_at) WHERE settled_at IS NOT NULL"
    " AND body IS NOT NULL",
)
ADD = """\
INSERT INTO {table} (id, type, signing_id, received_at, due_at, trace_context, body)
VALUES ($1, $2, $3, {at}($4), {now}, $5, $6) ON CONFLICT (id) DO NOTHING RETURNING id"""
# One of the events that were being handled may have killed its process. Only an attempt that ran alone counts.
# All claims of a dead owner are freed together. Its own expired claims are those whose end or whose claiming failed.
FREE = """\
WITH crashed AS (
    SELECT seq, count(*) OVER (PARTITION BY owner) AS together FROM (
        SELECT seq, owner FROM {table} AS held
        WHERE owner IS NOT NULL AND {dead} AND id NOT IN (SELECT value FROM {each}($1{json})) AND (
            owner = {owner} OR owner NOT IN (
                SELECT owner FROM {table} AS held WHERE owner IS NOT NULL AND NOT ({dead})
            )
        ) {skip_locked}
    ) AS claimed
)
UPDATE {table} AS event
SET owner = NULL, leased_until = NULL, due_at = {now}, error = 'the process ended during the attempt',
    crashes = crashes + 1, attempts = attempts - CASE WHEN crashes < 2 AND together > 1 THEN 1 ELSE 0 END
FROM crashed WHERE event.seq = crashed.seq"""
# Inside an OR, a subquery is executed for each event that is read, and the planner does not join whole tables. No fence
# is negative: without that condition the planner takes free events for rare, and prepares for a long search. Without
# the OFFSET it would read the whole table once, to hash the claimed events.
CLAIM = """\
WITH due AS MATERIALIZED (
    SELECT seq FROM {table} AS event
    WHERE pending AND (owner IS NULL OR fence < 0) AND {kind} AND (signing_id IS NULL OR (
        NOT EXISTS (
            SELECT 1 FROM {table} AS other
            WHERE other.signing_id = event.signing_id AND other.pending AND other.seq < event.seq
        ) AND NOT EXISTS (
            SELECT 1 FROM {table} AS other
            WHERE other.signing_id = event.signing_id AND other.owner IS NOT NULL LIMIT 1 OFFSET 0
        )
    ))
    ORDER BY due_at, seq LIMIT $1 {skip_locked}
)
UPDATE {table} SET owner = {owner}, fence = fence + 1, attempts = attempts + 1,
    leased_until = {now} + $2 {seconds}
WHERE seq IN (SELECT seq FROM due) RETURNING *"""
# After two crashes of its process an event is claimed alone. The events that are due after it wait for it, unless an
# earlier event of its signing was requeued.
TOGETHER = """\
crashes < 2 AND due_at <= coalesce((
    SELECT min(alone.due_at) FROM {table} AS alone
    WHERE alone.crashes >= 2 AND alone.pending AND alone.owner IS NULL AND alone.due_at <= {now}
        AND NOT EXISTS (
            SELECT 1 FROM {table} AS other
            WHERE other.signing_id = alone.signing_id AND other.pending AND other.seq < alone.seq
        )
), {now})"""
ALONE = "crashes >= 2 AND due_at <= {now}"
RENEW = """\
UPDATE {table} SET leased_until = {now} + $2 {seconds}
WHERE owner = {owner} AND id IN (SELECT value FROM {each}($1{json}))"""
SETTLE = """\
UPDATE {table} SET status = $3, error = $4, settled_at = {now}, owner = NULL, leased_until = NULL, crashes = 0
WHERE id = $1 AND fence = $2 AND owner = {owner} RETURNING id"""
POSTPONE = """\
UPDATE {table} SET due_at = {now} + $3 {seconds}, error = $4, attempts = attempts - $5, owner = NULL,
    leased_until = NULL, crashes = 0
WHERE id = $1 AND fence = $2 AND owner = {owner} RETURNING id"""
RELEASE = """\
UPDATE {table} SET attempts = attempts - 1, owner = NULL, leased_until = NULL
WHERE id = $1 AND fence = $2 AND owner = {owner} RETURNING id"""
# The later events of a postponed one wait as long, or claims would read them in vain. They are due again
# before it is settled.
DELAY = """\
UPDATE {table} SET due_at = {now} + $2 {seconds}
WHERE signing_id = $1 AND pending AND owner IS NULL AND attempts = 0 AND due_at < {now} + $2 {seconds}
    AND seq > (SELECT seq FROM {table} WHERE id = $3 AND fence = $4 AND owner = {owner})"""
HURRY = "UPDATE {table} SET due_at = {now} WHERE signing_id = $1 AND pending AND attempts = 0 AND due_at > {now}"
# A first attempt is due when its event arrives: a later time was set before the clock was set back.
MAKE_DUE = "UPDATE {table} SET due_at = {now} WHERE pending AND fence = 0 AND due_at > {now} + 1 {seconds}"
SELECT = "SELECT * FROM {table} WHERE {selected} ORDER BY seq LIMIT 100"
REQUEUE = """\
WITH chosen AS MATERIALIZED (
    SELECT seq FROM {table} WHERE owner IS NULL AND body IS NOT NULL AND {selected}
    ORDER BY seq LIMIT 500 {skip_locked}
)
UPDATE {table} SET status = 'pending', attempts = 0, crashes = 0, due_at = {now}, error = NULL, settled_at = NULL
WHERE seq IN (SELECT seq FROM chosen) RETURNING seq"""
PURGE = """\
UPDATE {table} SET body = NULL WHERE seq IN (
    SELECT seq FROM {table}
    WHERE settled_at < {at}($1) AND body IS NOT NULL AND status IN ('handled', 'dropped') LIMIT 500 {skip_locked}
) RETURNING seq"""
STATS = "SELECT status, count(*), min(received_at) FROM {table} GROUP BY status"


class SqlEventStore:
    """An `EventStore` in a table, which any number of receivers and workers share.

    Workers look for events every ``poll`` seconds. With a ``lease`` a claim ends after so many seconds, by the server's
    clock, unless it is renewed; all held claims are. Without a lease the claims of an owner end with its process.
    """

    def __init__(self, engine: Engine, *, poll: float, lease: float | None = None, timeout: float = 0.0) -> None:
        self.address: str = engine.address
        self._engine = engine
        self._poll = poll
        self._leases = Leases(
            lambda keys, seconds: engine.run(RENEW, json.dumps(keys), seconds, durable=False),
            lease,
            timeout=timeout,
            store=repr(self),
        )
        self._alone: set[str] = set()
        """The claimed events that must be handled alone."""
        self._waiting: set[Subscription] = set()
        self._clock_ahead = math.inf

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.warn_if_open(self)

    async def add(self, event: Event, body: bytes) -> bool:
        received = event.received_at.timestamp()
        values = event.key, event.type, event.signing_key, received, event.trace_context, body
        added = await self._engine.run(ADD, *values)
        self._wake()
        return bool(added)

    async def claim(self, limit: int) -> list[EventClaim]:
        return await claim_or_undo(self._claim(limit), self._release_all)

    async def _claim(self, limit: int) -> list[EventClaim]:
        clock_ahead = time.time() - time.monotonic()
        if clock_ahead < self._clock_ahead - 1:
            await self._run(MAKE_DUE)
        self._clock_ahead = clock_ahead
        held = self._leases.held
        await self._run(FREE, json.dumps(list(held)))
        self._alone &= held.keys()
        if self._alone:
            return []
        rows = await self._run(CLAIM.replace("{kind}", TOGETHER), limit, self._leases.seconds)
        if not rows and not held:
            rows = await self._run(CLAIM.replace("{kind}", ALONE), min(limit, 1), self._leases.seconds)
            self._alone = {row["id"] for row in rows}
        held.update((row["id"], row["fence"]) for row in rows)
        if held:
            self._leases.start()
        in_order = sorted(rows, key=lambda row: (row["due_at"], row["seq"]))
        return [EventClaim(_decode(row), row["fence"]) for row in in_order]

    async def settle(self, claim: EventClaim, status: EventStatus, error: str | None = None) -> bool:
        hurry = [(HURRY, claim.stored.signing_id)] if claim.fence > 1 else []
        return await self._end(claim, *hurry, (SETTLE, claim.stored.id, claim.fence, status.value, error))

    async def postpone(self, claim: EventClaim, seconds: float, error: str | None, *, counts: bool = True) -> bool:
        delay = DELAY, claim.stored.signing_id, seconds, claim.stored.id, claim.fence
        return await self._end(claim, delay, (POSTPONE, claim.stored.id, claim.fence, seconds, error, int(not counts)))

    async def release(self, claim: EventClaim) -> None:
        await self._end(claim, (RELEASE, claim.stored.id, claim.fence))

    async def _release_all(self, claims: list[EventClaim]) -> None:
        for claim in claims:
            await self.release(claim)

    async def _end(self, claim: EventClaim, *statements: tuple[Any, ...]) -> bool:
        """Run the statements; return whether the last one found the claim."""
        ended: Sequence[Any] = ()
        try:
            for statement in statements:
                ended = await self._run(*statement)
        finally:
            # If this failed, the lease is no longer renewed.
            if self._leases.held.get(claim.stored.id) == claim.fence:
                del self._leases.held[claim.stored.id]
        self._wake()
        return bool(ended)

    async def wait(self, timeout: float) -> None:
        arrival = Subscription(None, asyncio.get_running_loop())
        self._waiting.add(arrival)
        try:
            await arrival.wait(min(timeout, self._poll))
        finally:
            self._waiting.discard(arrival)

    def _wake(self) -> None:
        for arrival in list(self._waiting):
            arrival.wake()

    async def select(self, selection: EventFilter) -> AsyncIterator[StoredEvent]:
        seq = 0
        while rows := await self._run(*_selecting(SELECT, seq, selection)):
            for row in rows:
                yield _decode(row)
            seq = rows[-1]["seq"]

    async def requeue(self, selection: EventFilter) -> int:
        seq = count = 0
        while rows := await self._engine.run(*_selecting(REQUEUE, seq, selection)):
            seq, count = max(row["seq"] for row in rows), count + len(rows)
        self._wake()
        return count

    async def purge(self, settled_before: datetime) -> int:
        count = 0
        while rows := await self._engine.run(PURGE, settled_before.timestamp()):
            count += len(rows)
        return count

    async def stats(self) -> InboxStats:
        rows = await self._run(STATS)
        counts = dict.fromkeys(EventStatus, 0) | {EventStatus(status): count for status, count, _ in rows}
        oldest = next((received for status, _, received in rows if status == EventStatus.PENDING), None)
        return InboxStats(counts, _moment(oldest))

    async def aclose(self) -> None:
        try:
            await self._leases.end(self._release_held)
        finally:
            await self._engine.aclose()

    async def _release_held(self) -> None:
        for event_id, fence in list(self._leases.held.items()):
            await self._run(RELEASE, event_id, fence)

    async def _run(self, statement: str, *parameters: object) -> Sequence[Any]:
        """Run a statement of which a power cut may undo the effect: then a handler runs again."""
        return await self._engine.run(statement, *parameters, durable=False)


class SqliteEventStore(SqlEventStore):
    """Keeps events in a SQLite file on a local disk, for one machine.

    An event is on disk when ``add`` returns. The end of an attempt survives the death of the process, and is written to
    disk with the next event: after a power cut a handler may run again. ``timeout`` is how many seconds to wait while
    another program locks the file.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 5.0) -> None:
        file_format = FileFormat("inbox", "Inbox", 0x5369676F, 4, "events", TABLES, InboxError)
        super().__init__(SqliteEngine(path, file_format, timeout=timeout), poll=0.05)


def _selecting(statement: str, after: int, selection: EventFilter) -> tuple[Any, ...]:
    """Return the statement with the conditions of a filter, and its parameters."""
    conditions: list[str] = ["seq > $1"]
    values: list[object] = [after]
    ids = None if selection.ids is None else json.dumps(list(selection.ids))
    kind, since, until = selection.type or "*", selection.since, selection.until
    for condition, value in (
        ("id IN (SELECT value FROM {each}($n{json}))", ids),
        ("status = $n", selection.status),
        ("substr(type, 1, length($n)) = $n", kind[:-1] if kind.endswith("*") else None),
        ("type = $n", None if kind.endswith("*") else kind),
        ("received_at >= {at}($n)", since and since.timestamp()),
        ("received_at < {at}($n)", until and until.timestamp()),
    ):
        if value is not None:
            values.append(value)
            conditions.append(condition.replace("$n", f"${len(values)}"))
    return statement.replace("{selected}", " AND ".join(conditions)), *values


def _decode(row: Any) -> StoredEvent:
    is_waiting = row["status"] == EventStatus.PENDING and row["owner"] is None and row["attempts"] > 0
    return StoredEvent(
        id=row["id"],
        type=row["type"],
        signing_id=row["signing_id"],
        body=row["body"] or b"",
        received_at=_moment(row["received_at"]),
        status=EventStatus(row["status"]),
        attempts=row["attempts"],
        due_at=_moment(row["due_at"]) if is_waiting else None,
        error=row["error"],
        settled_at=_moment(row["settled_at"]),
        fence=None if row["owner"] is None else row["fence"],
        trace_context=row["trace_context"],
    )


def _moment(value: Any) -> Any:
    return datetime.fromtimestamp(value, UTC) if isinstance(value, int | float) else value
