"""A proxy of the sandbox that alters the signings in its responses."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from signing_async import RetryPolicy, SigningClient
from signing_async.sandbox import Sandbox
from tests.dispatch.observing import Office
from tests.servers import serving

_RESPONDS_WITH_SIGNING = re.compile(r"GET /api/1\.0/signings/[^/]+|POST /api/1\.0/signings")


class Proxy:
    """An office behind the proxy; ``alter`` returns what is shown of a signing, and may be replaced at any time."""

    office: Office

    def __init__(self, alter: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.alter = alter
        self.missing: set[str] = set()
        """The ids of signings that the proxy does not find."""


@contextlib.asynccontextmanager
async def running_proxy(sandbox: Sandbox, path: Path) -> AsyncIterator[Proxy]:
    """A proxy that alters nothing yet, and an office with the journal ``path``."""

    async def forward(request: web.Request) -> web.Response:
        url, body = sandbox.base_url + request.raw_path, await request.read()
        if proxy.missing.intersection(request.path.split("/")):
            return web.json_response({"code": "not_found"}, status=404)
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        async with session.request(request.method, url, headers=headers, data=body) as response:
            body = await response.read()
        if response.ok and _RESPONDS_WITH_SIGNING.fullmatch(f"{request.method} {request.path}"):
            body = json.dumps(proxy.alter(json.loads(body))).encode()
        return web.Response(body=body, status=response.status, content_type=response.content_type)

    proxy = Proxy(dict)
    async with aiohttp.ClientSession() as session, serving(forward) as server:
        retry = RetryPolicy(base_delay=0.01, settle=0.1)
        async with SigningClient(server.origin, sandbox.access_token(), retry=retry) as client:
            proxy.office = Office(sandbox, client, path)
            yield proxy


def replacing(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that replaces these fields."""
    return lambda signing: signing | fields
