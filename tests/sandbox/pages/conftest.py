"""Fixtures of the pages' tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from signing_async.sandbox import Sandbox
from tests.sandbox.browsing import Visitor
from tests.sandbox.receiving import Receiver


@pytest_asyncio.fixture
async def visitor(signing_sandbox: Sandbox) -> AsyncIterator[Visitor]:
    """A person with a browser."""
    jar = aiohttp.CookieJar(unsafe=True)  # the sandbox's host is an address, which has cookies in browsers too
    async with aiohttp.ClientSession(signing_sandbox.base_url, cookie_jar=jar) as session:
        yield Visitor(signing_sandbox, session)


@pytest.fixture
def receiver(receiver: Receiver) -> str:
    """The URL of a webhook receiver, without a path."""
    return receiver.url.removesuffix("/hook")
