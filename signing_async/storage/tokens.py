"""A token in a row of PostgreSQL: refreshed by one worker at a time on any machine, never replaced by an older one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any, Self, TypeVar

import asyncpg
import attrs

from .. import _checks
from .._encryption import Keys, Sealer, hide_keys
from .._secret import Secret, hide
from .._tasks import finish
from ..auth.token_stores import adjust_expiry, token_from_json, token_to_json
from ..auth.unfinished import Unfinished
from ..errors import AuthError, ConfigurationError, TokenSuperseded
from ..models import Token
from .postgres import PERMANENT, TRANSIENT, Pool, PostgresEngine, terminate

__all__ = ["PostgresTokenStore"]

log: logging.Logger = logging.getLogger("signing_async")

T = TypeVar("T")

_POLL = 0.1
# The lock has a row of its own: the transaction that holds it blocks neither reads nor writes of the token.
_TABLE = """\
CREATE TABLE IF NOT EXISTS {table} (
    name text,
    part text CHECK (part IN ('token', 'lock')),
    token bytea,
    version bigint NOT NULL DEFAULT 0,
    saved_at timestamptz,
    saver_clock double precision,
    refresher text,
    refreshing_since timestamptz,
    lost_since timestamptz,
    PRIMARY KEY (name, part)
)"""
_ROWS = "INSERT INTO {table} (name, part) VALUES ($1, 'token'), ($1, 'lock') ON CONFLICT DO NOTHING"
# A refresher commits its name to the row, then locks the row. The row lock ends with its connection, the name stays:
# the refresher may have used the refresh token, and may reconnect to save the new one.
_QUEUE = """\
SELECT refresher IS NULL OR refresher = $2
    OR (lost_since < clock_timestamp() - $3::interval AND pg_postmaster_start_time() < clock_timestamp() - $3::interval)
FROM {table} WHERE name = $1 AND part = 'lock' FOR UPDATE"""
# Between the refresher's two steps the row is briefly unlocked, but the lock is not lost.
_LOST = """\
UPDATE {table} SET lost_since = clock_timestamp() WHERE name = $1 AND part = 'lock'
    AND lost_since IS NULL AND refreshing_since < clock_timestamp() - interval '0.5 s'"""
_ANNOUNCE = """\
UPDATE {table} SET refresher = $2, refreshing_since = clock_timestamp(), lost_since = NULL
WHERE name = $1 AND part = 'lock'"""
# Keep-alive detects a holder whose machine is gone within half a minute. A paused holder keeps the lock: it may have
# used the refresh token already.
_HOLD = """\
BEGIN; SET LOCAL idle_in_transaction_session_timeout = 0;
SET LOCAL tcp_keepalives_idle = 10; SET LOCAL tcp_keepalives_interval = 5; SET LOCAL tcp_keepalives_count = 4"""
_LOCK = """\
SELECT true FROM {table} WHERE name = $1 AND part = 'lock' AND refresher = $2 AND lost_since IS NULL FOR UPDATE"""
_UNLOCK = "UPDATE {table} SET refresher = NULL WHERE name = $1 AND part = 'lock' AND refresher = $2"
_READ = """\
SELECT version, token, saver_clock - extract(epoch FROM saved_at)::float8 AS saver_ahead,
    extract(epoch FROM clock_timestamp())::float8 AS now
FROM {table} WHERE name = $1 AND part = 'token'"""
_SAVE = """\
INSERT INTO {table} (name, part, token, version, saved_at, saver_clock)
VALUES ($1, 'token', $2, 1, clock_timestamp(), $3)
ON CONFLICT (name, part) DO UPDATE SET token = excluded.token, version = {table}.version + 1,
    saved_at = excluded.saved_at, saver_clock = excluded.saver_clock"""
_REPLACE = """\
WITH saved AS (
    UPDATE {table} SET token = $2, version = version + 1, saved_at = clock_timestamp(), saver_clock = $3
    WHERE name = $1 AND part = 'token' AND version = $4
    RETURNING true
), unlocked AS (
    UPDATE {table} SET refresher = NULL WHERE name = $1 AND part = 'lock' AND refresher = $5
)
SELECT * FROM saved"""
_IS_SAVED = "SELECT version = $3 + 1 AND token = $2 FROM {table} WHERE name = $1 AND part = 'token'"


@attrs.define(eq=False)
class _Hold:
    """The lock as held by one worker: a locked row, for as long as the connection and its transaction last."""

    store: PostgresTokenStore
    owner: str
    connection: Any = None
    """None if the connection is lost."""
    kept: AsyncExitStack = attrs.field(factory=AsyncExitStack)
    """Releases the connection."""
    version: int = 0
    """The version of the token to replace."""
    announced: bool = False
    """Whether the row may name this owner as the refresher."""
    unsaved: Secret[bytes] | None = None
    """A token whose save failed."""
    ended: bool = False

    async def run(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Run ``work`` on the connection that holds the lock; after a failure the connection is lost."""
        connection, self.connection = self.connection, None
        if connection is None:
            raise ConnectionError("an earlier statement failed")
        try:
            result = await work(connection)
        except BaseException:
            terminate(connection)
            raise
        self.connection = connection
        return result


# Inherited by the tasks that start inside the lock.
_holds: ContextVar[tuple[_Hold, ...]] = ContextVar("signing_async_postgres_holds", default=())


class PostgresTokenStore:
    """Stores a user's token in a row of a table, for any number of workers on any number of machines. ::

        async with PostgresTokenStore("postgresql://app:...@db.example.com/app", "tenant-7/user-42") as store:
            oauth = OAuth(base_url, client_id=..., client_secret=..., redirect_uri=..., store=store)

    ``name`` identifies the token. With a ``key`` (32 random bytes or their base64, or several) the token is encrypted:
    the first key encrypts, all keys decrypt. Give the stores of many tenants one pool: each refresh keeps one of its
    connections until it ends, and further refreshes wait for theirs.

    A refresh locks the row from the load to the save. A paused holder keeps the lock while its connection lasts. If the
    connection is lost, the new token is saved through another one as soon as PostgreSQL is back, and never overwrites
    a newer token (`TokenSuperseded`).

    No refresh token is used twice: if a holder loses its connection, no other worker refreshes until it has saved, or
    until ``grace`` seconds have passed since the lock was found to be lost, and since the server started.
    ``postgres/README.md`` says why, and what this does not cover.

    If PostgreSQL does not respond within ``timeout`` seconds, `AuthError` is raised, and an `OAuth` uses its current
    token while it is valid. A token's lifetime is measured by the server's clock: a worker's clock may be wrong.
    """

    def __init__(
        self,
        postgres: str | Secret[str] | Pool,
        name: str,
        *,
        key: Keys = None,
        table: str = "signing_tokens",
        grace: float = 45.0,
        timeout: float = 2.0,
    ) -> None:
        postgres, key = hide(postgres), hide_keys(key)
        self._sealer = Sealer(key, owner="PostgresTokenStore")
        self._database = PostgresEngine(postgres, table, _TABLE, timeout=timeout, failure=AuthError)
        self.name: str = _checks.string("name", name)
        if "\0" in name:
            raise ConfigurationError(f"name: must not contain null characters, got {name!r}")
        self._place = f"{self._database.table}/{name}"
        self._grace = timedelta(seconds=_checks.number("grace", grace, above=0))
        # One task at a time waits for the row: the others need no connection.
        self._local_lock = asyncio.Lock()
        self._unfinished = Unfinished(timeout)

    def __repr__(self) -> str:
        return f"PostgresTokenStore({self._database.address!r}, {self.name!r})"

    @property
    def sql(self) -> str:
        """The statement that creates the table."""
        return self._database.sql

    async def create_table(self) -> None:
        """Create the table unless it exists; any number of workers may do so at the same time."""
        await self._database.create_table()

    async def load(self) -> Token | None:
        hold = self._current_hold()
        while hold is not None and hold.announced:
            if hold.connection is None:
                raise AuthError(f"{self!r}: the connection that held the lock is lost", transient=True)
            with contextlib.suppress(*TRANSIENT, *PERMANENT):
                async with asyncio.timeout(self._database.timeout):
                    row = await hold.run(self._read)
                    hold.version = row["version"]
                    return self._decode(row)
            # The connection is lost. A token is only requested after a load, so this worker may acquire the lock again.
            await hold.kept.aclose()
            await self._acquire(hold)
            if hold.ended:
                await self._release(hold)
                hold = None
        return self._decode(await self._database.perform(self._read))

    async def save(self, token: Token) -> None:
        hold = self._current_hold()
        data = self._sealer.seal(token_to_json(token), self._place)
        if hold is None:
            await self._database.perform(partial(self._write, data))
            return
        hold.unsaved, failure = Secret(data), None
        try:
            saved = await self._replace(hold, data)
        except AuthError as error:
            failure = error
        if failure is not None:
            problem = f"{self!r}: no response" if failure.transient else failure
            raise AuthError(f"{problem}, and a refreshed token is not saved yet", transient=failure.transient)
        if not saved:
            raise TokenSuperseded(f"{self!r} holds a newer token, which was not overwritten")

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Hold the lock: one worker at a time. Wait as long as another worker holds it."""
        before = _holds.get()
        async with self._local_lock:
            await self._unfinished.wait(repr(self))
            hold = _Hold(self, f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}")
            try:
                await self._acquire(hold)
                _holds.set((*before, hold))
                yield
            finally:
                _holds.set(before)
                hold.ended = True
                await finish(self._release(hold))

    async def aclose(self) -> None:
        """Close the connections, except a given pool. A save that waits for PostgreSQL is given ``timeout`` seconds."""
        await self._unfinished.close(self)
        await self._database.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_database"):
            self._database.warn_if_open(self)

    # The lock

    def _current_hold(self) -> _Hold | None:
        """Return the hold of this task, or of the task that started it."""
        return next((hold for hold in reversed(_holds.get()) if hold.store is self and not hold.ended), None)

    async def _acquire(self, hold: _Hold) -> None:
        while True:
            async with AsyncExitStack() as kept:
                if await self._database.run_and_keep(partial(self._lock_row, hold), kept):
                    hold.kept = kept.pop_all()
                    return
            await asyncio.sleep(_POLL)

    async def _lock_row(self, hold: _Hold, connection: Any) -> bool:
        """Lock the row in a transaction; return False if another worker holds it, or may reconnect to save."""
        # Waits in PostgreSQL's queue for half of the timeout, then queues again.
        lock_timeout = int(self._database.timeout * 500)
        arguments = (self.name, hold.owner)
        await connection.execute(self._database.render(_ROWS), self.name)
        await connection.execute(f"BEGIN; SET LOCAL lock_timeout = {lock_timeout}")
        try:
            is_free = await connection.fetchval(self._database.render(_QUEUE), *arguments, self._grace)
            if is_free:
                hold.announced = True
                await connection.execute(self._database.render(_ANNOUNCE), *arguments)
            else:
                await connection.execute(self._database.render(_LOST), self.name)
        except asyncpg.LockNotAvailableError:
            is_free = False
        await connection.execute("COMMIT")
        if not is_free:
            return False
        await connection.execute(_HOLD)
        if not await connection.fetchval(self._database.render(_LOCK), *arguments):
            await connection.execute("COMMIT")
            return False
        hold.connection, hold.version = connection, (await self._read(connection))["version"]
        return True

    async def _release(self, hold: _Hold) -> None:
        """Unlock the row. If that fails, or a token is not saved yet, do it in the background."""
        with contextlib.suppress(*TRANSIENT, *PERMANENT):
            if hold.unsaved is None and hold.announced:
                async with asyncio.timeout(self._database.timeout / 2):
                    await hold.run(partial(self._unlock, hold))
                    hold.announced = False
        await hold.kept.aclose()
        if hold.announced:
            self._unfinished.start(
                lambda: self._database.perform(partial(self._end, hold)), unsaved=hold.unsaved is not None
            )

    async def _unlock(self, hold: _Hold, connection: Any) -> None:
        await connection.execute(self._database.render(_UNLOCK), self.name, hold.owner)
        if connection.is_in_transaction():
            await connection.execute("COMMIT")

    async def _end(self, hold: _Hold, connection: Any) -> None:
        if hold.unsaved is not None:
            await self._replace_version(hold, hold.unsaved.reveal(), connection)
        else:
            await self._unlock(hold, connection)

    # The token

    async def _read(self, connection: Any) -> Any:
        return await connection.fetchrow(self._database.render(_READ), self.name)

    async def _write(self, data: bytes, connection: Any) -> None:
        await connection.execute(self._database.render(_SAVE), self.name, data, time.time())

    async def _replace(self, hold: _Hold, data: bytes) -> bool:
        """Replace the token; return False if a newer token is stored."""
        work = partial(self._replace_version, hold, data)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._database.timeout):
                try:
                    return await hold.run(work)
                except (*TRANSIENT, *PERMANENT) as error:
                    problem = self._database.describe(error)
                    log.warning("%r: the lock is lost, saving the refreshed token without it: %s", self, problem)
                return await self._database.perform(work)
        raise AuthError(f"{self!r}: no response", transient=True)

    async def _replace_version(self, hold: _Hold, data: bytes, connection: Any) -> bool:
        arguments = (self.name, data, time.time(), hold.version, hold.owner)
        saved = await connection.fetchval(self._database.render(_REPLACE), *arguments)
        if connection.is_in_transaction():
            await connection.execute("COMMIT")
        # An earlier attempt may have succeeded, and only its response was lost.
        saved = saved or await connection.fetchval(self._database.render(_IS_SAVED), self.name, data, hold.version)
        hold.version, hold.unsaved, hold.announced = hold.version + 1, None, False
        return bool(saved)

    def _decode(self, row: Any) -> Token | None:
        if row is None or row["token"] is None:
            return None
        try:
            token = token_from_json(self._sealer.unseal(row["token"], self._place))
        except ValueError as error:
            problem = str(error)
        else:
            return adjust_expiry(token, time.time() - row["now"] - row["saver_ahead"])
        raise AuthError(f"{self!r}: the stored token cannot be read and was not changed: {problem}")
