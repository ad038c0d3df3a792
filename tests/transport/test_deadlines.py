"""Deadlines end what asyncio's own timeouts would end, and nothing else, with one timer for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from signing_async.transport.deadlines import Deadline


class Clockwork(asyncio.SelectorEventLoop):
    """A loop that never waits: its clock jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tick = 0.0
        self.timers = 0
        super().__init__()
        selector: Any = self._selector  # type: ignore[attr-defined]  # asyncio has no public clock
        select = selector.select

        def forward(timeout: float | None) -> Any:
            # Some time passes in any case, so that a busy loop ends.
            self.now += max(timeout or 0.0, 1e-7)
            return select(0)

        selector.select = forward

    def time(self) -> float:
        return self.now // self.tick * self.tick if self.tick else self.now

    def call_at(  # type: ignore[override]  # passed on
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        self.timers += 1
        return super().call_at(when, callback, *args, context=context)


@pytest.fixture
def clockwork() -> Iterator[Clockwork]:
    """A loop whose clock jumps."""
    loop = Clockwork()
    yield loop
    loop.close()


def test_expired_deadline_is_a_timeout_error_without_a_pending_cancellation(clockwork: Clockwork) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError) as caught, Deadline(1.0) as deadline:
            await asyncio.sleep(60)
        assert deadline.expired
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()

    clockwork.run_until_complete(main())


@pytest.mark.parametrize("when", [0.5, 1.0, 2.0])
def test_cancellation_of_the_task_is_not_swallowed(clockwork: Clockwork, when: float) -> None:
    """Neither before the deadline, nor with it, nor during the cleanup after it."""

    async def bounded() -> None:
        with Deadline(1.0):
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

    clockwork.run_until_complete(main())


# The same as asyncio's own

# Deadlines are odd, sleeps end at multiples of four, cancellations come between: no two coincide.
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
                    # asyncio expires a deadline in the past before a sleep of no time ends, not after.
                    async with until(max(rest[0], asyncio.get_running_loop().time() + 0.5)) as expired:
                        await _follow(rest[1], until, note)
                finally:
                    note("left", expired())


def _run(programs: Any, until_of: Callable[[], Until]) -> list[Any]:
    loop, history = Clockwork(), list[Any]()

    async def one(number: int, steps: Any, until: Until) -> None:
        task = asyncio.current_task()
        assert task is not None

        def note(*what: object) -> None:
            history.append((number, round(loop.now), *what))

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
    # The order of two tasks in one round of the loop does not matter.
    return [[each for each in history if each[0] == number] for number in range(len(programs))]


def _asyncios() -> Until:
    @contextlib.asynccontextmanager
    async def until(when: float) -> Any:
        async with asyncio.timeout_at(when) as bound:
            yield bound.expired

    return until


def _ours() -> Until:
    @contextlib.asynccontextmanager
    async def ours(when: float) -> Any:
        with Deadline(when) as deadline:
            yield lambda: deadline.expired

    return ours


@settings(max_examples=300)
@given(_programs)
def test_every_program_runs_as_with_asyncio_timeout_at(programs: Any) -> None:
    """Nested blocks, errors, and cancellations at any time."""
    assert _run(programs, _ours) == _run(programs, _asyncios)


# One timer


def test_each_deadline_expires_at_its_own_time(clockwork: Clockwork) -> None:
    ended: list[tuple[float, float]] = []

    async def bounded(when: float, seconds: float) -> None:
        try:
            with Deadline(when):
                await asyncio.sleep(seconds)
        except TimeoutError:
            ended.append((when, clockwork.now))

    async def main() -> None:
        late = [bounded(when, 1000) for when in (50.0, 10.0, 30.0, 70.0, 20.0, 20.0)]
        early = [bounded(when, 1.0) for when in (5.0, 15.0, 60.0)]
        await asyncio.gather(*late, *early)

    clockwork.run_until_complete(main())
    assert [when for when, _ in ended] == [10.0, 20.0, 20.0, 30.0, 50.0, 70.0]
    assert [at for _, at in ended] == pytest.approx([10.0, 20.0, 20.0, 30.0, 50.0, 70.0], abs=0.001)


def test_ten_thousand_successful_requests_set_one_timer(clockwork: Clockwork) -> None:
    async def main() -> None:
        for _ in range(10_000):
            with Deadline(clockwork.now + 60):
                await asyncio.sleep(0)
        assert clockwork.timers == 1
        await asyncio.sleep(120)  # without pending deadlines the timer is not set again

    clockwork.run_until_complete(main())
    assert clockwork.timers == 2


def test_thousands_of_deadlines_within_a_second_are_checked_a_hundred_times(clockwork: Clockwork) -> None:
    """As in an outage."""

    async def bounded(when: float) -> None:
        with pytest.raises(TimeoutError), Deadline(when):
            await asyncio.Event().wait()
        assert when <= clockwork.now < when + 0.011

    async def main() -> None:
        await asyncio.gather(*(bounded(10 + number / 5_000) for number in range(5_000)))

    clockwork.run_until_complete(main())
    assert clockwork.timers < 120


def test_deadline_expires_once_if_the_clock_is_coarse(clockwork: Clockwork) -> None:
    """Then the loop calls a timer before the clock shows its time."""
    clockwork.tick = clockwork._clock_resolution = 0.016  # type: ignore[attr-defined]  # as on Windows

    async def main() -> None:
        clockwork.now = 1.0
        with pytest.raises(TimeoutError), Deadline(1.01):
            await asyncio.Event().wait()
        assert clockwork.time() < 1.01

    clockwork.run_until_complete(main())
    assert clockwork.timers == 1


# Several loops


def test_closed_loop_is_released_with_what_it_left_behind() -> None:
    left: list[weakref.ref[Any]] = []

    async def leave_behind() -> None:
        async def forever() -> None:
            with Deadline(asyncio.get_running_loop().time() + 60):
                await asyncio.sleep(60)

        task = asyncio.create_task(forever())
        left.append(weakref.ref(task))
        await asyncio.sleep(0)

    async def main() -> None:
        with pytest.raises(TimeoutError), Deadline(asyncio.get_running_loop().time() + 0.01):
            await asyncio.sleep(60)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave_behind())
    loop.set_exception_handler(lambda loop, context: None)  # it reports the pending task
    loop.close()
    left.append(weakref.ref(loop))
    del loop
    asyncio.run(main())
    gc.collect()
    assert [reference() for reference in left] == [None, None]


def test_loops_in_two_threads_expire_their_own_deadlines() -> None:
    entered = threading.Barrier(2, timeout=30)
    ended: list[bool] = []

    async def main() -> None:
        entered.wait()
        with pytest.raises(TimeoutError), Deadline(asyncio.get_running_loop().time() + 0.05) as deadline:
            await asyncio.sleep(60)
        ended.append(deadline.expired)

    threads = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [True, True]


def test_task_is_not_kept_after_its_block() -> None:
    """Although the timer is set for much later."""

    async def main() -> None:
        async def bounded() -> None:
            with Deadline(asyncio.get_running_loop().time() + 60):
                await asyncio.sleep(0)

        task = asyncio.create_task(bounded())
        gone = weakref.ref(task)
        await task
        del task
        await asyncio.sleep(0)
        gc.collect()
        assert gone() is None

    asyncio.run(main())
