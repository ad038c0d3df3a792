"""Webhook endpoints, and how the deliveries to them went."""

from __future__ import annotations

import json
from collections.abc import Sequence

from aiohttp import web

from ..records import Attempt, Delivery, Endpoint
from ..refused import Refused
from .markup import Child, Html, tag
from .site import (
    EMPTY,
    WEBHOOKS,
    Filled,
    Site,
    alert,
    badge,
    card,
    detail_page,
    facts,
    heading,
    identifier,
    moment,
    rejected,
    see,
    table,
    text_field,
)

MOST = 100


class Webhooks:
    """The endpoints, the log, and one delivery whole."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._webhooks = site.sandbox.webhooks

    def routes(self) -> list[web.RouteDef]:
        """The pages and their forms."""
        return [
            web.get(WEBHOOKS, self.page),
            web.post(WEBHOOKS, self.register),
            web.post(f"{WEBHOOKS}/endpoints/{{endpoint_id}}/remove", self.remove),
            web.get(f"{WEBHOOKS}/deliveries/{{delivery_id}}", self.delivery),
            web.post(f"{WEBHOOKS}/deliveries/{{delivery_id}}/resend", self.resend),
        ]

    async def page(self, request: web.Request) -> web.Response:
        """The endpoints, a form for a new one, and the newest deliveries."""
        return self._page(request, EMPTY)

    async def register(self, request: web.Request) -> web.Response:
        """Register an endpoint and show its secret, this once."""
        fields = await self._site.fields(request)
        try:
            endpoint = self._webhooks.register(fields.get("url", "").strip(), fields.get("secret") or None)
        except Refused as refused:
            return self._page(request, Filled.refused(fields, refused), refused.status)
        return self._site.page(request, "Endpoint registered", _registered(endpoint), section=WEBHOOKS)

    def _page(self, request: web.Request, filled: Filled, status: int = 200) -> web.Response:
        endpoints = self._webhooks.endpoints()
        rows = [self._endpoint(request, endpoint) for endpoint in endpoints]
        form = self._site.form(
            request,
            WEBHOOKS,
            text_field(
                "Address",
                "url",
                filled,
                ["On this machine, as in ", tag("code", "http://127.0.0.1:8000/webhooks")],
                required=True,
                inputmode="url",
                autocomplete="off",
                spellcheck="false",
            ),
            text_field(
                "Secret",
                "secret",
                EMPTY,
                "It signs every delivery. Empty: the sandbox makes one.",
                type="password",
                autocomplete="new-password",
            ),
            tag("button", "Register"),
            class_="stack",
        )
        log_card = card(
            "Deliveries",
            log(self._site, request, self._webhooks.deliveries(MOST)),
            more=tag("a", "Refresh", href=WEBHOOKS),
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
        """Deliver nothing more to an endpoint."""
        await self._site.fields(request)
        self._webhooks.remove(request.match_info["endpoint_id"])
        raise see(WEBHOOKS, "endpoint-removed")

    # one delivery

    async def delivery(self, request: web.Request) -> web.Response:
        """One delivery: its body, and each try."""
        return self._delivery(request, self._webhooks.delivery(request.match_info["delivery_id"]))

    async def resend(self, request: web.Request) -> web.Response:
        """Deliver an event once more."""
        await self._site.fields(request)
        delivery = self._webhooks.delivery(request.match_info["delivery_id"])
        try:
            again = self._webhooks.resend(delivery.id)
        except Refused as refused:
            return self._delivery(request, delivery, refused.message, refused.status)
        raise see(f"{WEBHOOKS}/deliveries/{again.id}", "resent")

    def _delivery(
        self, request: web.Request, delivery: Delivery, problem: str | None = None, status: int = 200
    ) -> web.Response:
        event = self._webhooks.event(delivery.event_id)
        about = facts(
            ("Delivery", identifier(delivery.id)),
            ("Event", [identifier(event.id), tag("p", "the same in every repetition", class_="quiet")]),
            ("Signing", tag("a", identifier(event.signing_id), href=detail_page(event.signing_id))),
            ("To", tag("code", delivery.url, class_="break")),
            ("Happened", moment(event.created_at)),
            ("Next try", moment(delivery.due_at) if delivery.due_at else None),
            ("Last problem", _problem(delivery)),
        )
        attempts = map(_attempt, self._webhooks.attempts_of(delivery.id))
        return self._site.page(
            request,
            f"Delivery of {delivery.event_type}",
            tag("p", tag("a", "Webhooks", href=WEBHOOKS), class_="crumb"),
            alert(problem),
            heading(
                delivery.event_type,
                tag(
                    "div",
                    _resend(self._site, request, delivery),
                    tag("a", "Refresh", href=request.path, class_="button plain small"),
                    class_="buttons",
                ),
                kind=badge(delivery.state),
            ),
            tag(
                "div",
                tag(
                    "div",
                    card("Tries", table("Tries", _ATTEMPTS, attempts, tag("p", "Not tried yet."))),
                    card(
                        "Body",
                        tag(
                            "p", "Shown with line breaks; what is signed are the bytes as they are sent.", class_="hint"
                        ),
                        tag(
                            "pre",
                            tag("code", _pretty(event.body)),
                            tabindex=0,
                            role="region",
                            aria_label="The event as JSON",
                        ),
                    ),
                ),
                tag("div", card("About", about), class_="side"),
                class_="columns",
            ),
            section=WEBHOOKS,
            status=status,
        )


def log(site: Site, request: web.Request, deliveries: Sequence[Delivery]) -> Html:
    """Deliveries as a table, newest first, each with a button that sends it once more."""
    empty = [
        tag("p", tag("strong", "No delivery yet.")),
        tag("p", "Each change of a signing is told to each endpoint."),
    ]
    rows = [_row(site, request, delivery) for delivery in reversed(deliveries)]
    return table("Deliveries, newest first", _DELIVERIES, rows, empty)


_ENDPOINTS = ("Address", "Registered", "Actions")
_DELIVERIES = ("Event", "State", "To", "Last answer", "Actions")
_ATTEMPTS = ("When", "Answer", "Fault")
_NO_ENDPOINTS = [
    tag("p", tag("strong", "No endpoint yet.")),
    tag("p", "Register the address of a receiver to get signed events."),
]


def _row(site: Site, request: web.Request, delivery: Delivery) -> list[Child]:
    tries = f"{delivery.attempts} {'try' if delivery.attempts == 1 else 'tries'}"
    return [
        [
            tag("a", delivery.event_type, href=f"{WEBHOOKS}/deliveries/{delivery.id}", class_="title"),
            tag("p", identifier(delivery.event_id)),
        ],
        [badge(delivery.state), tag("p", tries, class_="quiet")],
        tag("code", delivery.url, class_="break"),
        [
            _problem(delivery) or (delivery.last_status if delivery.last_status else tag("span", "–", class_="quiet")),
            tag("p", "again at ", moment(delivery.due_at), class_="quiet")
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
    return [
        moment(attempt.at),
        attempt.status if attempt.status is not None else tag("span", attempt.error, class_="break"),
        attempt.fault or tag("span", "–", class_="quiet"),
    ]


def _pretty(body: bytes) -> str:
    return json.dumps(json.loads(body), indent=2, ensure_ascii=False)


def _registered(endpoint: Endpoint) -> Html:
    return tag(
        "div",
        heading("Endpoint registered"),
        card(
            "Keep the secret now",
            tag(
                "p",
                "The webhook secret is shown this once. The receiver needs it to check X-Signature.",
                class_="warning",
            ),
            facts(
                ("Address", tag("code", endpoint.url, class_="break")),
                ("Secret", tag("code", endpoint.secret, class_="id", id="webhook-secret")),
            ),
            tag("p", tag("a", "I have kept it: back to the webhooks", href=WEBHOOKS, class_="button")),
        ),
        class_="secret",
    )
