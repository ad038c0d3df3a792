"""The events of an inbox in PostgreSQL, shared by receivers and handlers on many machines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import asyncpg

from ..errors import ConfigurationError, InboxError
from ..webhooks.event import Event
from ..webhooks.event_store import EventClaim, EventFilter, EventStatus, InboxStats, StoredEvent
from .database import Database, Pool, terminate
from .event_writer import EventWriter
from .leases import Leases
from .store_thread import StoreThread

__all__ = ["PostgresEventStore"]

log: logging.Logger = logging.getLogger("signing_async")

_PAGE = 100
"""Events in one statement: each may have a body of 1 MiB."""
_BATCH = 1000
"""Events that one statement purges or requeues: it has to end within the timeout."""
_POLL = 1.0
_SPREAD = 2.0
"""Seconds, for each further attempt, over which the takeover of a dead process's events is spread.

One of them may be what kills it. If they ran together again, the others would use up their attempts with it.
"""
_LONGEST_NAME = 50

# The unique index lets one event of a signing be claimed at a time, whatever concurrent claimers see.
_TABLE = """\
CREATE TABLE IF NOT EXISTS {table} (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id text NOT NULL UNIQUE,
    type text NOT NULL,
    signing_id text,
    body bytea,
    received_at timestamptz NOT NULL,
    status text NOT NULL DEFAULT 'pending',
    attempts integer NOT NULL DEFAULT 0,
    due_at timestamptz NOT NULL DEFAULT now(),
    error text,
    settled_at timestamptz,
    owner text,
    fence bigint NOT NULL DEFAULT 0,
    leased_until timestamptz
);
CREATE UNIQUE INDEX IF NOT EXISTS {name}_claimed ON {table} (signing_id) WHERE owner IS NOT NULL;
CREATE INDEX IF NOT EXISTS {name}_due ON {table} (due_at, seq) WHERE status = 'pending';
CREATE INDEX IF NOT EXISTS {name}_pending ON {table} (signing_id, seq) WHERE status = 'pending';
CREATE INDEX IF NOT EXISTS {name}_status ON {table} (status, seq);
CREATE INDEX IF NOT EXISTS {name}_settled ON {table} (settled_at)
    WHERE body IS NOT NULL AND status IN ('handled', 'dropped')"""
_COLUMNS = """\
event.seq, event.id, event.type, event.signing_id, event.body, event.received_at, event.status, event.attempts,
    event.error, event.settled_at, CASE WHEN event.owner IS NOT NULL THEN event.fence END AS fence,
    CASE WHEN event.status = 'pending' AND event.owner IS NULL AND event.attempts > 0 THEN event.due_at END AS due_at"""
# PostgreSQL sends equal notifications of a transaction once.
_ADD = """\
WITH added AS (
    INSERT INTO {table} (id, type, signing_id, body, received_at)
    SELECT id, type, signing_id, body, received_at
    FROM unnest($1::text[], $2::text[], $3::text[], $4::bytea[], $5::timestamptz[])
        WITH ORDINALITY AS event (id, type, signing_id, body, received_at, number)
    ORDER BY number
    ON CONFLICT (id) DO NOTHING
    RETURNING id
)
SELECT id, pg_notify($6, '') FROM added"""
# An expired claim is taken over before other events of its signing are looked at. If the response to a claim was lost,
# the next claim returns its events, which have this owner but are not held, and counts no second attempt.
# From the second attempt on, an expired claim first gets an empty owner and the time of its takeover. It keeps its
# fence: an owner that was only paused may still end it.
_CLAIM = """\
WITH expired AS (
    UPDATE {table} AS event
    SET owner = '', leased_until = statement_timestamp() + random() * (attempts - 1) * interval '{spread} s'
    FROM (
        SELECT seq FROM {table}
        WHERE owner IS NOT NULL AND owner NOT IN ('', $2) AND leased_until <= statement_timestamp() AND attempts > 1
        FOR UPDATE SKIP LOCKED
    ) AS lost
    WHERE event.seq = lost.seq
), claimable AS (
    SELECT seq FROM {table} AS event
    WHERE status = 'pending' AND due_at <= statement_timestamp() AND id <> ALL($4::text[])
        AND (
            owner IS NULL OR owner = $2 AND (id <> ALL($5::text[]) OR leased_until <= statement_timestamp())
            OR leased_until <= statement_timestamp() AND (owner = '' OR attempts = 1)
        )
        AND (owner IS NOT NULL OR NOT EXISTS (
            SELECT FROM {table} AS other
            WHERE other.signing_id = event.signing_id AND other.status = 'pending'
                AND (other.seq < event.seq OR other.seq > event.seq AND other.owner IS NOT NULL)
        ))
    ORDER BY due_at, seq LIMIT $1 FOR UPDATE SKIP LOCKED
)
UPDATE {table} AS event
SET owner = $2, fence = event.fence + 1, leased_until = statement_timestamp() + $3,
    attempts = event.attempts + (event.owner IS DISTINCT FROM $2)::int
FROM claimable WHERE event.seq = claimable.seq
RETURNING {columns}, event.due_at AS due"""
_RENEW = """\
UPDATE {table} AS event SET leased_until = statement_timestamp() + $3
FROM unnest($1::text[], $2::bigint[]) AS held (key, fence)
WHERE event.id = held.key AND event.fence = held.fence AND event.owner IS NOT NULL
RETURNING held.key"""
# Events that wait for a postponed event become due with it, so that a claim doesn't read them for nothing.
_SETTLE = """\
WITH settled AS (
    UPDATE {table} SET status = $3, error = $4, settled_at = statement_timestamp(), owner = NULL, leased_until = NULL
    WHERE id = $1 AND fence = $2 AND owner IS NOT NULL
    RETURNING signing_id
), due AS (
    UPDATE {table} AS event SET due_at = statement_timestamp()
    FROM settled
    WHERE event.signing_id = settled.signing_id AND event.status = 'pending' AND event.attempts = 0
        AND event.due_at > statement_timestamp()
)
SELECT true FROM settled"""
_POSTPONE = """\
WITH postponed AS (
    UPDATE {table} SET due_at = statement_timestamp() + $3, error = $4, attempts = attempts - $5::int,
        owner = NULL, leased_until = NULL
    WHERE id = $1 AND fence = $2 AND owner IS NOT NULL
    RETURNING seq, signing_id, due_at
), waiting AS (
    UPDATE {table} AS event SET due_at = postponed.due_at
    FROM postponed
    WHERE event.signing_id = postponed.signing_id AND event.status = 'pending' AND event.seq > postponed.seq
        AND event.attempts = 0 AND event.due_at < postponed.due_at
)
SELECT true FROM postponed"""
_IS_ENDED = "SELECT true FROM {table} WHERE id = $1 AND fence = $2 AND owner IS NULL"
_RELEASE = """\
WITH released AS (
    UPDATE {table} AS event SET attempts = attempts - 1, owner = NULL, leased_until = NULL
    FROM unnest($1::text[], $2::bigint[]) AS held (id, fence)
    WHERE event.id = held.id AND event.fence = held.fence AND event.owner IS NOT NULL
    RETURNING true
)
SELECT pg_notify($3, '') FROM released"""
_SELECTED = """\
seq > $1 AND ($2::text[] IS NULL OR id = ANY($2)) AND ($3::text IS NULL OR status = $3)
    AND ($4::text IS NULL OR type LIKE $4) AND ($5::timestamptz IS NULL OR received_at >= $5)
    AND ($6::timestamptz IS NULL OR received_at < $6)"""
_SELECT = "SELECT {columns} FROM {table} AS event WHERE {selected} ORDER BY seq LIMIT {page}"
_REQUEUE = """\
WITH chosen AS (
    SELECT seq FROM {table} WHERE {selected} AND owner IS NULL AND body IS NOT NULL
    ORDER BY seq LIMIT {batch} FOR UPDATE
), requeued AS (
    UPDATE {table} AS event
    SET status = 'pending', attempts = 0, due_at = statement_timestamp(), error = NULL, settled_at = NULL
    FROM chosen WHERE event.seq = chosen.seq
    RETURNING event.seq
)
SELECT seq, pg_notify($7, '') FROM requeued"""
_PURGE = """\
UPDATE {table} SET body = NULL WHERE seq IN (
    SELECT seq FROM {table} WHERE settled_at < $1 AND body IS NOT NULL AND status IN ('handled', 'dropped')
    LIMIT {batch} FOR UPDATE SKIP LOCKED
) RETURNING seq"""
_STATS = """\
SELECT status, count(*) AS number, min(received_at) FILTER (WHERE status = 'pending') AS oldest
FROM {table} GROUP BY status"""


_PARTS = {"columns": _COLUMNS, "selected": _SELECTED, "page": _PAGE, "batch": _BATCH, "spread": _SPREAD}


class PostgresEventStore:
    """An `EventStore` in a table, for receivers and handlers on any number of machines.

    Concurrent adds are committed together. A claim is a lease of ``lease`` seconds by the server's clock, renewed while
    it is held. A worker waits for a notification, and polls once a second in case one is lost.
    """

    def __init__(
        self,
        postgres: str | Pool,
        *,
        table: str = "signing_events",
        lease: float = 30.0,
        timeout: float = 2.0,
    ) -> None:
        self._database = Database(postgres, table, _TABLE, timeout=timeout, failure=InboxError)
        if len(self._database.name) > _LONGEST_NAME:
            raise ConfigurationError(f"table: must have at most {_LONGEST_NAME} characters, got {table!r}")
        self._leases = Leases(self._database, _RENEW, lease, owner=repr(self), noun="event")
        self._thread: StoreThread | None = None
        if isinstance(postgres, str):
            opening = partial(PostgresEventStore, postgres, table=table, lease=lease, timeout=timeout)
            self._thread = StoreThread(opening, name=repr(self))
        self._listens = isinstance(postgres, str) or postgres.get_max_size() > 1
        del postgres  # some tools show the variables of a traceback
        self._id = secrets.token_hex(8)
        self._claiming = asyncio.Lock()
        self._unrecorded: dict[str, int] = {}
        """The fences of claims whose end could not be recorded: the caller may try again until the lease expires."""
        # The writer must not keep an unclosed store from being collected.
        self._writer = EventWriter(partial(_insert, self._database))
        self._woken = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"PostgresEventStore({self.address!r})"

    @property
    def address(self) -> str:
        """The database's host and name, without the password."""
        return self._database.address

    @property
    def sql(self) -> str:
        """The statements that create the table."""
        return self._database.sql

    async def create_table(self) -> None:
        """Create the table unless it exists; any number of workers may do so at the same time."""
        await self._database.create_table()

    async def table_exists(self) -> bool:
        """Return whether the table exists."""
        (row,) = await self._fetch("SELECT to_regclass($1) IS NOT NULL AS found", self._database.table)
        return bool(row["found"])

    # Adding

    async def add(self, event: Event, body: bytes) -> bool:
        return await self._writer.add(event, body)

    def add_blocking(self, event: Event, body: bytes) -> bool:
        if self._thread is None:
            raise ConfigurationError("postgres: a threaded server needs a DSN; a pool belongs to one event loop")
        return self._thread.add(event, body)

    # Claims

    async def claim(self, limit: int) -> list[EventClaim]:
        return await self._leases.claim(self._claim(limit), self._give_up)

    async def settle(self, claim: EventClaim, status: EventStatus, error: str | None = None) -> bool:
        return await self._update(_SETTLE, claim, status.value, error)

    async def postpone(self, claim: EventClaim, seconds: float, error: str | None, *, counts: bool = True) -> bool:
        return await self._update(_POSTPONE, claim, timedelta(seconds=seconds), error, int(not counts))

    async def release(self, claim: EventClaim) -> None:
        try:
            await self._release({claim.stored.id: claim.fence})
        finally:
            self._forget(claim)

    async def _claim(self, limit: int) -> list[EventClaim]:
        owner = f"{socket.gethostname()}:{os.getpid()}:{self._id}"
        statement = self._database.render(_CLAIM, **_PARTS)

        async def claim(connection: Any) -> Any:
            while True:
                # Another worker has just claimed an event of the same signing: a new snapshot shows it.
                with contextlib.suppress(asyncpg.UniqueViolationError):
                    return await connection.fetch(
                        statement, limit, owner, self._leases.duration, list(self._leases.held), list(self._unrecorded)
                    )

        # One at a time: what another call is claiming is not held yet.
        async with self._claiming:
            rows = sorted(await self._database.run(claim), key=lambda row: (row["due"], row["seq"]))
            for row in rows:
                self._unrecorded.pop(row["id"], None)
                self._leases.add(row["id"], row["fence"])
        return [EventClaim(_decode(row), row["fence"]) for row in rows]

    async def _update(self, statement: str, claim: EventClaim, *values: object) -> bool:
        arguments = (claim.stored.id, claim.fence)
        is_held = self._leases.held.get(claim.stored.id) == claim.fence or arguments in self._unrecorded.items()

        async def update(connection: Any) -> bool:
            updated = await connection.fetchval(self._database.render(statement, **_PARTS), *arguments, *values)
            if not updated and is_held:
                # An earlier attempt may have ended the claim, and only its response was lost.
                updated = await connection.fetchval(self._database.render(_IS_ENDED), *arguments)
            return bool(updated)

        self._unrecorded.pop(claim.stored.id, None)
        try:
            return await self._database.run(update)
        except InboxError:
            if is_held:
                self._unrecorded[claim.stored.id] = claim.fence
            raise
        finally:
            self._forget(claim)

    async def _give_up(self, claims: list[EventClaim]) -> None:
        """Release the claims of a cancelled caller. If that fails, the next claim returns them."""
        for claim in claims:
            self._forget(claim)
        with contextlib.suppress(InboxError):
            await self._release({claim.stored.id: claim.fence for claim in claims})

    async def _release(self, held: dict[str, int]) -> None:
        await self._fetch(_RELEASE, list(held), list(held.values()), self._database.name)

    def _forget(self, claim: EventClaim) -> None:
        if self._leases.held.get(claim.stored.id) == claim.fence:
            del self._leases.held[claim.stored.id]

    # Waiting

    async def wait(self, timeout: float) -> None:
        if self._listens and self._listener is None:
            listening = _listen(self._database, self._woken)
            self._listener = asyncio.create_task(listening, name="signing_async notifications")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout, _POLL)):
                await self._woken.wait()
        self._woken.clear()

    # Management

    async def select(self, selection: EventFilter) -> AsyncIterator[StoredEvent]:
        seq, filters = 0, _arguments(selection)
        while True:
            rows = await self._fetch(_SELECT, seq, *filters)
            for row in rows:
                seq = row["seq"]
                yield _decode(row)
            if len(rows) < _PAGE:
                return

    async def requeue(self, selection: EventFilter) -> int:
        seq, filters, requeued = 0, _arguments(selection), 0
        while True:
            rows = await self._fetch(_REQUEUE, seq, *filters, self._database.name)
            if not rows:
                return requeued
            requeued += len(rows)
            seq = max(row["seq"] for row in rows)

    async def purge(self, settled_before: datetime) -> int:
        purged = 0
        while True:
            rows = await self._fetch(_PURGE, settled_before)
            if not rows:
                return purged
            purged += len(rows)

    async def stats(self) -> InboxStats:
        rows = await self._fetch(_STATS)
        counts = dict.fromkeys(EventStatus, 0) | {EventStatus(row["status"]): row["number"] for row in rows}
        return InboxStats(counts, min((row["oldest"] for row in rows if row["oldest"]), default=None))

    async def _fetch(self, statement: str, *arguments: object) -> Any:
        rendered = self._database.render(statement, **_PARTS)
        return await self._database.run(lambda connection: connection.fetch(rendered, *arguments))

    async def aclose(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])
            self._listener = None
        await self._writer.drain()
        await self._leases.stop()
        held = {name: fence for name, fence in self._leases.held.items() if fence is not None}
        self._leases.held.clear()
        try:
            if held:
                await self._release(held)
        except InboxError as error:
            log.warning("%r: the remaining claims end when their lease expires: %s", self, error)
        finally:
            await self._database.aclose()
            if self._thread is not None:
                await asyncio.to_thread(self._thread.close)

    def __del__(self) -> None:
        if hasattr(self, "_database"):
            self._database.warn_if_open(self)


async def _insert(database: Database, *columns: object) -> Any:
    statement = database.render(_ADD)
    return await database.run(lambda connection: connection.fetch(statement, *columns, database.name))


async def _listen(database: Database, woken: asyncio.Event) -> None:
    """Set ``woken`` at each notification. Without a connection none arrives, and workers poll."""
    while True:
        async with AsyncExitStack() as kept:
            lost = asyncio.Event()
            listen = partial(_subscribe, database.name, woken, lost, kept)
            with contextlib.suppress(InboxError):
                await database.run_and_keep(listen, kept)
                await lost.wait()
        await asyncio.sleep(_POLL)


async def _subscribe(
    channel: str, woken: asyncio.Event, lost: asyncio.Event, kept: AsyncExitStack, connection: Any
) -> None:
    connection.add_termination_listener(lambda _: lost.set())
    await connection.add_listener(channel, lambda *_: woken.set())
    kept.callback(terminate, connection)


def _arguments(selection: EventFilter) -> tuple[object, ...]:
    """Return the parameters of the statements that select events."""
    ids = None if selection.ids is None else list(selection.ids)
    pattern = selection.type
    if pattern is not None:
        pattern = re.sub(r"([\\%_])", r"\\\1", pattern).replace("*", "%")
    return ids, selection.status, pattern, selection.since, selection.until


def _decode(row: Any) -> StoredEvent:
    fields = ("id", "type", "signing_id", "received_at", "attempts", "due_at", "error", "settled_at", "fence")
    body = b"" if row["body"] is None else row["body"]
    return StoredEvent(body=body, status=EventStatus(row["status"]), **{name: row[name] for name in fields})
