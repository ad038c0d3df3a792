"""Webhook endpoints, and the deliveries to them."""

from __future__ import annotations

from aiohttp import web

from ..refused import Refused
from .site import EMPTY, STATE, WEBHOOKS, Filled, form, page, page_number, redirect

PAGE = 25


async def webhooks(request: web.Request, filled: Filled = EMPTY) -> web.Response:
    """Show the endpoints and the newest deliveries."""
    start = (page_number(request) - 1) * PAGE
    deliveries, total = request.app[STATE].webhooks.page_of_deliveries(start, PAGE)
    return page(request, "webhooks.html", filled, deliveries=deliveries, total=total, size=PAGE)


async def register(request: web.Request) -> web.Response:
    """Register an endpoint and show its secret, which no page shows again."""
    fields, registered = await form(request), request.app[STATE].webhooks
    url = fields.get("url", "").strip()
    twice = registered.is_registered(url)
    try:
        endpoint = registered.register(url, fields.pop("secret", None) or None)
    except Refused as refused:
        return await webhooks(request, Filled.refused(refused, fields))
    return page(request, "endpoint_registered.html", endpoint=endpoint, twice=twice)


async def remove(request: web.Request) -> web.Response:
    await form(request)
    request.app[STATE].webhooks.remove(request.match_info["endpoint_id"])
    raise redirect(WEBHOOKS, "endpoint-removed")


async def delivery(request: web.Request, filled: Filled = EMPTY) -> web.Response:
    deliveries = request.app[STATE].webhooks
    found = deliveries.delivery(request.match_info["delivery_id"])
    event, attempts = deliveries.event(found.event_id), deliveries.attempts_of(found.id)
    return page(request, "delivery.html", filled, delivery=found, event=event, attempts=attempts)


async def resend(request: web.Request) -> web.Response:
    await form(request)
    deliveries = request.app[STATE].webhooks
    found = deliveries.delivery(request.match_info["delivery_id"])
    try:
        resent = deliveries.resend(found.id)
    except Refused as refused:
        return await delivery(request, Filled.refused(refused))
    raise redirect(f"{WEBHOOKS}/deliveries/{resent.id}", "resent")


ROUTES = [
    web.get(WEBHOOKS, webhooks),
    web.post(WEBHOOKS, register),
    web.post(f"{WEBHOOKS}/endpoints/{{endpoint_id}}/remove", remove),
    web.get(f"{WEBHOOKS}/deliveries/{{delivery_id}}", delivery),
    web.post(f"{WEBHOOKS}/deliveries/{{delivery_id}}/resend", resend),
]
