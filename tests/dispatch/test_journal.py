"""The SQLite journal: claims of dead processes, durable writes, its file, forks, threads and event loops.

What every journal promises is in `tests.storage.test_journals`.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import secrets
import signal
import sqlite3
import time
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from signing_async import Claim, ConfigurationError, JournalError, SqliteJournal
from signing_async.storage import claims  # its races and forks cannot be provoked from outside
from tests.dispatch.holders import holder, taken
from tests.full_disk import full_disk


@contextlib.contextmanager
def locked(path: Path, kind: str = "IMMEDIATE") -> Iterator[None]:
    """Lock the database of a journal, as another process may."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(f"BEGIN {kind}")
        yield
        database.execute("ROLLBACK")


async def test_write_is_durable_wal_full_synchronous_and_a_synced_folder(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    opened: list[sqlite3.Connection] = []
    sync, connect = os.fsync, sqlite3.connect

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115  # text as it is
        sync(descriptor)

    def recorded(*given: Any, **named: Any) -> sqlite3.Connection:
        opened.append(connect(*given, **named))
        return opened[-1]

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(sqlite3, "connect", recorded)
    async with SqliteJournal(path) as journal:
        await taken(journal)
        assert str(path.parent) in synced
        names = ("journal_mode", "synchronous")
        assert [opened[-1].execute(f"PRAGMA {name}").fetchone()[0] for name in names] == ["wal", 2]


async def test_paused_process_keeps_its_claim_and_that_of_a_killed_one_is_free_at_once(path: Path) -> None:
    """The claim is free even if a child of the killed process is alive."""
    with holder(path) as process:
        process.send_signal(signal.SIGSTOP)
        async with SqliteJournal(path) as journal:
            assert await journal.claim("lease") is None
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert await journal.claim("lease") == Claim("lease", "begun", 2)


async def test_files_are_private_and_a_closed_journal_is_one_without_lock_files_of_dead_processes(path: Path) -> None:
    """The umask of the process that creates the files does not matter."""
    mask = os.umask(0)
    try:
        with holder(path) as process:
            pass
        process.wait()
        assert len(list(path.parent.glob("*.lock"))) == 1
        async with SqliteJournal(path) as journal:
            await taken(journal, "other")
            files = [(file.name.rpartition(".")[2], file.stat().st_mode & 0o777) for file in path.parent.iterdir()]
    finally:
        os.umask(mask)
    assert sorted(files) == [(name, 0o600) for name in ("journal", "journal-shm", "journal-wal", "lock")]
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600


# The file


async def test_lock_file_removed_before_it_was_locked_is_created_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    token = secrets.token_hex

    def locked(handle: int) -> bool:
        if len(names) == 1:
            next(path.parent.glob("*.lock")).unlink()
        return True

    def token_hex(size: int) -> str:
        names.append(token(size))
        return names[-1]

    monkeypatch.setattr(claims, "try_lock", locked)
    monkeypatch.setattr(secrets, "token_hex", token_hex)
    async with SqliteJournal(path) as journal:
        await taken(journal)
        assert [lock.name for lock in path.parent.glob("*.lock")] == [f"the.journal.{names[1]}.lock"]


async def test_claim_whose_owner_cannot_be_checked_is_held(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with SqliteJournal(path) as one, SqliteJournal(path) as other:
        await taken(one)
        await taken(other, "another")

        def fail(*_: object) -> bool:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(claims.OwnerLock, "is_alive", fail)
            assert await other.claim("lease") is None


async def test_file_locked_beyond_the_timeout_is_a_journal_error_and_the_next_try_succeeds(path: Path) -> None:
    """While it is opened, and later."""
    async with SqliteJournal(path, timeout=0.05) as journal:
        with locked(path, "EXCLUSIVE"), pytest.raises(JournalError, match="locked"):
            await journal.claim("lease")
        claim = await taken(journal)
        with locked(path), pytest.raises(JournalError, match=r"the\.journal: database is locked") as caught:
            await journal.write(claim, "one")
        assert caught.value.transient
        await journal.write(claim, "two")
        await journal.release(claim)
        assert (await taken(journal)).state == "two"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"this is no database, and never was one" * 100, r"the\.journal: file is not a database"),
        ("CREATE TABLE packages (weight)", r"the\.journal is the database of another program; it was not changed$"),
        (
            f"PRAGMA application_id = {0x5369676E}; PRAGMA user_version = 99",
            r"the\.journal was written by a newer version of signing-async; upgrade this one$",
        ),
    ],
)
async def test_file_that_is_no_journal_is_refused_and_unchanged(path: Path, content: bytes | str, words: str) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.executescript(content)
    before = path.read_bytes()
    async with SqliteJournal(path) as journal:
        with pytest.raises(JournalError, match=words) as caught:
            await journal.claim("lease")
        assert not caught.value.transient
    assert path.read_bytes() == before


async def test_missing_folder_is_an_error_and_no_new_journal(tmp_path: Path) -> None:
    async with SqliteJournal(tmp_path / "nowhere" / "the.journal") as journal:
        with pytest.raises(JournalError, match=r"nowhere/the\.journal: No such file or directory") as caught:
            await journal.claim("lease")
        assert not caught.value.transient
    assert list(tmp_path.iterdir()) == []


async def test_full_disk_is_a_journal_error_and_earlier_writes_are_kept(path: Path) -> None:
    states: list[str | None] = [None] * 20
    async with SqliteJournal(path) as journal:
        held = [await taken(journal, f"{number}") for number in range(20)]

        async def write_all() -> None:
            for number, claim in enumerate(held):
                await journal.write(claim, "x" * 20_000)
                states[number] = "x" * 20_000

        with full_disk(free=150_000), pytest.raises(JournalError, match=r"^the journal .*the\.journal") as caught:
            await write_all()
    assert caught.value.transient
    assert None in states[1:]
    async with SqliteJournal(path) as journal:
        assert [(await taken(journal, f"{number}")).state for number in range(20)] == states


@pytest.mark.parametrize(
    ("path", "timeout", "problem"),
    [
        (5, 5, "journal: must be a path"),
        ("a\0b", 5, "journal: must be a path"),
        ("journal", 3600.5, "timeout: must be a number above 0 and of at most 3600, got "),
    ],
)
def test_invalid_argument_is_refused_by_the_constructor(path: Any, timeout: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{problem}"):
        SqliteJournal(path, timeout=timeout)


def test_sqlite_without_returning_is_refused_by_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    with pytest.raises(ConfigurationError, match=r"^SqliteJournal needs SQLite 3\.35 \(RETURNING\), found "):
        SqliteJournal("journal")


# Processes, threads and event loops


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


async def test_forked_child_holds_no_lock_and_closes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = SqliteJournal(path)
    await taken(journal)
    claims._after_fork_in_child()
    claims._after_fork_in_child()
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
    await journal.aclose()


def drop(journals: list[SqliteJournal]) -> None:
    """Drop the only reference, and wait until the writer's thread has dropped its own."""
    reference, deadline = weakref.ref(journals.pop()), time.monotonic() + 60
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.001)


async def test_unclosed_journal_warns_when_collected_and_frees_its_claims(path: Path) -> None:
    journals = [SqliteJournal(path)]
    await taken(journals[0])
    with pytest.warns(ResourceWarning, match=r"SqliteJournal\(.*the\.journal'\) was not closed"):
        drop(journals)
    async with SqliteJournal(path) as other:
        assert await other.claim("lease") is not None


async def test_cancelled_write_to_a_locked_file_is_made_before_later_operations(path: Path) -> None:
    """The event loop is not blocked meanwhile."""
    async with SqliteJournal(path) as journal:
        claim = await taken(journal)
        with locked(path):
            writing = asyncio.create_task(journal.write(claim, "one"))
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert not writing.done()
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
        await journal.release(claim)
        assert (await taken(journal)).state == "one"
