"""The SQLite files of the journal and the seen events: opened together, locked, forked, forgotten."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from signing_async import JournalError, SqliteJournal
from signing_async.webhooks import Claim, SQLiteSeenEvents

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


class Failing(sqlite3.Connection):
    """A connection that fails to set up a file with these error codes, one after the other."""

    codes: ClassVar[list[int]] = []

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        if "journal_mode" in sql and self.codes:
            error = sqlite3.OperationalError("it failed")
            error.sqlite_errorcode = self.codes.pop()
            raise error
        return super().execute(sql, *parameters)


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which connections fail: SQLite reports some errors at random, and some locks at once."""
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Failing))
    monkeypatch.setattr(Failing, "codes", [])
    return Failing.codes


async def test_opening_is_repeated_while_locked_and_other_errors_say_whether_they_may_pass(
    codes: list[int], tmp_path: Path
) -> None:
    codes += [sqlite3.SQLITE_BUSY, sqlite3.SQLITE_BUSY_RECOVERY]
    with contextlib.closing(SQLiteSeenEvents(tmp_path / "seen.db")) as seen:
        assert seen.claim("a") is Claim.NEW
    assert not codes
    passing = dict.fromkeys(("NOMEM", "IOERR", "FULL", "CANTOPEN"), True) | dict.fromkeys(
        ("CORRUPT", "READONLY"), False
    )
    for name, transient in passing.items():
        codes.append(getattr(sqlite3, f"SQLITE_{name}"))
        async with SqliteJournal(tmp_path / name) as journal:
            with pytest.raises(JournalError, match="it failed") as caught:
                await journal.claim("lease")
            assert caught.value.transient is transient


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_fork_waits_for_the_transaction_of_another_thread(tmp_path: Path) -> None:
    """The connection is not closed under the thread that uses it, and after the fork the next use opens a new one."""
    forked = threading.Event()

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0)
        forked.set()
        os.waitpid(child, 0)

    path = tmp_path / "seen.db"
    with contextlib.closing(SQLiteSeenEvents(path)) as seen:
        assert seen.claim("a") is Claim.NEW
        threads = [threading.Thread(target=seen.confirm, args=("a",)), threading.Thread(target=fork)]
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for each in threads:
                each.start()
                assert not forked.wait(0.1)
            other.execute("ROLLBACK")
        for each in threads:
            each.join(30)
        assert forked.is_set()
        assert seen.claim("a") is Claim.CONFIRMED
