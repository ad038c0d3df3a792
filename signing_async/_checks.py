"""What a setting is refused for, in the same words wherever it is given."""

from __future__ import annotations

import math

from .errors import ConfigurationError

__all__ = ["is_text", "seconds", "text"]


def seconds(owner: str, name: str, value: object) -> None:
    """Refuse what is no time that can pass."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigurationError(f"{owner}: {name} must be seconds above 0, not {value!r}")


def text(owner: str, name: str, value: object, *, may_be_empty: bool = False) -> None:
    """Refuse what cannot be a name, or a part of one."""
    if not (is_text(value) or (may_be_empty and value == "")):
        empty = "" if may_be_empty else " that is not empty"
        raise ConfigurationError(f"{owner}: {name} must be a text{empty}, in whole characters, not {value!r}")


def is_text(value: object) -> bool:
    """Whether it is a text that is not empty, and can be written down: without halves of a surrogate pair."""
    return isinstance(value, str) and value != "" and value.encode("utf-8", "replace").decode() == value
