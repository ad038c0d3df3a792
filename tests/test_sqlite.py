"""The SQLite files of the journal and the seen events: opened together, locked, forked, forgotten."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from signing_async.storage.sqlite import SharedDatabase, is_transient  # SQLite reports these locks and errors at random

TOGETHER = """
import asyncio, multiprocessing, sys
from signing_async import SqliteJournal
from signing_async.webhooks import SQLiteSeenEvents

folder, kind, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])

async def claim_in_journal(path):
    async with SqliteJournal(path) as journal:
        await journal.claim("lease")

def open_each(barrier, failures):
    for number in range(rounds):
        path = f"{folder}/{number}.db"
        barrier.wait(60)
        try:
            if kind == "seen":
                SQLiteSeenEvents(path).claim("event")
            else:
                asyncio.run(claim_in_journal(path))
        except Exception as error:
            failures.put(f"round {number}: {error!r}")

context = multiprocessing.get_context("fork")
barrier, failures = context.Barrier(4), context.SimpleQueue()
processes = [context.Process(target=open_each, args=(barrier, failures)) for _ in range(4)]
for process in processes:
    process.start()
for process in processes:
    process.join()
while not failures.empty():
    print(failures.get())
"""


@pytest.mark.parametrize(("kind", "rounds"), [("seen", 60), ("journal", 15)])
def test_processes_open_a_new_file_together(kind: str, rounds: int, tmp_path: Path) -> None:
    """Four at a time make it, and none is told that it is locked."""
    command = [sys.executable, "-c", TOGETHER, str(tmp_path), kind, f"{rounds}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.returncode) == ("", 0), done.stdout + done.stderr


def make_table(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE IF NOT EXISTS numbers (number)")


@pytest.fixture
def database(tmp_path: Path) -> SharedDatabase:
    return SharedDatabase(tmp_path / "numbers.db", make_table, timeout=10)


def numbers(database: SharedDatabase) -> list[int]:
    with database.connected() as connection:
        return [number for (number,) in connection.execute("SELECT number FROM numbers")]


@pytest.mark.parametrize("code", [sqlite3.SQLITE_BUSY, sqlite3.SQLITE_BUSY_RECOVERY])
def test_preparing_is_repeated_while_the_file_is_locked(code: int, tmp_path: Path) -> None:
    """SQLite reports some locks at once, whatever its timeout."""
    attempts: list[int] = []

    def prepare(connection: sqlite3.Connection) -> None:
        attempts.append(1)
        if len(attempts) < 3:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = code
            raise error
        make_table(connection)

    assert numbers(SharedDatabase(tmp_path / "numbers.db", prepare, timeout=10)) == []
    assert len(attempts) == 3


@pytest.mark.parametrize(
    ("name", "transient"),
    [("BUSY", True), ("IOERR", True), ("FULL", True), ("CANTOPEN", True), ("CORRUPT", False), ("READONLY", False)],
)
def test_error_says_whether_the_operation_may_succeed_later(name: str, transient: bool) -> None:
    error = sqlite3.OperationalError("it failed")
    error.sqlite_errorcode = getattr(sqlite3, f"SQLITE_{name}")
    assert is_transient(error) is transient


# Forks


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_fork_waits_for_the_transaction_of_another_thread(database: SharedDatabase) -> None:
    """The connection is not closed under the thread that uses it, and after the fork the next use opens a new one."""
    at_rest = threading.Event()

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0)
        at_rest.set()
        os.waitpid(child, 0)

    forking = threading.Thread(target=fork)
    with database.connected() as connection:
        forking.start()
        assert not at_rest.wait(0.1)
        connection.execute("INSERT INTO numbers VALUES (1)")
    forking.join(30)
    assert database.connection is None
    assert numbers(database) == [1]
