"""The OpenAPI description of the control API."""

from __future__ import annotations

from typing import Any, NamedTuple

from .faults import DELIVERY, DELIVERY_KINDS, KINDS, OPERATIONS
from .responses import CONTROL_API
from .service import STATES

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_MAYBE_TEXT: Json = {"type": ["string", "null"]}
_TIME: Json = {"type": "string", "format": "date-time"}
_MAYBE_TIME: Json = {"type": ["string", "null"], "format": "date-time"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_NUMBER: Json = {"type": "number"}
_MAYBE_NUMBER: Json = {"type": ["number", "null"]}
_HEADERS: Json = {"type": ["object", "null"], "additionalProperties": _TEXT}


def _object(**properties: Json) -> Json:
    return {"type": "object", "required": list(properties), "properties": properties}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(name: str, **more: Json) -> Json:
    return _object(items={"type": "array", "items": _ref(name)}, **more)


_SIGNING = {
    **dict.fromkeys(("id", "tenant", "name", "language", "signing_order"), _TEXT),
    "state": {"enum": list(STATES)},
    "message": _MAYBE_TEXT,
    **dict.fromkeys(("created_at", "updated_at"), _TIME),
    **dict.fromkeys(("sent_at", "completed_at", "cancelled_at"), _MAYBE_TIME),
}
_REQUEST = {
    **dict.fromkeys(("id", "method", "path", "query"), _TEXT),
    **dict.fromkeys(("operation", "fault"), _MAYBE_TEXT),
    "received_at": _TIME,
    "status": {"type": ["integer", "null"]},
    "seconds": _MAYBE_NUMBER,
}
_ENDPOINT = {"id": _TEXT, "url": _TEXT, "created_at": _TIME}
_DELIVERY = {
    **dict.fromkeys(("id", "event_id", "event_type", "endpoint_id", "url"), _TEXT),
    "state": {"enum": ["pending", "delivered", "failed", "lost"]},
    "attempt_count": _COUNT,
    "due_at": _MAYBE_TIME,
    "last_status": {"type": ["integer", "null"]},
    "last_error": _MAYBE_TEXT,
}

SCHEMAS: Json = {
    "ControlError": _object(
        code=_TEXT,
        message=_TEXT,
        errors={"type": "object", "additionalProperties": {"type": "array", "items": _TEXT}},
    ),
    "ControlClock": _object(now=_TIME, ahead_seconds=_NUMBER),
    "ControlSigning": _object(**_SIGNING),
    "ControlSigningDetails": _object(
        **_SIGNING,
        documents={"type": "array", "items": _ref("ControlDocument")},
        recipients={"type": "array", "items": _ref("ControlRecipient")},
    ),
    "ControlDocument": _object(
        id=_TEXT, name=_TEXT, size=_COUNT, sha256=_TEXT, created_at=_TIME, completed_at=_MAYBE_TIME
    ),
    "ControlRecipient": _object(
        **dict.fromkeys(("id", "signing_id", "email", "signing_method", "signing_page"), _TEXT),
        **dict.fromkeys(("first_name", "last_name"), _MAYBE_TEXT),
        order={"type": ["integer", "null"]},
        reminders=_COUNT,
        **dict.fromkeys(("invited_at", "expires_at", "completed_at", "declined_at"), _MAYBE_TIME),
    ),
    "ControlNotification": _object(
        kind={"enum": ["invitation", "reminder"]},
        **dict.fromkeys(("signing_id", "recipient_id", "email"), _TEXT),
        sent_at=_TIME,
    ),
    "ControlFault": _object(
        **dict.fromkeys(("id", "operation", "kind"), _TEXT),
        times={"type": ["integer", "null"]},
        probability=_NUMBER,
        skip=_COUNT,
        details={"type": "object"},
        hits=_COUNT,
    ),
    "ControlRateLimit": _object(rate=_MAYBE_NUMBER, burst={"type": ["integer", "null"]}, retry_after=_MAYBE_NUMBER),
    "ControlRequest": _object(**_REQUEST),
    "ControlRequestDetails": _object(
        **_REQUEST, headers=_HEADERS, request_body=_MAYBE_TEXT, response_headers=_HEADERS, response_body=_MAYBE_TEXT
    ),
    "ControlWebhook": _object(**_ENDPOINT),
    "ControlNewWebhook": _object(**_ENDPOINT, secret=_TEXT),
    "ControlDelivery": _object(**_DELIVERY),
    "ControlDeliveryDetails": _object(
        **_DELIVERY, body=_TEXT, attempts={"type": "array", "items": _ref("ControlAttempt")}
    ),
    "ControlAttempt": _object(
        attempted_at=_TIME,
        seconds=_MAYBE_NUMBER,
        status={"type": ["integer", "null"]},
        **dict.fromkeys(("fault", "signature", "error", "response_body"), _MAYBE_TEXT),
        response_headers=_HEADERS,
    ),
}

_LIMIT = {"limit": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}}
_EMPTY: Json = {"type": "object"}


def _fields(*required: str, **properties: Json) -> Json:
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


_FAULT_FIELDS = _fields(
    "operation",
    "kind",
    operation={"enum": [*OPERATIONS, DELIVERY, "*"]},
    kind={"enum": list(dict.fromkeys((*KINDS, *DELIVERY_KINDS)))},
    times={"type": ["integer", "null"], "minimum": 1, "default": 1},
    probability={"type": "number", "minimum": 0, "maximum": 1, "default": 1},
    seed={"type": ["integer", "string", "null"]},
    skip={**_COUNT, "default": 0},
    retry_after={"type": ["number", "string", "null"], "minimum": 0},
    http_date={"type": "boolean"},
    seconds={"type": "number", "minimum": 0},
)
_UNITS: Json = {name: {"type": "number"} for name in ("days", "hours", "minutes", "seconds")}


class Operation(NamedTuple):
    """An operation of the control API; `fields` is the schema of the body, `query` has those of the parameters."""

    method: str
    path: str
    name: str
    summary: str
    fields: Json | None
    query: Json
    status: int
    response: Json


_TABLE: list[tuple[str, str, str, str, Json | None, Json, int, Json]] = [
    ("POST", "/reset", "reset", "Delete all signings and the request log, remove faults and the rate limit, and set "
     "the clock to real time. Users, applications, tokens and webhook endpoints stay.", None, {}, 200, _EMPTY),
    ("POST", "/access-tokens", "createAccessToken", "Create an access token of the default user; `lifetime` is in "
     "seconds, by default unlimited.", _fields(lifetime={"type": ["number", "null"], "exclusiveMinimum": 0}), {}, 201,
     _object(access_token=_TEXT)),
    ("GET", "/clock", "getClock", "Return the sandbox's time.", None, {}, 200, _ref("ControlClock")),
    ("POST", "/clock/advance", "advanceClock", "Advance the clock by the sum of the fields.", _fields(**_UNITS), {},
     200, _ref("ControlClock")),
    ("GET", "/signings", "listSignings", "List signings, newest first. `search` is an id, or part of the name of a "
     "signing, document or recipient, or of an e-mail address.", None,
     {"search": _TEXT, "state": {"enum": list(STATES)}, **_LIMIT}, 200, _list("ControlSigning", total=_COUNT)),
    ("GET", "/signings/{id}", "getSigning", "Return a signing with its documents and recipients.", None, {}, 200,
     _ref("ControlSigningDetails")),
    ("POST", "/signings/{id}/complete", "completeSigning", "Sign for all recipients who have neither signed nor "
     "declined.", None, {}, 200, _ref("ControlSigningDetails")),
    ("POST", "/signings/{id}/cancel", "cancelSigning", "Cancel a signing.", None, {}, 200,
     _ref("ControlSigningDetails")),
    ("POST", "/recipients/{id}/sign", "signAsRecipient", "Sign on behalf of a recipient. After the last "
     "signature the documents are sealed.", None, {}, 200, _ref("ControlSigningDetails")),
    ("POST", "/recipients/{id}/decline", "declineAsRecipient", "Decline on behalf of a recipient.", None, {}, 200,
     _ref("ControlSigningDetails")),
    ("GET", "/notifications", "listNotifications", "List invitations and reminders, newest first.", None,
     {"email": _TEXT, **_LIMIT}, 200, _list("ControlNotification")),
    ("GET", "/faults", "listFaults", "List the arranged faults.", None, {}, 200, _list("ControlFault")),
    ("POST", "/faults", "addFault", "Arrange a fault for the next `times` requests of an operation (null: all), after "
     "`skip` requests.", _FAULT_FIELDS, {}, 201, _ref("ControlFault")),
    ("DELETE", "/faults", "clearFaults", "Remove all faults.", None, {}, 200, _EMPTY),
    ("DELETE", "/faults/{id}", "removeFault", "Remove a fault.", None, {}, 200, _EMPTY),
    ("GET", "/rate-limit", "getRateLimit", "Return the rate limit; all fields are null if there is no limit.", None, {},
     200, _ref("ControlRateLimit")),
    ("PUT", "/rate-limit", "setRateLimit", "Limit the API to `rate` requests per second, `burst` at once; null "
     "removes the limit.", _fields("rate", rate={"type": ["number", "null"], "minimum": 1e-6, "maximum": 1e9},
     burst={"type": ["integer", "null"], "minimum": 1, "maximum": 10**9},
     retry_after={"type": ["number", "null"], "minimum": 0, "maximum": 1e9}), {}, 200, _ref("ControlRateLimit")),
    ("GET", "/requests", "listRequests", "List the requests to the sandbox, newest first.", None,
     {"operation": _TEXT, **_LIMIT}, 200, _list("ControlRequest")),
    ("GET", "/requests/{id}", "getRequest", "Return a request with its headers and bodies, without secrets.", None,
     {}, 200, _ref("ControlRequestDetails")),
    ("GET", "/webhooks", "listWebhooks", "List the webhook endpoints.", None, {}, 200, _list("ControlWebhook")),
    ("POST", "/webhooks", "addWebhook", "Register a webhook endpoint. If no secret is given, one is generated. "
     "Only this response contains the secret.", _fields("url", url=_TEXT, secret={"type": ["string", "null"],
     "minLength": 1}), {}, 201, _ref("ControlNewWebhook")),
    ("DELETE", "/webhooks/{id}", "removeWebhook", "Remove a webhook endpoint; its pending deliveries fail.", None, {},
     200, _EMPTY),
    ("GET", "/deliveries", "listDeliveries", "List the webhook deliveries, newest first.", None, _LIMIT, 200,
     _list("ControlDelivery")),
    ("GET", "/deliveries/{id}", "getDelivery", "Return a delivery with its body and its attempts.", None, {}, 200,
     _ref("ControlDeliveryDetails")),
    ("POST", "/deliveries/{id}/resend", "resendDelivery", "Deliver the same event again, as a new delivery.", None,
     {}, 201, _ref("ControlDeliveryDetails")),
]  # fmt: skip


CONTROL_OPERATIONS: list[Operation] = [Operation(*row) for row in _TABLE]


def control_paths() -> Json:
    """Return the paths of the control API."""
    paths: Json = {}
    for method, path, name, summary, fields, query, status, schema in CONTROL_OPERATIONS:
        parameters = [{"name": key, "in": "query", "schema": value} for key, value in query.items()]
        if "{id}" in path:
            parameters.append({"name": "id", "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}})
        operation: Json = {
            "operationId": f"control.{name}",
            "tags": ["control"],
            "summary": summary,
            "security": [],
            "parameters": parameters,
            "responses": {str(status): _response("Done.", schema)}
            | {str(code): _response("Refused.", _ref("ControlError")) for code in _errors(method, path)},
        }
        if fields is not None:
            content = {"application/json": {"schema": fields}}
            operation["requestBody"] = {"required": bool(fields["required"]), "content": content}
        paths.setdefault(CONTROL_API + path, {})[method.lower()] = operation
    return paths


def _errors(method: str, path: str) -> list[int]:
    errors = [400, 403, 413, 415, 421] if method != "GET" else [400, 421]
    return errors + ([404] if "{id}" in path else []) + ([409] if path.endswith(("/sign", "/complete")) else [])


def _response(description: str, schema: Json) -> Json:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
