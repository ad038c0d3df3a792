"""Runs a command's coroutine: on uvloop where that is installed, else on asyncio's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like ``asyncio.run``."""
    try:
        import uvloop
    except ModuleNotFoundError:  # the extra `speed` is not installed
        factory = None
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
