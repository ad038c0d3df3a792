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

from .. import checks
from ..encryption import Sealer
from ..errors import AuthError, ConfigurationError, TokenSuperseded
from ..models import Token
from ..token_stores import carried_through, token_from_json, token_to_json
from .database import FINAL, PASSING, Database, Pool, drop

__all__ = ["PostgresTokenStore"]

log: logging.Logger = logging.getLogger("signing_async")

_AGAIN = 0.03
_SAVE_AGAIN = 0.1
# What may pass between a look at one clock and a look at the other.
_CLOCKS_AGREE = 5.0
# For so long nobody takes the place of a refresher whose connection is lost.
_IN_DOUBT = timedelta(seconds=5)

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
    PRIMARY KEY (name, part)
)"""
_ROWS = "INSERT INTO {table} (name, part) VALUES ($1, 'token'), ($1, 'lock') ON CONFLICT DO NOTHING"
# A refresher says so in the row, and then holds the row's lock. The lock is freed with its connection; what it said
# stays, so that one who has lost the connection in a refresh, and not his life, has the time to come back and save.
_QUEUE = """\
SELECT refresher IS NULL OR refresher = $2
    OR greatest(refreshing_since, pg_postmaster_start_time()) < clock_timestamp() - $3::interval
FROM {table} WHERE name = $1 AND part = 'lock' FOR UPDATE"""
_ANNOUNCE = """\
UPDATE {table} SET refresher = $2, refreshing_since = clock_timestamp() WHERE name = $1 AND part = 'lock'"""
# A holder whose machine is gone is found out by keep-alive in half a minute. One that is paused keeps the lock: it may
# have used the refresh token already.
_HOLD = """\
BEGIN; SET LOCAL idle_in_transaction_session_timeout = 0;
SET LOCAL tcp_keepalives_idle = 10; SET LOCAL tcp_keepalives_interval = 5; SET LOCAL tcp_keepalives_count = 4"""
_LOCK = "SELECT true FROM {table} WHERE name = $1 AND part = 'lock' AND refresher = $2 FOR UPDATE"
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
    connection: Any
    kept: AsyncExitStack
    """Gives the connection back."""
    version: int
    """That of the token which is to be replaced."""
    usable: bool = True
    saving: asyncio.Task[bool] | None = None
    over: bool = False


_held_here: ContextVar[tuple[_Held, ...]] = ContextVar("signing_async_held_rows", default=())


class PostgresTokenStore:
    """Keeps a user's token in a row of a table, for any number of workers on any number of machines. ::

        async with PostgresTokenStore("postgresql://app:...@db.example.com/app", "tenant-7/user-42") as store:
            oauth = OAuth(base_url, client_id=..., client_secret=..., redirect_uri=..., store=store)

    ``name`` says whose token it is. With a ``key`` it is encrypted at rest: 32 bytes or their base64, or several, of
    which the first encrypts and all are tried. Give many tenants' stores one pool: a refresh keeps one connection of it
    for as long as it takes, and the others wait for theirs.

    The lock is the row's, from the reading to the save, which ends it. It is freed when its holder's connection is
    gone; a holder that is paused keeps it, since it may have used the refresh token. Should the connection be lost in
    a refresh, the token is saved over another within seconds, before anybody else begins a refresh, and never over a
    newer one (`TokenSuperseded`). One that was refreshed and cannot be saved is saved as soon as PostgreSQL is back.

    Where PostgreSQL does not answer within ``timeout`` seconds, that is an `AuthError`, and an `OAuth` serves the token
    in hand while it is valid. A worker's clock may be wrong: what counts is how long a token lives by the server's.
    """

    def __init__(
        self,
        postgres: str | Pool,
        name: str,
        *,
        key: str | bytes | Sequence[str | bytes] | None = None,
        table: str = "signing_tokens",
        timeout: float = 2.0,
    ) -> None:
        self._sealer = Sealer(key, owner="PostgresTokenStore")
        # Variables are shown in some tracebacks.
        del key
        checks.text("PostgresTokenStore", "name", name)
        if "\0" in name:
            raise ConfigurationError(f"PostgresTokenStore: name must have no null characters, not {name!r}")
        self.name = name
        self._database = Database(
            postgres, table, _TABLE, owner="PostgresTokenStore", timeout=timeout, failure=AuthError
        )
        del postgres
        self._id = secrets.token_hex(8)
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
            held = await self._locked()
            _held_here.set((*before, held))
            try:
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
        if held is not None and held.saving is not None:
            await asyncio.wait([held.saving], timeout=self._database.timeout)
            if not held.saving.done():
                log.error("%r is closed, and a refreshed token was never saved: its user may have to authorize", self)
                held.saving.cancel()
                await asyncio.wait([held.saving])
            await self._let_go(held)
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

    async def _locked(self) -> _Held:
        while True:
            async with AsyncExitStack() as used:
                kept = await used.enter_async_context(AsyncExitStack())
                held = await self._database.keep(partial(self._lock_row, kept), kept)
                if held is not None:
                    used.pop_all()
                    return held
            await asyncio.sleep(_AGAIN)

    async def _lock_row(self, kept: AsyncExitStack, connection: Any) -> _Held | None:
        """The row, locked in a transaction; None if another holds it for long, or has only just lost it."""
        # It waits in PostgreSQL's queue for half of the time, and then joins it again.
        wait = int(self._database.timeout * 500)
        await connection.execute(self._sql(_ROWS), self.name)
        await connection.execute(f"BEGIN; SET LOCAL lock_timeout = {wait}")
        try:
            is_free = await connection.fetchval(self._sql(_QUEUE), self.name, self._me, _IN_DOUBT)
        except asyncpg.LockNotAvailableError:
            is_free = False
        if is_free:
            await connection.execute(self._sql(_ANNOUNCE), self.name, self._me)
        await connection.execute("COMMIT")
        if not is_free:
            return None
        await connection.execute(_HOLD)
        if not await connection.fetchval(self._sql(_LOCK), self.name, self._me):
            await connection.execute("COMMIT")
            return None
        row = await self._read(connection)
        return _Held(self, connection, kept, row["version"])

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
        if held.saving is None and held.usable:
            with contextlib.suppress(*PASSING, *FINAL):
                async with asyncio.timeout(self._database.timeout / 2):
                    await self._over(held, self._unlock)
        await held.kept.aclose()

    async def _unlock(self, connection: Any) -> None:
        await connection.execute(self._sql(_UNLOCK), self.name, self._me)
        await connection.execute("COMMIT")

    # What is kept

    async def _read(self, connection: Any) -> Any:
        return await connection.fetchrow(self._sql(_READ), self.name)

    async def _write(self, data: bytes, connection: Any) -> None:
        await connection.execute(self._sql(_SAVE), self.name, data, time.time())

    async def _replace(self, held: _Held, data: bytes) -> bool:
        """Whether it is in the row: False where that holds a newer one. It goes on until one or the other is so."""
        work = partial(self._replace_over, held.version, data)
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

    async def _replace_over(self, version: int, data: bytes, connection: Any) -> bool:
        values = (self.name, data, time.time(), version, self._me)
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
        """Wait for a save that an earlier holder had to leave behind."""
        if self._finishing is not None and self._finishing.saving is not None:
            await self._done(self._finishing.saving)
            held, self._finishing = self._finishing, None
            await carried_through(self._let_go(held))

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
    def _me(self) -> str:
        # After a fork there are two.
        return f"{socket.gethostname()}:{os.getpid()}:{self._id}"

    @property
    def _place(self) -> str:
        return f"{self._database.table}/{self.name}"


def _by_this_clock(token: Token, saver_ahead: float, this_ahead: float) -> Token:
    """A saver whose clock was wrong wrote down a wrong expiry; how far off that was by the same clock is right."""
    shift = this_ahead - saver_ahead
    if token.expires_at is None or abs(shift) < _CLOCKS_AGREE:
        return token
    return attrs.evolve(token, expires_at=token.expires_at + timedelta(seconds=shift))
