"""The journals of dispatches and archives, in SQLite or PostgreSQL."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self

from .._secret import Secret, hide
from ..dispatch.journal import Claim, ClaimLost, JournalRecord, check_key, check_text
from ..errors import JournalError
from .claims import Leases, claim_or_undo
from .engine import Engine
from .sqlite import FileFormat, SqliteEngine

if TYPE_CHECKING:
    from .postgres import Pool

__all__ = ["PostgresJournal", "SqliteJournal"]

_TABLE = """\
CREATE TABLE IF NOT EXISTS {table} (
    key text PRIMARY KEY,
    state text,
    owner text,
    fence bigint NOT NULL,
    leased_until {time},
    updated_at {time}
) {clustered}"""
# If the response to a claim is lost, the row names this journal as the owner, and the repeated claim succeeds: a
# journal never claims a key that it knows it holds.
_CLAIM = """\
INSERT INTO {table} AS held (key, owner, fence, leased_until) VALUES ($1, {owner}, 1, {now} + $2 {seconds})
ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, fence = held.fence + 1, leased_until = excluded.leased_until
WHERE held.leased_until IS NULL OR held.owner = excluded.owner OR {dead}
RETURNING state, fence"""
# A claim that was released, or that another run has taken over, matches no row.
_WRITE = """\
UPDATE {table} SET state = $3, updated_at = {now}, leased_until = {now} + $4 {seconds}
WHERE key = $1 AND fence = $2 AND owner = {owner} AND leased_until IS NOT NULL RETURNING key"""
_RELEASE = "UPDATE {table} SET leased_until = NULL WHERE key = $1 AND fence = $2 AND owner = {owner} RETURNING key"
_RELEASE_ALL = "UPDATE {table} SET leased_until = NULL WHERE owner = {owner}"
_RENEW = """\
UPDATE {table} SET leased_until = {now} + $2 {seconds}
WHERE key IN (SELECT value FROM {each}($1{json})) AND owner = {owner} AND leased_until IS NOT NULL"""
_PAGE = "SELECT key, state, updated_at FROM {table} WHERE key > $1 AND state IS NOT NULL ORDER BY key LIMIT 500"
_FORMAT = FileFormat("journal", "SqliteJournal", 0x5369676E, 2, "packages", (_TABLE,), JournalError)


class _TableJournal:
    """A journal in a table, whichever engine runs its statements."""

    def __init__(self, engine: Engine, lease: float | None = None, timeout: float = 0.0) -> None:
        self._address = engine.address
        self._engine = engine
        self._leases = Leases(
            lambda keys, seconds: engine.run(_RENEW, json.dumps(keys), seconds),
            lease,
            timeout=timeout,
            store=repr(self),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._address!r})"

    def __del__(self) -> None:
        if hasattr(self, "_engine"):  # the constructor may have raised
            self._engine.warn_if_open(self)

    async def claim(self, key: str) -> Claim | None:
        check_key(key)
        return await claim_or_undo(self._claim(key), self._undo)

    async def write(self, claim: Claim, state: str) -> None:
        check_text("state", state)
        if not await self._engine.run(_WRITE, claim.key, claim.fence, state, self._leases.seconds):
            raise ClaimLost(claim.key)

    async def release(self, claim: Claim) -> None:
        held = self._leases.held
        if is_held := held.get(claim.key) == claim.fence:
            # If the release fails, the lease is not renewed and expires.
            del held[claim.key]
        released = await self._engine.run(_RELEASE, claim.key, claim.fence)
        if not (is_held and released):
            raise ClaimLost(claim.key)

    async def records(self) -> AsyncIterator[JournalRecord]:
        key = ""
        while rows := await self._engine.run(_PAGE, key):
            for key, state, updated_at in rows:
                is_date = isinstance(updated_at, datetime)
                yield JournalRecord(key, state, updated_at if is_date else datetime.fromtimestamp(updated_at, UTC))

    async def aclose(self) -> None:
        """Finish what was requested, release all claims, and close the connections, except a given pool."""
        try:
            await self._leases.end(lambda: self._engine.run(_RELEASE_ALL))
        finally:
            await self._engine.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _claim(self, key: str) -> Claim | None:
        held = self._leases.held
        if key in held:
            return None
        held[key] = 0  # pending
        claim = None
        try:
            rows = await self._engine.run(_CLAIM, key, self._leases.seconds)
            claim = Claim(key, *rows[0]) if rows else None
        finally:
            if claim is None:
                del held[key]
        if claim is not None:
            held[key] = claim.fence
            self._leases.start()
        return claim

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
        engine = SqliteEngine(path, _FORMAT, timeout=timeout)
        super().__init__(engine)
        self.path: Path = engine.path


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
        self._postgres = PostgresEngine(postgres, table, _TABLE, timeout=timeout, failure=JournalError)
        super().__init__(self._postgres, lease, timeout)

    @property
    def sql(self) -> str:
        """The statement that creates the table."""
        return self._postgres.sql

    async def create_table(self) -> None:
        """Create the table unless it exists; any number of workers may do so at the same time."""
        await self._postgres.create_table()
