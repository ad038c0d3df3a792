"""The sandbox's clock: real time plus what it was advanced by, so that waiting costs nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

MICROSECOND = timedelta(microseconds=1)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_datetime(micros: int) -> datetime:
    """The moment so many microseconds after the epoch."""
    return EPOCH + timedelta(microseconds=micros)


class Clock:
    """Every expiry, retry and time stamp of the sandbox is by this clock."""

    def __init__(self, offset: int = 0, on_advance: Callable[[int], None] | None = None) -> None:
        self._offset = offset
        self._on_advance = on_advance
        self._advanced = asyncio.Event()

    @property
    def offset(self) -> timedelta:
        """How far it is ahead of real time."""
        return timedelta(microseconds=self._offset)

    def now(self) -> datetime:
        """The time it is in the sandbox, in UTC."""
        return to_datetime(self.micros())

    def micros(self) -> int:
        """Microseconds since the epoch."""
        return time.time_ns() // 1000 + self._offset

    def seconds(self) -> float:
        """A reading for rates and waits; it goes back only when a snapshot is restored."""
        return time.monotonic() + self._offset / 1e6

    def advance(self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0) -> datetime:
        """Move on at once, by a positive amount; whatever falls due happens now. Gives the new time."""
        step = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds) // MICROSECOND
        if step <= 0:
            raise ValueError(f"the clock goes forward only: advance() by more than 0, not by {step / 1e6} seconds")
        self.set_offset(self._offset + step)
        return self.now()

    def set_offset(self, micros: int) -> None:
        """Be so far ahead of real time; everybody who waits looks again."""
        to_datetime(time.time_ns() // 1000 + micros + 400 * 86_400_000_000)  # OverflowError now, not in every request
        self._offset = micros
        if self._on_advance:
            self._on_advance(micros)
        self._advanced.set()
        self._advanced = asyncio.Event()

    async def wait(self, until: int | None, wake: asyncio.Event) -> None:
        """Return when it is `until` (microseconds; None: never), when the clock is moved, or when `wake` is set."""
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
