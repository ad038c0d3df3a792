"""The pool of workers that bulk operations share: lazy, bounded, in order of completion, and gone when it is left."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from signing_async import InvalidRequest, Progress
from signing_async.worker_pool import Results, Tally, Teller


class Counted:
    """An endless source that knows how many were pulled, and whether it was closed."""

    def __init__(self) -> None:
        self.pulled = 0
        self.closed = False

    def plain(self) -> Iterator[int]:
        try:
            while True:
                self.pulled += 1
                yield self.pulled
        finally:
            self.closed = True

    async def asynchronous(self) -> AsyncIterator[int]:
        try:
            while True:
                await asyncio.sleep(0)
                self.pulled += 1
                yield self.pulled
        finally:
            self.closed = True


class Hands:
    """Work that counts how many are at it, and that ends when it is told to."""

    def __init__(self) -> None:
        self.at_once = self.most = self.cancelled = 0

    async def work(self, item: int) -> int:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(0.001 * (item % 3))
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # cleaning up takes its time
            self.cancelled += 1
            raise
        finally:
            self.at_once -= 1
        return item

    async def endless(self, item: int) -> int:
        return await self.work(item) if item < 3 else await self.hang(item)

    async def hang(self, item: int) -> int:
        self.at_once += 1
        try:
            return await asyncio.Future[int]()
        finally:
            self.at_once -= 1


def others() -> set[asyncio.Task[Any]]:
    """Tasks other than the test's own."""
    return asyncio.all_tasks() - {asyncio.current_task()}


async def settled() -> None:
    """Let what was cancelled come to its end."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("concurrency", [1, 3, 100])
async def test_each_item_has_its_result(concurrency: int) -> None:
    """Once, with no more at work at a time than was asked for, and as many if there is work for them."""
    hands = Hands()
    results = [result async for result in Results(range(50), hands.work, concurrency)]
    assert sorted(results) == list(range(50))
    assert hands.most == min(concurrency, 50)
    assert not others()


async def test_results_come_as_they_complete() -> None:
    """A slow one holds up no other."""
    finish = asyncio.Event()

    async def work(item: int) -> int:
        if item == 0:
            await finish.wait()
        return item

    results = Results(range(6), work, 2)
    assert [await anext(results) for _ in range(5)] == [1, 2, 3, 4, 5]
    finish.set()
    assert [result async for result in results] == [0]


@pytest.mark.parametrize("kind", ["plain", "asynchronous"])
async def test_sources_are_pulled_as_there_is_room(kind: str) -> None:
    """Nothing before the first result is asked for, and never far ahead of a consumer that takes its time."""
    source, hands = Counted(), Hands()
    results = Results(getattr(source, kind)(), hands.work, 4)
    await settled()
    assert source.pulled == 0
    for taken in range(1, 40):
        await anext(results)
        await asyncio.sleep(0.005)
        assert source.pulled <= taken + 2 * 4
    assert hands.most == 4
    await results.aclose()
    await settled()
    assert source.closed


@pytest.mark.parametrize("kind", ["plain", "asynchronous"])
@pytest.mark.parametrize("way", ["aclose", "with", "break", "drop", "raise", "cancel"])
async def test_to_leave_early_is_to_cancel(kind: str, way: str) -> None:
    """However the loop is left: no task goes on, nobody is at work, the source is let go of."""
    source, hands = Counted(), Hands()

    def make() -> Results[int]:
        return Results(getattr(source, kind)(), hands.work, 4)

    if way == "aclose":
        results = make()
        await anext(results)
        await results.aclose()
        assert [result async for result in results] == []
        await results.aclose()
        del results
    elif way == "with":
        async with make() as results:
            async for _ in results:
                break
        assert not hands.at_once
        del results
    elif way == "break":
        async for _ in make():
            break
    elif way == "drop":
        results = make()
        await anext(results)
        del results
    elif way == "raise":
        with pytest.raises(ZeroDivisionError):
            await divide(make())
    else:

        async def look() -> None:
            async for _ in make():
                pass

        consumer = asyncio.create_task(look())
        await asyncio.sleep(0.01)
        consumer.cancel()
        await asyncio.wait([consumer])
        assert consumer.cancelled()
    await settled()
    assert not others()
    assert hands.at_once == 0
    assert source.closed


async def consume(results: Results[int]) -> list[int]:
    return [result async for result in results]


async def divide(results: Results[int]) -> None:
    async for result in results:
        _ = result / 0


async def take_into(taken: list[int], results: Results[int]) -> None:
    async for result in results:
        taken.append(result)


async def test_who_gives_up_leaving_leaves_the_end_alone() -> None:
    """What cleans up is not cancelled a second time when the object is dropped; nothing goes on without it."""
    cleaning, clean, told = asyncio.Event(), asyncio.Event(), list[str]()

    async def work(item: int) -> int:
        try:
            return await asyncio.Future[int]()
        finally:
            cleaning.set()
            await clean.wait()
            told.append("clean")

    @asynccontextmanager
    async def around() -> AsyncIterator[None]:
        try:
            yield
        finally:
            told.append("left")

    results = Results([1], work, 1, around=around())
    waiting = asyncio.create_task(anext(results))
    await settled()
    leaving = asyncio.create_task(results.aclose())
    await cleaning.wait()
    leaving.cancel()
    await asyncio.wait([leaving, waiting])
    assert leaving.cancelled()
    del results, waiting, leaving
    gc.collect()
    await settled()
    assert told == []
    clean.set()
    await settled()
    assert told == ["clean", "left"]
    assert not others()


async def test_what_is_dropped_in_another_thread_is_cancelled_in_its_loop() -> None:
    """The garbage collector runs where it likes."""
    # So the loop minds what another thread does with it.
    asyncio.get_running_loop().set_debug(True)
    hands = Hands()
    held = [Results(Counted().plain(), hands.hang, 2)]
    waiting = asyncio.create_task(anext(held[0]))
    await settled()
    waiting.cancel()
    await asyncio.wait([waiting])
    del waiting
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    await settled()
    assert not others()
    assert hands.at_once == 0


def test_what_outlives_its_loop_is_dropped_in_silence() -> None:
    """There is nothing left to cancel."""

    async def main() -> Results[int]:
        results = Results(Counted().plain(), Hands().work, 2)
        await anext(results)
        return results

    loop = asyncio.new_event_loop()
    results = loop.run_until_complete(main())
    tasks = asyncio.all_tasks(loop)
    loop.run_until_complete(settled())
    loop.close()
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # that it was left behind is the test
    gone = weakref.ref(results)
    del results
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kind", ["plain", "asynchronous"])
async def test_an_error_of_the_source_comes_last(kind: str) -> None:
    """What was pulled before is finished and given; nothing is pulled after."""
    source, hands = Counted(), Hands()

    def plain() -> Iterator[int]:
        yield from range(5)
        raise OSError("the folder is gone")

    class Stubborn:
        """Asked again after an error, it would go on."""

        def __init__(self) -> None:
            self.items = iter([0, 1, 2, 3, 4, None, 5, 6])

        def __aiter__(self) -> Stubborn:
            return self

        async def __anext__(self) -> int:
            await asyncio.sleep(0)
            item = next(self.items)
            if item is None:
                raise OSError("the folder is gone")
            return item

    results = Results(plain() if kind == "plain" else Stubborn(), hands.work, 3)
    taken = list[int]()
    with pytest.raises(OSError, match="the folder is gone"):
        await take_into(taken, results)
    assert sorted(taken) == list(range(5))
    assert [result async for result in results] == []
    assert not others()
    assert source.pulled == 0


async def test_an_error_of_the_work_comes_last() -> None:
    """As one of the source's does: the others are finished first."""

    async def work(item: int) -> int:
        await asyncio.sleep(0.001 * item)
        if item == 1:
            raise ZeroDivisionError("a bug")
        return item

    taken = list[int]()
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await take_into(taken, Results(range(100), work, 4))
    assert set(taken) <= set(range(10))
    assert {0, 2, 3} <= set(taken)
    assert not others()


async def test_work_that_cancels_itself_is_not_lost() -> None:
    """It is no end of the loop like any other: the consumer is told."""

    async def work(item: int) -> int:
        if item == 2:
            raise asyncio.CancelledError
        return item

    with pytest.raises(asyncio.CancelledError):
        await consume(Results(range(100), work, 1))


async def test_waiting_for_a_result_that_is_cancelled_ends_the_work() -> None:
    """As with an async generator: there are no more results afterwards."""
    hands = Hands()
    results = Results(range(3), hands.work, 1)
    assert await anext(results) == 0
    waiting = asyncio.create_task(anext(results))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert hands.at_once == 0
    assert [result async for result in results] == []


@pytest.mark.parametrize("place", ["next", "body"])
@pytest.mark.parametrize("way", ["cancel", "raise"])
async def test_work_ends_with_its_consumer_though_a_traceback_keeps_the_results(place: str, way: str) -> None:
    """The consumer's exception keeps its frames, and they keep the results: nothing goes on all the same."""
    hands, in_body = Hands(), asyncio.Event()

    async def look(results: Results[int]) -> None:
        async for _ in results:
            if place == "body":
                in_body.set()
                if way == "raise":
                    raise ZeroDivisionError
                await asyncio.Event().wait()

    results = Results(Counted().plain(), hands.work if place == "body" else hands.hang, 4)
    consumer = asyncio.create_task(look(results))
    del results
    if place == "body":
        await in_body.wait()
    else:
        await settled()
        assert hands.at_once
    if way == "cancel" or place == "next":
        consumer.cancel()
    await asyncio.wait([consumer])
    with pytest.raises((asyncio.CancelledError, ZeroDivisionError)) as kept:
        consumer.result()
    await settled()
    assert kept.value.__traceback__ is not None
    assert hands.at_once == 0
    assert not others()


async def test_one_result_may_be_enough() -> None:
    """Whoever asks for the first one gets it, and then the rest is cancelled."""
    hands = Hands()
    assert await anext(Results(range(10), hands.work, 1)) == 0
    await settled()
    assert not others()


async def test_consumers_may_share() -> None:
    """Each result goes to one of them, and all of them come to the end."""
    results = Results(range(20), Hands().work, 3)
    taken = await asyncio.gather(consume(results), consume(results), consume(results))
    assert sorted(itertools.chain(*taken)) == list(range(20))


async def test_nothing_to_do() -> None:
    """No items, no results; one that is closed before it began does nothing."""
    assert [result async for result in Results([], Hands().work, 3)] == []
    results = Results([1, 2], Hands().work, 3)
    await results.aclose()
    assert [result async for result in results] == []
    assert not others()


async def test_closed_while_another_waits() -> None:
    """Who waits for a result is told that there are no more."""
    results = Results(Counted().plain(), Hands().hang, 2)
    waiting = asyncio.create_task(consume(results))
    await settled()
    await results.aclose()
    await asyncio.wait_for(waiting, 10)
    assert not others()


@pytest.mark.parametrize("way", ["end", "leave", "fail"])
async def test_what_is_around_it(way: str) -> None:
    """It is entered before the first item is pulled, and left when nobody is at work any more."""
    hands, told = Hands(), list[str]()

    @asynccontextmanager
    async def around() -> AsyncIterator[None]:
        told.append("entered")
        try:
            yield
        finally:
            assert hands.at_once == 0
            told.append("left")

    def items() -> Iterator[int]:
        told.append("pulled")
        yield from range(10)
        if way == "fail":
            raise OSError("no more")

    results = Results(items(), hands.work, 2, around=around())
    assert told == []
    if way == "leave":
        async with results:
            await anext(results)
    elif way == "fail":
        with pytest.raises(OSError, match="no more"):
            await consume(results)
    else:
        await consume(results)
    assert told == ["entered", "pulled", "left"]


@pytest.mark.parametrize("when", ["entered", "left"])
async def test_an_error_of_what_is_around_it(when: str) -> None:
    """It is raised: before any result, or after all of them."""

    @asynccontextmanager
    async def around() -> AsyncIterator[None]:
        if when == "entered":
            raise OSError("no journal")
        yield
        raise OSError("no journal")

    taken = list[int]()
    with pytest.raises(OSError, match="no journal"):
        await take_into(taken, Results(range(5), Hands().work, 1, around=around()))
    assert taken == ([] if when == "entered" else list(range(5)))


@pytest.mark.parametrize("concurrency", [0, -1, True, 1.0, "8", None])
async def test_a_concurrency_that_is_none(concurrency: Any) -> None:
    """It is said which value it was."""
    with pytest.raises(InvalidRequest, match=r"concurrency: must be a whole number from 1, not "):
        Results([1], Hands().work, concurrency)


async def test_the_memory_does_not_grow_with_the_number() -> None:
    """Results that were taken, and items that are done, are gone."""
    alive = weakref.WeakSet[Any]()

    class Item:
        def __init__(self) -> None:
            alive.add(self)

    async def work(item: Item) -> Item:
        await asyncio.sleep(0)
        return item

    most = 0
    async for _ in Results((Item() for _ in range(2000)), work, 8):
        most = max(most, len(alive))
    assert most <= 2 * 8 + 3


# Progress over many files


def test_a_tally_counts_to_its_totals() -> None:
    """Bytes of a repeat are taken back; a file that failed counts as done, with all of its bytes."""
    told: list[Progress] = []
    tally = Tally(Teller(told.append), 3)
    tally.bytes_total = 60
    good, bad, unread = tally.share(), tally.share(), tally.share()
    good.listen(Progress(0, 1, 8, 10))
    bad.listen(Progress(0, 1, 15, 20))
    good.listen(Progress(0, 1, 0, 10))
    good.listen(Progress(0, 1, 10, 10))
    good.listen(Progress(1, 1, 10, 10))
    good.done(asked_in_vain)
    bad.done(asked_in_vain)
    unread.done(lambda: 30)
    assert [(one.files_done, one.bytes_done) for one in told] == [
        (0, 8),
        (0, 23),
        (0, 15),
        (0, 25),
        (1, 25),
        (2, 30),
        (3, 60),
    ]
    assert {(one.files_total, one.bytes_total) for one in told} == {(3, 60)}


def test_a_listener_that_fails_is_not_called_again(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, once."""
    told: list[Progress] = []

    def fail(progress: Progress) -> None:
        told.append(progress)
        raise LookupError("no such bar")

    teller = Teller(fail)
    teller.tell(Progress(0, 1, 0, 1))
    teller.tell(Progress(1, 1, 1, 1))
    assert len(told) == 1
    assert [record.getMessage() for record in caplog.records] == ["on_progress failed; the work goes on without it"]


def asked_in_vain() -> int:
    raise AssertionError("the size is known")


def test_a_file_of_unknown_size_counts_for_what_was_sent() -> None:
    """And for none of it when it failed before it was opened."""
    told: list[Progress] = []
    Tally(Teller(told.append), None).share().done(lambda: None)
    assert told == [Progress(1, None, 0, None)]


@pytest.mark.parametrize("listener", [5, "print"])
def test_a_listener_that_is_none(listener: Any) -> None:
    """It is said at once."""
    with pytest.raises(InvalidRequest, match="on_progress: must be callable, not "):
        Teller(listener)


def test_nobody_listens() -> None:
    """Then nothing is told."""
    teller = Teller(None)
    assert not teller.listening
    teller.tell(Progress(0, 0, 0, 0))
