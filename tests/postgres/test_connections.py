"""What the token store, the journal and the inbox have in common: connections, outages, tables, pools and settings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import traceback
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import asyncpg
import pytest

from signing_async import AuthError, ConfigurationError, InboxError, JournalError, SigningError, Token
from signing_async.postgres import PostgresInbox, PostgresJournal, PostgresTokenStore
from signing_async.webhooks import EventFilter, EventStatus
from tests.postgres.server import PASSWORD, PostgresServer
from tests.storage.event_stores import add, everything
from tests.storage.leases import claimed

Operation = Callable[[], Awaitable[Any]]
TOKEN = Token("access", "refresh")
PARTS: list[Any] = [PostgresTokenStore, PostgresJournal, PostgresInbox]


def open_part(part: Any, postgres: Any, **settings: Any) -> Any:
    """Open a part; a token store has a name."""
    return part(postgres, **{"name": "anna", **settings} if part is PostgresTokenStore else settings)


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


@pytest.mark.parametrize("how", ["frozen", "down"])
async def test_every_operation_fails_in_time_during_an_outage(how: str, postgres: PostgresServer, dsn: str) -> None:
    """The error shows no secret and keeps no other error. Afterwards the part works again."""
    parts: list[Any] = []
    calls: list[tuple[Operation, type[SigningError]]] = []
    async with contextlib.AsyncExitStack() as opened:
        for part, operations, error in OPERATIONS:
            async with open_part(part, dsn, timeout=10) as creating:
                await creating.create_table()
            parts.append(await opened.enter_async_context(open_part(part, dsn, timeout=1)))
            calls += [(call, error) for call in await operations(parts[-1])]
        with postgres.outage(how):
            async with asyncio.timeout(20):
                failures = await asyncio.gather(*(call() for call, _ in calls), return_exceptions=True)
        for failure, (_, error) in zip(failures, calls, strict=True):
            assert isinstance(failure, error)
            assert re.fullmatch(r"PostgreSQL at 127.0.0.1:\d+/postgres: .*, for 1 s", str(failure))
            assert failure.transient
            assert failure.__context__ is failure.__cause__ is None
            assert PASSWORD not in "".join(traceback.format_exception(failure))
        for each in parts:
            await each.create_table()


async def test_closing_does_not_wait_for_a_stopped_server(postgres: PostgresServer, dsn: str) -> None:
    store = PostgresTokenStore(dsn, "anna", timeout=1)
    await store.load()
    with postgres.frozen():
        async with asyncio.timeout(10):
            await store.aclose()


@pytest.mark.parametrize("part", PARTS)
async def test_closed_part_raises_and_unclosed_part_warns(part: Any, dsn: str) -> None:
    opened = open_part(part, dsn)
    await opened.create_table()
    with pytest.warns(ResourceWarning, match=r"Postgres\w+\('127.0.0.1:\d+/postgres'.* was not closed"):
        (opened.store if part is PostgresInbox else opened).__del__()
    await opened.aclose()
    with pytest.raises(SigningError, match=r"^PostgreSQL at 127.0.0.1:\d+/postgres: the connection is closed$"):
        await opened.create_table()
    await opened.aclose()


# Tables


@pytest.mark.parametrize("part", PARTS)
async def test_table_with_other_columns_is_refused_with_advice_and_unchanged(part: Any, dsn: str) -> None:
    """Of another program, or of another version: whether it is created or used."""
    connection = await asyncpg.connect(dsn)
    await connection.execute("CREATE TABLE app_table (id text PRIMARY KEY, key text, name text, state text)")
    words = "another program, or of another version of signing-async; it was not changed: rename it, or give another"
    use, *arguments = {PostgresTokenStore: ["load"], PostgresJournal: ["claim", "a"], PostgresInbox: ["get", "a"]}[part]
    async with open_part(part, dsn, table="app_table") as opened:
        for operation in (opened.create_table, partial(getattr(opened, use), *arguments)):
            with pytest.raises(SigningError, match=words) as caught:
                await operation()
            assert not caught.value.transient
    columns = "SELECT count(*) FROM information_schema.columns WHERE table_name = 'app_table' AND table_schema = $1"
    assert await connection.fetchval(columns, dsn.rpartition("=")[2]) == 4
    await connection.close()


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
    """The pool may have its own codecs."""

    async def init(connection: Any) -> None:
        await connection.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")

    async def work(key: str) -> None:
        claim = await claimed(journal, key)
        await journal.write(claim, key)
        await journal.release(claim)

    async with asyncpg.create_pool(dsn, min_size=0, max_size=2, init=init) as pool:
        async with PostgresInbox(pool, table="app_events") as inbox, PostgresJournal(pool) as journal:
            assert not await inbox.table_exists()
            assert await add(inbox.store, "a")
            assert await inbox.table_exists()
            await asyncio.gather(*(work(f"k{number}") for number in range(30)))
            (claim,) = await inbox.store.claim(5)
            assert await inbox.store.settle(claim, EventStatus.HANDLED)
            assert repr(inbox) == "PostgresInbox('the given pool')"
            assert repr(journal) == "PostgresJournal('the given pool')"
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
    given = {"postgres": "postgresql://app:geheim@db.example.com/app", **settings}
    with pytest.raises(ConfigurationError) as caught:
        open_part(part, **given)
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
