"""The journal of a dispatch in PostgreSQL: claims are leases by the server's clock."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Self

from ..dispatch.journal import Claim, ClaimLost, JournalError, JournalRecord, check_key, check_text
from .database import Database, Pool
from .leases import Leases

__all__ = ["PostgresJournal"]

log: logging.Logger = logging.getLogger("signing_async")

_TABLE = """\
CREATE TABLE IF NOT EXISTS {table} (
    key text PRIMARY KEY,
    state text,
    owner text,
    fence bigint NOT NULL,
    leased_until timestamptz,
    updated_at timestamptz
)"""
# A single statement: nothing is half done if the connection breaks. If its response is lost, the row names this journal
# as the owner, and the repeated claim succeeds. A journal never claims a key that it knows it holds.
_CLAIM = """\
WITH claimable AS (
    SELECT key FROM {table}
    WHERE key = $1 AND (leased_until IS NULL OR leased_until <= clock_timestamp() OR owner = $2)
    FOR UPDATE SKIP LOCKED
), updated AS (
    UPDATE {table} AS row SET owner = $2, fence = row.fence + 1, leased_until = clock_timestamp() + $3
    FROM claimable WHERE row.key = claimable.key
    RETURNING row.state, row.fence
), inserted AS (
    INSERT INTO {table} (key, owner, fence, leased_until)
    SELECT $1, $2, 1, clock_timestamp() + $3 WHERE NOT EXISTS (SELECT FROM {table} WHERE key = $1)
    ON CONFLICT (key) DO NOTHING
    RETURNING state, fence
)
SELECT * FROM updated UNION ALL SELECT * FROM inserted"""
_WRITE = """\
UPDATE {table} SET state = $4, updated_at = clock_timestamp(), leased_until = clock_timestamp() + $5
WHERE key = $1 AND fence = $2 AND owner = $3 RETURNING true"""
_RELEASE = """\
UPDATE {table} SET leased_until = NULL
WHERE key = $1 AND fence = $2 AND owner = $3 RETURNING true"""
_RELEASE_ALL = "UPDATE {table} SET leased_until = NULL WHERE owner = $1 AND leased_until IS NOT NULL"
_SELECT_PAGE = """\
SELECT key, state, updated_at FROM {table} WHERE key > $1 AND state IS NOT NULL ORDER BY key LIMIT 500"""
_RENEW = """\
UPDATE {table} AS row SET leased_until = clock_timestamp() + $3
FROM unnest($1::text[], $2::bigint[]) AS held (key, fence)
WHERE row.key = held.key AND row.fence = held.fence AND row.leased_until IS NOT NULL
RETURNING row.key"""


class PostgresJournal:
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
        self, postgres: str | Pool, *, table: str = "signing_packages", lease: float = 30.0, timeout: float = 2.0
    ) -> None:
        self._database = Database(postgres, table, _TABLE, timeout=timeout, failure=JournalError)
        del postgres  # some tools show the variables of a traceback
        self._leases = Leases(self._database, _RENEW, lease, owner=repr(self), noun="package")
        self._id = secrets.token_hex(8)

    def __repr__(self) -> str:
        return f"PostgresJournal({self._database.address!r})"

    @property
    def sql(self) -> str:
        """The statement that creates the table."""
        return self._database.sql

    async def create_table(self) -> None:
        """Create the table unless it exists; any number of workers may do so at the same time."""
        await self._database.create_table()

    async def claim(self, key: str) -> Claim | None:
        check_key(key)
        if key in self._leases.held:
            return None
        self._leases.held[key] = None
        return await self._leases.claim(self._claim(key), self._release_unwanted)

    async def write(self, claim: Claim, state: str) -> None:
        check_text("state", state)
        self._check_held(claim)
        await self._update(_WRITE, claim, state, self._leases.duration)

    async def release(self, claim: Claim) -> None:
        self._check_held(claim)
        # If the release fails, the lease is not renewed and expires.
        del self._leases.held[claim.key]
        await self._update(_RELEASE, claim)

    async def records(self) -> AsyncIterator[JournalRecord]:
        key = ""
        while rows := await self._database.run(partial(self._select_page, after=key)):
            for key, state, updated_at in rows:
                yield JournalRecord(key, state, updated_at)

    async def aclose(self) -> None:
        """Release all claims and close the connections, except a given pool."""
        await self._leases.stop()
        try:
            if self._leases.held:
                await self._database.run(self._release_all)
        except JournalError as error:
            log.warning("%r: the remaining claims end when their lease expires: %s", self, error)
        finally:
            self._leases.held.clear()
            await self._database.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_database"):
            self._database.warn_if_open(self)

    # Claims

    async def _claim(self, key: str) -> Claim | None:
        claim = None
        try:
            claim = await self._database.run(lambda connection: self._insert_claim(connection, key))
        finally:
            if claim is None:
                del self._leases.held[key]
        if claim is not None:
            self._leases.add(key, claim.fence)
        return claim

    async def _select_page(self, connection: Any, after: str) -> Any:
        return await connection.fetch(self._database.render(_SELECT_PAGE), after)

    async def _release_unwanted(self, claim: Claim | None) -> None:
        """Release a claim whose caller was cancelled."""
        if claim is not None:
            # If this fails, the lease expires.
            with contextlib.suppress(JournalError, ClaimLost):
                await self.release(claim)

    async def _insert_claim(self, connection: Any, key: str) -> Claim | None:
        row = await connection.fetchrow(self._database.render(_CLAIM), key, self._owner, self._leases.duration)
        return None if row is None else Claim(key, row["state"], row["fence"])

    def _check_held(self, claim: Claim) -> None:
        if self._leases.held.get(claim.key) != claim.fence:
            raise ClaimLost(claim.key)

    async def _update(self, statement: str, claim: Claim, *values: object) -> None:
        async def update(connection: Any) -> Any:
            arguments = (claim.key, claim.fence, self._owner, *values)
            return await connection.fetchval(self._database.render(statement), *arguments)

        if not await self._database.run(update):
            raise ClaimLost(claim.key)

    async def _release_all(self, connection: Any) -> None:
        await connection.execute(self._database.render(_RELEASE_ALL), self._owner)

    @property
    def _owner(self) -> str:
        # The process id tells a forked child from its parent.
        return f"{socket.gethostname()}:{os.getpid()}:{self._id}"
