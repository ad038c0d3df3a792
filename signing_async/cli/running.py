"""Runs a command's coroutine: on uvloop where that is installed, else on asyncio's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import click

from .exits import TERMINATED

T = TypeVar("T")

NO_HANDLERS = (NotImplementedError, ValueError, RuntimeError)
"""What a signal's handler may meet: Windows' loops know none, and only the main thread may have any."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like ``asyncio.run``: Ctrl-C, and SIGTERM too, let what is open be closed before the command ends."""
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
