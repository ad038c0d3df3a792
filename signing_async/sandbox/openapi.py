"""The OpenAPI 3.1 document of the service, as this profile answers."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from .profile import Profile


def document(profile: Profile) -> dict[str, Any]:
    """The document."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Electronic Signing Service (sandbox)", "version": "1.0"},
        "paths": {},
    }


async def serve(profile: Profile, _: web.Request) -> web.Response:
    """The document over HTTP."""
    return web.json_response(document(profile))
