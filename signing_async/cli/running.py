"""Runs a command's coroutine, on uvloop if it is installed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import click

from .exits import TERMINATED

T = TypeVar("T")

NO_HANDLERS = (
    NotImplementedError,  # on Windows
    ValueError,  # outside the main thread, on uvloop
    RuntimeError,  # outside the main thread, on asyncio
)
"""What setting a signal handler raises where the event loop supports none."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine like ``asyncio.run``. Ctrl-C and SIGTERM cancel it, so that it closes what is open."""
    try:
        import uvloop
    except ModuleNotFoundError:  # the extra `speed` is not installed
        factory = None
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_until_terminated(main))


async def _until_terminated(main: Coroutine[Any, Any, T]) -> T:
    loop, work = asyncio.get_running_loop(), asyncio.current_task()
    assert work is not None
    cancel, terminated = work.cancel, False

    def stop() -> None:
        nonlocal terminated
        terminated = True
        cancel()

    with contextlib.suppress(*NO_HANDLERS):
        loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        return await main
    except asyncio.CancelledError:
        if terminated:
            raise click.exceptions.Exit(TERMINATED) from None
        raise
