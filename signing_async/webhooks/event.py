"""Parse a verified delivery into an event: tolerant of unknown members, strict about dangerous input."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from typing import Any, NoReturn

from .._checks import is_integer
from ..errors import MalformedEvent

MAX_BODY = 1024 * 1024
MAX_DEPTH = 64
MAX_DIGITS = 640  # the lowest limit that sys.set_int_max_str_digits() accepts
MAX_ID = 512

SIGNING_ID_MEMBERS = ("event.signing_id", "event.signing.id", "signing_id", "signing.id")

# An unterminated string runs to the end of the text, so no part of it is scanned twice.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{\]}]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Event:
    """One lifecycle event. ``payload`` is the whole parsed delivery; ``repr`` leaves it out."""

    id: str
    """The event's identifier, the same in every delivery of the event."""
    type: str
    """The kind of event, ``""`` if the payload has none. Expect values that you don't know."""
    payload: dict[str, Any] = field(repr=False, hash=False)
    received_at: datetime
    """When the delivery was received, in UTC."""
    trace_context: str | None = field(default=None, repr=False, compare=False)
    """The OpenTelemetry context of the delivery, as the text of a W3C ``traceparent``; None if it was not traced."""
    namespace: str | None = None
    """The ``namespace`` of the receiver, such as a tenant: the ids of events and signings are unique only within it."""

    @property
    def key(self) -> str:
        """The id by which stores know the event: with a namespace ``"acme:evt_1"``."""
        return self.id if self.namespace is None else f"{self.namespace}:{self.id}"

    @property
    def signing_key(self) -> str | None:
        """The id by which stores know the signing, likewise."""
        signing_id = self.signing_id
        return signing_id if signing_id is None or self.namespace is None else f"{self.namespace}:{signing_id}"

    @property
    def signing_id(self) -> str | None:
        """The id of the signing that the event is about; None if the payload has none.

        The specification does not name the member. The first usable value of ``event.signing_id``,
        ``event.signing.id``, ``signing_id`` and ``signing.id`` counts, nested or with dots in the name.
        """
        values = (_member(self.payload, name) for name in SIGNING_ID_MEMBERS)
        return next((str(value) for value in values if not _id_problem(value)), None)


def parse_event(body: bytes, received_at: datetime, *, max_body: int = MAX_BODY) -> Event:
    """Parse the body of a delivery whose signature was verified.

    The id is the first of ``{"event": {"id": ...}}``, ``{"event.id": ...}`` and ``{"id": ...}`` that is present;
    ``type`` likewise. Raises `MalformedEvent` if there is no usable id or the body is not a JSON object.
    """
    if len(body) > max_body:
        raise MalformedEvent(f"the body has {len(body)} bytes; the limit is {max_body}")
    payload = _load(body)
    if not isinstance(payload, dict):
        raise MalformedEvent(f"the body must be a JSON object, got {_json_kind(payload)}")
    event_id, event_type = (_first_member(payload, name) for name in ("id", "type"))
    if problem := _id_problem(event_id):
        raise MalformedEvent(f"the event id {problem}")
    return Event(str(event_id), event_type if isinstance(event_type, str) else "", payload, received_at)


def _first_member(payload: dict[str, Any], name: str) -> object:
    inside = _member(payload, f"event.{name}")
    return payload.get(name) if inside is None else inside


def _member(value: object, name: str) -> object:
    """Return the member ``a.b.c``, whichever of its dots separate nested objects; the most nested one first."""
    if not isinstance(value, dict):
        return None
    dot = name.find(".")
    while dot >= 0:
        nested = _member(value.get(name[:dot]), name[dot + 1 :])
        if nested is not None:
            return nested
        dot = name.find(".", dot + 1)
    return value.get(name)


def _id_problem(value: object) -> str:
    """Return why the value cannot be an id; an empty string if it can."""
    if value is None:
        return "is missing"
    if not isinstance(value, str) and not is_integer(value):
        return f"must be a string, got {_json_kind(value)}"
    text = str(value)
    if not text.strip():
        return "is empty"
    if len(text) > MAX_ID:
        return f"has {len(text)} characters; the limit is {MAX_ID}"
    return "" if text.isprintable() else f"contains unprintable characters: {text!a}"


def _json_kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _load(body: bytes) -> Any:
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedEvent(f"the body is not UTF-8 (byte {error.start})") from None
    if _nests_too_deep(text):
        raise MalformedEvent(f"the body nests deeper than {MAX_DEPTH} levels")
    try:
        return _decoder.decode(text)
    except json.JSONDecodeError as error:
        raise MalformedEvent(f"the body is not JSON: {error.msg} (character {error.pos})") from None


def _nests_too_deep(text: str) -> bool:
    # Checked before parsing: how deep the JSON parser may recurse depends on the caller's stack and settings.
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    steps = {"[": 1, "{": 1, "]": -1, "}": -1}
    depths = accumulate(steps.get(match[0], 0) for match in _STRING_OR_BRACKET.finditer(text))
    return any(depth > MAX_DEPTH for depth in depths)


def _decode_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise MalformedEvent(f"the body has a duplicate member: {name[:80]!a}")
    return members


def _decode_integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise MalformedEvent(f"the body has a number of {len(text)} digits; the limit is {MAX_DIGITS}")
    return int(text)


def _decode_float(text: str) -> float:
    if len(text) > MAX_DIGITS or math.isinf(float(text)):
        raise MalformedEvent(f"the body has a number that is too long or out of range: {text[:40]}")
    return float(text)


def _reject_constant(text: str) -> NoReturn:
    raise MalformedEvent(f"the body contains {text}, which is not JSON")


_decoder = json.JSONDecoder(
    object_pairs_hook=_decode_object,
    parse_int=_decode_integer,
    parse_float=_decode_float,
    parse_constant=_reject_constant,
)
