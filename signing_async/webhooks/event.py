"""Parse a verified delivery into an event: tolerant of unknown members, strict about dangerous input."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from typing import Any

from .._checks import is_integer
from ..errors import MalformedEvent

MAX_BODY = 1024 * 1024
MAX_DEPTH = 64
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
        return next((str(value) for value in values if _is_id(value)), None)


def parse_event(body: bytes, received_at: datetime, *, max_body: int = MAX_BODY) -> Event:
    """Parse the body of a delivery whose signature was verified.

    The id is the first of ``{"event": {"id": ...}}``, ``{"event.id": ...}`` and ``{"id": ...}`` that is present;
    ``type`` likewise. Raises `MalformedEvent` if there is no usable id or the body is not a JSON object.
    """
    if len(body) > max_body:
        raise MalformedEvent(f"the body has {len(body)} bytes; the limit is {max_body}")
    try:
        text = body.decode("utf-8-sig")
        # Checked before parsing: how deep the JSON parser may recurse depends on the caller's stack and settings.
        if text.count("[") + text.count("{") > MAX_DEPTH:
            steps = {"[": 1, "{": 1, "]": -1, "}": -1}
            depths = accumulate(steps.get(match[0], 0) for match in _STRING_OR_BRACKET.finditer(text))
            if any(depth > MAX_DEPTH for depth in depths):
                raise MalformedEvent(f"the body nests deeper than {MAX_DEPTH} levels")
        payload = _decoder.decode(text)
    except UnicodeDecodeError as error:
        raise MalformedEvent(f"the body is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise MalformedEvent(f"the body is not JSON: {error.msg} (character {error.pos})") from None
    except ValueError as error:
        raise MalformedEvent(f"the body is not JSON: {error}") from None
    if not isinstance(payload, dict):
        kinds = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
        raise MalformedEvent(f"the body must be a JSON object, got {kinds.get(type(payload), 'a number')}")
    event_id, event_type = (
        payload.get(name) if (value := _member(payload, f"event.{name}")) is None else value for name in ("id", "type")
    )
    if not _is_id(event_id):
        problem = "is missing" if event_id is None else f"must be a printable string of 1 to {MAX_ID} characters"
        raise MalformedEvent(f"the event id {problem}")
    return Event(str(event_id), event_type if isinstance(event_type, str) else "", payload, received_at)


def _member(value: object, name: str) -> object:
    """Return the member ``a.b.c``, whichever of its dots separate nested objects; the most nested one first."""
    if not isinstance(value, dict):
        return None
    for dot in re.finditer(r"\.", name):
        nested = _member(value.get(name[: dot.start()]), name[dot.end() :])
        if nested is not None:
            return nested
    return value.get(name)


def _is_id(value: object) -> bool:
    text = str(value) if isinstance(value, str) or is_integer(value) else ""
    return bool(text.strip()) and len(text) <= MAX_ID and text.isprintable()


def _decode_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise MalformedEvent("the body has an object with a duplicate member")
    return members


def _decode_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise MalformedEvent(f"the body contains {text[:40]}, which is not a finite number")
    return value


_decoder = json.JSONDecoder(object_pairs_hook=_decode_object, parse_float=_decode_float, parse_constant=_decode_float)
