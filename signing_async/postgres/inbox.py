"""The inbox in PostgreSQL, for receivers and handlers on any number of machines."""

from __future__ import annotations

import os
import secrets

from .._encryption import Keys, hide_keys
from .._secret import Secret, hide
from ..errors import ConfigurationError, InboxError
from ..storage.events import TABLES, SqlEventStore, for_postgres
from ..storage.postgres import Pool, PostgresEngine
from ..webhooks.inbox import HandlerRetryPolicy, Inbox
from ..webhooks.wakeups import Wakeups

__all__ = ["PostgresEventStore", "PostgresInbox"]

_DAY = 86_400.0
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
        engine, name = self.engine, secrets.token_hex(8)

        def render(statement: str) -> str:
            # A server may fork after it has created the store.
            return engine.render(for_postgres(statement), owner=f"'{os.getpid()}:{name}'")

        super().__init__(engine, render, engine.address, poll=0.25, lease=lease, timeout=timeout)


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
