"""Learns how fast to send requests to a service that may answer 429."""

from __future__ import annotations

import math
from collections import deque

__all__ = ["RateLearner"]


class RateLearner:
    """Estimates the service's rate limit from accepted and rejected requests. Pure: callers pass the current time.

    Until the first 429 only the number of requests in flight is bounded (`_SlowStart`). From then on requests are
    evenly spaced. After each 429 the rate starts at what the service accepted since the previous one, rises over a
    plateau to the geometric mean of that and the rate reached, and then grows with the cube of the time.
    """

    KEPT = 1000  # accepted requests that are remembered
    TRUSTED = 20  # with fewer accepted before the first 429, the first rate is a guess
    LOWEST = 0.2  # a rate that is never tried is never learnt
    FALL = 0.9  # factor of the rate if no request was accepted since the previous 429
    # A plateau lasts a second for each accepted request, or 5 for each second of the pause, within these seconds, ...
    SHORTEST, LONGEST = 0.5, 5.0
    FEWEST = 5  # ... and at least for so many requests.
    GROWTH = 0.08  # share by which the rate has grown when twice the plateau has passed
    LATE = 0.01  # seconds of a timer's delay that are made up for

    def __init__(self) -> None:
        self.rate: float | None = None
        """Requests per second that may be sent; None before the first 429."""
        self.paused_until: float = 0.0
        self._slow_start = _SlowStart()
        self._next = self._used = self._base = 0.0
        self._start = self._plateau = 1.0
        # Since the previous 429: when the accepted requests were sent, and how many they are.
        self._accepted: deque[float] = deque(maxlen=self.KEPT)
        self._count = self._burst = 0
        self._began = math.inf  # the time of the first request, then of the previous 429
        self._resumed_at = -math.inf  # requests sent earlier have nothing new to say about the rate
        self._rejected_at: float | None = None  # the first 429 since then, until its pause is over

    def ready_at(self, now: float) -> float:
        """Return the earliest time for the next request; ``now`` or earlier if it may be sent."""
        if now < self.paused_until:
            return self.paused_until
        if self._rejected_at is not None:
            self._learn(self._rejected_at, max(self._rejected_at, self.paused_until))
        return self._slow_start.ready_at(now) if self.rate is None else self._next

    def acquire(self, now: float) -> None:
        """Record that a request is sent."""
        if self.rate is None:
            self._began = min(self._began, now)
            self._slow_start.acquire(now)
            return
        interval = 1 / self.rate
        # A rate that is not used proves nothing, and does not grow.
        if now - self._next < max(interval, self.LATE):
            self._used += interval
        self._next = max(self._next, now - self.LATE) + interval
        self._update_rate()

    def release(self, now: float, acquired_at: float, accepted: bool | None) -> None:
        """Record the end of a request: accepted, rejected with a 429, or (None) without a response."""
        if acquired_at >= self._resumed_at:
            if accepted:
                self._accepted.append(acquired_at)
                self._count += 1
            elif accepted is False and self._rejected_at is None:
                self._rejected_at = now
        if self.rate is None:
            self._slow_start.release(accepted)

    def pause(self, now: float, seconds: float) -> None:
        """Send nothing for at least this long."""
        self.paused_until = max(self.paused_until, now + seconds)

    def _update_rate(self) -> None:
        beyond = self._used / self._plateau - 1
        change = self.GROWTH * beyond**3 if beyond > 0 else (1 - self._start) * beyond
        self.rate = self._base * (1 + change)

    def _learn(self, rejected_at: float, now: float) -> None:
        """Set the rate after a pause that ends now."""
        pause, plateau = now - rejected_at, self._count or self._plateau
        if self.rate is None:
            measured = reached = max(self._first_rate(rejected_at, now), self.LOWEST)
            plateau = 0.0
            pause *= self._burst >= self.TRUSTED  # a guess is corrected early
        else:
            reached = self.rate
            # One measurement may be wrong: it leaves at least a third.
            measured = min(max(self._measure(rejected_at, reached), reached / 3, self.LOWEST), reached)
        self._base = math.sqrt(measured * reached)
        self._start = measured / self._base
        plateau = min(max(self.SHORTEST, plateau, self.LONGEST * pause), self.LONGEST)
        self._plateau = max(plateau, self.FEWEST / self._base)
        self._used, self._next = 0.0, now
        self._began, self._resumed_at, self._rejected_at = rejected_at, now, None
        self._accepted.clear()
        self._count = 0
        self._update_rate()

    def _first_rate(self, rejected_at: float, now: float) -> float:
        """Return what was accepted per second where that was most, and at least in one second."""
        sent = enumerate(sorted(self._accepted, reverse=True), 1)
        rates = [(count / max(now - at, 1.0), count, at) for count, at in sent]
        rate, self._burst, began = max(rates, default=(1.0, 1, self._began))
        if self._burst >= self.TRUSTED:
            return rate
        # Between the rates up to the 429 and up to the end of the pause.
        return self._burst / math.sqrt(max(now - began, 0.001) * max(rejected_at - began, 0.001))

    def _measure(self, rejected_at: float, reached: float) -> float:
        """Return the rate that the service accepted since the previous 429.

        In any period a token bucket accepts at most its burst and what its rate adds: each period proves a lower bound.
        At the previous 429 the bucket was empty: the whole period proves one without the burst.
        """
        if not self._count:
            return self.FALL * reached
        sent = enumerate(sorted(self._accepted, reverse=True), 1)
        bounds = [(count - self._burst) / max(rejected_at - at, 0.001) for count, at in sent]
        return max(self._count / max(rejected_at - self._began, 0.001), *bounds)


class _SlowStart:
    """Bounds the requests in flight before the first 429: 8 in two rounds of responses, then a fifth more in each."""

    FIRST, GROWTH = 8, 0.2
    PATIENCE = 0.05  # after so many seconds one more: requests that hang hold up no others

    def __init__(self) -> None:
        self._in_flight = self._responses = 0
        self._size, self._widened_at = float(self.FIRST), 0.0
        self._is_used_up = False

    def ready_at(self, now: float) -> float:
        self._is_used_up = self._in_flight >= self._size
        return max(now, self._widened_at + self.PATIENCE) if self._is_used_up else now

    def acquire(self, now: float) -> None:
        if not self._in_flight:
            self._widened_at = now
        elif self._in_flight >= self._size:
            self._size, self._widened_at = self._size + 1, now
        self._in_flight += 1

    def release(self, accepted: bool | None) -> None:
        if accepted and self._is_used_up:
            self._responses += 1
            self._size += self.GROWTH if self._responses > 2 * self.FIRST else 0.0
        self._in_flight -= 1
