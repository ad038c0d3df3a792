"""Deduplication stores: claim, confirm, release; a crash loses no event and a restart forgets none."""

from __future__ import annotations

import multiprocessing
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from signing_async.errors import ConfigurationError
from signing_async.webhooks import (
    Claim,
    MemorySeenEvents,
    SeenEvents,
    SQLiteSeenEvents,
)


class Clock:
    """A clock that moves when ``now`` is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock at a fixed time."""
    return Clock()


Make = Callable[..., Any]


@pytest.fixture(params=["memory", "sqlite", "sqlite, power safe"])
def make(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Make]:
    """Create a store of each kind."""
    made: list[SQLiteSeenEvents] = []

    def factory(**settings: Any) -> SeenEvents:
        if request.param == "memory":
            return MemorySeenEvents(clock=clock, **settings)
        power_safe = request.param != "sqlite"
        store = SQLiteSeenEvents(tmp_path / f"seen{len(made)}.db", clock=clock, power_safe=power_safe, **settings)
        made.append(store)
        return store

    yield factory
    for store in made:
        store.close()


@pytest.mark.parametrize(
    "settings", [{"ttl": 0}, {"ttl": float("nan")}, {"ttl": float("inf")}, {"lease": -1}, {"lease": 0}]
)
def test_bad_setting_is_refused_by_name_and_value(make: Make, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        make(**settings)


def test_each_event_is_claimed_by_exactly_one_of_eight_threads(make: Make) -> None:
    store = make()
    won: list[str] = []

    def claim_all() -> None:
        won.extend(name for name in map(str, range(250)) if store.claim(name) is Claim.NEW)

    threads = [threading.Thread(target=claim_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == sorted(map(str, range(250)))


def test_memory_forgets_the_oldest_confirmed_events_and_never_pending_ones(clock: Clock) -> None:
    store = MemorySeenEvents(max_events=3, lease=60, clock=clock)
    for name in "abcd":
        assert store.claim(name) is Claim.NEW
        store.confirm(name)
    assert len(store) == 3
    assert store.claim("b") is Claim.CONFIRMED
    assert store.claim("a") is Claim.NEW
    assert store.claim("e") is Claim.NEW
    assert store.claim("f") is Claim.NEW
    assert store.claim("g") is Claim.PENDING
    assert len(store) == 3
    clock.now += 60
    assert store.claim("g") is Claim.NEW
    with pytest.raises(ConfigurationError, match="max_events"):
        MemorySeenEvents(max_events=0)


def test_sqlite_remembers_confirmed_and_pending_events_after_a_restart(tmp_path: Path) -> None:
    first = SQLiteSeenEvents(tmp_path / "seen.db")
    first.claim("done")
    first.confirm("done")
    first.claim("open")
    first.close()
    first.close()
    second = SQLiteSeenEvents(str(tmp_path / "seen.db"))
    assert second.claim("done") is Claim.CONFIRMED
    assert second.claim("open") is Claim.PENDING
    assert first.claim("new") is Claim.NEW
    assert second.claim("new") is Claim.PENDING
    first.close()
    second.close()


def test_sqlite_deletes_expired_rows_from_the_file(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "seen.db"
    store = SQLiteSeenEvents(path, ttl=100, lease=1, clock=clock)
    for number in range(150):
        store.confirm(f"old {number}")
    clock.now += 1000
    for number in range(101):
        store.claim(f"new {number}")
    store.close()
    database = sqlite3.connect(path)
    names = {name for (name,) in database.execute("SELECT id FROM seen_events")}
    database.close()
    assert names == {f"new {number}" for number in range(101)}


def test_sqlite_works_once_a_corrupt_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "seen.db"
    path.write_bytes(b"this is no database at all, and long enough to tell" * 50)
    store = SQLiteSeenEvents(path)
    with pytest.raises(sqlite3.DatabaseError):
        store.claim("a")
    path.unlink()
    assert store.claim("a") is Claim.NEW
    store.close()


def _confirm_in_child(store: SQLiteSeenEvents, told: Any, answers: Any) -> None:
    answers.put(store.claim("early"))
    told.wait(30)
    store.confirm("late")
    answers.put("confirmed")
    store.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_sqlite_keeps_a_childs_confirmation_after_the_parent_closes(tmp_path: Path) -> None:
    """A connection inherited across the fork would let the parent delete the log that the child writes to."""
    store = SQLiteSeenEvents(tmp_path / "seen.db")
    store.claim("parent's")
    context = multiprocessing.get_context("fork")
    told, answers = context.Event(), context.Queue()
    child = context.Process(target=_confirm_in_child, args=(store, told, answers))
    child.start()
    assert answers.get(timeout=30) is Claim.NEW
    store.close()
    told.set()
    assert answers.get(timeout=30) == "confirmed"
    assert store.claim("late") is Claim.CONFIRMED
    child.join(30)
    store.close()


@pytest.mark.parametrize(("settings", "level"), [({}, 1), ({"power_safe": False}, 1), ({"power_safe": True}, 2)])
def test_power_safe_sets_synchronous_full_and_the_default_is_normal(tmp_path: Path, settings: Any, level: int) -> None:
    store = SQLiteSeenEvents(tmp_path / "seen.db", **settings)
    store.claim("a")
    assert store._database.connection is not None
    assert store._database.connection.execute("PRAGMA synchronous").fetchone() == (level,)
    store.close()
