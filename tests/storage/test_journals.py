"""Every journal of this package passes its suite."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from signing_async.dispatch.journal import Journal
from signing_async.postgres import PostgresJournal
from signing_async.storage.journal import SqliteJournal
from tests.postgres.server import PostgresServer
from tests.storage.journals import FencedJournalConformance, JournalConformance, ListedJournalConformance

OpenJournal = Callable[[], Journal]


class TestSqliteJournal(JournalConformance, FencedJournalConformance, ListedJournalConformance):
    """In a file, for one machine."""

    @pytest.fixture
    async def open_journal(self, tmp_path: Path) -> AsyncIterator[OpenJournal]:
        async with contextlib.AsyncExitStack() as opened:
            yield opener(opened, lambda: SqliteJournal(tmp_path / "journal"))

    @pytest.fixture
    def lapse(self, tmp_path: Path) -> Any:
        async def lapse(journal: Journal) -> None:
            for lock in tmp_path.glob("journal.*.lock"):
                lock.unlink()

        return lapse


class TestPostgresJournal(JournalConformance, FencedJournalConformance, ListedJournalConformance):
    """In a table, for many machines."""

    @pytest.fixture
    async def dsn(self, postgres: PostgresServer) -> str:
        return await postgres.new_schema()

    @pytest.fixture
    async def open_journal(self, dsn: str) -> AsyncIterator[OpenJournal]:
        async with contextlib.AsyncExitStack() as opened:
            yield opener(opened, lambda: PostgresJournal(dsn))

    @pytest.fixture
    def lapse(self, postgres: PostgresServer, dsn: str) -> Any:
        schema = dsn.rpartition("=")[2]

        async def lapse(journal: Journal) -> None:
            await postgres.execute(f"UPDATE {schema}.signing_packages SET leased_until = now() - interval '1 s'")

        return lapse


def opener(opened: contextlib.AsyncExitStack, make: Callable[[], Journal]) -> OpenJournal:
    """Makes journals, all of which are closed in the end."""

    def open_journal() -> Journal:
        journal = make()
        opened.push_async_callback(journal.aclose)
        return journal

    return open_journal
