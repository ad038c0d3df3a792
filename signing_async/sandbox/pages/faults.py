"""Faults and the rate limit."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from ..faults import DELIVERY, DELIVERY_KINDS, KINDS, OPERATIONS, Fault
from .components import EMPTY, Filled, card, choice_field, facts, heading, live, rejected, table, text_field
from .markup import Child, Html, tag
from .site import FAULTS, Site, redirect

ABOUT = {
    "429": "The rate limit: 429 with Retry-After; the request has no effect.",
    "503": "503 with Retry-After; the request has no effect.",
    "500": "500; the request has no effect.",
    "500-after-commit": "The request takes effect, but the response is 500.",
    "502-html": "A gateway's 502 in HTML; the request has no effect.",
    "502-html-after-commit": "The request takes effect, but the response is a gateway's 502.",
    "drop-before-commit": "The connection closes without a response; the request has no effect.",
    "drop-after-commit": "The request takes effect, then the connection closes without a response.",
    "truncate": "The request takes effect, but the connection closes in the middle of the response.",
    "truncate-after-commit": "Another name of truncate.",
    "slow": "The response or the delivery comes late.",
    "expired-token": "The access token counts as expired.",
    "empty": "The request takes effect, but the response has no body.",
    "not-json": "The request takes effect, but the response is not JSON.",
    "hang": "No response at all; the connection stays open.",
    "duplicate": "The delivery is sent twice.",
    "reorder": "The delivery and the next one arrive in the wrong order.",
    "wrong-signature": "X-Signature is made with another secret.",
    "drop": "The connection closes in the middle of the delivery.",
    "lose": "The delivery is never sent.",
}
"""What each kind of fault does."""


class FaultsPage:
    """The arranged faults and the rate limit."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._state = site.state

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get(FAULTS, self.page),
            web.post(FAULTS, self.add),
            web.post(f"{FAULTS}/remove", self.remove),
            web.post(f"{FAULTS}/clear", self.clear),
            web.post(f"{FAULTS}/rate-limit", self.limit),
        ]

    async def page(self, request: web.Request) -> web.Response:
        """Show the faults, the rate limit and their forms."""
        return self._page(request, EMPTY, EMPTY)

    def _page(self, request: web.Request, fault: Filled, limit: Filled, status: int = 200) -> web.Response:
        clear = self._site.button(request, f"{FAULTS}/clear", "Remove all", "faults", "plain")
        return self._site.page(
            request,
            "Faults",
            heading("Faults"),
            rejected(fault, limit),
            tag(
                "div",
                tag(
                    "div",
                    card(
                        "Arranged faults",
                        live("fault-list", table_of_faults(self._site, request)),
                        more=clear if self._state.faults.arranged else None,
                    ),
                    self._limit(request, limit),
                    card("What each kind does", facts(*ABOUT.items())),
                ),
                self._form(request, fault),
                class_="two",
            ),
            section=FAULTS,
            status=status,
        )

    def _form(self, request: web.Request, filled: Filled) -> Html:
        operations = [("*", "all operations of /api/1.0"), *((name, name) for name in (*OPERATIONS, DELIVERY))]
        kinds = [(name, name) for name in KINDS]
        kinds += [(name, f"{name} ({DELIVERY})") for name in DELIVERY_KINDS if name not in KINDS]
        form = self._site.form(
            request,
            FAULTS,
            choice_field("Operation", "operation", filled, operations),
            choice_field("Kind", "kind", filled, kinds),
            text_field("Times", "times", filled, "Leave empty for all requests.", default="1", inputmode="numeric"),
            text_field(
                "Seconds",
                "seconds",
                filled,
                "The delay of slow, or the Retry-After of 429 and 503. Leave empty for the default.",
                inputmode="decimal",
            ),
            tag("button", "Arrange fault"),
            class_="stack",
        )
        return card("Arrange a fault", form)

    async def add(self, request: web.Request) -> web.Response:
        """Arrange a fault."""
        fields = await self._site.fields(request)
        try:
            details = _details(fields)
            times = _number("times", fields, r"[0-9]{1,9}")
            self._state.faults.add(
                fields.get("operation", ""), fields.get("kind", ""), None if times is None else int(times), **details
            )
        except ValueError as error:
            return self._page(request, Filled(fields, {}, f"{error}"), EMPTY, 400)
        raise redirect(FAULTS, "fault")

    async def remove(self, request: web.Request) -> web.Response:
        """Remove a fault if it still exists."""
        wanted = (await self._site.fields(request)).get("fault")
        for fault in list(self._state.faults.arranged):
            if fault.id == wanted:
                fault.remove()
        raise redirect(FAULTS, "fault-removed")

    async def clear(self, request: web.Request) -> web.Response:
        """Remove all faults."""
        await self._site.fields(request)
        self._state.faults.clear()
        raise redirect(FAULTS, "faults-cleared")

    # the rate limit

    def _limit(self, request: web.Request, filled: Filled) -> Html:
        form = self._site.form(
            request,
            f"{FAULTS}/rate-limit",
            text_field("Requests per second", "rate", filled, "Leave empty for no limit.", inputmode="decimal"),
            text_field("At once", "burst", filled, "Leave empty for one second's requests.", inputmode="numeric"),
            tag("button", "Set limit"),
            class_="stack",
        )
        limit = self._state.rate_limit
        text = f"{limit.rate:g} per second, {limit.burst} at once; other requests get 429." if limit else "None."
        return card("Rate limit", tag("p", text), form)

    async def limit(self, request: web.Request) -> web.Response:
        """Set or remove the rate limit."""
        fields = await self._site.fields(request)
        try:
            rate = _number("rate", fields, r"[0-9]{1,9}([.][0-9]{1,6})?")
            burst = _number("burst", fields, r"[1-9][0-9]{0,8}")
            self._state.limit_rate(rate, None if burst is None else int(burst))
        except ValueError as error:
            return self._page(request, EMPTY, Filled(fields, {}, f"{error}"), 400)
        raise redirect(FAULTS, "limit" if rate is not None else "limit-lifted")


def table_of_faults(site: Site, request: web.Request) -> Html:
    """Return a table of the arranged faults."""
    rows = [_row(site, request, fault) for fault in site.state.faults.arranged]
    return table("Arranged faults", _HEADERS, rows, tag("p", "None: everything works."))


_HEADERS = ("Kind", "Operation", "Applied", "Actions")


def _row(site: Site, request: web.Request, fault: Fault) -> list[Child]:
    details = ", ".join(f"{name}={value}" for name, value in fault.details.items())
    chance = f"probability {fault.probability:.0%}" if fault.probability < 1 else None
    skip = f"after {fault.skip} more requests" if fault.skip else None
    more = [tag("p", text, class_="quiet") for text in (details, chance, skip) if text]
    about = f"the fault {fault.kind} of {fault.operation}"
    return [
        [tag("strong", fault.kind), more],
        tag("code", fault.operation),
        _hits(fault),
        site.button(request, f"{FAULTS}/remove", "Remove", about, "plain", fault=fault.id),
    ]


def _hits(fault: Fault) -> Child:
    if fault.times is None:
        return f"{fault.hits} times, no limit"
    spent = " – used up" if fault.hits >= fault.times else ""
    return f"{fault.hits} of {fault.times}{spent}"


def _number(name: str, fields: dict[str, str], pattern: str) -> float | None:
    """Return the number in a field, or None if it is empty."""
    text = fields.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(pattern, text):
        raise ValueError(f"{name}: must be a number or empty, got {text!r}")
    return float(text)


def _details(fields: dict[str, str]) -> dict[str, Any]:
    seconds = _number("seconds", fields, r"[0-9]{1,6}([.][0-9]{1,6})?")
    if seconds is None:
        return {}
    return {"retry_after" if fields.get("kind") in {"429", "503"} else "seconds": seconds}
