"""Reads an error answer, whatever its shape: code, message, messages per field, request id; and picks the exception."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from . import errors
from .assumptions import Assumptions
from .convert import Unreadable, parse
from .redaction import redact, redact_bytes

__all__ = ["error_from", "look_up", "record", "request_id"]

_MOST_MESSAGES = 50
_LONGEST = 500

_CODE_PATHS = ("code", "error.code", "error_code", "error.error_code", "error.type", "error", "errors.0.code", "0.code")
_MESSAGE_PATHS = (
    "message",
    "error.message",
    "detail",
    "error.detail",
    "error_description",
    "error_message",
    "title",
    "error.title",
    "errors.0.message",
    "errors.0.detail",
    "0.message",
    "error",
)
_LIST_PATHS = (
    "errors",
    "error.errors",
    "error.details",
    "error.fields",
    "details",
    "messages",
    "fields",
    "violations",
    "invalid-params",
    "invalid_params",
    "detail",
    "message",
)
_REQUEST_ID_PATHS = ("request_id", "meta.request_id", "error.request_id", "requestId")
_FIELD_KEYS = ("field", "name", "property", "propertyPath", "param", "parameter", "pointer", "path", "loc", "source")
_TEXT_KEYS = ("message", "messages", "detail", "msg", "reason", "description", "title", "code", "error")

_BY_STATUS: dict[int, type[errors.APIError]] = {
    400: errors.BadRequest,
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.NotFound,
    422: errors.DocumentRejected,
    429: errors.RateLimited,
}


def look_up(data: Any, path: str) -> Any:
    """What stands at a dotted path of a parsed answer; None where it leads nowhere."""
    for name in path.split("."):
        if isinstance(data, Mapping):
            data = data.get(name)
        elif isinstance(data, list) and name.isdigit():
            data = data[int(name)] if int(name) < len(data) else None
        else:
            return None
    return data


def record(data: Any, assumptions: Assumptions) -> Any:
    """The single record of an answer: the answer itself, or what it wraps."""
    if isinstance(data, dict) and "id" not in data:
        for path in assumptions.record_paths:
            found = look_up(data, path)
            if isinstance(found, dict):
                return found
    return data


def request_id(headers: Mapping[str, str], data: Any, assumptions: Assumptions) -> str | None:
    """The id that identifies the request to the service's support: from a header, else from the body."""
    found = [headers.get(name) for name in assumptions.request_id_headers]
    found += [look_up(data, path) for path in _REQUEST_ID_PATHS]
    return next((str(value)[:200] for value in found if isinstance(value, str | int) and value), None)


def error_from(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    reason: str,
    operation: str,
    not_found: type[errors.NotFound],
    retry_after: float | None,
    secrets: Iterable[str],
    assumptions: Assumptions,
) -> errors.APIError:
    """The exception for an error answer, with every text free of ``secrets``."""
    secrets = tuple(secrets)
    try:
        data = parse(body)
    except Unreadable:
        data = None
    codes = list(_texts(data, _CODE_PATHS))
    messages: dict[str, list[str]] = {}
    for field, text in _messages(data):
        texts = messages.setdefault(redact(field, secrets)[:_LONGEST], [])
        if len(messages) <= _MOST_MESSAGES and len(texts) < _MOST_MESSAGES:
            texts.append(redact(text, secrets)[:_LONGEST])
    said = [text for text in _texts(data, _MESSAGE_PATHS) if text not in codes or " " in text]
    message = said[0] if said else "" if messages else _plain(body, data) or reason or _meaning(status)
    code = next((code for code in codes if " " not in code), None)
    known_id = request_id(headers, data, assumptions)
    return _pick(status, codes, data, not_found)(
        redact(message, secrets)[:_LONGEST],
        status=status,
        operation=operation,
        code=None if code is None else redact(code, secrets)[:_LONGEST],
        messages=messages,
        request_id=None if known_id is None else redact(known_id, secrets),
        body=body,
        redacted_body=redact_bytes(body, secrets),
        retry_after=retry_after,
    )


def _pick(status: int, codes: list[str], data: Any, not_found: type[errors.NotFound]) -> type[errors.APIError]:
    if status >= 500:
        return errors.ServerError
    if status == 404:
        return not_found
    kind = _BY_STATUS.get(status, errors.APIError)
    # RFC 9457 names the problem by a URL, whose end is the code.
    problem = look_up(data, "type")
    ends = [re.split(r"[/#:]", problem)[-1]] if isinstance(problem, str) else []
    if kind is errors.BadRequest and "cannot_be_sent" in (*codes, *(end.replace("-", "_") for end in ends)):
        return errors.CannotBeSent
    return kind


def _meaning(status: int) -> str:
    return "the service failed" if status >= 500 else "the service refused the request"


def _texts(data: Any, paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        value = look_up(data, path)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str) and value.strip():
            yield value.strip()


def _messages(data: Any) -> Iterator[tuple[str, str]]:
    """Field and text of each validation message; the field is empty where none is named."""
    if isinstance(data, list):
        yield from _entries(data, "")
        return
    for path in _LIST_PATHS:
        found = look_up(data, path)
        if isinstance(found, Mapping | list) and found:
            yield from _entries(found, "")
            return


def _entries(found: Any, field: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    if depth > 4:
        return
    if isinstance(found, str | int | float):
        yield field, str(found)
    elif isinstance(found, list):
        for entry in found[:_MOST_MESSAGES]:
            yield from _entries(entry, field, depth + 1)
    elif isinstance(found, Mapping):
        text = next((found[key] for key in _TEXT_KEYS if isinstance(found.get(key), str | list)), None)
        name = next((found[key] for key in _FIELD_KEYS if found.get(key)), None)
        if text is not None and (name is not None or depth):
            yield from _entries(text, _field_name(name) or field, depth + 1)
        else:
            for key, value in list(found.items())[:_MOST_MESSAGES]:
                yield from _entries(value, f"{field}.{key}" if field else str(key), depth + 1)


def _field_name(name: Any) -> str:
    if isinstance(name, Mapping):
        return _field_name(name.get("pointer") or name.get("parameter"))
    if isinstance(name, list):
        return ".".join(str(part) for part in name if part != "body")
    return str(name or "").lstrip("#/").replace("/", ".")


def _plain(body: bytes, data: Any) -> str:
    """The words of a body that is no JSON object: an HTML page's title, or the first line of a text."""
    if isinstance(data, str):
        return data.strip()
    if data is not None:
        return ""
    text = body[:4096].decode("utf-8", "replace")
    start = text.lower().find("<title>")
    if start >= 0:
        text = text[start + len("<title>") :].partition("<")[0]
    elif text.lstrip().startswith("<"):
        text = " ".join(re.sub(r"<[^<>]*>", " ", text).split())
    text = html.unescape(" ".join(text.split()))
    return text[:200] if text.isprintable() and "\ufffd" not in text else ""
