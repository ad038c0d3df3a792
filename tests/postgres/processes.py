"""Processes that share a database with the tests."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing.connection import Connection
from typing import Any


class Worker:
    """A process, and the texts that it exchanges with the test."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid = pid
        self._pipe = pipe

    async def says(self, text: str) -> None:
        """Wait until the process sends this text."""
        async with asyncio.timeout(60):
            while text not in await asyncio.to_thread(self._pipe.recv):
                pass

    def proceed(self) -> None:
        """Let the process go on."""
        self._pipe.send("proceed")


@contextlib.contextmanager
def forked(work: Callable[[str, Connection], Coroutine[Any, Any, None]], dsn: str) -> Iterator[Worker]:
    """Run ``work`` in a process of its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=lambda: asyncio.run(work(dsn, there)))
    process.start()
    try:
        yield Worker(process.pid or 0, here)
    finally:
        process.kill()
        process.join()
