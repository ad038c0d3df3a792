"""Fixtures of the sandbox's own tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest_asyncio

from signing_async.sandbox import Sandbox
from tests.sandbox.serving import Caller


@pytest_asyncio.fixture
async def call(signing_sandbox: Sandbox) -> AsyncIterator[Caller]:
    """A caller of the test's sandbox with the default user's token."""
    headers = {"Authorization": f"Bearer {signing_sandbox.access_token()}"}
    async with aiohttp.ClientSession(signing_sandbox.base_url, headers=headers) as session:
        yield Caller(signing_sandbox, session)
