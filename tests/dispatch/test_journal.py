"""The SQLite journal: claims, fencing tokens, writes that are durable and shared."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import secrets
import signal
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import signing_async.storage.claims
import signing_async.storage.sqlite
from signing_async import InvalidRequest, SqliteJournal
from signing_async.dispatch.journal import Claim, ClaimLost
from signing_async.storage.sqlite import SqliteEngine
from tests.dispatch.holders import holder, taken


async def test_key_of_more_than_1000_bytes_is_refused(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        assert await journal.claim("Å" * 500) is not None
        with pytest.raises(InvalidRequest, match=r"^key: must be at most 1,000 bytes in UTF-8, got 1,002: 'ÅÅ"):
            await journal.claim("Å" * 501)


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
    monkeypatch.setattr(signing_async.storage.sqlite, "sync_folder", synced.append)
    async with SqliteJournal(path) as journal:
        await taken(journal)
        assert synced == [path.parent]
        assert journal._engine._database.connection is not None
        settings = [
            journal._engine._database.connection.execute(f"PRAGMA {name}").fetchone()[0]
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
            assert journal._engine._database.connection is not None
            assert journal._engine._database.connection.execute("PRAGMA busy_timeout").fetchone() == (seconds * 1000,)


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


async def test_dead_owner_checked_by_two_journals_is_taken_for_dead_by_both(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_lock, checked = signing_async.storage.claims.try_lock, threading.Event()

    def slow(handle: int) -> bool:
        is_locked = try_lock(handle)
        if is_locked and not checked.is_set():
            checked.set()
            time.sleep(0.3)  # holding the lock of the dead owner
        return is_locked

    async with SqliteJournal(path) as one, SqliteJournal(path) as other:
        with holder(path) as process:
            await taken(other, "another")
        process.wait()
        monkeypatch.setattr(signing_async.storage.claims, "try_lock", slow)
        checking = asyncio.create_task(one.claim("more"))
        await asyncio.to_thread(checked.wait)
        assert await other.claim("lease") == Claim("lease", "begun", 2)
        assert await checking is not None


async def test_lock_file_removed_by_another_process_meanwhile_is_no_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holder(path) as process:
        pass
    process.wait()
    (lock,) = path.parent.glob("*.lock")
    try_lock = signing_async.storage.claims.try_lock

    def removed_first(handle: int) -> bool:
        lock.unlink(missing_ok=True)
        return try_lock(handle)

    monkeypatch.setattr(signing_async.storage.claims, "try_lock", removed_first)
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

    def locked(handle: int) -> bool:
        if len(names) == 1:
            next(path.parent.glob("*.lock")).unlink()
        return True

    def token_hex(size: int) -> str:
        names.append(token(size))
        return names[-1]

    monkeypatch.setattr(signing_async.storage.claims, "try_lock", locked)
    monkeypatch.setattr(secrets, "token_hex", token_hex)
    async with SqliteJournal(path) as journal:
        await taken(journal)
        assert [lock.name for lock in path.parent.glob("*.lock")] == [f"the.journal.{names[1]}.lock"]


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
        with journal._engine._database.lock:
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
            SqliteEngine._deliver(journal._engine, steps)
            claiming.cancel()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal._engine, "_deliver", deliver)
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
            SqliteEngine._deliver(journal._engine, steps)
            claiming.cancel()

        monkeypatch.setattr(journal._engine, "_deliver", deliver)
        with pytest.raises(asyncio.CancelledError):
            await claiming


def test_claim_of_a_closed_event_loop_is_released(path: Path) -> None:
    journal = SqliteJournal(path)

    async def ask() -> None:
        journal._engine._database.lock.acquire()
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
    journal._engine._database.lock.release()
    claim = asyncio.run(ask_again())
    assert claim is not None
    assert claim.fence == 2


async def test_cancelled_claim_of_a_claimed_package_releases_nothing(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        claim = await taken(journal)
        with journal._engine._database.lock:
            claiming = asyncio.create_task(journal.claim("lease"))
            await asyncio.sleep(0.01)
            claiming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await claiming
        await journal.write(claim, "one")


async def test_cancelled_write_is_made_before_later_operations(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        claim = await taken(journal)
        with journal._engine._database.lock:
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
        with journal._engine._database.lock:
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
        with journal._engine._database.lock:
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
    commit = SqliteEngine._commit

    def counted(self: SqliteEngine, steps: list[Any]) -> None:
        sizes.append(len(steps))
        commit(self, steps)

    async with SqliteJournal(path) as journal:
        claims = [await taken(journal, f"{number}") for number in range(64)]
        monkeypatch.setattr(SqliteEngine, "_commit", counted)
        with journal._engine._database.lock:
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
