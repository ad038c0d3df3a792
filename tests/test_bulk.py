"""The worker pool of bulk operations."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from signing_async import InvalidRequest, Results


class Source:
    """An endless source that counts the items pulled and knows whether it was closed."""

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


class Workers:
    """Work that counts how often it runs concurrently."""

    def __init__(self) -> None:
        self.running = self.most = self.hanging = 0

    async def work(self, item: int) -> int:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.001 * (item % 3))
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # cleanup that awaits
            raise
        finally:
            self.running -= 1
        return item

    async def endless(self, item: int) -> int:
        return await self.work(item) if item < 3 else await self.hang(item)

    async def hang(self, item: int) -> int:
        self.running += 1
        self.hanging += 1
        try:
            return await asyncio.Future[int]()
        finally:
            self.running -= 1


def other_tasks() -> set[asyncio.Task[Any]]:
    """Return the tasks other than the test's own."""
    return asyncio.all_tasks() - {asyncio.current_task()}


async def settle() -> None:
    """Let cancelled tasks end, and generators that were dropped close."""
    for _ in range(50):
        await asyncio.sleep(0)


async def consume(results: Results[int]) -> list[int]:
    return [result async for result in results]


async def take_into(taken: list[int], results: Results[int]) -> None:
    async for result in results:
        taken.append(result)


@pytest.mark.parametrize("concurrency", [3, 100])
async def test_every_item_has_one_result_and_concurrency_is_bounded(concurrency: int) -> None:
    workers = Workers()
    results = await consume(Results(range(50), workers.work, concurrency))
    assert sorted(results) == list(range(50))
    assert workers.most == min(concurrency, 50)
    assert not other_tasks()
    for invalid in (0, True):
        with pytest.raises(InvalidRequest, match=r"concurrency: must be an integer of at least 1, got "):
            Results([1], workers.work, invalid)
    unused: Results[int] = Results([1, 2], workers.work, concurrency)
    await unused.aclose()
    assert await consume(unused) == []


async def test_with_flat_an_item_has_any_number_of_results() -> None:
    async def repeat(item: int) -> list[int]:
        return [item] * (item % 3)

    results: Results[int] = Results(range(100), repeat, 4, flat=True)
    assert sorted(await consume(results)) == [i for i in range(100) for _ in range(i % 3)]


@pytest.mark.parametrize("kind", ["plain", "asynchronous"])
async def test_items_are_pulled_only_after_the_first_request_and_within_twice_the_concurrency(kind: str) -> None:
    source, workers = Source(), Workers()
    results = Results(getattr(source, kind)(), workers.work, 4)
    await settle()
    assert source.pulled == 0
    for taken in range(1, 20):
        await anext(results)
        await asyncio.sleep(0.005)
        assert source.pulled <= taken + 2 * 4
    assert workers.most <= 4
    await results.aclose()
    await settle()
    assert source.closed


async def test_results_arrive_in_completion_order() -> None:
    finish = asyncio.Event()

    async def work(item: int) -> int:
        if item == 0:
            await finish.wait()
        return item

    results = Results(range(6), work, 2)
    assert [await anext(results) for _ in range(5)] == [1, 2, 3, 4, 5]
    finish.set()
    assert await consume(results) == [0]


async def take_by_break(results: Results[int]) -> None:
    async for _ in results:
        break


async def take_in_a_block(results: Results[int]) -> None:
    async with results:
        await anext(results)


async def take_and_close(results: Results[int]) -> None:
    await anext(results)
    await results.aclose()
    assert await consume(results) == []
    await results.aclose()


async def take_and_drop(results: Results[int]) -> None:
    await anext(results)


@pytest.mark.parametrize("kind", ["plain", "asynchronous"])
@pytest.mark.parametrize("leave", [take_by_break, take_in_a_block, take_and_close, take_and_drop])
async def test_leaving_early_cancels_the_work_and_closes_the_source(
    kind: str, leave: Callable[[Results[int]], Awaitable[None]]
) -> None:
    source, workers = Source(), Workers()
    await leave(Results(getattr(source, kind)(), workers.work, 4))
    await settle()
    assert not other_tasks()
    assert workers.running == 0
    assert source.closed


async def test_results_collected_in_another_thread_are_cancelled_in_their_loop() -> None:
    """The garbage collector may run in any thread."""
    # Debug mode refuses calls from other threads that are not thread-safe.
    asyncio.get_running_loop().set_debug(True)
    workers = Workers()
    held = [Results(Source().plain(), workers.hang, 2)]
    waiting = asyncio.create_task(anext(held[0]))
    await settle()
    waiting.cancel()
    await asyncio.wait([waiting])
    del waiting
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    await settle()
    assert not other_tasks()
    assert workers.running == 0


async def test_error_of_the_source_is_raised_after_the_results_pulled_before_it() -> None:
    """Nothing is pulled after it."""

    async def items() -> AsyncIterator[int]:
        for item in range(5):
            yield item
        raise OSError("the folder is gone")

    taken = list[int]()
    results = Results(items(), Workers().work, 3)
    with pytest.raises(OSError, match="the folder is gone"):
        await take_into(taken, results)
    assert sorted(taken) == list(range(5))
    assert await consume(results) == []
    assert not other_tasks()


async def test_source_that_ignores_its_cancellation_is_not_pulled_again() -> None:
    pulled = asyncio.Event()

    async def stubborn() -> AsyncIterator[int]:
        while True:
            with suppress(asyncio.CancelledError):
                pulled.set()
                await asyncio.Event().wait()
            yield 1

    results = Results(stubborn(), Workers().work, 2)
    waiting = asyncio.create_task(anext(results))
    await pulled.wait()
    async with asyncio.timeout(10):
        await results.aclose()
    assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], StopAsyncIteration)
    assert not other_tasks()


async def test_error_of_the_work_is_raised_after_the_work_in_progress_is_finished() -> None:

    async def work(item: int) -> int:
        await asyncio.sleep(0.001 * item)
        if item == 1:
            raise ZeroDivisionError("a bug")
        return item

    taken = list[int]()
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await take_into(taken, Results(range(100), work, 4))
    assert {0, 2, 3} <= set(taken) <= set(range(10))
    assert not other_tasks()


async def test_next_result_after_a_cancelled_wait_is_an_error() -> None:
    """The loop does not end as if all items were done."""
    workers = Workers()
    results = Results(range(20), workers.endless, 2)
    taken = [await anext(results) for _ in range(3)]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(results), 0.01)
    assert sorted(taken) == [0, 1, 2]
    assert workers.running == 0
    assert not other_tasks()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the result stream was cancelled"):
            await anext(results)
    await results.aclose()
    assert await consume(results) == []


async def test_tasks_that_end_after_one_result_do_not_cancel_the_work() -> None:
    """A result may be awaited in a task of its own, with a timeout that does not cancel it."""
    results = Results(range(5), Workers().work, 2)
    taken: list[int] = []
    while True:
        task = asyncio.ensure_future(anext(results, None))
        while not (await asyncio.wait({task}, timeout=0.0001))[0]:
            pass
        if (result := task.result()) is None:
            break
        taken.append(result)
    assert sorted(taken) == list(range(5))


@pytest.mark.parametrize("kind", ["plain", "asynchronous"])
@pytest.mark.parametrize("way", ["cancel", "raise"])
async def test_work_is_cancelled_with_its_consumer_even_if_a_traceback_keeps_the_results(way: str, kind: str) -> None:
    """The consumer's exception keeps its frames alive, and with them the stream."""
    source, workers, in_body = Source(), Workers(), asyncio.Event()

    async def look(results: Results[int]) -> None:
        async for _ in results:
            in_body.set()
            if way == "raise":
                raise ZeroDivisionError
            await asyncio.Event().wait()

    consumer = asyncio.create_task(look(Results(getattr(source, kind)(), workers.work, 4)))
    await in_body.wait()
    if way == "cancel":
        consumer.cancel()
    await asyncio.wait([consumer])
    with pytest.raises((asyncio.CancelledError, ZeroDivisionError)) as kept:
        consumer.result()
    await settle()
    assert kept.value.__traceback__ is not None
    assert workers.running == 0
    assert source.closed
    assert not other_tasks()


@pytest.mark.parametrize("way", ["end", "leave", "fail"])
async def test_around_is_entered_before_the_first_pull_and_left_after_the_last_work(way: str) -> None:
    """Closing again does not interrupt the leaving."""
    workers, events, leaving = Workers(), list[str](), asyncio.Event()

    @asynccontextmanager
    async def around() -> AsyncIterator[None]:
        events.append("entered")
        try:
            yield
        except (OSError, asyncio.CancelledError) as error:
            events.append(type(error).__name__)
            raise
        finally:
            assert workers.running == 0
            leaving.set()
            await settle()
            events.append("left")

    def items() -> Iterator[int]:
        events.append("pulled")
        yield from range(10)
        if way == "fail":
            raise OSError("no more")

    results = Results(items(), workers.work, 2, around=around())
    assert events == []
    if way == "leave":
        await anext(results)
        first = asyncio.create_task(results.aclose())
        await leaving.wait()
        await asyncio.gather(first, results.aclose())
    elif way == "fail":
        with pytest.raises(OSError, match="no more"):
            await consume(results)
    else:
        await consume(results)
    raised = {"end": [], "leave": ["CancelledError"], "fail": ["OSError"]}
    assert events == ["entered", "pulled", *raised[way], "left"]


def test_results_that_outlive_their_loop_are_collected_without_error() -> None:

    async def main() -> Results[int]:
        workers = Workers()
        results: Results[int] = Results(Source().plain(), workers.endless, 2)
        await anext(results)
        while workers.hanging < 2:
            await asyncio.sleep(0.001)
        return results

    loop = asyncio.new_event_loop()
    results = loop.run_until_complete(main())
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is left behind on purpose
    loop.close()
    gone = weakref.ref(results)
    del results, task
    gc.collect()
    assert gone() is None
