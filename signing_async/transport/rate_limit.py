"""Rate limiting shared by all calls of a client: pauses after a 429, then spaces requests at a rate that it adapts."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from typing import Any, Protocol

from ..errors import ConfigurationError

__all__ = ["LocalRateLimiter", "RateController", "RateLimiter", "as_rate_limiter"]


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


class LocalRateLimiter:
    """The `RateLimiter` of one process: after a 429 it waits for its Retry-After, then sends at a rate that it adapts.

    Requests are sent in the order of their calls. Before the first 429, only the number of requests in flight is
    bounded, and the bound grows; after it, requests are evenly spaced. If the service counts the requests of several
    clients together, give them one limiter. It works in one event loop at a time. ::

        rate_limiter = LocalRateLimiter()
        first = SigningClient(base_url, token, rate_limiter=rate_limiter)
        second = SigningClient(base_url, other_token, rate_limiter=rate_limiter)
    """

    def __init__(self) -> None:
        self._controller = RateController()
        self._waiters: OrderedDict[asyncio.Future[bool], float] = OrderedDict()
        """The waiting requests and their deadlines."""
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        rate = "no limit seen" if self.rate is None else f"{self.rate:.3g} requests per second"
        return f"<{type(self).__name__}: {rate}, {len(self._waiters)} waiting>"

    @property
    def rate(self) -> float | None:
        """The maximum number of requests per second; None before the first 429."""
        return self._controller.rate

    @property
    def next_at(self) -> float:
        """The earliest known time for a request made now."""
        if self.rate is None:
            return self._controller.paused_until
        return self._controller.ready_at(asyncio.get_running_loop().time()) + len(self._waiters) / self.rate

    async def acquire(self, deadline: float) -> bool:
        """Wait until a request may be sent; return False as soon as it is known that the deadline comes first."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if not self._waiters and self._controller.ready_at(now) <= now:
            self._controller.acquire(now)
            return True
        if self._controller.paused_until >= deadline:
            return False
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters[waiter] = deadline
        expiry = loop.call_at(deadline, _resolve, waiter, False)
        if len(self._waiters) == 1:
            self._wake_waiters()
        try:
            return await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled() and waiter.result():
                self.release(now, None)
            raise
        finally:
            expiry.cancel()
            self._waiters.pop(waiter, None)

    def release(self, acquired_at: float, accepted: bool | None) -> None:
        """Record the end of a request."""
        now = asyncio.get_running_loop().time()
        self._controller.release(now, acquired_at, accepted)
        if self._waiters:
            self._schedule(now)  # not at once: after a 429, `pause` must come first

    def pause(self, seconds: float) -> None:
        """Hold back all requests for at least this long."""
        now = asyncio.get_running_loop().time()
        self._controller.pause(now, seconds)
        if self._waiters:
            self._schedule(now)

    def _schedule(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._wake_waiters)

    def _wake_waiters(self) -> None:
        """Release every waiter that may proceed; reject waiters whose deadline is earlier than the end of a pause."""
        now = asyncio.get_running_loop().time()
        if now < self._controller.paused_until:
            for waiter, deadline in self._waiters.items():
                if deadline <= self._controller.paused_until:
                    _resolve(waiter, False)
        while self._waiters and (ready_at := self._controller.ready_at(now)) <= now:
            waiter, _ = self._waiters.popitem(last=False)
            if _resolve(waiter, True):
                self._controller.acquire(now)
        if self._waiters:
            self._schedule(ready_at)


def _resolve(waiter: asyncio.Future[bool], may_proceed: bool) -> bool:
    """Resolve a waiter; return False if it was already resolved or cancelled."""
    if waiter.done():
        return False
    waiter.set_result(may_proceed)
    return True


class RateController:
    """The rate of requests: additive increase, multiplicative decrease, and slow start. Pure: callers pass the time.

    Until the first 429 only the number of requests in flight is bounded, and the bound grows with the responses. From
    then on requests are evenly spaced. Each 429 lowers the rate to three quarters; it rises steadily to the rate that
    was rejected, and then doubles every half second until the next 429.
    """

    WINDOW = 8  # requests in flight at first
    WIDENING = 0.2  # more for each response while the window is full
    PATIENCE = 0.05  # seconds after which one more is sent: requests that hang must not block all others
    TRUSTED = 20  # requests accepted in the second before the first 429; fewer show no limit
    DECREASE = 0.75
    RISE, RISE_REQUESTS = 5.0, 40  # seconds, and at least so many requests, until the rejected rate is reached again
    DOUBLING, DOUBLING_REQUESTS = 0.5, 4
    LOWEST = 0.2  # requests per second
    LATE = 0.01  # seconds of a timer's delay that are made up for

    def __init__(self) -> None:
        self.rate: float | None = None  # requests per second that may be sent; None before the first 429
        self.paused_until: float = 0.0
        self._in_flight = 0
        self._window, self._widened_at = float(self.WINDOW), 0.0
        self._accepted: deque[float] = deque(maxlen=1000)  # when they were sent, before the first 429
        self._next = 0.0
        self._rejected_rate = 0.0
        self._rejected_at: float | None = None  # the first 429 since the last pause
        self._resumed_at = -math.inf  # requests sent earlier say nothing about the rate since then

    def ready_at(self, now: float) -> float:
        """Return the earliest time for the next request; ``now`` or earlier if it may be sent."""
        if now < self.paused_until:
            return self.paused_until
        if self._rejected_at is not None:
            self._decrease(self._rejected_at)
        if self.rate is not None:
            return self._next
        return now if self._in_flight + 1 <= self._window else max(now, self._widened_at + self.PATIENCE)

    def acquire(self, now: float) -> None:
        """Record that a request is sent."""
        self._in_flight += 1
        if self.rate is not None:
            interval = 1 / self.rate
            # A rate that is not used proves nothing, and does not grow.
            if now - self._next < max(interval, self.LATE):
                self._increase(self.rate)
            self._next = max(self._next, now - self.LATE) + interval
        elif self._in_flight == 1:
            self._widened_at = now
        elif self._in_flight > self._window:
            self._window, self._widened_at = self._in_flight, now

    def release(self, now: float, acquired_at: float, accepted: bool | None) -> None:
        """Record the end of a request: accepted, rejected with a 429, or (None) without a response."""
        if accepted is False and acquired_at >= self._resumed_at and self._rejected_at is None:
            self._rejected_at = now
        elif accepted and self.rate is None:
            self._accepted.append(acquired_at)
            if self._in_flight + 1 > self._window:
                self._window += self.WIDENING
        self._in_flight -= 1

    def pause(self, now: float, seconds: float) -> None:
        """Send nothing for at least this long."""
        self.paused_until = max(self.paused_until, now + seconds)

    def _increase(self, rate: float) -> None:
        if rate < self._rejected_rate:
            lost = (1 - self.DECREASE) * self._rejected_rate
            self.rate = rate + lost / max(self.RISE * rate, self.RISE_REQUESTS)
        else:
            self.rate = rate * 2 ** (1 / max(self.DOUBLING * rate, self.DOUBLING_REQUESTS))

    def _decrease(self, rejected_at: float) -> None:
        """Set the rate after a pause."""
        if self.rate is not None:
            self._rejected_rate = self.rate
            self.rate = max(self.DECREASE * self.rate, self.LOWEST)
        else:
            recent = sum(sent_at >= rejected_at - 1 for sent_at in self._accepted)
            # Few requests show no limit: the rate starts low, and doubles soon.
            self._rejected_rate = recent / self.DECREASE if recent >= self.TRUSTED else 0.0
            self.rate = float(max(recent, self.WINDOW))
            self._accepted.clear()
        self._next = self._resumed_at = max(rejected_at, self.paused_until)
        self._rejected_at = None


def as_rate_limiter(value: Any, name: str = "rate_limiter") -> RateLimiter:
    """Return the argument ``name`` if it is a `RateLimiter`; raise `ConfigurationError` otherwise."""
    # `isinstance` would read `next_at`, which may need an event loop.
    methods = (getattr(value, method, None) for method in ("acquire", "release", "pause"))
    if isinstance(value, type) or not all(map(callable, methods)):
        raise ConfigurationError(f"{name}: must be a RateLimiter, such as LocalRateLimiter(), got {value!r}")
    limiter: RateLimiter = value
    return limiter
