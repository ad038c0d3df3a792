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
_CURSOR = {"$ref": "#/components/parameters/cursor"}


async def serve(profile: Profile, _: web.Request) -> web.Response:
    return web.json_response(document(profile))


def document(profile: Profile) -> Json:
    """Return the OpenAPI document of the service in this profile, and of the control API."""
    described: Json = yaml.safe_load(files(__package__).joinpath("openapi.yaml").read_bytes())
    errors, page_fields = described.pop("x-error-shapes"), described.pop("x-page-fields")
    components = described["components"]
    components["schemas"]["Error"] = errors[profile.error_shape]
    if profile.error_shape == "rfc9457":
        content = components["responses"]["Error"]["content"]
        content["application/problem+json"] = content.pop("application/json")
    if profile.token_error_shape == "profile":
        components["responses"]["TokenError"] = components["responses"]["Error"]
    _adapt_schemas(components["schemas"], profile)
    operations = {
        operation["operationId"]: operation
        for path in described["paths"].values()
        for operation in path.values()
        if operation["tags"] != ["control"]
    }
    for name in operations.keys() - {"oauth.token"}:
        _adapt_responses(name, operations[name]["responses"], profile)
    _adapt_lists(operations, components["parameters"], page_fields.get(profile.pagination), profile)
    return described


def _adapt_responses(name: str, responses: Json, profile: Profile) -> None:
    refused = responses.pop("401")
    statuses: list[int] = [profile.missing_token_status, profile.expired_token_status]
    if name in {"documents.upload", "recipients.add", "signings.delete"}:
        statuses.append(profile.not_editable_status)
    responses |= {str(status): refused for status in statuses}
    old = next(status for status in ("200", "201", "204") if status in responses)
    done = responses.pop(old)
    own = {"signings.send": profile.send_status, "recipients.remind": profile.remind_status}
    new = profile.created_status if old == "201" else own.get(name, int(old))
    responses[str(new)] = done
    record = done.get("content", {}).get("application/json")
    if new == 204:
        done.pop("content", None)
    elif profile.record_field and record and "$ref" in record["schema"]:
        record["schema"] = _object({profile.record_field: record["schema"]})
        for link in done.get("links", {}).values():
            link["parameters"]["signing_id"] = f"$response.body#/{profile.record_field}/id"


def _adapt_lists(operations: Json, parameters: Json, page_fields: Json | None, profile: Profile) -> None:
    recipients = operations["recipients.list"]
    lists = [each for each in operations.values() if _CURSOR in each.get("parameters", ())]
    parameters["cursor"]["name"], parameters["limit"]["name"] = profile.cursor_param, profile.limit_param
    if profile.over_page_size == "refuse":
        parameters["limit"]["schema"]["maximum"] = profile.max_page_size
    style = profile.recipients_list
    if style == "paged":
        style = "envelope" if profile.pagination == "bare" else style
        recipients["parameters"] += [] if profile.pagination == "bare" else lists[0]["parameters"]
    if profile.pagination == "bare":
        for operation in lists:
            del operation["parameters"]
    members = {"envelope": {}, "paged": page_fields, "bare": None}
    for operation, more in (*((each, page_fields) for each in lists), (recipients, members[style])):
        content = operation["responses"]["200"]["content"]["application/json"]
        items = content["schema"]["properties"]["data"]
        content["schema"] = items if more is None else _object({profile.items_field: items, **more})


def _adapt_schemas(schemas: Json, profile: Profile) -> None:
    if profile.timestamps.startswith("epoch"):
        own = [schema for name, schema in schemas.items() if not name.startswith("Control")]
        for field in (field for schema in own for field in schema["properties"].values()):
            if field.pop("format", None):
                field["type"] = "integer" if field["type"] == "string" else ["integer", "null"]
    _require(schemas["NewSigning"], profile.required_signing_fields)
    new, recipient = schemas["NewRecipient"], schemas["Recipient"]
    names = {"phone": profile.phone_field, "personal_number": profile.identification_field}
    for schema, renamed in ((new, names), (recipient, names | {"completed_at": profile.recipient_completed_field})):
        schema["properties"] = {renamed.get(name, name): field for name, field in schema["properties"].items()}
        schema["required"] = [renamed.get(name, name) for name in schema["required"]]
    recipient["properties"]["signing_method"]["enum"] = list(profile.signing_methods)
    alternatives = []
    for method in profile.signing_methods:
        required = list(profile.required_recipient_fields)
        required += [profile.phone_field] if method in profile.phone_methods else []
        required += [profile.identification_field] if method in profile.identification_methods else []
        required += ["signing_method"] if method != profile.signing_methods[0] else []
        properties = new["properties"] | {"signing_method": {"enum": [method, None]}}
        alternatives.append(_require({**new, "properties": properties}, required))
    schemas["NewRecipient"] = {"anyOf": alternatives}


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


def _object(properties: Json) -> Json:
    return {"type": "object", "required": list(properties), "properties": properties}
