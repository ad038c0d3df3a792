"""Conformance suites for journals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from signing_async.dispatch.journal import Claim, ClaimLost, Journal, JournalError

__all__ = ["FencedJournalConformance", "JournalConformance", "ListedJournalConformance", "OpenJournal"]

OpenJournal = Callable[[], Journal]
"""Opens the same journal again, as another run would: a new object each time."""

_LONG = '{"status": "draft", "name": "Å ☃ 😀\\n"}' * 20_000
_TIMEOUT = 20.0
_MOMENT = 0.02


class JournalConformance:
    """Tests the promises of the `Journal` protocol, which let a dispatch send each package once.

    Subclass it with a fixture ``open_journal`` that returns a function. Each call of the function opens the same
    storage as a new object; the storage is empty when a test begins, and the fixture closes the objects. The tests
    need pytest-asyncio. ::

        class TestMyJournal(JournalConformance):
            @pytest.fixture
            async def open_journal(self, tmp_path):
                async with contextlib.AsyncExitStack() as opened:
                    def open_journal():
                        journal = MyJournal(tmp_path / "journal")
                        opened.push_async_callback(journal.aclose)
                        return journal
                    yield open_journal
    """

    pytestmark: pytest.MarkDecorator = pytest.mark.asyncio

    async def test_new_package_has_no_state(self, open_journal: OpenJournal) -> None:
        claim = await claimed(open_journal(), "new")
        assert (claim.key, claim.state) == ("new", None)

    @pytest.mark.parametrize("state", ["{}", _LONG], ids=["short", "long"])
    @pytest.mark.parametrize("key", ["k", "Lease ☃ 7/a?b=c'\";--%s{table}$1", "k" * 500], ids=["short", "odd", "long"])
    async def test_last_written_state_is_returned_by_the_next_claim(
        self, open_journal: OpenJournal, key: str, state: str
    ) -> None:
        """The state is complete, and belongs to exactly this key."""
        journal = open_journal()
        claim = await claimed(journal, key)
        await journal.write(claim, "earlier")
        await journal.write(claim, state)
        await journal.release(claim)
        for again in (journal, open_journal()):
            claim = await claimed(again, key)
            assert claim.state == state
            await again.release(claim)

    async def test_keys_are_distinct_to_the_last_character(self, open_journal: OpenJournal) -> None:
        """Even if long keys begin alike, or keys differ only in case, a space or Unicode normalization."""
        journal = open_journal()
        keys = ["k" * 500 + "a", "k" * 500 + "b", "Lease", "lease", "lease ", "é", "e\u0301"]
        for key in keys:
            await journal.write(await claimed(journal, key), f"of {key}")
        await journal.aclose()
        other = open_journal()
        assert [(await claimed(other, key)).state for key in keys] == [f"of {key}" for key in keys]

    async def test_release_does_not_change_the_state(self, open_journal: OpenJournal) -> None:
        journal = open_journal()
        await journal.release(await claimed(journal, "k"))
        claim = await claimed(journal, "k")
        assert claim.state is None
        await journal.write(claim, "{}")
        await journal.release(claim)
        await journal.release(await claimed(journal, "k"))
        assert (await claimed(journal, "k")).state == "{}"

    async def test_fence_grows_with_every_claim(self, open_journal: OpenJournal) -> None:
        fences = []
        for journal in (open_journal(), open_journal()) * 2:
            claim = await claimed(journal, "k")
            fences.append(claim.fence)
            await journal.release(claim)
        assert fences == sorted(set(fences))

    async def test_claimed_package_cannot_be_claimed(self, open_journal: OpenJournal) -> None:
        """Neither by another run nor by another task of the same run. Other packages can be claimed."""
        journal, other = open_journal(), open_journal()
        claim = await claimed(journal, "k")
        assert await journal.claim("k") is None
        assert await other.claim("k") is None
        await claimed(other, "another")
        await journal.write(claim, "{}")
        assert await other.claim("k") is None
        await journal.release(claim)
        assert (await claimed(other, "k")).state == "{}"

    async def test_one_of_many_concurrent_claims_succeeds(self, open_journal: OpenJournal) -> None:
        journals = [open_journal() for _ in range(4)]
        attempts = [(journal, f"k{number}") for number in range(10) for journal in journals * 2]
        claims = await asyncio.gather(*(journal.claim(key) for journal, key in attempts))
        assert sorted(claim.key for claim in claims if claim is not None) == sorted(f"k{n}" for n in range(10))

    async def test_concurrent_writes_are_all_kept(self, open_journal: OpenJournal) -> None:
        journal = open_journal()

        async def work(key: str) -> None:
            claim = await claimed(journal, key)
            for number in range(5):
                await journal.write(claim, f"{key}-{number}")
            await journal.release(claim)

        keys = [f"k{number}" for number in range(40)]
        await asyncio.gather(*(work(key) for key in keys))
        other = open_journal()
        assert [(await claimed(other, key)).state for key in keys] == [f"{key}-4" for key in keys]

    async def test_released_claim_is_refused(self, open_journal: OpenJournal) -> None:
        """It can neither write nor release, whether or not the package was claimed again."""
        journal, other = open_journal(), open_journal()
        claim = await claimed(journal, "k")
        await journal.write(claim, "first")
        await journal.release(claim)
        for _ in range(2):
            with pytest.raises(ClaimLost) as lost:
                await journal.write(claim, "late")
            assert lost.value.key == "k"
            with pytest.raises(ClaimLost):
                await journal.release(claim)
            held = await other.claim("k")
        assert held is None
        await other.aclose()
        assert (await claimed(journal, "k")).state == "first"

    async def test_earlier_claim_of_the_same_journal_is_refused(self, open_journal: OpenJournal) -> None:
        """The owner is the same: only the fence tells the two claims apart."""
        journal = open_journal()
        earlier = await claimed(journal, "k")
        await journal.release(earlier)
        claim = await claimed(journal, "k")
        with pytest.raises(ClaimLost):
            await journal.write(earlier, "late")
        with pytest.raises(ClaimLost):
            await journal.release(earlier)
        await journal.write(claim, "{}")

    async def test_cancelled_claim_leaves_the_package_free(self, open_journal: OpenJournal) -> None:
        journal, other = open_journal(), open_journal()
        for steps in range(8):
            claiming = asyncio.create_task(journal.claim("k"))
            for _ in range(steps):
                await asyncio.sleep(0)
            claiming.cancel()
            await asyncio.wait([claiming])
            if not claiming.cancelled() and (held := claiming.result()) is not None:
                await journal.release(held)
            # This waits until the cancelled claim has been processed.
            await journal.release(await claimed(journal, "another"))
            await asyncio.sleep(_MOMENT)
            await other.release(await soon_claimed(other, "k"))

    async def test_closing_releases_all_claims(self, open_journal: OpenJournal) -> None:
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
        with pytest.raises(JournalError, match="closed"):
            await journal.claim("m")
        await journal.aclose()


class ListedJournalConformance:
    """Tests the listing of a `ListedJournal`, with the fixture of `JournalConformance`."""

    pytestmark: pytest.MarkDecorator = pytest.mark.asyncio

    async def test_last_written_states_are_listed_by_key(self, open_journal: Callable[[], Any]) -> None:
        """Each key is listed once, claimed or not, by this run or another. A key without a state is left out."""
        journal, other = open_journal(), open_journal()
        assert [record async for record in journal.records()] == []
        began = datetime.now(UTC) - timedelta(minutes=1)
        keys = [f"k{number:03}" for number in range(520)]

        async def write(key: str) -> None:
            claim = await claimed(other, key)
            await other.write(claim, "earlier")
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


class FencedJournalConformance:
    """Tests a journal whose claims can expire while their holder lives, because the holder was paused or cut off.

    Besides ``open_journal`` (see `JournalConformance`) it needs a fixture ``lapse``: an ``async`` function that takes a
    journal and returns as soon as others can claim its packages.
    """

    pytestmark: pytest.MarkDecorator = pytest.mark.asyncio

    async def test_former_holder_cannot_write_after_a_takeover(
        self, open_journal: OpenJournal, lapse: Callable[[Journal], Awaitable[None]]
    ) -> None:
        """Its writes are refused, it releases nothing, and the new holder is not affected."""
        late, quick = open_journal(), open_journal()
        claim = await claimed(late, "k")
        await late.write(claim, "by the late run")
        await lapse(late)
        taken = await claimed(quick, "k")
        assert taken.state == "by the late run"
        assert taken.fence > claim.fence
        with pytest.raises(ClaimLost):
            await late.write(claim, "too late")
        await quick.write(taken, "by the quick run")
        with pytest.raises(ClaimLost):
            await late.release(claim)
        assert await open_journal().claim("k") is None
        await quick.release(taken)
        again = await claimed(late, "k")
        assert again.state == "by the quick run"
        assert again.fence > taken.fence


async def claimed(journal: Journal, key: str) -> Claim:
    """Claim a package that must be free."""
    claim = await journal.claim(key)
    assert claim is not None
    return claim


async def soon_claimed(journal: Journal, key: str) -> Claim:
    """Claim a package that must become free."""
    async with asyncio.timeout(_TIMEOUT):
        while (claim := await journal.claim(key)) is None:
            await asyncio.sleep(0.01)
    return claim
