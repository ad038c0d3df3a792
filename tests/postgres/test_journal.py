"""The journal in PostgreSQL: leases by the server's clock, killed and paused runs, and outages."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import asyncpg
import pytest

from signing_async import JournalError, NewRecipient, PdfSource, SigningClient, SigningPackage
from signing_async.postgres import PostgresJournal
from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf
from tests.postgres.processes import next_line, worker, write_line
from tests.postgres.server import PASSWORD, PostgresServer
from tests.storage.journals import claimed, soon_claimed


@contextlib.asynccontextmanager
async def journals(dsn: str, **settings: Any) -> AsyncIterator[tuple[PostgresJournal, PostgresJournal]]:
    """Open the journals of two runs, with short leases and timeouts, in which no table need be created."""
    async with PostgresJournal(dsn, timeout=10) as creating:
        await creating.create_table()
    known = {"lease": 6, "timeout": 2} | settings
    async with PostgresJournal(dsn, **known) as one, PostgresJournal(dsn, **known) as two:
        yield one, two


def package(number: int) -> SigningPackage:
    """Return a package with a document and a recipient."""
    pdf = PdfSource(make_pdf(text=f"lease {number}"), f"lease-{number}.pdf")
    return SigningPackage(f"Lease {number}", "EN", [pdf], [NewRecipient(f"anna{number}@example.com")])


async def test_lease_is_renewed_until_the_claim_is_released(dsn: str) -> None:
    async with journals(dsn) as (one, two):
        claims = [await claimed(one, key) for key in ("a", "b")]
        for _ in range(5):
            await asyncio.sleep(0.5)
            assert await two.claim("a") is None
            assert await two.claim("b") is None
        await one.write(claims[0], "{}")
        for claim in claims:
            await one.release(claim)
        await claimed(two, "a")


async def leased_until(postgres: PostgresServer, dsn: str, key: str) -> datetime:
    """Return the end of a package's lease, by the server's clock."""
    schema = dsn.rpartition("=")[2]
    (row,) = await postgres.execute(f"SELECT leased_until FROM {schema}.signing_packages WHERE key = '{key}'")
    until: datetime = row["leased_until"]
    return until


async def test_killed_run_is_taken_over_when_its_lease_expires(postgres: PostgresServer, dsn: str) -> None:
    """Its last journal entry is kept."""
    async with journals(dsn) as (one, _):
        with worker("claim", dsn) as process:
            await next_line(process, "claimed 1")
            write_line(process, '{"status": "draft"}')
            await next_line(process, "written")
            process.kill()
        lease_ends = await leased_until(postgres, dsn, "package")
        claim = await soon_claimed(one, "package")
        assert await leased_until(postgres, dsn, "package") >= lease_ends + timedelta(seconds=1.5)
        assert (claim.state, claim.fence) == ('{"status": "draft"}', 2)


async def test_paused_run_cannot_write_after_its_package_was_taken_over(dsn: str) -> None:
    async with journals(dsn) as (one, _):
        with worker("claim", dsn) as process:
            await next_line(process, "claimed 1")
            process.send_signal(signal.SIGSTOP)
            claim = await soon_claimed(one, "package")
            await one.write(claim, "by another")
            process.send_signal(signal.SIGCONT)
            write_line(process, "late")
            await next_line(process, "ClaimLost")
        await one.release(claim)
        assert (await claimed(one, "package")).state == "by another"


async def test_leases_outlast_a_restart_of_the_server(
    postgres: PostgresServer, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says that renewals failed."""
    async with journals(dsn) as (one, two):
        claim = await claimed(one, "a")
        with postgres.down():
            while "1 leases could not be renewed" not in caplog.text:
                await asyncio.sleep(0.01)
        await one.write(claim, "{}")
        await asyncio.sleep(1.7)
        assert await two.claim("a") is None
    assert PASSWORD not in caplog.text


async def test_run_stops_and_sends_nothing_while_the_journal_is_unavailable(
    postgres: PostgresServer, dsn: str, sandbox: Sandbox, client: SigningClient
) -> None:
    """The next run sends the rest, each package once."""
    packages = [package(number) for number in range(6)]
    fault = contextlib.ExitStack()

    async def run(journal: PostgresJournal) -> None:
        number = 0
        async for result in client.dispatch_many(packages, journal, concurrency=2):
            assert result.error is None
            number += 1
            if number == 2:
                fault.enter_context(postgres.frozen())

    async with PostgresJournal(dsn, lease=6, timeout=2) as journal:
        with fault:
            with pytest.raises(JournalError, match="PostgreSQL at"):
                await run(journal)
            before = len(sandbox.requests)
            await asyncio.sleep(0.3)
            assert len(sandbox.requests) == before
    async with PostgresJournal(dsn, lease=6, timeout=2) as journal:
        results = [result async for result in client.dispatch_many(packages, journal)]
    assert [result.error for result in results] == [None] * 6
    sent = [record.path for record in sandbox.requests_of("signings.send") if (record.status or 500) < 300]
    assert len(set(sent)) == len(sent) == 6


async def test_closing_during_an_outage_leaves_claims_to_their_leases(
    postgres: PostgresServer, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    journal = PostgresJournal(dsn, lease=6, timeout=2)
    await claimed(journal, "a")
    with postgres.down():
        await journal.aclose()
    assert "the remaining claims end when their lease expires: PostgreSQL at" in caplog.text
    async with PostgresJournal(dsn) as other:
        await soon_claimed(other, "a")


async def test_renewal_that_is_late_does_not_take_a_released_claim_back(dsn: str) -> None:
    class SlowPool:
        """A pool that gives the next connection late, if told so."""

        def __init__(self, pool: Any) -> None:
            self.pool = pool
            self.is_slow, self.asked, self.proceed = False, asyncio.Event(), asyncio.Event()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.pool, name)

        async def acquire(self, **options: Any) -> Any:
            if self.is_slow:
                self.is_slow = False
                self.asked.set()
                await self.proceed.wait()
            return await self.pool.acquire(**options)

    async with asyncpg.create_pool(dsn, min_size=2, max_size=2) as pool, journals(dsn) as (_, other):
        slow: Any = SlowPool(pool)
        async with PostgresJournal(slow, lease=6, timeout=2) as journal, asyncio.timeout(60):
            for key in ("a", "b"):
                claim = await claimed(journal, key)
            slow.is_slow = True
            await slow.asked.wait()
            await journal.release(claim)
            slow.proceed.set()
            await asyncio.sleep(0.5)
            await claimed(other, "b")
