"""A package is sent once whatever fault a step has, and whenever its run is killed or paused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from signing_async import (
    SigningClient,
    SqliteJournal,
)
from signing_async.sandbox import Sandbox
from tests.dispatch.deaths import Died, Fate, Fated, MemoryJournal, fated_client
from tests.dispatch.observing import parcel_of, sent_well, state_of
from tests.dispatch.parcels import Parcel
from tests.pdfs import make_pdf

COMMITTED = ["500-after-commit", "502-html-after-commit", "drop-after-commit", "truncate"]


NOT_COMMITTED = ["500", "503", "502-html", "drop-before-commit", "429"]


STEPS = ["signings.create", "documents.upload", "recipients.add", "signings.send"]


READINGS = ["signings.get", "recipients.list"]


async def moments_of(parcel: Parcel) -> int:
    """How many moments a run over this package has."""
    fate = Fate()
    async with Sandbox(seed=7) as sandbox, fated_client(sandbox, fate) as client:
        await client.dispatch(parcel.package, Fated(MemoryJournal(), fate))
    return fate.moments


# What goes wrong at the service


@pytest.mark.parametrize("kind", COMMITTED + NOT_COMMITTED)
@pytest.mark.parametrize("step", STEPS + READINGS)
async def test_package_is_sent_once_whatever_fault_a_step_has(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, step: str, kind: str
) -> None:
    parcel = parcel_of()
    sandbox.faults.add(step, kind, **({"retry_after": 0} if kind == "429" else {}))
    signing = await client.dispatch(parcel.package, tmp_path / "journal")
    assert signing.is_draft is False
    sent_well(sandbox, parcel, spare=1)


async def test_package_is_sent_once_if_the_first_response_of_every_step_is_lost(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel = parcel_of()
    for step, times in zip(STEPS, (1, 2, 2, 1), strict=True):
        sandbox.faults.add(step, "drop-after-commit", times=times)
    await client.dispatch(parcel.package, tmp_path / "journal")
    sent_well(sandbox, parcel, spare=1)


# Death at every moment


async def test_run_killed_at_any_moment_is_completed_by_the_next(tmp_path: Path) -> None:
    parcel = parcel_of()
    moments = await moments_of(parcel)
    assert moments > 20
    async with Sandbox(seed=7) as sandbox:
        for at in range(1, moments + 1):
            each = parcel_of(name=f"Lease {at}")
            path, fate = tmp_path / f"{at}", Fate(at)
            async with SqliteJournal(path) as journal, fated_client(sandbox, fate) as client:
                with pytest.raises(Died):
                    await client.dispatch(each.package, Fated(journal, fate))
            async with fated_client(sandbox, Fate()) as client:
                signing = await client.dispatch(each.package, path)
            assert signing.is_draft is False
            sent_well(sandbox, each, spare=1)


async def test_run_paused_at_any_moment_while_another_takes_over_sends_nothing_twice() -> None:
    parcel = parcel_of()
    moments = await moments_of(parcel)
    async with Sandbox(seed=7) as sandbox:
        for at in range(1, moments + 1):
            each, journal = parcel_of(name=f"Lease {at}"), MemoryJournal()
            fate = Fate(at, pause=True)
            async with fated_client(sandbox, fate) as slow, fated_client(sandbox, Fate()) as quick:
                first = asyncio.create_task(slow.dispatch(each.package, Fated(journal, fate)))
                await fate.paused.wait()
                journal.expire()
                second = await quick.dispatch(each.package, journal)
                fate.resumed.set()
                assert (await first).id == second.id
            sent_well(sandbox, each, spare=1)


async def test_upload_of_a_killed_run_that_arrives_late_is_not_in_the_signing_that_is_sent(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, fate = parcel_of(), Fate()
    path = tmp_path / "journal"
    async with SqliteJournal(path) as journal, fated_client(sandbox, fate) as dying:
        sandbox.faults.add("documents.upload", "hang")
        run = asyncio.create_task(dying.dispatch(parcel.package, Fated(journal, fate)))
        while not run.done() and not sandbox.requests_of("documents.upload"):
            await asyncio.sleep(0.005)
        fate.is_dead = True
        run.cancel()
        with pytest.raises((Died, asyncio.CancelledError)):
            await run
    await client.dispatch(parcel.package, path)
    (old,) = [signing for signing in sandbox.signings if signing.state == "draft"]
    await client.documents.upload(old.id, make_pdf(), "late.pdf")
    sent_well(sandbox, parcel, spare=1)
    assert state_of(path)["abandoned"] == [old.id]
