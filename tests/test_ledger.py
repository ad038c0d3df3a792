"""The ledger: uploads of one name take turns, and whichever way one ends, it leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from signing_async.errors import BadRequest, DecodeError, OutcomeUnknown, ServerError
from signing_async.ledger import Ledger, Listed, normalized
from signing_async.models import Document
from signing_async.transport import Done, Undecided

PATH = "/api/1.0/signings/s1"


def _document(identity: str, name: str) -> Document:
    return Document(id=identity, name=name)


def _signing(ledger: Ledger) -> Any:
    return ledger._signings[PATH]


async def _nothing() -> Listed:
    return ()


async def test_uploads_of_one_name_take_turns() -> None:
    """In whatever case, form, and with or without its ending; the next one begins when the one before has ended."""
    ledger, inside, most = Ledger(), 0, 0
    order: list[str] = []

    async def upload(name: str) -> None:
        nonlocal inside, most
        async with ledger.upload(PATH, name, _nothing):
            inside += 1
            most = max(most, inside)
            order.append(name)
            for _ in range(3):
                await asyncio.sleep(0)
            inside -= 1

    names = ["Léa.pdf", "léa", " LE\u0301A.PDF ", "Léa.pdf"]
    await asyncio.gather(*map(upload, names))
    assert most == 1
    assert order == names


async def test_uploads_of_other_names_do_not_wait() -> None:
    """Nor do those to other signings."""
    ledger = Ledger()
    async with (
        ledger.upload(PATH, "a.pdf", _nothing),
        ledger.upload(PATH, "b.pdf", _nothing),
        ledger.upload(PATH + "2", "a.pdf", _nothing),
    ):
        assert _signing(ledger).under_way == {"a": 1, "b": 1}
    assert _signing(ledger).under_way == {}


@pytest.mark.parametrize("failure", [RuntimeError, asyncio.CancelledError])
async def test_an_upload_that_fails_gives_its_turn_on(failure: type[BaseException]) -> None:
    """The next of its name begins, and nothing counts as under way any more."""
    ledger = Ledger()
    with pytest.raises(failure):
        async with ledger.upload(PATH, "a.pdf", _nothing):
            raise failure
    assert _signing(ledger).under_way == {}
    assert not _signing(ledger).turns
    async with asyncio.timeout(10), ledger.upload(PATH, "a.pdf", _nothing):
        assert _signing(ledger).under_way == {"a": 1}


async def test_a_first_reading_that_fails() -> None:
    """The upload ends with that, and the next one reads again."""
    ledger, reads = Ledger(), 0

    async def read() -> Listed:
        nonlocal reads
        reads += 1
        if reads == 1:
            raise RuntimeError("no answer")
        return (_document("d1", "a.pdf"),)

    with pytest.raises(RuntimeError):
        async with ledger.upload(PATH, "a.pdf", read):
            raise AssertionError("it was not entered")
    assert _signing(ledger).under_way == {}
    async with ledger.upload(PATH, "a.pdf", read) as upload:
        assert reads == 2
        assert upload.settle((_document("d1", "a.pdf"),)) is None


async def test_many_that_begin_together_read_once() -> None:
    """Of a signing that is not known yet one of them finds out what was there before."""
    ledger, reads = Ledger(), 0

    async def read() -> Listed:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0.01)
        return ()

    async def upload(name: str) -> None:
        async with ledger.upload(PATH, name, read):
            assert _signing(ledger).known == set()

    await asyncio.gather(*(upload(f"{number}.pdf") for number in range(10)))
    assert reads == 1


@pytest.mark.parametrize("seed", range(20))
async def test_cancelled_anywhere_all_is_counted_rightly(seed: int) -> None:
    """Of many uploads of few names, each cancelled at any time or not, the rest get their turns, one at a time."""
    chance = random.Random(seed)
    ledger, inside, ended = Ledger(), Counter[str](), 0

    async def read() -> Listed:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        if chance.random() < 0.3:
            raise RuntimeError("no answer")
        return ()

    async def upload(name: str) -> None:
        nonlocal ended
        async with ledger.upload(PATH, name, read):
            inside[name] += 1
            try:
                assert inside[name] == 1
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
                assert _signing(ledger).under_way[name] >= 1
            finally:
                inside[name] -= 1
            ended += 1

    tasks = {asyncio.create_task(upload(name)): name for name in chance.choices("abc", k=30)}
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        if chance.random() < 0.4:
            chance.choice(list(tasks)).cancel()
        if PATH in ledger._signings:
            # Those that have not begun yet are not under way either.
            counted = Counter(name for task, name in tasks.items() if not task.done() and _begun(task))
            assert _signing(ledger).under_way == counted
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(each) for each in results} <= {type(None), asyncio.CancelledError, RuntimeError}
    assert ended == results.count(None)
    assert _signing(ledger).under_way == {}
    assert not _signing(ledger).turns
    assert not _signing(ledger).reading.locked()


def _begun(task: asyncio.Task[None]) -> bool:
    coroutine: Any = task.get_coro()
    return coroutine.cr_await is not None


async def test_a_reading_that_began_before_a_failure_does_not_settle_it() -> None:
    """Many uploads that fail together are settled by one reading, later ones by another; afterwards none is kept."""
    ledger, reads = Ledger(), 0
    ledger.created(PATH)
    loop = asyncio.get_running_loop()

    async def read() -> Listed:
        nonlocal reads
        reads += 1
        return (_document(f"d{reads}", "a.pdf"),)

    async with ledger.upload(PATH, "a.pdf", read) as one, ledger.upload(PATH, "b.pdf", read) as other:
        since = loop.time()
        assert await one.documents(read, since) == await other.documents(read, since)
        assert reads == 1
        async with ledger.upload(PATH, "c.pdf", read):
            pass
        assert await other.documents(read, since) == (_document("d1", "a.pdf"),)
        # By a clock that is coarse a reading may begin before a failure, and at the same time.
        began = _signing(ledger).listed_at
        await asyncio.sleep(0.01)
        assert await other.documents(read, began) == (_document("d2", "a.pdf"),)
    async with ledger.upload(PATH, "a.pdf", read) as third:
        await third.documents(read, since)
    assert reads == 3


async def test_a_reading_that_ends_after_a_failure_may_have_begun_before() -> None:
    """What it shows may be older than the failed upload's document: it settles nothing."""
    ledger, reads = Ledger(), 0
    ledger.created(PATH)
    loop = asyncio.get_running_loop()
    began, ends = asyncio.Event(), asyncio.Event()

    async def read() -> Listed:
        nonlocal reads
        reads += 1
        began.set()
        await ends.wait()
        return (_document(f"d{reads}", "a.pdf"),)

    async with ledger.upload(PATH, "a.pdf", read) as one, ledger.upload(PATH, "b.pdf", read) as other:
        first = asyncio.create_task(one.documents(read, loop.time()))
        await began.wait()
        await asyncio.sleep(0.01)
        failed_at = loop.time()
        await asyncio.sleep(0.01)
        ends.set()
        assert await first == (_document("d1", "a.pdf"),)
        assert await other.documents(read, failed_at) == (_document("d2", "a.pdf"),)


async def test_what_was_read_for_another_reason() -> None:
    """Its documents are older ones, unless an upload was under way at any time meanwhile."""
    ledger = Ledger()
    found = (_document("d1", "a.pdf"),)
    ledger.looking(PATH)(found)
    ledger.created(PATH)
    note, late = ledger.looking(PATH), ledger.looking(PATH)
    note(found)
    async with ledger.upload(PATH, "a.pdf", _nothing) as upload:
        assert upload.settle(found) is None
        ledger.looking(PATH)((_document("d2", "a.pdf"),))
        late((_document("d2", "a.pdf"),))
        assert upload.settle((*found, _document("d2", "a.pdf"))) == Done(_document("d2", "a.pdf"))
    late((_document("d2", "a.pdf"),))
    async with ledger.upload(PATH, "a.pdf", _nothing) as upload:
        assert upload.settle((*found, _document("d2", "a.pdf"))) == Done(_document("d2", "a.pdf"))


async def test_an_upload_that_was_cancelled_may_still_turn_up() -> None:
    """What bears its name later is not taken for the next one's document, until somebody has seen it."""
    ledger = Ledger()
    ledger.created(PATH)
    async with ledger.upload(PATH, "a.pdf", _nothing) as upload:
        upload.failed(asyncio.CancelledError(), checked=True)
    found = (_document("d1", "a.pdf"),)
    async with ledger.upload(PATH, "a.pdf", _nothing) as upload:
        with pytest.raises(Undecided, match="more than one upload"):
            upload.settle(found)
    ledger.looking(PATH)(found)
    async with ledger.upload(PATH, "a.pdf", _nothing) as upload:
        assert upload.settle((*found, _document("d2", "a"))) == Done(_document("d2", "a"))


@pytest.mark.parametrize(
    ("error", "checked", "lost"),
    [
        (OutcomeUnknown("x"), True, True),
        (DecodeError("x"), True, True),
        (KeyboardInterrupt(), True, True),
        (ServerError("x", status=500), False, True),
        (ServerError("x", status=500), True, False),
        (BadRequest("x", status=400), False, False),
        (ValueError("the source's own"), False, False),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, BaseException) else str(each),
)
async def test_which_failures_leave_a_document_to_come(error: BaseException, checked: bool, lost: bool) -> None:
    """Those of which nobody knows what became of it: its document is then taken neither for another's, nor for odd."""
    ledger = Ledger()
    ledger.created(PATH)
    found = (_document("d1", "a.pdf"),)
    async with ledger.upload(PATH, "a.pdf", _nothing) as upload:
        upload.failed(error, checked=checked)
    async with ledger.upload(PATH, "a.pdf", _nothing) as same:
        if lost:
            with pytest.raises(Undecided, match="more than one upload"):
                same.settle(found)
        else:
            assert same.settle(found) == Done(found[0])
    async with ledger.upload(PATH, "b.pdf", _nothing) as other:
        if lost:
            assert other.settle(found) is None
        else:
            with pytest.raises(Undecided, match="another name"):
                other.settle(found)


async def test_two_documents_of_one_name() -> None:
    """Which of them is the upload's cannot be told."""
    ledger = Ledger()
    ledger.created(PATH)
    async with ledger.upload(PATH, "a.pdf", _nothing) as upload:
        with pytest.raises(Undecided, match="more than one upload") as caught:
            upload.settle((_document("d1", "a.pdf"), _document("d2", "A")))
    assert [document.id for document in caught.value.known] == ["d1", "d2"]  # type: ignore[attr-defined]  # documents


async def test_documents_of_other_names() -> None:
    """They belong to others that are under way or were lost; one that belongs to nobody leaves it open."""
    ledger = Ledger()
    ledger.created(PATH)
    found = (_document("d1", "b.pdf"),)
    async with ledger.upload(PATH, "a.pdf", _nothing) as upload:
        with pytest.raises(Undecided, match="another name"):
            upload.settle(found)
        async with ledger.upload(PATH, "b.pdf", _nothing) as other:
            assert upload.settle(found) is None
            with pytest.raises(Undecided, match="another name"):
                upload.settle((*found, _document("d2", "b.pdf")))
            other.done(found[0])
        assert upload.settle(found) is None
        with pytest.raises(Undecided, match="does not list"):
            upload.settle(None)


def test_names_that_are_too_long_stay_as_they_are() -> None:
    """A normal form of a name without end takes too long."""
    assert normalized("NFC", "e\u0301") == "é"
    assert normalized("NFC", "e\u0301" * 1000) == "e\u0301" * 1000
