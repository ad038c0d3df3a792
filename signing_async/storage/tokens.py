"""A token in a row of PostgreSQL: refreshed by one worker at a time on any machine, never replaced by an older one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any, Self

import attrs

from .. import _checks
from .._encryption import Keys, Sealer, hide_keys
from .._secret import Secret, hide
from .._tasks import finish
from ..auth.token_stores import adjust_expiry, token_from_json, token_to_json
from ..auth.unfinished import Unfinished
from ..errors import AuthError, ConfigurationError, TokenSuperseded
from ..models import Token
from .postgres import FAILURES, Pool, PostgresEngine, terminate

__all__ = ["PostgresTokenStore"]

log: logging.Logger = logging.getLogger("signing_async")

_POLL = 0.1
_TABLE = """\
CREATE TABLE IF NOT EXISTS {table} (
    name text PRIMARY KEY,
    token bytea,
    version bigint NOT NULL DEFAULT 0,
    saved_at timestamptz,
    saver_clock double precision,
    refresher text,
    lost_since timestamptz
)"""
# Keep-alive detects a holder whose machine is gone within half a minute. A paused holder keeps the lock: it may have
# used the refresh token already.
_KEEP_ALIVE = "SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 4"
_LOCK = "SELECT pg_try_advisory_lock(hashtextextended($1, '{table}'::regclass::oid::bigint))"
_UNLOCK = "SELECT pg_advisory_unlock(hashtextextended($1, '{table}'::regclass::oid::bigint))"
# The advisory lock ends with its connection, the refresher's name stays: it may have used the refresh token, and may
# reconnect to save the new one.
_ANNOUNCE = """\
INSERT INTO {table} AS held (name, refresher) VALUES ($1, {owner})
ON CONFLICT (name) DO UPDATE SET refresher = {owner}, lost_since = NULL
WHERE held.refresher IS NULL OR held.refresher = {owner} OR held.lost_since < {now} - $2::interval
RETURNING version"""
_NOTE_LOSS = "UPDATE {table} SET lost_since = coalesce(lost_since, {now}) WHERE name = $1"
_WITHDRAW = "UPDATE {table} SET refresher = NULL WHERE name = $1 AND refresher = {owner}"
_READ = """\
SELECT token, version, saver_clock - extract(epoch FROM saved_at)::float8 AS saver_ahead,
    extract(epoch FROM {now})::float8 AS now, coalesce(refresher = {owner}, true) AS is_mine
FROM {table} WHERE name = $1"""
_SAVE = """\
INSERT INTO {table} (name, token, version, saved_at, saver_clock) VALUES ($1, $2, 1, {now}, $3)
ON CONFLICT (name) DO UPDATE SET token = excluded.token, version = {table}.version + 1,
    saved_at = excluded.saved_at, saver_clock = excluded.saver_clock"""
# An earlier attempt may have succeeded, and only its response was lost.
_REPLACE = """\
UPDATE {table} SET token = $2, version = $4::bigint + 1, saved_at = {now}, saver_clock = $3,
    refresher = nullif(refresher, {owner})
WHERE name = $1 AND (version = $4 OR version = $4 + 1 AND token = $2) RETURNING true"""


@attrs.define(eq=False)
class _Hold:
    """The lock as held by one worker: an advisory lock, for as long as the connection lasts."""

    store: PostgresTokenStore
    connection: Any = None
    """None if the connection is lost."""
    kept: AsyncExitStack = attrs.field(factory=AsyncExitStack)
    """Releases the connection."""
    version: int = 0
    """The version of the token to replace."""
    announced: bool = False
    """Whether the row may name this store as the refresher."""
    unsaved: Secret[bytes] | None = None
    """A token whose save failed."""
    ended: bool = False


# Inherited by the tasks that start inside the lock.
_holds: ContextVar[tuple[_Hold, ...]] = ContextVar("signing_async_postgres_holds", default=())


class PostgresTokenStore:
    """Stores a user's token in a row of a table, for any number of workers on any number of machines. ::

        async with PostgresTokenStore("postgresql://app:...@db.example.com/app", "tenant-7/user-42") as store:
            oauth = OAuth(base_url, client_id=..., client_secret=..., redirect_uri=..., store=store)

    ``name`` identifies the token. With a ``key`` (32 random bytes or their base64, or several) the token is encrypted:
    the first key encrypts, all keys decrypt. Give the stores of many tenants one pool: each refresh keeps one of its
    connections until it ends.

    A refresh holds a lock from the load to the save. A paused holder keeps the lock while its connection lasts. If the
    connection is lost, the new token is saved through another one as soon as PostgreSQL is back, and never overwrites
    a newer token (`TokenSuperseded`).

    No refresh token is used twice: if a holder loses its connection, no other worker refreshes until it has saved, or
    until ``grace`` seconds have passed since another worker found that the lock was lost.
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
        # One task at a time waits for the lock: the others need no connection.
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
        row = await self._run(hold, lambda connection: self._fetch(connection, _READ))
        if hold is not None and row is not None:
            if not row["is_mine"]:
                raise AuthError(f"{self!r}: the lock was lost before the token was loaded", transient=True)
            hold.version = row["version"]
        return self._decode(row)

    async def save(self, token: Token) -> None:
        hold = self._current_hold()
        data = self._sealer.seal(token_to_json(token), self._place)
        if hold is None:
            now = time.time()
            await self._database.perform(lambda connection: self._fetch(connection, _SAVE, data, now))
            return
        hold.unsaved, failure, saved = Secret(data), None, False
        try:
            saved = await self._run(hold, partial(self._replace, hold))
        except AuthError as error:
            failure = error
        if failure is not None:
            raise AuthError(f"{failure}, and a refreshed token is not saved yet", transient=failure.transient)
        if not saved:
            raise TokenSuperseded(f"{self!r} holds a newer token, which was not overwritten")

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Hold the lock: one worker at a time. Wait as long as another worker holds it."""
        before = _holds.get()
        async with self._local_lock:
            await self._unfinished.wait(repr(self))
            hold = _Hold(self)
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
        return next((hold for hold in _holds.get() if hold.store is self and not hold.ended), None)

    async def _acquire(self, hold: _Hold) -> None:
        while True:
            await self._database.perform(partial(self._try_lock, hold), hold.kept)
            if hold.connection is not None:
                return
            await hold.kept.aclose()
            await asyncio.sleep(_POLL)

    async def _try_lock(self, hold: _Hold, connection: Any) -> None:
        """Acquire the lock, unless another worker holds it, or may reconnect to save."""
        if not (await self._fetch(connection, _LOCK))[0]:
            return
        try:
            hold.announced = True
            row = await self._fetch(connection, _ANNOUNCE, self._grace)
            if row is None:
                hold.announced = False
                await self._fetch(connection, _NOTE_LOSS)
                await self._fetch(connection, _UNLOCK)
                return
            await connection.execute(_KEEP_ALIVE)
        except BaseException:
            terminate(connection)  # which releases the lock
            raise
        hold.connection, hold.version = connection, row["version"]

    async def _release(self, hold: _Hold) -> None:
        """Release the lock. If that fails, or a token is not saved yet, do it in the background."""
        if hold.connection is not None:
            try:
                async with asyncio.timeout(self._database.timeout / 2):
                    await self._withdraw(hold, hold.connection)
                    await self._fetch(hold.connection, _UNLOCK)
            except FAILURES:
                terminate(hold.connection)
        await hold.kept.aclose()
        if hold.announced:
            work = self._withdraw if hold.unsaved is None else self._replace
            self._unfinished.start(
                lambda: self._database.perform(partial(work, hold)), unsaved=hold.unsaved is not None
            )

    async def _withdraw(self, hold: _Hold, connection: Any) -> None:
        if hold.announced and hold.unsaved is None:
            await self._fetch(connection, _WITHDRAW)
            hold.announced = False

    # The token

    async def _run(self, hold: _Hold | None, work: Any) -> Any:
        """Return the result of ``work`` on the connection that holds the lock, or on another one if that is lost."""
        if hold is not None and hold.connection is not None:
            try:
                async with asyncio.timeout(self._database.timeout / 2):
                    return await work(hold.connection)
            except FAILURES as error:
                log.warning("%r: the connection that held the lock is lost: %s", self, self._database.describe(error))
                terminate(hold.connection)
                hold.connection = None
        return await self._database.perform(work)

    async def _fetch(self, connection: Any, statement: str, *parameters: Any) -> Any:
        return await connection.fetchrow(self._database.render(statement), self.name, *parameters)

    async def _replace(self, hold: _Hold, connection: Any) -> bool:
        """Replace the token; return False if a newer token is stored."""
        assert hold.unsaved is not None
        saved = await self._fetch(connection, _REPLACE, hold.unsaved.reveal(), time.time(), hold.version)
        if saved is None:
            await self._fetch(connection, _WITHDRAW)
        hold.version, hold.unsaved, hold.announced = hold.version + 1, None, False
        return saved is not None

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
