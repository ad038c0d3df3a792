"""The pages for people: register an application, agree to it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from aiohttp import web

from .accounts import redirect_with
from .refused import Refused

if TYPE_CHECKING:
    from .server import Sandbox


def routes(sandbox: Sandbox) -> list[web.RouteDef]:
    """The pages' routes."""
    pages = Pages(sandbox)
    return [
        web.get("/developer/my-apps", pages.my_apps),
        web.post("/developer/my-apps", pages.register),
        web.get("/oauth/authorize", pages.consent),
        web.post("/oauth/authorize", pages.decide),
    ]


class Pages:
    """What a browser sees."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._forms = sandbox.forms

    async def my_apps(self, request: web.Request) -> web.Response:
        """The applications, and a form for a new one."""
        self._forms.check_site(request)
        rows = "".join(
            f"<li>{escape(app.name)} <code>{escape(app.client_id)}</code> {escape(app.redirect_uri)}</li>"
            for app in self._sandbox.apps
        )
        return self._page(
            request,
            f"""<h1>My apps</h1><ul>{rows}</ul><form method="post">{self._hidden(request)}
            <label>Name <input name="name" required></label>
            <label>Redirect URI <input name="redirect_uri" required></label><button>Register</button></form>""",
        )

    async def register(self, request: web.Request) -> web.Response:
        """A new application; its secret is shown this once."""
        self._forms.check_site(request)
        fields = await self._forms.read(request)
        try:
            app = self._sandbox.register_app(fields.get("redirect_uri", ""), fields.get("name", ""))
        except Refused as refused:
            return self._page(request, f"<h1>My apps</h1><p role=alert>{escape(str(refused))}</p>", 400)
        secret = escape(app.client_secret or "")
        return self._page(
            request,
            f"""<h1>{escape(app.name)}</h1><p>client_id <code id="client-id">{escape(app.client_id)}</code></p>
            <p>client_secret <code id="client-secret">{secret}</code> (shown this once)</p>""",
        )

    async def consent(self, request: web.Request) -> web.StreamResponse:
        """Ask the user whether the application may act for them."""
        self._forms.check_site(request)
        try:
            app, state = self._sandbox.accounts.authorization_request(request.query)
        except Refused as refused:
            return self._page(request, f"<h1>Cannot continue</h1><p role=alert>{escape(str(refused))}</p>", 400)
        if request.query.get("response_type") != "code":
            raise web.HTTPFound(redirect_with(app, error="unsupported_response_type", state=state))
        action = escape("/oauth/authorize?" + urlencode(dict(request.query)))
        return self._page(
            request,
            f"""<h1>Allow {escape(app.name)}?</h1><form method="post" action="{action}">{self._hidden(request)}
            <button name="decision" value="allow">Allow</button>
            <button name="decision" value="deny">Deny</button></form>""",
        )

    async def decide(self, request: web.Request) -> web.StreamResponse:
        """Send the browser back to the application, with a code or an error."""
        self._forms.check_site(request)
        fields = await self._forms.read(request)
        try:
            app, state = self._sandbox.accounts.authorization_request(request.query)
        except Refused as refused:
            return self._page(request, f"<h1>Cannot continue</h1><p role=alert>{escape(str(refused))}</p>", 400)
        if fields.get("decision") != "allow":
            raise web.HTTPFound(redirect_with(app, error="access_denied", state=state))
        raise web.HTTPFound(self._sandbox.accounts.consent_redirect(app, state))

    def _hidden(self, request: web.Request) -> str:
        return f'<input type="hidden" name="csrf_token" value="{self._forms.token(request)}">'

    def _page(self, request: web.Request, body: str, status: int = 200) -> web.Response:
        html = f"<!doctype html><html lang=en><meta charset=utf-8><title>Signing sandbox</title><body>{body}"
        return self._forms.page(request, html, status)
