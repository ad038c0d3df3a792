"""The token store in PostgreSQL: its lock, lost connections, wrong clocks, encryption, and outages."""

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

import asyncpg
import pytest
from aiohttp import web

from signing_async import AuthError, ConfigurationError, SigningError, Token, TokenStore
from signing_async.postgres import PostgresTokenStore
from tests.auth.oauth_servers import Answer, Received, Scripted, grants, oauth_for
from tests.auth.store_races import Race, kill_outside_a_refresh, race
from tests.postgres.server import PASSWORD, PostgresServer
from tests.redis.server import slow_way
from tests.storage.token_stores import FencedTokenStoreConformance, TokenStoreConformance

ROOT = Path(__file__).parents[2]
OLD = Token("access-old", "refresh-old", datetime(2020, 1, 1, tzinfo=UTC))
NEW = Token("access-new", "refresh-new", datetime(2031, 5, 6, 7, 8, 9, 250000, UTC))
KEY = bytes(range(32))


@pytest.fixture
async def dsn(postgres: PostgresServer) -> str:
    """An empty schema."""
    return await postgres.new_schema()


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[PostgresTokenStore]:
    """A store with a short timeout, whose table exists."""
    await make_table(dsn)
    async with PostgresTokenStore(dsn, "anna", timeout=2) as opened:
        yield opened


async def make_table(dsn: str) -> None:
    """Create the table, however long a busy machine takes."""
    async with PostgresTokenStore(dsn, "anna", timeout=60) as patient:
        await patient.create_table()


async def cut_off(postgres: PostgresServer) -> None:
    """Break all connections to the server."""
    clients = "FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    ended = {row["pid"] for row in await postgres.execute(f"SELECT pid, pg_terminate_backend(pid) {clients}")}
    while ended & {row["pid"] for row in await postgres.execute(f"SELECT pid {clients}")}:
        await asyncio.sleep(0.01)


class TestConformance(TokenStoreConformance, FencedTokenStoreConformance):
    """The promises of a token store, and of one whose lock can be lost."""

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
    """Run the action, then respond."""

    async def both(request: web.Request, received: Received) -> web.StreamResponse:
        await action()
        return await answer(request, received)

    return both


def operations(store: PostgresTokenStore) -> list[Callable[[], Any]]:
    """Return every operation that needs PostgreSQL."""

    async def locked() -> None:
        async with store.lock():
            pass

    return [store.load, lambda: store.save(NEW), locked, store.create_table]


# Outages of PostgreSQL


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_every_operation_fails_in_time_during_an_outage(
    how: str, postgres: PostgresServer, dsn: str, store: PostgresTokenStore
) -> None:
    """The error shows no secret and keeps no other error."""
    await store.save(OLD)
    quick = PostgresTokenStore(dsn, "anna", timeout=0.2)
    with postgres.frozen() if how == "stopped" else postgres.down():
        for call in operations(quick):
            async with asyncio.timeout(10):
                with pytest.raises(AuthError, match=r"^PostgreSQL at 127.0.0.1:\d+/postgres: .*, for 0.2 s$") as caught:
                    await call()
            assert caught.value.__context__ is caught.value.__cause__ is None
            assert PASSWORD not in "".join(traceback.format_exception(caught.value))
            assert caught.value.transient
    await quick.aclose()
    assert await store.load() == OLD
    async with store.lock():
        await store.save(NEW)
    assert await store.load() == NEW


@pytest.mark.parametrize("how", ["cut off", "restarted"])
async def test_token_is_saved_over_another_connection_if_the_lock_is_lost(
    how: str, postgres: PostgresServer, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The old refresh token is not used a second time."""

    async def lose() -> None:
        if how == "cut off":
            await cut_off(postgres)
        else:
            postgres.restart()
        # Long enough for the other worker to refresh, if it could.
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
    assert "the lock is lost, saving the refreshed token without it" in caplog.text
    assert PASSWORD not in caplog.text


@contextlib.asynccontextmanager
async def two_stores(dsn: str) -> AsyncIterator[tuple[PostgresTokenStore, PostgresTokenStore]]:
    """Open the store of one token twice."""
    await make_table(dsn)
    async with PostgresTokenStore(dsn, "anna", timeout=5) as one, PostgresTokenStore(dsn, "anna", timeout=5) as two:
        yield one, two


async def first_then(server: Scripted, call: Callable[[], Awaitable[str]]) -> str:
    """Call while the first request is in progress."""
    while not server.requests:
        await asyncio.sleep(0.01)
    return await call()


async def test_token_is_saved_when_a_stopped_server_resumes(postgres: PostgresServer, dsn: str) -> None:
    """The caller gets an error in time, and no other worker refreshes before the save."""
    frozen = contextlib.ExitStack()

    async def freeze() -> None:
        frozen.enter_context(postgres.frozen())

    async with Scripted(after(freeze, grants("new")), grants("wrong")) as server, two_stores(dsn) as (one, two):
        await one.save(OLD)
        async with oauth_for(server.base_url, store=one) as first, oauth_for(server.base_url, store=two) as second:
            with frozen:
                with pytest.raises(AuthError, match="no response, and a refreshed token is not saved yet") as caught:
                    await first.access_token()
                assert caught.value.transient
                with pytest.raises(AuthError, match="is not saved yet"):
                    await first.access_token()
            assert await second.access_token() == "access-new"
            assert await first.access_token() == "access-new"
        assert len(server.requests) == 1


async def test_closing_with_an_unsaved_token_logs_an_error(
    postgres: PostgresServer, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = PostgresTokenStore(dsn, "anna", timeout=0.5)
    await store.save(OLD)
    with contextlib.ExitStack() as fault:
        with pytest.raises(AuthError):
            await locked_save(store, NEW, before=lambda: fault.enter_context(postgres.down()))
        await store.aclose()
    assert "before a refreshed token was saved: its user may have to authorize again" in caplog.text
    assert "refresh-new" not in caplog.text
    async with PostgresTokenStore(dsn, "anna") as again:
        assert await again.load() == OLD


async def test_closing_finishes_a_pending_save_if_the_server_is_back(postgres: PostgresServer, dsn: str) -> None:
    store = PostgresTokenStore(dsn, "anna", timeout=0.5)
    await store.save(OLD)
    with contextlib.ExitStack() as fault, pytest.raises(AuthError):
        await locked_save(store, NEW, before=lambda: fault.enter_context(postgres.frozen()))
    await store.aclose()
    async with PostgresTokenStore(dsn, "anna") as again:
        assert await again.load() == NEW


async def locked_save(store: PostgresTokenStore, token: Token, *, before: Callable[[], Any] = dict) -> None:
    """Save as a refresh does, after ``before`` was called."""
    async with store.lock():
        before()
        await store.save(token)


async def test_lock_lost_before_the_load_is_acquired_again(postgres: PostgresServer, dsn: str) -> None:
    """The refresh token was not used yet, so the worker queues again, and begins with a newer token."""
    async with PostgresTokenStore(dsn, "anna") as store, PostgresTokenStore(dsn, "anna", grace=1e-6) as other:
        await store.save(OLD)
        async with store.lock():
            await cut_off(postgres)
            assert await store.load() == OLD
            await cut_off(postgres)
            await locked_save(other, NEW)
            assert await store.load() == NEW
            await store.save(Token("access-newer"))
        assert await other.load() == Token("access-newer")


async def test_load_inside_a_lock_lost_in_an_outage_is_an_error(
    postgres: PostgresServer, store: PostgresTokenStore
) -> None:
    """A save inside it is made over another connection."""
    await store.save(OLD)
    async with store.lock():
        with postgres.down(), pytest.raises(AuthError, match="PostgreSQL at "):
            await store.load()
        with pytest.raises(AuthError, match="the connection that held the lock is lost") as caught:
            await store.load()
        assert caught.value.transient
        await store.save(NEW)
    assert await store.load() == NEW


@pytest.mark.parametrize("how", ["cut off", "down"])
async def test_lock_of_a_failed_refresh_is_released_as_soon_as_the_server_is_back(
    how: str, postgres: PostgresServer, dsn: str
) -> None:
    """No other worker waits for the grace."""
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
                with pytest.raises(AuthError, match="the lock is not released yet"):
                    await locked_save(one, NEW)
        async with asyncio.timeout(20):
            for store in (two, one):
                async with store.lock():
                    assert await store.load() == OLD


async def test_second_save_inside_one_lock_replaces_the_first(store: PostgresTokenStore) -> None:
    """A task that the holder starts belongs to the holder."""
    async with store.lock():
        await store.save(OLD)
        await asyncio.wait_for(asyncio.create_task(store.save(NEW)), 10)
        assert await store.load() == NEW
    assert await store.load() == NEW


@contextlib.asynccontextmanager
async def on_its_way(postgres: PostgresServer, dsn: str) -> AsyncIterator[tuple[PostgresTokenStore, asyncio.Task[Any]]]:
    """Let a worker announce a refresh over a slow network; yield its store and the task."""
    async with slow_way(postgres.port, 0.2) as way:
        far = dsn.replace(f":{postgres.port}/", f":{urlsplit(way.url).port}/")
        async with PostgresTokenStore(far, "anna", timeout=10) as slow:
            await slow.save(OLD)
            saving = asyncio.create_task(locked_save(slow, NEW))
            while not await row(postgres, dsn, "refresher"):
                await asyncio.sleep(0.01)
            yield slow, saving


async def row(postgres: PostgresServer, dsn: str, column: str) -> Any:
    """Return a column of the lock's row."""
    table = f"{dsn.rpartition('=')[2]}.signing_tokens"
    found = await postgres.execute(f"SELECT {column} FROM {table} WHERE part = 'lock'")
    return found[0][column] if found else None


async def test_worker_overtaken_before_it_locks_the_row_queues_again(postgres: PostgresServer, dsn: str) -> None:
    async with on_its_way(postgres, dsn) as (slow, saving), PostgresTokenStore(dsn, "anna", grace=1e-6) as quick:
        async with quick.lock():
            assert await quick.load() == OLD
        await asyncio.wait_for(saving, 30)
        assert await slow.load() == NEW


async def test_grace_begins_again_when_the_server_starts(postgres: PostgresServer, dsn: str) -> None:
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
    """Start a process of `tests.postgres.workers`."""
    command = [sys.executable, "-m", "tests.postgres.workers", *arguments]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    """Return the next line that the process writes."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def write_line(process: subprocess.Popen[str], line: str = "") -> None:
    """Send a line to the process."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


async def test_paused_holder_keeps_the_lock(dsn: str) -> None:
    """It may have used the refresh token. When it resumes, it saves the new one."""
    await make_table(dsn)
    async with PostgresTokenStore(dsn, "anna", timeout=5, grace=0.01) as store:
        await paused(dsn, store)


async def paused(dsn: str, store: PostgresTokenStore) -> None:
    """Pause and resume a process that holds the lock."""
    await store.save(OLD)
    with worker("hold", dsn) as process:
        assert await asyncio.to_thread(read_line, process) == "held"
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5), store.lock():
                pass
        assert await store.load() == OLD
        process.send_signal(signal.SIGCONT)
        write_line(process)
        async with asyncio.timeout(30), store.lock():
            kept = await store.load()
            assert kept is not None
            assert kept.access_token == "late"


async def test_lock_of_a_killed_holder_is_acquired_after_the_grace(dsn: str, store: PostgresTokenStore) -> None:
    await store.save(OLD)
    with worker("hold", dsn) as process:
        assert await asyncio.to_thread(read_line, process) == "held"
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


async def test_eight_processes_refresh_once_per_expiry_despite_a_kill_and_a_pause(dsn: str) -> None:
    """One clock is an hour fast."""

    async def disturb(run: Race) -> None:
        await run.quiet()
        await kill_outside_a_refresh(run, 1, "postgres", dsn)
        await run.quiet()
        run.send(2, signal.SIGSTOP)
        await asyncio.sleep(1.5)
        run.send(2, signal.SIGCONT)

    run = await race("postgres", dsn, every=0.08, wrong_clocks=(3600.0,), meanwhile=disturb)
    assert (run.refused, run.errors, sorted(run.done)) == (0, [], [12, *[50] * 6])
    assert len(run.refreshes) >= 3
    assert run.doubled == 0


@pytest.mark.timeout(300)
async def test_eight_processes_get_their_tokens_while_the_server_restarts(postgres: PostgresServer, dsn: str) -> None:
    """It is stopped, killed, started and frozen: there is no replay."""

    async def disturb(run: Race) -> None:
        for hurt in (postgres.restart, postgres.kill):
            await run.quiet()
            hurt()
            await asyncio.sleep(0.2)
        postgres.start()
        await run.quiet()
        with postgres.frozen():
            await asyncio.sleep(0.5)

    # Enough calls for the processes to be at work until the end of the disturbance.
    run = await race("postgres", dsn, calls=100, every=0.08, meanwhile=disturb)
    assert (run.refused, run.errors, run.done) == (0, [], [100] * 8)
    assert run.doubled == 0


# Clocks


@pytest.mark.parametrize("ahead", [3600.0, -3600.0, 1.0])
async def test_expiry_is_converted_to_the_clock_of_the_reader(
    ahead: float, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the clocks agree, the expiry is unchanged."""
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


# The stored token


async def test_encrypted_token_is_neither_readable_nor_overwritten_without_its_key(
    postgres: PostgresServer, dsn: str
) -> None:
    schema = dsn.rpartition("=")[2]
    async with PostgresTokenStore(dsn, "anna", key=KEY) as store:
        await store.save(NEW)
        assert await store.load() == NEW
    (row,) = await postgres.execute(f"SELECT token FROM {schema}.signing_tokens WHERE part = 'token'")
    assert b"new" not in row["token"]
    for key, message in (
        (None, "it is encrypted, and no key was given"),
        (b"o" * 32, "none of the given keys decrypts it"),
    ):
        async with PostgresTokenStore(dsn, "anna", key=key) as other:
            with pytest.raises(AuthError, match=f"cannot be read and was not changed: {message}"):
                await other.load()
            async with Scripted(grants()) as server, oauth_for(server.base_url, store=other) as oauth:
                with pytest.raises(AuthError):
                    await oauth.refresh()
                assert not server.requests
    async with PostgresTokenStore(dsn, "anna", key=[b"o" * 32, KEY]) as store:
        assert await store.load() == NEW


async def test_tokens_are_kept_apart_by_name(postgres: PostgresServer, dsn: str) -> None:
    """An encrypted token that is copied to another name is rejected."""
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
        with pytest.raises(AuthError, match="none of the given keys decrypts it"):
            await bert.load()


async def test_broken_row_is_an_error_without_its_content(
    postgres: PostgresServer, dsn: str, store: PostgresTokenStore
) -> None:
    await store.save(NEW)
    schema = dsn.rpartition("=")[2]
    await postgres.execute(f"UPDATE {schema}.signing_tokens SET token = 'broken-row'::bytea WHERE part = 'token'")
    with pytest.raises(AuthError, match="was not changed: no token in it") as caught:
        await store.load()
    assert "broken-row" not in "".join(traceback.format_exception(caught.value))


# The table


async def test_table_is_created_once_by_many_workers(dsn: str) -> None:
    async with AsyncExitStack() as opened:
        stores = [
            await opened.enter_async_context(PostgresTokenStore(dsn, f"t{n}", table="app_tokens")) for n in range(8)
        ]
        await asyncio.gather(*(s.save(NEW) if n % 2 else s.create_table() for n, s in enumerate(stores)))
        assert [await s.load() for s in stores] == [None, NEW] * 4
        assert stores[0].sql.startswith('CREATE TABLE IF NOT EXISTS "app_tokens" (')


async def test_role_without_create_gets_the_statement_in_the_error(postgres: PostgresServer, dsn: str) -> None:
    """If the table exists, such a role can do everything."""
    schema = dsn.rpartition("=")[2]
    role = f"limited_{schema}"
    await postgres.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{PASSWORD}'")
    await postgres.execute(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
    async with PostgresTokenStore(postgres.dsn(schema=schema, user=role), "anna") as store:
        with pytest.raises(AuthError, match="permission denied for schema") as caught:
            await store.load()
        assert str(caught.value).endswith(f"create the table with:\n{store.sql}")
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


async def test_given_pool_is_used_and_stays_open(dsn: str) -> None:
    """It may be smaller than the number of concurrent refreshes."""
    async with Scripted(grants()) as server, asyncpg.create_pool(dsn, min_size=0, max_size=2) as pool:
        async with AsyncExitStack() as opened:
            for number in range(6):
                store = await opened.enter_async_context(PostgresTokenStore(pool, f"tenant-{number}"))
                await store.save(OLD)
                oauth = await opened.enter_async_context(oauth_for(server.base_url, store=store))
                opened.push_async_callback(oauth.access_token)
        assert await pool.fetchval("SELECT count(*) FROM signing_tokens WHERE part = 'token' AND version = 2") == 6
        assert repr(store) == "PostgresTokenStore('the given pool', 'tenant-5')"


async def test_refresh_waits_for_a_connection_and_a_load_times_out(dsn: str) -> None:
    """All connections of the pool are in use for longer than the timeout."""
    await make_table(dsn)
    async with asyncpg.create_pool(dsn, min_size=0, max_size=1) as pool:
        # Long enough for a statement on a busy machine.
        one, two = (PostgresTokenStore(pool, name, timeout=3) for name in ("one", "two"))
        await two.save(NEW)
        async with one.lock():
            waiting = asyncio.create_task(locked_save(two, OLD))
            with pytest.raises(AuthError, match=r"all connections of the pool are in use, for 3 s"):
                await two.load()
            await asyncio.sleep(0.5)
            assert not waiting.done()
        await waiting
        assert await two.load() == OLD


async def test_closed_store_raises_and_unclosed_store_warns(dsn: str) -> None:
    store = PostgresTokenStore(dsn, "anna")
    await store.aclose()
    with pytest.raises(AuthError, match=r"^PostgreSQL at 127.0.0.1:\d+/postgres: the connection is closed$"):
        await store.load()
    await store.aclose()
    forgotten = PostgresTokenStore(dsn, "anna")
    await forgotten.load()
    pool = forgotten._database._pool
    with pytest.warns(ResourceWarning, match=r"PostgresTokenStore\('127.0.0.1:\d+/postgres', 'anna'\) was not closed"):
        del forgotten
    pool.terminate()


async def test_closing_does_not_wait_for_a_stopped_server(postgres: PostgresServer, store: Any) -> None:
    await store.load()
    with postgres.frozen():
        async with asyncio.timeout(10):
            await store.aclose()


# Settings and secrets


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"postgres": "mysql://app:geheim@db/app"}, "invalid DSN: must begin with postgresql://"),
        ({"postgres": "postgresql://app:ge#heim@db/app"}, "invalid DSN: contains a #; write %23 in a password"),
        ({"postgres": "postgresql://app:geheim@db:54x2/app"}, "invalid DSN: invalid host or port"),
        ({"postgres": "postgresql://app:geheim@db:5432,[::1]:65536/app"}, "invalid DSN: "),  # releases of Python differ
        ({"postgres": "postgresql://app:geheim@[db/app"}, "invalid DSN: not a URL"),
        ({"postgres": 5}, "postgres: must be a DSN or an asyncpg.Pool, got 5"),
        ({"name": ""}, "name: must be a non-empty string, got ''"),
        ({"name": "half-\ud800"}, r"name: must be a non-empty string, got 'half-\ud800'"),
        ({"name": "a\0b"}, r"name: must not contain null characters, got 'a\x00b'"),
        ({"table": 'tokens"; DROP'}, "table: must be a lower-case identifier, name or schema.name, got "),
        ({"table": "a.b.c"}, "table: must be a lower-case identifier, name or schema.name, got "),
        ({"timeout": 0}, "timeout: must be a number above 0, got 0"),
        ({"timeout": True}, "timeout: must be a number above 0, got True"),
        ({"grace": -1}, "grace: must be a number above 0, got -1"),
        ({"key": b"geheim"}, "an encryption key must be 32 bytes, or their base64"),
    ],
)
def test_invalid_settings_are_rejected_without_showing_secrets(arguments: dict[str, Any], message: str) -> None:
    known: dict[str, Any] = {"postgres": "postgresql://app:geheim@db.example.com/app", "name": "anna"}
    with pytest.raises(ConfigurationError) as caught:
        PostgresTokenStore(**known | arguments)
    assert message in str(caught.value)
    assert "geheim" not in "".join(traceback.format_exception(caught.value))


async def test_password_appears_in_no_text_traceback_or_log(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = postgres.dsn().replace(PASSWORD, "ge%2Fheim")
    async with PostgresTokenStore(f"{wrong}&password=ge%2Fheim", "anna") as store:
        with pytest.raises(AuthError, match='password authentication failed for user "signing"') as caught:
            await store.load()
        frames = [str(vars_of) for vars_of in local_variables(caught.value)]
        shown = [repr(store), caplog.text, *traceback.format_exception(caught.value), *frames]
    assert not [text for text in shown if "ge/heim" in text or "ge%2Fheim" in text]


def local_variables(error: SigningError) -> list[dict[str, Any]]:
    """Return the variables of every frame of the traceback: some tools show them."""
    found = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [{name: value for name, value in each.items() if name not in ("wrong", "postgres")} for each in found]


async def test_dsn_rejected_by_asyncpg_is_not_shown(dsn: str) -> None:
    """It is unknown which part is the password."""
    async with PostgresTokenStore(dsn + "&sslmode=geheim", "anna") as store:
        with pytest.raises(AuthError, match=r": invalid DSN$") as caught:
            await store.load()
    assert "geheim" not in str(caught.value)


def test_missing_asyncpg_names_the_extra() -> None:
    code = "import sys; sys.modules['asyncpg'] = None; import signing_async.postgres"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "signing_async.postgres needs asyncpg: pip install 'signing-async[postgres]'" in ran.stderr.splitlines()[-1]


async def test_load_that_outlives_the_lock_does_not_keep_it(postgres: PostgresServer, dsn: str) -> None:
    async with PostgresTokenStore(dsn, "anna") as store, PostgresTokenStore(dsn, "anna", grace=1e-6) as other:
        await store.save(OLD)
        async with contextlib.AsyncExitStack() as held, store.lock():
            await cut_off(postgres)
            await held.enter_async_context(other.lock())
            loading = asyncio.create_task(store.load())
            await asyncio.sleep(0.2)
            assert not loading.done()
        assert await asyncio.wait_for(loading, 30) == OLD
        async with asyncio.timeout(30), other.lock():
            assert await other.load() == OLD


async def test_waiting_worker_queues_again_when_the_server_ends_its_wait(dsn: str) -> None:
    async with PostgresTokenStore(dsn, "anna", timeout=4) as one, PostgresTokenStore(dsn, "anna", timeout=4) as two:
        async with one.lock():
            waiting = asyncio.create_task(locked_save(two, NEW))
            await asyncio.sleep(2.5)  # the server ends a wait after half of the timeout
            assert not waiting.done()
        await asyncio.wait_for(waiting, 30)
        assert await one.load() == NEW


async def test_table_of_an_earlier_version_is_refused_with_advice(postgres: PostgresServer, dsn: str) -> None:
    async with PostgresTokenStore(dsn, "anna") as store:
        await store.create_table()
        await postgres.execute(f"ALTER TABLE {dsn.rpartition('=')[2]}.signing_tokens RENAME COLUMN token TO gone")
        with pytest.raises(AuthError, match=r"an earlier version made .*: finish its work there, then rename it$"):
            await store.load()
