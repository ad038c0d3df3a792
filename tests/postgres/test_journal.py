"""The journal in PostgreSQL: leases by the server's clock, killed and paused runs, and outages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from multiprocessing.connection import Connection

import pytest

from signing_async import ClaimLost
from signing_async.postgres import PostgresJournal
from tests.postgres.processes import forked
from tests.postgres.server import PASSWORD, PostgresServer
from tests.storage.leases import claimed, soon_claimed


@contextlib.asynccontextmanager
async def journals(dsn: str) -> AsyncIterator[tuple[PostgresJournal, PostgresJournal]]:
    """Open the journals of two runs, with short leases and timeouts, in which no table need be created."""
    async with PostgresJournal(dsn, timeout=10) as creating:
        await creating.create_table()
    async with PostgresJournal(dsn, lease=3, timeout=1) as one, PostgresJournal(dsn, lease=3, timeout=1) as two:
        yield one, two


async def leased_until(postgres: PostgresServer, dsn: str, key: str) -> datetime:
    """Return the end of a package's lease, by the server's clock."""
    schema = dsn.rpartition("=")[2]
    (row,) = await postgres.execute(f"SELECT leased_until FROM {schema}.signing_packages WHERE key = '{key}'")
    until: datetime = row["leased_until"]
    return until


async def test_lease_is_renewed_until_the_claim_is_released(postgres: PostgresServer, dsn: str) -> None:
    async with journals(dsn) as (one, two):
        claims = {key: await claimed(one, key) for key in ("a", "b")}
        before = {key: await leased_until(postgres, dsn, key) for key in claims}
        async with asyncio.timeout(60):
            for key in claims:
                while await leased_until(postgres, dsn, key) <= before[key]:
                    await asyncio.sleep(0.05)
        for key, claim in claims.items():
            assert await two.claim(key) is None
            await one.release(claim)
            await claimed(two, key)


async def claim_and_write(dsn: str, pipe: Connection) -> None:
    """Claim a package, and write its state twice."""
    async with PostgresJournal(dsn, lease=1.5, timeout=0.5) as journal:
        claim = await claimed(journal, "package")
        await journal.write(claim, '{"status": "draft"}')
        pipe.send("written")
        await asyncio.to_thread(pipe.recv)
        try:
            await journal.write(claim, "late")
        except ClaimLost:
            pipe.send("lost")


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
async def test_paused_run_is_taken_over_when_its_lease_expires_and_cannot_write_afterwards(
    postgres: PostgresServer, dsn: str
) -> None:
    """Its last journal entry is kept."""
    async with journals(dsn) as (one, _):
        with forked(claim_and_write, dsn) as run:
            await run.says("written")
            os.kill(run.pid, signal.SIGSTOP)
            lease_ends = await leased_until(postgres, dsn, "package")
            claim = await soon_claimed(one, "package")
            assert await leased_until(postgres, dsn, "package") >= lease_ends + timedelta(seconds=1.5)
            assert (claim.state, claim.fence) == ('{"status": "draft"}', 2)
            await one.write(claim, "by another")
            os.kill(run.pid, signal.SIGCONT)
            run.proceed()
            await run.says("lost")
        await one.release(claim)
        assert (await claimed(one, "package")).state == "by another"


async def test_leases_outlast_a_restart_of_the_server(
    postgres: PostgresServer, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says that renewals failed. Closing during an outage leaves the claims to their leases."""
    async with journals(dsn) as (one, two):
        claim = await claimed(one, "a")
        closed = PostgresJournal(dsn, lease=3, timeout=1)
        await claimed(closed, "b")
        with postgres.down():
            await closed.aclose()
            while "1 leases could not be renewed" not in caplog.text:
                await asyncio.sleep(0.01)
        await one.write(claim, "{}")
        assert await two.claim("a") is None
        await soon_claimed(two, "b")
    assert "the remaining claims end when their lease expires: PostgreSQL at" in caplog.text
    assert PASSWORD not in caplog.text
