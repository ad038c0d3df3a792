"""The control API under /sandbox/api, for test suites in any language. It is not part of the documented service."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web
from yarl import URL

from .. import _checks
from .clock import to_datetime
from .records import Attempt, Delivery, Recipient
from .refused import Refused, invalid, not_found
from .request_body import read_json
from .request_log import RequestRecord
from .responses import CONTROL_API
from .service import STATES
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
_REQUEST = ("id", "received_at", "operation", "method", "path", "query", "status", "fault", "seconds")
_BODIES = ("headers", "request_body", "response_headers", "response_body")
_APP = ("client_id", "client_secret", "name", "redirect_uri")
_ENDPOINT = ("id", "url", "created_at")
_DELIVERY = ("id", "event_id", "event_type", "endpoint_id", "url", "state", "due_at", "last_status", "last_error")

Handler = Callable[["_Call"], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class _Call:
    """A request with its JSON object, which is empty if there is no body."""

    request: web.Request
    body: dict[str, Any]

    @property
    def id(self) -> str:
        return self.request.match_info["id"]

    @property
    def limit(self) -> int:
        text = self.request.query.get("limit", "100")
        if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= MOST:
            raise _invalid("limit", f"must be an integer from 1 to {MOST}, got {text!r}")
        return int(text)


class Control:
    """The control API. Each handler returns the JSON value of its response."""

    def __init__(self, state: State) -> None:
        self._state = state

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        table: list[tuple[str, str, int, Handler]] = [
            ("POST", "/reset", 200, self._reset),
            ("POST", "/access-tokens", 201, self._create_token),
            ("POST", "/apps", 201, self._register_app),
            ("POST", "/apps/{id}/authorize", 201, self._authorize),
            ("GET", "/clock", 200, self._clock),
            ("POST", "/clock/advance", 200, self._advance),
            ("GET", "/signings", 200, self._signings),
            ("GET", "/signings/{id}", 200, self._signing),
            ("POST", "/signings/{id}/complete", 200, self._complete),
            ("POST", "/signings/{id}/cancel", 200, self._cancel),
            ("POST", "/recipients/{id}/sign", 200, self._sign),
            ("POST", "/recipients/{id}/decline", 200, self._decline),
            ("GET", "/notifications", 200, self._notifications),
            ("GET", "/faults", 200, self._faults),
            ("POST", "/faults", 201, self._add_fault),
            ("DELETE", "/faults", 200, self._clear_faults),
            ("DELETE", "/faults/{id}", 200, self._remove_fault),
            ("GET", "/rate-limit", 200, self._rate_limit),
            ("PUT", "/rate-limit", 200, self._set_rate_limit),
            ("GET", "/requests", 200, self._requests),
            ("GET", "/requests/{id}", 200, self._request),
            ("GET", "/webhooks", 200, self._webhooks),
            ("POST", "/webhooks", 201, self._add_webhook),
            ("DELETE", "/webhooks/{id}", 200, self._remove_webhook),
            ("GET", "/deliveries", 200, self._deliveries),
            ("GET", "/deliveries/{id}", 200, self._delivery),
            ("POST", "/deliveries/{id}/resend", 201, self._resend),
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
        value = await handler(_Call(request, body))
        return web.json_response(value, status=status, dumps=partial(json.dumps, ensure_ascii=False))

    # the sandbox

    async def _reset(self, _: _Call) -> Any:
        self._state.reset()
        return {}

    async def _create_token(self, call: _Call) -> Any:
        lifetime = call.body.get("lifetime")
        if lifetime is not None:
            _checked(call.body, lambda: _checks.number("lifetime", lifetime, above=0, at_most=1e9, error=ValueError))
        return {"access_token": self._state.accounts.access_token(lifetime=lifetime)}

    async def _register_app(self, call: _Call) -> Any:
        name, redirect_uri = call.body.get("name"), call.body.get("redirect_uri")
        for field, value in (("name", name), ("redirect_uri", redirect_uri)):
            if not isinstance(value, str):
                raise _invalid(field, f"must be a string, got {value!r}")
        return _encode(self._state.accounts.register_app(str(name), str(redirect_uri)), _APP)

    async def _authorize(self, call: _Call) -> Any:
        accounts, app = self._state.accounts, self._state.accounts.app(call.id)
        if app is None:
            raise not_found("app")
        query: dict[str, str] = {}
        for name, value in call.body.items():
            if not isinstance(value, str):
                raise _invalid(name, f"must be a string, got {value!r}")
            query[name] = value
        code = accounts.authorize(app, challenge=accounts.code_challenge(query))
        answer = {"code": code, **{name: value for name, value in query.items() if name == "state"}}
        callback = URL(app.redirect_uri).update_query(answer)
        return {"code": code, "callback_url": str(callback)}

    async def _clock(self, _: _Call) -> Any:
        clock = self._state.clock
        return {"now": clock.now().isoformat(), "ahead_seconds": clock.offset.total_seconds()}

    async def _advance(self, call: _Call) -> Any:
        names = ("days", "hours", "minutes", "seconds")
        for name in call.body:
            if name not in names:
                raise _invalid(name, f"unknown field; use {', '.join(names)}")
        _checked(call.body, lambda: self._state.clock.advance(**call.body))
        return await self._clock(call)

    # signings and recipients

    async def _signings(self, call: _Call) -> Any:
        query = call.request.query
        state = query.get("state", "")
        if state and state not in STATES:
            raise _invalid("state", f"must be one of {', '.join(STATES)}, got {state!r}")
        found, total = self._state.service.search(query.get("search", ""), state, 0, call.limit)
        return {"items": [_encode(signing, _SIGNING) for signing in found], "total": total}

    async def _signing(self, call: _Call) -> Any:
        return self._encode_signing(call.id)

    async def _complete(self, call: _Call) -> Any:
        return self._encode_signing((await self._state.signatures.complete(call.id)).id)

    async def _cancel(self, call: _Call) -> Any:
        return self._encode_signing(self._state.service.cancel(call.id).id)

    async def _sign(self, call: _Call) -> Any:
        return self._encode_signing((await self._state.signatures.sign(call.id)).id)

    async def _decline(self, call: _Call) -> Any:
        return self._encode_signing((await self._state.signatures.decline(call.id)).id)

    def _encode_signing(self, signing_id: str) -> dict[str, Any]:
        service = self._state.service
        return _encode(service.signing(signing_id), _SIGNING) | {
            "documents": [_encode(document, _DOCUMENT) for document in service.documents(signing_id)],
            "recipients": [self._encode_recipient(recipient) for recipient in service.recipients(signing_id)],
        }

    def _encode_recipient(self, recipient: Recipient) -> dict[str, Any]:
        page = f"{self._state.base_url}/sandbox/sign/{recipient.id}"
        return _encode(recipient, _RECIPIENT) | {"signing_page": page}

    async def _notifications(self, call: _Call) -> Any:
        email = call.request.query.get("email")
        found = [sent for sent in self._state.invitations.notifications() if email in {None, sent.email}]
        return _items(found, call.limit, _NOTIFICATION)

    # faults

    async def _faults(self, _: _Call) -> Any:
        return {"items": [_encode(fault, _FAULT) for fault in self._state.faults.arranged]}

    async def _add_fault(self, call: _Call) -> Any:
        for name in ("operation", "kind"):
            if not isinstance(call.body.get(name), str):
                raise _invalid(name, f"must be a string, got {call.body.get(name)!r}")
        return _encode(_checked(call.body, lambda: self._state.faults.add(**call.body)), _FAULT)

    async def _clear_faults(self, _: _Call) -> Any:
        self._state.faults.clear()
        return {}

    async def _remove_fault(self, call: _Call) -> Any:
        for fault in list(self._state.faults.arranged):
            if fault.id == call.id:
                fault.remove()
                return {}
        raise not_found("fault")

    async def _rate_limit(self, _: _Call) -> Any:
        limit = self._state.rate_limit
        names = ("rate", "burst", "retry_after")
        return dict.fromkeys(names) if limit is None else _encode(limit, names)

    async def _set_rate_limit(self, call: _Call) -> Any:
        _checked(call.body, lambda: self._state.limit_rate(**call.body))
        return await self._rate_limit(call)

    # requests

    async def _requests(self, call: _Call) -> Any:
        operation = call.request.query.get("operation")
        found = [record for record in self._state.requests.records if operation in {None, record.operation}]
        return _items(found, call.limit, _REQUEST)

    async def _request(self, call: _Call) -> Any:
        record: RequestRecord | None = self._state.requests.find(call.id)
        if record is None:
            raise not_found("request")
        return _encode(record, _REQUEST + _BODIES)

    # webhooks

    async def _webhooks(self, _: _Call) -> Any:
        return {"items": [_encode(endpoint, _ENDPOINT) for endpoint in self._state.webhooks.endpoints()]}

    async def _add_webhook(self, call: _Call) -> Any:
        url, secret = call.body.get("url"), call.body.get("secret")
        if not isinstance(url, str):
            raise _invalid("url", f"must be a string, got {url!r}")
        if not isinstance(secret, str | None):
            raise _invalid("secret", "must be a string")
        return _encode(self._state.webhooks.register(url, secret), (*_ENDPOINT, "secret"))

    async def _remove_webhook(self, call: _Call) -> Any:
        self._state.webhooks.remove(call.id)
        return {}

    async def _deliveries(self, call: _Call) -> Any:
        found = self._state.webhooks.deliveries(call.limit)
        return {"items": [_encode_delivery(delivery) for delivery in reversed(found)]}

    async def _delivery(self, call: _Call) -> Any:
        return self._delivery_details(self._state.webhooks.delivery(call.id))

    async def _resend(self, call: _Call) -> Any:
        return self._delivery_details(self._state.webhooks.resend(call.id))

    def _delivery_details(self, delivery: Delivery) -> dict[str, Any]:
        webhooks = self._state.webhooks
        return _encode_delivery(delivery) | {
            "body": webhooks.event(delivery.event_id).body.decode(),
            "attempts": [_encode_attempt(attempt) for attempt in webhooks.attempts_of(delivery.id)],
        }

    async def _authority(self, request: web.Request) -> web.Response:
        self._state.forms.check_site(request)
        pem = await self._state.sealer.certificate_pem()
        disposition = {"Content-Disposition": 'attachment; filename="sandbox-authority.pem"'}
        return web.Response(body=pem, content_type="application/x-pem-file", headers=disposition)


def _encode(record: object, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: _encode_value(name, getattr(record, name)) for name in names}


def _encode_value(name: str, value: Any) -> Any:
    if name.endswith("_at") and value is not None:
        return (to_datetime(value) if isinstance(value, int) else value).isoformat()
    return value


def _encode_delivery(delivery: Delivery) -> dict[str, Any]:
    return _encode(delivery, _DELIVERY) | {"attempt_count": delivery.attempts}


def _encode_attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "attempted_at": to_datetime(attempt.at).isoformat(),
        "seconds": attempt.seconds,
        "fault": attempt.fault,
        "signature": attempt.signature,
        "status": attempt.status,
        "error": attempt.error,
        "response_headers": attempt.headers,
        "response_body": attempt.body,
    }


def _items(records: list[Any], limit: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Return up to `limit` of the newest records, newest first."""
    return {"items": [_encode(record, names) for record in records[: -limit - 1 : -1]]}


def _checked(body: Mapping[str, Any], work: Callable[[], Any]) -> Any:
    """Call `work`. An error whose message begins with a field's name becomes an error of that field."""
    try:
        return work()
    except (ValueError, TypeError, OverflowError) as error:
        name, _, problem = str(error).partition(": ")
        if name in body:
            raise _invalid(name, problem) from None
        raise Refused(400, "validation_failed", str(error)) from None


def _invalid(name: str, problem: str) -> Refused:
    return invalid({name: [f"{name}: {problem}"]})
