"""What OpenTelemetry adds to small calls: without an SDK, and with one whose exporter drops everything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from signing_async import SigningClient
from signing_async.telemetry import switch

from .charts import Chart
from .measure import COMPARED, compared, interleaved, panel, quick, ratio
from .report import Table, draw, judge, show
from .rivals import TOKEN, aiohttp_session
from .server import Server, running

_CALLS = 20 if quick() else 200
_ROUNDS, _SECONDS = 101, 20.0
_OFF, _UNUSED, _SPANS, _ALL = "telemetry=False", "no SDK", "SDK: spans", "SDK: spans and metrics"


class _Drop(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def main() -> None:
    with running() as server:
        asyncio.run(_compare(server))


async def _compare(server: Server) -> None:
    spans = TracerProvider()
    spans.add_span_processor(SimpleSpanProcessor(_Drop()))
    meters = MeterProvider([InMemoryMetricReader()])
    async with aiohttp_session() as session:
        off = SigningClient(server.plain, TOKEN, session=session, telemetry=False)
        on = SigningClient(server.plain, TOKEN, session=session, telemetry=True)
        candidates: dict[str, Callable[[], Awaitable[object]] | None] = {
            _OFF: _calls(off, None, None),
            _UNUSED: _calls(on, None, None),
            _SPANS: _calls(on, spans, None),
            _ALL: _calls(on, spans, meters),
        }
        samples = await interleaved(
            candidates, rounds=_ROUNDS, seconds=_SECONDS, expect=_CALLS * len("ada@example.com"), server=server.cpu
        )
    spans.shutdown()
    meters.shutdown()
    title = f"me(), {_CALLS} calls one after the other (a piece is a call)"
    note = f"Relative to {_OFF}. Medians of {len(samples[_OFF])} rounds."
    show(Table(title, COMPARED, compared(samples, _OFF, count=_CALLS), note))
    judge("a call without an SDK: CPU, of a call without telemetry", ratio(samples, _UNUSED, _OFF, "cpu"), at_most=1.03)
    axis = "CPU time relative to telemetry=False; shorter is better"
    draw(Chart("telemetry", "OpenTelemetry", axis, [panel("me()", samples, _OFF, "cpu")]))


def _calls(
    client: SigningClient, spans: TracerProvider | None, meters: MeterProvider | None
) -> Callable[[], Awaitable[int]]:
    telemetry: Any = None

    async def run() -> int:
        nonlocal telemetry
        size = 0
        with _configured(spans, meters, telemetry):
            for _ in range(_CALLS):
                size += len((await client.me()).email or "")
            telemetry = switch._telemetry
        return size

    return run


@contextlib.contextmanager
def _configured(spans: TracerProvider | None, meters: MeterProvider | None, telemetry: Any) -> Iterator[None]:
    """Let the process have these providers: it can set them once, and the candidates take turns."""
    with (
        mock.patch.object(trace, "_TRACER_PROVIDER", spans),
        mock.patch.object(metrics._internal, "_METER_PROVIDER", meters),
        mock.patch.object(switch, "_telemetry", telemetry),
    ):
        yield
