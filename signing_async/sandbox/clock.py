"""The sandbox's clock: real time plus an offset, for tests to advance instead of waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from .. import _checks

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
YEAR = 366 * 86_400_000_000


def to_datetime(micros: int) -> datetime:
    """Convert microseconds since the epoch to a datetime in UTC."""
    return EPOCH + timedelta(microseconds=micros)


class Clock:
    """The clock for the sandbox's expiries, retries and recorded times. `on_change` gets each new offset."""

    def __init__(self, offset: int, on_change: Callable[[int], None]) -> None:
        self._offset = offset
        self._on_change = on_change

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
        step = timedelta(**amounts) // timedelta(microseconds=1)
        if step <= 0:
            raise ValueError(f"advance: must be more than 0 seconds, got {step / 1e6:g}; the clock only goes forward")
        self.set_offset(self._offset + step)
        return self.now()

    def set_offset(self, micros: int) -> None:
        """Set how far the clock is ahead of real time, in microseconds."""
        to_datetime(time.time_ns() // 1000 + micros + YEAR)  # raises OverflowError here, not in each request
        self._offset = micros
        self._on_change(micros)
