"""One way to PostgreSQL for both parts: bounded, done again where an answer is lost, told without secrets."""

from __future__ import annotations

import asyncio
import contextlib
import re
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import attrs

from .. import _checks
from ..errors import ConfigurationError, SigningError
from ..transport.redaction import redact

try:
    import asyncpg  # type: ignore[import-untyped]  # it is typed, and carries no marker that says so
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "signing_async.postgres needs asyncpg: pip install 'signing-async[postgres]'", name="asyncpg"
    ) from None

__all__ = ["FINAL", "PASSING", "Database", "Pool", "drop"]

T = TypeVar("T")

_OWN_CONNECTIONS = 8
_AGAIN = 0.05
_GIVE_BACK = 0.5
_TABLE_NAME = re.compile(r"([a-z_][a-z0-9_]{0,62}\.)?[a-z_][a-z0-9_]{0,62}")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:/@\[\]]*)(:[0-9]*)?")
# Of two CREATE TABLE IF NOT EXISTS at once one may fail: makers take turns.
_ONE_MAKER = "SELECT pg_advisory_xact_lock(7310557141)"
# What another try may get over: the server is starting, stopping or full, a connection broke, two were in each other's
# way. Every step here may be done twice.
PASSING = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TooManyConnectionsError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.TransactionRollbackError,
    asyncpg.InvalidCachedStatementError,
    # Begun on a connection that the server was just closing.
    asyncpg.InternalClientError,
)
FINAL = (asyncpg.PostgresError, asyncpg.InterfaceError, ValueError)


class Pool(Protocol):
    """What is used of an `asyncpg.Pool`."""

    def acquire(self, *, timeout: float | None = None) -> Any: ...

    async def release(self, connection: Any, *, timeout: float | None = None) -> None: ...

    def get_size(self) -> int: ...

    def get_idle_size(self) -> int: ...

    def get_max_size(self) -> int: ...

    def is_closing(self) -> bool: ...


@attrs.frozen
class _Problem:
    words: str
    crowded: bool = False


class Database:
    """Connections to one database for one table; every step is bounded, and may be done again if its answer is lost."""

    def __init__(
        self,
        source: str | Pool,
        table: str,
        sql: str,
        *,
        owner: str,
        timeout: float,
        failure: Callable[[str], SigningError],
    ) -> None:
        self._dsn: str | None = None
        self._pool: Any = None
        self._secrets: list[str] = []
        self.place: str = "the caller's pool"
        if isinstance(source, str):
            self._dsn = source
        else:
            self._pool = source
        # Variables are shown in some tracebacks.
        del source
        self._owner = owner
        self._own = self._dsn is not None
        self._closed = False
        self._failure = failure
        if self._dsn is None and not hasattr(self._pool, "acquire"):
            raise ConfigurationError(f"{owner}: postgres must be a DSN or an asyncpg.Pool, not {self._pool!r}")
        self._read_dsn()
        if not isinstance(table, str) or not _TABLE_NAME.fullmatch(table):
            raise ConfigurationError(f"{owner}: table must be a plain lower-case name, schema.name or name: {table!r}")
        self.table: str = ".".join(f'"{part}"' for part in table.split("."))
        self.sql: str = sql.format(table=self.table)
        _checks.seconds(owner, "timeout", timeout)
        self.timeout: float = timeout

    def _read_dsn(self) -> None:
        """Learn the place, to be shown, and the password, to be hidden."""
        if self._dsn is None:
            return
        problem = None
        try:
            parts = urlsplit(self._dsn)
            written = [parts.password or "", *(value for name, value in parse_qsl(parts.query) if name == "password")]
        except ValueError:
            problem = "it cannot be read as a URL"
        else:
            self._secrets = [secret for each in written if each for secret in (each, unquote(each))]
            hosts = parts.netloc.rpartition("@")[2]
            self.place = hosts + parts.path
            if parts.scheme not in ("postgresql", "postgres"):
                problem = "it must begin with postgresql://"
            elif parts.fragment:
                problem = "there is a # in it: in a password that is written %23"
            elif not all(_HOST.fullmatch(host) for host in hosts.split(",")):
                problem = "its host and port cannot be read"
        if problem is not None:
            raise ConfigurationError(f"{self._owner}: the DSN cannot be used: {problem}")

    async def run(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Do it on some connection."""
        return self._told(await self._bounded(work, None))

    async def keep(self, work: Callable[[Any], Awaitable[T]], kept: AsyncExitStack) -> T:
        """Do it on a connection that stays in hand until ``kept`` is closed.

        Where all of the pool's are in use it waits, for as long as they are.
        """
        crowded = True
        while crowded:
            # In a task of its own, which alone is cancelled when its time is up.
            outcome = await asyncio.create_task(self._bounded(work, kept))
            crowded = isinstance(outcome, _Problem) and outcome.crowded
        return self._told(outcome)

    def _told(self, outcome: T | _Problem) -> T:
        if isinstance(outcome, _Problem):
            raise self._failure(f"PostgreSQL at {self.place}: {outcome.words}")
        return outcome

    async def look(self, connection: Any) -> None:
        """See whether the table is there; `run` makes one that is missing."""
        await connection.execute(f"SELECT FROM {self.table} LIMIT 0")

    async def _make(self, connection: Any) -> None:
        async with connection.transaction():
            await connection.execute(_ONE_MAKER)
            await connection.execute(self.sql)

    async def _bounded(self, work: Callable[[Any], Awaitable[T]], kept: AsyncExitStack | None) -> T | _Problem:
        trouble = "no answer"
        missing = False
        pool = await self._open()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout):
                while True:
                    try:
                        if missing:
                            await self._attempt(pool, self._make, None)
                        return await self._attempt(pool, work, kept)
                    except asyncpg.UndefinedTableError:
                        missing = True
                        trouble = f"the table {self.table} is missing"
                    except (*PASSING, *FINAL) as error:
                        trouble = self.words(error)
                        if not _may_pass(error, pool):
                            return _Problem(trouble + (f"; the table is made by:\n{self.sql}" if missing else ""))
                    await asyncio.sleep(_AGAIN)
        crowded = pool.get_size() >= pool.get_max_size() and not pool.get_idle_size()
        if crowded:
            trouble = "all connections of the pool are in use"
        return _Problem(f"{trouble}, for {self.timeout:g} s", crowded)

    async def _attempt(self, pool: Any, work: Callable[[Any], Awaitable[T]], kept: AsyncExitStack | None) -> T:
        async with AsyncExitStack() as used:
            connection = await used.enter_async_context(self._connection(pool))
            result = await work(connection)
            if kept is not None:
                await kept.enter_async_context(used.pop_all())
            return result

    @contextlib.asynccontextmanager
    async def _connection(self, pool: Any) -> AsyncIterator[Any]:
        connection = await pool.acquire()
        try:
            yield connection
        except asyncpg.PostgresError:
            if _in_transaction(connection):
                drop(connection)
            raise
        except BaseException:
            # Whatever is under way on it is not waited for.
            drop(connection)
            raise
        finally:
            # What was done is done, also where the connection can be used no more.
            with contextlib.suppress(*PASSING, *FINAL):
                await pool.release(connection, timeout=_GIVE_BACK)

    async def _open(self) -> Any:
        if self._closed:
            raise self._failure(f"{self._owner}: it is closed")
        if self._pool is None:
            # Nothing is connected before it is needed.
            self._pool = asyncpg.create_pool(self._dsn, min_size=0, max_size=_OWN_CONNECTIONS, reset=_as_it_is)
            await self._pool
        return self._pool

    def words(self, error: BaseException) -> str:
        """An error without a password, and without the rows that PostgreSQL quotes in its details."""
        if isinstance(error, asyncpg.ClientConfigurationError):
            return "the DSN cannot be used"
        said = str(error.args[0]) if isinstance(error, asyncpg.PostgresError) and error.args else str(error)
        return redact(f"{said or 'no answer'} ({type(error).__name__})", self._secrets)

    async def aclose(self) -> None:
        """Close the connections that are its own."""
        self._closed = True
        if not self._own or self._pool is None:
            return
        pool, self._pool = self._pool, None
        try:
            async with asyncio.timeout(self.timeout):
                await pool.close()
        except TimeoutError:
            pool.terminate()

    def warn_if_open(self, what: object) -> None:
        """For `__del__` of whoever uses it."""
        if self._own and self._pool is not None:
            warnings.warn(
                f"{what!r} was not closed: use `async with`, or await aclose()", ResourceWarning, stacklevel=3
            )


async def _as_it_is(connection: Any) -> None:
    """Nothing is set here that lasts longer than a transaction; a round trip to undo it would be for nothing."""


def drop(connection: Any) -> None:
    """Cut a connection off, unless it is already."""
    with contextlib.suppress(asyncpg.InterfaceError):
        connection.terminate()


def _may_pass(error: BaseException, pool: Any) -> bool:
    # An interface error that is no ValueError says that a connection, or the pool, cannot be used any more.
    closed = isinstance(error, asyncpg.InterfaceError) and not isinstance(error, ValueError)
    return isinstance(error, PASSING) or (closed and not pool.is_closing())


def _in_transaction(connection: Any) -> bool:
    with contextlib.suppress(asyncpg.InterfaceError):
        return bool(connection.is_in_transaction())
    return False
