"""A service with endpoints that the package does not know: templates, exports, a cancel operation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.servers import Web, serving


@asynccontextmanager
async def template_service() -> AsyncIterator[Web]:
    templates: dict[str, dict[str, Any]] = {"t-1": {"id": "t-1", "name": "Lease", "pages": 2, "colour": "red"}}
    signing: dict[str, Any] = {"id": "s-1", "name": "Lease", "is_draft": False, "cancelled_at": None}

    async def handle(request: web.Request) -> web.Response:
        body = await request.post() if request.content_type.startswith("multipart/") else None
        if request.path.startswith("/api/1.0/templates"):
            return _templates(request, dict(body) if body is not None else await _json(request))
        if request.path.startswith("/api/1.0/exports/"):
            return web.Response(text="id,name\n" * 1000, content_type="text/csv")
        if request.path.endswith("/cancel"):
            signing["cancelled_at"] = "2031-01-31T09:00:00Z"
        return web.json_response(signing, headers={"X-RateLimit-Remaining": "99", "X-Request-Id": "req_1"})

    def _templates(request: web.Request, body: dict[str, Any]) -> web.Response:
        key = request.path.removeprefix("/api/1.0/templates").strip("/")
        if request.method == "POST":
            made = {
                "id": f"t-{len(templates) + 1}",
                **{name: value for name, value in body.items() if isinstance(value, str)},
            }
            templates[made["id"]] = made
            return web.json_response(made, status=201)
        if request.method == "DELETE":
            templates.pop(key, None)
            return web.Response(status=204)
        if key:
            return web.json_response(templates[key])
        first = int(request.query.get("cursor", "0"))
        page = list(templates.values())[first : first + 1]
        following = str(first + 1) if first + 1 < len(templates) else None
        return web.json_response({"data": page, "next_cursor": following})

    async with serving(handle) as server:
        yield server


async def _json(request: web.Request) -> Any:
    return await request.json() if request.body_exists and request.content_type == "application/json" else {}
