"""From a delivery's bytes to an event: tolerant of what is new, strict with what is dangerous."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

from ..errors import MalformedEvent

MAX_BODY = 1024 * 1024
MAX_DEPTH = 64
MAX_DIGITS = 640  # the least that Python can be told to read at most
MAX_ID = 512

# A string that is never closed runs to the end, so that no part of it is looked at twice.
_NESTING = re.compile(r'"(?:[^"\\]++|\\.)*+"?|(?P<open>[\[{])|[\]}]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Event:
    """One lifecycle event. ``payload`` is the whole delivery as parsed, and is left out of ``repr``."""

    id: str
    """The event's identifier, the same in every delivery of it."""
    type: str
    """The kind of event; an unknown one is fine, and ``""`` means that none was given."""
    payload: dict[str, Any] = field(repr=False, hash=False)
    received_at: datetime
    """When it was received, in UTC."""


def parse_event(body: bytes, received_at: datetime, *, max_body: int = MAX_BODY) -> Event:
    """Read an event from a body whose signature was verified.

    Of ``{"event": {"id": ...}}``, ``{"event.id": ...}`` and ``{"id": ...}`` the first that is there counts; ``type``
    likewise.
    """
    if len(body) > max_body:
        raise MalformedEvent(f"the body has {len(body)} bytes; at most {max_body} are read")
    payload = _load(body)
    if not isinstance(payload, dict):
        raise MalformedEvent(f"the body is JSON, and no object but {_kind(payload)}")
    kind = _member(payload, "type")
    return Event(_identifier(_member(payload, "id")), kind if isinstance(kind, str) else "", payload, received_at)


def _member(payload: dict[str, Any], name: str) -> object:
    event = payload.get("event")
    nested = event if isinstance(event, dict) else {}
    values = (nested.get(name), payload.get(f"event.{name}"), payload.get(name))
    return next((value for value in values if value is not None), None)


def _identifier(value: object) -> str:
    if value is None:
        raise MalformedEvent("the event has no id")
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise MalformedEvent(f"the event's id is {_kind(value)}, not a string")
    if not value.strip():
        raise MalformedEvent("the event's id is empty")
    if len(value) > MAX_ID:
        raise MalformedEvent(f"the event's id has {len(value)} characters; at most {MAX_ID} are read")
    if not value.isprintable():
        raise MalformedEvent(f"the event's id has characters that cannot be printed: {value!a}")
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _load(body: bytes) -> Any:
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedEvent(f"the body is not UTF-8 (byte {error.start})") from None
    if _too_deep(text):
        raise MalformedEvent(f"the body nests deeper than {MAX_DEPTH} levels")
    try:
        return _decoder.decode(text)
    except json.JSONDecodeError as error:
        raise MalformedEvent(f"the body is not JSON: {error.msg} (character {error.pos})") from None


def _too_deep(text: str) -> bool:
    # Looked at before the parser recurses: how deep that may go depends on the caller's stack and settings.
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    depth = 0
    for match in _NESTING.finditer(text):
        if match["open"]:
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif match[0] in "]}":
            depth -= 1
    return False


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise MalformedEvent(f"the body has the member {twice[:80]!a} twice: which one counts cannot be told")
    return members


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise MalformedEvent(f"the body has a number of {len(text)} digits; at most {MAX_DIGITS} are read")
    return int(text)


def _float(text: str) -> float:
    if len(text) > MAX_DIGITS or math.isinf(float(text)):
        raise MalformedEvent(f"the body has a number that cannot be held: {text[:40]}")
    return float(text)


def _constant(text: str) -> NoReturn:
    raise MalformedEvent(f"the body has {text}, which is not JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant)
