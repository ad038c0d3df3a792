"""Work that finishes despite a cancellation. Standard library only."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["finish"]

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
