"""An app that the sandbox knows, with a token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from signing_async import OAuth
from signing_async.sandbox import Sandbox


@asynccontextmanager
async def authorized(sandbox: Sandbox) -> AsyncIterator[OAuth]:
    app = sandbox.register_app(redirect_uri="http://127.0.0.1:1/cb")
    async with OAuth(
        sandbox.base_url, client_id=app.client_id, client_secret=app.client_secret, redirect_uri=app.redirect_uri
    ) as oauth:
        await oauth.exchange(sandbox.authorize(app))
        yield oauth
