"""Fixtures of the sandbox's own tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from signing_async.sandbox import Sandbox
from tests.sandbox.browsing import Visitor
from tests.sandbox.receiving import SECRET, Receiver
from tests.sandbox.serving import CALLBACK, Caller, caller


@pytest_asyncio.fixture
async def call(signing_sandbox: Sandbox) -> AsyncIterator[Caller]:
    """A caller of the API with the default user's token."""
    async with caller(signing_sandbox) as call:
        yield call


@pytest_asyncio.fixture
async def visitor(signing_sandbox: Sandbox) -> AsyncIterator[Visitor]:
    """A person with a browser."""
    jar = aiohttp.CookieJar(unsafe=True)  # the sandbox's host is an address, which has cookies in browsers too
    async with aiohttp.ClientSession(signing_sandbox.base_url, cookie_jar=jar) as session:
        yield Visitor(signing_sandbox, session)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """A receiver on a free port."""
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/{name}", receiver.take)
    async with TestServer(app) as server:
        receiver.base = str(server.make_url("/")).rstrip("/")
        yield receiver


@pytest.fixture
def hooked(signing_sandbox: Sandbox, receiver: Receiver) -> Sandbox:
    """A sandbox that delivers to the receiver."""
    signing_sandbox.webhooks.register(receiver.url, SECRET)
    return signing_sandbox


@pytest.fixture
def app(signing_sandbox: Sandbox) -> Any:
    """A registered application."""
    return signing_sandbox.register_app(redirect_uri=CALLBACK, name="My app")
