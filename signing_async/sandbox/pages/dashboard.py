"""The dashboard: all signings, one signing whole, and the clock."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from aiohttp import web

from ..records import Document, Recipient, Signing
from ..refused import Refused
from . import faults, requests, webhooks
from .markup import Child, Html, isolated, tag, theirs
from .site import (
    DASHBOARD,
    EMPTY,
    FAULTS,
    REQUESTS,
    WEBHOOKS,
    Filled,
    Site,
    alert,
    badge,
    card,
    choice_field,
    detail_page,
    facts,
    heading,
    identifier,
    moment,
    rejected,
    see,
    signing_page,
    standing,
    table,
    text_field,
)

PAGE = 20
LATEST = 6
NAMED = 4
"""So many documents and recipients of a signing are named in the list."""

UNITS = {"seconds": "seconds", "minutes": "minutes", "hours": "hours", "days": "days"}
JUMPS = (("1", "hours", "1 hour"), ("1", "days", "1 day"), ("14", "days", "14 days"))
_AMOUNT = r"[0-9]{1,9}([.,][0-9]{1,6})?"


class Dashboard:
    """What the sandbox holds, and the levers."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._sandbox = site.sandbox
        self._service = site.service

    def routes(self) -> list[web.RouteDef]:
        """The list, one signing, its PDFs, and what can be done."""
        return [
            web.get(DASHBOARD, self.overview),
            web.post(f"{DASHBOARD}/clock", self.advance),
            web.get(f"{DASHBOARD}/signings/{{signing_id}}", self.signing),
            web.post(f"{DASHBOARD}/signings/{{signing_id}}/cancel", self.cancel),
            web.post(f"{DASHBOARD}/signings/{{signing_id}}/complete", self.complete),
        ]

    async def overview(self, request: web.Request) -> web.Response:
        """Everything at a glance."""
        return self._overview(request, EMPTY)

    def _overview(self, request: web.Request, clock: Filled, status: int = 200) -> web.Response:
        before = request.query.get("before", "")
        page = self._service.latest_signings(int(before) if re.fullmatch(r"[0-9]{1,15}", before) else None, PAGE)
        rows = [self._row(request, signing) for signing in page.items]
        older = tag("p", tag("a", "Older signings", href=f"{DASHBOARD}?before={page.next_seq}"), class_="after")
        newest = tag("a", "Newest", href=DASHBOARD) if before else None
        main = [
            card(
                "Signings",
                table("Signings", _SIGNINGS, rows, _NO_SIGNINGS),
                older if page.next_seq else None,
                more=newest,
            ),
            card("API requests", requests.shown(self._sandbox, LATEST), more=tag("a", "All requests", href=REQUESTS)),
            card(
                "Deliveries",
                webhooks.log(self._site, request, self._sandbox.webhooks.deliveries(LATEST)),
                more=tag("a", "Webhooks", href=WEBHOOKS),
            ),
        ]
        side = [
            self._clock(request, clock),
            card("Faults in force", faults.in_force(self._site, request), more=tag("a", "Arrange faults", href=FAULTS)),
            card("Webhook endpoints", self._endpoints(), more=tag("a", "Register", href=WEBHOOKS)),
            card("Ways in", self._ways_in()),
        ]
        refresh = tag("a", "Refresh", href=DASHBOARD, class_="button plain")
        return self._site.page(
            request,
            "Dashboard",
            heading("Dashboard", refresh),
            rejected(clock),
            tag("div", tag("div", main), tag("div", side, class_="side"), class_="columns"),
            section=DASHBOARD,
            status=status,
        )

    def _row(self, request: web.Request, signing: Signing) -> list[Child]:
        documents, recipients = self._service.documents(signing.id), self._service.recipients(signing.id)
        return [
            [
                tag("a", theirs(signing.name), href=detail_page(signing.id), class_="title"),
                tag("p", "updated ", moment(signing.updated_at), class_="quiet"),
            ],
            badge(signing.state),
            _first(documents, lambda document: theirs(document.name)),
            _first(recipients, lambda recipient: self._person(signing, recipient)),
            self._actions(request, signing, "list"),
        ]

    def _person(self, signing: Signing, recipient: Recipient) -> Child:
        return [theirs(recipient.full_name), " ", badge(standing(self._service, signing, recipient))]

    def _actions(self, request: web.Request, signing: Signing, back: str) -> Html | None:
        if signing.state not in {"draft", "sent"}:
            return None
        about, address = f"the signing {isolated(signing.name)}", detail_page(signing.id)
        buttons = [self._site.button(request, f"{address}/cancel", "Cancel", about, "plain", back=back)]
        if signing.state == "sent":
            buttons.insert(0, self._site.button(request, f"{address}/complete", "Complete", about, back=back))
        return tag("div", buttons, class_="buttons")

    def _endpoints(self) -> Html:
        endpoints = self._sandbox.webhooks.endpoints()
        if not endpoints:
            return tag("div", tag("p", "None: events are written down, and delivered nowhere."), class_="empty")
        return tag(
            "ul", [tag("li", tag("code", endpoint.url, class_="break")) for endpoint in endpoints], class_="plain"
        )

    def _ways_in(self) -> Html:
        return facts(
            ("Base URL", tag("code", self._sandbox.base_url, class_="break")),
            ("Description of the API", tag("a", "/openapi.json", href="/openapi.json")),
            ("To trust the seals", tag("a", "The sandbox's certificate", href="/sandbox/authority.pem")),
        )

    # the clock

    def _clock(self, request: web.Request, filled: Filled) -> Html:
        clock = self._sandbox.clock
        ahead = clock.offset.total_seconds()
        form = self._site.form(
            request,
            f"{DASHBOARD}/clock",
            tag(
                "div",
                text_field("Move on by", "amount", filled, default="1", inputmode="decimal", required=True, size=6),
                choice_field("Unit", "unit", filled, UNITS.items(), default="days"),
                tag("button", "Advance"),
                class_="line",
            ),
        )
        jumps = [
            self._site.button(request, f"{DASHBOARD}/clock", f"+{text}", kind="plain", amount=amount, unit=unit)
            for amount, unit, text in JUMPS
        ]
        return card(
            "Clock",
            tag("p", moment(clock.micros()), class_="now"),
            tag("p", f"{_duration(ahead)} ahead of real time" if ahead else "Real time", class_="quiet"),
            form,
            tag("div", jumps, class_="buttons"),
            tag("p", "Every expiry and every repetition moves along.", class_="hint"),
        )

    async def advance(self, request: web.Request) -> web.Response:
        """Move the clock on."""
        fields = await self._site.fields(request)
        amount, unit = fields.get("amount", "").strip(), fields.get("unit", "")
        errors = {}
        if not re.fullmatch(_AMOUNT, amount):
            errors["amount"] = [f"{amount!r} is not a number above 0, as in 14 or 0.5."]
        if unit not in UNITS:
            errors["unit"] = ["Choose a unit."]
        if errors:
            return self._overview(request, Filled(fields, errors), 400)
        try:
            self._sandbox.clock.advance(**{unit: float(amount.replace(",", "."))})
        except (ValueError, OverflowError):
            wrong = {"amount": [f"The clock cannot be moved on by {amount} {unit}."]}
            return self._overview(request, Filled(fields, wrong), 400)
        raise see(DASHBOARD, "clock")

    # one signing

    async def signing(self, request: web.Request) -> web.Response:
        """All about one signing."""
        return self._signing(request, self._service.signing(request.match_info["signing_id"]))

    async def cancel(self, request: web.Request) -> web.Response:
        """Cancel a signing."""
        fields, signing_id = await self._site.fields(request), request.match_info["signing_id"]
        try:
            await self._sandbox.cancel(signing_id)
        except Refused as refused:
            return self._signing(request, self._service.signing(signing_id), refused.message, refused.status)
        raise see(DASHBOARD if fields.get("back") == "list" else detail_page(signing_id), "cancelled")

    async def complete(self, request: web.Request) -> web.Response:
        """Let everybody sign who has not."""
        fields, signing_id = await self._site.fields(request), request.match_info["signing_id"]
        try:
            signing = await self._sandbox.complete(signing_id)
        except Refused as refused:
            return self._signing(request, self._service.signing(signing_id), refused.message, refused.status)
        if not signing.is_completed:
            return self._signing(request, signing, "It is not completed: somebody declined to sign.", 400)
        raise see(DASHBOARD if fields.get("back") == "list" else detail_page(signing_id), "completed")

    def _signing(
        self, request: web.Request, signing: Signing, problem: str | None = None, status: int = 200
    ) -> web.Response:
        documents, recipients = self._service.documents(signing.id), self._service.recipients(signing.id)
        sender = self._sandbox.accounts.user(signing.user_id)
        about = facts(
            ("Id", identifier(signing.id)),
            ("Sender", [theirs(sender.name), " (", theirs(sender.email), f"), tenant {sender.tenant}"]),
            ("Language", signing.language),
            ("Order", signing.signing_order),
            ("Message", tag("p", theirs(signing.message), class_="said") if signing.message else None),
            ("Created", moment(signing.created_at)),
            ("Sent", moment(signing.sent_at)),
            ("Completed", moment(signing.completed_at) if signing.completed_at else None),
            ("Cancelled", moment(signing.cancelled_at) if signing.cancelled_at else None),
            ("Last update", moment(signing.updated_at)),
        )
        events = [
            [event.type, moment(event.created_at), identifier(event.id)]
            for event in self._sandbox.webhooks.events_of(signing.id)
        ]
        return self._site.page(
            request,
            isolated(signing.name),
            tag("p", tag("a", "Dashboard", href=DASHBOARD), class_="crumb"),
            alert(problem),
            heading(theirs(signing.name), self._actions(request, signing, "page"), kind=badge(signing.state)),
            tag(
                "div",
                tag(
                    "div",
                    card("Documents", table("Documents", _DOCUMENTS, map(_document, documents), _NO_DOCUMENTS)),
                    card(
                        "Recipients",
                        table(
                            "Recipients", _RECIPIENTS, (self._recipient(signing, r) for r in recipients), _NO_RECIPIENTS
                        ),
                    ),
                    card("Events", table("Events", _EVENTS, events, tag("p", "Nothing has happened yet."))),
                ),
                tag("div", card("About", about), class_="side"),
                class_="columns",
            ),
            section=DASHBOARD,
            status=status,
        )

    def _recipient(self, signing: Signing, recipient: Recipient) -> list[Child]:
        details = [part for part in (recipient.phone, recipient.identification) if part]
        reminders = f", {recipient.reminders} reminder{'s' if recipient.reminders > 1 else ''}"
        return [
            [
                theirs(recipient.full_name),
                tag("p", theirs(recipient.email), class_="quiet break"),
                tag("p", theirs(", ".join(details)), class_="quiet") if details else None,
                identifier(recipient.id),
            ],
            recipient.order if recipient.order is not None else "–",
            recipient.signing_method,
            [
                badge(standing(self._service, signing, recipient)),
                tag("p", "since ", moment(_since(recipient)), class_="quiet") if recipient.invited_at else None,
                tag("p", "valid until ", moment(recipient.expires_at), class_="quiet")
                if recipient.expires_at and not recipient.is_done
                else None,
                tag("p", f"invited{reminders}", class_="quiet") if recipient.reminders else None,
            ],
            tag(
                "a",
                "Signing page",
                tag("span", " of ", theirs(recipient.full_name), class_="unseen"),
                href=signing_page(recipient),
            ),
        ]


_SIGNINGS = ("Signing", "State", "Documents", "Recipients", "Actions")
_DOCUMENTS = ("Name", "Size", "SHA-256", "Signed", "Files")
_RECIPIENTS = ("Recipient", "Order", "Method", "State", "As them")
_EVENTS = ("Event", "When", "Id")
_NO_SIGNINGS = [
    tag("p", tag("strong", "No signing yet.")),
    tag("p", "Signings are made through the API: ", tag("code", "POST /api/1.0/signings"), "."),
]
_NO_DOCUMENTS = tag("p", "No document yet. Without one the signing cannot be sent.")
_NO_RECIPIENTS = tag("p", "No recipient yet. Without one the signing cannot be sent.")


def _first(things: Sequence[Document] | Sequence[Recipient], show: Callable[..., Child]) -> Html:
    if not things:
        return tag("span", "none", class_="quiet")
    shown = [tag("li", show(thing)) for thing in things[:NAMED]]
    rest = len(things) - NAMED
    return tag("ul", shown, tag("li", f"and {rest} more", class_="quiet") if rest > 0 else None, class_="plain")


def _document(document: Document) -> list[Child]:
    folder = f"{detail_page(document.signing_id)}/documents/{document.id}"
    links = [
        tag("a", "Original", tag("span", " of ", theirs(document.name), class_="unseen"), href=f"{folder}/original.pdf")
    ]
    if document.sealed_file:
        seen = tag("span", " version of ", theirs(document.name), class_="unseen")
        links.append(tag("a", "Sealed", seen, href=f"{folder}/sealed.pdf"))
    return [
        [theirs(document.name), tag("p", identifier(document.id))],
        f"{document.size:,} bytes",
        tag("code", f"{document.sha256[:12]}…", title=document.sha256),
        moment(document.completed_at),
        tag("div", links, class_="buttons"),
    ]


def _since(recipient: Recipient) -> int | None:
    return recipient.completed_at or recipient.declined_at or recipient.invited_at


def _duration(seconds: float) -> str:
    """About how long that is, in the two largest units."""
    parts = []
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1)):
        count, seconds = divmod(seconds, length)
        if count:
            parts.append(f"{count:.0f} {unit}{'s' if count != 1 else ''}")
    return " ".join(parts[:2]) or "less than a second"
