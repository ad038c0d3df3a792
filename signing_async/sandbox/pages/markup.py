"""HTML without injection: every string is escaped, and only `Html` is markup."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

_EMPTY = frozenset({"br", "hr", "input", "link", "meta"})


@dataclass(frozen=True, slots=True)
class Html:
    """Markup that goes into a page unchanged; `tag` returns it."""

    text: str


Child: TypeAlias = "Html | str | int | Iterable[Child] | None"


def tag(element: str, /, *children: Child, **attributes: str | int | bool | None) -> Html:
    """Return an element. `class_` is class, `aria_label` is aria-label. True adds no value; False and None are omitted.

    Example: tag("p", "Signed by ", tag("b", name), class_="note")
    """
    opening = f"<{element}{''.join(_attribute(*pair) for pair in attributes.items())}>"
    return Html(opening if element in _EMPTY else f"{opening}{render(children)}</{element}>")


def render(child: Child) -> str:
    """Return the markup of a child or of several."""
    if child is None:
        return ""
    if isinstance(child, Html):
        return child.text
    if isinstance(child, str | int):
        return _escaped(str(child))
    return "".join(render(one) for one in child)


def theirs(text: str) -> Html:
    """Return text that a user chose, isolated: its direction does not affect the text around it."""
    return tag("bdi", text)


def isolated(text: str) -> str:
    """Return text that a user chose, isolated, for places without elements, such as a page's title."""
    return f"\u2068{text}\u2069"


def _attribute(name: str, value: str | int | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{_escaped(str(value))}"'


def _escaped(text: str) -> str:
    return escape(text).encode("utf-8", "replace").decode()  # a lone surrogate cannot be encoded
