"""Record spans and metrics with OpenTelemetry's API package; no SDK is needed."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, ParamSpec, Self

from opentelemetry import context, metrics, trace
from opentelemetry.trace import SpanKind, StatusCode

from .._version import __version__
from .names import ERROR_TYPE, METRICS, SCHEMA_URL, Metric

__all__ = ["Attributes", "Span", "SpanKind", "Telemetry", "error_type", "outcome_of"]

Attributes = Mapping[str, str | bool | int | float]
_NAME = "signing_async"
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_has_failed = False

P = ParamSpec("P")

log: logging.Logger = logging.getLogger("signing_async")


def error_type(error: BaseException) -> str:
    """Return the class of an error. Its text may contain names and addresses, which are not recorded."""
    return type(error).__qualname__


def outcome_of(error: BaseException | None) -> str:
    """Return how an operation ended: success, error, unknown (it may have taken effect) or cancelled."""
    if error is None:
        return "success"
    if getattr(error, "effect", None) == "unknown":
        return "unknown"
    return "cancelled" if isinstance(error, asyncio.CancelledError | GeneratorExit) else "error"


def _never_raising(record: Callable[P, None]) -> Callable[P, None]:
    """Log what a sampler, a processor or another part of the SDK raises; the observed call continues."""

    @functools.wraps(record)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            record(*args, **kwargs)
        except Exception as error:
            _log_failure(error)

    return guarded


def _log_failure(error: Exception) -> None:
    global _has_failed
    if not _has_failed:
        _has_failed = True
        log.warning("OpenTelemetry failed (%s): spans or metrics are missing; logged once", type(error).__name__)


class Telemetry:
    """The tracer and the instruments of this process."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer(_NAME, __version__, schema_url=SCHEMA_URL)
        meter = metrics.get_meter(_NAME, __version__, schema_url=SCHEMA_URL)
        self._record = {metric: _recorder(meter, metric) for metric in METRICS if metric.kind != "gauge"}
        self._gauges = {metric: _Gauge(meter, metric) for metric in METRICS if metric.kind == "gauge"}

    @_never_raising
    def record(self, metric: Metric, value: float, attributes: Attributes | None = None) -> None:
        """Add to a counter, or record a value of a histogram."""
        self._record[metric](value, attributes)

    def measure(self, metric: Metric, source: Hashable, value: float | None) -> None:
        """Set the value that a part of this process has measured for a gauge; None if it no longer measures one."""
        self._gauges[metric].set(source, value)

    def span(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Iterable[str | None] = (),
    ) -> Span:
        """Start a span; its parent is the current span.

        ``links`` are the texts of other spans' contexts, of other processes too; an invalid one is left out.
        """
        linked = [trace.Link(found) for text in links if (found := _parse_context(text)) is not None]
        try:
            return Span(self._tracer.start_span(name, None, kind, attributes, linked))
        except Exception as error:
            _log_failure(error)
            return Span(trace.INVALID_SPAN)


class Span:
    """A span. As a context manager it is the current span in the block, and ends with the block."""

    __slots__ = ("_began", "_reset", "span")

    def __init__(self, span: trace.Span) -> None:
        self.span: trace.Span = span
        self._began = time.perf_counter()
        self._reset: Any = None

    @property
    def seconds(self) -> float:
        """The seconds since the span began."""
        return time.perf_counter() - self._began

    @property
    def context(self) -> str | None:
        """The context as text, to be kept and linked to by another process; None without an SDK for traces."""
        found = self.span.get_span_context()
        if not found.is_valid:
            return None
        return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"

    @_never_raising
    def set(self, attributes: Attributes) -> None:
        self.span.set_attributes(attributes)

    @_never_raising
    def event(self, name: str, attributes: Attributes | None = None) -> None:
        self.span.add_event(name, attributes)

    @_never_raising
    def end(self, error: BaseException | None = None) -> None:
        """End the span, with the class of an error, and make the span around it the current one again.

        Record metrics first: their exemplars point to the current span.
        """
        context.detach(self._reset)
        if error is not None:
            self.fail(error_type(error))
        self.span.end()

    @_never_raising
    def fail(self, error: str) -> None:
        """Mark the span as failed, with the type of the error."""
        self.span.set_attribute(ERROR_TYPE, error)
        self.span.set_status(StatusCode.ERROR)

    def enter(self) -> None:
        """Make this the current span until `end`, in the same task."""
        self._reset = context.attach(trace.set_span_in_context(self.span))

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.end(error)


class _Gauge:
    """A gauge that keeps its value between two measurements, however often it is exported."""

    def __init__(self, meter: metrics.Meter, metric: Metric) -> None:
        self._combine = metric.combine
        self._values: dict[Hashable, float] = {}
        meter.create_observable_gauge(metric.name, [self._observe], metric.unit, metric.description)

    def set(self, source: Hashable, value: float | None) -> None:
        if value is None:
            self._values.pop(source, None)
        else:
            self._values[source] = value

    def _observe(self, _: metrics.CallbackOptions) -> list[metrics.Observation]:
        values = list(self._values.values())  # another thread exports them
        return [metrics.Observation(self._combine(values))] if values else []


def _recorder(meter: metrics.Meter, metric: Metric) -> Any:
    name, unit, description = metric.name, metric.unit, metric.description
    if metric.kind == "histogram":
        boundaries = metric.boundaries
        return meter.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=boundaries).record
    if metric.kind == "counter":
        return meter.create_counter(name, unit, description).add
    return meter.create_up_down_counter(name, unit, description).add


def _parse_context(text: str | None) -> trace.SpanContext | None:
    found = _TRACEPARENT.fullmatch(text or "")
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    parsed = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags))
    return parsed if parsed.is_valid else None
