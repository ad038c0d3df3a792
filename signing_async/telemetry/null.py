"""Telemetry that does nothing: what a process without OpenTelemetry uses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

from . import names
from .names import Metric, SpanType

__all__ = ["NOTHING", "WAIT_EVENT", "Attributes", "Span", "Telemetry"]

Attributes = Mapping[str, str | bool | int | float | None]
"""Attributes that are None are not recorded."""
NOTHING: Attributes = {}
WAIT_EVENT = "rate_limiter.wait"
_SHORTEST_WAIT = 0.001  # acquiring without a wait takes microseconds


class Span:
    """A span: the current one in its block. It ends with the block, with its outcome and the type of its error."""

    @property
    def context(self) -> str | None:
        """The trace context as text, for another process to keep and link to; None if nothing is recorded."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None: ...
    def set(self, attributes: Attributes) -> None: ...

    def fail(self, error: BaseException | str) -> None:
        """Mark the span as failed, with an error that the block does not raise, or with the error's type."""

    # For the span of a call.

    def event(self, name: str, attributes: Attributes) -> None: ...

    def wait(self, seconds: float, acquired: bool) -> None:
        """Note a wait for the rate limiter; it is not ``acquired`` if the deadline would pass first."""
        if seconds >= _SHORTEST_WAIT or not acquired:
            self.event(WAIT_EVENT, {names.WAIT: seconds, names.WAIT_PASSED: acquired})

    def refresh(self, result: str, seconds: float) -> None:
        self.event("token.refresh", {names.REFRESH_RESULT: result, names.WAIT: seconds})

    def retry(self, delay: float, error: BaseException) -> None:
        self.event("retry", {names.RETRY_DELAY: delay, names.ERROR_TYPE: type(error).__qualname__})

    def reading(self, operation: str) -> None:
        self.event("reconcile.read", {names.OPERATION: operation})

    def verdict(self, verdict: str) -> None:
        """Note what the readings found: effect, no_effect, verified or unknown."""
        self.event("reconcile.verdict", {names.VERDICT: verdict})

    def attempt(self, name: str, method: str, origin: str, path: str, number: int) -> Span:
        """Begin an attempt of this call, or of a reading that is a part of it; it is current until `end`."""
        return self

    def end(self, response: Any, error: BaseException | None, *, sent: int, received: int) -> None:
        """End an attempt with its response, None if there was none, and the sizes of both bodies."""


class Telemetry:
    """Where spans and metrics are recorded."""

    def call(self, name: str, path: str) -> Span:
        """Begin the span of a call."""
        return _SPAN

    def span(self, about: SpanType, attributes: Attributes = NOTHING, *, links: Iterable[str | None] = ()) -> Span:
        """Begin a span under the current one. ``links`` are the contexts of other spans, of other processes too."""
        return _SPAN

    def timed(self, metric: Metric, attributes: Attributes = NOTHING) -> AbstractContextManager[object]:
        """Return a block whose duration, and the type of its error, are recorded without a span."""
        return _SPAN

    def record(self, metric: Metric, value: float, attributes: Attributes = NOTHING) -> None:
        """Add to a counter, or record a value of a histogram, with those attributes that the metric has."""

    async def measure(self, source: Hashable, read: Callable[[], Awaitable[Mapping[Metric, float]]]) -> None:
        """Set gauges to the values that ``read`` returns for one part of this process."""

    def forget(self, source: Hashable) -> None:
        """Stop reporting the values of this part of the process."""


_SPAN = Span()
