"""The frame around every page, and the parts that pages are put together from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from aiohttp import web

from ..clock import to_datetime
from ..forms import FIELD
from ..records import Recipient, Signing
from ..refused import Refused
from ..service import Service
from .markup import Child, Html, render, tag

if TYPE_CHECKING:
    from ..server import Sandbox

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

STYLE = Path(__file__).with_name("style.css").read_bytes()
STYLE_PATH = "/sandbox/style.css"
STYLE_VERSION = hashlib.sha256(STYLE).hexdigest()[:12]

ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'%3E"
    "%3Crect width='32' height='32' rx='7' fill='%232b46c8'/%3E"
    "%3Cpath d='M7 21c5-1 5-12 9-12s-1 12 3 12 3-4 6-4' fill='none' stroke='white' stroke-width='2.6'"
    " stroke-linecap='round'/%3E%3C/svg%3E"
)

NOTICES = {
    "cancelled": "The signing was cancelled.",
    "completed": "Everybody has signed; the documents are sealed.",
    "clock": "The clock was moved on.",
    "fault": "The fault is in force.",
    "fault-removed": "The fault was removed.",
    "faults-cleared": "All faults were removed.",
    "limit": "The rate limit is in force.",
    "limit-lifted": "The rate limit was lifted.",
    "resent": "The event is on its way once more, as a new delivery.",
    "endpoint-removed": "The endpoint was removed; nothing more is delivered to it.",
}
"""What a page says after something was done: the address carries the key, never the text."""

Standing = Literal["draft", "waiting", "invited", "expired", "signed", "declined", "cancelled"]

LABELS: dict[str, tuple[str, str]] = {
    "draft": ("Draft", "quiet"),
    "sent": ("Sent", "busy"),
    "completed": ("Completed", "good"),
    "cancelled": ("Cancelled", "bad"),
    "waiting": ("Not invited yet", "quiet"),
    "invited": ("Invited", "busy"),
    "expired": ("Invitation expired", "warn"),
    "signed": ("Signed", "good"),
    "declined": ("Declined", "bad"),
    "pending": ("Pending", "busy"),
    "delivered": ("Delivered", "good"),
    "failed": ("Failed", "bad"),
    "lost": ("Lost", "warn"),
}


@dataclass(frozen=True)
class Filled:
    """What somebody typed into a form, and what is wrong with it; `problem` concerns the form as a whole."""

    values: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, Sequence[str]] = field(default_factory=dict)
    problem: str | None = None

    @classmethod
    def refused(cls, values: Mapping[str, str], refused: Refused) -> Filled:
        """A form as it was when the service refused it."""
        return cls(values, refused.errors, None if refused.errors else refused.message)


EMPTY = Filled()


class Site:
    """Makes pages and protected forms for one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    @property
    def service(self) -> Service:
        """The service behind the pages."""
        return self.sandbox.service

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
        """A whole page. Those that other people would see in a real service have no menu for developers."""
        html = render(
            [
                Html("<!doctype html>\n"),
                tag("html", _head(title), _body(request, content, section, for_recipients), lang=language),
            ]
        )
        return self.sandbox.forms.page(request, html, status)

    def form(self, request: web.Request, action: str, *content: Child, **attributes: str) -> Html:
        """A form that only this sandbox's own pages can send."""
        token = tag("input", type="hidden", name=FIELD, value=self.sandbox.forms.token(request))
        return tag("form", token, content, method="post", action=action, **attributes)

    def button(
        self, request: web.Request, action: str, label: str, about: str = "", kind: str = "", **hidden: str
    ) -> Html:
        """A form of one button; `about` says to those who cannot see the page what it acts on."""
        fields = [tag("input", type="hidden", name=name, value=value) for name, value in hidden.items()]
        said = [label, tag("span", f" {about}", class_="unseen") if about else None]
        return self.form(request, action, fields, tag("button", said, class_=f"small {kind}".strip()), class_="inline")

    async def fields(self, request: web.Request) -> dict[str, str]:
        """The fields of such a form."""
        return await self.sandbox.forms.read(request)


def see(path: str, done: str | None = None) -> web.HTTPSeeOther:
    """Send the browser to another page, where it is said what was done."""
    return web.HTTPSeeOther(f"{path}?done={done}" if done else path)


def _head(title: str) -> Html:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} – Signing sandbox"),
        tag("link", rel="icon", href=ICON),
        tag("link", rel="stylesheet", href=f"{STYLE_PATH}?v={STYLE_VERSION}"),
    )


def _body(request: web.Request, content: Child, section: str | None, for_recipients: bool) -> Html:
    notice = NOTICES.get(request.query.get("done", ""))
    return tag(
        "body",
        tag("a", "Skip to the content", href="#main", class_="skip"),
        tag(
            "header",
            tag(
                "p",
                tag("strong", "Sandbox."),
                " This is no legal signing service: nothing that is signed here binds anybody.",
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
                "A local stand-in for the electronic signing service, for development and tests. ",
                "Times are UTC, by the sandbox's own clock.",
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


# parts


def heading(title: Child, *more: Child, own: bool = True, kind: Child = None) -> Html:
    """A page's heading; `own` labels what the specification does not describe."""
    label = tag("p", "The sandbox's own page: the specification describes none like it.", class_="own") if own else None
    return tag("div", kind, tag("h1", title), label, more, class_="heading")


def badge(state: str) -> Html:
    """A state, as a word with a colour."""
    text, tone = LABELS[state]
    return tag("span", text, class_=f"badge {tone}")


def moment(micros: int | None) -> Child:
    """A point in time, or a dash."""
    if micros is None:
        return tag("span", "–", class_="quiet")
    at = to_datetime(micros)
    return tag("time", f"{at:%Y-%m-%d %H:%M:%S}", datetime=at.isoformat(timespec="seconds"))


def identifier(text: str) -> Html:
    """An id, marked as a whole by one click."""
    return tag("code", text, class_="id")


def facts(*pairs: tuple[str, Child]) -> Html:
    """Names and values; those without a value are left out."""
    shown = (tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value is not None)
    return tag("dl", shown, class_="facts")


def table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[Child]], empty: Child) -> Html:
    """A table that becomes a list of cards on narrow screens, or what is said when there is nothing.

    The roles are spelled out since browsers forget them when a table is laid out otherwise.
    """
    body = [
        tag(
            "tr",
            (_cell(n, header, cell) for n, (header, cell) in enumerate(zip(headers, row, strict=True))),
            role="row",
        )
        for row in rows
    ]
    if not body:
        return tag("div", empty, class_="empty")
    head = (tag("th", header, scope="col", role="columnheader") for header in headers)
    return tag(
        "table",
        tag("caption", caption, class_="unseen"),
        tag("thead", tag("tr", head, role="row"), role="rowgroup"),
        tag("tbody", body, role="rowgroup"),
        role="table",
    )


def _cell(number: int, header: str, content: Child) -> Html:
    inner = tag("div", content)
    if number == 0:
        return tag("th", inner, scope="row", role="rowheader")
    return tag("td", inner, role="cell", data_label=header)


def card(title: str, *content: Child, anchor: str | None = None, more: Child = None) -> Html:
    """A part of a page with its own heading."""
    name = anchor or title.lower().replace(" ", "-")
    head = tag("div", tag("h2", title, id=name), more, class_="card-head")
    return tag("section", head, content, class_="card", aria_labelledby=name)


def alert(problem: str | None) -> Html | None:
    """What went wrong, said at once."""
    return tag("p", problem, class_="alert", role="alert") if problem else None


def rejected(*forms: Filled) -> Html | None:
    """For the top of a page: why a form on it was not accepted, with links to the fields that are wrong."""
    for form in forms:
        if form.errors:
            links = [tag("a", " ".join(texts), href=f"#{name}-field") for name, texts in form.errors.items()]
            return tag("p", "Nothing was done. ", [[link, " "] for link in links], class_="alert", role="alert")
        if form.problem:
            return alert(form.problem)
    return None


def text_field(
    label: str, name: str, filled: Filled, hint: Child = None, default: str = "", **attributes: str | int | bool | None
) -> Html:
    """A labelled line to type in, with what was typed before and what is wrong with it."""
    return _field("input", label, name, filled, hint, value=filled.values.get(name, default), **attributes)


def choice_field(
    label: str, name: str, filled: Filled, options: Iterable[tuple[str, str]], hint: Child = None, default: str = ""
) -> Html:
    """A labelled choice of one of several values, each with its text."""
    chosen = filled.values.get(name, default)
    shown = [tag("option", text, value=value, selected=value == chosen) for value, text in options]
    return _field("select", label, name, filled, hint, shown)


def _field(
    kind: str,
    label: str,
    name: str,
    filled: Filled,
    hint: Child,
    content: Child = None,
    **attributes: str | int | bool | None,
) -> Html:
    errors = filled.errors.get(name, ())
    said = [f"{name}-{part}" for part, there in (("hint", hint), ("error", errors)) if there]
    control = tag(
        kind,
        content,
        id=f"{name}-field",
        name=name,
        aria_describedby=" ".join(said) or None,
        aria_invalid="true" if errors else None,
        **attributes,
    )
    return tag(
        "div",
        tag("label", label, for_=f"{name}-field"),
        tag("p", hint, class_="hint", id=f"{name}-hint") if hint else None,
        control,
        tag("p", " ".join(errors), class_="error", id=f"{name}-error") if errors else None,
        class_="field wrong" if errors else "field",
    )


# people


def standing(service: Service, signing: Signing, recipient: Recipient) -> Standing:
    """Where a recipient stands."""
    if recipient.completed_at is not None:
        return "signed"
    if recipient.declined_at is not None:
        return "declined"
    if signing.cancelled_at is not None:
        return "cancelled"
    if signing.is_draft:
        return "draft"
    if recipient.invited_at is None:
        return "waiting"
    return "expired" if service.may_act(recipient) else "invited"


def signing_page(recipient: Recipient) -> str:
    """The address of a recipient's signing page."""
    return f"/sandbox/sign/{recipient.id}"


def detail_page(signing_id: str) -> str:
    """The address of the page about a signing."""
    return f"{DASHBOARD}/signings/{signing_id}"
