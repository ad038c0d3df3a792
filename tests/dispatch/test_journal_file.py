"""The file of the SQLite journal: locked, damaged, foreign, full, closed."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sqlite3
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import signing_async.storage.sqlite
from signing_async import ConfigurationError, InvalidRequest, JournalError, SqliteJournal
from signing_async.dispatch.journal import Claim
from signing_async.storage.claims import OwnerLock
from signing_async.storage.journal import _FORMAT
from tests.dispatch.holders import taken


async def test_file_that_is_removed_before_its_first_commit_is_noticed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise "no file" would count as the file that was opened."""
    acquire = OwnerLock.acquire

    def acquire_and_remove(self: OwnerLock) -> None:
        acquire(self)
        path.unlink(missing_ok=True)

    monkeypatch.setattr(OwnerLock, "acquire", acquire_and_remove)
    async with SqliteJournal(path) as journal:
        for _ in range(2):
            with pytest.raises(JournalError, match="was removed while it was open"):
                await journal.claim("one")


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
            with pytest.raises(JournalError, match=r"the\.journal: database is locked") as caught:
                await journal.write(claim, "one")
            assert caught.value.transient
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
        with pytest.raises(JournalError, match=words) as caught:
            await journal.claim("lease")
        assert not caught.value.transient
    assert path.read_bytes() == content


async def test_damaged_pages_are_a_journal_error(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        claims = [await taken(journal, f"{number}") for number in range(200)]
        await asyncio.gather(*(journal.write(claim, "state" * 100) for claim in claims))
    data = bytearray(path.read_bytes())
    data[4096:-100] = b"\x5a" * (len(data) - 4196)
    path.write_bytes(data)
    async with SqliteJournal(path) as journal:
        with pytest.raises(JournalError, match=r"the\.journal: .*malformed") as caught:
            await journal.claim("7")
        assert not caught.value.transient


async def test_database_of_another_program_is_refused_and_unchanged(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE packages (weight)")
    before = path.read_bytes()
    async with SqliteJournal(path) as journal:
        words = f"^the journal {path} is the database of another program; it was not changed$"
        with pytest.raises(JournalError, match=words) as caught:
            await journal.claim("lease")
        assert not caught.value.transient
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
                    signing_async.storage.sqlite._prepare(other, made, _FORMAT, OwnerLock(made, "SqliteJournal"))
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
        ) as caught:
            await journal.claim("lease")
        assert not caught.value.transient


async def test_missing_folder_is_an_error_and_no_new_journal(tmp_path: Path) -> None:
    async with SqliteJournal(tmp_path / "nowhere" / "the.journal") as journal:
        with pytest.raises(JournalError, match=r"nowhere/the\.journal: No such file or directory") as caught:
            await journal.claim("lease")
        assert not caught.value.transient
    assert list(tmp_path.iterdir()) == []


async def test_missing_permission_is_not_transient() -> None:
    """Nobody may create a file in /sys/kernel, not even root."""
    async with SqliteJournal("/sys/kernel/the.journal") as journal:
        with pytest.raises(JournalError, match=r"Permission denied|Read-only|No such file") as caught:
            await journal.claim("lease")
        assert not caught.value.transient


async def test_too_many_open_files_are_transient(path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with SqliteJournal(path) as journal:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limit[1]))
        try:
            with pytest.raises(JournalError, match="Too many open files") as caught:
                await journal.claim("lease")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert caught.value.transient
        assert await journal.claim("lease") is not None


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
            print(written, error.transient, error)
        sys.stdout.flush()

asyncio.run(main())
"""


async def test_full_disk_is_a_journal_error_and_earlier_writes_are_kept(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, timeout=60)
    written, _, words = done.stdout.partition(" ")
    assert words.startswith("True the journal "), done.stderr
    assert 0 < int(written) < 20
    async with SqliteJournal(path) as journal:
        states = [(await taken(journal, f"{number}")).state for number in range(20)]
    assert states == ["x" * 20_000] * int(written) + [None] * (20 - int(written))


async def test_refused_operation_fails_alone_in_its_commit(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        claims = [await taken(journal, f"{number}") for number in range(3)]
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute(
                "CREATE TRIGGER strict BEFORE UPDATE ON packages WHEN new.state = 'bad'"
                " BEGIN SELECT RAISE(ABORT, 'it is bad'); END"
            )
            with journal._engine._database.lock:
                first = asyncio.create_task(journal.write(claims[0], "one"))
                await asyncio.sleep(0)
                while journal._engine._waiting:
                    await asyncio.sleep(0.001)
                texts = {1: "two", 2: "bad"}
                rest = [asyncio.create_task(journal.write(claims[at], text)) for at, text in texts.items()]
                await asyncio.sleep(0.01)
            await first
            results = await asyncio.gather(*rest, return_exceptions=True)
            assert [str(result) for result in results] == ["None", f"the journal {path}: it is bad"]
            kept = database.execute("SELECT key, state FROM packages ORDER BY key").fetchall()
            assert kept == [("0", "one"), ("1", "two"), ("2", None)]
            database.execute("DROP TRIGGER strict")
        for claim in claims:
            await journal.write(claim, "good")
            await journal.release(claim)
        assert [(await taken(journal, claim.key)).state for claim in claims] == ["good"] * 3


async def test_unexpected_error_reaches_every_waiter_as_its_own_journal_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise MemoryError

    async with SqliteJournal(path) as journal:
        with monkeypatch.context() as patch:
            patch.setattr(sqlite3, "connect", fail)
            results = await asyncio.gather(journal.claim("one"), journal.claim("two"), return_exceptions=True)
        assert [str(result) for result in results] == [f"the journal {path}: MemoryError"] * 2
        assert results[0] is not results[1]
        await taken(journal)


async def test_closed_journal_refuses_everything_and_can_be_closed_again(path: Path) -> None:
    journal = SqliteJournal(path)
    claim = await taken(journal)
    await journal.aclose()
    await journal.aclose()
    for late in (journal.claim("other"), journal.write(claim, "late"), journal.release(claim)):
        with pytest.raises(JournalError, match=f"^the journal {path} is closed$") as caught:
            await late
        assert not caught.value.transient


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


def test_sqlite_without_returning_is_refused_by_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    with pytest.raises(ConfigurationError, match=r"^SqliteJournal needs SQLite 3\.35 \(RETURNING\), found "):
        SqliteJournal("journal")


async def test_claim_whose_owner_cannot_be_checked_is_held(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with SqliteJournal(path) as one, SqliteJournal(path) as other:
        await taken(one)
        await taken(other, "another")

        def fail(self: OwnerLock, owner: str) -> bool:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(OwnerLock, "is_alive", fail)
            assert await other.claim("lease") is None


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
