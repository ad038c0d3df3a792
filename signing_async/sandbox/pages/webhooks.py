"""Webhook endpoints, and the deliveries to them."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from ..records import Attempt, Delivery, Endpoint
from ..refused import Refused
from .components import (
    EMPTY,
    Filled,
    alert,
    badge,
    card,
    detail_page,
    facts,
    heading,
    identifier,
    live,
    moment,
    page_number,
    pager,
    rejected,
    table,
    text_field,
)
from .markup import Child, Html, tag
from .requests import code_block
from .site import WEBHOOKS, Site, redirect

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

    async def register(self, request: web.Request) -> web.Response:
        """Register an endpoint and show its secret, which no page shows again."""
        fields = await self._site.fields(request)
        url = fields.get("url", "").strip()
        twice = self._webhooks.is_registered(url)
        try:
            endpoint = self._webhooks.register(url, fields.get("secret") or None)
        except Refused as refused:
            return self._page(request, Filled.refused(fields, refused), refused.status)
        return self._site.page(request, "Endpoint registered", _registered(endpoint, twice=twice), section=WEBHOOKS)

    def _page(self, request: web.Request, filled: Filled, status: int = 200) -> web.Response:
        endpoints = self._webhooks.endpoints()
        rows = [self._endpoint(request, endpoint) for endpoint in endpoints]
        form = self._site.form(
            request,
            WEBHOOKS,
            text_field(
                "URL",
                "url",
                filled,
                ["On this machine, such as ", tag("code", "http://127.0.0.1:8000/webhooks")],
                required=True,
                inputmode="url",
                autocomplete="off",
                spellcheck="false",
            ),
            text_field(
                "Secret",
                "secret",
                EMPTY,
                "Signs every delivery. Leave empty to generate one.",
                type="password",
                autocomplete="new-password",
            ),
            tag("button", "Register"),
            class_="stack",
        )
        page = page_number(request)
        deliveries, total = self._webhooks.page_of_deliveries((page - 1) * PAGE, PAGE)
        log_card = card(
            "Deliveries",
            live(
                "delivery-list",
                table_of_deliveries(self._site, request, deliveries[::-1]),
                pager(page, total, PAGE, "delivery", WEBHOOKS, {}),
            ),
        )
        return self._site.page(
            request,
            "Webhooks",
            heading("Webhooks"),
            rejected(filled),
            tag(
                "div",
                card("Endpoints", table("Endpoints", _ENDPOINTS, rows, _NO_ENDPOINTS)),
                card("Register an endpoint", form),
                class_="two",
            ),
            log_card,
            section=WEBHOOKS,
            status=status,
        )

    def _endpoint(self, request: web.Request, endpoint: Endpoint) -> list[Child]:
        address = f"{WEBHOOKS}/endpoints/{endpoint.id}/remove"
        return [
            [tag("code", endpoint.url, class_="break"), tag("p", identifier(endpoint.id))],
            moment(endpoint.created_at),
            self._site.button(request, address, "Remove", f"the endpoint {endpoint.url}", "plain"),
        ]

    async def remove(self, request: web.Request) -> web.Response:
        """Remove an endpoint."""
        await self._site.fields(request)
        self._webhooks.remove(request.match_info["endpoint_id"])
        raise redirect(WEBHOOKS, "endpoint-removed")

    # one delivery

    async def delivery(self, request: web.Request) -> web.Response:
        """Show a delivery."""
        return self._delivery(request, self._webhooks.delivery(request.match_info["delivery_id"]))

    async def resend(self, request: web.Request) -> web.Response:
        """Deliver an event again."""
        await self._site.fields(request)
        delivery = self._webhooks.delivery(request.match_info["delivery_id"])
        try:
            resent = self._webhooks.resend(delivery.id)
        except Refused as refused:
            return self._delivery(request, delivery, refused.message, refused.status)
        raise redirect(f"{WEBHOOKS}/deliveries/{resent.id}", "resent")

    def _delivery(
        self, request: web.Request, delivery: Delivery, problem: str | None = None, status: int = 200
    ) -> web.Response:
        event = self._webhooks.event(delivery.event_id)
        about = facts(
            ("Delivery", identifier(delivery.id)),
            ("Event", [identifier(event.id), tag("p", "the same in every delivery of this event", class_="quiet")]),
            ("Signing", tag("a", identifier(event.signing_id), href=detail_page(event.signing_id))),
            ("URL", tag("code", delivery.url, class_="break")),
            ("Time", moment(event.created_at)),
            ("Next attempt", moment(delivery.due_at) if delivery.due_at else None),
            ("Last error", _problem(delivery)),
        )
        attempts = self._webhooks.attempts_of(delivery.id)
        cards = [
            tag("div", card(f"Attempt {number}", _attempt(attempt)), class_="attempt")
            for number, attempt in enumerate(attempts, 1)
        ]
        return self._site.page(
            request,
            f"Delivery of {delivery.event_type}",
            tag("p", tag("a", "Webhooks", href=WEBHOOKS), class_="crumb"),
            alert(problem),
            heading(
                delivery.event_type,
                _resend(self._site, request, delivery),
                kind=badge(_state_of(delivery)),
            ),
            tag(
                "div",
                tag(
                    "div",
                    cards or card("Attempts", tag("p", "None yet.")),
                    card(
                        "Body",
                        tag(
                            "p",
                            "Formatted for reading. The signature covers the bytes as they are sent.",
                            class_="hint",
                        ),
                        code_block("The event as JSON", event.body.decode()),
                    ),
                ),
                tag("div", card("About", about), class_="side"),
                class_="columns",
            ),
            section=WEBHOOKS,
            status=status,
        )


def table_of_deliveries(site: Site, request: web.Request, deliveries: Sequence[Delivery]) -> Html:
    """Return a table of deliveries, newest first."""
    empty = [
        tag("p", tag("strong", "No deliveries yet.")),
        tag("p", "Every event of a signing is delivered to every endpoint."),
    ]
    rows = [_row(site, request, delivery) for delivery in reversed(deliveries)]
    return table("Deliveries, newest first", _DELIVERIES, rows, empty)


_ENDPOINTS = ("URL", "Registered", "Actions")
_DELIVERIES = ("Event", "State", "URL", "Last response", "Actions")
_NO_ENDPOINTS = [
    tag("p", tag("strong", "No endpoints yet.")),
    tag("p", "Register the URL of a receiver to get signed events."),
]


def _row(site: Site, request: web.Request, delivery: Delivery) -> list[Child]:
    attempts = f"{delivery.attempts} attempt{'s' if delivery.attempts != 1 else ''}"
    return [
        [
            tag("a", delivery.event_type, href=f"{WEBHOOKS}/deliveries/{delivery.id}", class_="title"),
            tag("p", identifier(delivery.event_id)),
        ],
        [badge(_state_of(delivery)), tag("p", attempts, class_="quiet")],
        tag("code", delivery.url, class_="break"),
        [
            _problem(delivery) or (delivery.last_status if delivery.last_status else tag("span", "–", class_="quiet")),
            tag("p", "retry at ", moment(delivery.due_at), class_="quiet")
            if delivery.due_at and delivery.attempts
            else None,
        ],
        _resend(site, request, delivery),
    ]


def _resend(site: Site, request: web.Request, delivery: Delivery) -> Html:
    address = f"{WEBHOOKS}/deliveries/{delivery.id}/resend"
    return site.button(request, address, "Resend", f"the event {delivery.event_type}", "plain")


def _problem(delivery: Delivery) -> Child:
    if delivery.last_error:
        return tag("span", delivery.last_error, class_="break")
    if delivery.last_status and not 200 <= delivery.last_status < 300:
        return f"HTTP status {delivery.last_status}"
    return None


def _attempt(attempt: Attempt) -> list[Child]:
    seconds = None if attempt.seconds is None else f"{attempt.seconds * 1000:.0f} ms"
    about: list[Child] = [
        facts(
            ("Response", _status(attempt)),
            ("Time", moment(attempt.at)),
            ("Duration", seconds),
            ("Fault", attempt.fault),
        ),
        code_block("X-Signature", attempt.signature) if attempt.signature else None,
    ]
    if attempt.headers is None:
        return about
    lines = "\n".join(f"{name}: {value}" for name, value in attempt.headers.items())
    body = code_block("Body of the response", attempt.body) if attempt.body else tag("p", "No body.", class_="quiet")
    return [*about, code_block("Headers of the response", lines), body]


def _status(attempt: Attempt) -> Html:
    if attempt.status is None:
        return tag("span", attempt.error, class_="break")
    tone = "good" if 200 <= attempt.status < 300 else "bad"
    return tag("span", attempt.status, class_=f"badge {tone}")


def _registered(endpoint: Endpoint, *, twice: bool) -> Html:
    return tag(
        "div",
        heading("Endpoint registered"),
        card(
            "Copy the secret now",
            tag(
                "p",
                "The webhook secret is shown only once. The receiver needs it to verify X-Signature.",
                class_="warning",
            ),
            tag("p", "This URL was registered before: it gets every event once more.", class_="warning")
            if twice
            else None,
            facts(
                ("URL", tag("code", endpoint.url, class_="break")),
                ("Secret", tag("code", endpoint.secret, class_="id", id="webhook-secret")),
            ),
            tag("p", tag("a", "Done, back to the webhooks", href=WEBHOOKS, class_="button")),
        ),
        class_="secret",
    )


def _state_of(delivery: Delivery) -> str:
    return "retrying" if delivery.state == "pending" and delivery.attempts else delivery.state
