"""The OpenAPI 3.1 document of the service in one profile, and of the control API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from .control_schema import SCHEMAS, control_paths
from .fields import EMAIL, LANGUAGES, MAX_MESSAGE, MAX_ORDER, NOT_BLANK, ORDERS
from .profile import Profile
from .request_body import FILE_FIELD
from .responses import API

Json = dict[str, Any]

IDS = ("signing_id", "document_id", "recipient_id")


async def serve(profile: Profile, _: web.Request) -> web.Response:
    """Respond with the OpenAPI document."""
    return web.json_response(document(profile))


def document(profile: Profile) -> Json:
    """Return the OpenAPI document of the service in this profile, and of the control API."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Electronic Signing Service (sandbox)",
            "version": "1.0",
            "description": "The documented service on this machine. It is not a legal signing service.",
        },
        "tags": [
            {"name": "service", "description": "The documented service."},
            {"name": "control", "description": "The sandbox's control API. It is not part of the documented service."},
        ],
        "security": [{"bearer": []}],
        "paths": _Paths(profile).all() | control_paths(),
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": _schemas(profile) | SCHEMAS,
            "parameters": {
                name: {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                for name in IDS
            },
        },
    }


class _Paths:
    """The operations of the service."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def all(self) -> Json:
        profile = self._profile
        signing, documents = f"{API}/signings/{{signing_id}}", f"{API}/signings/{{signing_id}}/documents"
        send, remind = profile.send_status, profile.remind_status
        return {
            f"{API}/me": {"get": self._operation("me", 200, self._record("User"))},
            f"{API}/signings": {
                "post": self._operation(
                    "signings.create",
                    profile.created_status,
                    self._record("Signing"),
                    body=_json_body("NewSigning"),
                    errors=(400, 413, 415),
                ),
                "get": self._operation(
                    "signings.list", 200, self._page("Signing"), parameters=self._paging(), errors=(400,)
                ),
            },
            signing: {"get": self._operation("signings.get", 200, self._record("Signing"), "signing_id")},
            f"{signing}/send": {
                "post": self._operation("signings.send", send, self._record("Signing"), "signing_id", errors=(400,))
            },
            documents: {
                "post": self._operation(
                    "documents.upload",
                    profile.created_status,
                    self._record("Document"),
                    "signing_id",
                    body=_FILE_BODY,
                    errors=(400, 413, 415, 422, profile.not_editable_status),
                )
            },
            f"{documents}/{{document_id}}/download-signed": {
                "get": self._operation("documents.download_signed", 200, None, "signing_id", "document_id")
            },
            f"{signing}/recipients": {
                "post": self._operation(
                    "recipients.add",
                    profile.created_status,
                    self._record("Recipient"),
                    "signing_id",
                    body=_json_body("NewRecipient"),
                    errors=(400, 413, 415, profile.not_editable_status),
                ),
                "get": self._operation(
                    "recipients.list",
                    200,
                    self._recipients(),
                    "signing_id",
                    parameters=self._paging() if profile.recipients_list == "paged" else (),
                    errors=(400,),
                ),
            },
            f"{signing}/recipients/{{recipient_id}}/remind": {
                "post": self._operation(
                    "recipients.remind", remind, self._record("Recipient"), "signing_id", "recipient_id", errors=(400,)
                )
            },
            "/api/oauth/token": {"post": self._token()},
        }

    def _operation(
        self,
        name: str,
        status: int,
        body_schema: Json | None,
        *path: str,
        body: Json | None = None,
        parameters: Sequence[Json] = (),
        errors: Sequence[int] = (),
    ) -> Json:
        profile = self._profile
        statuses = {*errors, profile.missing_token_status, profile.expired_token_status, 429} | (
            {404} if path else set()
        )
        responses = {str(code): _error_response(profile) for code in sorted(statuses)}
        responses[str(status)] = self._success(status, body_schema)
        if name == "signings.create":
            responses[str(status)]["links"] = self._links()
        operation: Json = {"operationId": name, "tags": ["service"], "responses": responses}
        all_parameters = [{"$ref": f"#/components/parameters/{key}"} for key in path] + list(parameters)
        if all_parameters:
            operation["parameters"] = all_parameters
        if body:
            operation["requestBody"] = body
        return operation

    def _success(self, status: int, body_schema: Json | None) -> Json:
        if status == 204:
            return {"description": "Done."}
        if body_schema is None:
            return {"description": "The signed PDF.", "content": {"application/pdf": {}}}
        return {"description": "Done.", "content": {"application/json": {"schema": body_schema}}}

    def _links(self) -> Json:
        wrapper = self._profile.record_field
        pointer = f"$response.body#/{wrapper}/id" if wrapper else "$response.body#/id"
        uses = ("signings.get", "signings.send", "documents.upload", "recipients.add", "recipients.list")
        return {name.replace(".", "_"): {"operationId": name, "parameters": {"signing_id": pointer}} for name in uses}

    def _record(self, name: str) -> Json:
        wrapper = self._profile.record_field
        inner = _ref(name)
        return {"type": "object", "required": [wrapper], "properties": {wrapper: inner}} if wrapper else inner

    def _page(self, name: str) -> Json:
        profile = self._profile
        items = {"type": "array", "items": _ref(name)}
        if profile.pagination in {"link_header", "bare"}:
            return items
        text = {"type": ["string", "null"]}
        extra: dict[str, tuple[str, Json]] = {
            "meta_cursor": ("meta", {"type": "object", "properties": {"next_cursor": text}}),
            "top_cursor": ("next_cursor", text),
            "next_url": ("links", {"type": "object", "properties": {"next": text}}),
            "has_more": ("has_more", {"type": "boolean"}),
        }
        key, schema = extra[profile.pagination]
        properties = {profile.items_field: items, key: schema}
        return {"type": "object", "required": list(properties), "properties": properties}

    def _recipients(self) -> Json:
        style, items = self._profile.recipients_list, {"type": "array", "items": _ref("Recipient")}
        if style == "bare":
            return items
        if style == "paged" and self._profile.pagination != "bare":
            return self._page("Recipient")
        field = self._profile.items_field
        return {"type": "object", "required": [field], "properties": {field: items}}

    def _paging(self) -> list[Json]:
        profile = self._profile
        if profile.pagination == "bare":
            return []
        size: Json = {"type": "integer", "minimum": 1}
        size["maximum"] = profile.max_page_size if profile.over_page_size == "refuse" else 10**9 - 1
        return [
            {"name": profile.cursor_param, "in": "query", "schema": {"type": "string", "minLength": 1}},
            {"name": profile.limit_param, "in": "query", "schema": size},
        ]

    def _token(self) -> Json:
        schema = {"anyOf": [_ref("CodeExchange"), _ref("Refresh")]}
        kinds = ("application/x-www-form-urlencoded", "application/json")
        profile = self._profile
        oauth = profile.token_error_shape == "oauth"
        error = (
            {"description": "Refused.", "content": {"application/json": {"schema": _ref("OAuthError")}}}
            if oauth
            else _error_response(profile)
        )
        return {
            "operationId": "oauth.token",
            "tags": ["service"],
            "security": [],
            "requestBody": {"required": True, "content": {kind: {"schema": schema} for kind in kinds}},
            "responses": {
                "200": {"description": "A token.", "content": {"application/json": {"schema": _ref("Token")}}},
                **{str(status): error for status in (400, 401, 413, 415, 429)},
            },
        }


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _json_body(name: str) -> Json:
    return {"required": True, "content": {"application/json": {"schema": _ref(name)}}}


_FILE_BODY: Json = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": [FILE_FIELD],
                "properties": {FILE_FIELD: {"type": "string", "format": "binary"}},
            },
            "encoding": {FILE_FIELD: {"contentType": "application/pdf"}},
        }
    },
}


def _error_response(profile: Profile) -> Json:
    kind = "application/problem+json" if profile.error_shape == "rfc9457" else "application/json"
    return {"description": "Refused.", "content": {kind: {"schema": _ref("Error")}}}


def _schemas(profile: Profile) -> Json:
    time: Json = {"type": "string", "format": "date-time"}
    if profile.timestamps.startswith("epoch"):
        time = {"type": "integer"}
    maybe_time = {**time, "type": [time["type"], "null"]}
    return {
        "User": _object({"id": _TEXT, "name": _TEXT, "email": _TEXT, "tenant": _TEXT}),
        "Signing": _object(
            {
                "id": _TEXT,
                "name": _TEXT,
                "language": {"enum": list(LANGUAGES)},
                "signing_order": {"enum": list(ORDERS)},
                "message": {"type": ["string", "null"], "maxLength": MAX_MESSAGE},
                "is_draft": {"type": "boolean"},
                "is_completed": {"type": "boolean"},
                "cancelled_at": maybe_time,
                "created_at": time,
                "updated_at": time,
            },
            documents={"type": "array", "items": _ref("Document")},
        ),
        "Document": _object(
            {"id": _TEXT, "name": _TEXT, "size": {"type": "integer"}, "completed_at": maybe_time},
            signed_file_path=_TEXT,
        ),
        "Recipient": _object(
            {
                "id": _TEXT,
                "first_name": _MAYBE_TEXT,
                "last_name": _MAYBE_TEXT,
                "email": _TEXT,
                "signing_method": {"enum": list(profile.signing_methods)},
                "order": {"type": ["integer", "null"]},
                profile.recipient_completed_field: maybe_time,
                "declined_at": maybe_time,
            },
            **{profile.phone_field: _TEXT, profile.identification_field: _TEXT},
        ),
        "NewSigning": _new_signing(profile),
        "NewRecipient": _new_recipient(profile),
        "CodeExchange": _grant("authorization_code", "redirect_uri", "code"),
        "Refresh": _grant("refresh_token", "refresh_token"),
        "Token": _object(
            {"access_token": _TEXT, "token_type": {"const": "Bearer"}, "expires_in": {"type": "integer"}},
            refresh_token=_TEXT,
        ),
        "OAuthError": _object({"error": _TEXT, "error_description": _TEXT}),
        "Error": _error(profile),
    }


_TEXT: Json = {"type": "string"}
_MAYBE_TEXT: Json = {"type": ["string", "null"]}


def _object(properties: Json, **optional: Json) -> Json:
    return {"type": "object", "required": list(properties), "properties": {**properties, **optional}}


def _grant(kind: str, *fields: str) -> Json:
    text = {"type": "string", "minLength": 1}
    return _object(
        {"grant_type": {"const": kind}, "client_id": text, "client_secret": text, **dict.fromkeys(fields, text)}
    )


def _maybe(schema: Json, *, required: bool) -> Json:
    """Return the schema of a field that may be null unless it is required."""
    if required:
        return {**schema, "minLength": 1, "pattern": NOT_BLANK} if schema.get("type") == "string" else schema
    return {**schema, "type": [schema["type"], "null"]} if "type" in schema else {"enum": [*schema["enum"], None]}


def _new_signing(profile: Profile) -> Json:
    required = profile.required_signing_fields
    return {
        "type": "object",
        "required": ["name", "language", *required],
        "properties": {
            "name": _maybe(_TEXT, required=True),
            "language": {"enum": list(LANGUAGES)},
            "signing_order": _maybe({"enum": list(ORDERS)}, required="signing_order" in required),
            "message": _maybe({"type": "string", "maxLength": MAX_MESSAGE}, required="message" in required),
        },
    }


def _new_recipient(profile: Profile) -> Json:
    """Return one alternative for each set of fields that signing methods need."""
    groups: dict[tuple[bool, bool], list[str]] = {}
    for method in profile.signing_methods:
        needs = (method in profile.phone_methods, method in profile.identification_methods)
        groups.setdefault(needs, []).append(method)
    alternatives = [_recipient_with(profile, methods, *needs) for needs, methods in groups.items()]
    return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}


def _recipient_with(profile: Profile, methods: list[str], needs_phone: bool, needs_identification: bool) -> Json:
    required = ["email", *profile.required_recipient_fields]
    method: Json = {"enum": methods}
    if profile.signing_methods[0] not in methods:
        required.append("signing_method")
    elif "signing_method" not in required:
        method = _maybe(method, required=False)
    if needs_phone:
        required.append(profile.phone_field)
    if needs_identification:
        required.append(profile.identification_field)
    order = {"type": "integer", "minimum": 1, "maximum": MAX_ORDER}
    names = ("first_name", "last_name", profile.phone_field, profile.identification_field)
    return {
        "type": "object",
        "required": list(dict.fromkeys(required)),
        "properties": {
            **{name: _maybe(_TEXT, required=name in required) for name in names},
            "email": {"type": "string", "pattern": EMAIL},
            "signing_method": method,
            "order": _maybe(order, required="order" in required),
        },
    }


def _error(profile: Profile) -> Json:
    details = {"type": "array", "items": {"type": "object"}}
    if profile.error_shape == "nested":
        return _object({"error": _object({"code": _TEXT, "message": _TEXT}, details=details)})
    if profile.error_shape == "rfc9457":
        status = {"type": "integer"}
        return _object(
            {"type": _TEXT, "title": _TEXT, "status": status, "detail": _TEXT, "code": _TEXT}, errors=details
        )
    if profile.error_shape == "list":
        row = _object({"code": _TEXT, "message": _TEXT}, field=_TEXT)
        return _object({"errors": {"type": "array", "minItems": 1, "items": row}})
    messages = {"type": "object", "additionalProperties": {"type": "array", "items": _TEXT}}
    return _object({"code": _TEXT, "message": _TEXT}, errors=messages)
