"""Records spans and metrics with OpenTelemetry's API package; no SDK is needed."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Self
from urllib.parse import urlsplit

from opentelemetry import context, metrics, trace
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .._version import __version__
from . import names
from .names import Metric, SpanType
from .null import NOTHING, WAIT_EVENT, Attributes, Span, Telemetry

__all__ = ["OpenTelemetry"]

_SCOPE = "signing_async", __version__
_PROPAGATOR = TraceContextTextMapPropagator()
_TRACEPARENT = "traceparent"
_SIGNING = re.compile(r"/signings/([\w-]+)(?=[/?]|$)", re.ASCII)
_ID = re.compile(r"[\w-]+", re.ASCII)
_ID_NAMES = {names.SIGNING_ID, names.DOCUMENT_ID, names.EVENT_ID}
_PLACEHOLDERS = {"signings": "{id}", "documents": "{document_id}", "recipients": "{recipient_id}"}
# A segment that is not redacted: a word of an endpoint, a version or a placeholder.
_FIXED = re.compile(r"|[a-z][A-Za-z_-]*|\d{1,2}\.\d{1,2}|v\d{1,2}|\{\w+\}", re.ASCII)


log: logging.Logger = logging.getLogger("signing_async")


@contextmanager
def _guarded() -> Iterator[None]:
    """Log what a sampler, a processor or another part of the SDK raises; the observed call continues."""
    try:
        yield
    except Exception as error:
        _report(type(error).__name__)


@cache
def _report(error: str) -> None:
    log.warning("OpenTelemetry failed (%s): spans or metrics are missing; logged once", error)


class OpenTelemetry(Telemetry):
    def __init__(self) -> None:
        self.tracer: trace.Tracer = trace.get_tracer(*_SCOPE, schema_url=names.SCHEMA_URL)
        meter = metrics.get_meter(*_SCOPE, schema_url=names.SCHEMA_URL)
        self._measured: dict[Hashable, Mapping[Metric, float]] = {}
        self._instruments: dict[str, Callable[..., None]] = {}
        for metric in names.METRICS:
            name, unit = metric.name, metric.unit
            match metric.kind:
                case "gauge":
                    meter.create_observable_gauge(name, [partial(self._observe, metric)], unit)
                case "histogram":
                    histogram = meter.create_histogram(
                        name, unit, explicit_bucket_boundaries_advisory=metric.boundaries
                    )
                    self._instruments[name] = histogram.record
                case "counter":
                    self._instruments[name] = meter.create_counter(name, unit).add
                case _:
                    self._instruments[name] = meter.create_up_down_counter(name, unit).add

    def call(self, name: str, path: str) -> _Call:
        return _Call(self, _template_of(name), path)

    def span(self, about: SpanType, attributes: Attributes = NOTHING, *, links: Iterable[str | None] = ()) -> _Span:
        return _Span(self, about, attributes, links)

    @contextmanager
    def timed(self, metric: Metric, attributes: Attributes = NOTHING) -> Iterator[None]:
        began, error = time.perf_counter(), None
        try:
            yield
        except BaseException as raised:
            error = type(raised).__qualname__
            raise
        finally:
            self.record(metric, time.perf_counter() - began, {**attributes, names.ERROR_TYPE: error})

    @_guarded()
    def record(self, metric: Metric, value: float, attributes: Attributes = NOTHING) -> None:
        found = {name: attributes[name] for name in metric.attributes if attributes.get(name) is not None}
        self._instruments[metric.name](value, found)

    async def measure(self, source: Hashable, read: Callable[[], Awaitable[Mapping[Metric, float]]]) -> None:
        self._measured[source] = await read()

    def forget(self, source: Hashable) -> None:
        self._measured.pop(source, None)

    def _observe(self, metric: Metric, _: metrics.CallbackOptions) -> list[metrics.Observation]:
        # Another thread exports the values, and does so more often than they are measured.
        values = [measured[metric] for measured in tuple(self._measured.values()) if metric in measured]
        combine: Callable[[list[float]], float] = max if metric is names.OLDEST_PENDING else sum
        return [metrics.Observation(combine(values))] if values else []


class _Span(Span):
    def __init__(
        self, telemetry: OpenTelemetry, about: SpanType, attributes: Attributes, links: Iterable[str | None] = ()
    ) -> None:
        self._telemetry, self._about = telemetry, about
        self._attributes = _given(attributes)
        self._outcome = "success"
        linked = [trace.Link(_parse_context(text)) for text in links if text is not None]
        kind = SpanKind[about.kind.upper()]
        self._span: trace.Span = trace.INVALID_SPAN
        with _guarded():
            self._span = telemetry.tracer.start_span(about.name, None, kind, self._attributes, linked)
        self._began = time.perf_counter()

    @property
    def context(self) -> str | None:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span))
        return carrier.get(_TRACEPARENT)

    def __enter__(self) -> Self:
        self._reset = context.attach(trace.set_span_in_context(self._span))
        self._record({"up_down_counter": 1})
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.fail(error)
        if self._about.outcome is not None and self._about.outcome not in self._attributes:
            self.set({self._about.outcome: self._outcome})
        # Exemplars point to the current span.
        self._record({"histogram": time.perf_counter() - self._began, "counter": 1, "up_down_counter": -1})
        context.detach(self._reset)
        with _guarded():
            self._span.end()

    def set(self, attributes: Attributes) -> None:
        given = _given(attributes)
        self._attributes.update(given)
        self._span.set_attributes(given)

    def fail(self, error: BaseException | str) -> None:
        if isinstance(error, BaseException):
            is_cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
            is_unknown = getattr(error, "effect", None) == "unknown"
            self._outcome = "unknown" if is_unknown else "cancelled" if is_cancelled else "error"
            error = type(error).__qualname__  # its text may contain names and addresses
        self.set({names.ERROR_TYPE: error})
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

    def _record(self, values: Mapping[str, float]) -> None:
        for metric in self._about.metrics:
            if metric.kind in values:
                self._telemetry.record(metric, values[metric.kind], self._attributes)


class _Call(_Span):
    def __init__(self, telemetry: OpenTelemetry, name: str, path: str) -> None:
        about = SpanType(name, names.OUTCOME, (names.OPERATION_DURATION,))
        super().__init__(telemetry, about, {names.OPERATION: name, names.SIGNING_ID: _signing_of(path)})
        self._attempts = 0

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        super().__exit__(_, error, __)
        if self._attempts:
            self._telemetry.record(names.OPERATION_ATTEMPTS, self._attempts, self._attributes)
        if self._outcome == "unknown":
            self._telemetry.record(names.UNKNOWN_OUTCOMES, 1, self._attributes)

    def event(self, name: str, attributes: Attributes) -> None:
        self._span.add_event(name, _given(attributes))
        if name == WAIT_EVENT:
            self._telemetry.record(names.WAIT_DURATION, float(attributes[names.WAIT] or 0), attributes)

    def reading(self, operation: str) -> None:
        super().reading(_template_of(operation))

    def attempt(self, name: str, method: str, origin: str, path: str, number: int) -> Span:
        # A request to any other endpoint is named by its method and template: the values that fill it may be anything.
        operation, signing, server = _template_of(name), _signing_of(path), urlsplit(origin)
        template = operation.removeprefix(f"{method} ") if " " in name else _template_of(path)
        if operation == self._about.name:
            self._attempts = number
        shown = template if signing is None else template.replace("{id}", signing, 1)
        attributes: Attributes = {
            names.METHOD: method,
            names.ADDRESS: server.hostname or "",
            names.PORT: server.port or (443 if server.scheme == "https" else 80),
            "url.full": origin + re.sub(r"\{\w+\}", "REDACTED", shown) + ("?REDACTED" if "?" in path else ""),
            names.URL_TEMPLATE: template,
            names.OPERATION: operation,
            "http.request.resend_count": number - 1 or None,
            names.SIGNING_ID: signing,
        }
        about = SpanType(f"{method} {template}", None, (names.REQUEST_DURATION, names.ACTIVE_REQUESTS), "client")
        return _Span(self._telemetry, about, attributes).__enter__()


def _parse_context(text: str) -> trace.SpanContext:
    """Return the context of another span. OpenTelemetry ignores links to invalid ones."""
    carried = _PROPAGATOR.extract({_TRACEPARENT: text}, context.Context())
    return trace.get_current_span(carried).get_span_context()


def _given(attributes: Attributes) -> dict[str, str | bool | int | float]:
    """Leave out text in the place of an id that no id of the service has: it may name a person or a file."""
    given = {name: value for name, value in attributes.items() if value is not None}
    return {name: value for name, value in given.items() if name not in _ID_NAMES or _ID.fullmatch(str(value))}


def _signing_of(path: str) -> str | None:
    found = _SIGNING.search(path)
    return None if found is None else found[1]


def _template_of(path: str) -> str:
    """Return the template of a path, or of an operation's name that has one. Any other value is redacted."""
    before, *segments = path.partition("?")[0].split("/")
    template = [before]
    for segment in segments:
        placeholder = None if segment.startswith("{") else _PLACEHOLDERS.get(before)
        template.append(placeholder or (segment if _FIXED.fullmatch(segment) else "REDACTED"))
        before = segment
    return "/".join(template)
