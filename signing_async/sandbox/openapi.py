"""The OpenAPI 3.1 document: `openapi.yaml`, adapted to the profile."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import yaml
from aiohttp import web

from .fields import NOT_BLANK
from .profile import Profile

Json = dict[str, Any]


async def serve(profile: Profile, _: web.Request) -> web.Response:
    """Respond with the OpenAPI document."""
    return web.json_response(document(profile))


def document(profile: Profile) -> Json:
    """Return the OpenAPI document of the service in this profile, and of the control API."""
    described: Json = yaml.safe_load(files(__package__).joinpath("openapi.yaml").read_bytes())
    errors, page_fields = described.pop("x-error-shapes"), described.pop("x-page-fields")
    components = described["components"]
    components["schemas"]["Error"] = errors[profile.error_shape]
    _adapt_errors(components["responses"], profile)
    _adapt_schemas(components["schemas"], profile)
    operations = {
        operation["operationId"]: operation
        for path in described["paths"].values()
        for operation in path.values()
        if operation["tags"] != ["control"]
    }
    for name, operation in operations.items():
        _adapt_responses(name, operation["responses"], profile)
    _adapt_lists(operations, components["parameters"], page_fields.get(profile.pagination), profile)
    return described


def _adapt_errors(responses: Json, profile: Profile) -> None:
    if profile.error_shape == "rfc9457":
        content = responses["Error"]["content"]
        content["application/problem+json"] = content.pop("application/json")
    if profile.token_error_shape == "profile":
        responses["TokenError"] = responses["Error"]


def _adapt_responses(name: str, responses: Json, profile: Profile) -> None:
    if name == "oauth.token":
        return
    refused = responses.pop("401")
    statuses: list[int] = [profile.missing_token_status, profile.expired_token_status]
    if name in {"documents.upload", "recipients.add", "signings.delete"}:
        statuses.append(profile.not_editable_status)
    responses |= {str(status): refused for status in statuses}
    old, done = next((status, responses[status]) for status in ("200", "201", "204") if status in responses)
    new = {"signings.send": profile.send_status, "recipients.remind": profile.remind_status}.get(name, int(old))
    new = profile.created_status if old == "201" else new
    responses[str(new)] = responses.pop(old)
    record = done.get("content", {}).get("application/json")
    if new == 204:
        done.pop("content", None)
    elif profile.record_field and record and "$ref" in record["schema"]:
        record["schema"] = _object({profile.record_field: record["schema"]})
        for link in done.get("links", {}).values():
            link["parameters"]["signing_id"] = f"$response.body#/{profile.record_field}/id"


def _adapt_lists(operations: Json, parameters: Json, page_fields: Json | None, profile: Profile) -> None:
    signings, recipients = operations["signings.list"], operations["recipients.list"]
    parameters["cursor"]["name"], parameters["limit"]["name"] = profile.cursor_param, profile.limit_param
    if profile.over_page_size == "refuse":
        parameters["limit"]["schema"]["maximum"] = profile.max_page_size
    style = profile.recipients_list
    if profile.pagination == "bare":
        del signings["parameters"]
        style = "envelope" if style == "paged" else style
    if style == "paged":
        recipients["parameters"] += signings["parameters"]
    _set_list(signings, page_fields, profile)
    _set_list(recipients, {"envelope": {}, "paged": page_fields, "bare": None}[style], profile)


def _set_list(operation: Json, more: Json | None, profile: Profile) -> None:
    """Describe a list in an object with `more` members, or a bare list if that is None."""
    content = operation["responses"]["200"]["content"]["application/json"]
    items = content["schema"]["properties"]["data"]
    content["schema"] = items if more is None else _object({profile.items_field: items, **more})


def _adapt_schemas(schemas: Json, profile: Profile) -> None:
    own = [schema for name, schema in schemas.items() if not name.startswith("Control")]
    if profile.timestamps.startswith("epoch"):
        for field in (field for schema in own for field in schema["properties"].values()):
            if field.pop("format", None):
                field["type"] = "integer" if field["type"] == "string" else ["integer", "null"]
    _require(schemas["NewSigning"], profile.required_signing_fields)
    new, recipient = schemas["NewRecipient"], schemas["Recipient"]
    for schema in (new, recipient):
        _rename(schema, "phone", profile.phone_field)
        _rename(schema, "personal_number", profile.identification_field)
    _rename(recipient, "completed_at", profile.recipient_completed_field)
    recipient["properties"]["signing_method"]["enum"] = list(profile.signing_methods)
    groups: dict[tuple[bool, bool], list[str]] = {}
    for method in profile.signing_methods:
        needs = (method in profile.phone_methods, method in profile.identification_methods)
        groups.setdefault(needs, []).append(method)
    alternatives = [_new_recipient(new, profile, methods, *needs) for needs, methods in groups.items()]
    schemas["NewRecipient"] = alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}


def _new_recipient(base: Json, profile: Profile, methods: list[str], phone: bool, identification: bool) -> Json:
    """Return the alternative for the signing methods that need these fields."""
    default = profile.signing_methods[0] in methods
    schema = {**base, "properties": base["properties"] | {"signing_method": {"enum": [*methods, None]}}}
    required = [*profile.required_recipient_fields, *([] if default else ["signing_method"])]
    required += [profile.phone_field] if phone else []
    required += [profile.identification_field] if identification else []
    return _require(schema, required)


def _require(schema: Json, names: Sequence[str]) -> Json:
    """Require these fields: they are no longer null, and no longer blank."""
    schema["required"] = list(dict.fromkeys([*schema["required"], *names]))
    for name in names:
        field = schema["properties"][name]
        if "enum" in field:
            field = {"enum": [value for value in field["enum"] if value is not None]}
        else:
            kind = field["type"][0]
            field = field | {"type": kind} | ({"minLength": 1, "pattern": NOT_BLANK} if kind == "string" else {})
        schema["properties"] = schema["properties"] | {name: field}
    return schema


def _rename(schema: Json, old: str, new: str) -> None:
    properties = schema["properties"]
    properties[new] = properties.pop(old)
    schema["required"] = [new if name == old else name for name in schema["required"]]


def _object(properties: Json) -> Json:
    return {"type": "object", "required": list(properties), "properties": properties}
