"""Every sweep covers the whole list, also after an interruption."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from signing_async import ServerError
from signing_async.sandbox import Profile, Sandbox
from tests.archive.tenants import Tenant, archived, judge, sent

DOWNLOAD = "documents.download_signed"


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    """A sandbox with pages of two signings."""
    async with Sandbox(seed=7, profile=Profile(page_size=2)) as running:
        yield running


async def fill(tenant: Tenant, signings: int) -> None:
    for number in range(signings):
        await tenant.complete(f"Lease {number}", "a.pdf")


async def test_sweep_after_an_interrupted_one_downloads_only_what_is_missing(tenant: Tenant) -> None:
    """Signings of pages that were read before may be completed since."""
    await fill(tenant, 4)
    late = await sent(tenant.client, "Late", ("a.pdf",))
    await fill(tenant, 4)
    async with tenant.archive(concurrency=1) as archive:
        results = archive.sweep()
        for _ in range(3):
            await anext(results)
        tenant.sandbox.faults.add("signings.list", "500", times=None)
        with pytest.raises(ServerError):
            async for _ in results:
                pass
    tenant.sandbox.faults.clear()
    assert 3 <= tenant.count() < 8
    await tenant.sandbox.complete(late.id)
    async with tenant.archive() as archive:
        await archived(archive)
    verdict = await judge(tenant.sandbox, tenant.folder)
    assert (verdict.documents, verdict.wrong, tenant.count()) == (9, [], 9)


async def test_signing_that_takes_long_delays_no_signing_of_later_pages(tenant: Tenant) -> None:
    await fill(tenant, 6)
    tenant.sandbox.faults.add(DOWNLOAD, "hang", times=1)
    async with tenant.archive(concurrency=2) as archive:
        async with asyncio.timeout(60), archive.sweep() as results:
            assert [(await anext(results)).error for _ in range(5)] == [None] * 5
        await archived(archive)
    assert (await judge(tenant.sandbox, tenant.folder)).documents == 6
