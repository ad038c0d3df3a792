"""Work that a cancellation does not interrupt."""

from __future__ import annotations

import asyncio

import pytest

from signing_async._tasks import finish


async def test_cancelled_caller_of_finish_waits_for_the_work() -> None:
    begun, go, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await go.wait()
        done.set()

    task = asyncio.create_task(finish(work()))
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()


async def test_finish_returns_what_the_work_returns_and_raises_what_it_raises() -> None:
    async def work() -> int:
        return 7

    async def fail() -> None:
        raise OSError("no")

    assert await finish(work()) == 7
    with pytest.raises(OSError, match="no"):
        await finish(fail())
