"""Fixtures of the telemetry tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.telemetry.recorded import Recorded, recording


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """The spans and metrics of the test."""
    with recording(monkeypatch) as found:
        yield found
