"""The request log, and one request with its headers and bodies."""

from __future__ import annotations

import contextlib
import json

from aiohttp import web

from ..refused import not_found
from ..request_log import BODIES, RequestRecord
from ..state import State
from .components import card, facts, heading, identifier, live, page_number, pager, table
from .markup import Child, Html, tag
from .site import REQUESTS, Site

PAGE = 25
_HEADERS = ("Request", "Operation", "Response", "Time", "Request id")
_NO_REQUESTS = [tag("p", tag("strong", "No requests yet.")), tag("p", "Requests to the API appear here.")]


class Requests:
    """The request log."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.get(REQUESTS, self.log), web.get(f"{REQUESTS}/{{request_id}}", self.details)]

    async def log(self, request: web.Request) -> web.Response:
        """Show the newest requests to the API; with `?show=all`, also those for pages."""
        everything = request.query.get("show") == "all"
        links = (
            (REQUESTS, "To the API", not everything),
            (f"{REQUESTS}?show=all", "All, including pages", everything),
        )
        choice = [
            tag("li", tag("a", text, href=path, aria_current="true" if current else None))
            for path, text, current in links
        ]
        page, wanted = page_number(request), _newest(self._site.state, everything=everything)
        shown = wanted[(page - 1) * PAGE : page * PAGE]
        return self._site.page(
            request,
            "Requests",
            heading("Requests"),
            tag("nav", tag("ul", choice), class_="tabs", aria_label="Which requests"),
            card(
                "Newest first",
                live(
                    "request-list",
                    _table(shown),
                    pager(page, len(wanted), PAGE, "request", REQUESTS, {"show": "all" if everything else ""}),
                ),
                anchor="log",
            ),
            section=REQUESTS,
        )

    async def details(self, request: web.Request) -> web.Response:
        """Show one request and its response."""
        record = self._site.state.requests.find(request.match_info["request_id"])
        if record is None:
            raise not_found("request: only the newest are kept")
        response: Child = tag("p", "The sandbox closed the connection without a response.")
        if record.status is not None:
            response = [_headers("Response", record.response_headers), _body("Response", record.response_body, record)]
        about = facts(
            ("Request id", identifier(record.id)),
            ("Operation", record.operation),
            ("Time", _time(record)),
            ("Duration", _milliseconds(record)),
            ("Fault", record.fault),
        )
        main = [
            card(
                "Request",
                tag("p", tag("code", f"{record.method} {_url(record)}", class_="break")),
                _headers("Request", record.headers),
                _body("Request", record.request_body, record),
            ),
            card("Response", tag("p", _status(record)), response),
        ]
        return self._site.page(
            request,
            f"{record.method} {record.path}",
            tag("p", tag("a", "Requests", href=REQUESTS), class_="crumb"),
            heading(tag("span", f"{record.method} {record.path}", class_="break"), kind=_status(record)),
            tag("div", tag("div", main), tag("div", card("About", about), class_="side"), class_="columns"),
            section=REQUESTS,
        )


def table_of_requests(state: State, most: int, *, about: str = "") -> Html:
    """Return a table of the newest requests to the API whose path contains `about`."""
    return _table(_newest(state, about=about)[:most])


def _newest(state: State, *, everything: bool = False, about: str = "") -> list[RequestRecord]:
    return [
        record
        for record in reversed(state.requests.records)
        if (everything or record.operation is not None or record.path.startswith("/api/")) and about in record.path
    ]


def _table(records: list[RequestRecord]) -> Html:
    return table("Requests, newest first", _HEADERS, map(_row, records), _NO_REQUESTS)


def code_block(label: str, text: str) -> Html:
    """Return text in a labelled box that scrolls; JSON is indented."""
    with contextlib.suppress(ValueError):
        text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    box = tag("pre", tag("code", text), tabindex=0, role="region", aria_label=label)
    return tag("div", tag("p", label, class_="label", aria_hidden="true"), box)


def _row(record: RequestRecord) -> list[Child]:
    return [
        tag("a", tag("code", f"{record.method} {record.path}", class_="break"), href=f"{REQUESTS}/{record.id}"),
        record.operation or tag("span", "–", class_="quiet"),
        [_status(record), tag("p", "fault: ", tag("strong", record.fault)) if record.fault else None],
        [_time(record), tag("p", _milliseconds(record), class_="quiet") if record.seconds is not None else None],
        identifier(record.id),
    ]


def _status(record: RequestRecord) -> Html:
    if record.status is None:
        return tag("span", "no response" if record.seconds is not None else "in progress", class_="badge warn")
    tone = "good" if record.status < 400 else "warn" if record.status < 500 else "bad"
    return tag("span", record.status, class_=f"badge {tone}")


def _time(record: RequestRecord) -> Html:
    return tag("time", f"{record.received_at:%Y-%m-%d %H:%M:%S}", datetime=record.received_at.isoformat())


def _milliseconds(record: RequestRecord) -> str | None:
    return None if record.seconds is None else f"{record.seconds * 1000:.0f} ms"


def _url(record: RequestRecord) -> str:
    return f"{record.path}?{record.query}" if record.query else record.path


def _headers(label: str, headers: dict[str, str]) -> Html:
    lines = "\n".join(f"{name}: {value}" for name, value in headers.items())
    return code_block(f"{label} headers", lines)


def _body(label: str, body: str | None, record: RequestRecord) -> Html:
    if body:
        return code_block(f"{label} body", body)
    missing = "No body."
    if body is None and record.operation is not None:
        missing = f"The body was not read, or is no longer kept: only the newest {BODIES} requests keep their bodies."
    return tag("p", missing, class_="quiet")
