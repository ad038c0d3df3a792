"""What the sandbox holds: the dashboard with search and clock, one signing, the inbox, and the request log."""

from __future__ import annotations

import re

from aiohttp import web

from ..refused import Refused, not_found
from ..request_log import BODIES, RequestRecord
from ..service import STATES
from ..state import State
from .site import DASHBOARD, EMPTY, INBOX, REQUESTS, Filled, Site, page_number, redirect
from .texts import LANGUAGES

PAGE = 20
LATEST = 6
MESSAGES = 100
UNITS = ("seconds", "minutes", "hours", "days")
_AMOUNT = r"[0-9]{1,9}([.,][0-9]{1,6})?"
_SIGNING = f"{DASHBOARD}/signings/{{signing_id}}"


class Dashboard:
    """The overview of the sandbox, and the pages with its details."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._state = site.state

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get(DASHBOARD, self.overview),
            web.post(f"{DASHBOARD}/clock", self.advance),
            web.get(_SIGNING, self.signing),
            web.post(f"{_SIGNING}/{{action:cancel|complete}}", self.finish),
            web.get(INBOX, self.inbox),
            web.get(REQUESTS, self.requests),
            web.get(f"{REQUESTS}/{{request_id}}", self.request),
        ]

    async def overview(self, request: web.Request) -> web.Response:
        """Show the dashboard."""
        return self._overview(request, EMPTY)

    def _overview(self, request: web.Request, filled: Filled, status: int = 200) -> web.Response:
        text, state = request.query.get("search", "").strip(), request.query.get("state", "")
        state = state if state in STATES else ""
        found, total = self._state.service.search(text, state, (page_number(request) - 1) * PAGE, PAGE)
        return self._site.page(
            request,
            "dashboard.html",
            status,
            found=found,
            total=total,
            size=PAGE,
            query={name: value for name, value in (("search", text), ("state", state)) if value},
            states=STATES,
            requests=_newest(self._state)[:LATEST],
            deliveries=self._state.webhooks.deliveries(LATEST)[::-1],
            units=UNITS,
            filled=filled,
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
        if not errors:
            try:
                self._state.clock.advance(**{unit: float(amount.replace(",", "."))})
            except (ValueError, OverflowError):
                errors["amount"] = [f"The clock cannot be advanced by {amount} {unit}."]
        if errors:
            return self._overview(request, Filled(fields, errors), 400)
        raise redirect(DASHBOARD, "clock")

    # one signing

    async def signing(self, request: web.Request) -> web.Response:
        """Show a signing."""
        return self._signing(request)

    def _signing(self, request: web.Request, problem: str | None = None, status: int = 200) -> web.Response:
        signing = self._state.service.signing(request.match_info["signing_id"])
        requests = _newest(self._state, about=signing.id)[:PAGE]
        return self._site.page(
            request, "signing.html", status, signing=signing, requests=requests, filled=Filled(problem=problem)
        )

    async def finish(self, request: web.Request) -> web.Response:
        """Cancel a signing, or sign for all recipients who have neither signed nor declined."""
        fields, signing_id = await self._site.fields(request), request.match_info["signing_id"]
        try:
            if request.match_info["action"] == "cancel":
                signing = self._state.service.cancel(signing_id)
            else:
                signing = await self._state.signatures.complete(signing_id)
        except Refused as refused:
            return self._signing(request, refused.message, refused.status)
        if signing.state == "sent":
            return self._signing(request, "The signing is not completed: a recipient declined.", 400)
        raise redirect(DASHBOARD if fields.get("back") == "list" else request.path.rpartition("/")[0], signing.state)

    # the inbox

    async def inbox(self, request: web.Request) -> web.Response:
        """Show the newest messages, to all addresses or to one."""
        messages = self._state.invitations.notifications()
        wanted = request.query.get("to", "")
        found = [message for message in reversed(messages) if wanted in ("", message.email)]
        return self._site.page(
            request,
            "inbox.html",
            messages=found[:MESSAGES],
            hidden=max(0, len(found) - MESSAGES),
            addresses=sorted({message.email for message in messages}),
            wanted=wanted,
            languages=LANGUAGES,
        )

    # the request log

    async def requests(self, request: web.Request) -> web.Response:
        """Show the newest requests to the API; with `?show=all`, also those for pages."""
        everything = request.query.get("show") == "all"
        found = _newest(self._state, everything=everything)
        start = (page_number(request) - 1) * PAGE
        return self._site.page(
            request,
            "requests.html",
            everything=everything,
            requests=found[start : start + PAGE],
            total=len(found),
            size=PAGE,
        )

    async def request(self, request: web.Request) -> web.Response:
        """Show one request and its response."""
        record = self._state.requests.find(request.match_info["request_id"])
        if record is None:
            raise not_found("request: only the newest are kept")
        return self._site.page(request, "request.html", record=record, bodies=BODIES)


def _newest(state: State, *, everything: bool = False, about: str = "") -> list[RequestRecord]:
    """Return the requests to the API (or all), newest first, whose path contains `about`."""
    return [
        record
        for record in reversed(state.requests.records)
        if (everything or record.operation is not None or record.path.startswith("/api/")) and about in record.path
    ]
