"""Fixtures of the telemetry tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import metrics, trace

from signing_async import telemetry
from tests.telemetry.recorded import Recorded


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
