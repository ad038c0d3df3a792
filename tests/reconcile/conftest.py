"""A service whose effects show late."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.reconcile.late_service import LateService


@pytest.fixture
async def service() -> AsyncIterator[LateService]:
    async with LateService().running() as running:
        yield running
