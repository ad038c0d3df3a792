"""Whenever a run is killed or paused, the next one completes the archive: each document once, nothing twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from signing_async import SigningClient, SqliteJournal
from signing_async.archive import Archive, ArchiveStore, FolderStore
from signing_async.sandbox import Sandbox
from tests.archive import kill
from tests.archive.tenants import completed, count, files_in, judge
from tests.dispatch.deaths import Died, Fate, Fated, MemoryJournal, fated_client

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
    """A sandbox with a completed signing: two documents of the same name."""
    await completed(sandbox, client, "Lease", ("a.pdf", "A.pdf"))
    return sandbox


async def die(sandbox: Sandbox, at: int, folder: Path, journal: Path) -> None:
    """Sweep, and die at a moment."""
    fate = Fate(at)
    async with SqliteJournal(journal) as opened, fated_client(sandbox, fate) as client:
        with pytest.raises(Died):
            await sweep(client, FatedStore(FolderStore(folder), fate), Fated(opened, fate))


async def test_sweep_killed_at_any_moment_is_completed_by_the_next(filled: Sandbox, tmp_path: Path) -> None:
    moments = await moments_of(filled, tmp_path / "count")
    assert moments > 20
    for at in range(1, moments + 1):
        folder, journal = tmp_path / f"{at}", tmp_path / f"{at}.journal"
        await die(filled, at, folder, journal)
        before, placed = count(filled)[DOWNLOAD], len([name for name in files_in(folder) if name.endswith(".pdf")])
        async with fated_client(filled, Fate()) as client:
            await sweep(client, FolderStore(folder), journal)
        verdict = await judge(filled, folder)
        assert (at, verdict.documents, verdict.wrong) == (at, 2, [])
        # A file that was placed is not fetched again.
        assert count(filled)[DOWNLOAD] - before <= 2 - placed


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
        assert (at, verdict.documents, verdict.wrong) == (at, 2, [])


async def test_downloads_of_killed_runs_are_removed(filled: Sandbox, tmp_path: Path) -> None:
    """The next run over a signing removes that signing's downloads; any run removes downloads that are a day old."""
    folder = tmp_path / "archive"
    filled.faults.add(DOWNLOAD, "hang", times=None)
    script = "import sys; from tests.archive.victim import *; work(*sys.argv[1:3], Place(Path(sys.argv[3])))"
    arguments = [sys.executable, "-c", script, filled.base_url, filled.access_token(), str(tmp_path)]
    with subprocess.Popen(arguments) as process:
        while not count(filled)[DOWNLOAD]:
            await asyncio.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    leftovers = list((folder / ".incoming").iterdir())
    assert leftovers
    old, young = folder / ".incoming/signing-archive-1-a", folder / ".incoming/signing-archive-2-b"
    for leftover in (*leftovers, old, young):
        leftover.mkdir(exist_ok=True)
        (leftover / ".0.part").write_bytes(b"%PDF-")
    os.utime(old, (0, 0))
    filled.faults.clear()
    async with fated_client(filled, Fate()) as client:
        await sweep(client, FolderStore(folder), tmp_path / "the.journal")
    assert list((folder / ".incoming").iterdir()) == [young]
    assert (await judge(filled, folder)).wrong == [".incoming/signing-archive-2-b/.0.part: left over"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["folder", "postgres", "bucket"])
async def test_archive_is_whole_after_processes_were_killed_at_random(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """`python -m tests.archive.kill` does this at length. In PostgreSQL, killed processes' claims have to expire."""
    trial = {"signings": 8, "kills": 2, "seed": 5, "processes": 2}
    if kind == "folder":
        outcome = await kill.run(**trial)
    elif kind == "postgres":
        outcome = await kill.run_with_postgres(request.getfixturevalue("postgres"), **trial)
    else:
        outcome = await kill.run_with_bucket(request.getfixturevalue("s3_server"), **trial)
    assert (outcome.verdict.documents, outcome.verdict.wrong, outcome.failures) == (16, [], [])
    assert outcome.kills == 2
