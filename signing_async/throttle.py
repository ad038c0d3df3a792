"""What all calls of a client share: the gate that a 429 closes, and the budget for repeats."""

from __future__ import annotations

import asyncio
from typing import Protocol, runtime_checkable

__all__ = ["Budget", "Gate", "LocalGate"]


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


class LocalGate:
    """The `Gate` of one process: closed until a point in time.

    A timestamp: nobody can reopen it early by mistake. One gate may serve many clients of one event loop. ::

        gate = LocalGate()
        SigningClient(base_url, token, gate=gate)
    """

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
        """A request is over."""


class Budget:
    """Keeps the load in an outage at no more than two requests a call on average.

    Every call brings half a credit, and every request beyond a call's first takes one; a call that succeeds after all
    gives back what it took. The purse begins with 20 credits, so that a few calls in trouble can make all of their
    attempts; between calls it holds 40 at most.
    """

    _FIRST, _MOST = 20.0, 40.0
    _BROUGHT = 0.5

    def __init__(self) -> None:
        self._credits = self._FIRST

    def bring(self) -> None:
        """A call begins."""
        self._credits += self._BROUGHT

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
        self._credits = min(self._MOST, self._credits + taken)
