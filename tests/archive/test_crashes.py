"""Whenever a run is killed or paused, the next one completes the archive: each document once, nothing twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from signing_async import SigningClient, SqliteJournal
from signing_async.archive import Archive, ArchiveStore, FolderStore
from signing_async.sandbox import Sandbox
from tests.archive import kill, kill_s3
from tests.archive.tenants import completed, count, files_in, judge
from tests.dispatch.deaths import Died, Fate, Fated, MemoryJournal, fated_client
from tests.postgres.server import PostgresServer

DOWNLOAD = "documents.download_signed"


class FatedStore:
    """A store whose operations have two moments each: before and after."""

    def __init__(self, store: ArchiveStore, fate: Fate) -> None:
        self._store = store
        self._fate = fate

    async def put(self, name: str, source: Path, sha256: str) -> None:
        await self._fate.moment()
        await self._store.put(name, source, sha256)
        await self._fate.moment()

    async def read(self, name: str, offset: int = 0) -> AsyncIterator[bytes]:
        await self._fate.moment()
        async for chunk in self._store.read(name, offset):
            yield chunk

    async def append(self, name: str, offset: int, data: bytes) -> None:
        await self._fate.moment()
        await self._store.append(name, offset, data)
        await self._fate.moment()


async def sweep(client: SigningClient, store: ArchiveStore, journal: MemoryJournal | Fated | Path) -> None:
    async with Archive(client, store, journal=journal, concurrency=1) as archive:
        async for result in archive.sweep():
            assert result.error is None


async def moments_of(sandbox: Sandbox, folder: Path) -> int:
    """Return how many moments a sweep has."""
    fate = Fate()
    async with fated_client(sandbox, fate) as client:
        await sweep(client, FatedStore(FolderStore(folder), fate), Fated(MemoryJournal(), fate))
    return fate.moments


@pytest.fixture
async def filled(sandbox: Sandbox, client: SigningClient) -> Sandbox:
    """A sandbox with two completed signings: three documents, two of the same name."""
    await completed(sandbox, client, "Lease", ("a.pdf", "A.pdf"))
    await completed(sandbox, client, "Boat", ("a.pdf",))
    return sandbox


async def die(sandbox: Sandbox, at: int, folder: Path, journal: Path) -> None:
    """Sweep, and die at a moment."""
    fate = Fate(at)
    async with SqliteJournal(journal) as opened, fated_client(sandbox, fate) as client:
        with pytest.raises(Died):
            await sweep(client, FatedStore(FolderStore(folder), fate), Fated(opened, fate))


async def test_sweep_killed_at_any_moment_is_completed_by_the_next(filled: Sandbox, tmp_path: Path) -> None:
    moments = await moments_of(filled, tmp_path / "count")
    assert moments > 30
    for at in range(1, moments + 1):
        folder, journal = tmp_path / f"{at}", tmp_path / f"{at}.journal"
        await die(filled, at, folder, journal)
        before, placed = count(filled)[DOWNLOAD], len([name for name in files_in(folder) if name.endswith(".pdf")])
        async with fated_client(filled, Fate()) as client:
            await sweep(client, FolderStore(folder), journal)
        verdict = await judge(filled, folder)
        assert (at, verdict.documents, verdict.wrong) == (at, 3, [])
        # A file that was placed is not fetched again.
        assert count(filled)[DOWNLOAD] - before <= 3 - placed


async def test_sweep_paused_at_any_moment_while_another_takes_over_archives_nothing_twice(
    filled: Sandbox, tmp_path: Path
) -> None:
    moments = await moments_of(filled, tmp_path / "count")
    for at in range(1, moments + 1):
        folder, journal, fate = tmp_path / f"{at}", MemoryJournal(), Fate(at, pause=True)
        async with fated_client(filled, fate) as slow, fated_client(filled, Fate()) as quick:
            first = asyncio.create_task(sweep(slow, FatedStore(FolderStore(folder), fate), Fated(journal, fate)))
            await fate.paused.wait()
            journal.expire()
            await sweep(quick, FolderStore(folder), journal)
            fate.resumed.set()
            await first
        verdict = await judge(filled, folder)
        assert (at, verdict.documents, verdict.wrong) == (at, 3, [])


async def test_downloads_of_a_killed_process_are_removed_by_the_next_run(filled: Sandbox, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    filled.faults.add(DOWNLOAD, "hang", times=None)
    script = "import sys; from tests.archive.victim import folder_store, work; work(*sys.argv[1:], folder_store)"
    arguments = [sys.executable, "-c", script, filled.base_url, filled.access_token(), str(tmp_path)]
    with subprocess.Popen(arguments) as process:
        while not count(filled)[DOWNLOAD]:
            await asyncio.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    leftovers = list((folder / ".incoming").iterdir())
    assert leftovers
    for leftover in leftovers:
        (leftover / ".0.part").write_bytes(b"%PDF-")
    filled.faults.clear()
    async with fated_client(filled, Fate()) as client:
        await sweep(client, FolderStore(folder), tmp_path / "the.journal")
        assert (await judge(filled, folder)).wrong == []
    assert list((folder / ".incoming").iterdir()) == []


async def test_day_old_downloads_of_killed_runs_are_removed_at_the_end_of_any_run(
    filled: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = FatedStore(FolderStore(tmp_path / "archive"), Fate())
    old, young = tmp_path / "signing-archive-1-a", tmp_path / "signing-archive-2-b"
    for leftover in (old, young):
        leftover.mkdir(parents=True)
        (leftover / "sealed.pdf").write_bytes(b"%PDF-")
    os.utime(old, (0, 0))
    async with fated_client(filled, Fate()) as client:
        await sweep(client, store, tmp_path / "the.journal")
    assert (old.exists(), young.exists()) == (False, True)


@pytest.mark.parametrize("processes", [1, 2])
async def test_archive_is_whole_after_processes_were_killed_at_random(processes: int) -> None:
    """`python -m tests.archive.kill` does this at length."""
    outcome = await kill.run(signings=8, kills=3, seed=5, processes=processes)
    assert (outcome.verdict.documents, outcome.verdict.wrong, outcome.failures) == (16, [], [])
    assert outcome.kills == 3


@pytest.mark.timeout(300)
async def test_archive_is_whole_after_processes_that_share_a_postgres_journal_were_killed(
    postgres: PostgresServer,
) -> None:
    """The claims of a killed process are taken over when their leases expire."""
    outcome = await kill.run_with_postgres(postgres, signings=8, kills=3, seed=3, processes=2)
    assert (outcome.verdict.documents, outcome.verdict.wrong, outcome.failures) == (16, [], [])
    assert outcome.kills == 3


@pytest.mark.timeout(300)
async def test_bucket_is_whole_after_processes_were_killed_while_it_and_the_service_failed() -> None:
    outcome = await kill_s3.run(signings=8, kills=3, seed=1, processes=2)
    assert (outcome.verdict.documents, outcome.verdict.wrong, outcome.failures) == (16, [], [])
