"""Runs that share a journal: postponed packages, lost claims, leaving early."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from signing_async import Claim, DispatchResult, SigningClient, SigningPackage, SqliteJournal
from signing_async.sandbox import Sandbox
from tests.dispatch.deaths import Fate, MemoryJournal, fated_client
from tests.dispatch.observing import Office, all_of, parcel_of, sent_well
from tests.dispatch.parcels import make_parcel


async def test_concurrent_runs_send_each_package_once_and_return_every_result(sandbox: Sandbox, tmp_path: Path) -> None:
    parcels = [make_parcel(number, tmp_path) for number in range(20)]
    packages = [parcel.package for parcel in parcels]
    async with contextlib.AsyncExitStack() as stack:
        runs = []
        for _ in range(3):
            client = await stack.enter_async_context(fated_client(sandbox, Fate()))
            journal = await stack.enter_async_context(SqliteJournal(tmp_path / "journal"))
            runs.append(all_of(client.dispatch_many(packages, journal, concurrency=4)))
        results = await asyncio.gather(*runs)
    for result in results:
        assert len(result) == 20
        assert [one.error for one in result] == [None] * 20
    assert len(sandbox.signings) == 20
    sent_well(sandbox, *parcels)


async def test_package_claimed_by_another_run_is_postponed_and_sent_after_its_release(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    parcels = [parcel_of(1, 1, name=f"Lease {number}", key=f"{number}") for number in range(10)]
    async with SqliteJournal(office.path) as other:
        claim = await other.claim("3")
        assert claim is not None
        results: list[DispatchResult] = []

        packages = [parcel.package for parcel in parcels]
        many = office.client.dispatch_many(packages, office.path, concurrency=2)
        run = asyncio.create_task(all_of(many, results))
        while len(results) < 9:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(30):
            while "waiting for package '3': another run is working on it" not in caplog.messages:
                await asyncio.sleep(0.01)
        assert "3" not in {result.package.key for result in results}
        await other.release(claim)
        await run
    assert len(results) == 10
    office.sent_well(*parcels)


async def test_postponed_package_does_not_wait_for_the_next_item_of_the_iterable(office: Office) -> None:
    package, results = parcel_of(1, 1, key="lease").package, 0

    async def messages() -> AsyncIterator[SigningPackage]:
        yield package
        yield package
        await asyncio.sleep(3600)

    async with asyncio.timeout(30), office.client.dispatch_many(messages(), office.path, concurrency=4) as run:
        async for result in run:
            assert result.error is None
            results += 1
            if results == 2:
                break
    office.sent_well(parcel_of(1, 1))


async def test_claim_is_released_even_if_the_run_is_cancelled_twice(sandbox: Sandbox, client: SigningClient) -> None:
    releasing, go_on = asyncio.Event(), asyncio.Event()
    journal = MemoryJournal()
    release = journal.release

    async def slow(claim: Claim) -> None:
        releasing.set()
        await go_on.wait()
        await release(claim)

    journal.release = slow  # type: ignore[method-assign]  # a slow one
    sandbox.faults.add("signings.create", "hang")
    run = asyncio.create_task(client.dispatch(parcel_of().package, journal))
    while not sandbox.requests_of("signings.create"):
        await asyncio.sleep(0.005)
    run.cancel()
    await releasing.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    go_on.set()
    async with asyncio.timeout(30):
        while journal.taken:
            await asyncio.sleep(0.005)


async def test_each_step_is_journaled_before_it_begins_with_the_outcome_of_the_one_before(
    sandbox: Sandbox, client: SigningClient
) -> None:
    journal = MemoryJournal()
    seen: list[tuple[int, str, bool, str, str]] = []
    write = journal.write

    def marks(ids: dict[str, str | None]) -> str:
        return "".join("?" if one is None else "x" for one in ids.values())

    async def noted(claim: Claim, text: str) -> None:
        state = json.loads(text)
        has_signing, documents, recipients = state["signing"] is not None, state["documents"], state["recipients"]
        seen.append((len(sandbox.requests), state["status"], has_signing, marks(documents), marks(recipients)))
        await write(claim, text)

    journal.write = noted  # type: ignore[method-assign]  # one that takes notes
    await all_of(client.dispatch_many([parcel_of(3, 2).package], journal, concurrency=1))
    assert seen == [
        (0, "draft", False, "", ""),
        (1, "draft", True, "?", ""),
        (2, "draft", True, "x?", ""),
        (3, "draft", True, "xx?", ""),
        (4, "draft", True, "xxx", "?"),
        (5, "draft", True, "xxx", "x?"),
        (6, "sending", True, "xxx", "xx"),
        (8, "sent", True, "xxx", "xx"),
    ]
