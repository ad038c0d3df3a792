"""Arrange faults and a rate limit."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from ..faults import DELIVERY, DELIVERY_KINDS, KINDS, OPERATIONS, Fault
from .markup import Child, Html, tag
from .site import EMPTY, FAULTS, Filled, Site, card, choice_field, heading, rejected, see, table, text_field


class FaultsPage:
    """The levers for what goes wrong."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._sandbox = site.sandbox

    def routes(self) -> list[web.RouteDef]:
        """The page and its forms."""
        return [
            web.get(FAULTS, self.page),
            web.post(FAULTS, self.add),
            web.post(f"{FAULTS}/remove", self.remove),
            web.post(f"{FAULTS}/clear", self.clear),
            web.post(f"{FAULTS}/rate-limit", self.limit),
        ]

    async def page(self, request: web.Request) -> web.Response:
        """What is in force, and the forms."""
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
                        "Faults in force",
                        in_force(self._site, request),
                        more=clear if self._sandbox.faults.arranged else None,
                    ),
                    self._limit(request, limit),
                ),
                self._form(request, fault),
                class_="two",
            ),
            section=FAULTS,
            status=status,
        )

    def _form(self, request: web.Request, filled: Filled) -> Html:
        operations = [("*", "every operation of /api/1.0"), *((name, name) for name in (*OPERATIONS, DELIVERY))]
        kinds = [(name, name) for name in KINDS]
        kinds += [(name, f"{name} ({DELIVERY})") for name in DELIVERY_KINDS if name not in KINDS]
        form = self._site.form(
            request,
            FAULTS,
            choice_field("Operation", "operation", filled, operations),
            choice_field("Kind", "kind", filled, kinds),
            text_field("Times", "times", filled, "Empty: every time.", default="1", inputmode="numeric"),
            text_field(
                "Seconds",
                "seconds",
                filled,
                "How long a slow answer takes, or what Retry-After says (429 and 503). Empty: as usual.",
                inputmode="decimal",
            ),
            tag("button", "Arrange"),
            class_="stack",
        )
        return card("Arrange a fault", form)

    async def add(self, request: web.Request) -> web.Response:
        """Arrange a fault."""
        fields = await self._site.fields(request)
        try:
            details = _details(fields)
            times = _number("times", fields, r"[0-9]{1,9}")
            self._sandbox.faults.add(
                fields.get("operation", ""), fields.get("kind", ""), None if times is None else int(times), **details
            )
        except ValueError as error:
            return self._page(request, Filled(fields, {}, f"{error}"), EMPTY, 400)
        raise see(FAULTS, "fault")

    async def remove(self, request: web.Request) -> web.Response:
        """Remove a fault; that it is gone already is just as well."""
        wanted = (await self._site.fields(request)).get("fault")
        for fault in list(self._sandbox.faults.arranged):
            if _key(fault) == wanted:
                fault.remove()
        raise see(FAULTS, "fault-removed")

    async def clear(self, request: web.Request) -> web.Response:
        """Remove all faults."""
        await self._site.fields(request)
        self._sandbox.faults.clear()
        raise see(FAULTS, "faults-cleared")

    # the rate limit

    def _limit(self, request: web.Request, filled: Filled) -> Html:
        form = self._site.form(
            request,
            f"{FAULTS}/rate-limit",
            text_field("Requests a second", "rate", filled, "Empty: no limit.", inputmode="decimal"),
            text_field("At once", "burst", filled, "Empty: one second's worth.", inputmode="numeric"),
            tag("button", "Set the limit"),
            class_="stack",
        )
        limit = self._sandbox.current_rate_limit
        said = f"{limit.rate:g} a second, {limit.burst} at once; more get 429." if limit else "None."
        return card("Rate limit", tag("p", said), form)

    async def limit(self, request: web.Request) -> web.Response:
        """Set or lift the rate limit."""
        fields = await self._site.fields(request)
        try:
            rate = _number("rate", fields, r"[0-9]{1,9}([.][0-9]{1,6})?")
            burst = _number("burst", fields, r"[1-9][0-9]{0,8}")
            self._sandbox.rate_limit(rate, None if burst is None else int(burst))
        except ValueError as error:
            return self._page(request, EMPTY, Filled(fields, {}, f"{error}"), 400)
        raise see(FAULTS, "limit" if rate is not None else "limit-lifted")


def in_force(site: Site, request: web.Request) -> Html:
    """The arranged faults as a table, each with a button that removes it."""
    rows = [_row(site, request, fault) for fault in site.sandbox.faults.arranged]
    return table("Faults in force", _HEADERS, rows, tag("p", "None: everything works."))


_HEADERS = ("Kind", "Operation", "Struck", "Actions")


def _row(site: Site, request: web.Request, fault: Fault) -> list[Child]:
    details = ", ".join(f"{name}={value}" for name, value in fault.details.items())
    chance = f"by {fault.probability:.0%} chance" if fault.probability < 1 else None
    skip = f"after {fault.skip} more" if fault.skip else None
    more = [tag("p", text, class_="quiet") for text in (details, chance, skip) if text]
    about = f"the fault {fault.kind} of {fault.operation}"
    return [
        [tag("strong", fault.kind), more],
        tag("code", fault.operation),
        _struck(fault),
        site.button(request, f"{FAULTS}/remove", "Remove", about, "plain", fault=_key(fault)),
    ]


def _struck(fault: Fault) -> Child:
    if fault.times is None:
        return f"{fault.hits} times, without end"
    spent = " – used up" if fault.hits >= fault.times else ""
    return f"{fault.hits} of {fault.times}{spent}"


def _key(fault: Fault) -> str:
    return f"{id(fault):x}"


def _number(name: str, fields: dict[str, str], pattern: str) -> float | None:
    """The number in a field, None when it is empty, a ValueError when it is none."""
    text = fields.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(pattern, text):
        raise ValueError(f"{name} must be a number, or empty, not {text!r}")
    return float(text)


def _details(fields: dict[str, str]) -> dict[str, Any]:
    seconds = _number("seconds", fields, r"[0-9]{1,6}([.][0-9]{1,6})?")
    if seconds is None:
        return {}
    return {"retry_after" if fields.get("kind") in {"429", "503"} else "seconds": seconds}
