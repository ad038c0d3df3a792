"""Deadlines: they end what asyncio's own timeouts would end, and nothing else, with one timer for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from signing_async.transport.deadlines import until

Loop = asyncio.AbstractEventLoop
Run = Callable[[Awaitable[Any]], Any]


class Clockwork(asyncio.SelectorEventLoop):
    """A loop that waits for no time: its clock is put forward instead, as far as the next timer wants."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tick = 0.0
        self.timers = 0
        super().__init__()
        selector: Any = self._selector  # type: ignore[attr-defined]  # asyncio has no public way to wait for nothing
        select = selector.select

        def forward(timeout: float | None) -> Any:
            # A moment passes in any case, so that a loop that runs in circles comes to an end.
            self.now += max(timeout or 0.0, 1e-7)
            return select(0)

        selector.select = forward

    def time(self) -> float:
        return self.now // self.tick * self.tick if self.tick else self.now

    def call_at(  # type: ignore[override]  # what is handed on unseen needs no closer types
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        self.timers += 1
        return super().call_at(when, callback, *args, context=context)


@pytest.fixture
def clockwork() -> Iterator[Clockwork]:
    """A loop whose clock runs by itself."""
    loop = Clockwork()
    yield loop
    loop.close()


@pytest.fixture(params=[asyncio.SelectorEventLoop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Runs a coroutine in a loop of each kind."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run  # type: ignore[misc]  # it takes coroutines, which is all that is given to it


def _soon(seconds: float = 0.01) -> float:
    return asyncio.get_running_loop().time() + seconds


# What ends, and how


def test_what_takes_too_long_ends(run: Run) -> None:
    """At its deadline a block is cancelled where it waits, and a TimeoutError comes out of it."""

    async def main() -> None:
        cancelled = []

        async def slow() -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        with pytest.raises(TimeoutError) as caught, until(_soon()) as bound:
            await slow()
        assert cancelled
        assert bound.expired
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()

    run(main())


def test_what_ends_in_time_is_left_alone(clockwork: Clockwork) -> None:
    """After a block that has ended in time nothing is cancelled, however long the task goes on."""

    async def main() -> None:
        with until(_soon(1.0)) as bound:
            await asyncio.sleep(0.9)
        await asyncio.sleep(10)
        assert not bound.expired

    clockwork.run_until_complete(main())


def test_a_deadline_that_has_passed_already(run: Run) -> None:
    """A block that is entered too late ends as soon as it has to wait."""

    async def main() -> None:
        for late in (-1.0, 0.0):
            with pytest.raises(TimeoutError), until(_soon(late)):
                await asyncio.sleep(60)

    run(main())


def test_a_loop_that_was_blocked(run: Run) -> None:
    """What is late because the loop stood still ends at the first wait after that; what waits for nothing does not."""

    async def main() -> None:
        with until(_soon()) as bound:
            time.sleep(0.03)
        assert not bound.expired

        async def block() -> None:
            time.sleep(0.03)
            await asyncio.sleep(60)

        with pytest.raises(TimeoutError), until(_soon()):
            await block()

    run(main())


def test_what_is_ready_in_the_same_moment_is_late(clockwork: Clockwork) -> None:
    """Whatever comes first of result and deadline in one round of the loop, no cancellation is left over after it."""

    async def main(first: bool) -> bool:
        result = clockwork.create_future()
        if first:
            clockwork.call_at(clockwork.now + 1.0, result.set_result, None)
        try:
            with until(clockwork.now + 1.0):
                if not first:
                    clockwork.call_at(clockwork.now + 1.0, result.set_result, None)
                await result
        except TimeoutError:
            ended = True
        else:
            ended = False
        await asyncio.sleep(10)  # a cancellation that comes late would end this
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        return ended

    assert clockwork.run_until_complete(main(first=True))
    assert clockwork.run_until_complete(main(first=False))


def test_who_leaves_in_the_round_of_the_deadline_is_left_alone(clockwork: Clockwork) -> None:
    """A task that leaves its block in the very round in which the timer rings, just before, is not cancelled."""

    async def main() -> None:
        gone = asyncio.Event()

        async def other() -> None:
            with until(5.0):
                await asyncio.sleep(4.0)
                # The timer is ready to ring while this still runs.
                clockwork.now = 6.0
                await asyncio.sleep(0)
            gone.set()
            await asyncio.sleep(10)

        await asyncio.create_task(other())
        assert gone.is_set()

    clockwork.run_until_complete(main())


def test_what_swallows_its_cancellation_goes_on(run: Run) -> None:
    """A block that takes no notice ends as it likes, and what comes after it is not cancelled."""

    async def main() -> None:
        with until(_soon()) as bound:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(0.03)  # and nobody cancels it a second time
        assert bound.expired
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()

    run(main())


def test_an_error_of_the_blocks_own_stays_it(run: Run) -> None:
    """What a block raises when it is cancelled, or before, is what comes out of it."""

    async def main() -> None:
        with pytest.raises(KeyError), until(_soon()) as early:
            raise KeyError
        assert not early.expired

        async def fail() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                raise KeyError

        with pytest.raises(KeyError), until(_soon()) as late:
            await fail()
        assert late.expired
        await asyncio.sleep(0.03)
        with pytest.raises(TimeoutError, match="its own"), until(_soon(60)) as own:
            raise TimeoutError("its own")
        assert not own.expired

    run(main())


def test_a_kind_of_cancellation_is_one(run: Run) -> None:
    """Some libraries raise a cancellation of a class of their own."""

    class Gone(asyncio.CancelledError):
        pass

    async def main() -> None:
        async def go() -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise Gone from None

        with pytest.raises(TimeoutError), until(_soon()):
            await go()

    run(main())


@pytest.mark.parametrize("when", [0.5, 1.0, 2.0])
def test_who_is_cancelled_is_cancelled(clockwork: Clockwork, when: float) -> None:
    """A cancellation by somebody else comes out as that: before the deadline, with it, and after it."""

    async def bounded() -> None:
        with until(1.0):
            try:
                await asyncio.sleep(60)
            finally:
                if when > 1.0:
                    await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(bounded())
        clockwork.call_at(when, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert clockwork.now == pytest.approx(when, abs=0.001)

    clockwork.run_until_complete(main())


def test_a_cancellation_from_before_does_not_count(run: Run) -> None:
    """Who was cancelled before and cleans up now can still be late with that."""

    async def main() -> None:

        async def cleaning_up() -> str:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                try:
                    with until(_soon()):
                        await asyncio.sleep(60)
                except TimeoutError:
                    return "late"
            return "never"

        task = asyncio.create_task(cleaning_up())
        await asyncio.sleep(0)
        task.cancel()
        assert await task == "late"
        assert task.cancelling() == 1

    run(main())


def test_a_deadline_that_is_lifted(run: Run) -> None:
    """From then on the block may take as long as it wants."""

    async def main() -> None:
        with until(_soon()) as bound:
            bound.lift()
            await asyncio.sleep(0.05)
        assert not bound.expired

    run(main())


def test_a_deadline_that_passed_cannot_be_lifted(run: Run) -> None:
    """What has swallowed its cancellation is late all the same."""

    async def main() -> None:
        async def swallow() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            bound.lift()

        bound = until(_soon())
        with pytest.raises(TimeoutError), bound:
            await swallow()

    run(main())


def test_blocks_within_blocks(run: Run) -> None:
    """The inner block's end is not the outer's; where both are late together, it is the outer one that ends."""

    async def main() -> None:
        with until(_soon(60)) as outer, pytest.raises(TimeoutError), until(_soon()) as inner:
            await asyncio.sleep(60)
        assert (outer.expired, inner.expired) == (False, True)
        ended = []

        async def inner_block() -> None:
            try:
                with until(_soon()):
                    time.sleep(0.03)
                    await asyncio.sleep(60)
            except BaseException as error:
                ended.append(type(error))
                raise

        with pytest.raises(TimeoutError), until(_soon()):
            await inner_block()
        assert ended == [asyncio.CancelledError]

    run(main())


# The same as asyncio's own, in any case

# Deadlines are odd, ends of sleeps multiples of four, and cancellations come between: no two at one time.
_sleeps = st.tuples(st.just("sleep"), st.integers(1, 4).map(lambda n: 4 * n))
_leaves = st.one_of(_sleeps, st.just(("raise",)), st.just(("cancel itself",)))


def _blocks(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, max_size=3)
    return st.one_of(
        st.tuples(st.just("bound"), st.integers(-2, 20).map(lambda n: 2 * n + 1), several),
        st.tuples(st.just("swallow"), several),
        st.tuples(st.just("clean up"), several, several),
        st.tuples(st.just("child"), several),
    )


_steps = st.lists(st.recursive(_leaves, _blocks, max_leaves=8), max_size=4)
_programs = st.lists(
    st.tuples(_steps, st.lists(st.integers(0, 8).map(lambda n: 4 * n + 2), max_size=2)), min_size=1, max_size=3
)
Until = Callable[[float], contextlib.AbstractAsyncContextManager[Callable[[], bool]]]


async def _follow(steps: Any, until: Until, note: Callable[..., None]) -> None:
    for kind, *rest in steps:
        note(kind)
        match kind:
            case "sleep":
                await asyncio.sleep(max(rest[0] - asyncio.get_running_loop().time(), 0.07))
            case "raise":
                raise KeyError
            case "cancel itself":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            case "swallow":
                try:
                    await _follow(rest[0], until, note)
                except BaseException as error:
                    note("swallowed", type(error).__name__)
            case "clean up":
                try:
                    await _follow(rest[0], until, note)
                finally:
                    await _follow(rest[1], until, note)
            case "child":
                await asyncio.create_task(_follow(rest[0], until, note))
            case "bound":
                try:
                    # One that has passed already asyncio tells of a moment before a wait for nothing ends, not after.
                    async with until(max(rest[0], asyncio.get_running_loop().time() + 0.5)) as expired:
                        await _follow(rest[1], until, note)
                finally:
                    note("left", expired())


def _history(programs: Any, until_of: Callable[[], Until]) -> list[Any]:
    loop, told = Clockwork(), list[Any]()

    async def one(number: int, steps: Any, until: Until) -> None:
        task = asyncio.current_task()
        assert task is not None

        def note(*what: object) -> None:
            told.append((number, round(loop.now), *what))

        try:
            await _follow(steps, until, note)
        except BaseException as error:
            note("ended", type(error).__name__)
        note("cancelling", task.cancelling())

    async def main() -> None:
        until, tasks = until_of(), []
        for number, (steps, cancellations) in enumerate(programs):
            tasks.append(asyncio.create_task(one(number, steps, until)))
            for when in cancellations:
                loop.call_at(when, tasks[-1].cancel)
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    # Which of two tasks is first in one round is nobody's business.
    return [[each for each in told if each[0] == number] for number in range(len(programs))]


def _asyncios() -> Until:
    @contextlib.asynccontextmanager
    async def until(when: float) -> Any:
        async with asyncio.timeout_at(when) as bound:
            yield bound.expired

    return until


def _ours() -> Until:
    @contextlib.asynccontextmanager
    async def ours(when: float) -> Any:
        with until(when) as bound:
            yield lambda: bound.expired

    return ours


@settings(max_examples=300, deadline=None)
@given(_programs)
def test_all_that_happens_is_what_asyncio_does(programs: Any) -> None:
    """Tasks with blocks in blocks, errors, and cancellations at any time go the same way as with asyncio's timeouts."""
    assert _history(programs, _ours) == _history(programs, _asyncios)


# One timer


def test_many_with_deadlines_of_all_kinds(clockwork: Clockwork) -> None:
    """Each ends at its own time, in whatever order they began; those that end early keep nothing up."""
    ended: list[tuple[float, float]] = []

    async def bounded(when: float, takes: float) -> None:
        try:
            with until(when):
                await asyncio.sleep(takes)
        except TimeoutError:
            ended.append((when, clockwork.now))

    async def main() -> None:
        late = [bounded(when, 1000) for when in (50.0, 10.0, 30.0, 70.0, 20.0, 20.0)]
        early = [bounded(when, 1.0) for when in (5.0, 15.0, 60.0)]
        await asyncio.gather(*late, *early)

    clockwork.run_until_complete(main())
    assert [when for when, _ in ended] == [10.0, 20.0, 20.0, 30.0, 50.0, 70.0]
    assert [at for _, at in ended] == pytest.approx([10.0, 20.0, 20.0, 30.0, 50.0, 70.0], abs=0.001)


def test_calls_that_go_well_set_one_timer(clockwork: Clockwork) -> None:
    """Ten thousand blocks, one after the other and each with the same time, need a timer for all of that time."""

    async def main() -> None:
        for _ in range(10_000):
            with until(clockwork.now + 60):
                await asyncio.sleep(0)
        assert clockwork.timers == 1
        await asyncio.sleep(120)  # and with nothing left to watch the timer is not set again

    clockwork.run_until_complete(main())
    assert clockwork.timers == 2


def test_many_that_end_one_after_the_other_are_looked_at_seldom(clockwork: Clockwork) -> None:
    """In an outage thousands of deadlines pass within a second: not each of them is worth a look at all."""

    async def bounded(when: float) -> None:
        with pytest.raises(TimeoutError), until(when):
            await asyncio.Event().wait()
        assert when <= clockwork.now < when + 0.01

    async def main() -> None:
        await asyncio.gather(*(bounded(10 + number / 10_000) for number in range(5_000)))

    clockwork.run_until_complete(main())
    assert clockwork.timers < 1_000


def test_a_clock_that_ticks_coarsely(clockwork: Clockwork) -> None:
    """Where a timer rings before the clock says so, what it was set for is late: nothing runs in circles until then."""
    clockwork.tick = clockwork._clock_resolution = 0.016  # type: ignore[attr-defined]  # as on Windows

    async def main() -> None:
        clockwork.now = 1.0
        with pytest.raises(TimeoutError), until(1.01):
            await asyncio.Event().wait()
        assert clockwork.time() < 1.01

    clockwork.run_until_complete(main())
    assert clockwork.timers == 1


def test_a_task_that_cannot_be_cancelled_keeps_no_other_from_it() -> None:
    """Where the cancelling of one fails, those that are late with it are cancelled all the same."""
    failed: list[object] = []

    class Stubborn(asyncio.Future[None]):
        def cancel(self, msg: object = None) -> bool:
            if not failed:
                raise RuntimeError("no")
            return super().cancel()

    async def bounded(when: float, what: Awaitable[object]) -> None:
        with until(when):
            await what

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: failed.append(context["exception"]))
        when = _soon()
        stubborn = [asyncio.create_task(bounded(when, Stubborn())) for _ in range(2)]
        others = [asyncio.create_task(bounded(when, asyncio.sleep(60))) for _ in range(20)]
        await asyncio.sleep(0)
        assert all(isinstance(each, TimeoutError) for each in await asyncio.gather(*others, return_exceptions=True))
        for task in stubborn:
            task.cancel()
        await asyncio.gather(*stubborn, return_exceptions=True)

    asyncio.run(main())
    assert [str(each) for each in failed] == ["no"]


# More than one loop


def test_a_loop_after_another(run: Run) -> None:
    """What a loop left behind when it was closed keeps no later one from its deadlines, nor is it kept itself."""
    left: list[weakref.ref[Any]] = []

    async def leave_behind() -> None:
        async def forever() -> None:
            with until(_soon(60)):
                await asyncio.sleep(60)

        task = asyncio.create_task(forever())
        left.append(weakref.ref(task))
        await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave_behind())
    loop.set_exception_handler(lambda loop, context: None)  # it tells of the task that nobody has waited for
    loop.close()
    del loop

    async def main() -> None:
        with pytest.raises(TimeoutError), until(_soon()):
            await asyncio.sleep(60)

    run(main())
    run(main())
    gc.collect()
    assert left[0]() is None


def test_two_loops_at_once() -> None:
    """In two threads, each loop ends what is late in it, whatever the other one does meanwhile."""
    entered, more = threading.Barrier(2, timeout=30), threading.Barrier(2, timeout=30)
    ended: list[bool] = []

    async def bounded(when: float) -> None:
        with until(when) as bound:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(bound.expired)

    async def main() -> None:
        first = asyncio.create_task(bounded(_soon(0.05)))
        await asyncio.sleep(0)
        entered.wait()
        second = asyncio.create_task(bounded(_soon(0.05)))
        await asyncio.sleep(0)
        more.wait()
        results = await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 30)
        assert [type(each) for each in results] == [TimeoutError, TimeoutError]

    errors: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert ended == [True] * 4


def test_a_loop_that_is_closed_is_let_go() -> None:
    """By the next one that has deadlines: no timer of a minute keeps it."""

    async def main() -> None:
        with until(_soon(60)):
            await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    gone = weakref.ref(loop)
    del loop
    asyncio.run(main())
    gc.collect()
    assert gone() is None


def test_clients_share_one_timer(clockwork: Clockwork) -> None:
    """Whatever bounds a block, in one loop: ten thousand clients do not keep as many timers waiting."""

    async def main() -> None:
        for number in range(100):
            with until(60.0 + number):
                await asyncio.sleep(0)
        timers = [each for each in clockwork._scheduled if not each.cancelled()]  # type: ignore[attr-defined]  # asyncio's own
        assert len(timers) == 1

    clockwork.run_until_complete(main())


def test_nothing_is_kept_of_what_is_over(run: Run) -> None:
    """A task whose block has ended is gone, long before the timer would have rung for it."""

    async def main() -> None:
        async def bounded() -> None:
            with until(_soon(60)):
                await asyncio.sleep(0)

        task = asyncio.create_task(bounded())
        gone = weakref.ref(task)
        await task
        del task
        await asyncio.sleep(0)
        gc.collect()
        assert gone() is None

    run(main())
