"""Fixtures of the sandbox's own tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from signing_async.sandbox import Sandbox
from tests.sandbox.serving import Caller, caller


@pytest_asyncio.fixture
async def call(signing_sandbox: Sandbox) -> AsyncIterator[Caller]:
    """A caller of the API with the default user's token."""
    async with caller(signing_sandbox) as call:
        yield call
