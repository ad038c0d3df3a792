"""Parses error responses of any shape: code, message, messages per field, request id; and picks the exception."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .. import errors
from ..assumptions import Assumptions
from .decode import Unreadable, parse
from .lookup import look_up, request_id
from .redaction import redact, redact_bytes

__all__ = ["error_from", "one_line"]

_MAX_MESSAGES = 50
_MAX_LENGTH = 500
_MAX_DEPTH = 5

_BY_STATUS: dict[int, type[errors.APIError]] = {
    400: errors.BadRequest,
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.NotFound,
    422: errors.DocumentRejected,
    429: errors.RateLimited,
}


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
    codes = [code for code in _codes(data, assumptions) if code != str(status)]
    messages: dict[str, list[str]] = {}
    for field, text in itertools.islice(_messages(data, assumptions), _MAX_MESSAGES):
        messages.setdefault(line(field), []).append(line(text))
    candidates = [text for text in _texts(data, assumptions.error_message_paths) if text not in codes or " " in text]
    candidates += [data] if isinstance(data, str) else []
    candidates += [text for texts in messages.values() for text in texts]
    message = next((text for text in candidates if not _is_cannot_be_sent(text)), "")
    kind = _pick_exception(status, data, not_found)
    code = "cannot_be_sent" if kind is errors.CannotBeSent else next((code for code in codes if " " not in code), None)
    known_id = request_id(headers, data, assumptions)
    return kind(
        line(message) or line(_default_message(kind, status, reason)) or _default_message(kind, status, ""),
        status=status,
        operation=operation,
        code=None if code is None else line(code),
        messages=messages,
        request_id=None if known_id is None else line(known_id),
        body=body,
        redacted_body=redact_bytes(body, secrets),
        retry_after=retry_after,
    )


def _pick_exception(status: int, data: Any, not_found: type[errors.NotFound]) -> type[errors.APIError]:
    if 500 <= status < 600:
        return errors.ServerError
    if status == 404:
        return not_found
    if status == 400 and any(_is_cannot_be_sent(text) for text in _strings(data)):
        return errors.CannotBeSent
    return _BY_STATUS.get(status, errors.APIError)


def _is_cannot_be_sent(text: str) -> bool:
    """Return whether the text is ``cannot_be_sent`` in any spelling, alone or at the end of a problem's URL."""
    return (
        len(text) < _MAX_LENGTH and re.sub(r"[-_]", "", re.split(r"[/#:]", text.strip())[-1]).lower() == "cannotbesent"
    )


def _strings(data: Any, depth: int = 0) -> Iterator[str]:
    """Yield the strings and keys of parsed JSON."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping | list) and depth < _MAX_DEPTH:
        for value in itertools.chain(data, data.values()) if isinstance(data, Mapping) else data:
            yield from _strings(value, depth + 1)


def _default_message(kind: type[errors.APIError], status: int, reason: str) -> str:
    if kind is errors.CannotBeSent:
        return "the signing has no document or no recipient, or is no longer a draft"
    if 300 <= status < 400:
        return "the service redirects this request; redirects of writes are not followed"
    return reason or ("the service failed" if status >= 500 else "the service refused the request")


def one_line(text: str) -> str:
    """Return the text as one line, without characters that control terminals or reverse the writing direction."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def _is_text(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _codes(data: Any, assumptions: Assumptions) -> Iterator[str]:
    yield from _texts(data, assumptions.error_code_paths)
    # RFC 9457 identifies a problem by a URL; its last segment is the code.
    for problem in _texts(data, ("type",)):
        if problem != "about:blank":
            yield re.split(r"[/#:]", problem)[-1]


def _texts(data: Any, paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        value = look_up(data, path)
        if _is_text(value) and str(value).strip():
            yield str(value).strip()


def _messages(data: Any, assumptions: Assumptions) -> Iterator[tuple[str, str]]:
    """Yield field and text of each validation message; the field is empty if none is named."""
    lists: list[Any] = [data] if isinstance(data, list) else []
    for path in assumptions.error_list_paths:
        found = look_up(data, path)
        if isinstance(found, list) or path not in assumptions.error_message_paths:
            lists.append(found)
    if isinstance(data, Mapping):
        # Some frameworks put the fields at the top level, each with its messages.
        lists.append({name: texts for name, texts in data.items() if _is_list_of_strings(texts)})
    found = next((found for found in lists if isinstance(found, Mapping | list) and found), [])
    yield from _field_messages(found, "", assumptions)


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _field_messages(found: Any, field: str, assumptions: Assumptions, depth: int = 0) -> Iterator[tuple[str, str]]:
    if isinstance(found, str | int | float):
        yield field, str(found)
    elif isinstance(found, list) and depth < _MAX_DEPTH:
        for entry in found:
            yield from _field_messages(entry, field, assumptions, depth + 1)
    elif isinstance(found, Mapping) and depth < _MAX_DEPTH:
        names = (_field_name(key, found.get(key), assumptions) for key in assumptions.error_field_keys)
        name = next(filter(None, names), "")
        kinds = (str, list) if name else str
        text = next((found[key] for key in assumptions.error_text_keys if isinstance(found.get(key), kinds)), None)
        # A mapping at the top level has a key for each field, and a field may be called "name" or "message".
        if depth and text is not None:
            yield from _field_messages(text, name or field, assumptions, depth + 1)
        else:
            for key, value in found.items():
                yield from _field_messages(value, f"{field}.{key}" if field else str(key), assumptions, depth + 1)


def _field_name(key: str, value: Any, assumptions: Assumptions) -> str:
    """Return the dotted name of a field that is given as a name, a JSON pointer, a list of steps, or an object."""
    if isinstance(value, Mapping):
        # JSON:API
        inner = (_field_name(each, value.get(each), assumptions) for each in ("pointer", "parameter"))
        return next(filter(None, inner), "")
    if isinstance(value, list) and key in assumptions.error_path_keys:
        return ".".join(str(step) for step in value if step != "body")
    return value.lstrip("#/").replace("/", ".") if isinstance(value, str) else ""


def _plain_text(body: bytes) -> str:
    """Return the text of a body that is not JSON: an HTML page's title, or the text itself; "" if it is binary."""
    text = body.decode("utf-8", "replace")
    title = re.search(r"<title[^<>]*>([^<]+)", text, re.IGNORECASE)
    if title is not None:
        text = title[1]
    elif text.lstrip().startswith("<"):
        text = re.sub(r"<[^<>]*>", " ", text)
    # unescape raises on a character reference of thousands of digits.
    with contextlib.suppress(ValueError):
        # Imported here: its table of entities is seldom needed.
        import html

        text = html.unescape(text)
    words = one_line(text)
    return "" if "\ufffd" in words[:200] else words
