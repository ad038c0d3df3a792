"""What the SDK, a sampler, a processor or an exporter raises fails no call, and is logged."""

from __future__ import annotations

import asyncio
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
from signing_async.telemetry import names, otel
from signing_async.webhooks import Receiver, WebhookVerifier
from tests.pdfs import make_pdf
from tests.telemetry.recorded import Recorded
from tests.webhooks.deliveries import event_body, signed


class Broken(RuntimeError):
    pass


class BrokenSampler(Sampler):
    def should_sample(self, *_: Any, **__: Any) -> SamplingResult:
        raise Broken

    def get_description(self) -> str:
        return "broken"


class BrokenAtStart(SpanProcessor):
    def on_start(self, span: Any, parent_context: Any = None) -> None:
        raise Broken


class BrokenAtEnd(SpanProcessor):
    def on_end(self, span: ReadableSpan) -> None:
        raise Broken


class BrokenExporter(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise Broken


def _provider(broken: str) -> TracerProvider:
    if broken == "sampler":
        return TracerProvider(BrokenSampler())
    processors = {
        "start": BrokenAtStart(),
        "end": BrokenAtEnd(),
        "exporter": SimpleSpanProcessor(BrokenExporter()),
    }
    provider = TracerProvider()
    provider.add_span_processor(processors[broken])
    return provider


async def _do_everything(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    package = SigningPackage("Lease", "EN", [make_pdf()], [NewRecipient("anna@example.com")], key="1")
    results = [each async for each in client.dispatch_many([package], tmp_path / "journal")]
    assert [each.error for each in results] == [None]
    assert len(sandbox.notifications) == 1
    body = event_body("1")
    decision = await Receiver(WebhookVerifier("secret"), asyncio.Queue()).receive(signed(body, "secret"), body)
    assert decision.status == 202
    assert trace.get_current_span() is trace.INVALID_SPAN


@pytest.mark.parametrize("broken", ["sampler", "start", "end", "exporter"])
async def test_broken_part_of_the_sdk_for_traces_fails_nothing(
    broken: str,
    sandbox: Sandbox,
    client: SigningClient,
    recorded: Recorded,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(otel._guarded, "has_failed", False)
    with monkeypatch.context() as patched:
        patched.setattr(trace, "_TRACER_PROVIDER", _provider(broken))
        await _do_everything(sandbox, client, tmp_path)
    assert recorded.total(names.OPERATION_DURATION, signing_async__operation="signings.send") == 1
    if broken != "exporter":  # the SDK itself logs this
        assert caplog.text.count("OpenTelemetry failed (Broken)") == 1


async def test_broken_instrument_fails_nothing(
    sandbox: Sandbox, client: SigningClient, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any) -> None:
        raise Broken

    for kind, method in ((Counter, "add"), (UpDownCounter, "add"), (Histogram, "record")):
        monkeypatch.setattr(f"opentelemetry.sdk.metrics.{kind.__name__}.{method}", fail)
    await _do_everything(sandbox, client, tmp_path)
    assert recorded.one("signings.send")
