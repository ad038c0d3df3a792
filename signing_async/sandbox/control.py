"""The control API under /sandbox/api, for test suites in any language. It is not part of the documented service."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web
from yarl import URL

from .. import _checks
from .clock import to_datetime
from .records import Delivery
from .refused import Refused, invalid, not_found
from .request_body import read_json
from .request_log import CONTROL_API
from .service import STATES

if TYPE_CHECKING:
    from .state import State

MOST = 1000
"""The maximum number of items in a response."""

_SIGNING = (
    "id", "tenant", "name", "state", "language", "signing_order", "message", "created_at", "updated_at", "sent_at",
    "completed_at", "cancelled_at",
)  # fmt: skip
_DOCUMENT = ("id", "name", "size", "sha256", "created_at", "completed_at")
_RECIPIENT = (
    "id", "signing_id", "email", "first_name", "last_name", "signing_method", "order", "invited_at", "expires_at",
    "reminders", "completed_at", "declined_at",
)  # fmt: skip
_NOTIFICATION = ("kind", "signing_id", "recipient_id", "email", "sent_at")
_FAULT = ("id", "operation", "kind", "times", "probability", "skip", "details", "hits")
_RATE_LIMIT = ("rate", "burst", "retry_after")
_REQUEST = ("id", "received_at", "operation", "method", "path", "query", "status", "fault", "seconds")
_BODIES = ("headers", "request_body", "response_headers", "response_body")
_APP = ("client_id", "client_secret", "name", "redirect_uri")
_ENDPOINT = ("id", "url", "created_at")
_DELIVERY = ("id", "event_id", "event_type", "endpoint_id", "url", "state", "due_at", "last_status", "last_error")
_ATTEMPT = ("seconds", "fault", "signature", "status", "error")

Body = dict[str, Any]
Handler = Callable[[web.Request, Body], Body | Awaitable[Body] | None]


class Control:
    """The control API. Each handler gets the request and its JSON object, and returns that of the response."""

    def __init__(self, state: State) -> None:
        self._state = state

    def routes(self) -> list[web.RouteDef]:
        faults, webhooks = self._state.faults, self._state.webhooks
        table: list[tuple[str, str, int, Handler]] = [
            ("POST", "/reset", 200, lambda *_: self._state.reset()),
            ("POST", "/access-tokens", 201, self._create_token),
            ("POST", "/apps", 201, self._register_app),
            ("POST", "/apps/{id}/authorize", 201, self._authorize),
            ("GET", "/clock", 200, self._clock),
            ("POST", "/clock/advance", 200, self._advance),
            ("GET", "/signings", 200, self._signings),
            ("GET", "/signings/{id}", 200, lambda request, _: self._encode_signing(_id(request))),
            ("POST", "/signings/{id}/complete", 200, self._act),
            ("POST", "/signings/{id}/cancel", 200, self._act),
            ("POST", "/recipients/{id}/sign", 200, self._act),
            ("POST", "/recipients/{id}/decline", 200, self._act),
            ("GET", "/notifications", 200, self._notifications),
            ("GET", "/faults", 200, lambda *_: {"items": [_encode(fault, _FAULT) for fault in faults.arranged]}),
            ("POST", "/faults", 201, self._add_fault),
            ("DELETE", "/faults", 200, lambda *_: faults.clear()),
            ("DELETE", "/faults/{id}", 200, self._remove_fault),
            ("GET", "/rate-limit", 200, self._rate_limit),
            ("PUT", "/rate-limit", 200, self._set_rate_limit),
            ("GET", "/requests", 200, self._requests),
            ("GET", "/requests/{id}", 200, self._request),
            ("GET", "/webhooks", 200, lambda *_: {"items": [_encode(e, _ENDPOINT) for e in webhooks.endpoints()]}),
            ("POST", "/webhooks", 201, self._add_webhook),
            ("DELETE", "/webhooks/{id}", 200, lambda request, _: webhooks.remove(_id(request))),
            ("GET", "/deliveries", 200, self._deliveries),
            ("GET", "/deliveries/{id}", 200, lambda request, _: self._details(webhooks.delivery(_id(request)))),
            ("POST", "/deliveries/{id}/resend", 201, lambda request, _: self._details(webhooks.resend(_id(request)))),
        ]
        routes = [
            web.route(method, CONTROL_API + path, partial(self._serve, handler, status))
            for method, path, status, handler in table
        ]
        return [*routes, web.get("/sandbox/authority.pem", self._authority)]

    async def _serve(self, handler: Handler, status: int, request: web.Request) -> web.Response:
        self._state.forms.check_site(request)
        if request.method != "GET" and request.headers.get("Sec-Fetch-Site", "none") not in {"none", "same-origin"}:
            raise Refused(403, "foreign_origin", "Requests from another site are not allowed.")
        body = await read_json(request) if request.body_exists else {}
        try:
            value = handler(request, body)
        except (ValueError, TypeError, OverflowError) as error:
            # The arguments are the body's fields: a message that begins with a field's name is about that field.
            name, _, problem = str(error).partition(": ")
            if name in body:
                raise _invalid(name, problem) from None
            raise Refused(400, "validation_failed", str(error)) from None
        value = await value if isinstance(value, Awaitable) else value
        return web.json_response(value or {}, status=status, dumps=partial(json.dumps, ensure_ascii=False))

    # the sandbox

    def _create_token(self, _: web.Request, body: Body) -> Body:
        lifetime = body.get("lifetime")
        if lifetime is not None:
            _checks.number("lifetime", lifetime, above=0, at_most=1e9, error=ValueError)
        return {"access_token": self._state.accounts.access_token(lifetime=lifetime)}

    def _register_app(self, _: web.Request, body: Body) -> Body:
        name, redirect_uri = _text(body, "name"), _text(body, "redirect_uri")
        return _encode(self._state.accounts.register_app(name, redirect_uri), _APP)

    def _authorize(self, request: web.Request, body: Body) -> Body:
        accounts, app = self._state.accounts, self._state.accounts.app(_id(request))
        if app is None:
            raise not_found("app")
        query = {name: _text(body, name) for name in body}
        code = accounts.authorize(app, challenge=accounts.code_challenge(query))
        state = {"state": query["state"]} if "state" in query else {}
        return {"code": code, "callback_url": str(URL(app.redirect_uri).update_query({"code": code, **state}))}

    def _clock(self, _: web.Request, __: Body) -> Body:
        clock = self._state.clock
        return {"now": clock.now().isoformat(), "ahead_seconds": clock.offset.total_seconds()}

    def _advance(self, request: web.Request, body: Body) -> Body:
        for name in body.keys() - {"days", "hours", "minutes", "seconds"}:
            raise _invalid(name, "unknown field; use days, hours, minutes, seconds")
        self._state.clock.advance(**body)
        return self._clock(request, body)

    # signings and recipients

    def _signings(self, request: web.Request, _: Body) -> Body:
        state = request.query.get("state", "")
        if state and state not in STATES:
            raise _invalid("state", f"must be one of {', '.join(STATES)}, got {state!r}")
        found, total = self._state.service.search(request.query.get("search", ""), state, 0, _limit(request))
        return {"items": [_encode(signing, _SIGNING) for signing in found], "total": total}

    async def _act(self, request: web.Request, _: Body) -> Body:
        action, signatures = request.path.rpartition("/")[2], self._state.signatures
        if action == "cancel":
            return self._encode_signing(self._state.service.cancel(_id(request)).id)
        actions = {"complete": signatures.complete, "sign": signatures.sign, "decline": signatures.decline}
        return self._encode_signing((await actions[action](_id(request))).id)

    def _encode_signing(self, signing_id: str) -> Body:
        service, page = self._state.service, f"{self._state.base_url}/sandbox/sign"
        return _encode(service.signing(signing_id), _SIGNING) | {
            "documents": [_encode(document, _DOCUMENT) for document in service.documents(signing_id)],
            "recipients": [
                _encode(recipient, _RECIPIENT) | {"signing_page": f"{page}/{recipient.id}"}
                for recipient in service.recipients(signing_id)
            ],
        }

    def _notifications(self, request: web.Request, _: Body) -> Body:
        email = request.query.get("email")
        found = [sent for sent in self._state.invitations.notifications() if email in {None, sent.email}]
        return _newest(found, _limit(request), _NOTIFICATION)

    # faults

    def _add_fault(self, _: web.Request, body: Body) -> Body:
        _text(body, "operation")
        _text(body, "kind")
        return _encode(self._state.faults.add(**body), _FAULT)

    def _remove_fault(self, request: web.Request, _: Body) -> Body:
        for fault in self._state.faults.arranged:
            if fault.id == _id(request):
                fault.remove()
                return {}
        raise not_found("fault")

    def _rate_limit(self, _: web.Request, __: Body) -> Body:
        limit = self._state.rate_limit
        return _encode(limit, _RATE_LIMIT) if limit else dict.fromkeys(_RATE_LIMIT)

    def _set_rate_limit(self, request: web.Request, body: Body) -> Body:
        self._state.limit_rate(**body)
        return self._rate_limit(request, body)

    # requests

    def _requests(self, request: web.Request, _: Body) -> Body:
        operation = request.query.get("operation")
        found = [record for record in self._state.requests.records if operation in {None, record.operation}]
        return _newest(found, _limit(request), _REQUEST)

    def _request(self, request: web.Request, _: Body) -> Body:
        record = self._state.requests.find(_id(request))
        if record is None:
            raise not_found("request")
        return _encode(record, _REQUEST + _BODIES)

    # webhooks

    def _add_webhook(self, _: web.Request, body: Body) -> Body:
        secret = None if body.get("secret") is None else _text(body, "secret")
        return _encode(self._state.webhooks.register(_text(body, "url"), secret), (*_ENDPOINT, "secret"))

    def _deliveries(self, request: web.Request, _: Body) -> Body:
        found = self._state.webhooks.deliveries(_limit(request))
        return {"items": [_encode_delivery(delivery) for delivery in reversed(found)]}

    def _details(self, delivery: Delivery) -> Body:
        attempts = [
            _encode(attempt, _ATTEMPT)
            | {
                "attempted_at": to_datetime(attempt.at).isoformat(),
                "response_headers": attempt.headers,
                "response_body": attempt.body,
            }
            for attempt in self._state.webhooks.attempts_of(delivery.id)
        ]
        body = self._state.webhooks.event(delivery.event_id).body.decode()
        return _encode_delivery(delivery) | {"body": body, "attempts": attempts}

    async def _authority(self, request: web.Request) -> web.Response:
        self._state.forms.check_site(request)
        pem = await self._state.sealer.certificate_pem()
        disposition = {"Content-Disposition": 'attachment; filename="sandbox-authority.pem"'}
        return web.Response(body=pem, content_type="application/x-pem-file", headers=disposition)


def _id(request: web.Request) -> str:
    return request.match_info["id"]


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", "100")
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= MOST:
        raise _invalid("limit", f"must be an integer from 1 to {MOST}, got {text!r}")
    return int(text)


def _text(body: Body, name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise _invalid(name, "must be a string")
    return value


def _encode(record: object, names: tuple[str, ...]) -> Body:
    """Return these attributes; times as text."""
    values = {name: getattr(record, name) for name in names}
    for name, value in values.items():
        if name.endswith("_at") and value is not None:
            values[name] = (to_datetime(value) if isinstance(value, int) else value).isoformat()
    return values


def _encode_delivery(delivery: Delivery) -> Body:
    return _encode(delivery, _DELIVERY) | {"attempt_count": delivery.attempts}


def _newest(records: list[Any], limit: int, names: tuple[str, ...]) -> Body:
    """Return up to `limit` of the newest records, newest first."""
    return {"items": [_encode(record, names) for record in records[: -limit - 1 : -1]]}


def _invalid(name: str, problem: str) -> Refused:
    return invalid({name: [f"{name}: {problem}"]})
