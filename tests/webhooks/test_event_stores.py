"""Every store of an inbox passes the suite that others can run on theirs, and a faulty store does not."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from signing_async.testing import EventStoreConformance, FencedEventStoreConformance
from signing_async.webhooks.event_store import EventStore
from signing_async.webhooks.sqlite_inbox import SqliteEventStore

OpenStore = Callable[[], EventStore]


class TestSqliteEventStore(EventStoreConformance, FencedEventStoreConformance):
    """In a file, for one machine."""

    @pytest.fixture
    async def open_store(self, tmp_path: Path) -> AsyncIterator[OpenStore]:
        async with contextlib.AsyncExitStack() as opened:

            def open_store() -> EventStore:
                store = SqliteEventStore(tmp_path / "inbox.db")
                opened.push_async_callback(store.aclose)
                return store

            yield open_store

    @pytest.fixture
    def lapse(self, tmp_path: Path) -> Any:
        async def lapse(store: EventStore) -> None:
            for lock in tmp_path.glob("inbox.db.*.lock"):
                lock.unlink()

        return lapse
