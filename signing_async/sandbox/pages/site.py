"""The frame of every page, and forms that only pages of this sandbox can send."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from aiohttp import web

from ..forms import FIELD
from ..state import State
from .markup import Child, Html, render, tag

DASHBOARD, INBOX, WEBHOOKS = "/sandbox", "/sandbox/inbox", "/sandbox/webhooks"
REQUESTS, FAULTS, APPS = "/sandbox/requests", "/sandbox/faults", "/developer/my-apps"
SECTIONS = {
    DASHBOARD: "Dashboard",
    INBOX: "Inbox",
    WEBHOOKS: "Webhooks",
    REQUESTS: "Requests",
    FAULTS: "Faults",
    APPS: "My apps",
}

STYLE = files(__package__).joinpath("style.css").read_bytes()
STYLE_PATH = "/sandbox/style.css"
SCRIPT = files(__package__).joinpath("refresh.js").read_bytes()
SCRIPT_PATH = "/sandbox/refresh.js"
VERSION = hashlib.sha256(STYLE + SCRIPT).hexdigest()[:12]

ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'%3E"
    "%3Crect width='32' height='32' rx='7' fill='%232b46c8'/%3E"
    "%3Cpath d='M7 21c5-1 5-12 9-12s-1 12 3 12 3-4 6-4' fill='none' stroke='white' stroke-width='2.6'"
    " stroke-linecap='round'/%3E%3C/svg%3E"
)

NOTICES = {
    "cancelled": "The signing was cancelled.",
    "completed": "All recipients have signed; the documents are sealed.",
    "clock": "The clock was advanced.",
    "fault": "The fault was added.",
    "fault-removed": "The fault was removed.",
    "faults-cleared": "All faults were removed.",
    "limit": "The rate limit was set.",
    "limit-lifted": "The rate limit was removed.",
    "resent": "The event is sent again, as a new delivery.",
    "endpoint-removed": "The endpoint was removed; it gets no more events.",
}
"""What a page says after an action. The URL carries the key, never the text."""


class Site:
    """Makes pages and protected forms for one sandbox."""

    def __init__(self, state: State) -> None:
        self.state: State = state

    def page(
        self,
        request: web.Request,
        title: str,
        *content: Child,
        status: int = 200,
        section: str | None = None,
        for_recipients: bool = False,
        language: str = "en",
    ) -> web.Response:
        """Return a whole page. Pages that the real service would show (`for_recipients`) have no developers' menu."""
        html = render(
            [
                Html("<!doctype html>\n"),
                tag("html", _head(title), _body(request, content, section, for_recipients), lang=language),
            ]
        )
        return self.state.forms.page(request, html, status)

    def form(self, request: web.Request, action: str, *content: Child, **attributes: str) -> Html:
        """Return a form that only pages of this sandbox can send."""
        token = tag("input", type="hidden", name=FIELD, value=self.state.forms.token(request))
        return tag("form", token, content, method="post", action=action, **attributes)

    def button(
        self, request: web.Request, action: str, label: str, about: str = "", kind: str = "", **hidden: str
    ) -> Html:
        """Return a form with one button; `about` tells screen readers what the button acts on."""
        fields = [tag("input", type="hidden", name=name, value=value) for name, value in hidden.items()]
        text = [label, tag("span", f" {about}", class_="unseen") if about else None]
        return self.form(request, action, fields, tag("button", text, class_=f"small {kind}".strip()), class_="inline")

    async def fields(self, request: web.Request) -> dict[str, str]:
        """Return the fields of a form that a page of this sandbox sent; refuse any other form."""
        return await self.state.forms.read(request)


def redirect(path: str, done: str | None = None) -> web.HTTPSeeOther:
    """Return a redirect to another page; `done` is the key of the notice to show there."""
    return web.HTTPSeeOther(f"{path}?done={done}" if done else path)


def _head(title: str) -> Html:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} – Signing sandbox"),
        tag("link", rel="icon", href=ICON),
        tag("link", rel="stylesheet", href=f"{STYLE_PATH}?v={VERSION}"),
        tag("script", src=f"{SCRIPT_PATH}?v={VERSION}", defer=True),
    )


def _body(request: web.Request, content: Child, section: str | None, for_recipients: bool) -> Html:
    notice = NOTICES.get(request.query.get("done", ""))
    return tag(
        "body",
        tag("a", "Skip to content", href="#main", class_="skip"),
        tag(
            "header",
            tag(
                "p",
                tag("strong", "Sandbox."),
                " This is not a legal signing service: signatures made here bind nobody.",
                class_="banner",
                lang="en",
            ),
            tag(
                "div",
                tag("div", tag("a", "Signing sandbox", href=DASHBOARD, class_="brand"), _menu(section, for_recipients)),
                class_="top",
            ),
        ),
        tag(
            "main",
            tag("p", notice, class_="notice", role="status") if notice else None,
            content,
            id="main",
            tabindex="-1",
            class_="narrow" if for_recipients else None,
        ),
        tag(
            "footer",
            tag(
                "p",
                "A local sandbox of the electronic signing service, for development and tests. ",
                "Times are in UTC, on the sandbox's clock.",
            ),
            lang="en",
        ),
    )


def _menu(section: str | None, for_recipients: bool) -> Html:
    if for_recipients:
        return tag("nav", tag("a", "To the dashboard", href=DASHBOARD), aria_label="Sandbox", lang="en")
    links = (
        tag("li", tag("a", name, href=path, aria_current="page" if path == section else None))
        for path, name in SECTIONS.items()
    )
    return tag("nav", tag("ul", links), aria_label="Sandbox")
