"""What must outlive any cache, in PostgreSQL: a token store and a dispatch journal for workers on many machines.

Both take a DSN (``postgresql://user:password@host/database``), or an `asyncpg.Pool` of the caller's, which is never
closed here. A server that is stopped, gone or out of reach is an error within ``timeout`` seconds; one that is back
within that time is not noticed. A table that is missing is made on first use, or beforehand by
``await store.create_table()``; ``sql`` is the statement, and where the role may not make a table the error holds it.

What was written outlives a crash of the server, unless its ``synchronous_commit`` is turned off. It does not outlive a
failover to an asynchronous replica, which may lack the last commits: packages that were sent last are then sent again
by the next run, and a refresh token may be used twice. A replica that may take over must be named in
``synchronous_standby_names``, with ``synchronous_commit`` at ``on``.
"""

from .database import Pool
from .journal import PostgresJournal
from .tokens import PostgresTokenStore

__all__ = ["Pool", "PostgresJournal", "PostgresTokenStore"]
