"""The token store in PostgreSQL: its lock, lost connections, wrong clocks, encryption, and PostgreSQL at fault."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg  # type: ignore[import-untyped]  # it is typed, and carries no marker that says so
import pytest
from aiohttp import web

from signing_async import AuthError, ConfigurationError, SigningError, Token, TokenStore
from signing_async.postgres import PostgresTokenStore
from signing_async.testing import FencedTokenStoreConformance, TokenStoreConformance
from tests.auth.oauth_servers import Answer, Received, Scripted, grants, oauth_for
from tests.auth.store_races import Race, race
from tests.postgres.server import PASSWORD, PostgresServer
from tests.redis.server import slow_way

ROOT = Path(__file__).parents[2]
OLD = Token("access-old", "refresh-old", datetime(2020, 1, 1, tzinfo=UTC))
NEW = Token("access-new", "refresh-new", datetime(2031, 5, 6, 7, 8, 9, 250000, UTC))
KEY = bytes(range(32))


@pytest.fixture
async def dsn(postgres: PostgresServer) -> str:
    """A schema of this test's own."""
    return await postgres.new_schema()


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[PostgresTokenStore]:
    """A store that does not wait long for PostgreSQL."""
    await make_table(dsn)
    async with PostgresTokenStore(dsn, "anna", timeout=0.5) as opened:
        yield opened


async def make_table(dsn: str) -> None:
    """Make the table, however long a busy machine takes."""
    async with PostgresTokenStore(dsn, "anna", timeout=60) as patient:
        await patient.create_table()


async def cut_off(postgres: PostgresServer) -> None:
    """Break every connection to the server."""
    clients = "FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    ended = {row["pid"] for row in await postgres.execute(f"SELECT pid, pg_terminate_backend(pid) {clients}")}
    while ended & {row["pid"] for row in await postgres.execute(f"SELECT pid {clients}")}:
        await asyncio.sleep(0.01)


class TestConformance(TokenStoreConformance, FencedTokenStoreConformance):
    """Every promise of a token store, and those of one whose lock can be lost."""

    @pytest.fixture
    async def open_store(self, dsn: str) -> AsyncIterator[Callable[[], TokenStore]]:
        async with contextlib.AsyncExitStack() as opened:
            stores: list[PostgresTokenStore] = []

            def open_store() -> TokenStore:
                stores.append(PostgresTokenStore(dsn, "anna", key=KEY, grace=0.2))
                opened.push_async_callback(stores[-1].aclose)
                return stores[-1]

            yield open_store

    @pytest.fixture
    def lapse(self, postgres: PostgresServer) -> Callable[[TokenStore], Any]:
        async def lapse(store: TokenStore) -> None:
            await cut_off(postgres)

        return lapse


def after(action: Callable[[], Any], answer: Answer) -> Answer:
    """Answers when something else has happened first."""

    async def both(request: web.Request, received: Received) -> web.StreamResponse:
        await action()
        return await answer(request, received)

    return both


def at_once(store: PostgresTokenStore) -> list[Callable[[], Any]]:
    """Everything that asks PostgreSQL."""

    async def locked() -> None:
        async with store.lock():
            pass

    return [store.load, lambda: store.save(NEW), locked, store.create_table]


# PostgreSQL at fault


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_no_call_waits_for_a_server_that_does_not_answer(
    how: str, postgres: PostgresServer, dsn: str, store: PostgresTokenStore
) -> None:
    """Each is an error that says so, names no secret, and keeps no other error; afterwards all is as it was."""
    await store.save(OLD)
    quick = PostgresTokenStore(dsn, "anna", timeout=0.2)
    with postgres.frozen() if how == "stopped" else postgres.down():
        for call in at_once(quick):
            async with asyncio.timeout(10):
                with pytest.raises(AuthError, match=r"^PostgreSQL at 127.0.0.1:\d+/postgres: .*, for 0.2 s$") as caught:
                    await call()
            assert caught.value.__context__ is caught.value.__cause__ is None
            assert PASSWORD not in "".join(traceback.format_exception(caught.value))
    await quick.aclose()
    assert await store.load() == OLD
    async with store.lock():
        await store.save(NEW)
    assert await store.load() == NEW


async def test_a_server_that_is_back_in_time_is_not_noticed(postgres: PostgresServer, dsn: str) -> None:
    """It was restarted while a call was under way, or between two."""
    async with PostgresTokenStore(dsn, "anna", timeout=30) as store:
        await store.save(OLD)
        with postgres.down():
            loading = asyncio.create_task(store.load())
            await asyncio.sleep(0.1)
            assert not loading.done()
        assert await loading == OLD
        postgres.restart()
        await store.save(NEW)
        assert await store.load() == NEW


async def test_the_token_in_hand_serves_while_postgresql_is_gone(postgres: PostgresServer, store: Any) -> None:
    """A refresh ahead of expiry that cannot have the lock is put off; the service is not asked."""
    soon = Token("access-soon", "refresh-soon", datetime.now(UTC) + timedelta(seconds=20))
    await store.save(soon)
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=store) as oauth:
        assert await oauth.token() == soon
        with postgres.frozen():
            assert await oauth.access_token() == "access-soon"
        assert not server.requests
        assert await oauth.refresh(rejected=soon) == await store.load()
        assert len(server.requests) == 1


async def test_a_slow_server(postgres: PostgresServer, dsn: str) -> None:
    """What takes long, and less than the time-out, works."""
    async with slow_way(postgres.port, 0.015) as way:
        slow = dsn.replace(f":{postgres.port}/", f":{urlsplit(way.url).port}/")
        async with PostgresTokenStore(slow, "anna") as store:
            await store.save(OLD)
            async with store.lock():
                assert await store.load() == OLD
                await store.save(NEW)
            assert await store.load() == NEW


@pytest.mark.parametrize("how", ["cut off", "restarted"])
async def test_a_connection_that_is_lost_in_a_refresh(
    how: str, postgres: PostgresServer, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The new token is saved over another, and nobody has used the old refresh token a second time meanwhile."""

    async def lose() -> None:
        if how == "cut off":
            await cut_off(postgres)
        else:
            postgres.restart()
        # Long enough for the other one to come in, if it could.
        await asyncio.sleep(0.3)

    async with Scripted(after(lose, grants("new")), grants("wrong")) as server, two_stores(dsn) as (one, two):
        await one.save(OLD)
        async with oauth_for(server.base_url, store=one) as first, oauth_for(server.base_url, store=two) as second:
            got = await asyncio.gather(first.access_token(), first_then(server, second.access_token))
        assert list(got) == ["access-new", "access-new"]
        assert len(server.requests) == 1
        kept = await two.load()
        assert kept is not None
        assert kept.access_token == "access-new"
    assert "the lock is lost, a refreshed token is saved without it" in caplog.text
    assert PASSWORD not in caplog.text


@contextlib.asynccontextmanager
async def two_stores(dsn: str) -> AsyncIterator[tuple[PostgresTokenStore, PostgresTokenStore]]:
    """Two workers' stores for one token."""
    await make_table(dsn)
    async with PostgresTokenStore(dsn, "anna", timeout=0.5) as one, PostgresTokenStore(dsn, "anna", timeout=0.5) as two:
        yield one, two


async def first_then(server: Scripted, call: Callable[[], Awaitable[str]]) -> str:
    """Call when the first request is under way."""
    while not server.requests:
        await asyncio.sleep(0.01)
    return await call()


async def test_a_server_that_is_stopped_in_a_refresh(postgres: PostgresServer, dsn: str) -> None:
    """The caller is told in time; the token is saved when it is woken, before anybody else can refresh."""
    frozen = contextlib.ExitStack()

    async def freeze() -> None:
        frozen.enter_context(postgres.frozen())

    async with Scripted(after(freeze, grants("new")), grants("wrong")) as server, two_stores(dsn) as (one, two):
        await one.save(OLD)
        async with oauth_for(server.base_url, store=one) as first, oauth_for(server.base_url, store=two) as second:
            with frozen:
                with pytest.raises(AuthError, match="does not answer; a refreshed token waits to be saved there"):
                    await first.access_token()
                with pytest.raises(AuthError, match="waits to be saved there"):
                    await first.access_token()
            assert await second.access_token() == "access-new"
            assert await first.access_token() == "access-new"
        assert len(server.requests) == 1


async def test_a_token_that_is_never_saved_is_told(
    postgres: PostgresServer, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that is closed while a save waits tries for its time, and then says what was lost."""
    store = PostgresTokenStore(dsn, "anna", timeout=0.5)
    await store.save(OLD)
    with contextlib.ExitStack() as fault:
        with pytest.raises(AuthError):
            await locked_save(store, NEW, before=lambda: fault.enter_context(postgres.down()))
        await store.aclose()
    assert "a refreshed token was never saved: its user may have to authorize" in caplog.text
    assert "refresh-new" not in caplog.text
    async with PostgresTokenStore(dsn, "anna") as again:
        assert await again.load() == OLD


async def test_a_save_that_waits_is_done_before_the_store_closes(postgres: PostgresServer, dsn: str) -> None:
    """If PostgreSQL is back by then."""
    store = PostgresTokenStore(dsn, "anna", timeout=0.5)
    await store.save(OLD)
    with contextlib.ExitStack() as fault, pytest.raises(AuthError):
        await locked_save(store, NEW, before=lambda: fault.enter_context(postgres.frozen()))
    await store.aclose()
    async with PostgresTokenStore(dsn, "anna") as again:
        assert await again.load() == NEW


async def locked_save(store: PostgresTokenStore, token: Token, *, before: Callable[[], Any] = dict) -> None:
    """As a refresh does it, after something has happened."""
    async with store.lock():
        before()
        await store.save(token)


async def test_a_lock_that_is_lost_is_noticed_before_the_refresh_token_is_used(
    postgres: PostgresServer, store: PostgresTokenStore
) -> None:
    """The reading inside the lock goes over the connection that holds it."""
    await store.save(OLD)
    async with store.lock():
        await cut_off(postgres)
        for _ in range(2):
            with pytest.raises(AuthError, match="the connection that held the lock is lost"):
                await store.load()
    async with store.lock():
        assert await store.load() == OLD


@pytest.mark.parametrize("how", ["cut off", "down"])
async def test_a_failed_refresh_leaves_the_lock_as_soon_as_postgresql_is_back(
    how: str, postgres: PostgresServer, dsn: str
) -> None:
    """The worker is alive and has no token to save: that it lost its connection costs the others no grace."""
    async with PostgresTokenStore(dsn, "anna") as one, PostgresTokenStore(dsn, "anna", timeout=10) as two:
        await two.save(OLD)
        with contextlib.ExitStack() as fault:
            with contextlib.suppress(ZeroDivisionError):
                async with one.lock():
                    await one.load()
                    await cut_off(postgres)
                    if how == "down":
                        fault.enter_context(postgres.down())
                    raise ZeroDivisionError
            if how == "down":
                with pytest.raises(AuthError, match="the lock waits to be released there"):
                    await locked_save(one, NEW)
        async with asyncio.timeout(20):
            for store in (two, one):
                async with store.lock():
                    assert await store.load() == OLD


async def test_a_store_is_closed_though_its_lock_cannot_be_released(
    postgres: PostgresServer, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The others then wait for the grace; no token is lost."""
    store = PostgresTokenStore(dsn, "anna", timeout=0.3)
    await store.save(OLD)
    with contextlib.ExitStack() as fault:
        with contextlib.suppress(ZeroDivisionError):
            async with store.lock():
                fault.enter_context(postgres.down())
                raise ZeroDivisionError
        await asyncio.wait_for(store.aclose(), 20)
    assert "never saved" not in caplog.text


async def test_saved_twice_in_one_lock(store: PostgresTokenStore) -> None:
    """The second one counts, and what a task of the holder's does belongs to the holder."""
    async with store.lock():
        await store.save(OLD)
        await asyncio.wait_for(asyncio.create_task(store.save(NEW)), 10)
        assert await store.load() == NEW
    assert await store.load() == NEW


async def test_one_at_a_time_also_without_a_grace(dsn: str) -> None:
    """Of those who announce themselves at the same moment one comes in, and the others wait for it."""
    inside = 0

    async def refresh(store: PostgresTokenStore) -> None:
        nonlocal inside
        async with store.lock():
            inside += 1
            assert inside == 1
            await store.load()
            await asyncio.sleep(0.001)
            inside -= 1

    async with AsyncExitStack() as opened:
        stores = [await opened.enter_async_context(PostgresTokenStore(dsn, "anna", grace=1e-6)) for _ in range(6)]
        await asyncio.gather(*(refresh(store) for store in stores for _ in range(8)))


@contextlib.asynccontextmanager
async def on_its_way(postgres: PostgresServer, dsn: str) -> AsyncIterator[tuple[PostgresTokenStore, asyncio.Task[Any]]]:
    """A worker that has announced its refresh over a slow network, and what it is doing."""
    async with slow_way(postgres.port, 0.2) as way:
        far = dsn.replace(f":{postgres.port}/", f":{urlsplit(way.url).port}/")
        async with PostgresTokenStore(far, "anna", timeout=10) as slow:
            await slow.save(OLD)
            saving = asyncio.create_task(locked_save(slow, NEW))
            while not await row(postgres, dsn, "refresher"):
                await asyncio.sleep(0.01)
            yield slow, saving


async def row(postgres: PostgresServer, dsn: str, column: str) -> Any:
    """What is in the row of the lock."""
    table = f"{dsn.rpartition('=')[2]}.signing_tokens"
    found = await postgres.execute(f"SELECT {column} FROM {table} WHERE part = 'lock'")
    return found[0][column] if found else None


async def test_a_worker_that_is_overtaken_on_its_way_to_the_lock_queues_again(
    postgres: PostgresServer, dsn: str
) -> None:
    """Another worker took it for lost, and its place: it begins again."""
    async with on_its_way(postgres, dsn) as (slow, saving), PostgresTokenStore(dsn, "anna", grace=1e-6) as quick:
        async with quick.lock():
            assert await quick.load() == OLD
        await asyncio.wait_for(saving, 30)
        assert await slow.load() == NEW


async def test_a_worker_that_is_taken_for_lost_on_its_way_to_the_lock_is_not_lost_in_it(
    postgres: PostgresServer, dsn: str
) -> None:
    """Should its connection break in the refresh, the grace begins then, and not before."""
    async with on_its_way(postgres, dsn) as (_, saving), PostgresTokenStore(dsn, "anna", grace=60) as other:
        waiting = asyncio.create_task(locked_save(other, OLD))
        while not await row(postgres, dsn, "lost_since"):
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
        taken: list[Any] = []
        while not saving.done():
            taken.append(await row(postgres, dsn, "lost_since"))
            await asyncio.sleep(0.01)
        assert taken[-1] is None


async def test_the_grace_begins_anew_when_the_server_is_started(postgres: PostgresServer, dsn: str) -> None:
    """A lock that was lost before the outage is not taken before its holder has had the time to come back."""
    schema = dsn.rpartition("=")[2]
    async with PostgresTokenStore(dsn, "anna", grace=2.0) as store:
        await store.save(OLD)
        async with store.lock():
            pass
        began = time.monotonic()
        postgres.restart()
        await postgres.execute(
            f"UPDATE {schema}.signing_tokens SET refresher = 'host:1:gone', refreshing_since = now() - interval '1 h',"
            " lost_since = now() - interval '1 h' WHERE part = 'lock'"
        )
        async with asyncio.timeout(30), store.lock():
            assert time.monotonic() - began > 1.9


# Other processes


@contextlib.contextmanager
def worker(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of `postgres_workers`, at the point where it says that it is ready."""
    command = [sys.executable, "-m", "tests.postgres.workers", *arguments]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    """Its next line."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], line: str = "") -> None:
    """A line for it."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


async def test_one_that_is_paused_keeps_the_lock(dsn: str) -> None:
    """It may have used the refresh token; what it got is saved when it is woken, and nobody was in between."""
    async with PostgresTokenStore(dsn, "anna", timeout=0.5, grace=0.01) as store:
        await paused(dsn, store)


async def paused(dsn: str, store: PostgresTokenStore) -> None:
    """Pause a process that holds the lock."""
    await store.save(OLD)
    with worker("hold", dsn) as process:
        assert await asyncio.to_thread(said, process) == "held"
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5), store.lock():
                pass
        assert await store.load() == OLD
        process.send_signal(signal.SIGCONT)
        tell(process)
        async with asyncio.timeout(30), store.lock():
            kept = await store.load()
            assert kept is not None
            assert kept.access_token == "late"


async def test_the_lock_of_a_killed_holder_is_taken_after_the_grace(dsn: str, store: PostgresTokenStore) -> None:
    """The holder might only have lost its connection: before the grace is over nobody takes its place."""
    await store.save(OLD)
    with worker("hold", dsn) as process:
        assert await asyncio.to_thread(said, process) == "held"
        process.kill()
        process.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.2), store.lock():
                pass
        async with (
            PostgresTokenStore(dsn, "anna", grace=0.1) as hasty,
            asyncio.timeout(30),
            hasty.lock(),
        ):
            assert await hasty.load() == OLD


async def test_eight_processes_on_one_token(dsn: str) -> None:
    """Tokens live a second, one clock is an hour ahead, one process is killed, one paused: no replay, and no error."""

    async def disturb(run: Race) -> None:
        await run.quiet()
        run.send(1, signal.SIGKILL)
        await run.quiet()
        run.send(2, signal.SIGSTOP)
        await asyncio.sleep(1.5)
        run.send(2, signal.SIGCONT)

    run = await race("postgres", dsn, every=0.08, wrong_clocks=(3600.0,), meanwhile=disturb)
    assert (run.refused, run.errors, sorted(run.done)) == (0, [], [12, *[50] * 6])
    assert len(run.refreshes) >= 3
    assert run.doubled == 0


async def test_eight_processes_while_the_server_restarts(postgres: PostgresServer, dsn: str) -> None:
    """It is stopped, killed and started again under them: no replay, and nobody is without a token."""

    async def disturb(run: Race) -> None:
        for hurt in (postgres.restart, postgres.kill):
            await run.quiet()
            hurt()
            await asyncio.sleep(0.2)
        postgres.start()
        await run.quiet()
        with postgres.frozen():
            await asyncio.sleep(0.5)

    run = await race("postgres", dsn, every=0.08, meanwhile=disturb)
    assert (run.refused, run.errors, run.done) == (0, [], [50] * 8)
    assert run.doubled == 0


# Clocks


@pytest.mark.parametrize("ahead", [3600.0, -3600.0, 1.0])
async def test_a_clock_that_is_wrong(ahead: float, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a token lives is carried over from clock to clock; where they agree its expiry comes back as it was."""
    clock = time.time
    expiry = datetime.now(UTC) + timedelta(minutes=5)
    async with two_stores(dsn) as (one, two):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: clock() + ahead)
            await one.save(Token("a", "r", expiry + timedelta(seconds=ahead)))
            mine = await one.load()
        theirs = await two.load()
        assert mine is not None
        assert theirs is not None
        assert mine.expires_at == expiry + timedelta(seconds=ahead)
        assert theirs.expires_at is not None
        assert abs((theirs.expires_at - expiry).total_seconds()) < (3 if abs(ahead) > 5 else 1.001)
        await one.save(Token("endless"))
        assert await two.load() == Token("endless")


# What is kept


async def test_what_is_encrypted_cannot_be_read_without_the_key(postgres: PostgresServer, dsn: str) -> None:
    """Nothing of it is in the table; another key or none is told, and a refresh does not write over it."""
    schema = dsn.rpartition("=")[2]
    async with PostgresTokenStore(dsn, "anna", key=KEY) as store:
        await store.save(NEW)
        assert await store.load() == NEW
    (row,) = await postgres.execute(f"SELECT token FROM {schema}.signing_tokens WHERE part = 'token'")
    assert b"new" not in row["token"]
    for key, said in ((None, "it is encrypted, and no key was given"), (b"o" * 32, "no key that was given opens it")):
        async with PostgresTokenStore(dsn, "anna", key=key) as other:
            with pytest.raises(AuthError, match=f"cannot be used, and was left as it is: {said}"):
                await other.load()
            async with Scripted(grants()) as server, oauth_for(server.base_url, store=other) as oauth:
                with pytest.raises(AuthError):
                    await oauth.refresh()
                assert not server.requests
    async with PostgresTokenStore(dsn, "anna", key=[b"o" * 32, KEY]) as store:
        assert await store.load() == NEW


async def test_tenants_are_kept_apart(postgres: PostgresServer, dsn: str) -> None:
    """Each name is a token of its own, and an encrypted one that is put in another's place is refused."""
    schema = dsn.rpartition("=")[2]
    async with PostgresTokenStore(dsn, "anna", key=KEY) as anna, PostgresTokenStore(dsn, "bert", key=KEY) as bert:
        await anna.save(OLD)
        await bert.save(NEW)
        async with anna.lock(), asyncio.timeout(10), bert.lock():
            assert (await anna.load(), await bert.load()) == (OLD, NEW)
        await postgres.execute(
            f"UPDATE {schema}.signing_tokens AS row SET token = (SELECT token FROM {schema}.signing_tokens"
            " WHERE name = 'anna' AND part = 'token') WHERE name = 'bert' AND part = 'token'"
        )
        with pytest.raises(AuthError, match="no key that was given opens it"):
            await bert.load()


async def test_a_row_that_holds_no_token(postgres: PostgresServer, dsn: str, store: PostgresTokenStore) -> None:
    """It is told, and neither shown nor written over."""
    await store.save(NEW)
    schema = dsn.rpartition("=")[2]
    await postgres.execute(f"UPDATE {schema}.signing_tokens SET token = 'broken-row'::bytea WHERE part = 'token'")
    with pytest.raises(AuthError, match="was left as it is: no token in it") as caught:
        await store.load()
    assert "broken-row" not in "".join(traceback.format_exception(caught.value))


# The table


async def test_many_who_start_at_once_make_the_table_once(dsn: str) -> None:
    """On first use or beforehand, whoever comes first."""
    async with AsyncExitStack() as opened:
        stores = [
            await opened.enter_async_context(PostgresTokenStore(dsn, f"t{n}", table="app_tokens")) for n in range(8)
        ]
        await asyncio.gather(*(s.save(NEW) if n % 2 else s.create_table() for n, s in enumerate(stores)))
        assert [await s.load() for s in stores] == [None, NEW] * 4
        assert stores[0].sql.startswith('CREATE TABLE IF NOT EXISTS "app_tokens" (')


async def test_a_role_that_may_not_make_tables(postgres: PostgresServer, dsn: str) -> None:
    """The error holds the SQL for somebody who may; where the table is, such a role can do all that is needed."""
    schema = dsn.rpartition("=")[2]
    role = f"limited_{schema}"
    await postgres.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{PASSWORD}'")
    await postgres.execute(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
    async with PostgresTokenStore(postgres.dsn(schema=schema, user=role), "anna") as store:
        with pytest.raises(AuthError, match="permission denied for schema") as caught:
            await store.load()
        assert str(caught.value).endswith(f"the table is made by:\n{store.sql}")
        async with PostgresTokenStore(dsn, "anna") as owner:
            await owner.create_table()
        with pytest.raises(AuthError, match=r"permission denied for table signing_tokens \(Insufficient"):
            await store.load()
        await postgres.execute(f"GRANT SELECT, INSERT ON {schema}.signing_tokens TO {role}")
        with pytest.raises(AuthError, match="permission denied for table signing_tokens"):
            await locked_save(store, NEW)
        await postgres.execute(f"GRANT UPDATE ON {schema}.signing_tokens TO {role}")
        async with store.lock():
            assert await store.load() is None
            await store.save(NEW)
        assert await store.load() == NEW


# Pools


async def test_a_pool_of_the_callers_is_used_and_left_open(dsn: str) -> None:
    """Also where it is smaller than the number of those who refresh: they take turns."""
    async with Scripted(grants()) as server, asyncpg.create_pool(dsn, min_size=0, max_size=2) as pool:
        async with AsyncExitStack() as opened:
            for number in range(6):
                store = await opened.enter_async_context(PostgresTokenStore(pool, f"tenant-{number}"))
                await store.save(OLD)
                oauth = await opened.enter_async_context(oauth_for(server.base_url, store=store))
                opened.push_async_callback(oauth.access_token)
        assert await pool.fetchval("SELECT count(*) FROM signing_tokens WHERE part = 'token' AND version = 2") == 6
        assert repr(store) == "PostgresTokenStore(\"the caller's pool\", 'tenant-5')"


async def test_who_refreshes_waits_for_a_connection_and_who_reads_is_told(dsn: str) -> None:
    """All connections of the pool are in use by others' refreshes, for longer than the time-out."""
    async with asyncpg.create_pool(dsn, min_size=0, max_size=1) as pool:
        one, two = (PostgresTokenStore(pool, name, timeout=0.5) for name in ("one", "two"))
        await two.save(NEW)
        async with one.lock():
            waiting = asyncio.create_task(locked_save(two, OLD))
            await asyncio.sleep(0.8)
            assert not waiting.done()
            with pytest.raises(AuthError, match=r"all connections of the pool are in use, for 0\.5 s"):
                await two.load()
        await waiting
        assert await two.load() == OLD


async def test_a_pool_that_the_caller_has_closed(dsn: str) -> None:
    """That is told at once."""
    async with asyncpg.create_pool(dsn, min_size=0, max_size=1) as pool:
        store = PostgresTokenStore(pool, "anna", timeout=30)
        await store.save(NEW)
    with pytest.raises(AuthError, match="pool is closed"):
        await store.load()


async def test_closed_and_forgotten(dsn: str) -> None:
    """A closed store says so; one that is forgotten open is a ResourceWarning."""
    store = PostgresTokenStore(dsn, "anna")
    await store.aclose()
    with pytest.raises(AuthError, match=r"^PostgresTokenStore: it is closed$"):
        await store.load()
    await store.aclose()
    forgotten = PostgresTokenStore(dsn, "anna")
    await forgotten.load()
    pool = forgotten._database._pool
    with pytest.warns(ResourceWarning, match=r"PostgresTokenStore\('127.0.0.1:\d+/postgres', 'anna'\) was not closed"):
        del forgotten
    pool.terminate()


async def test_closing_does_not_wait_for_a_server_that_is_stopped(postgres: PostgresServer, store: Any) -> None:
    """It lets go of its connections."""
    await store.load()
    with postgres.frozen():
        async with asyncio.timeout(10):
            await store.aclose()


# Settings and secrets


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"postgres": "mysql://app:geheim@db/app"}, "the DSN cannot be used: it must begin with postgresql://"),
        ({"postgres": "postgresql://app:ge#heim@db/app"}, "there is a # in it: in a password that is written %23"),
        ({"postgres": "postgresql://app:geheim@db:54x2/app"}, "its host and port cannot be read"),
        ({"postgres": "postgresql://app:geheim@[db/app"}, "it cannot be read as a URL"),
        ({"postgres": 5}, "postgres must be a DSN or an asyncpg.Pool, not 5"),
        ({"name": ""}, "name must be a text that is not empty, in whole characters, not ''"),
        ({"name": "half-\ud800"}, r"name must be a text that is not empty, in whole characters, not 'half-\ud800'"),
        ({"name": "a\0b"}, r"name must have no null characters, not 'a\x00b'"),
        ({"table": 'tokens"; DROP'}, "table must be a plain lower-case name"),
        ({"table": "a.b.c"}, "table must be a plain lower-case name"),
        ({"timeout": 0}, "timeout must be seconds above 0, not 0"),
        ({"timeout": True}, "timeout must be seconds above 0, not True"),
        ({"grace": -1}, "grace must be seconds above 0, not -1"),
        ({"key": b"geheim"}, "an encryption key must be 32 bytes, or their base64"),
    ],
)
def test_settings_that_cannot_work(arguments: dict[str, Any], said: str) -> None:
    """The error names the setting, and shows no secret."""
    known: dict[str, Any] = {"postgres": "postgresql://app:geheim@db.example.com/app", "name": "anna"}
    with pytest.raises(ConfigurationError) as caught:
        PostgresTokenStore(**known | arguments)
    assert str(caught.value).startswith("PostgresTokenStore: ")
    assert said in str(caught.value)
    assert "geheim" not in "".join(traceback.format_exception(caught.value))


async def test_a_password_that_is_wrong_is_not_shown(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in the error, its traceback, the log or the store's text; the reason is."""
    caplog.set_level(logging.DEBUG)
    wrong = postgres.dsn().replace(PASSWORD, "ge%2Fheim")
    async with PostgresTokenStore(f"{wrong}&password=ge%2Fheim", "anna") as store:
        with pytest.raises(AuthError, match='password authentication failed for user "signing"') as caught:
            await store.load()
        frames = [str(vars_of) for vars_of in local_variables(caught.value)]
        shown = [repr(store), caplog.text, *traceback.format_exception(caught.value), *frames]
    assert not [text for text in shown if "ge/heim" in text or "ge%2Fheim" in text]


def local_variables(error: SigningError) -> list[dict[str, Any]]:
    """Of every frame of the package that the error passed through: some tools show them."""
    found = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [{name: value for name, value in each.items() if name not in ("wrong", "postgres")} for each in found]


async def test_a_dsn_that_asyncpg_cannot_use(dsn: str) -> None:
    """Nothing of it is shown, since it is not known which part is the password."""
    async with PostgresTokenStore(dsn + "&sslmode=geheim", "anna") as store:
        with pytest.raises(AuthError, match=r": the DSN cannot be used$") as caught:
            await store.load()
    assert "geheim" not in str(caught.value)


def test_without_asyncpg() -> None:
    """The module says which extra it needs."""
    code = "import sys; sys.modules['asyncpg'] = None; import signing_async.postgres"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "signing_async.postgres needs asyncpg: pip install 'signing-async[postgres]'" in ran.stderr.splitlines()[-1]
