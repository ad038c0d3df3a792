"""Looks up values of parsed responses, successful or not: the record and the request id, at the assumed paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..assumptions import Assumptions
from .decode import decode_record

__all__ = ["look_up", "record", "record_decoder", "request_id"]

T = TypeVar("T")

_MAX_LENGTH = 500


def look_up(data: Any, path: str) -> Any:
    """Return the value at a dotted path of parsed JSON; None if there is none."""
    for name in path.split("."):
        if isinstance(data, Mapping):
            data = data.get(name)
        elif isinstance(data, list) and name.isdecimal():
            data = data[int(name)] if int(name) < len(data) else None
        else:
            return None
    return data


def record(data: Any, assumptions: Assumptions) -> Any:
    """Return the record of a response: the parsed JSON itself, or the object that it wraps."""
    if isinstance(data, dict) and "id" not in data:
        for path in assumptions.record_paths:
            found = look_up(data, path)
            if isinstance(found, dict):
                return found
    return data


def record_decoder(cls: type[T], assumptions: Assumptions) -> Callable[[Any, object], T]:
    """Return the function that decodes the record of a response, for `Operation.decode`."""
    return lambda data, _: decode_record(record(data, assumptions), cls)


def request_id(headers: Mapping[str, str], data: Any, assumptions: Assumptions) -> str | None:
    """Return the id by which the service's support finds the request: from a header, else from the body."""
    found = [headers.get(name) for name in assumptions.request_id_headers]
    found += [look_up(data, path) for path in assumptions.request_id_paths]
    return next((str(value) for value in found if _is_request_id(value)), None)


def _is_request_id(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return False
    # A longer value is not truncated but ignored: half a secret that a server echoes would not be recognized.
    return bool(value) and len(str(value)) <= _MAX_LENGTH and str(value).isprintable()
