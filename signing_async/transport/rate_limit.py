"""What all calls of a client share: the gate that a 429 closes, and the budget for repeats."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from typing import Protocol, runtime_checkable

__all__ = ["Budget", "Gate", "LocalGate", "Pause", "RateLearner", "ResponseTimes"]


@runtime_checkable
class Gate(Protocol):
    """What lets a client's requests go out: shared by all calls of a client, or of many clients, or of many machines.

    For each request `passed` is awaited first. Where it says True, `left` follows exactly once, however the request
    ends; for a 429 `close` comes after it. All times are of the event loop's clock. Only `passed` may wait, and being
    cancelled while it does must leave no trace. None of them may raise.
    """

    @property
    def opens_at(self) -> float:
        """When a request that came now could go out, as far as is known; a time gone by where it could at once."""

    def close(self, seconds: float) -> None:
        """A 429 asked to wait: let nothing pass for at least this long from now."""

    async def passed(self, deadline: float) -> bool:
        """Wait for one request's turn; False, as soon as that is known, where it does not come before the deadline."""

    def left(self, since: float, admitted: bool | None) -> None:
        """A request that had passed at ``since`` is over.

        ``admitted`` is False for a 429, True for any other answer, and None where no answer came.
        """


class Pause:
    """Closed until a point in time of the event loop's clock. A timestamp: nobody can reopen it early by mistake."""

    def __init__(self) -> None:
        self._opens_at = 0.0

    def close(self, seconds: float) -> None:
        """Stay closed for at least this long from now."""
        self._opens_at = max(self._opens_at, asyncio.get_running_loop().time() + seconds)

    @property
    def opens_at(self) -> float:
        """When the gate opens, by the loop's clock."""
        return self._opens_at

    async def passed(self, deadline: float) -> bool:
        """Wait until the gate is open; False, at once, where it stays closed up to the deadline."""
        loop = asyncio.get_running_loop()
        while (wait := self._opens_at - loop.time()) > 0:
            if self._opens_at >= deadline:
                return False
            await asyncio.sleep(wait)
        return True


class LocalGate:
    """The `Gate` of one process: after a 429 nothing goes out until its Retry-After, then as much as is let through.

    It learns how many requests a second the service allows, and spaces them evenly, in the order in which they came.
    Before the first 429 it lets few requests out at once, and soon as many as come. One gate may serve many clients of
    one event loop, and of the next one after it, where the service counts their requests together. ::

        gate = LocalGate()
        one = SigningClient(base_url, token, gate=gate)
        other = SigningClient(base_url, other_token, gate=gate)
    """

    def __init__(self) -> None:
        self._limit = RateLearner()
        self._waiting: OrderedDict[asyncio.Future[bool], float] = OrderedDict()
        """The turns that requests wait for, and until when they do."""
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        rate = "no limit seen" if self.rate is None else f"{self.rate:.3g} requests a second"
        return f"<LocalGate: {rate}, {len(self._waiting)} waiting>"

    @property
    def rate(self) -> float | None:
        """How many requests a second go out at present; None while no 429 has come."""
        return self._limit.rate

    @property
    def opens_at(self) -> float:
        """When a request that came now could go out, as far as is known."""
        rate = self._limit.rate
        if rate is None:
            return self._limit.paused_until
        return self._limit.ready_at(asyncio.get_running_loop().time()) + len(self._waiting) / rate

    def close(self, seconds: float) -> None:
        """Let nothing pass for at least this long."""
        self._limit.pause(asyncio.get_running_loop().time(), seconds)
        if self._waiting:
            self._wake(0.0)

    async def passed(self, deadline: float) -> bool:
        """Wait for one request's turn; False, as soon as that is known, where it does not come before the deadline."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if not self._waiting and self._limit.ready_at(now) <= now:
            self._limit.acquire(now)
            return True
        if self._limit.paused_until >= deadline:
            return False
        turn: asyncio.Future[bool] = loop.create_future()
        self._waiting[turn] = deadline
        if self._timer is None:
            self._wake(self._limit.ready_at(now) - now)
        expiry = loop.call_at(deadline, _answer, turn, False)
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.result():
                # Its turn had come already.
                self.left(now, None)
            raise
        finally:
            expiry.cancel()
            self._waiting.pop(turn, None)
            if not self._waiting:
                self._rest()

    def left(self, since: float, admitted: bool | None) -> None:
        """A request that had passed at ``since`` is over."""
        self._limit.release(asyncio.get_running_loop().time(), since, admitted)
        if self._waiting:
            # Not before a 429 has closed the gate.
            self._wake(0.0)

    def _wake(self, seconds: float) -> None:
        """Look whose turn it is, so many seconds from now."""
        self._rest()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._let_through)

    def _rest(self) -> None:
        """Wake up no more: a timer that nobody needs would not outlive its event loop, which the gate may."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _let_through(self) -> None:
        """Let go all whose turn it is, and turn away who cannot wait until the gate opens."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        closed_until = self._limit.paused_until
        if now < closed_until:
            for turn, deadline in self._waiting.items():
                if deadline <= closed_until:
                    _answer(turn, False)
        while self._waiting and (ready_at := self._limit.ready_at(now)) <= now:
            turn, _ = self._waiting.popitem(last=False)
            if _answer(turn, True):
                self._limit.acquire(now)
        if self._waiting:
            self._wake(ready_at - now)


def _answer(turn: asyncio.Future[bool], go: bool) -> bool:
    """Say whether a request may go, unless that was said, or nobody waits for it any more."""
    if turn.done():
        return False
    turn.set_result(go)
    return True


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


class Budget:
    """Keeps the load in an outage at no more than two requests a call on average.

    Every call brings half a credit, and every request beyond a call's first takes one; a call that succeeds after all
    gives back what it took. The purse begins with 20 credits, so that a few calls in trouble can make all of their
    attempts; it holds 40 at most, and what the calls under way have brought.
    """

    _FIRST, _MOST = 20.0, 40.0
    _BROUGHT = 0.5

    def __init__(self) -> None:
        self._credits = self._FIRST
        self._under_way = 0

    def bring(self) -> None:
        """A call begins."""
        self._under_way += 1
        self._credits += self._BROUGHT

    def leave(self) -> None:
        """A call has ended, however it did."""
        self._under_way -= 1
        if self._credits > self._MOST:
            self._credits = min(self._credits, self._room)

    @property
    def any_left(self) -> bool:
        """Whether one more request could be made."""
        return self._credits >= 1.0

    def take(self) -> bool:
        """Whether one more request may be made; if so, it is paid for."""
        if not self.any_left:
            return False
        self._credits -= 1.0
        return True

    def give_back(self, taken: int) -> None:
        """A call that had taken this many has succeeded."""
        self._credits = min(self._credits + taken, self._room)

    @property
    def _room(self) -> float:
        return self._MOST + self._BROUGHT * self._under_way


class ResponseTimes:
    """Recent response times by operation: a maximum that decays slowly."""

    _UNSEEN = 1.0
    _KEPT = 0.9

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def note(self, operation: str, seconds: float) -> None:
        """Record one response."""
        kept = self._seconds.get(operation, seconds)
        self._seconds[operation] = max(seconds, kept + (seconds - kept) * (1 - self._KEPT))

    def expected(self, operation: str) -> float:
        """Return the seconds to reserve for a response."""
        found = self._seconds.get(operation)
        return max(self._seconds.values(), default=self._UNSEEN) if found is None else found
