"""The engine on PostgreSQL: every operation is bounded in time and repeatable, and no error shows a secret."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from .. import _checks
from .._connections import certificate_problem, roots_problem
from .._secret import Secret, hide
from ..errors import AuthError, ConfigurationError, StorageError
from ..transport.redaction import redact

try:
    import asyncpg
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "signing_async.postgres needs asyncpg: pip install 'signing-async[postgres]'", name="asyncpg"
    ) from None

__all__ = ["FAILURES", "Pool", "PostgresEngine", "terminate"]

T = TypeVar("T")

# The planner takes a range of times for rare, and reads an index.
DIALECT = {
    "serial": "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "time": "timestamptz",
    "moment": "now()",
    "bytes": "bytea",
    "now": "statement_timestamp()",
    "at": "to_timestamp",
    "seconds": "* interval '1 second'",
    "each": "jsonb_array_elements_text",
    "json": "::text::jsonb",  # a pool of the application may have a codec of its own for parameters of type jsonb
    "skip_locked": "FOR UPDATE SKIP LOCKED",
    "clustered": "",
    "dead": "held.leased_until BETWEEN '-infinity' AND statement_timestamp()",
}
_MAX_CONNECTIONS = 8
_RETRY_AFTER = 0.05
_TABLE_NAME = re.compile(r"([a-z_][a-z0-9_]{0,62}\.)?[a-z_][a-z0-9_]{0,62}")
_HOST = re.sub(r"[^\w.-]", "", socket.gethostname(), flags=re.ASCII)
# Two concurrent CREATE TABLE IF NOT EXISTS may conflict.
_LOCK_CREATION = "SELECT pg_advisory_xact_lock(7310557141)"
FAILURES = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, ValueError)
"""What asyncpg raises if an operation fails; a `TimeoutError` is an `OSError`."""
# The start of the SQLSTATE: the connection broke, two transactions conflicted, the server is out of connections or disk
# space, is starting or stopping, could not read a file, is read-only during a failover, or one of its timeouts expired.
# 23505: two workers have claimed events of one signing at once; the next snapshot shows it.
_TRANSIENT = ("08", "40", "53", "57", "58", "25006", "25P03", "25P04", "55P03", "23505")
_PERMANENT = re.compile("unsupported authentication|pool is (not initialized|closed)")


class Pool(Protocol):
    """The methods of an `asyncpg.Pool` that are used."""

    def acquire(self, *, timeout: float | None = None) -> Any: ...

    async def release(self, connection: Any, *, timeout: float | None = None) -> None: ...

    def get_size(self) -> int: ...

    def get_idle_size(self) -> int: ...

    def get_max_size(self) -> int: ...


class PostgresEngine:
    """Connections to the database of one table. An operation is bounded in time, and retried after a transient error.

    An operation that fails raises ``failure`` with a message.
    """

    def __init__(
        self,
        source: str | Secret[str] | Pool,
        table: str,
        sql: str,
        *,
        timeout: float,
        failure: type[AuthError] | type[StorageError],
    ) -> None:
        source = hide(source)
        self._dsn: Secret[str] | None = None
        self._pool: Any = None
        self._passwords: list[Secret[str]] = []
        self.address: str = "the given pool"
        if isinstance(source, Secret):
            self._dsn = source
            if problem := self._check_dsn(source):
                raise ConfigurationError(f"invalid DSN: {problem}")
        elif hasattr(source, "acquire"):
            self._pool = source
        else:
            raise ConfigurationError(f"postgres: must be a DSN or an asyncpg.Pool, got {source!r}")
        self._failure = failure
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0
        self._token = secrets.token_hex(8)
        if not isinstance(table, str) or not _TABLE_NAME.fullmatch(table):
            raise ConfigurationError(f"table: must be a lower-case identifier, name or schema.name, got {table!r}")
        self.table: str = ".".join(f'"{part}"' for part in table.split("."))
        self.name: str = table.rpartition(".")[2]
        """The table's name without the schema."""
        self._columns = ", ".join(re.findall(r"^    (\w+) ", sql, re.MULTILINE))
        self.sql: str = self.render(sql)
        self.timeout: float = _checks.number("timeout", timeout, above=0)

    def _check_dsn(self, dsn: Secret[str]) -> str:
        """Find the address, which messages show, and the passwords; return what is wrong with the DSN, or ""."""
        try:
            parts = urlsplit(dsn.reveal())
            if parts.scheme not in ("postgresql", "postgres"):
                return "must begin with postgresql://"
            if parts.fragment:
                return "contains a #; write %23 in a password"
            parameters = parse_qsl(parts.query)
            passwords = [parts.password or "", *(value for name, value in parameters if name == "password")]
            hosts = parts.netloc.rpartition("@")[2]
            all(urlsplit(f"//{host}").port for host in hosts.split(","))  # raises for an invalid one
        except ValueError:
            return "invalid host or port"
        self._passwords = [Secret(text) for each in passwords if each for text in (each, unquote(each))]
        self.address = hosts + parts.path
        return _find_unusable_file(dict(parameters), "prefer" if hosts else "disable")

    @property
    def owner(self) -> str:
        """The name of this object in claims. The process id tells a forked child from its parent."""
        return f"{_HOST}:{os.getpid()}:{self._token}"

    def render(self, statement: str) -> str:
        """Return the statement in PostgreSQL's dialect."""
        names = {"table": self.table, "name": self.name, "columns": self._columns, "owner": f"'{self.owner}'"}
        return statement.format(**names, **DIALECT)

    async def run(self, statement: str, *parameters: object, durable: bool = True) -> Sequence[Any]:
        """Run a statement, which must be repeatable: it is run again if its response is lost."""
        return await self.perform(lambda connection: connection.fetch(self.render(statement), *parameters))

    async def perform(self, work: Callable[[Any], Awaitable[T]], kept: AsyncExitStack | None = None) -> T:
        """Return the result of ``work`` on any connection, which ``kept`` releases when it is closed.

        Without ``kept`` the work is done in the event loop that owns the connections, while that runs.
        """
        if kept is None and (loop := self._other_loop()) is not None:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.perform(work), loop))
        problem, is_table_missing, is_final, client_wide = "no response", False, False, True
        pool = await self._open()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout):
                while not is_final:
                    try:
                        async with AsyncExitStack() as used:
                            connection = await used.enter_async_context(_acquired(pool))
                            if is_table_missing:
                                await self._create_table(connection)
                            result = await work(connection)
                            if kept is not None:
                                kept.push_async_exit(used.pop_all())
                            return result
                    except asyncpg.UndefinedTableError:
                        is_table_missing = True
                        problem = f"the table {self.table} does not exist"
                    except FAILURES as error:
                        problem, is_final = self.describe(error), not _is_transient(error)
                        # Data may be refused, such as a key in another encoding. A token concerns the whole client.
                        client_wide = self._failure is AuthError or not isinstance(error, asyncpg.DataError)
                    if not is_final:
                        await asyncio.sleep(_RETRY_AFTER)
        if is_final:
            advice = f"; create the table with:\n{self.sql}" if is_table_missing else ""
            raise self._make_error(problem + advice, client_wide=client_wide)
        if pool.get_size() >= pool.get_max_size() and not pool.get_idle_size():
            problem = "all connections of the pool are in use"
        raise self._make_error(f"{problem}, for {self.timeout:g} s", transient=True)

    def _make_error(
        self, problem: str, *, transient: bool = False, client_wide: bool = True
    ) -> AuthError | StorageError:
        return self._failure(f"PostgreSQL at {self.address}: {problem}", transient=transient, client_wide=client_wide)

    async def create_table(self) -> None:
        """Create the table unless it exists. Raise an error if a table of this name has other columns."""
        # `perform` creates a missing table.
        await self.run("SELECT {columns} FROM {table} LIMIT 0")

    async def _create_table(self, connection: Any) -> None:
        async with connection.transaction():
            await connection.execute(_LOCK_CREATION)
            await connection.execute(self.sql)

    async def _open(self) -> Any:
        if self._closed:
            raise self._make_error("the connection is closed")
        loop = asyncio.get_running_loop()
        if self._dsn is not None and (self._pool is None or self._loop is not loop):
            self._pool = asyncpg.create_pool(
                self._dsn.reveal(), min_size=0, max_size=_MAX_CONNECTIONS, reset=_skip_reset
            )
            self._loop = loop
            await self._pool
        self._loop, self._process = loop, os.getpid()
        return self._pool

    def describe(self, error: BaseException) -> str:
        """Return the error's message without passwords, and without the rows that PostgreSQL quotes in its details."""
        if isinstance(error, asyncpg.ClientConfigurationError):
            return "invalid DSN"
        if isinstance(error, asyncpg.UndefinedColumnError):
            found = f"{self.table} is a table of another program, or of another version of signing-async"
            return f"{found}; it was not changed: rename it, or give another table"
        text = str(error.args[0]) if isinstance(error, asyncpg.PostgresError) and error.args else str(error)
        return redact(
            f"{text or 'no response'} ({type(error).__name__})", [secret.reveal() for secret in self._passwords]
        )

    async def aclose(self) -> None:
        """Close the connections opened here."""
        if (loop := self._other_loop()) is not None:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.aclose(), loop))
        self._closed = True
        if self._dsn is None or self._pool is None or self._process != os.getpid():
            return None  # a parent process closes what it opened
        pool, self._pool = self._pool, None
        try:
            async with asyncio.timeout(self.timeout):
                await pool.close()
        except TimeoutError:
            pool.terminate()
        return None

    def _other_loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the event loop that owns the connections if it still runs, and is not the current one."""
        loop = self._loop
        if loop is None or self._process != os.getpid() or loop is asyncio.get_running_loop():
            return None
        return loop if loop.is_running() else None

    def warn_if_open(self, owner: object) -> None:
        """Warn that ``owner`` was not closed; for its ``__del__``."""
        if self._dsn is not None and self._pool is not None:
            warnings.warn(
                f"{owner!r} was not closed: use `async with`, or await aclose()", ResourceWarning, stacklevel=3
            )


@contextlib.asynccontextmanager
async def _acquired(pool: Any) -> AsyncIterator[Any]:
    connection = await pool.acquire()
    try:
        yield connection
    except BaseException as error:
        # A statement may still be running, a transaction be open, or a lock be held.
        if not isinstance(error, asyncpg.PostgresError):
            terminate(connection)
        raise
    finally:
        # A connection that breaks now does not undo the work.
        with contextlib.suppress(*FAILURES):
            await pool.release(connection, timeout=0.5)


async def _skip_reset(connection: Any) -> None:
    """Save the round trip of a reset: the settings made here are harmless to the next user of the connection."""


def terminate(connection: Any) -> None:
    """Close the connection at once, if it is open."""
    with contextlib.suppress(asyncpg.InterfaceError):
        connection.terminate()


def _find_unusable_file(parameters: Mapping[str, str], default_mode: str) -> str:
    """Return what is wrong with the files that a DSN names: asyncpg loads them only when it connects."""
    mode = parameters.get("sslmode") or os.environ.get("PGSSLMODE") or default_mode
    checks_server = mode in ("require", "verify-ca", "verify-full")
    problem = roots_problem(parameters.get("sslrootcert")) if checks_server else ""
    certificate, key = parameters.get("sslcert"), parameters.get("sslkey")
    if problem or mode == "disable" or not certificate:
        return problem
    if key:
        return certificate_problem(certificate, key, parameters.get("sslpassword"))
    # The key may be in this file, in the environment or in the home folder.
    return roots_problem(certificate, "client certificate")


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, asyncpg.PostgresError):
        return str(error.sqlstate).startswith(_TRANSIENT)
    # asyncpg lacks the authentication method, or the application has not opened the pool.
    if isinstance(error, asyncpg.InterfaceError) and _PERMANENT.search(str(error)):
        return False
    return not isinstance(error, ValueError)  # so is an untrusted certificate
