"""The dashboard: all signings with search and paging, the newest requests and deliveries, and the clock."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from aiohttp import web

from ..records import Document, Recipient, Signing
from ..service import STATES
from . import faults, requests, webhooks
from .components import (
    EMPTY,
    LABELS,
    Filled,
    badge,
    card,
    choice_field,
    detail_page,
    facts,
    heading,
    live,
    moment,
    page_number,
    pager,
    rejected,
    standing,
    table,
    text_field,
)
from .markup import Child, Html, tag, theirs
from .signing_details import signing_actions
from .site import DASHBOARD, FAULTS, REQUESTS, WEBHOOKS, Site, redirect

PAGE = 20
LATEST = 6
NAMED = 4
"""How many documents and how many recipients of a signing the list shows."""

UNITS = {"seconds": "seconds", "minutes": "minutes", "hours": "hours", "days": "days"}
JUMPS = (("1", "hours", "1 hour"), ("1", "days", "1 day"), ("14", "days", "14 days"))
_AMOUNT = r"[0-9]{1,9}([.,][0-9]{1,6})?"
_SIGNINGS = ("Signing", "State", "Documents", "Recipients", "Actions")
_FIRST_STEPS = """\
export SIGNING_BASE_URL={url}
export SIGNING_ACCESS_TOKEN=$(curl -s -X POST $SIGNING_BASE_URL/sandbox/api/access-tokens | cut -d '"' -f 4)
curl $SIGNING_BASE_URL/api/1.0/signings -H "Authorization: Bearer $SIGNING_ACCESS_TOKEN" \\
  -H 'Content-Type: application/json' -d '{{"name": "Lease", "language": "EN"}}'"""


class Dashboard:
    """The overview of the sandbox."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._state = site.state

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.get(DASHBOARD, self.overview), web.post(f"{DASHBOARD}/clock", self.advance)]

    async def overview(self, request: web.Request) -> web.Response:
        """Show the dashboard."""
        return self._overview(request, EMPTY)

    def _overview(self, request: web.Request, clock: Filled, status: int = 200) -> web.Response:
        deliveries = self._state.webhooks.deliveries(LATEST)
        main = [
            self._signings(request),
            card(
                "API requests",
                live("latest-requests", requests.table_of_requests(self._state, LATEST)),
                more=tag("a", "All requests", href=REQUESTS),
            ),
            card(
                "Webhook deliveries",
                live("latest-deliveries", webhooks.table_of_deliveries(self._site, request, deliveries)),
                more=tag("a", "All deliveries", href=WEBHOOKS),
            ),
        ]
        side = [
            self._clock(request, clock),
            card("Faults", faults.table_of_faults(self._site, request), more=tag("a", "Arrange", href=FAULTS)),
            card("Webhook endpoints", self._endpoints(), more=tag("a", "Register", href=WEBHOOKS)),
            card("Connect", self._addresses()),
        ]
        return self._site.page(
            request,
            "Dashboard",
            heading("Dashboard"),
            rejected(clock),
            tag("div", tag("div", main), tag("div", side, class_="side"), class_="columns"),
            section=DASHBOARD,
            status=status,
        )

    # signings

    def _signings(self, request: web.Request) -> Html:
        text, state = request.query.get("search", "").strip(), request.query.get("state", "")
        state = state if state in STATES else ""
        page = page_number(request)
        found, total = self._state.service.search(text, state, (page - 1) * PAGE, PAGE)
        empty: Child = [
            tag("p", tag("strong", "No signings yet.")),
            tag("p", "Create one in a shell:"),
            tag("pre", _FIRST_STEPS.format(url=self._state.base_url), tabindex="0"),
        ]
        if text or state or page > 1:
            empty = [tag("p", tag("strong", "No signing matches.")), tag("p", tag("a", "Show all", href=DASHBOARD))]
        rows = [self._row(request, signing) for signing in found]
        return card(
            "Signings",
            _search(text, state),
            live(
                "signings-list",
                self._counts(),
                table("Signings", _SIGNINGS, rows, empty),
                pager(page, total, PAGE, "signing", DASHBOARD, {"search": text, "state": state}),
            ),
        )

    def _counts(self) -> Html | None:
        counts = [f"{count:,} {LABELS[state][0].lower()}" for state, count in self._state.service.counts().items()]
        return tag("p", " · ".join(counts), class_="quiet") if counts else None

    def _row(self, request: web.Request, signing: Signing) -> list[Child]:
        service = self._state.service
        documents, recipients = service.documents(signing.id), service.recipients(signing.id)
        return [
            [
                tag("a", theirs(signing.name), href=detail_page(signing.id), class_="title"),
                tag("p", "updated ", moment(signing.updated_at), class_="quiet"),
            ],
            badge(signing.state),
            _first(documents, lambda document: theirs(document.name)),
            _first(recipients, lambda recipient: self._recipient(signing, recipient)),
            signing_actions(self._site, request, signing, "list"),
        ]

    def _recipient(self, signing: Signing, recipient: Recipient) -> Child:
        return [theirs(recipient.full_name), " ", badge(standing(self._state.signatures, signing, recipient))]

    # the side column

    def _endpoints(self) -> Html:
        endpoints = self._state.webhooks.endpoints()
        if not endpoints:
            return tag("div", tag("p", "None: events are recorded, but not delivered."), class_="empty")
        return tag(
            "ul", [tag("li", tag("code", endpoint.url, class_="break")) for endpoint in endpoints], class_="plain"
        )

    def _addresses(self) -> Html:
        return facts(
            ("Base URL", tag("code", self._state.base_url, class_="break")),
            ("OpenAPI", tag("a", "/openapi.json", href="/openapi.json")),
            ("Certificate authority", tag("a", "authority.pem", href="/sandbox/authority.pem")),
        )

    def _clock(self, request: web.Request, filled: Filled) -> Html:
        clock = self._state.clock
        ahead = clock.offset.total_seconds()
        form = self._site.form(
            request,
            f"{DASHBOARD}/clock",
            tag(
                "div",
                text_field("Advance by", "amount", filled, default="1", inputmode="decimal", required=True, size=6),
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
            live(
                "time",
                tag("p", moment(clock.micros()), class_="now"),
                tag("p", f"{duration(ahead)} ahead of real time" if ahead else "Real time", class_="quiet"),
            ),
            form,
            tag("div", jumps, class_="buttons"),
            tag("p", "Expiries and webhook retries follow this clock.", class_="hint"),
        )

    async def advance(self, request: web.Request) -> web.Response:
        """Advance the clock."""
        fields = await self._site.fields(request)
        amount, unit = fields.get("amount", "").strip(), fields.get("unit", "")
        errors = {}
        if not re.fullmatch(_AMOUNT, amount):
            errors["amount"] = [f"Enter a number above 0, such as 14 or 0.5; got {amount!r}."]
        if unit not in UNITS:
            errors["unit"] = ["Choose a unit."]
        if errors:
            return self._overview(request, Filled(fields, errors), 400)
        try:
            self._state.clock.advance(**{unit: float(amount.replace(",", "."))})
        except (ValueError, OverflowError):
            errors = {"amount": [f"The clock cannot be advanced by {amount} {unit}."]}
            return self._overview(request, Filled(fields, errors), 400)
        raise redirect(DASHBOARD, "clock")


def _search(text: str, state: str) -> Html:
    states = [("", "Any state"), *((key, LABELS[key][0]) for key in STATES)]
    label = "Search by name, document, recipient, e-mail address or id"
    return tag(
        "form",
        tag(
            "div",
            text_field(label, "search", Filled({"search": text}), type="search", autocomplete="off"),
            choice_field("State", "state", EMPTY, states, default=state),
            tag("button", "Search", class_="plain"),
            class_="line",
        ),
        method="get",
        action=DASHBOARD,
        role="search",
        aria_label="Signings",
    )


def _first(things: Sequence[Document] | Sequence[Recipient], show: Callable[..., Child]) -> Html:
    if not things:
        return tag("span", "none", class_="quiet")
    shown = [tag("li", show(thing)) for thing in things[:NAMED]]
    rest = len(things) - NAMED
    return tag("ul", shown, tag("li", f"and {rest} more", class_="quiet") if rest > 0 else None, class_="plain")


def duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    parts = []
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1)):
        count, seconds = divmod(seconds, length)
        if count:
            parts.append(f"{count:.0f} {unit}{'s' if count != 1 else ''}")
    return " ".join(parts[:2]) or "less than a second"
