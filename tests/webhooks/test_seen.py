"""Deduplication stores: claim, confirm, release; a crash loses no event and a restart forgets none."""

from __future__ import annotations

import multiprocessing
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from signing_async.errors import ConfigurationError
from signing_async.storage.sqlite_file import SharedDatabase
from signing_async.webhooks import (
    Claim,
    MemorySeenEvents,
    SeenEvents,
    SQLiteSeenEvents,
    seen,
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


def test_event_is_new_once_then_pending_then_confirmed(make: Make) -> None:
    store = make()
    assert store.claim("a") is Claim.NEW
    assert store.claim("a") is Claim.PENDING
    assert store.claim("b") is Claim.NEW
    store.confirm("a")
    assert store.claim("a") is Claim.CONFIRMED
    assert store.claim("b") is Claim.PENDING


def test_released_event_can_be_claimed_again(make: Make) -> None:
    store = make()
    store.claim("a")
    store.release("a")
    assert store.claim("a") is Claim.NEW


def test_confirmed_event_cannot_be_released(make: Make) -> None:
    store = make()
    store.claim("a")
    store.confirm("a")
    store.release("a")
    store.release("never seen")
    assert store.claim("a") is Claim.CONFIRMED


def test_claim_expires_with_its_lease(make: Make, clock: Clock) -> None:
    store = make(lease=60)
    store.claim("a")
    clock.now += 59
    assert store.claim("a") is Claim.PENDING
    clock.now += 1
    assert store.claim("a") is Claim.NEW
    assert store.claim("a") is Claim.PENDING


def test_confirm_works_without_a_claim_and_after_the_lease(make: Make, clock: Clock) -> None:
    store = make(lease=60)
    store.claim("a")
    clock.now += 100
    store.confirm("a")
    store.confirm("b")
    assert store.claim("a") is Claim.CONFIRMED
    assert store.claim("b") is Claim.CONFIRMED


def test_confirmed_event_is_forgotten_ttl_seconds_after_its_last_confirmation(make: Make, clock: Clock) -> None:
    store = make(ttl=1000)
    for name in ("a", "b"):
        store.claim(name)
        store.confirm(name)
    clock.now += 500
    store.confirm("a")
    clock.now += 500
    assert store.claim("b") is Claim.NEW
    assert store.claim("a") is Claim.CONFIRMED


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


def _claim_in_child(store: SQLiteSeenEvents, answers: Any) -> None:
    inherited = store._database.connection
    answers.put([store.claim("parent's"), store.claim("child's"), store._database.connection is not inherited])
    store.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_sqlite_works_in_parent_and_child_after_a_fork(tmp_path: Path) -> None:
    """A pre-forking server creates the store before it forks."""
    store = SQLiteSeenEvents(tmp_path / "seen.db")
    store.claim("parent's")
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_claim_in_child, args=(store, answers))
    child.start()
    assert answers.get(timeout=30) == [Claim.PENDING, Claim.NEW, True]
    child.join(30)
    assert store.claim("child's") is Claim.PENDING
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


FORKING = """
import os, signal, sys, threading
claims = []
def claim_in_a_thread():
    claims.append(threading.Thread(target=store.claim, args=("while forking",)))
    claims[0].start()
    claims[0].join(0.3)
    print("waits" if claims[0].is_alive() else "goes on", flush=True)
os.register_at_fork(before=claim_in_a_thread)  # what is registered first runs last, right before the fork
from signing_async.webhooks import SQLiteSeenEvents
store, other = SQLiteSeenEvents(sys.argv[1]), SQLiteSeenEvents(sys.argv[1] + ".other")
store.claim("before")
other.claim("before")
child = os.fork()
signal.alarm(20)
if child:
    claims[0].join()
    os.waitpid(child, 0)
print(store.claim("while forking" if child else "after").value, flush=True)
"""


def test_thread_that_claims_during_a_fork_waits_for_it(tmp_path: Path) -> None:
    """Otherwise the child would inherit a locked lock or an open connection."""
    script = [sys.executable, "-c", FORKING, str(tmp_path / "seen.db")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.split(), done.returncode) == (["waits", "new", "pending"], 0), done.stderr
    assert "Traceback" not in done.stderr


def test_sqlite_close_waits_for_a_running_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()

    class Slow(SharedDatabase):
        def _open(self) -> sqlite3.Connection:
            begun.set()
            assert go.wait(30)
            return super()._open()

    monkeypatch.setattr(seen, "SharedDatabase", Slow)
    store = SQLiteSeenEvents(tmp_path / "seen.db")
    claims: list[Claim] = []
    claiming = threading.Thread(target=lambda: claims.append(store.claim("a")))
    claiming.start()
    assert begun.wait(30)
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(0.1)
    waits = closing.is_alive()
    go.set()
    claiming.join(30)
    closing.join(30)
    assert waits
    assert claims == [Claim.NEW]
    store.close()


@pytest.mark.parametrize(("settings", "level"), [({}, 1), ({"power_safe": False}, 1), ({"power_safe": True}, 2)])
def test_power_safe_sets_synchronous_full_and_the_default_is_normal(tmp_path: Path, settings: Any, level: int) -> None:
    store = SQLiteSeenEvents(tmp_path / "seen.db", **settings)
    store.claim("a")
    assert store._database.connection is not None
    assert store._database.connection.execute("PRAGMA synchronous").fetchone() == (level,)
    store.close()


def test_sqlite_keeps_one_connection_until_it_is_closed(tmp_path: Path) -> None:
    store = SQLiteSeenEvents(tmp_path / "seen.db")
    assert store.lease == 60.0
    store.close()
    store.claim("a")
    connection = store._database.connection
    store.confirm("a")
    assert store.claim("a") is Claim.CONFIRMED
    assert store._database.connection is connection
    store.close()
    assert connection is not None
    with pytest.raises(sqlite3.ProgrammingError):
        connection.execute("SELECT 1")


def test_claim_from_before_the_clock_was_set_back_has_expired(tmp_path: Path) -> None:
    now = 100_000.0
    store = SQLiteSeenEvents(tmp_path / "seen.db", lease=60, clock=lambda: now)
    assert store.claim("a") is Claim.NEW
    assert store.claim("b") is Claim.NEW
    store.confirm("b")
    now -= 86_400
    assert store.claim("a") is Claim.NEW
    assert store.claim("a") is Claim.PENDING
    assert store.claim("b") is Claim.CONFIRMED
    store.close()


def test_sqlite_prunes_at_the_first_claim_and_every_hundredth(tmp_path: Path) -> None:
    now = 0.0
    store = SQLiteSeenEvents(tmp_path / "seen.db", ttl=10, lease=5, clock=lambda: now)

    def rows() -> int:
        _, (count,) = store._run("SELECT count(*) FROM seen_events")
        return int(count)

    for number in range(50):
        store.claim(f"a{number}")
    now = 100.0
    for number in range(50):
        store.claim(f"b{number}")
    assert rows() == 100
    store.claim("c")
    assert rows() == 51
    store.close()
    again = SQLiteSeenEvents(tmp_path / "seen.db", ttl=10, lease=5, clock=lambda: 200.0)
    again.claim("d")
    assert again._run("SELECT count(*) FROM seen_events") == (False, (1,))
    again.close()
