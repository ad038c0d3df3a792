"""The request log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from ..api import RequestRecord
from .markup import Child, Html, tag
from .site import REQUESTS, Site, card, heading, identifier, table

if TYPE_CHECKING:
    from ..server import Sandbox

MOST = 200


class Requests:
    """The log as a page."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def routes(self) -> list[web.RouteDef]:
        """The one page."""
        return [web.get(REQUESTS, self.log)]

    async def log(self, request: web.Request) -> web.Response:
        """The newest requests to the API, or all with those of these pages."""
        everything = request.query.get("show") == "all"
        links = (
            (REQUESTS, "To the API", not everything),
            (f"{REQUESTS}?show=all", "All, these pages included", everything),
        )
        choice = [
            tag("li", tag("a", text, href=path, aria_current="true" if current else None))
            for path, text, current in links
        ]
        return self._site.page(
            request,
            "Requests",
            heading("Requests", tag("a", "Refresh", href=request.path_qs, class_="button plain")),
            tag("nav", tag("ul", choice), class_="tabs", aria_label="Which requests"),
            card(f"The newest {MOST}", shown(self._site.sandbox, MOST, everything=everything), anchor="log"),
            section=REQUESTS,
        )


def shown(sandbox: Sandbox, most: int, *, everything: bool = False) -> Html:
    """The newest requests as a table; those to the API, or all."""
    wanted = [record for record in reversed(sandbox.requests) if everything or _is_for_api(record)]
    empty = [tag("p", tag("strong", "No request yet.")), tag("p", "Whatever calls the API appears here.")]
    return table("Requests, newest first", _HEADERS, map(_row, wanted[:most]), empty)


_HEADERS = ("Request", "Operation", "Answer", "When", "Request id")


def _is_for_api(record: RequestRecord) -> bool:
    return record.operation is not None or record.path.startswith("/api/")


def _row(record: RequestRecord) -> list[Child]:
    return [
        tag("code", f"{record.method} {record.path}", class_="break"),
        record.operation or tag("span", "–", class_="quiet"),
        [_status(record), tag("p", "fault: ", tag("strong", record.fault)) if record.fault else None],
        [
            tag("time", f"{record.received_at:%Y-%m-%d %H:%M:%S}", datetime=record.received_at.isoformat()),
            tag("p", f"{record.seconds * 1000:.0f} ms", class_="quiet") if record.seconds is not None else None,
        ],
        identifier(record.id),
    ]


def _status(record: RequestRecord) -> Html:
    if record.status is None:
        return tag("span", "no answer" if record.seconds is not None else "in progress", class_="badge warn")
    tone = "good" if record.status < 400 else "warn" if record.status < 500 else "bad"
    return tag("span", record.status, class_=f"badge {tone}")
