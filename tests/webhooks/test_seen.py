"""The replay guards: claimed, confirmed, released; a crash loses no event, a restart forgets none."""

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

from signing_async._sqlite import SharedDatabase
from signing_async.errors import ConfigurationError
from signing_async.webhooks import (
    Claim,
    MemorySeenEvents,
    SeenEvents,
    SQLiteSeenEvents,
    seen,
)


class Clock:
    """A clock that moves when told."""

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
    """Makes a guard of each kind."""
    made: list[SQLiteSeenEvents] = []

    def factory(**settings: Any) -> SeenEvents:
        if request.param == "memory":
            return MemorySeenEvents(clock=clock, **settings)
        power_safe = request.param != "sqlite"
        guard = SQLiteSeenEvents(tmp_path / f"seen{len(made)}.db", clock=clock, power_safe=power_safe, **settings)
        made.append(guard)
        return guard

    yield factory
    for guard in made:
        guard.close()


def test_an_event_is_claimed_once_and_stays_confirmed(make: Make) -> None:
    """New, then pending for everybody else, then confirmed."""
    guard = make()
    assert guard.claim("a") is Claim.NEW
    assert guard.claim("a") is Claim.PENDING
    assert guard.claim("b") is Claim.NEW
    guard.confirm("a")
    assert guard.claim("a") is Claim.CONFIRMED
    assert guard.claim("b") is Claim.PENDING


def test_a_released_event_is_new_again(make: Make) -> None:
    """After a failed hand-off the next delivery is handed over."""
    guard = make()
    guard.claim("a")
    guard.release("a")
    assert guard.claim("a") is Claim.NEW


def test_a_confirmed_event_cannot_be_released(make: Make) -> None:
    """A late failure elsewhere does not undo what was acknowledged."""
    guard = make()
    guard.claim("a")
    guard.confirm("a")
    guard.release("a")
    guard.release("never seen")
    assert guard.claim("a") is Claim.CONFIRMED


def test_a_lease_ends(make: Make, clock: Clock) -> None:
    """Who crashed between claim and hand-off holds the event only for so long."""
    guard = make(lease=60)
    guard.claim("a")
    clock.now += 59
    assert guard.claim("a") is Claim.PENDING
    clock.now += 1
    assert guard.claim("a") is Claim.NEW
    assert guard.claim("a") is Claim.PENDING


def test_a_confirmation_counts_without_a_claim_and_after_the_lease(make: Make, clock: Clock) -> None:
    """What was handed over was handed over, even when the claim was lost meanwhile."""
    guard = make(lease=60)
    guard.claim("a")
    clock.now += 100
    guard.confirm("a")
    guard.confirm("b")
    assert guard.claim("a") is Claim.CONFIRMED
    assert guard.claim("b") is Claim.CONFIRMED


def test_what_is_too_old_is_forgotten(make: Make, clock: Clock) -> None:
    """After ttl seconds an id may come again, counted from the last confirmation."""
    guard = make(ttl=1000)
    for name in ("a", "b"):
        guard.claim(name)
        guard.confirm(name)
    clock.now += 500
    guard.confirm("a")
    clock.now += 500
    assert guard.claim("b") is Claim.NEW
    assert guard.claim("a") is Claim.CONFIRMED


@pytest.mark.parametrize("settings", [{"ttl": 0}, {"ttl": float("nan")}, {"lease": -1}])
def test_times_must_be_positive(make: Make, settings: dict[str, Any]) -> None:
    """The error names the setting."""
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        make(**settings)


def test_threads_share_a_guard(make: Make) -> None:
    """Of eight threads that claim the same thousand ids, each id goes to exactly one."""
    guard = make()
    won: list[str] = []

    def claim_all() -> None:
        won.extend(name for name in map(str, range(250)) if guard.claim(name) is Claim.NEW)

    threads = [threading.Thread(target=claim_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == sorted(map(str, range(250)))


def test_memory_is_bounded_and_keeps_what_is_pending(clock: Clock) -> None:
    """The oldest confirmed events go first; when all are pending, no new one is taken until a lease ends."""
    guard = MemorySeenEvents(max_events=3, lease=60, clock=clock)
    for name in "abcd":
        assert guard.claim(name) is Claim.NEW
        guard.confirm(name)
    assert len(guard) == 3
    assert guard.claim("b") is Claim.CONFIRMED
    assert guard.claim("a") is Claim.NEW
    assert guard.claim("e") is Claim.NEW
    assert guard.claim("f") is Claim.NEW
    assert guard.claim("g") is Claim.PENDING
    assert len(guard) == 3
    clock.now += 60
    assert guard.claim("g") is Claim.NEW
    with pytest.raises(ConfigurationError, match="max_events"):
        MemorySeenEvents(max_events=0)


def test_sqlite_survives_a_restart(tmp_path: Path) -> None:
    """A new object on the same file knows what the old one confirmed and what it left pending."""
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


def test_sqlite_forgets_in_the_file_too(tmp_path: Path, clock: Clock) -> None:
    """The file does not grow for ever: what is too old is deleted as new events come."""
    path = tmp_path / "seen.db"
    guard = SQLiteSeenEvents(path, ttl=100, lease=1, clock=clock)
    for number in range(150):
        guard.confirm(f"old {number}")
    clock.now += 1000
    for number in range(101):
        guard.claim(f"new {number}")
    guard.close()
    database = sqlite3.connect(path)
    names = {name for (name,) in database.execute("SELECT id FROM seen_events")}
    database.close()
    assert names == {f"new {number}" for number in range(101)}


def test_sqlite_in_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    """The error comes with the first use, and once the cause is gone the guard works."""
    path = tmp_path / "seen.db"
    path.write_bytes(b"this is no database at all, and long enough to tell" * 50)
    guard = SQLiteSeenEvents(path)
    with pytest.raises(sqlite3.DatabaseError):
        guard.claim("a")
    path.unlink()
    assert guard.claim("a") is Claim.NEW
    guard.close()


def _claim_in_child(guard: SQLiteSeenEvents, answers: Any) -> None:
    inherited = guard._database.connection
    answers.put([guard.claim("parent's"), guard.claim("child's"), guard._database.connection is not inherited])
    guard.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_sqlite_is_usable_on_both_sides_of_a_fork(tmp_path: Path) -> None:
    """Pre-forking servers make the guard before they fork: each process gets a connection of its own."""
    guard = SQLiteSeenEvents(tmp_path / "seen.db")
    guard.claim("parent's")
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_claim_in_child, args=(guard, answers))
    child.start()
    assert answers.get(timeout=30) == [Claim.PENDING, Claim.NEW, True]
    child.join(30)
    assert guard.claim("child's") is Claim.PENDING
    guard.close()


def _confirm_in_child(guard: SQLiteSeenEvents, told: Any, answers: Any) -> None:
    answers.put(guard.claim("early"))
    told.wait(30)
    guard.confirm("late")
    answers.put("confirmed")
    guard.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_sqlite_keeps_what_a_child_confirms_after_its_parent_left(tmp_path: Path) -> None:
    """A connection carried across the fork would let the parent delete the log that the child goes on writing to."""
    guard = SQLiteSeenEvents(tmp_path / "seen.db")
    guard.claim("parent's")
    context = multiprocessing.get_context("fork")
    told, answers = context.Event(), context.Queue()
    child = context.Process(target=_confirm_in_child, args=(guard, told, answers))
    child.start()
    assert answers.get(timeout=30) is Claim.NEW
    guard.close()
    told.set()
    assert answers.get(timeout=30) == "confirmed"
    assert guard.claim("late") is Claim.CONFIRMED
    child.join(30)
    guard.close()


FORKING = """
import os, signal, sys, threading
claims = []
def claim_in_a_thread():
    claims.append(threading.Thread(target=guard.claim, args=("while forking",)))
    claims[0].start()
    claims[0].join(0.3)
    print("waits" if claims[0].is_alive() else "goes on", flush=True)
os.register_at_fork(before=claim_in_a_thread)  # what is registered first runs last, right before the fork
from signing_async.webhooks import SQLiteSeenEvents
guard, other = SQLiteSeenEvents(sys.argv[1]), SQLiteSeenEvents(sys.argv[1] + ".other")
guard.claim("before")
other.claim("before")
child = os.fork()
signal.alarm(20)
if child:
    claims[0].join()
    os.waitpid(child, 0)
print(guard.claim("while forking" if child else "after").value, flush=True)
"""


def test_no_thread_uses_sqlite_during_a_fork(tmp_path: Path) -> None:
    """A thread that comes while another one forks waits: no lock and no connection of its is carried over."""
    script = [sys.executable, "-c", FORKING, str(tmp_path / "seen.db")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.split(), done.returncode) == (["waits", "new", "pending"], 0), done.stderr
    assert "Traceback" not in done.stderr


def test_sqlite_is_not_closed_under_a_thread_that_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for a step that is under way."""
    begun, go = threading.Event(), threading.Event()

    class Slow(SharedDatabase):
        def _open(self) -> sqlite3.Connection:
            begun.set()
            assert go.wait(30)
            return super()._open()

    monkeypatch.setattr(seen, "SharedDatabase", Slow)
    guard = SQLiteSeenEvents(tmp_path / "seen.db")
    claims: list[Claim] = []
    claiming = threading.Thread(target=lambda: claims.append(guard.claim("a")))
    claiming.start()
    assert begun.wait(30)
    closing = threading.Thread(target=guard.close)
    closing.start()
    closing.join(0.1)
    waits = closing.is_alive()
    go.set()
    claiming.join(30)
    closing.join(30)
    assert waits
    assert claims == [Claim.NEW]
    guard.close()


def test_settings_of_the_guards(tmp_path: Path) -> None:
    """The least is allowed; 0 is not."""
    one = MemorySeenEvents(max_events=1, ttl=0.5, lease=0.5)
    assert one.claim("a") is Claim.NEW
    assert one.claim("b") is Claim.PENDING
    for settings in ({"max_events": 0}, {"ttl": 0}, {"lease": 0}):
        with pytest.raises(ConfigurationError):
            MemorySeenEvents(**settings)  # type: ignore[arg-type]  # one of them each time
    for settings in ({"ttl": 0}, {"lease": 0}):
        with pytest.raises(ConfigurationError):
            SQLiteSeenEvents(tmp_path / "seen.db", **settings)  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize(("settings", "level"), [({}, 1), ({"power_safe": False}, 1), ({"power_safe": True}, 2)])
def test_a_power_cut_is_paid_for_only_where_it_is_asked_for(tmp_path: Path, settings: Any, level: int) -> None:
    """SQLite's synchronous is FULL (2) for those who want it, else NORMAL (1)."""
    guard = SQLiteSeenEvents(tmp_path / "seen.db", **settings)
    guard.claim("a")
    assert guard._database.connection is not None
    assert guard._database.connection.execute("PRAGMA synchronous").fetchone() == (level,)
    guard.close()


def test_one_connection_until_it_is_closed(tmp_path: Path) -> None:
    """Every step uses the same one, and close closes it."""
    guard = SQLiteSeenEvents(tmp_path / "seen.db")
    assert guard.lease == 60.0
    guard.close()
    guard.claim("a")
    connection = guard._database.connection
    guard.confirm("a")
    assert guard.claim("a") is Claim.CONFIRMED
    assert guard._database.connection is connection
    guard.close()
    assert connection is not None
    with pytest.raises(sqlite3.ProgrammingError):
        connection.execute("SELECT 1")


def test_a_file_is_tidied_at_the_first_claim_and_every_hundredth(tmp_path: Path) -> None:
    """What is over is removed so often, and not at every claim."""
    now = 0.0
    guard = SQLiteSeenEvents(tmp_path / "seen.db", ttl=10, lease=5, clock=lambda: now)

    def rows() -> int:
        count: int = guard._run("SELECT count(*) FROM seen_events").fetchone()[0]
        return count

    for number in range(50):
        guard.claim(f"a{number}")
    now = 100.0
    for number in range(50):
        guard.claim(f"b{number}")
    assert rows() == 100
    guard.claim("c")
    assert rows() == 51
    guard.close()
    again = SQLiteSeenEvents(tmp_path / "seen.db", ttl=10, lease=5, clock=lambda: 200.0)
    again.claim("d")
    assert again._run("SELECT count(*) FROM seen_events").fetchone()[0] == 1
    again.close()
