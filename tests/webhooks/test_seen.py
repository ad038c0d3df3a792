"""Deduplication stores: what their conformance suite does not know, of memory, files, restarts and forks."""

from __future__ import annotations

import contextlib
import multiprocessing
import sqlite3
from pathlib import Path

import pytest

from signing_async import StorageError
from signing_async.webhooks import Claim, MemorySeenEvents, SQLiteSeenEvents


class Clock:
    """A clock that moves when ``now`` is set."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_memory_forgets_the_oldest_confirmed_events_and_never_pending_ones() -> None:
    clock = Clock()
    store = MemorySeenEvents(max_events=3, lease=60, clock=clock)
    for name in "abcd":
        assert store.claim(name) is Claim.NEW
        store.confirm(name)
    assert len(store) == 3
    assert store.claim("b") is Claim.CONFIRMED
    assert [store.claim(name) for name in "aefg"] == [Claim.NEW] * 3 + [Claim.PENDING]
    assert len(store) == 3
    clock.now += 60
    assert store.claim("g") is Claim.NEW


def test_sqlite_deletes_expired_rows_from_the_file(tmp_path: Path) -> None:
    clock = Clock()
    store = SQLiteSeenEvents(tmp_path / "seen.db", ttl=100, lease=1, clock=clock)
    for number in range(150):
        store.confirm(f"old {number}")
    clock.now += 1000
    for number in range(101):
        store.claim(f"new {number}")
    store.close()
    database = sqlite3.connect(tmp_path / "seen.db")
    names = {name for (name,) in database.execute("SELECT id FROM seen_events")}
    database.close()
    assert names == {f"new {number}" for number in range(101)}


@pytest.mark.parametrize(
    "statement", ["CREATE TABLE other (x)", "PRAGMA application_id = 7; CREATE TABLE seen_events (x)"]
)
def test_database_of_another_program_is_refused_and_unchanged(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(statement)
    before = path.read_bytes()
    with pytest.raises(StorageError, match="is the database of another program; it was not changed"):
        SQLiteSeenEvents(path).claim("a")
    assert path.read_bytes() == before
    assert not Path(f"{path}-wal").exists()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_sqlite_keeps_a_childs_confirmation_after_the_parent_closes(tmp_path: Path) -> None:
    """A connection inherited across the fork would let the parent delete the log that the child writes to."""
    store = SQLiteSeenEvents(tmp_path / "seen.db")
    store.claim("parent's")
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def confirm() -> None:
        theirs.send(store.claim("early"))
        theirs.recv()
        store.confirm("late")
        store.close()

    child = context.Process(target=confirm)
    child.start()
    assert ours.recv() is Claim.NEW
    store.close()
    ours.send("closed")
    child.join(30)
    assert child.exitcode == 0
    assert store.claim("late") is Claim.CONFIRMED
    store.close()
