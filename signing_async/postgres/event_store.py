"""The events of an inbox in PostgreSQL, shared by receivers and handlers on many machines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import asyncpg

from .._secret import Secret, hide
from ..errors import ConfigurationError, InboxError
from ..storage.claims import Leases
from ..storage.postgres import Pool, PostgresEngine, terminate
from ..webhooks.event import Event
from ..webhooks.event_store import Backlog, EventClaim, EventFilter, EventStatus, InboxStats, StoredEvent
from ..webhooks.receiver import thread_loop
from . import event_statements as sql
from .event_writer import EventWriter

__all__ = ["PostgresEventStore"]

log: logging.Logger = logging.getLogger("signing_async")

_POLL = 1.0
_LONGEST_NAME = 50


class PostgresEventStore:
    """An `EventStore` in a table, for receivers and handlers on any number of machines.

    Concurrent adds are committed together. A claim is a lease of ``lease`` seconds by the server's clock, renewed while
    it is held. A worker waits for a notification, and polls once a second in case one is lost.
    """

    def __init__(
        self,
        postgres: str | Secret[str] | Pool,
        *,
        table: str = "signing_events",
        lease: float = 30.0,
        timeout: float = 2.0,
    ) -> None:
        postgres = hide(postgres)
        self._database = PostgresEngine(postgres, table, sql.TABLE, timeout=timeout, failure=InboxError)
        if len(self._database.name) > _LONGEST_NAME:
            raise ConfigurationError(f"table: must have at most {_LONGEST_NAME} characters, got {table!r}")
        renewal = self._database.render(sql.RENEW)
        self._leases = Leases(
            self._database, renewal, lease, timeout=self._database.timeout, owner=repr(self), noun="event"
        )
        self._open_again: Callable[[], PostgresEventStore] | None = None
        if isinstance(postgres, Secret):
            self._open_again = partial(PostgresEventStore, postgres, table=table, lease=lease, timeout=timeout)
        self._of_threads: dict[int, PostgresEventStore] = {}
        """The store of this process's threads, by process: a fork inherits no thread."""
        self._opening = threading.Lock()
        self._listens = isinstance(postgres, str | Secret) or postgres.get_max_size() > 1
        self._closed = False
        self._id = secrets.token_hex(8)
        self._claiming = asyncio.Lock()
        self._unrecorded: dict[str, int] = {}
        """The fences of claims whose end could not be recorded: the caller may retry until the lease expires."""
        # The writer has no reference to this store: an unclosed store can be collected.
        self._writer = EventWriter(partial(self._database.run, self._database.render(sql.ADD), self._database.name))
        self._free_at = 0.0
        """When to look for the claims of dead owners next, by the monotonic clock."""
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
        (row,) = await self._run("SELECT to_regclass($1) IS NOT NULL AS found", self._database.table)
        return bool(row["found"])

    # Adding

    async def add(self, event: Event, body: bytes) -> bool:
        return await self._writer.add(event, body)

    def add_blocking(self, event: Event, body: bytes) -> bool:
        if self._open_again is None:
            raise ConfigurationError("postgres: a threaded server needs a DSN; a pool belongs to one event loop")
        loop, process = thread_loop(), os.getpid()
        with self._opening:  # `aclose` waits for what was submitted before it
            if self._closed:
                raise InboxError(f"{self!r} is closed", transient=False)
            if process not in self._of_threads:
                self._of_threads[process] = self._open_again()
            adding = asyncio.run_coroutine_threadsafe(self._of_threads[process].add(event, body), loop)
        return adding.result()

    # Claims

    async def claim(self, limit: int) -> list[EventClaim]:
        return await self._leases.claim(self._claim(limit), self._give_up)

    async def settle(self, claim: EventClaim, status: EventStatus, error: str | None = None) -> bool:
        return await self._update(sql.SETTLE, claim, status.value, error)

    async def postpone(self, claim: EventClaim, seconds: float, error: str | None, *, counts: bool = True) -> bool:
        return await self._update(sql.POSTPONE, claim, timedelta(seconds=seconds), error, int(not counts))

    async def release(self, claim: EventClaim) -> None:
        try:
            await self._release({claim.stored.id: claim.fence})
        finally:
            self._forget(claim)

    async def _claim(self, limit: int) -> list[EventClaim]:
        statement = self._database.render(sql.CLAIM)
        owner = f"{socket.gethostname()}:{os.getpid()}:{self._id}"

        async def claim(connection: Any) -> Any:
            while True:
                # Another worker has just claimed an event of the same signing: a new snapshot shows it.
                with contextlib.suppress(asyncpg.UniqueViolationError):
                    if self._free_at <= time.monotonic():
                        await connection.execute(self._database.render(sql.FREE), owner)
                        self._free_at = time.monotonic() + _POLL
                    known = list(self._leases.held), list(self._unrecorded)
                    arguments = limit, owner, self._leases.duration, *known
                    return await connection.fetch(statement, *arguments)

        # One call at a time: another one would claim these events again, as they are not held yet.
        async with self._claiming:
            rows = sorted(await self._database.perform(claim), key=lambda row: (row["due"], row["seq"]))
            for row in rows:
                self._unrecorded.pop(row["id"], None)
                self._leases.add(row["id"], row["fence"])
        return [EventClaim(_decode(row), row["fence"]) for row in rows]

    async def _update(self, statement: str, claim: EventClaim, *values: object) -> bool:
        arguments = (claim.stored.id, claim.fence)
        is_held = self._leases.held.get(claim.stored.id) == claim.fence or arguments in self._unrecorded.items()

        async def update(connection: Any) -> bool:
            updated = await connection.fetchval(self._database.render(statement), *arguments, *values)
            if not updated and is_held:
                # An earlier attempt may have ended the claim, and only its response was lost.
                updated = await connection.fetchval(self._database.render(sql.IS_ENDED), *arguments)
            return bool(updated)

        self._unrecorded.pop(claim.stored.id, None)
        try:
            return await self._database.perform(update)
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
        await self._run(sql.RELEASE, list(held), list(held.values()), self._database.name)

    async def _run(self, statement: str, *arguments: object) -> Any:
        return await self._database.run(self._database.render(statement), *arguments)

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
            rows = await self._run(sql.SELECT, seq, *filters)
            for row in rows:
                seq = row["seq"]
                yield _decode(row)
            if len(rows) < sql.PAGE:
                return

    async def requeue(self, selection: EventFilter) -> int:
        seq, filters, requeued = 0, _arguments(selection), 0
        while True:
            rows = await self._run(sql.REQUEUE, seq, *filters, self._database.name)
            if not rows:
                return requeued
            requeued += len(rows)
            seq = max(row["seq"] for row in rows)

    async def purge(self, settled_before: datetime) -> int:
        purged = 0
        while True:
            rows = await self._run(sql.PURGE, settled_before)
            if not rows:
                return purged
            purged += len(rows)

    async def stats(self) -> InboxStats:
        rows = await self._run(sql.STATS)
        counts = dict.fromkeys(EventStatus, 0) | {EventStatus(row["status"]): row["number"] for row in rows}
        return InboxStats(counts, min((row["oldest"] for row in rows if row["oldest"]), default=None))

    async def backlog(self) -> Backlog:
        (row,) = await self._run(sql.BACKLOG)
        return Backlog(row["pending"], row["dead"], row["oldest"])

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
            with self._opening:
                self._closed = True
                store = self._of_threads.pop(os.getpid(), None)
            if store is not None:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(store.aclose(), thread_loop()))

    def __del__(self) -> None:
        if hasattr(self, "_database"):
            self._database.warn_if_open(self)


async def _listen(database: PostgresEngine, woken: asyncio.Event) -> None:
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
    fields = (
        "id",
        "type",
        "signing_id",
        "received_at",
        "attempts",
        "due_at",
        "error",
        "settled_at",
        "fence",
        "trace_context",
    )
    body = b"" if row["body"] is None else row["body"]
    return StoredEvent(body=body, status=EventStatus(row["status"]), **{name: row[name] for name in fields})
