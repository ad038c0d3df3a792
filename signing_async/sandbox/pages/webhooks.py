"""Webhook endpoints, and the deliveries to them."""

from __future__ import annotations

from aiohttp import web

from ..records import Delivery
from ..refused import Refused
from .site import EMPTY, WEBHOOKS, Filled, Site, page_number, redirect

PAGE = 25


class Webhooks:
    """The endpoints, the deliveries, and one delivery with its attempts."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._webhooks = site.state.webhooks

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get(WEBHOOKS, self.page),
            web.post(WEBHOOKS, self.register),
            web.post(f"{WEBHOOKS}/endpoints/{{endpoint_id}}/remove", self.remove),
            web.get(f"{WEBHOOKS}/deliveries/{{delivery_id}}", self.delivery),
            web.post(f"{WEBHOOKS}/deliveries/{{delivery_id}}/resend", self.resend),
        ]

    async def page(self, request: web.Request) -> web.Response:
        """Show the endpoints and the newest deliveries."""
        return self._page(request, EMPTY)

    def _page(self, request: web.Request, filled: Filled, status: int = 200) -> web.Response:
        deliveries, total = self._webhooks.page_of_deliveries((page_number(request) - 1) * PAGE, PAGE)
        return self._site.page(
            request, "webhooks.html", status, deliveries=deliveries, total=total, size=PAGE, filled=filled
        )

    async def register(self, request: web.Request) -> web.Response:
        """Register an endpoint and show its secret, which no page shows again."""
        fields = await self._site.fields(request)
        url = fields.get("url", "").strip()
        twice = self._webhooks.is_registered(url)
        try:
            endpoint = self._webhooks.register(url, fields.pop("secret", None) or None)
        except Refused as refused:
            return self._page(request, Filled.refused(fields, refused), refused.status)
        return self._site.page(request, "endpoint_registered.html", endpoint=endpoint, twice=twice)

    async def remove(self, request: web.Request) -> web.Response:
        """Remove an endpoint."""
        await self._site.fields(request)
        self._webhooks.remove(request.match_info["endpoint_id"])
        raise redirect(WEBHOOKS, "endpoint-removed")

    async def delivery(self, request: web.Request) -> web.Response:
        """Show a delivery."""
        return self._delivery(request, self._webhooks.delivery(request.match_info["delivery_id"]))

    def _delivery(
        self, request: web.Request, delivery: Delivery, problem: str | None = None, status: int = 200
    ) -> web.Response:
        return self._site.page(
            request,
            "delivery.html",
            status,
            delivery=delivery,
            event=self._webhooks.event(delivery.event_id),
            attempts=self._webhooks.attempts_of(delivery.id),
            filled=Filled(problem=problem),
        )

    async def resend(self, request: web.Request) -> web.Response:
        """Deliver an event again."""
        await self._site.fields(request)
        delivery = self._webhooks.delivery(request.match_info["delivery_id"])
        try:
            resent = self._webhooks.resend(delivery.id)
        except Refused as refused:
            return self._delivery(request, delivery, refused.message, refused.status)
        raise redirect(f"{WEBHOOKS}/deliveries/{resent.id}", "resent")
