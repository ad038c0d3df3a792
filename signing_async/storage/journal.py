"""The journals of dispatches and archives: one set of statements for SQLite and PostgreSQL."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import sqlite3
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self

from .._secret import Secret, hide
from ..dispatch.journal import Claim, ClaimLost, JournalRecord, check_key, check_text
from ..errors import ConfigurationError, JournalError
from .claims import Leases, claim_or_undo
from .engine import Engine
from .sqlite import FileFormat, SqliteEngine

if TYPE_CHECKING:
    from .postgres import Pool

__all__ = ["PostgresJournal", "SqliteJournal"]

log: logging.Logger = logging.getLogger("signing_async")

# {free}: whether the claim of the row `held` is free. {claimed}: the column that a claim fills, besides the owner,
# and its value. {extend}, {end}: the assignments that prolong and end a claim.
_CLAIM = """\
INSERT INTO {table} AS held (key, owner, fence, {claimed}) VALUES ($1, {owner}, 1, {claimed_value})
ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, fence = held.fence + 1{extend} WHERE {free}
RETURNING state, fence"""
# A stale or released claim matches no row.
_WRITE = """\
UPDATE {table} SET state = $3, updated_at = {now}{extend}
WHERE key = $1 AND fence = $2 AND owner = {owner} RETURNING key"""
_RELEASE = "UPDATE {table} SET {end} WHERE key = $1 AND fence = $2 AND owner = {owner} RETURNING key"
_RELEASE_ALL = "UPDATE {table} SET {end} WHERE owner = {owner}"
_RENEW = """\
UPDATE {table} SET leased_until = {claimed_value}
WHERE key = ANY($1::text[]) AND owner = {owner} AND leased_until IS NOT NULL"""
_PAGE = "SELECT key, state, updated_at FROM {table} WHERE key > $1 AND state IS NOT NULL ORDER BY key LIMIT 500"

_SQLITE = {
    "table": "packages",
    "owner": "owner()",
    "free": "held.owner IS NULL OR NOT owner_is_alive(held.owner)",
    "claimed": "updated_at",
    "claimed_value": "now()",
    "extend": "",
    "end": "owner = NULL",
    "now": "now()",
}
_SQLITE_TABLE = (
    "CREATE TABLE packages (key TEXT PRIMARY KEY, state TEXT, owner TEXT, fence INTEGER NOT NULL,"
    " updated_at REAL NOT NULL) WITHOUT ROWID"
)
_FORMAT = FileFormat("journal", "SqliteJournal", 0x5369676E, 1, (_SQLITE_TABLE,), JournalError)

# If the response to a claim is lost, the row names this journal as the owner, and the repeated claim succeeds: a
# journal never claims a key that it knows it holds.
_POSTGRES = {
    "free": "held.leased_until IS NULL OR held.leased_until <= clock_timestamp() OR held.owner = excluded.owner",
    "claimed": "leased_until",
    "end": "leased_until = NULL",
    "now": "clock_timestamp()",
}
_POSTGRES_TABLE = """\
CREATE TABLE IF NOT EXISTS {table} (
    key text PRIMARY KEY,
    state text,
    owner text,
    fence bigint NOT NULL,
    leased_until timestamptz,
    updated_at timestamptz
)"""
_HOST = re.sub(r"[^\w.-]", "", socket.gethostname(), flags=re.ASCII)


class _TableJournal:
    """A journal in a table, whichever engine runs its statements."""

    _engine: Engine
    _render: Callable[[str], str]
    """Returns a statement in the engine's dialect."""

    def __del__(self) -> None:
        if hasattr(self, "_engine"):  # the constructor may have raised
            self._engine.warn_if_open(self)

    async def claim(self, key: str) -> Claim | None:
        check_key(key)
        return await claim_or_undo(self._claim(key), self._undo)

    async def write(self, claim: Claim, state: str) -> None:
        check_text("state", state)
        if not await self._engine.run(self._render(_WRITE), claim.key, claim.fence, state):
            raise ClaimLost(claim.key)

    async def release(self, claim: Claim) -> None:
        if not await self._engine.run(self._render(_RELEASE), claim.key, claim.fence):
            raise ClaimLost(claim.key)

    async def records(self) -> AsyncIterator[JournalRecord]:
        key = ""
        while rows := await self._engine.run(self._render(_PAGE), key):
            for key, state, updated_at in rows:
                is_date = isinstance(updated_at, datetime)
                yield JournalRecord(key, state, updated_at if is_date else datetime.fromtimestamp(updated_at, UTC))

    async def aclose(self) -> None:
        """Finish what was requested, release all claims, and close the connections, except a given pool."""
        await self._engine.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _claim(self, key: str) -> Claim | None:
        rows = await self._engine.run(self._render(_CLAIM), key)
        return Claim(key, *rows[0]) if rows else None

    async def _undo(self, claim: Claim | None) -> None:
        if claim is not None:
            await self.release(claim)


class SqliteJournal(_TableJournal):
    """A journal in a SQLite file, shared by any number of runs and processes on one machine.

    A text is on disk when ``write`` returns (WAL, ``synchronous=FULL``); concurrent writes are committed together. Each
    journal object holds a lock on a file beside the journal for as long as it lives: a claim is free as soon as its
    process is dead, however it died, and never before. ::

        async with SqliteJournal("leases.journal") as journal:
            signing = await client.dispatch(package, journal)

    The file must be on a local disk. ``timeout`` is how many seconds to wait while another program locks the file.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 10.0) -> None:
        if sqlite3.sqlite_version_info < (3, 35):
            raise ConfigurationError(f"SqliteJournal needs SQLite 3.35 (RETURNING), found {sqlite3.sqlite_version}")
        self._engine = engine = SqliteEngine(path, _FORMAT, timeout=timeout)
        self._render = _for_sqlite
        self.path: Path = engine.path

    def __repr__(self) -> str:
        return f"SqliteJournal({str(self.path)!r})"


class PostgresJournal(_TableJournal):
    """A journal in a table, for runs on any number of machines. ::

        async with PostgresJournal("postgresql://app:...@db.example.com/app") as journal:
            async for result in client.dispatch_many(packages, journal):
                ...

    A claim is a lease of ``lease`` seconds by the server's clock, renewed while it is held. If a run dies, or is paused
    for longer than the lease, another run takes over its packages, and the first run's writes are refused. While the
    server is unavailable, every operation raises `JournalError`, so nothing is sent without a journal entry.
    ``postgres/README.md`` says what a failover may lose.
    """

    def __init__(
        self,
        postgres: str | Secret[str] | Pool,
        *,
        table: str = "signing_packages",
        lease: float = 30.0,
        timeout: float = 2.0,
    ) -> None:
        from .postgres import PostgresEngine  # needs asyncpg

        postgres = hide(postgres)
        engine = PostgresEngine(postgres, table, _POSTGRES_TABLE, timeout=timeout, failure=JournalError)
        name = f"PostgresJournal({engine.address!r})"
        leases = Leases(lambda keys: engine.run(render(_RENEW), keys), lease, timeout=engine.timeout, store=name)
        until = f"clock_timestamp() + interval '{leases.seconds:f} s'"
        parts = {**_POSTGRES, "claimed_value": until, "extend": f", leased_until = {until}"}
        token = secrets.token_hex(8)

        def render(statement: str) -> str:
            # The process id tells a forked child from its parent.
            return engine.render(statement, owner=f"'{_HOST}:{os.getpid()}:{token}'", **parts)

        self._name = name
        self._leases = leases
        self._render = render
        self._engine = self._postgres = engine

    def __repr__(self) -> str:
        return self._name

    @property
    def sql(self) -> str:
        """The statement that creates the table."""
        return self._postgres.sql

    async def create_table(self) -> None:
        """Create the table unless it exists; any number of workers may do so at the same time."""
        await self._postgres.create_table()

    async def write(self, claim: Claim, state: str) -> None:
        self._check_held(claim)
        await super().write(claim, state)

    async def release(self, claim: Claim) -> None:
        self._check_held(claim)
        # If the release fails, the lease is not renewed and expires.
        del self._leases.held[claim.key]
        await super().release(claim)

    async def aclose(self) -> None:
        await self._leases.stop()
        try:
            if self._leases.held:
                await self._engine.run(self._render(_RELEASE_ALL))
        except JournalError as error:
            log.warning("%r: the remaining claims end when their lease expires: %s", self, error)
        finally:
            self._leases.held.clear()
            await self._engine.aclose()

    async def _claim(self, key: str) -> Claim | None:
        held = self._leases.held
        if key in held:
            return None
        held[key] = 0
        try:
            claim = await super()._claim(key)
        except BaseException:
            del held[key]
            raise
        if claim is None:
            del held[key]
        else:
            held[key] = claim.fence
            self._leases.start()
        return claim

    def _check_held(self, claim: Claim) -> None:
        if self._leases.held.get(claim.key) != claim.fence:
            raise ClaimLost(claim.key)


def _for_sqlite(statement: str) -> str:
    return statement.format(**_SQLITE)
