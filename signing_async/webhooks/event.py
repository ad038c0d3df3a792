"""Parse a verified delivery into an event: tolerant of unknown members, strict about dangerous input."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from .._checks import is_integer
from ..errors import MalformedEvent

MAX_BODY = 1024 * 1024
MAX_DEPTH = 64
MAX_ID = 512
BOM = b"\xef\xbb\xbf"

SIGNING_ID_MEMBERS = ("event.signing_id", "event.signing.id", "signing_id", "signing.id")


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

        The first usable value of ``event.signing_id``, ``event.signing.id``, ``signing_id`` and ``signing.id`` counts,
        nested or with dots in the name.
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
        payload = _decoder.decode(body.removeprefix(BOM).decode())
        is_deep = body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deeper(payload, MAX_DEPTH)
    except UnicodeDecodeError as error:
        raise MalformedEvent(f"the body is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        is_deep = True
    except ValueError as error:
        raise MalformedEvent(f"the body is not JSON: {error}") from None
    if is_deep:
        raise MalformedEvent(f"the body nests deeper than {MAX_DEPTH} levels")
    if not isinstance(payload, dict):
        raise MalformedEvent(f"the body must be a JSON object, got a {type(payload).__name__}")
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
    dot = name.find(".")
    while dot >= 0:
        nested = _member(value.get(name[:dot]), name[dot + 1 :])
        if nested is not None:
            return nested
        dot = name.find(".", dot + 1)
    return value.get(name)


def _is_id(value: object) -> bool:
    text = str(value) if isinstance(value, str) or is_integer(value) else ""
    return bool(text.strip()) and len(text) <= MAX_ID and text.isprintable()


def _is_deeper(value: object, levels: int) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return values is not None and (levels == 0 or any(_is_deeper(item, levels - 1) for item in values))


def _refuse_constant(text: str) -> float:
    raise MalformedEvent(f"the body contains {text}, which is not a finite number")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)
