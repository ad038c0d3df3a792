"""HTML into which nothing can be injected: every string becomes text, and only `Html` is markup."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

_EMPTY = frozenset({"br", "hr", "input", "link", "meta"})


@dataclass(frozen=True, slots=True)
class Html:
    """Markup that may go into a page as it is. Made by `tag`."""

    text: str


Child: TypeAlias = "Html | str | int | Iterable[Child] | None"


def tag(element: str, /, *children: Child, **attributes: str | int | bool | None) -> Html:
    """An element. `class_` gives class, `aria_label` aria-label; True stands alone, False and None are left out.

    Example: tag("p", "Signed by ", tag("b", name), class_="note")
    """
    opening = f"<{element}{''.join(_attribute(*pair) for pair in attributes.items())}>"
    return Html(opening if element in _EMPTY else f"{opening}{render(children)}</{element}>")


def render(child: Child) -> str:
    """The markup of a child, or of many."""
    if child is None:
        return ""
    if isinstance(child, Html):
        return child.text
    if isinstance(child, str | int):
        return _escaped(str(child))
    return "".join(render(one) for one in child)


def theirs(text: str) -> Html:
    """Text that somebody chose; whatever direction its letters have, those around it keep theirs."""
    return tag("bdi", text)


def isolated(text: str) -> str:
    """The same for places that take no elements, such as a page's title."""
    return f"\u2068{text}\u2069"


def _attribute(name: str, value: str | int | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{_escaped(str(value))}"'


def _escaped(text: str) -> str:
    return escape(text).encode("utf-8", "replace").decode()  # half a surrogate pair cannot be sent
