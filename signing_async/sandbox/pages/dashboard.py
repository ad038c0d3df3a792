"""What the sandbox holds: the dashboard with search and clock, one signing, the inbox, and the request log."""

from __future__ import annotations

import re

from aiohttp import web

from ..refused import Refused, not_found
from ..request_log import BODIES, RequestRecord
from ..service import STATES
from .site import DASHBOARD, EMPTY, INBOX, REQUESTS, STATE, Filled, form, page, page_number, redirect

PAGE = 20
LATEST = 6
MESSAGES = 100
UNITS = ("seconds", "minutes", "hours", "days")


async def dashboard(request: web.Request, filled: Filled = EMPTY) -> web.Response:
    sandbox, query = request.app[STATE], request.query
    text, state = query.get("search", "").strip(), query.get("state", "")
    state = state if state in STATES else ""
    found, total = sandbox.service.search(text, state, (page_number(request) - 1) * PAGE, PAGE)
    return page(
        request,
        "dashboard.html",
        filled,
        found=found,
        total=total,
        size=PAGE,
        query={name: value for name, value in (("search", text), ("state", state)) if value},
        states=STATES,
        requests=_newest(request)[:LATEST],
        deliveries=sandbox.webhooks.deliveries(LATEST)[::-1],
        units=UNITS,
    )


async def advance(request: web.Request) -> web.Response:
    fields = await form(request)
    amount, unit = fields.get("amount", "").strip(), fields.get("unit", "")
    errors = {}
    if unit not in UNITS:
        errors["unit"] = ["Choose a unit."]
    if not re.fullmatch(r"[0-9]{1,9}([.,][0-9]{1,6})?", amount):
        errors["amount"] = [f"Enter a number above 0, such as 14 or 0.5; got {amount!r}."]
    if not errors:
        try:
            request.app[STATE].clock.advance(**{unit: float(amount.replace(",", "."))})
        except (ValueError, OverflowError):
            errors["amount"] = [f"The clock cannot be advanced by {amount} {unit}."]
    if errors:
        return await dashboard(request, Filled(fields, errors, status=400))
    raise redirect(DASHBOARD, "clock")


async def signing(request: web.Request, filled: Filled = EMPTY) -> web.Response:
    found = request.app[STATE].service.signing(request.match_info["signing_id"])
    requests = _newest(request, about=found.id)[:PAGE]
    return page(request, "signing.html", filled, signing=found, requests=requests)


async def finish(request: web.Request) -> web.Response:
    """Cancel a signing, or sign for all recipients who have neither signed nor declined."""
    fields, state, signing_id = await form(request), request.app[STATE], request.match_info["signing_id"]
    try:
        if request.match_info["action"] == "cancel":
            done = state.service.cancel(signing_id)
        else:
            done = await state.signatures.complete(signing_id)
            if done.state == "sent":
                raise Refused(400, "declined", "The signing is not completed: a recipient declined.")
    except Refused as refused:
        return await signing(request, Filled.refused(refused))
    raise redirect(DASHBOARD if fields.get("back") == "list" else f"{DASHBOARD}/signings/{signing_id}", done.state)


async def inbox(request: web.Request) -> web.Response:
    """Show the newest messages, to all addresses or to one."""
    messages = request.app[STATE].invitations.notifications()
    wanted = request.query.get("to", "")
    found = [message for message in reversed(messages) if wanted in ("", message.email)]
    return page(
        request,
        "inbox.html",
        messages=found[:MESSAGES],
        hidden=max(0, len(found) - MESSAGES),
        addresses=sorted({message.email for message in messages}),
        wanted=wanted,
    )


async def requests(request: web.Request) -> web.Response:
    """Show the newest requests to the API; with `?show=all`, also those for pages."""
    everything = request.query.get("show") == "all"
    found, start = _newest(request, everything=everything), (page_number(request) - 1) * PAGE
    shown = found[start : start + PAGE]
    return page(request, "requests.html", everything=everything, requests=shown, total=len(found), size=PAGE)


async def one_request(request: web.Request) -> web.Response:
    record = request.app[STATE].requests.find(request.match_info["request_id"])
    if record is None:
        raise not_found("request: only the newest are kept")
    return page(request, "request.html", record=record, bodies=BODIES)


def _newest(request: web.Request, *, everything: bool = False, about: str = "") -> list[RequestRecord]:
    """Return the requests to the API (or all), newest first, whose path contains `about`."""
    return [
        record
        for record in reversed(request.app[STATE].requests.records)
        if (everything or record.operation is not None or record.path.startswith("/api/")) and about in record.path
    ]


ROUTES = [
    web.get(DASHBOARD, dashboard),
    web.post(f"{DASHBOARD}/clock", advance),
    web.get(f"{DASHBOARD}/signings/{{signing_id}}", signing),
    web.post(f"{DASHBOARD}/signings/{{signing_id}}/{{action:cancel|complete}}", finish),
    web.get(INBOX, inbox),
    web.get(REQUESTS, requests),
    web.get(f"{REQUESTS}/{{request_id}}", one_request),
]
