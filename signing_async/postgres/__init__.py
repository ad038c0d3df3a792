"""A token store, a dispatch journal and an inbox in PostgreSQL, for many machines: data that must outlive any cache.

All take a DSN (``postgresql://user:password@host/database``) or the caller's own `asyncpg.Pool`, which is never
closed here. An operation is retried for ``timeout`` seconds if the server is unavailable, then raises. A missing table
is created on first use, or beforehand by ``await store.create_table()``; ``sql`` is the statement, and the error
contains it if the role may not create tables.

Data survives a crash of the server unless ``synchronous_commit`` is off. It may not survive a failover to an
asynchronous replica, which can lack the last commits: the next run then sends the last packages again, and a refresh
token may be used twice. Name every replica that may take over in ``synchronous_standby_names``, and leave
``synchronous_commit`` on.
"""

from ..storage.journal import PostgresJournal
from ..storage.postgres import Pool
from ..storage.tokens import PostgresTokenStore
from .inbox import PostgresInbox

__all__ = ["Pool", "PostgresInbox", "PostgresJournal", "PostgresTokenStore"]
