"""No event and no journal entry in SQLite is acknowledged before the COMMIT that stores it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import attrs
import pytest

from signing_async import SqliteJournal, StorageError
from signing_async.webhooks import Inbox
from tests.storage.event_stores import add, everything
from tests.storage.leases import claimed


@attrs.define
class Commits:
    """The COMMITs of all connections: each waits for ``proceed``, and fails with ``failure`` if there is one."""

    reached: threading.Event = attrs.field(factory=threading.Event)
    proceed: threading.Event = attrs.field(factory=threading.Event)
    failure: Exception | None = None

    def pass_one(self) -> None:
        self.reached.set()
        assert self.proceed.wait(60)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> Commits:
    """Control the COMMITs, which proceed at first."""
    found = Commits()
    found.proceed.set()

    class Controlled(sqlite3.Connection):
        def execute(self, *arguments: object) -> sqlite3.Cursor:
            if arguments[0] == "COMMIT":
                found.pass_one()
            return super().execute(*arguments)  # type: ignore[arg-type]  # passed on as they are

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *given, **named: connect(*given, **named, factory=Controlled))
    return found


@attrs.frozen
class Storage:
    """A storage: what writes to it, and what it holds."""

    write: Callable[[], Awaitable[object]]
    read: Callable[[], Awaitable[object]]


@pytest.fixture(params=["event", "journal"])
async def storage(request: pytest.FixtureRequest, tmp_path: Path, commits: Commits) -> AsyncIterator[Storage]:
    async with contextlib.AsyncExitStack() as opened:
        if request.param == "event":
            inbox = await opened.enter_async_context(Inbox(tmp_path / "inbox.db"))
            assert await add(inbox.store, "before")
            yield Storage(lambda: add(inbox.store, "event"), lambda: everything(inbox.store))
            return
        journal = await opened.enter_async_context(SqliteJournal(tmp_path / "journal"))
        claim = await claimed(journal, "lease")
        await journal.write(claim, "before")

        async def read() -> object:
            return [record.state async for record in journal.records()]

        yield Storage(lambda: journal.write(claim, "sent"), read)


async def test_write_is_not_acknowledged_before_its_commit(storage: Storage, commits: Commits) -> None:
    before = await storage.read()
    commits.reached.clear()
    commits.proceed.clear()
    writing = asyncio.ensure_future(storage.write())
    try:
        assert await asyncio.to_thread(commits.reached.wait, 60)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not writing.done()
    finally:
        commits.proceed.set()
    await writing
    assert await storage.read() != before


async def test_write_whose_commit_fails_is_not_acknowledged(storage: Storage, commits: Commits) -> None:
    """Nothing is stored."""
    before = await storage.read()
    commits.failure = sqlite3.OperationalError("disk I/O error")
    with pytest.raises(StorageError, match="disk I/O error"):
        await storage.write()
    commits.failure = None
    assert await storage.read() == before
