"""The journal in PostgreSQL: leases by the server's clock, killed and paused runs, and outages."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import struct
import traceback
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from typing import Any

import asyncpg
import attrs
import pytest

from signing_async import ConfigurationError, InvalidRequest, NewRecipient, PdfSource, SigningClient, SigningPackage
from signing_async.dispatch.journal import JournalError
from signing_async.postgres import PostgresJournal
from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf
from tests.postgres.server import PASSWORD, PostgresServer
from tests.postgres.test_tokens import read_line, worker, write_line
from tests.servers import talking
from tests.storage.journals import claimed, soon_claimed


@pytest.fixture
async def dsn(postgres: PostgresServer) -> str:
    """An empty schema."""
    return await postgres.new_schema()


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


async def test_package_whose_key_the_database_cannot_hold_fails_alone(
    sandbox: Sandbox, client: SigningClient, latin1: str
) -> None:
    keys = ["first", "Łódź", "third", "Malmö"]
    packages = [attrs.evolve(package(number), key=key) for number, key in enumerate(keys)]
    async with PostgresJournal(latin1, lease=60, timeout=20) as journal:
        results = [result async for result in client.dispatch_many(packages, journal, concurrency=1)]
    assert [result.package.key for result in results] == keys
    (error,) = (result.error for result in results if result.error is not None)
    assert error is results[1].error
    assert isinstance(error, JournalError)
    assert (error.transient, error.client_wide, error.effect) == (False, False, "none")
    assert len(sandbox.signings) == 3


# Leases


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
            assert await asyncio.to_thread(read_line, process) == "claimed 1"
            write_line(process, '{"status": "draft"}')
            assert await asyncio.to_thread(read_line, process) == "written"
            process.kill()
        lease_ends = await leased_until(postgres, dsn, "package")
        claim = await soon_claimed(one, "package")
        assert await leased_until(postgres, dsn, "package") >= lease_ends + timedelta(seconds=1.5)
        assert (claim.state, claim.fence) == ('{"status": "draft"}', 2)


async def test_paused_run_cannot_write_after_its_package_was_taken_over(dsn: str) -> None:
    async with journals(dsn) as (one, _):
        with worker("claim", dsn) as process:
            assert await asyncio.to_thread(read_line, process) == "claimed 1"
            process.send_signal(signal.SIGSTOP)
            claim = await soon_claimed(one, "package")
            await one.write(claim, "by another")
            process.send_signal(signal.SIGCONT)
            write_line(process, "late")
            assert await asyncio.to_thread(read_line, process) == "ClaimLost"
        await one.release(claim)
        assert (await claimed(one, "package")).state == "by another"


async def test_takeover_is_logged_and_other_leases_continue(
    postgres: PostgresServer, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    schema = dsn.rpartition("=")[2]
    async with journals(dsn) as (one, two):
        await claimed(one, "a")
        await claimed(one, "b")
        taken = None
        while taken is None:  # it may be renewed before it can be taken
            await postgres.execute(f"UPDATE {schema}.signing_packages SET leased_until = now() WHERE key = 'a'")
            taken = await two.claim("a")
        while "another worker has taken over package 'a'" not in caplog.text:
            await asyncio.sleep(0.01)
        lease_ends = await leased_until(postgres, dsn, "b")
        while await leased_until(postgres, dsn, "b") == lease_ends:
            await asyncio.sleep(0.01)


# Outages of PostgreSQL


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_every_operation_fails_in_time_during_an_outage(how: str, postgres: PostgresServer, dsn: str) -> None:
    """The error shows no secret; the claims are still held afterwards."""
    async with journals(dsn, lease=60, timeout=2) as (one, two):
        a, b = [await claimed(one, key) for key in "ab"]
        await one.write(a, "{}")
        with postgres.frozen() if how == "stopped" else postgres.down():
            calls: list[Callable[[], Any]] = [
                lambda: one.write(a, "late"),
                lambda: one.claim("c"),
                lambda: one.release(b),
                one.create_table,
            ]
            for call in calls:
                async with asyncio.timeout(10):
                    with pytest.raises(JournalError, match=r"^PostgreSQL at .*, for 2 s$") as caught:
                        await call()
                assert caught.value.__context__ is caught.value.__cause__ is None
                assert PASSWORD not in "".join(traceback.format_exception(caught.value))
        assert await two.claim("a") is None
        await one.write(a, "after")
        await one.release(a)
        assert (await claimed(two, "a")).state == "after"
        assert await one.claim("c") is not None


async def test_leases_outlast_a_restart_of_the_server(
    postgres: PostgresServer, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says that renewals failed."""
    async with journals(dsn) as (one, two):
        claim = await claimed(one, "a")
        with postgres.down():
            while "the leases of 1 packages could not be renewed" not in caplog.text:
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
        async for number, result in counted(client.dispatch_many(packages, journal, concurrency=2)):
            assert result.error is None
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


async def counted(results: Any) -> AsyncIterator[tuple[int, Any]]:
    """Number the results from 1."""
    number = 0
    async for result in results:
        number += 1
        yield number, result


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


async def test_closing_during_a_pending_claim_frees_the_package(dsn: str) -> None:
    async with journals(dsn, lease=60) as (one, two):
        await one.create_table()
        asking = asyncio.create_task(one.claim("a"))
        await asyncio.sleep(0)
        await one.aclose()
        await asyncio.wait([asking])
        await claimed(two, "a")


@pytest.mark.parametrize("text", ["a\0b", "\ud800", 5])
async def test_text_that_postgresql_cannot_store_is_refused(text: Any, dsn: str) -> None:
    async with journals(dsn) as (one, _):
        with pytest.raises(InvalidRequest, match=r"^key: must be a non-empty string without null characters, got "):
            await one.claim(text)
        claim = await claimed(one, "a")
        with pytest.raises(InvalidRequest, match=r"^state: must be a non-empty string without null characters, got "):
            await one.write(claim, text)
        await one.write(claim, "{}")


@pytest.mark.parametrize("name", ["IdleSessionTimeoutError", "PostgresIOError", "TransactionTimeoutError"])
async def test_error_that_ends_a_session_for_now_is_transient(name: str) -> None:
    class Failing:
        """A pool whose server sends the error."""

        async def acquire(self, *, timeout: float | None = None) -> Any:
            raise getattr(asyncpg, name)("it ends")

        def is_closing(self) -> bool:
            return False

        get_size = get_max_size = get_idle_size = lambda self: 1

    async with PostgresJournal(Failing(), timeout=0.1) as journal:
        with pytest.raises(JournalError, match=name) as caught:
            await journal.claim("lease")
    assert caught.value.transient


async def test_pool_that_is_not_open_is_a_permanent_failure(dsn: str) -> None:
    pool = asyncpg.create_pool(dsn, min_size=0)
    journal = PostgresJournal(pool, timeout=5)
    with pytest.raises(JournalError, match="pool is not initialized") as caught:
        await journal.claim("lease")
    assert not caught.value.transient
    async with pool:
        await journal.release(await claimed(journal, "lease"))
    with pytest.raises(JournalError, match="pool is closed") as caught:
        await journal.claim("other")
    assert not caught.value.transient


async def test_authentication_method_that_asyncpg_lacks_is_a_permanent_failure() -> None:
    async def request_crypt(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(int.from_bytes(await reader.readexactly(4)) - 4)
        writer.write(b"R" + struct.pack("!II", 8, 4))
        await reader.read()

    async with talking(request_crypt) as origin:
        dsn = origin.replace("http://", "postgresql://user@") + "/db?sslmode=disable"
        async with PostgresJournal(dsn, timeout=5) as journal:
            with pytest.raises(JournalError, match="unsupported authentication method") as caught:
                await journal.claim("lease")
    assert not caught.value.transient


async def test_error_of_a_closed_journal_is_not_transient(dsn: str) -> None:
    journal = PostgresJournal(dsn)
    await journal.aclose()
    with pytest.raises(JournalError, match="the connection is closed") as caught:
        await journal.claim("a")
    assert not caught.value.transient


# Pools, settings


async def test_given_pool_is_used_and_stays_open(dsn: str) -> None:
    """A small one is enough for many packages."""
    async with asyncpg.create_pool(dsn, min_size=0, max_size=2) as pool:
        async with PostgresJournal(pool, table="app_packages") as journal:

            async def work(key: str) -> None:
                claim = await claimed(journal, key)
                await journal.write(claim, key)
                await journal.release(claim)

            await asyncio.gather(*(work(f"k{number}") for number in range(30)))
            assert journal.sql.startswith('CREATE TABLE IF NOT EXISTS "app_packages" (')
            assert repr(journal) == "PostgresJournal('the given pool')"
        assert await pool.fetchval("SELECT count(*) FROM app_packages WHERE state = key") == 30


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lease": 0}, "lease: must be a number above 0, got 0"),
        ({"lease": 5, "timeout": 2}, "lease: must be at least three times the timeout of 2 s, got 5"),
        ({"timeout": float("nan")}, "timeout: must be a number above 0, got nan"),
        ({"postgres": "sqlite:///journal"}, "invalid DSN: must begin with postgresql://"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], words: str) -> None:
    known: dict[str, Any] = {"postgres": "postgresql://db/app"}
    with pytest.raises(ConfigurationError, match=f"^{words}"):
        PostgresJournal(**known | settings)


async def test_unclosed_journal_warns_when_collected(dsn: str) -> None:
    """The renewal of its leases does not keep it alive."""
    journal = PostgresJournal(dsn, lease=1.5, timeout=0.5)
    claim = await claimed(journal, "a")
    await journal.release(claim)
    pool, renewing = journal._engine._pool, journal._leases._renewing
    with pytest.warns(ResourceWarning, match="PostgresJournal.* was not closed"):
        del journal
    assert renewing is not None
    await asyncio.wait([renewing])
    pool.terminate()


async def test_cancelled_claim_that_fails_can_be_repeated(postgres: PostgresServer, dsn: str) -> None:
    async with journals(dsn) as (one, _):
        with postgres.down():
            asking = asyncio.create_task(one.claim("a"))
            await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.wait([asking])
            while one._leases._tasks:
                await asyncio.wait(tuple(one._leases._tasks))
        await claimed(one, "a")


async def test_cancelled_claim_of_a_package_that_another_run_holds_leaves_it_alone(dsn: str) -> None:
    async with journals(dsn) as (one, two):
        claim = await claimed(one, "a")
        asking = asyncio.create_task(two.claim("a"))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        while two._leases._tasks:
            await asyncio.wait(tuple(two._leases._tasks))
        await one.write(claim, "one")
        await one.release(claim)
        assert (await claimed(two, "a")).state == "one"


@pytest.mark.parametrize("in_transaction", [False, True])
async def test_operation_whose_connection_is_closed_is_repeated(dsn: str, in_transaction: bool) -> None:
    attempts: list[int] = []

    async def work(connection: Any) -> Any:
        attempts.append(1)
        async with connection.transaction() if in_transaction else contextlib.nullcontext():
            if len(attempts) == 1:
                connection.terminate()
            return await connection.fetchval("SELECT 7")

    async with PostgresJournal(dsn, timeout=5) as journal:
        assert await journal._engine.perform(work) == 7
    assert len(attempts) == 2
