"""Telemetry that does nothing: what a process without an OpenTelemetry SDK uses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from typing import Any, Self

from .names import Metric

__all__ = ["Attributes", "Span", "Telemetry"]

Attributes = Mapping[str, str | bool | int | float | None]
"""Attributes that are None are not recorded."""
_NONE: Attributes = {}


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
    def event(self, name: str, attributes: Attributes = _NONE) -> None: ...

    def fail(self, error: BaseException | str) -> None:
        """Mark the span as failed, with an error that the block does not raise, or with the error's type."""

    # For the span of a call. A wait is one for the rate limiter; it is not ``acquired`` if the deadline would pass
    # first. A refresh may be shared by other calls. A verdict is effect, no_effect, verified or unknown.

    def wait(self, seconds: float, acquired: bool) -> None: ...
    def refresh(self, result: str, seconds: float) -> None: ...
    def retry(self, delay: float, error: BaseException) -> None: ...
    def reading(self, operation: str) -> None: ...
    def verdict(self, verdict: str) -> None: ...

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

    def span(self, name: str, attributes: Attributes = _NONE, *, links: Iterable[str | None] = ()) -> Span:
        """Begin a span of `names.SPANS`; its parent is the current span.

        ``links`` are the contexts of other spans, of other processes too; an invalid one is left out.
        """
        return _SPAN

    def timed(self, metric: Metric, attributes: Attributes = _NONE) -> Span:
        """Return a block whose duration, and the type of its error, are recorded without a span."""
        return _SPAN

    def record(self, metric: Metric, value: float, attributes: Attributes = _NONE) -> None:
        """Add to a counter, or record a value of a histogram, with those attributes that the metric has."""

    async def measure(self, source: Hashable, read: Callable[[], Awaitable[Mapping[Metric, float]]]) -> None:
        """Set gauges to the values that ``read`` returns for one part of this process."""

    def forget(self, source: Hashable) -> None:
        """Stop reporting the values of this part of the process."""


_SPAN = Span()
