"""Rate limiting shared by all calls of a client: pauses after a 429, then spaces requests at the rate it learns."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from typing import Any, Protocol, runtime_checkable

from ..errors import ConfigurationError

__all__ = [
    "Gate",
    "LocalGate",
    "LocalRateLimiter",
    "OldNames",
    "Pause",
    "RateLearner",
    "RateLimiter",
    "as_rate_limiter",
]


class RateLimiter(Protocol):
    """Decides when requests are sent: shared by the calls of one client, of many clients, or of many machines.

    `acquire` is awaited before each request. If it returns True, `release` follows exactly once, however the request
    ends; after a 429, `pause` follows. All times are in loop time. Only `acquire` may wait, and cancelling it must
    leave no trace. No method may raise.
    """

    @property
    def next_at(self) -> float:
        """The earliest known time for a request made now; in the past if it may be sent at once."""

    async def acquire(self, deadline: float) -> bool:
        """Wait until a request may be sent; return False as soon as it is known that the deadline comes first."""

    def release(self, acquired_at: float, accepted: bool | None) -> None:
        """Record the end of a request.

        ``accepted`` is False after a 429, True after any other response, and None without a response.
        """

    def pause(self, seconds: float) -> None:
        """Hold back all requests for at least this long, after a 429."""


class Pause:
    """A `RateLimiter` that only pauses. Nothing shortens a pause."""

    def __init__(self) -> None:
        self._next_at = 0.0

    @property
    def next_at(self) -> float:
        """When the pause ends."""
        return self._next_at

    async def acquire(self, deadline: float) -> bool:
        """Wait until the pause is over; return False at once if it lasts until the deadline."""
        loop = asyncio.get_running_loop()
        while (wait := self._next_at - loop.time()) > 0:
            if self._next_at >= deadline:
                return False
            await asyncio.sleep(wait)
        return True

    def release(self, acquired_at: float, accepted: bool | None) -> None:
        """Do nothing: a pause learns no rate."""

    def pause(self, seconds: float) -> None:
        """Pause for at least this long from now."""
        self._next_at = max(self._next_at, asyncio.get_running_loop().time() + seconds)


class LocalRateLimiter:
    """The `RateLimiter` of one process: after a 429 it waits for its Retry-After, then sends at the rate it learns.

    Requests are sent in the order of their calls. Before the first 429, only the number of requests in flight is
    bounded, and the bound grows; after it, requests are evenly spaced. If the service counts the requests of several
    clients together, give them one limiter. It works in one event loop at a time. ::

        rate_limiter = LocalRateLimiter()
        first = SigningClient(base_url, token, rate_limiter=rate_limiter)
        second = SigningClient(base_url, other_token, rate_limiter=rate_limiter)
    """

    def __init__(self) -> None:
        self._learner = RateLearner()
        self._waiters: OrderedDict[asyncio.Future[bool], float] = OrderedDict()
        """The waiting requests and their deadlines."""
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        rate = "no limit seen" if self.rate is None else f"{self.rate:.3g} requests per second"
        return f"<{type(self).__name__}: {rate}, {len(self._waiters)} waiting>"

    @property
    def rate(self) -> float | None:
        """The maximum number of requests per second; None before the first 429."""
        return self._learner.rate

    @property
    def next_at(self) -> float:
        """The earliest known time for a request made now."""
        rate = self._learner.rate
        if rate is None:
            return self._learner.paused_until
        return self._learner.ready_at(asyncio.get_running_loop().time()) + len(self._waiters) / rate

    async def acquire(self, deadline: float) -> bool:
        """Wait until a request may be sent; return False as soon as it is known that the deadline comes first."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if not self._waiters and self._learner.ready_at(now) <= now:
            self._learner.acquire(now)
            return True
        if self._learner.paused_until >= deadline:
            return False
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters[waiter] = deadline
        if self._timer is None:
            self._schedule(self._learner.ready_at(now) - now)
        expiry = loop.call_at(deadline, _resolve, waiter, False)
        try:
            return await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled() and waiter.result():
                self.release(now, None)
            raise
        finally:
            expiry.cancel()
            self._waiters.pop(waiter, None)
            if not self._waiters:
                self._cancel_timer()

    def release(self, acquired_at: float, accepted: bool | None) -> None:
        """Record the end of a request."""
        self._learner.release(asyncio.get_running_loop().time(), acquired_at, accepted)
        if self._waiters:
            # In the next iteration of the event loop: after a 429, `pause` must come first.
            self._schedule(0.0)

    def pause(self, seconds: float) -> None:
        """Send nothing for at least this long."""
        self._learner.pause(asyncio.get_running_loop().time(), seconds)
        if self._waiters:
            self._schedule(0.0)

    def _schedule(self, delay: float) -> None:
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(delay, self._wake_waiters)

    def _cancel_timer(self) -> None:
        """Cancel the timer. Without waiters it would be lost with its event loop, which the limiter may outlive."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake_waiters(self) -> None:
        """Release every waiter that may proceed; reject waiters whose deadline is earlier than the end of a pause."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        paused_until = self._learner.paused_until
        if now < paused_until:
            for waiter, deadline in self._waiters.items():
                if deadline <= paused_until:
                    _resolve(waiter, False)
        while self._waiters and (ready_at := self._learner.ready_at(now)) <= now:
            waiter, _ = self._waiters.popitem(last=False)
            if _resolve(waiter, True):
                self._learner.acquire(now)
        if self._waiters:
            self._schedule(ready_at - now)


def _resolve(waiter: asyncio.Future[bool], may_proceed: bool) -> bool:
    """Resolve a waiter; return False if it was already resolved or cancelled."""
    if waiter.done():
        return False
    waiter.set_result(may_proceed)
    return True


class RateLearner:
    """Estimates the service's rate limit from accepted and rejected requests. Pure: callers pass the current time.

    Until the first 429 only the number of requests in flight is bounded (`_SlowStart`). From then on requests are
    evenly spaced. After each 429 the rate starts at what the service accepted since the previous one, rises over a
    plateau to the geometric mean of that and the rate reached, and then grows with the cube of the time.
    """

    KEPT = 1000  # accepted requests that are remembered
    TRUSTED = 20  # with fewer accepted before the first 429, the first rate is a guess
    LOWEST = 0.2  # requests per second; an even lower rate would hardly be tested
    FALL = 0.9  # factor for the rate if no request was accepted since the previous 429
    # Seconds of a plateau: one for each accepted request, or five for each second of the pause if that is longer; from
    # SHORTEST to LONGEST, but at least as long as FEWEST requests take
    SHORTEST, LONGEST, FEWEST = 0.5, 5.0, 5
    GROWTH = 0.08  # relative growth of the rate in one more plateau's time
    LATE = 0.01  # seconds of a timer's delay that are made up for

    def __init__(self) -> None:
        self.rate: float | None = None  # requests per second that may be sent; None before the first 429
        self.paused_until: float = 0.0
        self._slow_start = _SlowStart()
        self._next = self._used = self._base = 0.0
        self._start = self._plateau = 1.0
        self._accepted: deque[float] = deque(maxlen=self.KEPT)  # when they were sent; since the previous 429
        self._count = self._burst = 0
        self._began = math.inf  # the time of the first request, then of the previous 429
        self._resumed_at = -math.inf  # requests sent earlier say nothing about the new rate
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
        sent = list(enumerate(sorted(self._accepted, reverse=True), 1))
        if self.rate is None:
            measured = reached = max(self._first_rate(sent, rejected_at, now), self.LOWEST)
            plateau, pause = 0.0, pause * (self._burst >= self.TRUSTED)  # a guess is corrected early
        else:
            reached = self.rate
            # A measurement may be wrong: it cuts the rate to a third at most.
            measured = min(max(self._measure(sent, rejected_at, reached), reached / 3, self.LOWEST), reached)
        self._base = math.sqrt(measured * reached)
        self._start = measured / self._base
        plateau = min(max(self.SHORTEST, plateau, self.LONGEST * pause), self.LONGEST)
        self._plateau = max(plateau, self.FEWEST / self._base)
        self._used, self._next, self._count = 0.0, now, 0
        self._began, self._resumed_at, self._rejected_at = rejected_at, now, None
        self._accepted.clear()
        self._update_rate()

    def _first_rate(self, sent: list[tuple[int, float]], rejected_at: float, now: float) -> float:
        """Return the rate of accepted requests in the densest period of one second or more."""
        rates = [(count / max(now - at, 1.0), count, at) for count, at in sent]
        rate, self._burst, began = max(rates, default=(1.0, 1, self._began))
        if self._burst >= self.TRUSTED:
            return rate
        # The geometric mean of the rates up to the 429 and up to the end of the pause.
        return self._burst / math.sqrt(max(now - began, 0.001) * max(rejected_at - began, 0.001))

    def _measure(self, sent: list[tuple[int, float]], rejected_at: float, reached: float) -> float:
        """Return the rate that the service accepted since the previous 429.

        In any period a token bucket accepts at most its burst and what its rate adds: each period proves a lower bound.
        At the previous 429 the bucket was empty: for the whole period since then, no burst is subtracted.
        """
        if not self._count:
            return self.FALL * reached
        bounds = [(count - self._burst) / max(rejected_at - at, 0.001) for count, at in sent]
        return max(self._count / max(rejected_at - self._began, 0.001), *bounds)


class _SlowStart:
    """Bounds the requests in flight before the first 429: 8 for two rounds of responses, then a fifth more a round."""

    FIRST, GROWTH = 8, 0.2
    PATIENCE = 0.05  # seconds after which one more is sent: requests that hang must not block all others

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


# Deprecated names, kept for one release.


@runtime_checkable
class Gate(Protocol):
    """Deprecated: use `RateLimiter`."""

    @property
    def opens_at(self) -> float:
        """As `RateLimiter.next_at`."""

    def close(self, seconds: float) -> None:
        """As `RateLimiter.pause`."""

    async def passed(self, deadline: float) -> bool:
        """As `RateLimiter.acquire`."""

    def left(self, since: float, admitted: bool | None) -> None:
        """As `RateLimiter.release`."""


class OldNames:
    """The methods of a `Gate`, for a `RateLimiter`."""

    @property
    def opens_at(self: RateLimiter) -> float:
        """As `next_at`."""
        return self.next_at

    def close(self: RateLimiter, seconds: float) -> None:
        """As `pause`."""
        self.pause(seconds)

    async def passed(self: RateLimiter, deadline: float) -> bool:
        """As `acquire`."""
        return await self.acquire(deadline)

    def left(self: RateLimiter, since: float, admitted: bool | None) -> None:
        """As `release`."""
        self.release(since, admitted)


class LocalGate(OldNames, LocalRateLimiter):
    """Deprecated: use `LocalRateLimiter`."""


class _GateLimiter:
    """A `Gate` as a `RateLimiter`."""

    def __init__(self, gate: Gate) -> None:
        self.acquire = gate.passed
        self.release = gate.left
        self.pause = gate.close
        self._gate = gate

    @property
    def next_at(self) -> float:
        return self._gate.opens_at


def as_rate_limiter(value: Any, name: str = "rate_limiter") -> RateLimiter:
    """Return the argument ``name`` as a `RateLimiter`; wrap it if it is a `Gate`."""
    if _has_methods(value, "passed", "left", "close"):
        return _GateLimiter(value)
    if _has_methods(value, "acquire", "release", "pause"):
        limiter: RateLimiter = value
        return limiter
    raise ConfigurationError(f"{name}: must be a RateLimiter, such as LocalRateLimiter(), got {value!r}")


def _has_methods(value: object, *names: str) -> bool:
    """Return whether a value has these methods. `isinstance` would read properties too, which need an event loop."""
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in names)
