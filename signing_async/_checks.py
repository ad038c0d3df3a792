"""Checks of arguments: each returns the value, or raises an error that names the argument, the value and the rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from typing import Any

from .errors import ConfigurationError

__all__ = [
    "field",
    "integer",
    "is_aware",
    "is_integer",
    "is_number",
    "is_text",
    "number",
    "short_repr",
    "string",
    "text_rule",
]


def field(check: Callable[..., object], prefix: str = "", **bounds: Any) -> Callable[[object, Any, Any], object]:
    """Return an attrs validator. Its errors name the field, with ``prefix`` before it."""
    return lambda _, attribute, value: check(f"{prefix}{attribute.name}", value, **bounds)


def short_repr(record: Any) -> str:
    """Return the repr of an attrs record of settings, with only the fields that differ from their defaults."""
    cls, default = type(record), type(record)()
    values = {field.name: getattr(record, field.name) for field in cls.__attrs_attrs__}
    shown = [f"{name}={value!r}" for name, value in values.items() if value != getattr(default, name)]
    return f"{cls.__name__}({', '.join(shown)})"


def is_number(value: object) -> bool:
    """Return whether the value is a finite number. A bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_integer(value: object) -> bool:
    """Return whether the value is an integer. A bool is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_text(value: object) -> bool:
    """Return whether the value is a non-empty string that can be encoded: without lone surrogates."""
    return isinstance(value, str) and value != "" and value.encode("utf-8", "replace").decode() == value


def text_rule(value: object) -> str:
    """Return the rule that a value breaks if `is_text` rejects it, or if it is blank."""
    is_blank = not isinstance(value, str) or not value.strip()
    return "must be a non-empty string" if is_blank else "must be valid UTF-8, without lone surrogates"


def is_aware(value: object) -> bool:
    """Return whether the value is a datetime with a time zone."""
    return isinstance(value, datetime) and value.utcoffset() is not None


def number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    error: type[Exception] = ConfigurationError,
) -> float:
    """Return the value if it is a finite number within the bounds."""
    low = -math.inf if at_least is None else at_least
    if is_number(value) and low <= value and (above is None or value > above) and (at_most is None or value <= at_most):
        checked: float = value
        return checked
    rules = {"above": above, "of at least": at_least, "of at most": at_most}
    rule = " and".join(f" {words} {bound:g}" for words, bound in rules.items() if bound is not None)
    raise error(f"{name}: must be a number{rule}, got {value!r}")


def integer(
    name: str, value: Any, *, at_least: int = 1, at_most: int | None = None, error: type[Exception] = ConfigurationError
) -> int:
    """Return the value if it is an integer within the bounds."""
    if is_integer(value) and at_least <= value and (at_most is None or value <= at_most):
        checked: int = value
        return checked
    rule = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
    raise error(f"{name}: must be an integer {rule}, got {value!r}")


def string(name: str, value: Any, *, may_be_empty: bool = False, error: type[Exception] = ConfigurationError) -> str:
    """Return the value if it is a string that can be encoded, and not empty unless ``may_be_empty``."""
    if is_text(value) or (may_be_empty and value == ""):
        checked: str = value
        return checked
    kind = "a string" if may_be_empty else "a non-empty string"
    raise error(f"{name}: must be {kind}, got {value!r}")
