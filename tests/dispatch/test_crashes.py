"""A package is sent once whatever fault a step has, and whenever its run is killed or paused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from signing_async import SqliteJournal
from signing_async.sandbox import Sandbox
from tests.dispatch.deaths import Died, Fate, Fated, MemoryJournal, fated_client
from tests.dispatch.observing import Office, parcel_of, sent_well
from tests.dispatch.parcels import Parcel
from tests.pdfs import make_pdf

FAULTS = [
    "500-after-commit",
    "502-html-after-commit",
    "drop-after-commit",
    "truncate",
    "500",
    "drop-before-commit",
    "429",
]
STEPS = ["signings.create", "documents.upload", "recipients.add", "signings.send"]
READINGS = ["signings.get", "recipients.list"]


async def moments_of(parcel: Parcel) -> int:
    """How many moments a run over this package has."""
    fate = Fate()
    async with Sandbox(seed=7) as sandbox, fated_client(sandbox, fate) as client:
        await client.dispatch(parcel.package, Fated(MemoryJournal(), fate))
    return fate.moments


# What goes wrong at the service


@pytest.mark.parametrize("step", STEPS + READINGS)
async def test_package_is_sent_once_whatever_fault_a_step_has(office: Office, step: str) -> None:
    for kind in FAULTS:
        parcel = parcel_of(name=kind)
        fault = office.fail(step, kind, **({"retry_after": 0} if kind == "429" else {}))
        signing = await office.dispatch(parcel)
        fault.remove()
        assert signing.is_draft is False
        office.sent_well(parcel, spare=1)


# Death at every moment


async def test_run_killed_at_any_moment_is_completed_by_the_next(tmp_path: Path) -> None:
    moments = await moments_of(parcel_of())
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
    moments = await moments_of(parcel_of())
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


async def test_upload_of_a_killed_run_that_arrives_late_is_not_in_the_signing_that_is_sent(office: Office) -> None:
    """The next run abandons the draft to which it is added."""
    parcel, fate = parcel_of(), Fate()
    office.fail("documents.upload", "hang")
    async with SqliteJournal(office.path) as journal, fated_client(office.sandbox, fate) as dying:
        run = asyncio.create_task(dying.dispatch(parcel.package, Fated(journal, fate)))
        while not run.done() and not office.sandbox.requests_of("documents.upload"):
            await asyncio.sleep(0.005)
        fate.is_dead = True
        run.cancel()
        with pytest.raises((Died, asyncio.CancelledError)):
            await run
    await office.dispatch(parcel)
    (draft,) = office.state()["abandoned"]
    await office.client.documents.upload(draft, make_pdf(), "late.pdf")
    office.sent_well(parcel, spare=1)
