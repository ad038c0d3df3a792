"""The inbox in PostgreSQL, for receivers and handlers on any number of machines."""

from __future__ import annotations

import asyncio
import copy
import os
import secrets

from .. import _checks
from .._encryption import Keys, hide_keys
from .._secret import Secret, hide
from ..errors import ConfigurationError, InboxError
from ..storage.events import ADD, TABLES, SqlEventStore, columns, for_postgres
from ..storage.postgres import Pool, PostgresEngine
from ..webhooks.event import Event
from ..webhooks.inbox import HandlerRetryPolicy, Inbox
from ..webhooks.wakeups import Wakeups

__all__ = ["PostgresEventStore", "PostgresInbox"]

_DAY = 86_400.0
_BATCH = 100
_BATCH_BYTES = 8 * 1024 * 1024
"""The most bytes of bodies in a transaction of several events: it has to end within the timeout."""
_Addition = tuple[tuple[object, ...], int, asyncio.Future[bool]]
_LONGEST_NAME = 50
"""Characters of a table's name: those of its indexes have at most 63."""


class PostgresEventStore(SqlEventStore):
    """Keeps events in a table, for any number of machines. A claim is a lease of ``lease`` seconds."""

    def __init__(
        self,
        postgres: str | Secret[str] | Pool,
        *,
        table: str = "signing_events",
        lease: float = 30.0,
        timeout: float = 2.0,
    ) -> None:
        postgres = hide(postgres)
        sql = ";\n".join(map(for_postgres, TABLES))
        self.engine: PostgresEngine = PostgresEngine(postgres, table, sql, timeout=timeout, failure=InboxError)
        if len(self.engine.name) > _LONGEST_NAME:
            raise ConfigurationError(f"table: must have at most {_LONGEST_NAME} characters, got {table!r}")
        if _checks.number("lease", lease, above=0) < 3 * timeout:
            raise ConfigurationError(f"lease: must be at least three times the timeout of {timeout:g} s, got {lease!r}")
        engine, name = self.engine, secrets.token_hex(8)

        def render(statement: str) -> str:
            # A server may fork after it has created the store.
            return engine.render(for_postgres(statement), owner=f"'{os.getpid()}:{name}'")

        super().__init__(engine, render, engine.address, poll=0.25, lease=lease)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0
        self._adding: list[_Addition] = []
        self._writer: asyncio.Task[None] | None = None

    async def add(self, event: Event, body: bytes) -> bool:
        """Add an event; concurrent ones are committed together, in order. Threads share the event loop that is used."""
        loop, process = asyncio.get_running_loop(), os.getpid()
        if (self._loop, self._process) != (loop, process):
            if self._process == process and self._loop is not None and self._loop.is_running():
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.add(event, body), self._loop))
            self._loop, self._process, self._adding, self._writer = loop, process, [], None
        added: asyncio.Future[bool] = loop.create_future()
        self._adding.append((columns(event, body), len(body), added))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write(), name="signing_async events")
        return await added

    async def aclose(self) -> None:
        if self._writer is not None and self._loop is asyncio.get_running_loop():
            await asyncio.wait([self._writer])
        await super().aclose()

    async def _write(self) -> None:
        while self._adding:
            size = count = 0
            for _, length, _ in self._adding[:_BATCH]:
                size += length
                if count and size > _BATCH_BYTES:
                    break
                count += 1
            batch, self._adding = self._adding[:count], self._adding[count:]
            await self._insert(batch)

    async def _insert(self, batch: list[_Addition]) -> None:
        statement = self._render(ADD)
        rows = [row for row, _, _ in batch]
        failure: Exception | None = None
        new: set[object] = set()
        try:
            found = await self.engine.perform(lambda connection: connection.fetchmany(statement, rows))
            new = {row[0] for row in found}
        except Exception as error:
            if isinstance(error, InboxError) and not error.transient and len(batch) > 1:
                # The server may refuse only one of the events.
                for each in batch:
                    await self._insert([each])
                return
            if isinstance(error, InboxError) and error.transient:
                # In an outage senders time out and deliver again.
                self._adding = [each for each in self._adding if not each[2].done()]
            failure = error
        for row, _, added in batch:
            is_new = row[0] in new
            new.discard(row[0])  # the same event again is a duplicate
            if added.done():  # the sender has gone
                continue
            if failure is not None:
                added.set_exception(copy.copy(failure))
            else:
                added.set_result(is_new)


class PostgresInbox(Inbox):
    """An `Inbox` in a table, for receivers and handlers on any number of machines. ::

        async with PostgresInbox("postgresql://app:...@db.example.com/app") as inbox:
            receiver = Receiver(WebhookVerifier(secret), inbox)
            async with inbox.running():
                await serve(receiver)

    An event is claimed for ``lease`` seconds by the server's clock, and the lease is renewed while its handler runs. If
    a worker dies, or is paused for longer than the lease, another worker handles the event, and the first worker
    can no longer record that it was handled. Threaded servers need a DSN: a pool belongs to one event loop.
    """

    def __init__(
        self,
        postgres: str | Secret[str] | Pool,
        *,
        table: str = "signing_events",
        lease: float = 30.0,
        timeout: float = 2.0,
        key: Keys = None,
        retention: float | None = 30 * _DAY,
        retry: HandlerRetryPolicy | None = None,
        handler_timeout: float = 60.0,
        wakeups: Wakeups | None = None,
    ) -> None:
        postgres, key = hide(postgres), hide_keys(key)
        self._store = PostgresEventStore(postgres, table=table, lease=lease, timeout=timeout)
        super().__init__(
            self._store, key=key, retention=retention, retry=retry, handler_timeout=handler_timeout, wakeups=wakeups
        )

    def __repr__(self) -> str:
        return f"PostgresInbox({self._store.address!r})"

    @property
    def sql(self) -> str:
        """The statements that create the table."""
        return self._store.engine.sql

    async def create_table(self) -> None:
        """Create the table unless it exists; any number of workers may do so at the same time."""
        await self._store.engine.create_table()

    async def table_exists(self) -> bool:
        """Return whether the table exists. Other operations create a missing one."""
        engine = self._store.engine
        (row,) = await engine.run("SELECT to_regclass($1) IS NOT NULL", engine.table)
        return bool(row[0])
