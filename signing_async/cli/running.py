"""Runs a command's coroutine, on uvloop if it is installed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import click

from .exits import TERMINATED

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine like ``asyncio.run``. Ctrl-C and SIGTERM cancel it, so that it closes what is open."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ModuleNotFoundError):  # the extra `speed` is not installed
        from uvloop import new_event_loop

        factory = new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_until_terminated(main))


async def _until_terminated(main: Coroutine[Any, Any, T]) -> T:
    work = asyncio.current_task()
    assert work is not None
    cancel, terminated = work.cancel, False

    def stop() -> None:
        nonlocal terminated
        terminated = True
        cancel()

    with on_signal(signal.SIGTERM, stop):
        try:
            return await main
        except asyncio.CancelledError:
            if terminated:
                raise click.exceptions.Exit(TERMINATED) from None
            raise


@contextlib.contextmanager
def on_signal(number: int, call: Callable[[], object]) -> Iterator[None]:
    """Call a function on each signal within the block, if the event loop supports that."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(number, call)
    except (NotImplementedError, RuntimeError, ValueError):  # on Windows, or outside the main thread
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(number)
