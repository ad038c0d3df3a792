"""What all calls of a client share: the gate that a 429 closes, and the budget for repeats."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol, runtime_checkable

from .rate_learner import Limit

__all__ = ["Budget", "Gate", "LocalGate", "Pause", "ResponseTimes"]


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

    def left(self, since: float, admitted: bool | None) -> None:
        """Learn nothing: a pause knows no rate."""


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
        self._limit = Limit()
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
            return self._limit.closed_until
        return self._limit.ready_at(asyncio.get_running_loop().time()) + len(self._waiting) / rate

    def close(self, seconds: float) -> None:
        """Let nothing pass for at least this long."""
        self._limit.close(asyncio.get_running_loop().time(), seconds)
        if self._waiting:
            self._wake(0.0)

    async def passed(self, deadline: float) -> bool:
        """Wait for one request's turn; False, as soon as that is known, where it does not come before the deadline."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if not self._waiting and self._limit.ready_at(now) <= now:
            self._limit.go(now)
            return True
        if self._limit.closed_until >= deadline:
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
        self._limit.left(asyncio.get_running_loop().time(), since, admitted)
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
        closed_until = self._limit.closed_until
        if now < closed_until:
            for turn, deadline in self._waiting.items():
                if deadline <= closed_until:
                    _answer(turn, False)
        while self._waiting and (ready_at := self._limit.ready_at(now)) <= now:
            turn, _ = self._waiting.popitem(last=False)
            if _answer(turn, True):
                self._limit.go(now)
        if self._waiting:
            self._wake(ready_at - now)


def _answer(turn: asyncio.Future[bool], go: bool) -> bool:
    """Say whether a request may go, unless that was said, or nobody waits for it any more."""
    if turn.done():
        return False
    turn.set_result(go)
    return True


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
