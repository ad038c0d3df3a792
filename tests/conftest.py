"""Fixtures that every test may use: a sandbox, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from signing_async import RetryPolicy, SigningClient
from signing_async.sandbox import Sandbox


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    """The whole service, on a free port."""
    async with Sandbox(seed=7) as running:
        yield running


@pytest.fixture
async def client(sandbox: Sandbox) -> AsyncIterator[SigningClient]:
    """A client of the sandbox that retries without waiting long."""
    async with SigningClient(
        sandbox.base_url, sandbox.access_token(), retry=RetryPolicy(base_delay=0.01)
    ) as ready:
        yield ready
