"""Faults and the rate limit."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from ..faults import DELIVERY, DELIVERY_KINDS, KINDS, OPERATIONS
from .site import EMPTY, FAULTS, Filled, Site, redirect

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
        return self._site.page(
            request,
            "faults.html",
            status,
            fault=fault,
            limit=limit,
            operations=(*OPERATIONS, DELIVERY),
            kinds=[(name, name) for name in KINDS]
            + [(name, f"{name} ({DELIVERY})") for name in DELIVERY_KINDS if name not in KINDS],
            about=ABOUT,
        )

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
