"""How long the service takes to respond: what a call reserves before its deadline."""

from __future__ import annotations

__all__ = ["ResponseTimes"]


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
