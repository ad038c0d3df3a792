"""Work that finishes despite cancellations, or is abandoned. Standard library only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from .errors import AuthError

__all__ = ["finish", "leave", "run_within"]

T = TypeVar("T")


async def finish(work: Coroutine[Any, Any, T], within: float | None = None) -> T:
    """Return the result of the work, however often the caller is cancelled.

    A cancellation is raised when the work has ended; or, if ``within`` is given, so many seconds after the first
    cancellation, and then the work is cancelled.
    """
    task = _start(work)
    deadline: float | None = None
    cancellation: asyncio.CancelledError | None = None
    now = asyncio.get_running_loop().time
    while not task.done() and (deadline is None or now() < deadline):
        try:
            await asyncio.wait([task], timeout=None if deadline is None else deadline - now())
        except asyncio.CancelledError as error:
            if cancellation is None and within is not None:
                deadline = now() + within
            cancellation = error
    if cancellation is None:
        return task.result()
    task.cancel()
    raise cancellation


async def run_within(work: Awaitable[T], timeout: float) -> asyncio.Future[T]:
    """Return the work's task when the work is done, or after ``timeout`` seconds; then the task is cancelled.

    A library that swallows a cancellation does not delay the caller. redis-py can, as does `asyncio.wait_for` before
    Python 3.12.
    """
    task = _start(work)
    try:
        await asyncio.wait([task], timeout=timeout)
    finally:
        task.cancel()
    return task


async def leave(closing: Coroutine[Any, Any, None], error: BaseException | None) -> None:
    """Await ``closing`` at the end of ``async with``. If the block raised, a lost token becomes a note on its error."""
    try:
        await closing
    except AuthError as lost:
        if error is None:
            raise
        error.add_note(str(lost))


def _start(work: Awaitable[T]) -> asyncio.Future[T]:
    task = asyncio.ensure_future(work)
    # Otherwise asyncio logs the exception of a task that the caller has abandoned.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return task
