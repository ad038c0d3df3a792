"""The journal in a SQLite file: who has a package, what was written of it, and what remains when things fail."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import importlib.util
import multiprocessing
import os
import pickle
import secrets
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import signing_async.dispatch.journal
from signing_async import ConfigurationError, InvalidRequest, JournalError, SqliteJournal
from signing_async._sqlite import SharedDatabase
from signing_async.dispatch.journal import Claim, ClaimLost

HOLD = """
import asyncio, sys
from signing_async import SqliteJournal

async def main():
    journal = SqliteJournal(sys.argv[1])
    claim = await journal.claim("lease")
    await journal.write(claim, "begun")
    print("held", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the journal is."""
    return tmp_path / "the.journal"


@contextlib.contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the package ``lease``."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


async def taken(journal: SqliteJournal, key: str = "lease") -> Claim:
    """The claim on a package that is free."""
    claim = await journal.claim(key)
    assert claim is not None
    return claim


async def test_claim_returns_the_last_text_and_a_larger_fencing_token(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        claim = await taken(journal)
        assert claim == Claim("lease", None, 1)
        await journal.write(claim, "one")
        await journal.write(claim, "two ❤")
        await journal.release(claim)
    async with SqliteJournal(path) as journal:
        assert await journal.claim("lease") == Claim("lease", "two ❤", 2)
        assert await journal.claim("other") == Claim("other", None, 1)


async def test_file_format_of_earlier_versions_is_read_and_written(path: Path) -> None:
    table = (
        "CREATE TABLE packages (key TEXT PRIMARY KEY, state TEXT, owner TEXT, fence INTEGER NOT NULL,"
        " updated_at REAL NOT NULL) WITHOUT ROWID"
    )
    known = {"application_id": 0x5369676E, "user_version": 1}
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(table)
        database.execute("INSERT INTO packages VALUES ('lease', 'sent', NULL, 6, 1.5)")
        for name, value in known.items():
            database.execute(f"PRAGMA {name} = {value}")
        database.commit()
    for file in (path, path.with_name("a.new.journal")):
        async with SqliteJournal(file) as journal:
            claim = await taken(journal)
            assert claim == (Claim("lease", "sent", 7) if file == path else Claim("lease", None, 1))
        with contextlib.closing(sqlite3.connect(file)) as database:
            assert database.execute("SELECT sql FROM sqlite_master").fetchall() == [(table,)]
            assert {name: database.execute(f"PRAGMA {name}").fetchone()[0] for name in known} == known


async def test_write_is_durable_wal_full_synchronous_and_a_synced_folder(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(signing_async.dispatch.journal, "sync_folder", synced.append)
    async with SqliteJournal(path) as journal:
        await taken(journal)
        assert synced == [path.parent]
        assert journal._database.connection is not None
        settings = [
            journal._database.connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous")
        ]
        assert settings == ["wal", 2]


async def test_files_of_the_journal_are_private_to_their_owner_whatever_the_umask(path: Path) -> None:
    mask = os.umask(0)
    try:
        async with SqliteJournal(path) as journal:
            await taken(journal)
            modes = {file.name.rpartition(".")[2]: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    finally:
        os.umask(mask)
    assert modes == dict.fromkeys(["journal", "journal-wal", "journal-shm", "lock"], 0o600)


async def test_timeout_is_ten_seconds_by_default(path: Path) -> None:
    for seconds, named in ((0.25, {"timeout": 0.25}), (10, {})):
        async with SqliteJournal(path, **named) as journal:
            await taken(journal)
            assert journal._database.connection is not None
            assert journal._database.connection.execute("PRAGMA busy_timeout").fetchone() == (seconds * 1000,)


async def test_claimed_package_cannot_be_claimed_by_the_same_or_another_journal_object(path: Path) -> None:
    async with SqliteJournal(path) as one, SqliteJournal(path) as other:
        claim = await taken(one)
        assert await one.claim("lease") is None
        assert await other.claim("lease") is None
        await one.release(claim)
        assert await other.claim("lease") == Claim("lease", None, 2)


async def test_write_and_release_after_a_release_or_another_claim_raise_claim_lost(path: Path) -> None:
    async with SqliteJournal(path) as one, SqliteJournal(path) as other:
        claim = await taken(one)
        await one.release(claim)
        for late in (one.write(claim, "late"), one.release(claim)):
            with pytest.raises(ClaimLost, match=r"^the claim on package 'lease' was lost: another run has claimed it$"):
                await late
        newer = await taken(other)
        with pytest.raises(ClaimLost) as caught:
            await one.write(claim, "late")
        assert pickle.loads(pickle.dumps(caught.value)).key == "lease"
        assert newer.state is None


async def test_claim_of_a_killed_process_is_free_at_once_with_its_text(path: Path) -> None:
    with holder(path) as process:
        async with SqliteJournal(path) as journal:
            assert await journal.claim("lease") is None
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert await journal.claim("lease") == Claim("lease", "begun", 2)


async def test_dead_owner_checked_by_two_journals_is_taken_for_dead_by_both(path: Path) -> None:
    with holder(path) as process:
        pass
    process.wait()
    (lock,) = path.parent.glob("*.lock")
    with lock.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        async with SqliteJournal(path) as journal:
            assert await journal.claim("lease") == Claim("lease", "begun", 2)


async def test_lock_file_removed_by_another_process_meanwhile_is_no_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holder(path) as process:
        pass
    process.wait()
    (lock,) = path.parent.glob("*.lock")
    locked = signing_async.dispatch.journal._locked

    def looked_at(handle: int, *, exclusively: bool) -> bool:
        lock.unlink(missing_ok=True)
        return locked(handle, exclusively=exclusively)

    monkeypatch.setattr(signing_async.dispatch.journal, "_locked", looked_at)
    async with SqliteJournal(path) as journal:
        assert await journal.claim("lease") == Claim("lease", "begun", 2)


async def test_checking_a_live_owner_leaks_no_descriptor(path: Path) -> None:
    async with SqliteJournal(path) as one, SqliteJournal(path) as other:
        await taken(one)
        await taken(other, "other")
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(20):
            assert await other.claim("lease") is None
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


async def test_paused_process_keeps_its_claim(path: Path) -> None:
    with holder(path) as process:
        process.send_signal(signal.SIGSTOP)
        async with SqliteJournal(path) as journal:
            assert await journal.claim("lease") is None
        process.send_signal(signal.SIGCONT)


async def test_removed_lock_file_frees_the_claim_and_the_former_owners_writes_are_refused(path: Path) -> None:
    async with SqliteJournal(path) as one, SqliteJournal(path) as other:
        claim = await taken(one)
        for lock in path.parent.glob("*.lock"):
            lock.unlink()
        newer = await taken(other)
        with pytest.raises(ClaimLost):
            await one.write(claim, "late")
        await other.write(newer, "well")


async def test_closed_journal_is_one_file_and_lock_files_of_dead_processes_are_removed(path: Path) -> None:
    with holder(path) as process:
        pass
    process.wait()
    assert len(list(path.parent.glob("*.lock"))) == 1
    async with SqliteJournal(path) as journal:
        await taken(journal, "other")
        assert len(list(path.parent.glob("*.lock"))) == 1
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600


async def test_lock_file_removed_before_it_was_locked_is_created_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    token = secrets.token_hex

    def locked(handle: int, *, exclusively: bool) -> bool:
        if exclusively and len(names) == 1:
            next(path.parent.glob("*.lock")).unlink()
        return True

    def token_hex(size: int) -> str:
        names.append(token(size))
        return names[-1]

    monkeypatch.setattr(signing_async.dispatch.journal, "_locked", locked)
    monkeypatch.setattr(secrets, "token_hex", token_hex)
    async with SqliteJournal(path) as journal:
        await taken(journal)
        assert [lock.name for lock in path.parent.glob("*.lock")] == [f"the.journal.{names[1]}.lock"]


async def test_cancelled_claim_is_released(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        for delay in (0.0, 0.001, 0.01):
            claiming = asyncio.create_task(journal.claim("lease"))
            await asyncio.sleep(delay)
            if claiming.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await claiming
            else:
                await journal.release(await taken_of(claiming))
            async with asyncio.timeout(10):
                while (claim := await journal.claim("lease")) is None:
                    await asyncio.sleep(0.001)
            await journal.release(claim)


async def taken_of(claiming: asyncio.Task[Claim | None]) -> Claim:
    """The claim that a task got."""
    claim = await claiming
    assert claim is not None
    return claim


async def test_lock_file_that_cannot_be_removed_does_not_fail_the_close(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "journals", tmp_path / "moved"
    folder.mkdir()
    journal = SqliteJournal(folder / "journal")
    await journal.write(await taken(journal), "one")
    folder.rename(elsewhere)
    folder.write_text("a file now")
    await journal.aclose()
    await journal.aclose()
    async with SqliteJournal(elsewhere / "journal") as other:
        assert (await taken(other)).state == "one"
    assert not list(elsewhere.glob("*.lock"))


async def test_claim_cancelled_during_the_close_is_free(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with SqliteJournal(path) as journal:
        await taken(journal, "first")
        with journal._database.lock:
            claiming = asyncio.create_task(journal.claim("lease"))
            await asyncio.sleep(0.01)
            claiming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await claiming
            closing = asyncio.create_task(journal.aclose())
            await asyncio.sleep(0.01)
        await closing
    async with SqliteJournal(path) as journal:
        assert await journal.claim("lease") is not None
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


async def test_claim_cancelled_as_it_succeeds_is_released(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        claiming = asyncio.create_task(journal.claim("lease"))
        await asyncio.sleep(0)

        def deliver(steps: list[Any]) -> None:
            SqliteJournal._deliver(journal, steps)
            claiming.cancel()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal, "_deliver", deliver)
            with pytest.raises(asyncio.CancelledError):
                await claiming
        async with asyncio.timeout(10):
            while await journal.claim("lease") is None:
                await asyncio.sleep(0.001)


async def test_claim_cancelled_as_it_fails_raises_cancelled_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with SqliteJournal(path.parent / "nowhere" / "the.journal") as journal:
        claiming = asyncio.create_task(journal.claim("lease"))
        await asyncio.sleep(0)

        def deliver(steps: list[Any]) -> None:
            SqliteJournal._deliver(journal, steps)
            claiming.cancel()

        monkeypatch.setattr(journal, "_deliver", deliver)
        with pytest.raises(asyncio.CancelledError):
            await claiming


def test_claim_of_a_closed_event_loop_is_released(path: Path) -> None:
    journal = SqliteJournal(path)

    async def ask() -> None:
        journal._database.lock.acquire()
        claiming = asyncio.create_task(journal.claim("lease"))
        await asyncio.sleep(0.01)
        claiming.cancel()

    async def ask_again() -> Claim | None:
        async with asyncio.timeout(10):
            while (claim := await journal.claim("lease")) is None:
                await asyncio.sleep(0.001)
        await journal.aclose()
        return claim

    asyncio.run(ask())
    journal._database.lock.release()
    claim = asyncio.run(ask_again())
    assert claim is not None
    assert claim.fence == 2


async def test_cancelled_claim_of_a_claimed_package_releases_nothing(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        claim = await taken(journal)
        with journal._database.lock:
            claiming = asyncio.create_task(journal.claim("lease"))
            await asyncio.sleep(0.01)
            claiming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await claiming
        await journal.write(claim, "one")


async def test_cancelled_write_is_made_before_later_operations(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        claim = await taken(journal)
        with journal._database.lock:
            writing = asyncio.create_task(journal.write(claim, "one"))
            await asyncio.sleep(0.01)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
        await journal.release(claim)
        assert (await taken(journal)).state == "one"


async def test_close_finishes_what_was_requested(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        claim = await taken(journal)
        with journal._database.lock:
            writes = [asyncio.create_task(journal.write(claim, "one"))]
            await asyncio.sleep(0.05)
            writes.append(asyncio.create_task(journal.write(claim, "two")))
            await asyncio.sleep(0.05)
            closing = asyncio.create_task(journal.aclose())
            await asyncio.sleep(0.05)
        await asyncio.gather(*writes, closing)
        assert list(path.parent.iterdir()) == [path]
    async with SqliteJournal(path) as journal:
        assert (await taken(journal)).state == "two"


async def test_cancelled_close_still_closes(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        claim = await taken(journal)
        with journal._database.lock:
            writing = asyncio.create_task(journal.write(claim, "one"))
            await asyncio.sleep(0.01)
            closing = asyncio.create_task(journal.aclose())
            await asyncio.sleep(0.01)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
        await writing
        await journal.aclose()
        assert list(path.parent.iterdir()) == [path]


async def test_concurrent_writes_share_a_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    commit = SqliteJournal._commit

    def counted(self: SqliteJournal, steps: list[Any]) -> None:
        sizes.append(len(steps))
        commit(self, steps)

    async with SqliteJournal(path) as journal:
        claims = [await taken(journal, f"{number}") for number in range(64)]
        monkeypatch.setattr(SqliteJournal, "_commit", counted)
        with journal._database.lock:
            first = asyncio.create_task(journal.write(claims[0], "first"))
            while not sizes:
                await asyncio.sleep(0.001)
            rest = asyncio.gather(*(journal.write(claim, f"state of {claim.key}") for claim in claims))
            await asyncio.sleep(0)
        await first
        await rest
        assert sizes == [1, 64]
        with contextlib.closing(sqlite3.connect(path)) as database:
            rows = database.execute("SELECT key, state FROM packages").fetchall()
        assert sorted(rows) == sorted((claim.key, f"state of {claim.key}") for claim in claims)


async def test_event_loop_is_not_blocked_while_the_file_is_locked(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        claim = await taken(journal)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            writing = asyncio.create_task(journal.write(claim, "one"))
            turns = 0
            while turns < 20:
                await asyncio.sleep(0.001)
                turns += 1
            assert not writing.done()
            database.execute("ROLLBACK")
        await writing
        await journal.release(claim)
        assert (await taken(journal)).state == "one"


async def test_file_locked_beyond_the_timeout_is_a_journal_error_and_the_next_try_succeeds(path: Path) -> None:
    async with SqliteJournal(path, timeout=0.05) as journal:
        claim = await taken(journal)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            with pytest.raises(JournalError, match=r"the\.journal: database is locked"):
                await journal.write(claim, "one")
            database.execute("ROLLBACK")
        await journal.write(claim, "two")
        await journal.release(claim)
        assert (await taken(journal)).state == "two"


async def test_opening_a_locked_file_is_retried_until_the_timeout(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("BEGIN EXCLUSIVE")
        async with SqliteJournal(path, timeout=0.05) as journal:
            with pytest.raises(JournalError, match="locked"):
                await journal.claim("lease")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"this is no database, and never was one" * 100, "file is not a database"),
        (b"SQLite format 3\0" + b"\xff" * 4000, r"the\.journal: "),
    ],
)
async def test_file_that_is_no_database_is_refused_and_unchanged(path: Path, content: bytes, words: str) -> None:
    path.write_bytes(content)
    async with SqliteJournal(path) as journal:
        with pytest.raises(JournalError, match=words):
            await journal.claim("lease")
    assert path.read_bytes() == content


async def test_damaged_pages_are_a_journal_error(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        claims = [await taken(journal, f"{number}") for number in range(200)]
        await asyncio.gather(*(journal.write(claim, "state" * 100) for claim in claims))
    data = bytearray(path.read_bytes())
    data[4096:-100] = b"\x5a" * (len(data) - 4196)
    path.write_bytes(data)
    async with SqliteJournal(path) as journal:
        with pytest.raises(JournalError, match=r"the\.journal: .*malformed"):
            await journal.claim("7")


async def test_database_of_another_program_is_refused_and_unchanged(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE packages (weight)")
    before = path.read_bytes()
    async with SqliteJournal(path) as journal:
        words = f"^the journal {path} is the database of another program; it was not changed$"
        with pytest.raises(JournalError, match=words):
            await journal.claim("lease")
    assert path.read_bytes() == before


async def test_file_created_by_another_run_during_the_opening_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect: Any = sqlite3.connect
    moments, made = 12, tmp_path

    class Overtaken(sqlite3.Connection):
        left = 0

        def execute(self, *arguments: Any) -> sqlite3.Cursor:
            Overtaken.left -= 1
            if not Overtaken.left:
                # Where this one has the file, the other one has to wait, here in vain.
                impatient = connect(made, timeout=0.0, isolation_level=None)
                with contextlib.suppress(sqlite3.OperationalError), contextlib.closing(impatient) as other:
                    signing_async.dispatch.journal._prepare(other, made)
            return super().execute(*arguments)

    monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=Overtaken))
    for at in range(1, moments + 1):
        made = tmp_path / f"{at}.journal"
        Overtaken.left = at
        async with SqliteJournal(made) as journal:
            assert await journal.claim("lease") == Claim("lease", None, 1)
    assert Overtaken.left < 0


async def test_journal_of_a_newer_version_is_refused(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await taken(journal)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 2")
    async with SqliteJournal(path) as journal:
        with pytest.raises(
            JournalError,
            match=r"was written by a newer version of signing-async; upgrade this one$",
        ):
            await journal.claim("lease")


async def test_missing_folder_is_an_error_and_no_new_journal(tmp_path: Path) -> None:
    async with SqliteJournal(tmp_path / "nowhere" / "the.journal") as journal:
        with pytest.raises(JournalError, match=r"nowhere/the\.journal: No such file or directory"):
            await journal.claim("lease")
    assert list(tmp_path.iterdir()) == []


FULL = """
import asyncio, resource, signal, sys
from signing_async import JournalError, SqliteJournal

async def main():
    async with SqliteJournal(sys.argv[1]) as journal:
        claims = [await journal.claim(f"{number}") for number in range(20)]
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
        written = 0
        try:
            for claim in claims:
                await journal.write(claim, "x" * 20_000)
                written += 1
        except JournalError as error:
            print(written, error)
        sys.stdout.flush()

asyncio.run(main())
"""


async def test_full_disk_is_a_journal_error_and_earlier_writes_are_kept(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, timeout=60)
    written, _, words = done.stdout.partition(" ")
    assert "the.journal: " in words, done.stderr
    assert 0 < int(written) < 20
    async with SqliteJournal(path) as journal:
        states = [(await taken(journal, f"{number}")).state for number in range(20)]
    assert states == ["x" * 20_000] * int(written) + [None] * (20 - int(written))


async def test_failed_commit_keeps_nothing_and_fails_every_operation_in_it(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        claims = [await taken(journal, f"{number}") for number in range(3)]
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute(
                "CREATE TRIGGER strict BEFORE UPDATE ON packages WHEN new.state = 'bad'"
                " BEGIN SELECT RAISE(ABORT, 'it is bad'); END"
            )
            with journal._database.lock:
                first = asyncio.create_task(journal.write(claims[0], "one"))
                await asyncio.sleep(0)
                while journal._waiting:
                    await asyncio.sleep(0.001)
                texts = {1: "two", 2: "bad"}
                rest = [asyncio.create_task(journal.write(claims[at], text)) for at, text in texts.items()]
                await asyncio.sleep(0.01)
            await first
            results = await asyncio.gather(*rest, return_exceptions=True)
            assert [str(result) for result in results] == [f"the journal {path}: it is bad"] * 2
            kept = database.execute("SELECT key, state FROM packages ORDER BY key").fetchall()
            assert kept == [("0", "one"), ("1", None), ("2", None)]
            database.execute("DROP TRIGGER strict")
        for claim in claims:
            await journal.write(claim, "good")
            await journal.release(claim)
        assert [(await taken(journal, claim.key)).state for claim in claims] == ["good"] * 3


async def test_unexpected_error_reaches_every_waiter_as_its_own_journal_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with SqliteJournal(path) as journal:
        claim = await taken(journal)

        def fail(self: SharedDatabase) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(SharedDatabase, "_open", fail)
            results = await asyncio.gather(
                journal.write(claim, "one"), journal.write(claim, "two"), return_exceptions=True
            )
        assert [str(result) for result in results] == [f"the journal {path}: MemoryError"] * 2
        assert results[0] is not results[1]
        await journal.write(claim, "three")


async def test_closed_journal_refuses_everything_and_can_be_closed_again(path: Path) -> None:
    journal = SqliteJournal(path)
    claim = await taken(journal)
    await journal.aclose()
    await journal.aclose()
    for late in (journal.claim("other"), journal.write(claim, "late"), journal.release(claim)):
        with pytest.raises(JournalError, match=f"^the journal {path} is closed$"):
            await late


async def test_close_ends_the_writer_thread(path: Path) -> None:
    before = threading.enumerate()
    async with SqliteJournal(path) as journal:
        await taken(journal)
        (writer,) = [thread for thread in threading.enumerate() if thread not in before]
        assert writer.name.startswith("signing-journal")
    async with asyncio.timeout(10):
        while writer.is_alive():
            await asyncio.sleep(0.005)


async def test_unused_journal_creates_no_file(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        assert repr(journal) == f"SqliteJournal({str(path)!r})"
    assert not path.exists()


async def test_home_of_an_unknown_user_is_taken_literally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~nobody-of-that-name").mkdir()
    async with SqliteJournal("~nobody-of-that-name/journal") as journal:
        await taken(journal)
    assert (tmp_path / "~nobody-of-that-name" / "journal").exists()


@pytest.mark.parametrize("path", [5, b"journal", None, "", "a\0b"])
def test_invalid_path_is_refused_by_the_constructor(path: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^journal: must be a path"):
        SqliteJournal(path)


@pytest.mark.parametrize("timeout", [0, -1, True, "5", float("nan"), 3600.5])
def test_invalid_timeout_is_refused_by_the_constructor(timeout: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^timeout: must be a number above 0 and of at most 3600, got "):
        SqliteJournal("journal", timeout=timeout)
    SqliteJournal("journal", timeout=3600)


@pytest.mark.parametrize("text", ["", 5, "null \0 character", "half a \ud800 pair"])
async def test_text_that_a_database_cannot_hold_is_refused_before_it_is_written(path: Path, text: Any) -> None:
    async with SqliteJournal(path) as journal:
        with pytest.raises(InvalidRequest, match="key: must be a non-empty string"):
            await journal.claim(text)
        with pytest.raises(InvalidRequest, match="state: must be a non-empty string"):
            await journal.write(await taken(journal), text)
        with contextlib.closing(sqlite3.connect(path)) as database:
            assert database.execute("SELECT key, state FROM packages").fetchall() == [("lease", None)]


async def test_path_named_memory_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with SqliteJournal(":memory:") as journal:
        monkeypatch.chdir("/")
        await journal.write(await taken(journal), "one")
    assert (tmp_path / ":memory:").exists()
    (tmp_path / "link").symlink_to(tmp_path / ":memory:")
    async with SqliteJournal(tmp_path / "link") as journal, SqliteJournal(tmp_path / ":memory:") as other:
        assert (await taken(journal)).state == "one"
        assert await other.claim("lease") is None


def test_module_imports_without_fcntl_and_the_constructor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.delattr(os, "register_at_fork")
    name = "signing_async.dispatch._journal_elsewhere"
    spec = importlib.util.spec_from_file_location(name, str(signing_async.dispatch.journal.__file__))
    assert spec is not None
    assert spec.loader is not None
    elsewhere = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, elsewhere)
    spec.loader.exec_module(elsewhere)
    with pytest.raises(
        ConfigurationError, match=r"^SqliteJournal needs POSIX file locks, which this system does not have$"
    ):
        elsewhere.SqliteJournal("journal")


# Forks and threads


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
    child = os.fork()
    if not child:
        time.sleep(600)
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
    signing_async.dispatch.journal._after_fork_in_child()
    signing_async.dispatch.journal._after_fork_in_child()
    assert journal._lock is None
    async with SqliteJournal(path) as other:
        assert await other.claim("lease") is not None
    with monkeypatch.context() as patch:
        patch.setattr(journal, "_process", 0)
        with pytest.raises(
            JournalError, match=f"^the journal {path} was opened before a fork; open it again in the child process$"
        ):
            await journal.claim("other")
        await journal.aclose()
        assert journal._closing is None
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
    with journal._database.lock:
        threads[0].start()
        while journal._waiting or not journal._writing:
            time.sleep(0.001)
        for thread in threads[1:]:
            thread.start()
        while len(journal._waiting) < 2:
            time.sleep(0.001)
    for thread in threads:
        thread.join()
    asyncio.run(journal.aclose())
    assert claims == {key: Claim(key, None, 1) for key in "abc"}


async def test_unclosed_journal_warns_when_collected_and_frees_its_claims(path: Path) -> None:
    journal = SqliteJournal(path)
    await taken(journal)
    connection = journal._database.connection
    assert connection is not None
    await asyncio.sleep(0.05)  # the writer's thread holds it for a moment longer
    with pytest.warns(ResourceWarning, match=r"SqliteJournal\(.*the\.journal'\) was not closed"):
        del journal
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")
    async with SqliteJournal(path) as other:
        assert await other.claim("lease") is not None
