"""An interrupted sweep resumes where it was, and every sweep covers the whole list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from aiohttp import web

from signing_async import RetryPolicy, ServerError, SigningClient, SigningError, Unauthorized
from signing_async.archive import Archive
from signing_async.sandbox import Profile, Sandbox
from tests.archive.tenants import completed, count, judge, sent
from tests.dispatch.deaths import MemoryJournal
from tests.servers import serving

DOWNLOAD = "documents.download_signed"


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    """A sandbox with pages of two signings."""
    async with Sandbox(seed=7, profile=Profile(page_size=2)) as running:
        yield running


def cursors(sandbox: Sandbox) -> list[str | None]:
    """Return the cursors of the list requests."""
    queries = [parse_qs(record.query) for record in sandbox.requests_of("signings.list")]
    return [query["cursor"][0] if query else None for query in queries]


async def fill(sandbox: Sandbox, client: SigningClient, signings: int) -> None:
    for number in range(signings):
        await completed(sandbox, client, f"Lease {number}", ("a.pdf",))


async def interrupted(sandbox: Sandbox, archive: Archive, after: int) -> None:
    """Sweep until this many documents were archived; then the list fails."""
    results = archive.sweep()
    for _ in range(after):
        await anext(results)
    sandbox.faults.add("signings.list", "500", times=None)
    with pytest.raises(ServerError):
        async for _ in results:
            pass
    sandbox.faults.clear()


async def test_interrupted_sweep_resumes_at_its_page_and_then_covers_the_start(
    sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path
) -> None:
    """The pages before it are read again afterwards: signings there may be completed since."""
    await fill(sandbox, client, 8)
    late = await sent(client, "Late", ("a.pdf",))
    await fill(sandbox, client, 1)
    async with Archive(client, folder, journal=journal, concurrency=1) as archive:
        await interrupted(sandbox, archive, 3)
    done = count(sandbox)[DOWNLOAD]
    assert 3 <= done < 9
    await sandbox.complete(late.id)
    early = len(cursors(sandbox))
    async with Archive(client, folder, journal=journal, concurrency=1) as archive:
        async for result in archive.sweep():
            assert result.error is None
    listed = cursors(sandbox)[early:]
    assert listed[0] is not None
    assert None in listed
    # One page is read twice at most: it was prefetched.
    assert len(set(listed)) == 5
    assert len(listed) <= 6
    verdict = await judge(sandbox, folder)
    assert (verdict.documents, verdict.wrong) == (10, [])
    assert count(sandbox)[DOWNLOAD] == 10


async def test_cursor_that_the_service_refuses_is_forgotten(
    sandbox: Sandbox, client: SigningClient, folder: Path
) -> None:
    await fill(sandbox, client, 3)
    journal = MemoryJournal()
    for state in ('{"cursor": "no longer known"}', '{"cursor": 7}', "{", "[]", "{}"):
        journal.states[f"archive-sweep:{sandbox.base_url}"] = state
        target = folder / str(hash(state))
        async with Archive(client, target, journal=journal) as archive:
            assert len([result async for result in archive.sweep()]) == 3
    assert "no longer known" in cursors(sandbox)


@pytest.mark.parametrize(("status", "error"), [(401, Unauthorized), (503, ServerError)])
async def test_saved_cursor_is_kept_if_the_failure_says_nothing_of_it(
    status: int, error: type[SigningError], folder: Path
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({}, status=status)

    journal = MemoryJournal()
    async with serving(answer) as server:
        journal.states[f"archive-sweep:{server.origin}"] = '{"cursor": "valid"}'
        client = SigningClient(server.origin, "token", retry=RetryPolicy.none())
        async with client, Archive(client, folder, journal=journal) as archive:
            with pytest.raises(error):
                await anext(archive.sweep())
        assert journal.states[f"archive-sweep:{server.origin}"] == '{"cursor": "valid"}'
    assert len(server.requests) == 1


async def test_sweep_that_lost_its_place_to_another_goes_on(
    sandbox: Sandbox, client: SigningClient, folder: Path
) -> None:
    """As after a pause that was longer than the lease."""
    await fill(sandbox, client, 7)
    journal = MemoryJournal()
    async with Archive(client, folder, journal=journal, concurrency=1) as archive:
        results = archive.sweep()
        await anext(results)
        journal.expire()
        async for _ in results:
            pass
        async for result in archive.sweep():
            assert result.error is None
    assert (await judge(sandbox, folder)).wrong == []


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
        # The page that was not finished is the first one: a sweep begins there again.
        async for result in archive.sweep():
            assert result.error is None
    assert (await judge(sandbox, folder)).documents == 6
