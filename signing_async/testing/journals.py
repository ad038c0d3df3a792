"""What every journal of a dispatch has to hold, as tests that an implementation can run on itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from ..dispatch.journal import Claim, ClaimLost, Journal, JournalError

__all__ = ["FencedJournalConformance", "JournalConformance", "OpenJournal"]

OpenJournal = Callable[[], Journal]
"""Opens the journal: each time another object, as another run would have it, on the same storage."""

_LONG = '{"status": "draft", "name": "Å ☃ 😀\\n"}' * 20_000
_LONG_ENOUGH = 20.0
_A_LITTLE = 0.02


class JournalConformance:
    """The promises of the `Journal` protocol, by which a dispatch sends each package once.

    Subclass it with a fixture ``open_journal`` that gives a function: each call opens the journal once more, another
    object on the same storage, which is empty when a test begins; the fixture closes them. The tests are ``async`` and
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

    pytestmark = pytest.mark.asyncio

    async def test_a_new_package_has_no_state(self, open_journal: OpenJournal) -> None:
        """Nothing was ever written for it."""
        claim = await claimed(open_journal(), "new")
        assert (claim.key, claim.state) == ("new", None)

    @pytest.mark.parametrize("state", ["{}", _LONG], ids=["short", "long"])
    @pytest.mark.parametrize("key", ["k", "Lease ☃ 7/a?b=c'\";--%s{table}$1", "k" * 500], ids=["short", "odd", "long"])
    async def test_what_is_written_is_there_for_the_next(self, open_journal: OpenJournal, key: str, state: str) -> None:
        """The last text that was written, whole, under the very key."""
        journal = open_journal()
        claim = await claimed(journal, key)
        await journal.write(claim, "earlier")
        await journal.write(claim, state)
        await journal.release(claim)
        for again in (journal, open_journal()):
            claim = await claimed(again, key)
            assert claim.state == state
            await again.release(claim)

    async def test_keys_are_told_apart_to_their_ends(self, open_journal: OpenJournal) -> None:
        """Two long ones that begin alike, and two that differ in case, in a space or in an accent."""
        journal = open_journal()
        keys = ["k" * 500 + "a", "k" * 500 + "b", "Lease", "lease", "lease ", "é", "e\u0301"]
        for key in keys:
            await journal.write(await claimed(journal, key), f"of {key}")
        await journal.aclose()
        other = open_journal()
        assert [(await claimed(other, key)).state for key in keys] == [f"of {key}" for key in keys]

    async def test_letting_go_writes_nothing(self, open_journal: OpenJournal) -> None:
        """A package that was taken and let go of is as it was."""
        journal = open_journal()
        await journal.release(await claimed(journal, "k"))
        claim = await claimed(journal, "k")
        assert claim.state is None
        await journal.write(claim, "{}")
        await journal.release(claim)
        await journal.release(await claimed(journal, "k"))
        assert (await claimed(journal, "k")).state == "{}"

    async def test_the_fence_grows_with_every_claim(self, open_journal: OpenJournal) -> None:
        """Whoever makes the claim."""
        fences = []
        for journal in (open_journal(), open_journal()) * 2:
            claim = await claimed(journal, "k")
            fences.append(claim.fence)
            await journal.release(claim)
        assert fences == sorted(set(fences))

    async def test_what_is_taken_is_not_given(self, open_journal: OpenJournal) -> None:
        """Neither to another run nor to another task of the same; other packages are free."""
        journal, other = open_journal(), open_journal()
        claim = await claimed(journal, "k")
        assert await journal.claim("k") is None
        assert await other.claim("k") is None
        await claimed(other, "another")
        await journal.write(claim, "{}")
        assert await other.claim("k") is None
        await journal.release(claim)
        assert (await claimed(other, "k")).state == "{}"

    async def test_of_many_at_once_one_gets_it(self, open_journal: OpenJournal) -> None:
        """For each package, of all who ask at the same moment."""
        journals = [open_journal() for _ in range(4)]
        asked = [(journal, f"k{number}") for number in range(10) for journal in journals * 2]
        given = await asyncio.gather(*(journal.claim(key) for journal, key in asked))
        assert sorted(claim.key for claim in given if claim is not None) == sorted(f"k{n}" for n in range(10))

    async def test_many_writes_at_once_are_all_kept(self, open_journal: OpenJournal) -> None:
        """Each for its own package."""
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

    async def test_a_claim_that_was_let_go_of_is_good_for_nothing(self, open_journal: OpenJournal) -> None:
        """It writes nothing and frees nothing, whether or not somebody has the package now."""
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

    async def test_a_claim_of_which_nobody_heard_is_free(self, open_journal: OpenJournal) -> None:
        """Whoever is cancelled while he asks for a package does not keep it from the others."""
        journal, other = open_journal(), open_journal()
        for turns in range(8):
            asking = asyncio.create_task(journal.claim("k"))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            if not asking.cancelled() and (held := asking.result()) is not None:
                await journal.release(held)
            # By now what was asked for is done.
            await journal.release(await claimed(journal, "another"))
            await asyncio.sleep(_A_LITTLE)
            await other.release(await soon_claimed(other, "k"))

    async def test_closing_lets_go_of_everything(self, open_journal: OpenJournal) -> None:
        """What was written stays; the journal that was closed says so, and closing it again does no harm."""
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


class FencedJournalConformance:
    """What is promised where a run is taken for dead that is not: it was paused, or cut off.

    Beside ``open_journal`` (see `JournalConformance`) it wants a fixture ``lapse``: an ``async`` function that is given
    a journal, and returns when others can take what that one has claimed.
    """

    pytestmark = pytest.mark.asyncio

    async def test_what_was_taken_over_is_not_written_by_the_former(
        self, open_journal: OpenJournal, lapse: Callable[[Journal], Awaitable[None]]
    ) -> None:
        """Its writes are refused, it frees nothing, and the new holder notices nothing of it."""
        late, quick = open_journal(), open_journal()
        claim = await claimed(late, "k")
        await late.write(claim, "by the late one")
        await lapse(late)
        taken = await claimed(quick, "k")
        assert taken.state == "by the late one"
        assert taken.fence > claim.fence
        with pytest.raises(ClaimLost):
            await late.write(claim, "too late")
        await quick.write(taken, "by the quick one")
        with pytest.raises(ClaimLost):
            await late.release(claim)
        assert await open_journal().claim("k") is None
        await quick.release(taken)
        again = await claimed(late, "k")
        assert again.state == "by the quick one"
        assert again.fence > taken.fence


async def claimed(journal: Journal, key: str) -> Claim:
    """The package, which has to be free."""
    claim = await journal.claim(key)
    assert claim is not None
    return claim


async def soon_claimed(journal: Journal, key: str) -> Claim:
    """The package, which has to become free."""
    async with asyncio.timeout(_LONG_ENOUGH):
        while (claim := await journal.claim(key)) is None:
            await asyncio.sleep(0.01)
    return claim
