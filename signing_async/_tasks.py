"""Work in tasks of its own: it finishes despite a cancellation, or is abandoned. Standard library only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

__all__ = ["finish", "run_within"]

T = TypeVar("T")


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work. If the caller is cancelled, wait until the work has ended, and then raise.

    A second cancellation raises at once; the work still continues in its task.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def run_within(work: Awaitable[T], timeout: float) -> asyncio.Future[T]:
    """Return the work's task when the work is done, or after ``timeout`` seconds; then the task is cancelled.

    A library that swallows a cancellation does not delay the caller. redis-py can, as does `asyncio.wait_for` before
    Python 3.12.
    """
    task = asyncio.ensure_future(work)
    # Otherwise asyncio logs the exception of a task that the caller has abandoned.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        await asyncio.wait([task], timeout=timeout)
    finally:
        task.cancel()
    return task
