"""Fixtures of the pages' tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from signing_async.sandbox import Sandbox
from tests.sandbox.browsing import Visitor


@pytest_asyncio.fixture
async def visitor(signing_sandbox: Sandbox) -> AsyncIterator[Visitor]:
    """A person with a browser."""
    jar = aiohttp.CookieJar(unsafe=True)  # the sandbox's host is an address, which has cookies in browsers too
    async with aiohttp.ClientSession(signing_sandbox.base_url, cookie_jar=jar) as session:
        yield Visitor(signing_sandbox, session)


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[str]:
    """A webhook receiver that accepts everything at /ok and nothing at /bad."""

    async def ok(_: web.Request) -> web.Response:
        return web.Response(status=202)

    async def bad(_: web.Request) -> web.Response:
        return web.Response(status=500)

    async def verbose(_: web.Request) -> web.Response:
        return web.Response(text="<taken>", headers={"X-Reply": "yes", "Set-Cookie": "session=1"})

    app = web.Application()
    app.add_routes([web.post("/ok", ok), web.post("/bad", bad), web.post("/verbose", verbose)])
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")
