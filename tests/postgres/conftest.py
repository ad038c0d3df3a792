"""Fixtures: an empty schema, and stores of events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from signing_async.postgres import PostgresInbox
from signing_async.webhooks import EventStore
from tests.postgres.server import PostgresServer


@pytest.fixture
async def dsn(postgres: PostgresServer) -> str:
    """An empty schema."""
    return await postgres.new_schema()


@pytest.fixture
def table(dsn: str) -> str:
    """The table of the events, with its schema."""
    return f"{dsn.rpartition('=')[2]}.signing_events"


@pytest.fixture
async def open_store(dsn: str) -> AsyncIterator[Callable[..., EventStore]]:
    """Open stores with short leases and timeouts, in which no table need be created; close them in the end."""
    async with contextlib.AsyncExitStack() as opened:
        async with PostgresInbox(dsn, timeout=10) as creating:
            await creating.create_table()

        def open_store(**settings: float) -> EventStore:
            inbox = PostgresInbox(dsn, **{"lease": 6, "timeout": 2, **settings})  # type: ignore[arg-type]  # these fit
            opened.push_async_callback(inbox.aclose)
            return inbox.store

        yield open_store
