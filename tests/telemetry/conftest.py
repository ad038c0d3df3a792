"""The spans and metrics that a test records, in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from signing_async import telemetry
from signing_async.telemetry import names


class Recorded:
    """What was recorded since the fixture was set up."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.traces = TracerProvider()
        self.traces.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.meters = MeterProvider([self._reader])

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        """The ended spans, in the order of their ends."""
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def attempts(self, parent: ReadableSpan) -> list[ReadableSpan]:
        """The client spans under this one."""
        return [span for span in self.children(parent) if span.kind is trace.SpanKind.CLIENT]

    def children(self, parent: ReadableSpan) -> list[ReadableSpan]:
        return [span for span in self.spans if span.parent is not None and span.parent == parent.context]

    def points(self, metric: names.Metric) -> list[Any]:
        """The data points of a metric."""
        data = self._reader.get_metrics_data()
        if data is None:
            return []
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
        found = [each for scope in scopes for each in scope.metrics if each.name == metric.name]
        return [point for each in found for point in each.data.data_points]

    def total(self, metric: names.Metric, **attributes: object) -> float:
        """The sum of a counter, or the number of values of a histogram, over the points with these attributes.

        ``__`` stands for a dot in the names.
        """
        return sum(
            getattr(point, "count", None) or getattr(point, "value", 0)
            for point in self.points(metric)
            if all(point.attributes.get(name.replace("__", ".")) == value for name, value in attributes.items())
        )

    def text(self) -> str:
        """Everything that was recorded."""
        data = self._reader.get_metrics_data()
        return json.dumps([json.loads(span.to_json()) for span in self.spans]) + (
            "" if data is None else data.to_json()
        )

    def clear(self) -> None:
        self._exporter.clear()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """The spans and metrics of the test."""
    found = Recorded()
    # The SDK of a process is set once: the test replaces it behind the API's back.
    with monkeypatch.context() as patched:
        patched.setattr(telemetry, "_loaded", None)
        patched.setattr(trace, "_TRACER_PROVIDER", found.traces)
        patched.setattr(metrics._internal, "_METER_PROVIDER", found.meters)
        yield found
    found.traces.shutdown()
    found.meters.shutdown()


def events(span: ReadableSpan, name: str) -> list[dict[str, Any]]:
    """The attributes of a span's events of this name."""
    return [dict(event.attributes or {}) for event in span.events if event.name == name]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})
