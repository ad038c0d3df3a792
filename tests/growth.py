"""Tells linear from quadratic work by CPU time, with a margin that noise cannot fill."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def grows_linearly(work: Callable[[int], object], size: int) -> bool:
    """Return whether 16 times the size takes less than 64 times as long; quadratic work takes 256 times."""
    # Shorter times are mostly noise.
    limit = 64 * max(_cost(work, size), 0.0005)
    return any(_cost(work, 16 * size) < limit for _ in range(3))


def _cost(work: Callable[[int], object], size: int) -> float:
    """Return the least CPU seconds of three runs."""
    costs = []
    gc.disable()
    try:
        for _ in range(3):
            began = time.thread_time()
            work(size)
            costs.append(time.thread_time() - began)
    finally:
        gc.enable()
    return min(costs)
