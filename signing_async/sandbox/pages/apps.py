"""Registering applications and consenting to them: /developer/my-apps and /oauth/authorize."""

from __future__ import annotations

from aiohttp import web

from ..accounts import redirect_with
from ..records import App, User
from ..refused import Refused
from .site import APPS, EMPTY, Filled, Site

AUTHORIZE = "/oauth/authorize"
PARAMETERS = ("client_id", "redirect_uri", "response_type", "state")
PKCE = ("code_challenge", "code_challenge_method")


class Apps:
    """The applications and the consent page."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._accounts = site.state.accounts

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get(APPS, self.my_apps),
            web.post(APPS, self.register),
            web.get(AUTHORIZE, self.consent),
            web.post(AUTHORIZE, self.decide),
        ]

    # my apps

    async def my_apps(self, request: web.Request) -> web.Response:
        """Show the applications and a form for a new one."""
        return self._my_apps(request, EMPTY)

    async def register(self, request: web.Request) -> web.Response:
        """Register an application and show its secret, only once."""
        fields = await self._site.fields(request)
        try:
            user = self._chosen_user(fields)
            app = self._accounts.register_app(fields.get("name", ""), fields.get("redirect_uri", ""), user)
        except Refused as refused:
            return self._my_apps(request, Filled.refused(fields, refused), refused.status)
        return self._site.page(request, "app_registered.html", app=app)

    def _my_apps(self, request: web.Request, filled: Filled, status: int = 200) -> web.Response:
        return self._site.page(request, "my_apps.html", status, apps=self._accounts.apps(), filled=filled)

    def _chosen_user(self, fields: dict[str, str]) -> User:
        """Return the user chosen in a form; without a choice, the default user."""
        chosen = fields.get("user")
        if chosen is None:
            return self._accounts.default_user()
        try:
            return self._accounts.user(chosen)
        except KeyError:
            raise Refused(400, "validation_failed", "There is no such user; choose one from the list.") from None

    # consent

    async def consent(self, request: web.Request) -> web.StreamResponse:
        """Ask the user for consent."""
        return self._consent_page(request, EMPTY)

    async def decide(self, request: web.Request) -> web.StreamResponse:
        """Redirect to the application, with a code or an error."""
        fields = await self._site.fields(request)
        decision = fields.get("decision")
        if decision not in {"allow", "deny"}:
            return self._consent_page(request, Filled(fields, {}, "Choose Allow or Deny."), 400)
        try:
            app, state, challenge = self._read_query(request)
            user = self._chosen_user(fields)
        except Refused as refused:
            return self._consent_page(request, Filled.refused(fields, refused), 400)
        if decision == "deny":
            raise web.HTTPFound(redirect_with(app, error="access_denied", state=state))
        code = self._accounts.authorize(app, user=user, challenge=challenge)
        raise web.HTTPFound(redirect_with(app, code=code, state=state))

    def _read_query(self, request: web.Request) -> tuple[App, str | None, str | None]:
        """Return the application, `state` and code challenge. Redirect an invalid request back to the application."""
        app, state = self._accounts.authorization_request(request.query)
        if request.query.get("response_type") != "code":
            raise web.HTTPFound(redirect_with(app, error="unsupported_response_type", state=state))
        try:
            return app, state, self._accounts.code_challenge(request.query)
        except Refused as refused:
            raise web.HTTPFound(redirect_with(app, error=refused.code, state=state)) from None

    def _consent_page(self, request: web.Request, filled: Filled, status: int = 200) -> web.StreamResponse:
        query = request.query
        try:
            app, *_ = self._read_query(request)
        except Refused as refused:
            parameters = {name: query.get(name) for name in PARAMETERS}
            return self._site.page(
                request, "cannot_authorize.html", 400, problem=refused.message, parameters=parameters
            )
        kept = {name: query[name] for name in (*PARAMETERS, *PKCE) if name in query}
        response = self._site.page(request, "consent.html", status, app=app, query=kept, filled=filled)
        # Browsers apply form-action to all redirects after a form, also to those of the application.
        policy = response.headers["Content-Security-Policy"]
        response.headers["Content-Security-Policy"] = policy.replace(" form-action 'self';", "")
        return response
