"""The pages for people: plain HTML that needs no scripts, at the addresses that a browser visits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from ..control import OWN_API
from ..refused import Refused, not_found
from .apps import AUTHORIZE, Apps
from .dashboard import Dashboard
from .faults import FaultsPage
from .inbox import Inbox
from .markup import tag
from .requests import Requests
from .signing import SigningPage
from .site import APPS, DASHBOARD, STYLE, STYLE_PATH, Site, alert, heading
from .webhooks import Webhooks

if TYPE_CHECKING:
    from ..server import Sandbox

TITLES = {403: "Not allowed", 404: "Not found", 405: "Not possible"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pages:
    """All pages of one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._site = Site(sandbox)
        site = self._site
        self._parts = (
            Apps(site),
            Dashboard(site),
            Inbox(site),
            SigningPage(site),
            Webhooks(site),
            FaultsPage(site),
            Requests(site),
        )

    def routes(self) -> list[web.RouteDef]:
        """Their routes."""
        return [
            web.get("/", _to_dashboard),
            web.get(STYLE_PATH, _style),
            *(route for part in self._parts for route in part.routes()),
        ]

    @web.middleware
    async def errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Show who asks with a browser what went wrong as a page, and let no other site use the pages' forms."""
        if not _is_for_people(request):
            return await handler(request)
        try:
            self._site.sandbox.forms.check_site(request)
            return await handler(request)
        except Refused as refused:
            return self._error(request, refused)
        except web.HTTPNotFound:
            return self._error(request, not_found("page"))
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{request.method} is not allowed here; {allowed} is."
            return self._error(request, Refused(405, "method_not_allowed", message, headers={"Allow": allowed}))

    def _error(self, request: web.Request, refused: Refused) -> web.Response:
        title = TITLES.get(refused.status, "That did not work")
        back = tag("a", "To the dashboard", href=DASHBOARD, class_="button")
        response = self._site.page(
            request,
            title,
            heading(title, own=False),
            tag("section", alert(refused.message), tag("p", back), class_="card"),
            status=refused.status,
        )
        response.headers.extend(refused.headers)
        return response


def _is_for_people(request: web.Request) -> bool:
    """The pages' own addresses, and whatever else a browser asks for beside the APIs."""
    path = request.path
    if path == "/api" or path.startswith(("/api/", f"{OWN_API}/")) or path == "/openapi.json":
        return False
    own = path in {"/", APPS, AUTHORIZE} or path == DASHBOARD or path.startswith(f"{DASHBOARD}/")
    return own or "text/html" in request.headers.get("Accept", "")


async def _to_dashboard(_: web.Request) -> web.Response:
    raise web.HTTPFound(DASHBOARD)


async def _style(request: web.Request) -> web.Response:
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}
    return web.Response(body=STYLE, content_type="text/css", charset="utf-8", headers=headers)
