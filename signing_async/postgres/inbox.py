"""The inbox in PostgreSQL, for receivers and handlers on any number of machines."""

from __future__ import annotations

from .._encryption import Keys, hide_keys
from .._secret import Secret, hide
from ..errors import ConfigurationError, InboxError
from ..storage.events import TABLES, SqlEventStore
from ..storage.postgres import Pool, PostgresEngine
from ..webhooks.inbox import HandlerRetryPolicy, Inbox
from ..webhooks.wakeups import Wakeups

__all__ = ["PostgresEventStore", "PostgresInbox"]

_DAY = 86_400.0
_POLL = 0.25
_LONGEST_NAME = 50
"""Characters of a table's name: those of its indexes have at most 63."""


class PostgresEventStore(SqlEventStore):
    """Keeps events in a table, for any number of machines."""


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
        handler_timeout: float = 360.0,
        wakeups: Wakeups | None = None,
    ) -> None:
        postgres, key = hide(postgres), hide_keys(key)
        sql = ";\n".join(TABLES)
        self._engine = engine = PostgresEngine(postgres, table, sql, timeout=timeout, failure=InboxError)
        if len(engine.name) > _LONGEST_NAME:
            raise ConfigurationError(f"table: must have at most {_LONGEST_NAME} characters, got {table!r}")
        store = PostgresEventStore(engine, poll=_POLL, lease=lease, timeout=timeout)
        super().__init__(
            store, key=key, retention=retention, retry=retry, handler_timeout=handler_timeout, wakeups=wakeups
        )

    def __repr__(self) -> str:
        return f"PostgresInbox({self._engine.address!r})"

    @property
    def sql(self) -> str:
        """The statements that create the table."""
        return self._engine.sql

    async def create_table(self) -> None:
        """Create the table unless it exists; any number of workers may do so at the same time."""
        await self._engine.create_table()

    async def table_exists(self) -> bool:
        """Return whether the table exists. Other operations create a missing one."""
        (row,) = await self._engine.run("SELECT to_regclass($1) IS NOT NULL", self._engine.table)
        return bool(row[0])
