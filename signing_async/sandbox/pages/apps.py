"""Registering applications and consenting to them: /developer/my-apps and /oauth/authorize."""

from __future__ import annotations

from urllib.parse import urlencode

from aiohttp import web

from ..accounts import redirect_with
from ..records import App, User
from ..refused import Refused
from .components import (
    EMPTY,
    Filled,
    alert,
    card,
    choice_field,
    facts,
    heading,
    identifier,
    moment,
    rejected,
    table,
    text_field,
)
from .markup import Child, Html, isolated, tag, theirs
from .site import APPS, Site

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
        return self._site.page(request, "App registered", _registered(app, self._site.state.base_url), section=APPS)

    def _my_apps(self, request: web.Request, filled: Filled, status: int = 200) -> web.Response:
        apps = self._accounts.apps()
        form = self._site.form(
            request,
            APPS,
            text_field("Name", "name", filled, "Shown to users on the consent page.", maxlength=200, required=True),
            text_field(
                "Redirect URI",
                "redirect_uri",
                filled,
                [
                    "Receives the code: https, or http on this machine, such as ",
                    tag("code", _EXAMPLE),
                ],
                required=True,
                inputmode="url",
                autocomplete="off",
                spellcheck="false",
            ),
            self._user_field("Registered by", filled),
            tag("button", "Register"),
            class_="stack",
        )
        content = tag(
            "div",
            card("Applications", table("Registered applications", _HEADERS, map(self._row, apps), _EMPTY)),
            card("Register an application", form),
            class_="two",
        )
        return self._site.page(
            request, "My apps", heading("My apps", own=False), rejected(filled), content, section=APPS, status=status
        )

    def _row(self, app: App) -> list[Child]:
        query = {"client_id": app.client_id, "redirect_uri": app.redirect_uri, "response_type": "code", "state": "try"}
        return [
            [theirs(app.name), tag("p", "by ", theirs(self._accounts.user(app.user_id).name), class_="quiet")],
            identifier(app.client_id),
            tag("code", app.redirect_uri, class_="break"),
            moment(app.created_at),
            tag(
                "a",
                "Consent page",
                tag("span", " of ", theirs(app.name), class_="unseen"),
                href=f"{AUTHORIZE}?{urlencode(query)}",
            ),
        ]

    def _user_field(self, label: str, filled: Filled) -> Html | None:
        """Return a select field of the users, if there are several."""
        users = self._accounts.users()
        if len(users) == 1:
            return None
        return choice_field(label, "user", filled, map(_user_option, users), default=self._accounts.default_user().id)

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
        try:
            app, *_ = self._read_query(request)
        except Refused as refused:
            return self._site.page(
                request, "Cannot continue", _refusal(request, refused), status=400, for_recipients=True
            )
        response = self._site.page(
            request,
            f"Allow {isolated(app.name)}?",
            heading(["Allow ", theirs(app.name), "?"], own=False),
            self._consent_form(request, app, filled),
            for_recipients=True,
            status=status,
        )
        # Browsers apply form-action to all redirects after a form, also to those of the application.
        policy = response.headers["Content-Security-Policy"]
        response.headers["Content-Security-Policy"] = policy.replace(" form-action 'self';", "")
        return response

    def _consent_form(self, request: web.Request, app: App, filled: Filled) -> Html:
        query = {name: request.query[name] for name in (*PARAMETERS, *PKCE) if name in request.query}
        user = self._accounts.default_user()
        you = tag("p", "You are ", tag("strong", theirs(user.name)), " (", theirs(user.email), ").")
        form = self._site.form(
            request,
            f"{AUTHORIZE}?{urlencode(query)}",
            alert(filled.problem),
            self._user_field("You are", filled) or you,
            tag(
                "div",
                tag("button", "Allow", name="decision", value="allow"),
                tag("button", "Deny", name="decision", value="deny", class_="plain"),
                class_="buttons",
            ),
            class_="stack",
        )
        permissions = (
            "read your profile",
            "create, read and send signings for you",
            "upload and download their documents",
        )
        return tag(
            "section",
            tag(
                "p",
                tag("strong", theirs(app.name)),
                " asks to use the signing service for you. It will be able to:",
            ),
            tag("ul", [tag("li", text) for text in permissions]),
            facts(
                ("Client id", identifier(app.client_id)),
                ("Redirects to", tag("code", app.redirect_uri, class_="break")),
            ),
            form,
            class_="card",
        )


_EXAMPLE = "http://127.0.0.1:8000/callback"
_HEADERS = ("Name", "Client id", "Redirect URI", "Registered", "Try it")
_EMPTY = [
    tag("p", tag("strong", "No applications yet.")),
    tag("p", "Register one to get a client id and a client secret for OAuth."),
]


def _user_option(user: User) -> tuple[str, str]:
    return user.id, f"{isolated(user.name)} ({isolated(user.email)}, tenant {user.tenant})"


def _registered(app: App, base_url: str) -> Html:
    return tag(
        "div",
        heading(["Registered: ", theirs(app.name)], own=False),
        card(
            "Copy the secret now",
            tag(
                "p",
                "The client secret is shown only once. Keep it out of browsers and logs.",
                class_="warning",
            ),
            facts(
                ("Client id", tag("code", app.client_id, class_="id", id="client-id")),
                ("Client secret", tag("code", app.client_secret, class_="id", id="client-secret")),
                ("Redirect URI", tag("code", app.redirect_uri, class_="break")),
                ("Base URL", tag("code", base_url, class_="break")),
            ),
            tag("p", tag("a", "Done, back to my apps", href=APPS, class_="button")),
        ),
        class_="secret",
    )


def _refusal(request: web.Request, refused: Refused) -> list[Html]:
    return [
        heading("This application cannot be authorized", own=False),
        tag(
            "section",
            alert(refused.message),
            tag("p", "You are not redirected: a redirect URI that is not registered cannot be trusted."),
            facts(*((name, _parameter(request.query.get(name))) for name in PARAMETERS)),
            tag("p", tag("a", "See the registered applications", href=APPS)),
            class_="card",
        ),
    ]


def _parameter(value: str | None) -> Html:
    return tag("code", value, class_="break") if value else tag("span", "missing", class_="quiet")
