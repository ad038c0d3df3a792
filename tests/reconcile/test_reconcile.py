"""Reconciliation: who waits for whom, which records count as the effect of a call, and when a call is settled."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from signing_async import Assumptions, RequestTimeout, ServerError, SigningError, reconcile
from signing_async.models import Document, Recipient, Signing
from signing_async.reconcile import Creation, Found, Listed, Reconciler, Sent, Tracker, Undecidable
from signing_async.record_matching import DocumentMatch, RecipientMatch, normalized
from signing_async.transport.retry import Outcome

PATH = "/api/1.0/signings/s1"
SHA256 = "ab" * 32


def _document(identity: str, name: str, **extra: Any) -> Document:
    return Document(id=identity, name=name, extra=extra)


async def _nothing() -> Listed:
    return ()


def _upload(
    tracker: Tracker,
    name: str,
    read_first: Callable[[], Awaitable[Listed]] = _nothing,
    *,
    path: str = PATH,
    deadline: float = math.inf,
) -> Creation[Document]:
    signing = tracker.signing(path)
    match = DocumentMatch(name, 10, lambda: SHA256, Assumptions())

    def list_documents(read: Any) -> Awaitable[Listed]:
        answer: Awaitable[Listed] = read(None)
        return answer

    if math.isinf(deadline):
        deadline = asyncio.get_running_loop().time() + 60
    return Creation(
        "documents.upload",
        "signings.get",
        deadline,
        signing.ambiguities,
        signing.documents,
        match,
        list_documents,
        read_first,
    )


async def _find(creation: Creation[Any], records: Any) -> Any:
    async def read(operation: object) -> Any:
        return records

    return await creation.find(read, asyncio.get_running_loop().time())


async def _verify(creation: Creation[Any], records: Any, value: Any) -> Any:
    async def read(operation: object) -> Any:
        return records

    return await creation.verify(read, asyncio.get_running_loop().time(), value)


def _pending(tracker: Tracker) -> Counter[str]:
    return tracker.signing(PATH).documents.pending


# Turns


async def test_uploads_of_one_name_take_turns() -> None:
    """In whatever case, form, and with or without the suffix; the next begins when the one before has ended."""
    tracker, inside, most = Tracker(), 0, 0
    order: list[str] = []

    async def upload(name: str) -> None:
        nonlocal inside, most
        async with _upload(tracker, name):
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
    tracker = Tracker()
    async with _upload(tracker, "a.pdf"), _upload(tracker, "b.pdf"), _upload(tracker, "a.pdf", path=PATH + "2"):
        assert _pending(tracker) == {"a": 1, "b": 1}
    assert _pending(tracker) == {}


@pytest.mark.parametrize("failure", [RuntimeError, asyncio.CancelledError])
async def test_upload_that_fails_lets_the_next_one_begin(failure: type[BaseException]) -> None:
    """Nothing counts as pending any more."""
    tracker = Tracker()
    with pytest.raises(failure):
        async with _upload(tracker, "a.pdf"):
            raise failure
    assert _pending(tracker) == {}
    assert not tracker.signing(PATH).documents.locks
    async with asyncio.timeout(10), _upload(tracker, "a.pdf"):
        assert _pending(tracker) == {"a": 1}


async def test_turn_is_not_waited_for_beyond_the_deadline() -> None:
    """The caller learns that nothing was sent."""
    tracker, loop = Tracker(), asyncio.get_running_loop()
    async with _upload(tracker, "a.pdf"):
        with pytest.raises(RequestTimeout, match="before anything was sent") as caught:
            async with _upload(tracker, "a.pdf", deadline=loop.time() + 0.01):
                raise AssertionError("two uploads of one name at once")
        assert caught.value.attempts == 0
        assert caught.value.effect == "none"
        assert _pending(tracker) == {"a": 1}


async def test_timeout_of_the_first_reading_is_not_taken_for_the_deadline() -> None:
    """It is passed on as it is."""

    async def read() -> Listed:
        raise TimeoutError("of the reading")

    with pytest.raises(TimeoutError, match="of the reading"):
        await _upload(Tracker(), "a.pdf", read).__aenter__()


async def test_first_reading_that_fails_is_repeated_by_the_next_upload() -> None:
    """The upload itself ends with the error."""
    tracker, reads = Tracker(), 0

    async def read() -> Listed:
        nonlocal reads
        reads += 1
        if reads == 1:
            raise RuntimeError("no response")
        return (_document("d1", "a.pdf"),)

    with pytest.raises(RuntimeError):
        async with _upload(tracker, "a.pdf", read):
            raise AssertionError("it was not entered")
    assert _pending(tracker) == {}
    async with _upload(tracker, "a.pdf", read) as _:
        assert reads == 2
        assert await _find(_upload(tracker, "a.pdf"), (_document("d1", "a.pdf"),)) is None


async def test_uploads_that_begin_together_read_once() -> None:
    """One of them finds out what an unknown signing held before."""
    tracker, reads = Tracker(), 0

    async def read() -> Listed:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0.01)
        return ()

    async def upload(name: str) -> None:
        async with _upload(tracker, name, read):
            assert tracker.signing(PATH).documents.known == set()

    await asyncio.gather(*(upload(f"{number}.pdf") for number in range(10)))
    assert reads == 1


@pytest.mark.parametrize("seed", range(20))
async def test_uploads_cancelled_anywhere_are_counted_rightly(seed: int) -> None:
    """Of many uploads of few names, each cancelled at any time or not, the rest run one at a time."""
    chance = random.Random(seed)
    tracker, inside, ended = Tracker(), Counter[str](), 0

    async def read() -> Listed:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        if chance.random() < 0.3:
            raise RuntimeError("no response")
        return ()

    async def upload(name: str) -> None:
        nonlocal ended
        async with _upload(tracker, name, read):
            inside[name] += 1
            try:
                assert inside[name] == 1
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
                assert _pending(tracker)[name] >= 1
            finally:
                inside[name] -= 1
            ended += 1

    tasks = {asyncio.create_task(upload(name)): name for name in chance.choices("abc", k=30)}
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        if chance.random() < 0.4:
            chance.choice(list(tasks)).cancel()
        # Tasks that have not begun yet are not pending either.
        counted = Counter(name for task, name in tasks.items() if not task.done() and _has_begun(task))
        assert _pending(tracker) == counted
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(each) for each in results} <= {type(None), asyncio.CancelledError, RuntimeError}
    assert ended == results.count(None)
    assert _pending(tracker) == {}
    assert not tracker.signing(PATH).documents.locks
    assert not tracker.signing(PATH).documents.first_reading.locked()


def _has_begun(task: asyncio.Task[None]) -> bool:
    coroutine: Any = task.get_coro()
    return coroutine.cr_await is not None


# Shared readings


async def test_reading_is_shared_by_calls_that_failed_before_it_began() -> None:
    """Later failures need another one; nothing is kept when no call is pending."""
    tracker, reads = Tracker(), 0
    tracker.note_created(PATH)
    loop = asyncio.get_running_loop()

    async def read(operation: object) -> Listed:
        nonlocal reads
        reads += 1
        return ()

    one, other = _upload(tracker, "a.pdf"), _upload(tracker, "b.pdf")
    async with one, other:
        since = loop.time() - 0.001
        await one.find(read, since)
        await other.find(read, since)
        assert reads == 1
        async with _upload(tracker, "c.pdf"):
            pass
        await other.find(read, since)
        assert reads == 1
        await other.find(read, loop.time())
        assert reads == 2
    third = _upload(tracker, "a.pdf")
    async with third:
        await third.find(read, since)
    assert reads == 3


async def test_reading_that_ends_after_a_failure_may_have_begun_before() -> None:
    """What it shows may be older than the failed upload's document: it settles nothing."""
    tracker, reads = Tracker(), 0
    tracker.note_created(PATH)
    loop = asyncio.get_running_loop()
    began, ends = asyncio.Event(), asyncio.Event()

    async def read(operation: object) -> Listed:
        nonlocal reads
        reads += 1
        began.set()
        await ends.wait()
        return (_document("d2", "b.pdf"),) if reads == 2 else ()

    one, other = _upload(tracker, "a.pdf"), _upload(tracker, "b.pdf")
    async with one, other:
        first = asyncio.create_task(one.find(read, loop.time() - 0.001))
        await began.wait()
        await asyncio.sleep(0.01)
        failed_at = loop.time()
        ends.set()
        assert await first is None
        assert await other.find(read, failed_at) == Found(_document("d2", "b.pdf"))
    assert reads == 2


# Which documents count


async def test_documents_that_were_read_for_another_reason_are_known() -> None:
    """Unless an upload was pending at any time meanwhile: its document must not pass for an older one."""
    tracker = Tracker()
    found = (_document("d1", "a.pdf"),)
    tracker.observe(PATH)(found)
    tracker.note_created(PATH)
    note, late = tracker.observe(PATH), tracker.observe(PATH)
    note(found)
    upload = _upload(tracker, "a.pdf")
    async with upload:
        assert await _find(upload, found) is None
        tracker.observe(PATH)((_document("d2", "a.pdf"),))
        late((_document("d2", "a.pdf"),))
        assert await _find(upload, (*found, _document("d2", "a.pdf"))) == Found(_document("d2", "a.pdf"))


async def test_document_of_an_unresolved_upload_is_not_taken_for_the_next_one() -> None:
    """Until it was read: then it is an older one."""
    tracker = Tracker()
    tracker.note_created(PATH)
    lost = _upload(tracker, "a.pdf")
    async with lost:
        lost.note_unresolved()
    found = (_document("d1", "a.pdf"),)
    upload, other = _upload(tracker, "a.pdf"), _upload(tracker, "b.pdf")
    async with upload, other:
        with pytest.raises(Undecidable, match="more than one request"):
            await _find(upload, found)
        assert await _find(other, found) is None
    tracker.observe(PATH)(found)
    async with upload:
        assert await _find(upload, (*found, _document("d2", "a"))) == Found(_document("d2", "a"))


async def test_two_documents_of_one_name_are_undecidable() -> None:
    """Which of them is the upload's cannot be told."""
    tracker = Tracker()
    tracker.note_created(PATH)
    upload = _upload(tracker, "a.pdf")
    async with upload:
        with pytest.raises(Undecidable, match="more than one request") as caught:
            await _find(upload, (_document("d1", "a.pdf"), _document("d2", "A")))
    assert [document.id for document in caught.value.known] == ["d1", "d2"]  # type: ignore[attr-defined]  # documents


@pytest.mark.parametrize("other", [{"size": 11}, {"file_size": 11}, {"sha256": "cd" * 32}, {"checksum": "CD" * 32}])
async def test_document_of_another_client_is_told_apart_by_size_or_hash(other: dict[str, Any]) -> None:
    """It never passes for the call's effect; alone it leaves the outcome open."""
    tracker = Tracker()
    tracker.note_created(PATH)
    upload = _upload(tracker, "a.pdf")
    theirs, mine = _document("d1", "a.pdf", **other), _document("d2", "a.pdf", size=10, sha256=SHA256.upper())
    async with upload:
        assert await _find(upload, (theirs, mine)) == Found(mine)
        with pytest.raises(Undecidable, match="differs in its size"):
            await _find(upload, (theirs,))


async def test_success_beside_a_similar_document_is_undecidable_if_the_service_rewrites_files() -> None:
    tracker = Tracker()
    tracker.note_created(PATH)
    upload = _upload(tracker, "a.pdf")
    other = _document("d1", "a.pdf", size=11)
    async with upload:
        for size in (10, 11):
            mine = _document("d2", "a.pdf", size=size)
            if size == 10:
                assert await _verify(upload, (other, mine), mine) == mine
            else:
                with pytest.raises(Undecidable, match="differs in its size") as caught:
                    await _verify(upload, (other, mine), mine)
                assert caught.value.known == (mine, other)


async def test_success_under_another_name_is_undecidable_beside_a_document_of_that_name() -> None:
    """The service renames files: the document may be the effect of an earlier attempt, or of the other upload."""
    tracker = Tracker()
    tracker.note_created(PATH)
    upload, other = _upload(tracker, "a b.pdf"), _upload(tracker, "a_b.pdf")
    first, mine = _document("d1", "a_b.pdf"), _document("d2", "a_b.pdf")
    async with upload, other:
        assert await _verify(upload, (mine,), mine) == mine
        with pytest.raises(Undecidable) as caught:
            await _verify(upload, (first, mine), mine)
        assert caught.value.known == (mine, first)


async def test_success_with_a_known_record_is_verified() -> None:
    """The service recognized the repeat, and returned the record that it has."""
    tracker = Tracker()
    tracker.note_created(PATH)
    upload, held = _upload(tracker, "a.pdf"), _document("d1", "a.pdf")
    async with upload:
        upload.note_created(held)
        assert await _verify(upload, (held,), held) == held


@pytest.mark.parametrize("extra", [{"size": "11"}, {"size": True}, {"checksum": "crc32:1234"}, {"sha256": None}])
async def test_size_or_hash_in_a_form_that_says_nothing_does_not_count(extra: dict[str, Any]) -> None:
    """Only a whole number and 64 hexadecimal digits are compared."""
    tracker = Tracker()
    tracker.note_created(PATH)
    upload = _upload(tracker, "a.pdf")
    async with upload:
        assert await _find(upload, (_document("d1", "a.pdf", **extra),)) == Found(_document("d1", "a.pdf", **extra))


async def test_documents_of_other_names_belong_to_other_uploads_or_are_undecidable() -> None:
    """The service may have renamed the file."""
    tracker = Tracker()
    tracker.note_created(PATH)
    found = (_document("d1", "b.pdf"),)
    upload, other = _upload(tracker, "a.pdf"), _upload(tracker, "b.pdf")
    async with upload:
        with pytest.raises(Undecidable, match="another name"):
            await _find(upload, found)
        async with other:
            assert await _find(upload, found) is None
            with pytest.raises(Undecidable, match="another name"):
                await _find(upload, (*found, _document("d2", "b.pdf")))
            other.note_created(found[0])
        assert await _find(upload, found) is None
        with pytest.raises(Undecidable, match="does not list"):
            await _find(upload, None)


async def test_recipients_of_one_address_take_turns() -> None:
    """So two calls never return one recipient."""
    tracker = Tracker()
    signing = tracker.signing(PATH)
    deadline = asyncio.get_running_loop().time() + 60

    def add(email: str) -> Creation[Recipient]:
        match = RecipientMatch({"email": email, "first_name": "Anna"}, {})
        return Creation(
            "recipients.add",
            "recipients.list",
            deadline,
            signing.ambiguities,
            signing.recipients,
            match,
            lambda read: read(None),
        )

    one, other = add("Anna@example.com"), add("anna@example.com ")
    async with one:
        second = asyncio.create_task(other.__aenter__())
        await asyncio.sleep(0)
        assert not second.done()
        found = await _find(one, (Recipient("r1", "ANNA@example.com", "anna"),))
        assert found == Found(Recipient("r1", "ANNA@example.com", "anna"))
        one.note_created(found.value)
    await second
    assert await _find(other, (Recipient("r1", "ANNA@example.com", "anna"),)) is None
    await other.__aexit__()


async def test_tracker_forgets_the_least_recently_used_signing() -> None:
    """It is bounded, and never forgets a signing with a pending call."""
    tracker = Tracker(max_signings=2)
    reads: list[int] = []

    async def read() -> Listed:
        reads.append(1)
        return ()

    tracker.note_created("a")
    async with _upload(tracker, "x.pdf", read, path="a"):
        for name in ("b", "c", "d"):
            tracker.note_created(name)
        async with _upload(tracker, "y.pdf", read, path="a"), _upload(tracker, "y.pdf", read, path="d"):
            assert reads == []
            tracker.note_created("e")
    async with _upload(tracker, "x.pdf", read, path="b"):
        assert reads == [1]
    tiny = Tracker(max_signings=0)
    async with _upload(tiny, "x.pdf", read, path="a"):
        tiny.note_created("a")
        async with _upload(tiny, "y.pdf", read, path="a"):
            assert reads == [1, 1]


# Settling


class _Clock:
    """A loop's clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    """The reconciler's clock: however busy the machine is, its readings begin when they are due."""
    ready = _Clock()
    loop = SimpleNamespace(get_running_loop=lambda: ready, sleep=ready.sleep, Lock=asyncio.Lock)
    monkeypatch.setattr("signing_async.reconcile.asyncio", loop)
    return ready


class _Readings:
    """An effect whose readings give what the test says, one after the other; the last one again and again."""

    reading = "signings.get"
    adds_up = True

    def __init__(self, *results: object) -> None:
        self.ambiguities: Counter[Outcome] = Counter()
        self.results = list(results)
        self.at: list[float] = []

    async def find(self, read: Any, since: float) -> Found[str] | None:
        self.at.append(reconcile.asyncio.get_running_loop().time())
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, BaseException):
            raise result
        return Found(result) if isinstance(result, str) else None

    async def verify(self, read: Any, since: float, value: str) -> str:
        raise AssertionError("no attempt succeeds in these tests")

    def may_cause(self, error: SigningError) -> bool:
        raise AssertionError("no attempt is refused in these tests")

    def note_unresolved(self) -> None: ...


async def _never_read(operation: object) -> object:
    raise AssertionError("the readings are the effect's own")


def _reconciler(effect: _Readings, clock: _Clock, seconds: float = 60) -> Reconciler[str]:
    return Reconciler(effect, _never_read, clock.now + seconds)


async def test_effect_that_shows_at_once_costs_one_reading(clock: _Clock) -> None:
    """The ordinary lost response is not slowed down."""
    effect = _Readings("done")
    reconciler = _reconciler(effect, clock)
    reconciler.note(5.0, may_be_late=True)
    assert await reconciler.settle(0.0, reading_time=0.1) == Found("done")
    assert len(effect.at) == 1
    assert not reconciler.ambiguous
    assert reconciler.was_ambiguous


async def test_nothing_is_settled_before_the_settle_time_is_over(clock: _Clock) -> None:
    """Readings with growing pauses; the last one begins when the time is over."""
    effect = _Readings(None)
    reconciler = _reconciler(effect, clock)
    reconciler.note(0.7, may_be_late=True)
    settled_at = clock.now + 0.7
    assert await reconciler.settle(0.0, reading_time=0.1) is None
    assert len(effect.at) == 4
    assert effect.at[-1] >= settled_at - 0.01
    assert effect.at[-2] < settled_at
    assert not reconciler.ambiguous


async def test_retry_is_preceded_by_a_reading_though_the_settle_time_is_over(clock: _Clock) -> None:
    """After a 429 in between, say; one reading is enough."""
    effect = _Readings(None)
    reconciler = _reconciler(effect, clock)
    reconciler.note(0.0, may_be_late=True)
    assert await reconciler.settle(clock.now, reading_time=0.1) is None
    effect.results = ["late"]
    assert await reconciler.settle(clock.now, reading_time=0.1) == Found("late")
    assert len(effect.at) == 2


async def test_long_delay_after_the_settle_time_is_not_filled_with_readings(clock: _Clock) -> None:
    """A Retry-After, say: the service is read over the settle time, and once before the retry."""
    effect = _Readings(None)
    reconciler = _reconciler(effect, clock)
    reconciler.note(0.1, may_be_late=False)
    retry_at = clock.now + 1.0
    assert await reconciler.settle(retry_at, reading_time=0.1) is None
    assert len(effect.at) == 3
    assert effect.at[-1] >= retry_at - 0.01


async def test_deadline_before_the_settle_time_leaves_the_call_ambiguous(clock: _Clock) -> None:
    """It is used up for readings all the same."""
    effect = _Readings(None)
    reconciler = _reconciler(effect, clock, seconds=0.3)
    reconciler.note(5.0, may_be_late=True)
    with pytest.raises(TimeoutError):
        await reconciler.settle(0.0, reading_time=0.05)
    assert reconciler.ambiguous
    assert len(effect.at) == 3


async def test_reading_that_fails_for_a_transient_reason_is_repeated(clock: _Clock) -> None:
    """The last one counts; an error that is not transient ends it at once."""
    effect = _Readings(ServerError("x", status=503), "done")
    reconciler = _reconciler(effect, clock)
    reconciler.note(5.0, may_be_late=True)
    assert await reconciler.settle(0.0, reading_time=0.1) == Found("done")
    effect = _Readings(ServerError("x", status=503))
    reconciler = _reconciler(effect, clock)
    reconciler.note(0.01, may_be_late=False)
    with pytest.raises(ServerError):
        await reconciler.settle(0.0, reading_time=0.1)
    assert len(effect.at) == 2
    assert reconciler.ambiguous


@pytest.mark.parametrize(
    ("outcomes", "is_found", "late"),
    [
        ([], False, False),
        ([Outcome.FAILED, Outcome.FAILED], False, False),
        ([Outcome.GATEWAY], False, True),
        ([Outcome.CUT], False, True),
        ([Outcome.LOST], False, True),
        ([Outcome.LOST], True, False),
        ([Outcome.LOST, Outcome.LOST], True, True),
        ([Outcome.LOST, Outcome.FAILED], True, True),
        ([Outcome.FAILED, Outcome.LOST], True, True),
        ([Outcome.FAILED, Outcome.FAILED], True, False),
    ],
)
async def test_signing_may_change_late_if_a_lost_request_is_not_accounted_for(
    clock: _Clock, outcomes: list[Outcome], is_found: bool, late: bool
) -> None:
    """The service's own error ends a request; a gateway that gave up says nothing of it."""
    signing, effect = Tracker().signing(PATH), _Readings("done" if is_found else None)
    effect.adds_up = False
    effect.ambiguities = signing.ambiguities
    reconciler = _reconciler(effect, clock)
    for outcome in outcomes:
        reconciler.note(0.0, may_be_late=outcome.may_be_late)
    await reconciler.settle(0.0, reading_time=0.0)
    assert signing.may_change_late is late


@pytest.mark.parametrize("late", [True, False])
async def test_first_effect_does_not_settle_two_ambiguous_attempts(clock: _Clock, late: bool) -> None:
    """Both may have taken effect: the readings go on for the settle time of the second."""
    both = Undecidable("more than one request", ["d1", "d2"])
    effect = _Readings("d1", both)
    reconciler = _reconciler(effect, clock)
    reconciler.note(0.0, may_be_late=late)
    reconciler.note(0.3, may_be_late=late)
    with pytest.raises(Undecidable, match="more than one"):
        await reconciler.settle(0.0, reading_time=0.1)
    assert reconciler.ambiguous


async def test_undecidable_reading_may_be_decided_by_a_later_one(clock: _Clock) -> None:
    """A record that looks odd does not end the readings, unless the service can never tell."""
    effect = _Readings(Undecidable("another name", may_clear=True), "done")
    reconciler = _reconciler(effect, clock)
    reconciler.note(5.0, may_be_late=True)
    assert await reconciler.settle(0.0, reading_time=0.1) == Found("done")
    effect = _Readings(Undecidable("another name", may_clear=True))
    reconciler = _reconciler(effect, clock)
    reconciler.note(0.1, may_be_late=True)
    with pytest.raises(Undecidable):
        await reconciler.settle(0.0, reading_time=0.1)
    assert len(effect.at) == 2


async def test_failed_reading_is_shared_but_not_its_timeout() -> None:
    """Many waiting calls do not repeat one failure after the other; a deadline is each call's own."""
    tracker, reads = Tracker(), 0

    async def get(read: Any) -> Signing:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0.01)
        raise RequestTimeout("too late") if reads == 1 else ServerError("x", status=503)

    since = asyncio.get_running_loop().time() - 0.001
    effects = [Sent(tracker.signing(PATH), get) for _ in range(10)]
    errors = await asyncio.gather(*(effect.find(_never_read, since) for effect in effects), return_exceptions=True)
    assert [type(error) for error in errors] == [RequestTimeout, *[ServerError] * 9]
    assert reads == 2
    assert len({id(error) for error in errors}) == 10


async def test_sends_of_one_signing_share_a_reading() -> None:
    """And nobody reads again what shows the effect."""
    tracker, reads = Tracker(), 0

    async def get(read: Any) -> Signing:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0.01)
        return Signing("s1", is_draft=False)

    since = asyncio.get_running_loop().time() - 0.001
    effects = [Sent(tracker.signing(PATH), get) for _ in range(25)]
    found = await asyncio.gather(*(effect.find(_never_read, since) for effect in effects))
    assert found == [Found(Signing("s1", is_draft=False))] * 25
    assert reads == 1


def test_names_that_are_too_long_stay_as_they_are() -> None:
    """A normal form of a name without end takes too long."""
    assert normalized("NFC", "e\u0301") == "é"
    assert normalized("NFC", "e\u0301" * 1000) == "e\u0301" * 1000
