"""Turns error responses of any shape into exceptions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
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
# Where common error bodies hold their parts: RFC 9457, OAuth, Google, Laravel, FastAPI, lists of errors. A code makes a
# 500 or 503 the service's own error, so it is searched for in few places.
_CODES = ("code", "error.code", "error_code", "error.status", "type", "error", "detail.code", "errors.0.code", "0.code")
_MESSAGES = ("message", "detail", "error_description", "title", "error")
_LISTS = ("errors", "details", "violations", "invalid-params")
_FIELDS = ("field", "name", "propertyPath", "param", "pointer", "path", "loc")
_TEXTS = ("message", "messages", "detail", "msg", "reason", "title", "code")


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
    codes = [text for text in (*_texts(given.get("code")), *_codes(data)) if text != str(status) and " " not in text]
    fields = islice(_field_messages(given.get("fields") or _details(data)), _MAX_MESSAGES)
    details = [(line(field), line(text)) for field, text in fields]
    messages: dict[str, list[str]] = {}
    for field, text in details:
        messages.setdefault(field, []).append(text)
    texts = [*_texts(given.get("message")), *(text for text in _texts(*_members(data, _MESSAGES)) if text not in codes)]
    texts += [text for _, text in details]
    code = next(iter(codes), None)
    kind = errors.ServerError if 500 <= status < 600 else _BY_STATUS.get(status, errors.APIError)
    kind = not_found if status == 404 else kind
    default = reason or ("the service failed" if status >= 500 else "the service refused the request")
    if status == 400 and any(map(_is_cannot_be_sent, (*codes, *texts, *messages))):
        kind, code = errors.CannotBeSent, "cannot_be_sent"
        default = "the signing has no document or no recipient, or is no longer a draft"
    elif 300 <= status < 400:
        default = "the service redirects this request; redirects are not followed"
    message = next((text for text in texts if not _is_cannot_be_sent(text)), default)
    known_id = request_id(headers, data, assumptions)
    return kind(
        line(message),
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
    return re.sub(r"[-_]", "", _last_segment(text[-_MAX_LENGTH:])).lower() == "cannotbesent"


def _last_segment(text: str) -> str:
    return re.split(r"[/#:]", text.strip())[-1]


def one_line(text: str) -> str:
    """Return the text as one line, without characters that control terminals or reverse the writing direction."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


# The parts of an error body


def _members(data: Any, names: Iterable[str]) -> Iterator[Any]:
    """Yield the members with these names of the body, and of the object in it that describes the error."""
    if isinstance(data, str):
        yield data
    heads = (data, look_up(data, "error"), look_up(data, "detail"))
    yield from (head[name] for name in names for head in heads if isinstance(head, Mapping) and name in head)


def _texts(*values: Any) -> Iterator[str]:
    for value in values:
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            yield str(value).strip()


def _codes(data: Any) -> Iterator[str]:
    for path in _CODES:
        found = look_up(data, path)
        is_url = path == "type" and isinstance(found, str)  # RFC 9457
        yield from _texts(_last_segment(found.removeprefix("about:blank")) if is_url else found)


def _details(data: Any) -> Any:
    """Return the list or the object with the messages for fields."""
    found = [data, *_members(data, ("detail", "message"))]
    found = [each for each in found if isinstance(each, list)] + list(_members(data, _LISTS))
    return next((each for each in found if isinstance(each, Mapping | list) and each), [])


def _field_messages(found: Any, field: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield field and text of each message; the field is empty if none is named."""
    if isinstance(found, str | int | float):
        yield field, str(found)
    elif isinstance(found, list) and depth < _MAX_DEPTH:
        for entry in found:
            yield from _field_messages(entry, field, depth + 1)
    elif isinstance(found, Mapping) and depth < _MAX_DEPTH:
        text = next((found[key] for key in _TEXTS if isinstance(found.get(key), str | list)), None)
        # A mapping at the top level has a key for each field, and a field may be called "message".
        if depth and text is not None:
            name = next((name for key in _FIELDS if (name := _field_name(found.get(key)))), field)
            yield from _field_messages(text, name, depth + 1)
        else:
            for key, value in found.items():
                yield from _field_messages(value, f"{field}.{key}" if field else str(key), depth + 1)


def _field_name(value: Any) -> str:
    """Return the dotted name of a field that is given as a name, a JSON pointer, or a list of steps."""
    if isinstance(value, list):
        return ".".join(str(step) for step in value if step != "body")
    return value.lstrip("#/").replace("/", ".") if isinstance(value, str) else ""


def _plain_text(body: bytes) -> str:
    """Return the text of a body that is not JSON; "" if it is HTML or binary."""
    text = body.decode("utf-8", "replace")
    return "" if text.lstrip().startswith("<") or "\ufffd" in text[:200] else text
