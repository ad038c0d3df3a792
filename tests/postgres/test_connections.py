"""What the token store, the journal and the inbox have in common: connections, outages, tables, pools and settings."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import struct
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

from signing_async import AuthError, ConfigurationError, InboxError, JournalError, SigningError, Token
from signing_async.postgres import PostgresInbox, PostgresJournal, PostgresTokenStore
from signing_async.webhooks import EventFilter, EventStatus
from tests.postgres.processes import ROOT
from tests.postgres.server import PASSWORD, PostgresServer
from tests.servers import talking
from tests.storage.event_stores import add, everything
from tests.storage.journals import claimed

Operation = Callable[[], Awaitable[Any]]
TOKEN = Token("access", "refresh")
PARTS: list[Any] = [PostgresTokenStore, PostgresJournal, PostgresInbox]


def open_part(part: Any, postgres: Any, **settings: Any) -> Any:
    """Open a part; a token store has a name."""
    return part(postgres, "anna", **settings) if part is PostgresTokenStore else part(postgres, **settings)


async def token_operations(store: PostgresTokenStore) -> list[Operation]:
    """Return every operation of a token store."""

    async def lock() -> None:
        async with store.lock():
            pass

    await store.save(TOKEN)
    return [store.load, lambda: store.save(TOKEN), lock, store.create_table]


async def journal_operations(journal: PostgresJournal) -> list[Operation]:
    """Return every operation of a journal."""
    a, b = [await claimed(journal, key) for key in "ab"]
    return [
        lambda: journal.write(a, "late"),
        lambda: journal.claim("c"),
        lambda: journal.release(b),
        lambda: anext(journal.records()),
    ]


async def inbox_operations(inbox: PostgresInbox) -> list[Operation]:
    """Return every operation of an inbox."""
    store = inbox.store
    for name in ("a", "b", "c"):
        await add(store, name)
    a, b, c = await store.claim(5)
    return [
        lambda: add(store, "d"),
        lambda: store.claim(5),
        lambda: store.settle(a, EventStatus.HANDLED),
        lambda: store.postpone(b, 1, None),
        lambda: store.release(c),
        lambda: everything(store),
        lambda: store.requeue(EventFilter()),
        lambda: store.purge(datetime.now(UTC)),
        store.stats,
    ]


OPERATIONS: list[Any] = [
    (PostgresTokenStore, token_operations, AuthError),
    (PostgresJournal, journal_operations, JournalError),
    (PostgresInbox, inbox_operations, InboxError),
]


@pytest.mark.parametrize("how", ["stopped", "killed"])
@pytest.mark.parametrize(("part", "operations", "error"), OPERATIONS)
async def test_every_operation_fails_in_time_during_an_outage(
    part: Any, operations: Any, error: type[SigningError], how: str, postgres: PostgresServer, dsn: str
) -> None:
    """The error shows no secret and keeps no other error. Afterwards the part works again."""
    lease = {} if part is PostgresTokenStore else {"lease": 60}
    async with open_part(part, dsn, timeout=10, **lease) as creating:
        await creating.create_table()
    async with open_part(part, dsn, timeout=1, **lease) as opened:
        calls = await operations(opened)
        with postgres.frozen() if how == "stopped" else postgres.down():
            for call in calls:
                async with asyncio.timeout(10):
                    with pytest.raises(error, match=r"^PostgreSQL at 127.0.0.1:\d+/postgres: .*, for 1 s$") as caught:
                        await call()
                assert caught.value.transient
                assert caught.value.__context__ is caught.value.__cause__ is None
                assert PASSWORD not in "".join(traceback.format_exception(caught.value))
        await opened.create_table()


async def test_closing_does_not_wait_for_a_stopped_server(postgres: PostgresServer, dsn: str) -> None:
    store = PostgresTokenStore(dsn, "anna")
    await store.load()
    with postgres.frozen():
        async with asyncio.timeout(10):
            await store.aclose()


@pytest.mark.parametrize("part", PARTS)
async def test_closed_part_raises_and_unclosed_part_warns(part: Any, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[Any] = []
    create = asyncpg.create_pool
    closed = open_part(part, dsn)
    await closed.aclose()
    with pytest.raises(SigningError, match=r"^PostgreSQL at 127.0.0.1:\d+/postgres: the connection is closed$"):
        await closed.create_table()
    await closed.aclose()

    def create_pool(*arguments: Any, **settings: Any) -> Any:
        pools.append(create(*arguments, **settings))
        return pools[-1]

    async def forget() -> None:
        opened = open_part(part, dsn)
        await opened.create_table()
        pools.pop().terminate()
        del opened
        gc.collect()

    monkeypatch.setattr(asyncpg, "create_pool", create_pool)

    with pytest.warns(ResourceWarning, match=r"Postgres\w+\('127.0.0.1:\d+/postgres'.* was not closed"):
        await forget()


# Tables


@pytest.mark.parametrize("part", PARTS)
async def test_table_is_created_once_by_many_workers(part: Any, dsn: str) -> None:
    async with contextlib.AsyncExitStack() as opened:
        parts = [await opened.enter_async_context(open_part(part, dsn, table="app_table")) for _ in range(6)]
        await asyncio.gather(*(each.create_table() for each in parts))
        assert parts[0].sql.startswith('CREATE TABLE IF NOT EXISTS "app_table" (')
        connection = await asyncpg.connect(dsn)
        await connection.execute(parts[0].sql)  # a migration may run it again
        await connection.close()


async def test_role_without_create_gets_the_statement_in_the_error(postgres: PostgresServer, dsn: str) -> None:
    """If the table exists, such a role can do everything with SELECT, INSERT and UPDATE."""
    schema = dsn.rpartition("=")[2]
    role = f"limited_{schema}"
    await postgres.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{PASSWORD}'")
    await postgres.execute(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
    async with PostgresTokenStore(postgres.dsn(schema=schema, user=role), "anna") as store:
        with pytest.raises(AuthError, match="permission denied for schema") as caught:
            await store.load()
        assert not caught.value.transient
        assert str(caught.value).endswith(f"create the table with:\n{store.sql}")
        async with PostgresTokenStore(dsn, "anna") as privileged:
            await privileged.create_table()
        await postgres.execute(f"GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA {schema} TO {role}")
        async with store.lock():
            assert await store.load() is None
            await store.save(TOKEN)
        assert await store.load() == TOKEN


# Pools


async def test_given_pool_is_used_and_stays_open(dsn: str) -> None:
    async with asyncpg.create_pool(dsn, min_size=0, max_size=2) as pool:
        async with PostgresInbox(pool, table="app_events") as inbox, PostgresJournal(pool) as journal:
            assert not await inbox.table_exists()
            assert await add(inbox.store, "a")
            assert await inbox.table_exists()

            async def work(key: str) -> None:
                claim = await claimed(journal, key)
                await journal.write(claim, key)
                await journal.release(claim)

            await asyncio.gather(*(work(f"k{number}") for number in range(30)))
            assert (repr(inbox), repr(journal)) == tuple(
                f"Postgres{name}('the given pool')" for name in ("Inbox", "Journal")
            )
        assert await pool.fetchval("SELECT count(*) FROM app_events") == 1
        assert await pool.fetchval("SELECT count(*) FROM signing_packages WHERE state = key") == 30


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


# Settings and secrets


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        (PostgresTokenStore, {"postgres": "mysql://app:geheim@db/app"}, "invalid DSN: must begin with postgresql://"),
        (PostgresJournal, {"postgres": "postgresql://app:ge#heim@db/app"}, "invalid DSN: contains a #; write %23 in a"),
        (PostgresInbox, {"postgres": "postgresql://app:geheim@db:54x2/app"}, "invalid DSN: invalid host or port"),
        (PostgresJournal, {"postgres": 5}, "postgres: must be a DSN or an asyncpg.Pool, got 5"),
        (PostgresTokenStore, {"name": ""}, "name: must be a non-empty string, got ''"),
        (PostgresTokenStore, {"name": "a\0b"}, r"name: must not contain null characters, got 'a\x00b'"),
        (PostgresTokenStore, {"key": b"geheim"}, "an encryption key must be 32 bytes, or their base64"),
        (PostgresTokenStore, {"table": 'tokens"; DROP'}, "table: must be a lower-case identifier, name or schema.name"),
        (PostgresInbox, {"table": "t" * 51}, "table: must have at most 50 characters"),
        (PostgresJournal, {"timeout": float("nan")}, "timeout: must be a number above 0, got nan"),
        (PostgresInbox, {"lease": 5, "timeout": 2}, "lease: must be at least three times the timeout of 2 s, got 5"),
    ],
)
def test_invalid_settings_are_rejected_without_showing_secrets(
    part: Any, settings: dict[str, Any], message: str
) -> None:
    known: dict[str, Any] = {"postgres": "postgresql://app:geheim@db.example.com/app"}
    if part is PostgresTokenStore:
        known["name"] = "anna"
    with pytest.raises(ConfigurationError) as caught:
        part(**known | settings)
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
        frames = [frame.f_locals for frame, _ in traceback.walk_tb(caught.value.__traceback__)][1:]
        shown = [repr(store), caplog.text, *traceback.format_exception(caught.value), *map(str, frames)]
    assert not [text for text in shown if "ge/heim" in text or "ge%2Fheim" in text]


async def test_dsn_rejected_by_asyncpg_is_not_shown(dsn: str) -> None:
    """It is unknown which part is the password."""
    async with PostgresTokenStore(dsn + "&sslmode=geheim", "anna") as store:
        with pytest.raises(AuthError, match=r": invalid DSN$") as caught:
            await store.load()
    assert not caught.value.transient


@contextlib.asynccontextmanager
async def refusing() -> AsyncIterator[str]:
    """Run a server that asks for a login which asyncpg lacks; yield its DSN."""

    async def request_crypt(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(int.from_bytes(await reader.readexactly(4)) - 4)
        writer.write(b"R" + struct.pack("!II", 8, 4))
        await reader.read()

    async with talking(request_crypt) as origin:
        yield origin.replace("http://", "postgresql://user@") + "/db?sslmode=disable"


async def test_authentication_method_that_asyncpg_lacks_is_a_permanent_failure() -> None:
    async with refusing() as dsn, PostgresJournal(dsn, timeout=5) as journal:
        with pytest.raises(JournalError, match="unsupported authentication method") as caught:
            await journal.claim("lease")
    assert not caught.value.transient


def test_missing_asyncpg_names_the_extra() -> None:
    code = "import sys; sys.modules['asyncpg'] = None; import signing_async.postgres"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "signing_async.postgres needs asyncpg: pip install 'signing-async[postgres]'" in ran.stderr.splitlines()[-1]
