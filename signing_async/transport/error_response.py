"""Reads an error answer, whatever its shape: code, message, messages per field, request id; and picks the exception."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .. import errors
from ..assumptions import Assumptions
from .decode import Unreadable, parse
from .redaction import redact, redact_bytes

__all__ = ["error_from", "look_up", "one_line", "record", "request_id"]

_MOST_MESSAGES = 50
_LONGEST = 500

_CODE_PATHS = (
    "code",
    "error.code",
    "error_code",
    "error.error_code",
    "error.status",
    "error.type",
    "error",
    "detail.code",
    "errors.0.code",
    "0.code",
)
_MESSAGE_PATHS = (
    "message",
    "error.message",
    "detail",
    "error.detail",
    "detail.message",
    "error_description",
    "error_message",
    "title",
    "error.title",
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
)
_LISTS_ONLY = ("detail", "message")
_REQUEST_ID_PATHS = ("request_id", "meta.request_id", "error.request_id", "requestId")
_FIELD_KEYS = ("field", "name", "property", "propertyPath", "param", "parameter", "pointer", "path", "loc", "source")
_LIST_KEYS = ("path", "loc")
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
        elif isinstance(data, list) and name.isdecimal():
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
    return next((str(value) for value in found if _is_identity(value)), None)


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

    def line(text: str) -> str:
        # Redacted before it is cut, so that no half of a secret stays.
        return one_line(redact(text, secrets))[:_LONGEST]

    try:
        data = parse(body)
    except Unreadable:
        data = _plain(body)
    codes = [code for code in _codes(data) if code != str(status)]
    messages: dict[str, list[str]] = {}
    for field, text in itertools.islice(_messages(data), _MOST_MESSAGES):
        messages.setdefault(line(field), []).append(line(text))
    said = [text for text in _texts(data, _MESSAGE_PATHS) if text not in codes or " " in text]
    said += [data] if isinstance(data, str) else []
    said += [text for texts in messages.values() for text in texts]
    said = [text for text in said if not _is_cannot_be_sent(text)]
    kind = _pick(status, data, not_found)
    code = "cannot_be_sent" if kind is errors.CannotBeSent else next((code for code in codes if " " not in code), None)
    known_id = request_id(headers, data, assumptions)
    return kind(
        line(next(iter(said), "")) or line(_meaning(kind, status, reason)) or _meaning(kind, status, ""),
        status=status,
        operation=operation,
        code=None if code is None else line(code),
        messages=messages,
        request_id=None if known_id is None else line(known_id),
        body=body,
        redacted_body=redact_bytes(body, secrets),
        retry_after=retry_after,
    )


def _pick(status: int, data: Any, not_found: type[errors.NotFound]) -> type[errors.APIError]:
    if status >= 500:
        return errors.ServerError
    if status == 404:
        return not_found
    if status == 400 and any(_is_cannot_be_sent(text) for text in _leaves(data)):
        return errors.CannotBeSent
    return _BY_STATUS.get(status, errors.APIError)


def _is_cannot_be_sent(text: str) -> bool:
    """Whether a text is that code, in whatever spelling: a word of its own, or the end of a problem's URL."""
    return len(text) < 500 and re.sub(r"[-_]", "", re.split(r"[/#:]", text.strip())[-1]).lower() == "cannotbesent"


def _leaves(data: Any, depth: int = 0) -> Iterator[str]:
    """The texts and names in an answer, as deep as an error's code can be."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping | list) and depth < 5:
        for value in itertools.chain(data, data.values()) if isinstance(data, Mapping) else data:
            yield from _leaves(value, depth + 1)


def _meaning(kind: type[errors.APIError], status: int, reason: str) -> str:
    if kind is errors.CannotBeSent:
        return "the signing has no document or no recipient, or it is not a draft any more"
    if 300 <= status < 400:
        return "the service redirects this request, which is not followed"
    return reason or ("the service failed" if status >= 500 else "the service refused the request")


def one_line(text: str) -> str:
    """A text of one line, without what controls terminals or turns the direction of writing."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def _is_text(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _is_identity(value: Any) -> bool:
    # Whole or not at all: half of a secret that a server echoes would not be recognised as one.
    return _is_text(value) and bool(value) and len(str(value)) <= _LONGEST and str(value).isprintable()


def _codes(data: Any) -> Iterator[str]:
    yield from _texts(data, _CODE_PATHS)
    # RFC 9457 names the problem by a URL, whose end is the code.
    for problem in _texts(data, ("type",)):
        if problem != "about:blank":
            yield re.split(r"[/#:]", problem)[-1]


def _texts(data: Any, paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        value = look_up(data, path)
        if _is_text(value) and str(value).strip():
            yield str(value).strip()


def _messages(data: Any) -> Iterator[tuple[str, str]]:
    """Field and text of each validation message; the field is empty where none is named."""
    lists = [data] if isinstance(data, list) else [look_up(data, path) for path in _LIST_PATHS]
    lists += [found for path in _LISTS_ONLY if isinstance(found := look_up(data, path), list)]
    if isinstance(data, Mapping):
        # As some frameworks do: the fields at the top, each with its list.
        lists.append({name: texts for name, texts in data.items() if _is_list_of_texts(texts)})
    yield from _entries(next((found for found in lists if isinstance(found, Mapping | list) and found), []), "")


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _entries(found: Any, field: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    if isinstance(found, str | int | float):
        yield field, str(found)
    elif isinstance(found, list) and depth < 5:
        for entry in found:
            yield from _entries(entry, field, depth + 1)
    elif isinstance(found, Mapping) and depth < 5:
        name = next(filter(None, (_field_name(key, found.get(key)) for key in _FIELD_KEYS)), "")
        kinds = (str, list) if name else str
        text = next((found[key] for key in _TEXT_KEYS if isinstance(found.get(key), kinds)), None)
        # At the top a mapping has a key for each field: one of them may be called "name", another "message".
        if depth and text is not None:
            yield from _entries(text, name or field, depth + 1)
        else:
            for key, value in found.items():
                yield from _entries(value, f"{field}.{key}" if field else str(key), depth + 1)


def _field_name(key: str, value: Any) -> str:
    """The field that an entry is about, in dots, from a name, a JSON pointer, a list of steps, or their object."""
    if isinstance(value, Mapping):
        return next(filter(None, (_field_name(inner, value.get(inner)) for inner in ("pointer", "parameter"))), "")
    if isinstance(value, list) and key in _LIST_KEYS:
        return ".".join(str(step) for step in value if step != "body")
    return value.lstrip("#/").replace("/", ".") if isinstance(value, str) else ""


def _plain(body: bytes) -> str:
    """The words of a body that is no JSON: an HTML page's title, or the beginning of its text; "" if it has none."""
    text = body.decode("utf-8", "replace")
    title = re.search(r"<title[^<>]*>([^<]+)", text, re.IGNORECASE)
    if title is not None:
        text = title[1]
    elif text.lstrip().startswith("<"):
        text = re.sub(r"<[^<>]*>", " ", text)
    # Python refuses to read a character's number of thousands of digits.
    with contextlib.suppress(ValueError):
        # Its table of names is loaded for those that need it.
        import html

        text = html.unescape(text)
    words = one_line(text)
    return "" if "\ufffd" in words[:200] else words
