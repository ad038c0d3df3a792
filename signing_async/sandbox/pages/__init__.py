"""The pages for people: HTML that works without scripts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from ..refused import Refused, not_found
from ..request_log import is_api_path
from ..responses import method_not_allowed
from . import apps, dashboard, faults, signing_page, webhooks
from .site import APPS, DASHBOARD, SCRIPT, STATE, STYLE, Filled, page

__all__ = ["ROUTES", "STATE", "errors"]

_TITLES = {403: "Not allowed", 404: "Not found", 405: "Not possible"}


@web.middleware
async def errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Show errors to browsers as pages, and refuse requests that other sites make a browser send."""
    own = request.path in {"/", APPS, apps.AUTHORIZE, DASHBOARD} or request.path.startswith(f"{DASHBOARD}/")
    if is_api_path(request.path) or not (own or "text/html" in request.headers.get("Accept", "")):
        return await handler(request)
    try:
        request.app[STATE].forms.check_site(request)
        return await handler(request)
    except Refused as error:
        refused = error
    except web.HTTPNotFound:
        refused = not_found("page")
    except web.HTTPMethodNotAllowed as error:
        refused = method_not_allowed(request.method, error)
    title = _TITLES.get(refused.status, "That did not work")
    response = page(request, "error.html", Filled(problem=refused.message, status=refused.status), title=title)
    response.headers.extend(refused.headers)
    return response


async def _to_dashboard(_: web.Request) -> web.Response:
    raise web.HTTPFound(DASHBOARD)


async def _asset(content: bytes, kind: str, _: web.Request) -> web.Response:
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}
    return web.Response(body=content, content_type=kind, charset="utf-8", headers=headers)


ROUTES: list[web.RouteDef] = [
    web.get("/", _to_dashboard),
    web.get("/sandbox/style.css", partial(_asset, STYLE, "text/css")),
    web.get("/sandbox/refresh.js", partial(_asset, SCRIPT, "text/javascript")),
    *apps.ROUTES,
    *dashboard.ROUTES,
    *signing_page.ROUTES,
    *webhooks.ROUTES,
    *faults.ROUTES,
]
