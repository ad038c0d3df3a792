"""A minimal browser: it requests pages, parses them, and submits their forms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import aiohttp
from multidict import CIMultiDictProxy

from signing_async.sandbox import Sandbox

INLINE = {"a", "bdi", "code", "span", "strong", "time"}
EMPTY = {"br", "hr", "input", "link", "meta"}


@dataclass
class Element:
    """One element of a page."""

    name: str
    attributes: dict[str, str]
    parent: Element | None
    children: list[Element | str] = field(default_factory=list)

    def every(self, *names: str) -> list[Element]:
        """Return the descendants with one of these names (or all), in order."""
        return [element for element in self._inside() if not names or element.name in names]

    def _inside(self) -> Iterator[Element]:
        for child in self.children:
            if isinstance(child, Element):
                yield child
                yield from child._inside()

    @property
    def text(self) -> str:
        """The visible text with single spaces, also between blocks."""
        return " ".join(self._apart().split())

    def _apart(self) -> str:
        text = "".join(child if isinstance(child, str) else child._apart() for child in self.children)
        return text if self.name in INLINE else f" {text} "

    @property
    def raw(self) -> str:
        """The text, unchanged."""
        return "".join(child if isinstance(child, str) else child.raw for child in self.children)

    def find(self, name: str, /, **attributes: str) -> Element:
        """Return the only element of that name with these attributes."""
        found = [
            element
            for element in self.every(name)
            if all(
                element.attributes.get(key.rstrip("_").replace("_", "-")) == value for key, value in attributes.items()
            )
        ]
        assert len(found) == 1, f"{len(found)} elements {name} {attributes} in: {self.text[:300]}"
        return found[0]


class _Reader(HTMLParser):
    """Builds the tree; tags must be balanced."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = self.now = Element("document", {}, None)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in {attrs}"
        element = Element(tag, {name: value or "" for name, value in attrs}, self.now)
        self.now.children.append(element)
        if tag not in EMPTY:
            self.now = element

    def handle_endtag(self, tag: str) -> None:
        assert self.now.name == tag, f"</{tag}> closes <{self.now.name}>"
        assert self.now.parent is not None
        self.now = self.now.parent

    def handle_data(self, data: str) -> None:
        self.now.children.append(data)


@dataclass
class Page:
    """A response with its document."""

    status: int
    path: str
    headers: CIMultiDictProxy[str]
    html: str
    root: Element

    @property
    def main(self) -> Element:
        """The main element."""
        return self.root.find("main")

    @property
    def notice(self) -> str:
        """What was done, as a page says after a redirect."""
        assert self.status == 200, self.status
        return self.main.find("p", role="status").text

    @property
    def refusal(self) -> str:
        """Why a form was refused with 400."""
        assert self.status == 400, self.status
        return self.main.find("p", role="alert").text

    def form(self, action: str, button: str | None = None) -> Element:
        """Return the form with that action (and that button)."""
        forms = [f for f in self.root.every("form") if f.attributes["action"] == action]
        if button is not None:
            forms = [f for f in forms if any(b.text.startswith(button) for b in f.every("button"))]
        assert forms, f"no form for {action} ({button}) on {self.path}"
        return forms[0]


def read(html: str) -> Element:
    """Return the tree of a document."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert reader.now is reader.root, f"<{reader.now.name}> is never closed"
    return reader.root


class Visitor:
    """A person with a browser."""

    def __init__(self, sandbox: Sandbox, session: aiohttp.ClientSession) -> None:
        self.sandbox = sandbox
        self.session = session

    async def request(self, method: str, path: str, **options: Any) -> Page:
        """Request a page."""
        options.setdefault("headers", {"Accept": "text/html"})
        async with self.session.request(method, path, **options) as response:
            html = await response.text() if response.content_type.startswith("text/") else ""
            root = read(html) if response.content_type == "text/html" else Element("document", {}, None)
            return Page(response.status, response.url.path_qs, response.headers, html, root)

    async def get(self, path: str, **options: Any) -> Page:
        """Request a page with GET."""
        return await self.request("GET", path, **options)

    async def send(
        self, page: Page, action: str, typed: Mapping[str, str] | None = None, *, press: str | None = None,
        follow: bool = True, **fields: str,
    ) -> Page:  # fmt: skip
        """Fill in a form and press its button (the first, or the one with that text)."""
        fields |= typed or {}
        form = page.form(action, press)
        values = {e.attributes["name"]: e.attributes.get("value", "") for e in form.every("input")
                  if e.attributes.get("type") != "checkbox"}  # fmt: skip
        boxes = {e.attributes["name"] for e in form.every("input") if e.attributes.get("type") == "checkbox"}
        for choice in form.every("select"):
            options = choice.every("option")
            chosen = [option for option in options if "selected" in option.attributes] or options[:1]
            values[choice.attributes["name"]] = chosen[0].attributes["value"]
        assert not fields.keys() - values.keys() - boxes, f"the form has only {sorted(values)} and {sorted(boxes)}"
        button = next(b for b in form.every("button") if press is None or b.text.startswith(press))
        if "name" in button.attributes:
            values[button.attributes["name"]] = button.attributes["value"]
        return await self.post(action, values | fields, follow=follow)

    async def post(self, path: str, fields: dict[str, str], *, follow: bool = True, **headers: str) -> Page:
        """Submit fields as a form."""
        return await self.request("POST", path, data=fields, allow_redirects=follow, headers=headers)
