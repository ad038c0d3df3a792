"""The pages for people: HTML that works without scripts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from ..refused import Refused, not_found
from ..request_log import is_api_path
from ..responses import method_not_allowed
from ..state import State
from .apps import AUTHORIZE, Apps
from .dashboard import Dashboard
from .faults import FaultsPage
from .signing_page import SigningPage
from .site import APPS, DASHBOARD, SCRIPT, STYLE, Site
from .webhooks import Webhooks

TITLES = {403: "Not allowed", 404: "Not found", 405: "Not possible"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pages:
    """All pages of one sandbox."""

    def __init__(self, state: State) -> None:
        self._site = Site(state)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        parts = (part(self._site) for part in (Apps, Dashboard, SigningPage, Webhooks, FaultsPage))
        return [
            web.get("/", _to_dashboard),
            web.get("/sandbox/style.css", partial(_asset, STYLE, "text/css")),
            web.get("/sandbox/refresh.js", partial(_asset, SCRIPT, "text/javascript")),
            *(route for part in parts for route in part.routes()),
        ]

    @web.middleware
    async def errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Show errors to browsers as pages, and refuse requests that other sites make a browser send."""
        if not _is_for_people(request):
            return await handler(request)
        try:
            self._site.state.forms.check_site(request)
            return await handler(request)
        except Refused as refused:
            return self._error(request, refused)
        except web.HTTPNotFound:
            return self._error(request, not_found("page"))
        except web.HTTPMethodNotAllowed as error:
            return self._error(request, method_not_allowed(request.method, error))

    def _error(self, request: web.Request, refused: Refused) -> web.Response:
        title = TITLES.get(refused.status, "That did not work")
        response = self._site.page(request, "error.html", refused.status, title=title, problem=refused.message)
        response.headers.extend(refused.headers)
        return response


def _is_for_people(request: web.Request) -> bool:
    """Return whether the request is for a page, or from a browser and not for an API."""
    path = request.path
    if is_api_path(path):
        return False
    own = path in {"/", APPS, AUTHORIZE} or path == DASHBOARD or path.startswith(f"{DASHBOARD}/")
    return own or "text/html" in request.headers.get("Accept", "")


async def _to_dashboard(_: web.Request) -> web.Response:
    raise web.HTTPFound(DASHBOARD)


async def _asset(content: bytes, kind: str, _: web.Request) -> web.Response:
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}
    return web.Response(body=content, content_type=kind, charset="utf-8", headers=headers)
