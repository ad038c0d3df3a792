"""Records spans and metrics with OpenTelemetry's API package; no SDK is needed."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from contextlib import ContextDecorator
from functools import partial
from typing import Any, Self
from urllib.parse import urlsplit

from opentelemetry import context, metrics, trace
from opentelemetry.trace import SpanKind, StatusCode

from .._version import __version__
from . import names
from .names import Metric, SpanType
from .null import Attributes, Span, Telemetry

__all__ = ["OpenTelemetry"]

_SCOPE = "signing_async", __version__
_NONE: Attributes = {}
_CALL = SpanType(names.OUTCOME, (names.OPERATION_DURATION,))
_ATTEMPT = SpanType(None, (names.REQUEST_DURATION, names.ACTIVE_REQUESTS), "client")
_SHORTEST_WAIT = 0.001  # acquiring without a wait takes microseconds
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SIGNING = re.compile(r"/signings/([^/?]+)")
_ID = re.compile(r"[\w-]+", re.ASCII)
_ID_NAMES = {names.SIGNING_ID, names.DOCUMENT_ID, names.EVENT_ID}
_ID_PLACEHOLDERS = {"signings": "{id}", "documents": "{document_id}", "recipients": "{recipient_id}"}
_FIXED = re.compile(r"|[a-z][A-Za-z_-]*|\d{1,2}\.\d{1,2}|v\d{1,2}", re.ASCII)
"""A segment that is not redacted: a word of an endpoint or a version."""
_REDACTED = "REDACTED"

log: logging.Logger = logging.getLogger("signing_async")


class _Guard(ContextDecorator):
    """Logs, once, what a sampler, a processor or another part of the SDK raises; the observed call continues."""

    has_failed = False

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, Exception) and not self.has_failed:
            self.has_failed = True
            name = type(error).__name__
            log.warning("OpenTelemetry failed (%s): spans or metrics are missing; logged once", name)
        return isinstance(error, Exception)


_guarded = _Guard()


class OpenTelemetry(Telemetry):
    def __init__(self) -> None:
        self.tracer: trace.Tracer = trace.get_tracer(*_SCOPE, schema_url=names.SCHEMA_URL)
        meter = metrics.get_meter(*_SCOPE, schema_url=names.SCHEMA_URL)
        self._measured: dict[Hashable, Mapping[Metric, float]] = {}
        self._instruments: dict[str, Callable[..., None]] = {}
        for metric in names.METRICS:
            about = metric.name, metric.unit, metric.description
            if metric.kind == "gauge":
                meter.create_observable_gauge(metric.name, [partial(self._observe, metric)], *about[1:])
            elif metric.kind == "histogram":
                histogram = meter.create_histogram(*about, explicit_bucket_boundaries_advisory=metric.boundaries)
                self._instruments[metric.name] = histogram.record
            else:
                is_counter = metric.kind == "counter"
                create = meter.create_counter if is_counter else meter.create_up_down_counter
                self._instruments[metric.name] = create(*about).add

    def call(self, name: str, path: str) -> _Call:
        return _Call(self, _describe(name)[0], path)

    def span(self, name: str, attributes: Attributes = _NONE, *, links: Iterable[str | None] = ()) -> _Span:
        return _Span(self, name, names.SPANS[name], attributes, links)

    def timed(self, metric: Metric, attributes: Attributes = _NONE) -> _Timer:
        return _Timer(self, metric, attributes)

    @_guarded
    def record(self, metric: Metric, value: float, attributes: Attributes = _NONE) -> None:
        found = {name: attributes[name] for name in metric.attributes if attributes.get(name) is not None}
        self._instruments[metric.name](value, found)

    async def measure(self, source: Hashable, read: Callable[[], Awaitable[Mapping[Metric, float]]]) -> None:
        self._measured[source] = await read()

    def forget(self, source: Hashable) -> None:
        self._measured.pop(source, None)

    def _observe(self, metric: Metric, _: metrics.CallbackOptions) -> list[metrics.Observation]:
        # Another thread exports the values, and does so more often than they are measured.
        values = [measured[metric] for measured in tuple(self._measured.values()) if metric in measured]
        return [metrics.Observation(metric.combine(values))] if values else []


class _Timer(Span):
    def __init__(self, telemetry: OpenTelemetry, metric: Metric, attributes: Attributes) -> None:
        self._telemetry, self._metric, self._attributes = telemetry, metric, attributes
        self._began = time.perf_counter()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        attributes = {**self._attributes, names.ERROR_TYPE: None if error is None else type(error).__qualname__}
        self._telemetry.record(self._metric, time.perf_counter() - self._began, attributes)


class _Span(Span):
    def __init__(
        self,
        telemetry: OpenTelemetry,
        name: str,
        about: SpanType,
        attributes: Attributes,
        links: Iterable[str | None] = (),
    ) -> None:
        self._telemetry, self._about = telemetry, about
        self._attributes = _usable(attributes)
        self._outcome = "success"
        self._span: trace.Span = trace.INVALID_SPAN
        linked = [trace.Link(found) for text in links if (found := _parse_context(text)) is not None]
        with _guarded:
            self._span = telemetry.tracer.start_span(name, None, SpanKind[about.kind.upper()], self._attributes, linked)
        self._began = time.perf_counter()

    @property
    def context(self) -> str | None:
        found = self._span.get_span_context()
        return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}" if found.is_valid else None

    def __enter__(self) -> Self:
        self._reset = context.attach(trace.set_span_in_context(self._span))
        for metric in self._about.metrics:
            if metric.kind == "up_down_counter":
                self._telemetry.record(metric, 1, self._attributes)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.fail(error)
        if self._about.outcome is not None and self._about.outcome not in self._attributes:
            self.set({self._about.outcome: self._outcome})
        # Exemplars point to the current span.
        self._record_metrics()
        with _guarded:
            context.detach(self._reset)
            self._span.end()

    def set(self, attributes: Attributes) -> None:
        usable = _usable(attributes)
        self._attributes.update(usable)
        with _guarded:
            self._span.set_attributes(usable)

    @_guarded
    def event(self, name: str, attributes: Attributes = _NONE) -> None:
        self._span.add_event(name, _usable(attributes))

    def fail(self, error: BaseException | str) -> None:
        if isinstance(error, BaseException):
            self._outcome = _outcome_of(error)
            error = type(error).__qualname__  # its text may contain names and addresses
        self.set({names.ERROR_TYPE: error})
        with _guarded:
            self._span.set_status(StatusCode.ERROR)

    def end(self, response: Any, error: BaseException | None, *, sent: int, received: int) -> None:
        if response is not None:
            self.set({names.STATUS_CODE: response.status, names.REQUEST_ID: response.request_id})
        if error is not None:
            self.fail(str(response.status) if response is not None and response.status >= 400 else error)
        self.__exit__(None, None, None)
        for direction, size in (("transmit", sent), ("receive", received)):
            if size:
                self._telemetry.record(names.TRANSFERRED, size, {names.DIRECTION: direction})

    def _record_metrics(self) -> None:
        values = {"histogram": time.perf_counter() - self._began, "counter": 1, "up_down_counter": -1}
        for metric in self._about.metrics:
            self._telemetry.record(metric, values[metric.kind], self._attributes)


class _Call(_Span):
    def __init__(self, telemetry: OpenTelemetry, name: str, path: str) -> None:
        super().__init__(telemetry, name, _CALL, {names.OPERATION: name, names.SIGNING_ID: _signing_of(path)})
        self._attempts = 0

    def wait(self, seconds: float, acquired: bool) -> None:
        if seconds >= _SHORTEST_WAIT or not acquired:
            attributes = {names.WAIT: seconds, names.WAIT_PASSED: acquired}
            self.event(names.WAIT_EVENT, attributes)
            self._telemetry.record(names.WAIT_DURATION, seconds, attributes)

    def refresh(self, result: str, seconds: float) -> None:
        self.event(names.REFRESH_EVENT, {names.REFRESH_RESULT: result, names.WAIT: seconds})

    def retry(self, delay: float, error: BaseException) -> None:
        self.event(names.RETRY_EVENT, {names.RETRY_DELAY: delay, names.ERROR_TYPE: type(error).__qualname__})

    def reading(self, operation: str) -> None:
        self.event(names.READING_EVENT, {names.OPERATION: _describe(operation)[0]})

    def verdict(self, verdict: str) -> None:
        self.event(names.VERDICT_EVENT, {names.VERDICT: verdict})

    def attempt(self, name: str, method: str, origin: str, path: str, number: int) -> Span:
        # A request to any other endpoint is named by its method and template: the values that fill it may be anything.
        own, _, query = path.partition("?")
        template, shown = _describe(name.removeprefix(f"{method} ") if " " in name else own)
        name, parts = _describe(name)[0], urlsplit(origin)
        if name == self._attributes[names.OPERATION]:
            self._attempts = number
        attributes: Attributes = {
            names.METHOD: method,
            names.ADDRESS: parts.hostname or "",
            names.PORT: parts.port or (443 if parts.scheme == "https" else 80),
            names.URL: origin + shown + (f"?{_REDACTED}" if query else ""),
            names.URL_TEMPLATE: template,
            names.OPERATION: name,
            names.RESEND_COUNT: number - 1 or None,
            names.SIGNING_ID: _signing_of(path),
        }
        return _Span(self._telemetry, f"{method} {template}", _ATTEMPT, attributes).__enter__()

    def _record_metrics(self) -> None:
        super()._record_metrics()
        if self._attempts:
            self._telemetry.record(names.OPERATION_ATTEMPTS, self._attempts, self._attributes)
        if self._outcome == "unknown":
            self._telemetry.record(names.UNKNOWN_OUTCOMES, 1, self._attributes)


def _outcome_of(error: BaseException) -> str:
    if getattr(error, "effect", None) == "unknown":
        return "unknown"
    return "cancelled" if isinstance(error, asyncio.CancelledError | GeneratorExit) else "error"


def _parse_context(text: object) -> trace.SpanContext | None:
    found = _TRACEPARENT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    parsed = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags))
    return parsed if parsed.is_valid else None


# Privacy


def _usable(attributes: Attributes) -> dict[str, str | bool | int | float]:
    """Leave out text in the place of an id that no id of the service has: it may name a person or a file."""
    return {
        name: value
        for name, value in attributes.items()
        if value is not None and (name not in _ID_NAMES or _ID.fullmatch(str(value)))
    }


def _signing_of(path: str) -> str | None:
    found = _SIGNING.search(path)
    return None if found is None else found[1]


def _describe(path: str) -> tuple[str, str]:
    """Return the template of a path, or of an operation's name, and the path with its ids but no other values."""
    before, *segments = path.split("/")
    templates, shown = [before], [before]
    for segment in segments:
        if segment.startswith("{"):
            pair = segment, _REDACTED
        elif before in _ID_PLACEHOLDERS:
            pair = _ID_PLACEHOLDERS[before], segment if _ID.fullmatch(segment) else _REDACTED
        else:
            pair = (segment, segment) if _FIXED.fullmatch(segment) else (_REDACTED, _REDACTED)
        templates.append(pair[0])
        shown.append(pair[1])
        before = segment
    return "/".join(templates), "/".join(shown)
