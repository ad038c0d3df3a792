"""What the SDK, a sampler, a processor or an exporter raises fails no call, and is logged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import Counter, Histogram, UpDownCounter
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult

from signing_async import NewRecipient, SigningClient, SigningPackage
from signing_async.sandbox import Sandbox
from signing_async.telemetry import names
from tests.pdfs import make_pdf
from tests.telemetry.recorded import Recorded


class SamplerError(Exception): ...


class StartError(Exception): ...


class EndError(Exception): ...


class BrokenSampler(Sampler):
    def should_sample(self, *_: Any, **__: Any) -> SamplingResult:
        raise SamplerError

    def get_description(self) -> str:
        return "broken"


class BrokenAtStart(SpanProcessor):
    def on_start(self, span: Any, parent_context: Any = None) -> None:
        raise StartError


class BrokenAtEnd(SpanProcessor):
    def on_end(self, span: ReadableSpan) -> None:
        raise EndError


class BrokenExporter(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise ZeroDivisionError


async def _dispatch(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    package = SigningPackage("Lease", "EN", [make_pdf()], [NewRecipient("anna@example.com")], key="1")
    await client.dispatch(package, tmp_path / "journal")
    assert len(sandbox.notifications) == 1
    assert trace.get_current_span() is trace.INVALID_SPAN


@pytest.mark.parametrize(
    ("broken", "logged"),
    [
        (BrokenSampler(), "SamplerError"),
        (BrokenAtStart(), "StartError"),
        (BrokenAtEnd(), "EndError"),
        (SimpleSpanProcessor(BrokenExporter()), None),  # the SDK itself logs this
    ],
    ids=["sampler", "start", "end", "exporter"],
)
async def test_broken_part_of_the_sdk_for_traces_fails_nothing(
    broken: Sampler | SpanProcessor,
    logged: str | None,
    sandbox: Sandbox,
    client: SigningClient,
    recorded: Recorded,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    provider = TracerProvider(broken) if isinstance(broken, Sampler) else TracerProvider()
    if isinstance(broken, SpanProcessor):
        provider.add_span_processor(broken)
    with monkeypatch.context() as patched:
        patched.setattr(trace, "_TRACER_PROVIDER", provider)
        await _dispatch(sandbox, client, tmp_path)
    assert recorded.total(names.OPERATION_DURATION, signing_async__operation="signings.send") == 1
    assert caplog.text.count("OpenTelemetry failed") == (logged is not None)
    assert f"OpenTelemetry failed ({logged})" in caplog.text or logged is None


async def test_broken_instrument_fails_nothing(
    sandbox: Sandbox, client: SigningClient, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for kind, method in ((Counter, "add"), (UpDownCounter, "add"), (Histogram, "record")):
        monkeypatch.setattr(f"opentelemetry.sdk.metrics.{kind.__name__}.{method}", fail)
    await _dispatch(sandbox, client, tmp_path)
    assert recorded.one("signings.send")
