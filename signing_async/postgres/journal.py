"""The journal of a dispatch in PostgreSQL: packages are taken by leases, by the server's clock alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import weakref
from collections.abc import Coroutine
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

from .. import _checks
from ..dispatch.journal import Claim, ClaimLost, JournalError
from ..errors import ConfigurationError
from .database import Database, Pool

__all__ = ["PostgresJournal"]

log: logging.Logger = logging.getLogger("signing_async")

T = TypeVar("T")

_TABLE = """\
CREATE TABLE IF NOT EXISTS {table} (
    key text PRIMARY KEY,
    state text,
    owner text,
    fence bigint NOT NULL,
    leased_until timestamptz,
    updated_at timestamptz
)"""
# One statement, so that nothing is half done where a connection breaks. An answer that was lost leaves a row with the
# claimant's own name: what it holds it does not ask for again.
_CLAIM = """\
WITH free AS (
    SELECT key FROM {table}
    WHERE key = $1 AND (leased_until IS NULL OR leased_until <= clock_timestamp() OR owner = $2)
    FOR UPDATE SKIP LOCKED
), taken AS (
    UPDATE {table} AS row SET owner = $2, fence = row.fence + 1, leased_until = clock_timestamp() + $3
    FROM free WHERE row.key = free.key
    RETURNING row.state, row.fence
), made AS (
    INSERT INTO {table} (key, owner, fence, leased_until)
    SELECT $1, $2, 1, clock_timestamp() + $3 WHERE NOT EXISTS (SELECT FROM {table} WHERE key = $1)
    ON CONFLICT (key) DO NOTHING
    RETURNING state, fence
)
SELECT * FROM taken UNION ALL SELECT * FROM made"""
_WRITE = """\
UPDATE {table} SET state = $4, updated_at = clock_timestamp(), leased_until = clock_timestamp() + $5
WHERE key = $1 AND fence = $2 AND owner = $3 RETURNING true"""
_RELEASE = """\
UPDATE {table} SET leased_until = NULL
WHERE key = $1 AND fence = $2 AND owner = $3 RETURNING true"""
_RELEASE_ALL = "UPDATE {table} SET leased_until = NULL WHERE owner = $1 AND leased_until IS NOT NULL"
_RENEW = """\
UPDATE {table} AS row SET leased_until = clock_timestamp() + $4
FROM unnest($1::text[], $2::bigint[]) AS held (key, fence)
WHERE row.key = held.key AND row.fence = held.fence AND row.owner = $3
RETURNING row.key"""


class PostgresJournal:
    """A journal in a table, for runs on any number of machines.

    ::

        async with PostgresJournal("postgresql://app:...@db.example.com/app") as journal:
            async for result in client.dispatch_many(packages, journal):
                ...

    A claim is a lease of ``lease`` seconds by the server's clock, renewed for as long as it is held. A run that dies,
    or that is paused for longer, is taken over from; what it still tries to write is refused. While the server is out
    of reach every step is a `JournalError`, so that nothing is sent which is not written down.

    A failover to a replica that lacks the last commits loses their packages, and the next run sends those again: a
    replica that may take over must be synchronous.
    """

    def __init__(
        self, postgres: str | Pool, *, table: str = "signing_packages", lease: float = 30.0, timeout: float = 2.0
    ) -> None:
        self._database = Database(
            postgres, table, _TABLE, owner="PostgresJournal", timeout=timeout, failure=JournalError
        )
        # Variables are shown in some tracebacks.
        del postgres
        _checks.seconds("PostgresJournal", "lease", lease)
        self._lease = lease
        if lease < 3 * timeout:
            raise ConfigurationError(
                f"PostgresJournal: lease must be at least three times the timeout of {timeout:g} s, not {lease!r}"
            )
        self._span = timedelta(seconds=lease)
        self._id = secrets.token_hex(8)
        self._claimed: dict[str, int | None] = {}
        """The fence of each key that is held; None while it is asked for."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._heart: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"PostgresJournal({self._database.place!r})"

    @property
    def sql(self) -> str:
        """The statement that makes the table."""
        return self._database.sql

    async def create_table(self) -> None:
        """Make the table unless it is there; any number of workers may do so at once."""
        await self._database.run(self._database.look)

    async def claim(self, key: str) -> Claim | None:
        if key in self._claimed:
            return None
        self._claimed[key] = None
        asking = self._in_background(self._taken(key))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(self._give_back)
            raise

    async def write(self, claim: Claim, state: str) -> None:
        self._check(claim)
        await self._change(_WRITE, claim, state, self._span)

    async def release(self, claim: Claim) -> None:
        self._check(claim)
        # Whatever comes of it: it is renewed no more, and so ends by itself.
        del self._claimed[claim.key]
        await self._change(_RELEASE, claim)

    async def aclose(self) -> None:
        """Let go of all claims, and close the connections; a pool of the caller's stays as it is."""
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.wait([self._heart])
            self._heart = None
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))
        try:
            if self._claimed:
                await self._database.run(self._release_all)
        except JournalError as error:
            log.warning("%r: the claims that are left end with their lease: %s", self, error)
        finally:
            self._claimed.clear()
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

    # Claims

    async def _taken(self, key: str) -> Claim | None:
        claim = None
        try:
            claim = await self._database.run(lambda connection: self._claim(connection, key))
        finally:
            if claim is None:
                del self._claimed[key]
        if claim is not None:
            self._claimed[key] = claim.fence
            self._beat()
        return claim

    def _give_back(self, asking: asyncio.Task[Claim | None]) -> None:
        """Nobody waits for this claim any more."""
        if not asking.cancelled() and asking.exception() is None and (claim := asking.result()) is not None:
            self._in_background(self._let_go(claim))

    async def _let_go(self, claim: Claim) -> None:
        # What cannot be let go of ends with its lease.
        with contextlib.suppress(JournalError, ClaimLost):
            await self.release(claim)

    def _in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name="signing_async claim")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _claim(self, connection: Any, key: str) -> Claim | None:
        row = await connection.fetchrow(self._sql(_CLAIM), key, self._me, self._span)
        return None if row is None else Claim(key, row["state"], row["fence"])

    def _check(self, claim: Claim) -> None:
        if self._claimed.get(claim.key) != claim.fence:
            raise ClaimLost(claim.key)

    async def _change(self, statement: str, claim: Claim, *values: object) -> None:
        async def change(connection: Any) -> bool:
            done: bool = await connection.fetchval(self._sql(statement), claim.key, claim.fence, self._me, *values)
            return done

        if not await self._database.run(change):
            raise ClaimLost(claim.key)

    async def _release_all(self, connection: Any) -> None:
        await connection.execute(self._sql(_RELEASE_ALL), self._me)

    def _sql(self, statement: str) -> str:
        return statement.format(table=self._database.table)

    @property
    def _me(self) -> str:
        # After a fork there are two.
        return f"{socket.gethostname()}:{os.getpid()}:{self._id}"

    # The heartbeat

    def _beat(self) -> None:
        if self._heart is None or self._heart.done():
            # It holds the journal weakly: one that is forgotten is not kept by it.
            self._heart = asyncio.create_task(_beating(weakref.ref(self), self._lease / 3), name="signing_async leases")

    async def _renew(self) -> bool:
        """Whether there is anything to renew."""
        held = {key: fence for key, fence in self._claimed.items() if fence is not None}
        if not held:
            return False
        try:
            kept = await self._database.run(lambda connection: self._renew_all(connection, held))
        except JournalError as error:
            log.warning("%r: the leases of %d packages could not be renewed: %s", self, len(held), error)
            return True
        for key in held.keys() - kept:
            log.warning("%r: another run has taken over package %r", self, key)
        return True

    async def _renew_all(self, connection: Any, held: dict[str, int]) -> set[str]:
        values = (list(held), list(held.values()), self._me, self._span)
        rows = await connection.fetch(self._sql(_RENEW), *values)
        return {row["key"] for row in rows}


async def _beating(journal: weakref.ref[PostgresJournal], interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        beating = journal()
        if beating is None or not await beating._renew():
            return
        del beating
