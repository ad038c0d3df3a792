"""Turns error responses of any shape into exceptions."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

from .. import errors
from ..assumptions import Assumptions
from .decode import Unreadable, look_up, parse, request_id
from .redaction import redact, redact_bytes

__all__ = ["error_from", "one_line"]

_MAX_MESSAGES = 50
_MAX_LENGTH = 500
_MAX_DEPTH = 5

_BY_STATUS: dict[int, type[errors.APIError]] = {
    400: errors.BadRequest,
    401: errors.Unauthorized,
    403: errors.Forbidden,
    422: errors.DocumentRejected,
    429: errors.RateLimited,
}
# Where common error bodies hold their parts: RFC 9457, JSON:API, OAuth, Google, Laravel, Django REST, FastAPI. A code
# makes a 500 or 503 the service's own error, so it is searched for in few places.
_CODES = (
    *("code", "error.code", "error_code", "error.error_code", "error.status", "type", "error.type", "error"),
    *("error.error", "detail.code", "errors.0.code", "0.code"),
)
_MESSAGES = ("message", "detail", "error_description", "error_message", "title", "error")
_LISTS = ("errors", "details", "messages", "fields", "violations", "invalid-params", "invalid_params")
_FIELDS = ("field", "name", "property", "propertyPath", "param", "parameter", "pointer", "path", "loc", "source")
_TEXTS = ("message", "messages", "detail", "msg", "reason", "description", "title", "code", "error")


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
    """Return the exception for an error response, with ``secrets`` redacted in every text."""
    secrets = tuple(secrets)

    def line(text: str) -> str:
        # Redact before truncating: half a secret would not be recognized.
        return one_line(redact(text, secrets))[:_MAX_LENGTH]

    try:
        data = parse(body)
    except Unreadable:
        data = _plain_text(body)
    given = {name: look_up(data, path) for name, path in assumptions.error_paths.items()}
    codes = [text for text in (*_texts(given.get("code")), *_codes(data)) if text != str(status)]
    details = list(islice(_field_messages(given.get("fields") or _details(data)), _MAX_MESSAGES))
    texts = _texts(*_members(data, _MESSAGES), data if isinstance(data, str) else None)
    candidates = [*_texts(given.get("message")), *(text for text in texts if text not in codes or " " in text)]
    candidates += [text for _, text in details]
    messages: dict[str, list[str]] = {}
    for field, text in details:
        messages.setdefault(line(field), []).append(line(text))
    kind = errors.ServerError if 500 <= status < 600 else _BY_STATUS.get(status, errors.APIError)
    kind = not_found if status == 404 else kind
    code = next((code for code in codes if " " not in code), None)
    default = reason or ("the service failed" if status >= 500 else "the service refused the request")
    if status == 400 and any(map(_is_cannot_be_sent, _strings(data))):
        kind, code = errors.CannotBeSent, "cannot_be_sent"
        default = "the signing has no document or no recipient, or is no longer a draft"
    elif 300 <= status < 400:
        default = "the service redirects this request; redirects of writes are not followed"
    message = next((text for text in candidates if not _is_cannot_be_sent(text)), "")
    known_id = request_id(headers, data, assumptions)
    return kind(
        line(message) or line(default) or "the service refused the request",
        status=status,
        operation=operation,
        code=None if code is None else line(code),
        messages=messages,
        request_id=None if known_id is None else line(known_id),
        body=body,
        redacted_body=redact_bytes(body, secrets),
        retry_after=retry_after,
    )


def _is_cannot_be_sent(text: str) -> bool:
    """Return whether the text is ``cannot_be_sent`` in any spelling, alone or at the end of a problem's URL."""
    return len(text) < _MAX_LENGTH and re.sub(r"[-_]", "", _last_segment(text)).lower() == "cannotbesent"


def _last_segment(text: str) -> str:
    return re.split(r"[/#:]", text.strip())[-1]


def _strings(data: Any, depth: int = 0) -> Iterator[str]:
    """Yield the strings and keys of parsed JSON."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping | list) and depth < _MAX_DEPTH:
        for value in chain(data, data.values()) if isinstance(data, Mapping) else data:
            yield from _strings(value, depth + 1)


def one_line(text: str) -> str:
    """Return the text as one line, without characters that control terminals or reverse the writing direction."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


# The parts of an error body


def _members(data: Any, names: Iterable[str]) -> Iterator[Any]:
    """Yield the members with these names of the body, and of the object in it that describes the error."""
    heads = (data, look_up(data, "error"), look_up(data, "detail"))
    return (head[name] for name in names for head in heads if isinstance(head, Mapping) and name in head)


def _texts(*values: Any) -> Iterator[str]:
    for value in values:
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            yield str(value).strip()


def _codes(data: Any) -> Iterator[str]:
    for path in _CODES:
        found = look_up(data, path)
        is_url = path.endswith("type") and isinstance(found, str)  # RFC 9457
        yield from _texts(_last_segment(found.removeprefix("about:blank")) if is_url else found)


def _details(data: Any) -> Any:
    """Return the list or the object with the messages for fields."""
    found = [data] if isinstance(data, list) else list(_members(data, _LISTS))
    found += [value for value in _members(data, ("detail", "message")) if isinstance(value, list)]
    if isinstance(data, Mapping):
        # Some frameworks put the fields at the top level, each with its messages.
        lists = {name: texts for name, texts in data.items() if isinstance(texts, list)}
        found.append({name: texts for name, texts in lists.items() if all(isinstance(each, str) for each in texts)})
    return next((each for each in found if isinstance(each, Mapping | list) and each), [])


def _field_messages(found: Any, field: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield field and text of each message; the field is empty if none is named."""
    if isinstance(found, str | int | float):
        yield field, str(found)
    elif isinstance(found, list) and depth < _MAX_DEPTH:
        for entry in found:
            yield from _field_messages(entry, field, depth + 1)
    elif isinstance(found, Mapping) and depth < _MAX_DEPTH:
        name = next(filter(None, (_field_name(key, found.get(key)) for key in _FIELDS)), "")
        kinds = (str, list) if name else str
        text = next((found[key] for key in _TEXTS if isinstance(found.get(key), kinds)), None)
        # A mapping at the top level has a key for each field, and a field may be called "name" or "message".
        if depth and text is not None:
            yield from _field_messages(text, name or field, depth + 1)
        else:
            for key, value in found.items():
                yield from _field_messages(value, f"{field}.{key}" if field else str(key), depth + 1)


def _field_name(key: str, value: Any) -> str:
    """Return the dotted name of a field that is given as a name, a JSON pointer, a list of steps, or an object."""
    if isinstance(value, Mapping):  # JSON:API
        return _field_name(key, value.get("pointer")) or _field_name(key, value.get("parameter"))
    if isinstance(value, list) and key in ("path", "loc"):
        return ".".join(str(step) for step in value if step != "body")
    return value.lstrip("#/").replace("/", ".") if isinstance(value, str) else ""


def _plain_text(body: bytes) -> str:
    """Return the text of a body that is not JSON: an HTML page's title, or the text itself; "" if it is binary."""
    text = body.decode("utf-8", "replace")
    if title := re.search(r"<title[^<>]*>([^<]+)", text, re.IGNORECASE):
        text = title[1]
    elif text.lstrip().startswith("<"):
        text = re.sub(r"<[^<>]*>", " ", text)
    with contextlib.suppress(ValueError):  # a character reference of thousands of digits
        import html  # seldom needed, and slow to import

        text = html.unescape(text)
    words = one_line(text)
    return "" if "\ufffd" in words[:200] else words
