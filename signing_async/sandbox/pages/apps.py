"""Registering applications and consenting to them: /developer/my-apps and /oauth/authorize."""

from __future__ import annotations

from aiohttp import web
from yarl import URL

from ..records import App, User
from ..refused import Refused
from .site import APPS, EMPTY, STATE, Filled, form, page

AUTHORIZE = "/oauth/authorize"
PARAMETERS = ("client_id", "redirect_uri", "response_type", "state")
PKCE = ("code_challenge", "code_challenge_method")


async def my_apps(request: web.Request, filled: Filled = EMPTY) -> web.Response:
    """Show the applications and a form for a new one."""
    return page(request, "my_apps.html", filled)


async def register(request: web.Request) -> web.Response:
    """Register an application and show its secret, only once."""
    fields, accounts = await form(request), request.app[STATE].accounts
    try:
        user = _chosen_user(request, fields)
        app = accounts.register_app(fields.get("name", ""), fields.get("redirect_uri", ""), user)
    except Refused as refused:
        return await my_apps(request, Filled.refused(refused, fields))
    return page(request, "app_registered.html", app=app)


async def consent(request: web.Request, filled: Filled = EMPTY) -> web.StreamResponse:
    query = request.query
    try:
        app, _ = _read_query(request)
    except Refused as refused:
        parameters = {name: query.get(name) for name in PARAMETERS}
        return page(request, "cannot_authorize.html", Filled.refused(refused), parameters=parameters)
    kept = {name: query[name] for name in (*PARAMETERS, *PKCE) if name in query}
    response = page(request, "consent.html", filled, app=app, query=kept)
    # Browsers apply form-action to all redirects after a form, also to those of the application.
    policy = response.headers["Content-Security-Policy"]
    response.headers["Content-Security-Policy"] = policy.replace(" form-action 'self';", "")
    return response


async def decide(request: web.Request) -> web.StreamResponse:
    """Redirect to the application, with a code or an error."""
    fields = await form(request)
    decision = fields.get("decision")
    if decision not in {"allow", "deny"}:
        return await consent(request, Filled(fields, problem="Choose Allow or Deny.", status=400))
    try:
        app, challenge = _read_query(request)
        user = _chosen_user(request, fields)
    except Refused as refused:
        return await consent(request, Filled.refused(refused, fields))
    if decision == "deny":
        raise _callback(request, app, error="access_denied")
    code = request.app[STATE].accounts.authorize(app, user=user, challenge=challenge)
    raise _callback(request, app, code=code)


def _chosen_user(request: web.Request, fields: dict[str, str]) -> User:
    """Return the user chosen in a form; without a choice, the default user."""
    accounts = request.app[STATE].accounts
    try:
        return accounts.user(fields["user"]) if "user" in fields else accounts.default_user()
    except KeyError:
        raise Refused(400, "validation_failed", "There is no such user; choose one from the list.") from None


def _read_query(request: web.Request) -> tuple[App, str | None]:
    """Return the application and the code challenge. Redirect an invalid request back to the application."""
    accounts = request.app[STATE].accounts
    app = accounts.requesting_app(request.query)
    if request.query.get("response_type") != "code":
        raise _callback(request, app, error="unsupported_response_type")
    try:
        return app, accounts.code_challenge(request.query)
    except Refused as refused:
        raise _callback(request, app, error=refused.code) from None


def _callback(request: web.Request, app: App, **answer: str) -> web.HTTPFound:
    """Return the redirect to the application, with the answer and the `state` of the request."""
    state = {name: value for name, value in request.query.items() if name == "state"}
    return web.HTTPFound(URL(app.redirect_uri).update_query(answer | state))


ROUTES = [web.get(APPS, my_apps), web.post(APPS, register), web.get(AUTHORIZE, consent), web.post(AUTHORIZE, decide)]
