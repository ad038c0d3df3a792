"""What the SDK, a sampler, a processor, an exporter or an instrument raises fails no call, and is logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace

from signing_async import NewRecipient, SigningClient, SigningPackage
from signing_async.sandbox import Sandbox
from signing_async.telemetry import otel  # it logs an error once in a process: each test forgets what was logged
from tests.pdfs import make_pdf


class BrokenError(Exception):
    """The error of a broken part of the SDK."""


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("methods", "is_logged"),
    [
        (["trace.sampling.ParentBased.should_sample"], True),
        (["trace.SynchronousMultiSpanProcessor.on_start"], True),
        (["trace.SynchronousMultiSpanProcessor.on_end"], True),
        (["trace.export.in_memory_span_exporter.InMemorySpanExporter.export"], False),  # the SDK itself logs this
        (["metrics.Counter.add", "metrics.UpDownCounter.add", "metrics.Histogram.record"], True),
    ],
)
async def test_broken_part_of_the_sdk_fails_nothing(
    methods: list[str],
    is_logged: bool,
    sandbox: Sandbox,
    client: SigningClient,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    otel._report.cache_clear()

    def fail(*_: Any, **__: Any) -> None:
        raise BrokenError

    for method in methods:
        monkeypatch.setattr(f"opentelemetry.sdk.{method}", fail)
    package = SigningPackage("Lease", "EN", [make_pdf()], [NewRecipient("anna@example.com")], key="1")
    await client.dispatch(package, tmp_path / "journal")
    assert len(sandbox.notifications) == 1
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert caplog.text.count("OpenTelemetry failed (BrokenError)") == is_logged
