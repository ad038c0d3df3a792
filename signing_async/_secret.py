"""A holder for secrets: what is passed around hides its value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NoReturn, TypeVar

__all__ = ["Secret", "hide", "hide_fields"]

T = TypeVar("T")


class Secret(Generic[T]):
    """A secret that no ``repr``, ``str``, ``format``, pickle or traceback shows.

    Open it with `reveal` in the expression that needs the value, and don't bind the value to a name.
    """

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value: T = value

    def reveal(self) -> T:
        """Return the value."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret cannot be pickled")


def hide(value: str | T) -> Secret[str] | T:
    """Return a string in a holder, and anything else as it is. A public function rebinds its argument to it first."""
    return Secret(value) if isinstance(value, str) else value


def hide_fields(_: type, fields: Sequence[Any]) -> list[Any]:
    """Hide the fields of an attrs class, as its ``field_transformer``: some tracebacks show what ``repr`` would not."""
    return [field.evolve(repr=False) for field in fields]
