"""Validation of the fields in a request's JSON object."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .refused import invalid

LANGUAGES = ("EN", "SV")
ORDERS = ("sequential", "parallel")
MAX_MESSAGE = 400
MAX_ORDER = 2**31 - 1
NOT_BLANK = r"[^ \t\r\n]"
_WORD = r"[^\s\x00-\x20\x7f.@()<>\[\]:;,\\\"]+"
_LABEL = r"[^\s\x00-/:-@\[-`{-\x7f](?:[^\s\x00-,./:-@\[-`{-\x7f]*[^\s\x00-/:-@\[-`{-\x7f])?"
EMAIL = rf"^(?![^@]{{65}}|.{{255}}){_WORD}(?:\.{_WORD})*@{_LABEL}(?:\.{_LABEL})*$"
"""An e-mail address in any script, within RFC 5321's lengths. Quoted local parts are not accepted."""


class Fields:
    """The fields of a request; their problems are collected and reported together."""

    def __init__(self, body: Mapping[str, object], required: Sequence[str]) -> None:
        self._body = body
        self._required = required
        self._errors: dict[str, list[str]] = {}

    def check(self) -> None:
        """Raise `Refused` if any field was invalid."""
        if self._errors:
            raise invalid(self._errors)

    def refuse(self, field: str, problem: str) -> None:
        """Record a problem of a field: the rest of a sentence that begins with its name."""
        self._errors.setdefault(field, []).append(f"The {field} {problem}.")

    def text(
        self, field: str, *, required: bool = False, longest: int | None = None, pattern: str | None = None
    ) -> str | None:
        """Return a string or None. A required field must not be blank."""
        value = self._body.get(field)
        if value is not None and not isinstance(value, str):
            self.refuse(field, "must be a string")
            return None
        if (required or field in self._required) and (value is None or not re.search(NOT_BLANK, value)):
            self.refuse(field, "is required")
        elif value is not None and longest is not None and len(value) > longest:
            self.refuse(field, f"has {len(value)} characters; at most {longest} are allowed")
        elif value is not None and pattern is not None and not re.fullmatch(pattern, value):
            self.refuse(field, "is not an e-mail address")
        return value

    def choice(self, field: str, allowed: Sequence[str], *, required: bool = False) -> str | None:
        """Return one of the allowed values or None."""
        value = self._body.get(field)
        if value is None and (required or field in self._required):
            self.refuse(field, "is required")
        if value is None or value in allowed:
            return value if isinstance(value, str) else None
        self.refuse(field, f"must be one of {', '.join(allowed)}")
        return None

    def order(self, field: str) -> int | None:
        """Return a position of at least 1, or None. 1.0 counts as 1."""
        value = self._body.get(field)
        if value is None and field in self._required:
            self.refuse(field, "is required")
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or value % 1 or not 1 <= value <= MAX_ORDER:
            self.refuse(field, "must be an integer of at least 1")
            return None
        return int(value)
