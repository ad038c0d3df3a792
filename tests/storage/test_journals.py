"""The promises of a `Journal`, in SQLite and in PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from signing_async import ClaimLost, InvalidRequest, JournalError, SqliteJournal
from signing_async.postgres import PostgresJournal
from tests.storage.leases import claimed, leased_storage, soon_claimed

AnyJournal = SqliteJournal | PostgresJournal
OpenJournal = Callable[[], AnyJournal]

LONG = '{"status": "draft", "name": "Å ☃ 😀\\n"}' * 20_000


@pytest.fixture(params=["sqlite", "postgres"])
async def storage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    """The storage of a journal, and the end of all leases."""
    async with leased_storage(request, tmp_path, SqliteJournal, PostgresJournal, "signing_packages") as found:
        yield found


@pytest.fixture
def open_journal(storage: Any) -> OpenJournal:
    """Open the storage."""
    found: OpenJournal = storage.open
    return found


async def test_last_written_state_is_returned_by_the_next_claim_of_the_same_key(open_journal: OpenJournal) -> None:
    """A new package has no state, and a release does not change the state.

    Keys are distinct even if long ones begin alike, or they differ only in case, a space or Unicode normalization.
    """
    journal = open_journal()
    keys = ["k" * 500 + "a", "k" * 500 + "b", "Lease", "lease", "lease ", "é", "e\u0301", "7/a?b=c'\";--%s{table}$1"]
    for key in keys:
        claim = await claimed(journal, key)
        assert (claim.key, claim.state) == (key, None)
        await journal.write(claim, "earlier")
        await journal.write(claim, f"{key} {LONG}")
        await journal.release(claim)
    for again in (journal, open_journal()):
        for key in keys:
            claim = await claimed(again, key)
            assert claim.state == f"{key} {LONG}"
            await again.release(claim)


async def test_one_of_many_concurrent_claims_succeeds_and_all_writes_are_kept(open_journal: OpenJournal) -> None:
    journals = [open_journal() for _ in range(4)]

    async def work(journal: AnyJournal, key: str) -> int:
        claim = await journal.claim(key)
        if claim is None:
            return 0
        for number in range(5):
            await journal.write(claim, f"{key}-{number}")
        return 1

    keys = [f"k{number}" for number in range(20)]
    assert sum(await asyncio.gather(*(work(journal, key) for key in keys for journal in journals * 2))) == 20
    for journal in journals[1:]:
        await journal.aclose()
    states = {record.key: record.state async for record in journals[0].records()}
    assert states == {key: f"{key}-4" for key in keys}


async def test_claimed_package_cannot_be_claimed_and_a_released_claim_is_refused(open_journal: OpenJournal) -> None:
    """Neither another run nor another task of the same run can claim the package. Other packages are free.

    A released claim can neither write nor release, whether or not the package was claimed again.
    """
    journal, other = open_journal(), open_journal()
    old = await claimed(journal, "k")
    await journal.write(old, "first")
    await journal.release(old)
    fences = [old.fence]
    for claiming in (None, other, journal):
        held = None if claiming is None else await claimed(claiming, "k")
        with pytest.raises(ClaimLost) as lost:
            await journal.write(old, "late")
        assert lost.value.key == "k"
        with pytest.raises(ClaimLost):
            await journal.release(old)
        if claiming is not None and held is not None:
            assert held.state == "first"
            fences.append(held.fence)
            assert await journal.claim("k") is None
            assert await other.claim("k") is None
            await claiming.release(held)
    assert fences == sorted(set(fences))
    await claimed(other, "another")


async def test_former_holder_cannot_write_after_a_takeover(storage: Any) -> None:
    """Its writes are refused, it releases nothing, and the new holder is not affected."""
    late, quick = storage.open(), storage.open()
    claim = await claimed(late, "k")
    await late.write(claim, "by the late run")
    await storage.lapse()
    taken = await claimed(quick, "k")
    assert taken.state == "by the late run"
    assert taken.fence > claim.fence
    with pytest.raises(ClaimLost):
        await late.write(claim, "too late")
    await quick.write(taken, "by the quick run")
    with pytest.raises(ClaimLost):
        await late.release(claim)
    assert await storage.open().claim("k") is None
    await quick.release(taken)
    assert (await claimed(late, "k")).state == "by the quick run"


async def test_cancelled_claim_leaves_the_package_free(open_journal: OpenJournal) -> None:
    """If another run holds the package, that run is not affected."""
    journal, other = open_journal(), open_journal()
    kept = await claimed(other, "held")
    for steps in range(8):
        for key in ("k", "held"):
            claiming = asyncio.create_task(journal.claim(key))
            for _ in range(steps):
                await asyncio.sleep(0)
            claiming.cancel()
            await asyncio.wait([claiming])
            if not claiming.cancelled() and (held := claiming.result()) is not None:
                await journal.release(held)
        await other.release(await soon_claimed(other, "k"))
    await other.write(kept, "{}")


async def test_closing_releases_all_claims(open_journal: OpenJournal) -> None:
    """Written states stay. A closed journal raises; closing it again is harmless."""
    journal, other = open_journal(), open_journal()
    claim = await claimed(journal, "k")
    await journal.write(claim, "{}")
    await claimed(journal, "l")
    await journal.aclose()
    assert (await claimed(other, "k")).state == "{}"
    await claimed(other, "l")
    with pytest.raises((JournalError, ClaimLost)):
        await journal.write(claim, "late")
    with pytest.raises(JournalError, match="closed") as caught:
        await journal.claim("m")
    assert not caught.value.transient
    await journal.aclose()


async def test_last_written_states_are_listed_by_key(open_journal: OpenJournal) -> None:
    """Each key is listed once, claimed or not, by this run or another. A key without a state is left out."""
    journal, other = open_journal(), open_journal()
    assert [record async for record in journal.records()] == []
    began = datetime.now(UTC) - timedelta(minutes=1)
    keys = [f"k{number:03}" for number in range(520)]

    async def write(key: str) -> None:
        claim = await claimed(other, key)
        await other.write(claim, f"of {key}")
        if key < "k010":
            await other.release(claim)

    for first in range(0, len(keys), 8):
        await asyncio.gather(*(write(key) for key in keys[first : first + 8]))
    await claimed(journal, "without a state")
    for each in (journal, other):
        records = [record async for record in each.records()]
        assert [(record.key, record.state) for record in records] == [(key, f"of {key}") for key in keys]
        assert all(began < record.updated_at for record in records)


async def test_text_that_a_database_cannot_hold_is_refused(open_journal: OpenJournal) -> None:
    journal = open_journal()
    claim = await claimed(journal, "a")
    texts: list[Any] = ["a\0b", "\ud800", 5, ""]
    for text in texts:
        with pytest.raises(InvalidRequest, match=r"^key: must be a non-empty string without null characters, got "):
            await journal.claim(text)
        with pytest.raises(InvalidRequest, match=r"^state: must be a non-empty string without null characters, got "):
            await journal.write(claim, text)
    await journal.write(claim, "{}")
