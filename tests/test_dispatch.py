"""A package is sent once, with just what belongs to it, whatever goes wrong and whenever it does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from signing_async import (
    NewRecipient,
    PdfSource,
    SigningClient,
    SigningPackage,
    SqliteJournal,
)
from signing_async.sandbox import Sandbox
from tests.dispatch.deaths import Died, Fate, Fated, MemoryJournal, fated_client
from tests.dispatch.parcels import Parcel, judge
from tests.pdfs import make_pdf

COMMITTED = ["500-after-commit", "502-html-after-commit", "drop-after-commit", "truncate"]
NOT_COMMITTED = ["500", "503", "502-html", "drop-before-commit", "429"]
STEPS = ["signings.create", "documents.upload", "recipients.add", "signings.send"]
READINGS = ["signings.get", "recipients.list"]


def parcel_of(documents: int = 2, recipients: int = 2, name: str = "Lease", **fields: object) -> Parcel:
    """A package with so many documents and recipients."""
    files = tuple((f"part {number}.pdf", make_pdf(text=f"{name} {number}")) for number in range(documents))
    people = tuple((f"r{number}@example.com", number + 1) for number in range(recipients))
    package = SigningPackage(
        name,
        "EN",
        [PdfSource(data, filename) for filename, data in files],
        [NewRecipient(email, "Anna", "Berg") for email, _ in people],
        **{"signing_order": "sequential", **fields},  # type: ignore[arg-type]  # the fields of a package
    )
    return Parcel(package, files, people)


def sent_well(sandbox: Sandbox, *parcels: Parcel, spare: int = 0) -> None:
    """Each was sent once, with what belongs to it, and no more drafts than so many were made in vain."""
    verdict = judge(sandbox, parcels)
    assert verdict.wrong == []
    assert verdict.sent == len(parcels)
    assert verdict.spare <= spare


async def moments_of(parcel: Parcel) -> int:
    """How many moments a run over this package has."""
    fate = Fate()
    async with Sandbox(seed=7) as sandbox, fated_client(sandbox, fate) as client:
        await client.dispatch(parcel.package, Fated(MemoryJournal(), fate))
    return fate.moments


# What goes wrong at the service


@pytest.mark.parametrize("kind", COMMITTED + NOT_COMMITTED)
@pytest.mark.parametrize("step", STEPS + READINGS)
async def test_faults_at_each_step(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, step: str, kind: str
) -> None:
    """However an answer is lost, one call sends the package, once."""
    parcel = parcel_of()
    sandbox.faults.add(step, kind, **({"retry_after": 0} if kind == "429" else {}))
    signing = await client.dispatch(parcel.package, tmp_path / "journal")
    assert signing.is_draft is False
    sent_well(sandbox, parcel, spare=1)


async def test_each_answer_is_lost(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """Every request takes effect, and the first answer to each is lost."""
    parcel = parcel_of()
    for step, times in zip(STEPS, (1, 2, 2, 1), strict=True):
        sandbox.faults.add(step, "drop-after-commit", times=times)
    await client.dispatch(parcel.package, tmp_path / "journal")
    sent_well(sandbox, parcel, spare=1)


# Death at every moment


async def test_death_at_every_moment(tmp_path: Path) -> None:
    """Before or after each request and each step of the journal: the next run ends it well."""
    parcel = parcel_of()
    moments = await moments_of(parcel)
    assert moments > 30
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


async def test_a_pause_at_every_moment() -> None:
    """A run stands still, its claim runs out, another run does the work, and then the first one goes on."""
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
