"""The caller's own rate limiter, which fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from signing_async import LocalRateLimiter


class FailingLimiter(LocalRateLimiter):
    """Raises ``error`` from the moment on that ``is_due``.

    ``when`` says in which method: "acquire", "release", or "repeat": the `acquire` of requests that are no readings.
    """

    def __init__(self, is_due: Callable[[], object], when: str, error: Exception) -> None:
        super().__init__()
        self._is_due = is_due
        self._when = when
        self._error = error
        self.until: Callable[[], bool] = lambda: True
        """When `acquire` fails: until then, it waits."""

    async def acquire(self, deadline: float) -> bool:
        # The deadlines of readings are nearer.
        is_repeat = deadline > asyncio.get_running_loop().time() + 15
        if self._is_due() and (self._when == "acquire" or (self._when == "repeat" and is_repeat)):
            while not self.until():
                await asyncio.sleep(0.02)
            raise self._error
        return await super().acquire(deadline)

    def release(self, acquired_at: float, accepted: bool | None) -> None:
        super().release(acquired_at, accepted)
        if self._when == "release" and self._is_due():
            raise self._error
