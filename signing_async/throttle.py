"""What all calls of a client share: the gate that a 429 closes, and the budget for repeats."""

from __future__ import annotations

import asyncio

__all__ = ["Budget", "Gate"]


class Gate:
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
