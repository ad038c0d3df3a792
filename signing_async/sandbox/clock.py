"""The sandbox's clock: real time plus an offset, for tests to advance instead of waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from .. import _checks

MICROSECOND = timedelta(microseconds=1)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_datetime(micros: int) -> datetime:
    """Convert microseconds since the epoch to a datetime in UTC."""
    return EPOCH + timedelta(microseconds=micros)


class Clock:
    """The clock for the sandbox's expiries, retries and recorded times."""

    def __init__(self, offset: int = 0, on_advance: Callable[[int], None] | None = None) -> None:
        self._offset = offset
        self._on_advance = on_advance
        self._advanced = asyncio.Event()

    @property
    def offset(self) -> timedelta:
        """How far the clock is ahead of real time."""
        return timedelta(microseconds=self._offset)

    def now(self) -> datetime:
        """Return the current time, in UTC."""
        return to_datetime(self.micros())

    def micros(self) -> int:
        """Return the current time in microseconds since the epoch."""
        return time.time_ns() // 1000 + self._offset

    def seconds(self) -> float:
        """Return a monotonic time for the rate limit; only a reset or a restored snapshot sets it back."""
        return time.monotonic() + self._offset / 1e6

    def advance(self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0) -> datetime:
        """Advance the clock and return the new time. Deliveries that are due by then are sent now."""
        amounts = {"days": days, "hours": hours, "minutes": minutes, "seconds": seconds}
        for name, amount in amounts.items():
            _checks.number(name, amount, error=ValueError)
        step = timedelta(**amounts) // MICROSECOND
        if step <= 0:
            raise ValueError(f"advance: must be more than 0 seconds, got {step / 1e6:g}; the clock only goes forward")
        self.set_offset(self._offset + step)
        return self.now()

    def set_offset(self, micros: int) -> None:
        """Set how far the clock is ahead of real time; waiters wake and check again."""
        # Raise OverflowError here, not in each request.
        to_datetime(time.time_ns() // 1000 + micros + 400 * 86_400_000_000)
        self._offset = micros
        if self._on_advance:
            self._on_advance(micros)
        self._advanced.set()
        self._advanced = asyncio.Event()

    async def wait(self, until: int | None, wake: asyncio.Event) -> None:
        """Wait until the time `until` (microseconds; None: forever), a change of the clock, or `wake`."""
        seconds = None if until is None else (until - self.micros()) / 1e6
        if seconds is not None and seconds <= 0:
            return
        waiters = [asyncio.ensure_future(event.wait()) for event in (self._advanced, wake)]
        try:
            await asyncio.wait(waiters, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
            await asyncio.wait(waiters)
