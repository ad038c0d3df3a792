"""Every sweep covers the whole list, also after an interruption."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from signing_async import ServerError, SigningClient
from signing_async.archive import Archive
from signing_async.sandbox import Profile, Sandbox
from tests.archive.tenants import completed, count, judge, sent

DOWNLOAD = "documents.download_signed"


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    """A sandbox with pages of two signings."""
    async with Sandbox(seed=7, profile=Profile(page_size=2)) as running:
        yield running


async def fill(sandbox: Sandbox, client: SigningClient, signings: int) -> None:
    for number in range(signings):
        await completed(sandbox, client, f"Lease {number}", ("a.pdf",))


async def test_sweep_after_an_interrupted_one_downloads_only_what_is_missing(
    sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path
) -> None:
    """Signings of pages that were read before may be completed since."""
    await fill(sandbox, client, 4)
    late = await sent(client, "Late", ("a.pdf",))
    await fill(sandbox, client, 4)
    async with Archive(client, folder, journal=journal, concurrency=1) as archive:
        results = archive.sweep()
        for _ in range(3):
            await anext(results)
        sandbox.faults.add("signings.list", "500", times=None)
        with pytest.raises(ServerError):
            async for _ in results:
                pass
    sandbox.faults.clear()
    assert 3 <= count(sandbox)[DOWNLOAD] < 8
    await sandbox.complete(late.id)
    async with Archive(client, folder, journal=journal) as archive:
        async for result in archive.sweep():
            assert result.error is None
    verdict = await judge(sandbox, folder)
    assert (verdict.documents, verdict.wrong, count(sandbox)[DOWNLOAD]) == (9, [], 9)


async def test_cancelled_sweep_closes_the_list(
    sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path
) -> None:
    await fill(sandbox, client, 6)
    async with Archive(client, folder, journal=journal, concurrency=1) as archive:
        sandbox.faults.add(DOWNLOAD, "hang", skip=1)
        results = archive.sweep()
        await anext(results)
        taking = asyncio.create_task(anext(results))
        while count(sandbox)[DOWNLOAD] < 2:
            await asyncio.sleep(0.005)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert {task.get_name() for task in asyncio.all_tasks() if "signing_async" in task.get_name()} == set()


async def test_signing_that_takes_long_delays_no_signing_of_later_pages(
    sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path
) -> None:
    await fill(sandbox, client, 6)
    sandbox.faults.add(DOWNLOAD, "hang", times=1)
    async with Archive(client, folder, journal=journal, concurrency=2) as archive:
        async with asyncio.timeout(60), archive.sweep() as results:
            assert [(await anext(results)).error for _ in range(5)] == [None] * 5
        async for result in archive.sweep():
            assert result.error is None
    assert (await judge(sandbox, folder)).documents == 6
