"""An event loop whose clock is virtual: it jumps to the next timer, and nothing ever waits."""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")


class Handle:
    """A callback that is due, or cancelled."""

    __slots__ = ("_args", "_callback", "_context", "is_cancelled")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None) -> None:
        self._callback = callback
        self._args = args
        self._context = copy_context() if context is None else context
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def run(self) -> None:
        self._context.run(self._callback, *self._args)


class VirtualLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as tasks, futures, sleeps, timeouts and locks need: no sockets, threads or signals."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._order = count()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine from the time 0 on, and return its result; raise `RuntimeError` if it waits for nothing."""
        self._now = 0.0
        self._ready.clear()
        self._timers.clear()
        events._set_running_loop(self)
        try:
            task = asyncio.Task(main, loop=self)
            while not task.done():
                self._run_once()
            return task.result()
        finally:
            events._set_running_loop(None)

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        while timers and timers[0][2].is_cancelled:
            heapq.heappop(timers)
        if not ready:
            if not timers:
                raise RuntimeError("the call waits for something that never happens")
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.is_cancelled:
                handle.run()

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        handle = Handle(callback, args, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        handle = Handle(callback, args, context)
        heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, **options)

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise RuntimeError(context["message"])
