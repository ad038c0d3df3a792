"""What every page must satisfy."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from tests.sandbox.browsing import Page, Visitor

CALLBACK = "http://127.0.0.1:9/callback"


def consent(app: Any, **changes: str) -> str:
    """Return the URL that an application sends its user to."""
    query = {"client_id": app.client_id, "redirect_uri": app.redirect_uri, "response_type": "code", "state": "s1"}
    return f"/oauth/authorize?{urlencode(query | changes)}"


async def crawl(visitor: Visitor) -> dict[str, Page]:
    """Return every page that links lead to, starting at the dashboard."""
    named = {"a": "href", "object": "data", "link": "href", "script": "src"}
    found: dict[str, Page] = {}
    waiting = ["/sandbox"]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path] = page = await visitor.get(path)
            links = [element.attributes[named[element.name]] for element in page.root.every(*named)]
            waiting += [link.partition("#")[0] for link in links if link.startswith("/")]
    return found


def check_document(page: Page) -> None:
    """Assert that a page is accessible and has no inline scripts or styles."""
    root = page.root
    assert root.find("html").attributes["lang"] in {"en", "sv"}
    assert root.find("title").text.endswith("Signing sandbox")
    assert "This is not a legal signing service" in root.find("header").text
    assert root.text.count("not in the specification") <= 1
    for landmark in ("header", "main", "footer"):
        assert root.find(landmark)
    assert root.find("a", class_="skip").attributes["href"] == "#main"
    levels = [int(heading.name[1]) for heading in root.every("h1", "h2", "h3")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    ids = [element.attributes["id"] for element in root.every() if "id" in element.attributes]
    assert len(ids) == len(set(ids)), sorted(ids)
    labelled = {label.attributes.get("for") for label in root.every("label")}
    for control in root.every("input", "select"):
        inside_label = control.parent is not None and control.parent.name == "label"
        hidden = control.attributes.get("type") == "hidden"
        assert hidden or inside_label or control.attributes["id"] in labelled, control.attributes
    for element in root.every():
        for name in ("aria-describedby", "aria-labelledby", "for"):
            assert set(element.attributes.get(name, "").split()) <= set(ids), element.attributes
        assert not [name for name in element.attributes if name.startswith("on") or name == "style"]
    for clickable in root.every("a", "button", "summary"):
        assert clickable.text, clickable.attributes
    for table in root.every("table"):
        assert table.find("caption").text
    for named in root.every("object", "nav"):
        assert named.attributes["aria-label"]
    assert not root.every("iframe", "style", "img")
    [script] = root.every("script")
    assert script.attributes["src"].startswith("/sandbox/refresh.js?v=")
    assert not script.raw


def check_headers(page: Page) -> None:
    """Assert that other sites cannot frame the page, and that only its own script runs."""
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "script-src 'self';" in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["x-frame-options"] == "DENY"
    assert page.headers["cache-control"] == "no-store"
    assert page.headers["referrer-policy"] == "same-origin"
