"""A rate limit for the API: a token bucket on the sandbox's clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from .. import _checks
from .clock import Clock


@dataclass
class RateLimit:
    """Requests per second, and how many may arrive at once; `retry_after` replaces the computed Retry-After."""

    rate: float
    burst: int
    retry_after: float | None
    clock: Clock
    _tokens: float = field(init=False)
    _at: float = field(init=False)

    def __post_init__(self) -> None:
        _checks.number("rate", self.rate, at_least=1e-6, at_most=1e9, error=ValueError)
        _checks.integer("burst", self.burst, at_most=10**9, error=ValueError)
        if self.retry_after is not None:
            _checks.number("retry_after", self.retry_after, at_least=0, at_most=1e9, error=ValueError)
        self._tokens, self._at = float(self.burst), self.clock.seconds()

    def admit(self) -> float | None:
        """Return None if the request is admitted, else the seconds until the next one would be."""
        now = self.clock.seconds()
        passed = max(0.0, now - self._at)  # restoring a snapshot may set the clock back
        self._tokens = min(float(self.burst), self._tokens + passed * self.rate)
        self._at = now
        if self._tokens >= 1:
            self._tokens -= 1
            return None
        return (1 - self._tokens) / self.rate
