"""A token in a row of PostgreSQL: refreshed by one worker at a time, and never replaced by an older one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self

import asyncpg  # type: ignore[import-untyped]  # it is typed, and carries no marker that says so
import attrs

from .. import _checks
from ..auth.encryption import Sealer
from ..auth.token_stores import carried_through, token_from_json, token_to_json
from ..errors import AuthError, ConfigurationError, TokenSuperseded
from ..models import Token
from .database import FINAL, PASSING, Database, Pool, drop

__all__ = ["PostgresTokenStore"]

log: logging.Logger = logging.getLogger("signing_async")

_AGAIN = 0.1
_SAVE_AGAIN = 0.1
# What may pass between a look at one clock and a look at the other.
_CLOCKS_AGREE = 5.0
# The lock is a row of its own: in a transaction that holds it nobody is kept from reading or saving the token.
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
# A refresher commits its name to the row, and then locks the row. The lock ends with its connection, the name stays:
# the refresher may have used the refresh token, and may come back to save the new one.
_QUEUE = """\
SELECT refresher IS NULL OR refresher = $2
    OR (lost_since < clock_timestamp() - $3::interval AND pg_postmaster_start_time() < clock_timestamp() - $3::interval)
FROM {table} WHERE name = $1 AND part = 'lock' FOR UPDATE"""
# Between the two steps of a refresher others may find the row unlocked: so soon the lock is not lost.
_LOST = """\
UPDATE {table} SET lost_since = clock_timestamp() WHERE name = $1 AND part = 'lock'
    AND lost_since IS NULL AND refreshing_since < clock_timestamp() - interval '0.5 s'"""
_ANNOUNCE = """\
UPDATE {table} SET refresher = $2, refreshing_since = clock_timestamp(), lost_since = NULL
WHERE name = $1 AND part = 'lock'"""
# A holder whose machine is gone is found out by keep-alive in half a minute. One that is paused keeps the lock: it may
# have used the refresh token already.
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
class _Held:
    """A row that is locked, for as long as this connection and its transaction last."""

    store: PostgresTokenStore
    name: str
    """Of this holder, as it is announced in the row."""
    connection: Any = None
    kept: AsyncExitStack = attrs.field(factory=AsyncExitStack)
    """Gives the connection back."""
    version: int = 0
    """That of the token which is to be replaced."""
    announced: bool = False
    usable: bool = False
    saving: asyncio.Task[bool] | None = None
    unlocking: asyncio.Task[None] | None = None
    over: bool = False


_held_here: ContextVar[tuple[_Held, ...]] = ContextVar("signing_async_held_rows", default=())


class PostgresTokenStore:
    """Keeps a user's token in a row of a table, for any number of workers on any number of machines. ::

        async with PostgresTokenStore("postgresql://app:...@db.example.com/app", "tenant-7/user-42") as store:
            oauth = OAuth(base_url, client_id=..., client_secret=..., redirect_uri=..., store=store)

    ``name`` says whose token it is. With a ``key`` it is encrypted at rest: 32 bytes or their base64, or several, of
    which the first encrypts and all are tried. Give many tenants' stores one pool: a refresh keeps one connection of it
    for as long as it takes, and the others wait for theirs.

    A refresh locks the row from the load to the save. A holder that is paused keeps the lock for as long as its
    connection lasts. If the connection is lost, the new token is saved over another one, as soon as PostgreSQL is back,
    and never over a newer token (`TokenSuperseded`).

    A refresh token is not used twice: a server that detects reuse may revoke all tokens of the user. A holder that lost
    its connection may have used the refresh token and may yet come back to save the new one. So no other worker
    refreshes before that, or before ``grace`` seconds are over: counted from when the lock was first found to be lost,
    and again from when the server was started. An outage of the server that is longer than the grace, or a worker that
    is cut off for longer while the others are not, is beyond that promise. A worker that is killed between the token
    request and the save takes the new token with it: the others wait for the grace and then have only the used refresh
    token to try.

    If PostgreSQL does not respond within ``timeout`` seconds, that is an `AuthError`, and an `OAuth` serves the token
    in hand while it is valid. A worker's clock may be wrong: what counts is how long a token lives by the server's.
    """

    def __init__(
        self,
        postgres: str | Pool,
        name: str,
        *,
        key: str | bytes | Sequence[str | bytes] | None = None,
        table: str = "signing_tokens",
        grace: float = 45.0,
        timeout: float = 2.0,
    ) -> None:
        self._sealer = Sealer(key, owner="PostgresTokenStore")
        # Variables are shown in some tracebacks.
        del key
        _checks.text("PostgresTokenStore", "name", name)
        if "\0" in name:
            raise ConfigurationError(f"PostgresTokenStore: name must have no null characters, not {name!r}")
        self.name = name
        self._database = Database(
            postgres, table, _TABLE, owner="PostgresTokenStore", timeout=timeout, failure=AuthError
        )
        del postgres
        _checks.seconds("PostgresTokenStore", "grace", grace)
        self._grace = timedelta(seconds=grace)
        # One waits for the row at a time, so that the others need no connection for it.
        self._turn = asyncio.Lock()
        self._finishing: _Held | None = None

    def __repr__(self) -> str:
        return f"PostgresTokenStore({self._database.place!r}, {self.name!r})"

    @property
    def sql(self) -> str:
        """The statement that makes the table."""
        return self._database.sql

    async def create_table(self) -> None:
        """Make the table unless it is there; any number of workers may do so at once."""
        await self._database.run(self._database.look)

    async def load(self) -> Token | None:
        held = self._held()
        if held is None or held.saving is not None:
            return self._token(await self._database.run(self._read))
        try:
            async with asyncio.timeout(self._database.timeout):
                row = await self._over(held, self._read)
            held.version = row["version"]
        except (*PASSING, *FINAL) as error:
            problem = self._database.words(error)
        else:
            return self._token(row)
        raise AuthError(f"{self!r}: the connection that held the lock is lost: {problem}")

    async def save(self, token: Token) -> None:
        held = self._held()
        data = self._sealer.seal(token_to_json(token), self._place)
        if held is None:
            await self._database.run(partial(self._write, data))
            return
        if held.saving is not None:
            await self._done(held.saving)
        # A task of its own: it goes on when PostgreSQL is too slow for the caller.
        held.saving = asyncio.create_task(self._replace(held, data), name="signing_async token save")
        if not await self._done(held.saving):
            raise TokenSuperseded(f"{self!r} holds a newer token than the one that was to be replaced: that one stays")

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Held by one worker; waits for as long as others hold it."""
        before = _held_here.get()
        async with self._turn:
            await self._finished()
            held = _Held(self, f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}")
            try:
                await self._lock(held)
                _held_here.set((*before, held))
                yield
            finally:
                _held_here.set(before)
                held.over = True
                if held.saving is not None and not held.saving.done():
                    self._finishing = held
                else:
                    await carried_through(self._let_go(held))

    async def aclose(self) -> None:
        """Close the connections, but not a pool that was given; a save that waits for PostgreSQL is given its time."""
        held, self._finishing = self._finishing, None
        if held is not None:
            ending = held.unlocking or held.saving
            assert ending is not None
            await asyncio.wait([ending], timeout=self._database.timeout)
            if not ending.done():
                if held.unlocking is None:
                    log.error(
                        "%r is closed, and a refreshed token was never saved: its user may have to authorize", self
                    )
                ending.cancel()
                await asyncio.wait([ending])
            await held.kept.aclose()
        await self._database.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_database"):
            self._database.warn_if_open(self)

    # The lock

    def _held(self) -> _Held | None:
        """The lock that this task holds, or the one that started it."""
        return next((held for held in reversed(_held_here.get()) if held.store is self and not held.over), None)

    async def _lock(self, held: _Held) -> None:
        while True:
            async with AsyncExitStack() as kept:
                if await self._database.keep(partial(self._lock_row, held), kept):
                    held.kept, held.usable = kept.pop_all(), True
                    return
            await asyncio.sleep(_AGAIN)

    async def _lock_row(self, held: _Held, connection: Any) -> bool:
        """Lock the row in a transaction; False if another holds it for long, or may come back to it."""
        # It waits in PostgreSQL's queue for half of the time, and then joins it again.
        wait = int(self._database.timeout * 500)
        await connection.execute(self._sql(_ROWS), self.name)
        await connection.execute(f"BEGIN; SET LOCAL lock_timeout = {wait}")
        try:
            is_free = await connection.fetchval(self._sql(_QUEUE), self.name, held.name, self._grace)
            if is_free:
                held.announced = True
                await connection.execute(self._sql(_ANNOUNCE), self.name, held.name)
            else:
                await connection.execute(self._sql(_LOST), self.name)
        except asyncpg.LockNotAvailableError:
            is_free = False
        await connection.execute("COMMIT")
        if not is_free:
            return False
        await connection.execute(_HOLD)
        if not await connection.fetchval(self._sql(_LOCK), self.name, held.name):
            await connection.execute("COMMIT")
            return False
        held.connection, held.version = connection, (await self._read(connection))["version"]
        return True

    async def _over(self, held: _Held, work: Any) -> Any:
        """Do it over the connection that holds the lock; one that failed once is used no more."""
        if not held.usable:
            raise ConnectionError("it has failed before")
        held.usable = False
        try:
            result = await work(held.connection)
            held.usable = True
            return result
        finally:
            if not held.usable:
                drop(held.connection)

    async def _let_go(self, held: _Held) -> None:
        """Unlock the row. A mark that cannot be removed now is left to a task: until then no other worker refreshes."""
        if held.saving is None and held.usable:
            with contextlib.suppress(*PASSING, *FINAL):
                async with asyncio.timeout(self._database.timeout / 2):
                    await self._over(held, partial(self._unlock, held))
                    held.announced = False
        await held.kept.aclose()
        if held.saving is None and held.announced:
            held.unlocking = asyncio.create_task(self._unlock_later(held), name="signing_async token unlock")
            self._finishing = held

    async def _unlock(self, held: _Held, connection: Any) -> None:
        await connection.execute(self._sql(_UNLOCK), self.name, held.name)
        if connection.is_in_transaction():
            await connection.execute("COMMIT")

    async def _unlock_later(self, held: _Held) -> None:
        while True:
            with contextlib.suppress(AuthError):
                return await self._database.run(partial(self._unlock, held))
            await asyncio.sleep(_SAVE_AGAIN)

    # What is kept

    async def _read(self, connection: Any) -> Any:
        return await connection.fetchrow(self._sql(_READ), self.name)

    async def _write(self, data: bytes, connection: Any) -> None:
        await connection.execute(self._sql(_SAVE), self.name, data, time.time())

    async def _replace(self, held: _Held, data: bytes) -> bool:
        """Whether it is in the row: False where that holds a newer one. It goes on until one or the other is so."""
        work = partial(self._replace_over, held.name, held.version, data)
        held.version += 1
        try:
            return bool(await self._over(held, work))
        except (*PASSING, *FINAL) as error:
            words = self._database.words(error)
            log.warning("%r: the lock is lost, a refreshed token is saved without it: %s", self, words)
        while True:
            with contextlib.suppress(AuthError):
                return await self._database.run(work)
            await asyncio.sleep(_SAVE_AGAIN)

    async def _replace_over(self, holder: str, version: int, data: bytes, connection: Any) -> bool:
        values = (self.name, data, time.time(), version, holder)
        saved = await connection.fetchval(self._sql(_REPLACE), *values)
        if connection.is_in_transaction():
            await connection.execute("COMMIT")
        # An earlier try may have been the one, and only its answer lost.
        return bool(saved or await connection.fetchval(self._sql(_IS_SAVED), self.name, data, version))

    async def _done(self, saving: asyncio.Task[bool]) -> bool:
        await asyncio.wait([saving], timeout=self._database.timeout)
        if not saving.done():
            raise AuthError(f"{self!r} does not answer; a refreshed token waits to be saved there")
        return saving.result()

    async def _finished(self) -> None:
        """Wait for a save, or the removal of a mark, that an earlier holder had to leave behind."""
        held = self._finishing
        if held is None:
            return
        if held.unlocking is not None:
            await asyncio.wait([held.unlocking], timeout=self._database.timeout)
            if not held.unlocking.done():
                raise AuthError(f"{self!r} does not answer; the lock waits to be released there")
        else:
            assert held.saving is not None
            await self._done(held.saving)
            await carried_through(self._let_go(held))
        self._finishing = None

    def _token(self, row: Any) -> Token | None:
        if row is None or row["token"] is None:
            return None
        try:
            token = token_from_json(self._sealer.unseal(row["token"], self._place))
        except ValueError as error:
            problem = str(error)
        else:
            return _by_this_clock(token, row["saver_ahead"], time.time() - row["now"])
        raise AuthError(f"{self!r}: what is kept there cannot be used, and was left as it is: {problem}")

    def _sql(self, statement: str) -> str:
        return statement.format(table=self._database.table)

    @property
    def _place(self) -> str:
        return f"{self._database.table}/{self.name}"


def _by_this_clock(token: Token, saver_ahead: float, this_ahead: float) -> Token:
    """A saver whose clock was wrong wrote down a wrong expiry; how far off that was by the same clock is right."""
    shift = this_ahead - saver_ahead
    if token.expires_at is None or abs(shift) < _CLOCKS_AGREE:
        return token
    return attrs.evolve(token, expires_at=token.expires_at + timedelta(seconds=shift))
