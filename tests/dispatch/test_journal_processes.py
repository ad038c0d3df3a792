"""The SQLite journal across forks, processes, threads and event loops."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import signing_async.storage.claims
import signing_async.storage.sqlite
from signing_async import JournalError, SqliteJournal
from signing_async.dispatch.journal import Claim
from tests.dispatch.holders import taken

WITHOUT_LOCKS = """
import asyncio, concurrent.futures, os, random, sqlite3, sys
sys.modules["fcntl"] = None
del os.register_at_fork
from signing_async import ConfigurationError, SqliteJournal
try:
    SqliteJournal("journal")
except ConfigurationError as error:
    print(error)
"""


def test_module_imports_without_file_locks_and_the_constructor_says_what_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_LOCKS], capture_output=True, text=True)
    message = "SqliteJournal needs file locks, which this system does not have: use Redis, PostgreSQL or S3\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, message, "")


def _child(journal: SqliteJournal, pipe: Connection) -> None:
    async def tries() -> str:
        try:
            await journal.claim("other")
        except JournalError as error:
            await journal.aclose()
            return str(error)
        return "claimed"

    pipe.send(asyncio.run(tries()))
    pipe.recv()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
async def test_forked_child_can_neither_use_the_journal_nor_keep_its_claims(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    async with SqliteJournal(path) as journal:
        claim = await taken(journal)
        await journal.write(claim, "one")
        child = context.Process(target=_child, args=(journal, theirs))
        child.start()
        assert "before a fork" in await asyncio.to_thread(ours.recv)
        async with SqliteJournal(path) as other:
            assert await other.claim("lease") is None
        await journal.write(claim, "two")
        await journal.aclose()
        async with SqliteJournal(path) as other:
            assert (await taken(other)).state == "two"
    ours.send("end")
    await asyncio.to_thread(child.join)


FORK = """
import asyncio, os, sys, time
from signing_async import SqliteJournal

async def main():
    journal = SqliteJournal(sys.argv[1])
    claim = await journal.claim("lease")
    ready, started = os.pipe()
    child = os.fork()
    if not child:
        os.write(started, b"x")
        time.sleep(600)
    os.read(ready, 1)
    await journal.write(claim, "begun")
    print(child, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_claims_of_a_dead_parent_are_free_while_its_child_lives(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", FORK, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            async with SqliteJournal(path) as journal:
                assert await journal.claim("lease") is None
                process.kill()
                process.wait()
                assert await journal.claim("lease") == Claim("lease", "begun", 2)
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


async def test_forked_child_holds_no_lock_and_closes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = SqliteJournal(path)
    await taken(journal)
    signing_async.storage.claims._after_fork_in_child()
    signing_async.storage.claims._after_fork_in_child()
    assert not journal._engine.lock.is_held
    async with SqliteJournal(path) as other:
        assert await other.claim("lease") is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        with pytest.raises(
            JournalError, match=f"^the journal {path} was opened before a fork; open it again in the child process$"
        ) as caught:
            await journal.claim("other")
        assert not caught.value.transient
        await journal.aclose()
        assert journal._engine._closing is None
    await journal.aclose()


async def test_journals_opened_together_share_one_file_and_each_package_has_one_claim(path: Path) -> None:
    journals = [SqliteJournal(path) for _ in range(12)]
    claims = await asyncio.gather(*(journal.claim("lease") for journal in journals))
    assert sum(claim is not None for claim in claims) == 1
    await asyncio.gather(*(journal.aclose() for journal in journals))


def test_journal_can_be_used_by_consecutive_event_loops(path: Path) -> None:
    journal = SqliteJournal(path)
    states: list[str | None] = []

    async def write(number: int) -> None:
        claim = await taken(journal)
        states.append(claim.state)
        await journal.write(claim, f"{number}")
        await journal.release(claim)

    for number in range(3):
        thread = threading.Thread(target=lambda number=number: asyncio.run(write(number)))
        thread.start()
        thread.join()
    asyncio.run(journal.aclose())
    assert states == [None, "0", "1"]


def test_journal_can_be_used_by_two_event_loops_at_once(path: Path) -> None:
    journal = SqliteJournal(path)
    claims: dict[str, Claim] = {}

    async def claim(key: str) -> None:
        async with asyncio.timeout(10):
            claims[key] = await taken(journal, key)

    threads = [threading.Thread(target=lambda key=key: asyncio.run(claim(key))) for key in "abc"]
    with journal._engine._database.lock:
        threads[0].start()
        while journal._engine._waiting or not journal._engine._writing:
            time.sleep(0.001)
        for thread in threads[1:]:
            thread.start()
        while len(journal._engine._waiting) < 2:
            time.sleep(0.001)
    for thread in threads:
        thread.join()
    asyncio.run(journal.aclose())
    assert claims == {key: Claim(key, None, 1) for key in "abc"}


async def test_unclosed_journal_warns_when_collected_and_frees_its_claims(path: Path) -> None:
    journal = SqliteJournal(path)
    await taken(journal)
    connection = journal._engine._database.connection
    assert connection is not None
    await asyncio.sleep(0.05)  # the writer's thread holds it for a moment longer
    with pytest.warns(ResourceWarning, match=r"SqliteJournal\(.*the\.journal'\) was not closed"):
        del journal
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")
    async with SqliteJournal(path) as other:
        assert await other.claim("lease") is not None
