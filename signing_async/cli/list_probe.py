"""The doctor's checks of lists: page size, cursors, and records."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from ..transport import urls
from ..transport.decode import Unreadable, timestamp
from ..transport.lookup import look_up
from .findings import Finding, Learned, State
from .probe_requests import ProbeRequests, ProbeResponse, walk

__all__ = ["NO_SUCH", "ListProbe"]

LIMITS: tuple[str, ...] = (
    *("limit", "per_page", "page_size", "perPage", "pageSize", "size", "count", "take", "max_results", "maxResults"),
    *("page[size]", "page_limit", "results_per_page", "first", "max"),
)
CURSORS: tuple[str, ...] = (
    *("cursor", "after", "starting_after", "page_token", "pageToken", "next_cursor", "nextCursor", "next"),
    *("page[after]", "page[cursor]", "continuation", "continuation_token", "start", "offset", "page", "from"),
)
NO_SUCH = "00000000-0000-0000-0000-000000000000"
MAX_RECIPIENT_LISTS = 5

_NEXT = re.compile(r"next|cursor|after|continu", re.IGNORECASE)
_BACK = re.compile(r"prev|before|first|last|self|current", re.IGNORECASE)
_MORE = re.compile(r"more", re.IGNORECASE)
_DONE = re.compile(r"complet|sign|done|finish|approv", re.IGNORECASE)
_TIME = re.compile(r"(_at|_on|At|On|date|time|timestamp)$")
_URL = re.compile(r"https?:|/", re.IGNORECASE)
_LINK_TO_NEXT = re.compile(r';\s*rel="?next\b')


class ListProbe:
    """Determines how lists are paginated, and the shape of their records."""

    def __init__(self, requests: ProbeRequests, learned: Learned) -> None:
        self._requests = requests
        self._get = requests.get
        self._learned = learned
        self._known = learned.known

    async def findings(self) -> AsyncGenerator[Finding, None]:
        page = await self._get("/signings")
        items = page.items(self._known)
        if items is None:
            words = f"no list in the response to GET /signings (HTTP {page.status})"
            yield Finding("list", "failed", words, {"status": page.status})
            return
        path, found = items
        if path:
            self._learned.add_first("item_paths", path, "observed")
        where = f"in {path}" if path else "which is the list itself"
        yield Finding("list", "ok", f"{len(found)} signings on the first page, {where}", {"items": path or None})
        page, params, finding = await self._page_size(page, found)
        yield finding
        yield await self._next_page(page, params)
        if found:
            yield await self._record(found[0])
            yield self._timestamps(found)
            yield await self._recipients(found)

    # Pages

    async def _page_size(
        self, page: ProbeResponse, found: Sequence[Any]
    ) -> tuple[ProbeResponse, Mapping[str, str], Finding]:
        """Return a page of one item, its parameters and the finding; the given page if the size cannot be limited."""
        if len(found) < 2:
            words = "undetermined: there are fewer than two signings"
            self._learned.add("limit_param", None, words)
            return page, {}, Finding("page size", "unknown", words)
        for name in dict.fromkeys((self._known.limit_param, *LIMITS)):
            one = await self._get("/signings", {name: "1"})
            items = one.items(self._known)
            if items is not None and len(items[1]) == 1:
                self._learned.add("limit_param", name, "observed: one item was requested, and one returned")
                return one, {name: "1"}, Finding("page size", "ok", f"the parameter is {name!r}", {"limit_param": name})
        words = f"none of these parameters has an effect: {', '.join(LIMITS)}"
        self._learned.add("limit_param", None, words)
        return page, {}, Finding("page size", "warning", words)

    async def _next_page(self, page: ProbeResponse, params: Mapping[str, str]) -> Finding:
        """Determine where a page has its cursor, and which parameter takes it."""
        place, cursor = self._find_cursor(page)
        if place is None:
            few = "undetermined: there are not enough signings for a second page"
            words = "the first page has no cursor" if params else few
            self._learned.add("cursor_param", None, words)
            return Finding("next page", "unknown", words)
        if _URL.match(cursor):
            self._learned.add("cursor_param", None, "not needed: a page holds the URL of the next one")
            return Finding("next page", "ok", f"its URL is in {place}", {"next": place})
        name = await self._find_cursor_param(page, params, cursor)
        if name is None:
            words = f"a page has a cursor in {place}, but no known parameter takes it"
            self._learned.add("cursor_param", None, f"{words}: {', '.join(CURSORS)}")
            return Finding("next page", "failed", words, {"next": place})
        self._learned.add("cursor_param", name, "observed: with it, the service returned other items")
        return Finding(
            "next page", "ok", f"the cursor in {place} is sent back as {name!r}", {"next": place, "cursor_param": name}
        )

    def _find_cursor(self, page: ProbeResponse) -> tuple[str | None, str]:
        """Return the place of a page's cursor, and the cursor; learn the place if it is new."""
        data = page.data
        for path in self._known.next_paths:
            if found := _scalar(look_up(data, path)):
                return path, found
        if _LINK_TO_NEXT.search(page.headers.get("Link", "")):
            return "the Link header", "/"
        members = list(walk(data))
        for path, value in members:
            last = path.rpartition(".")[2]
            if (found := _scalar(value)) and _NEXT.search(path) and not _BACK.search(last):
                self._learned.add_first("next_paths", path, "observed")
                return path, found
        known = [(path, look_up(data, path)) for path in self._known.has_more_paths]
        for path, value in [*known, *members]:
            if value is True and (_MORE.search(path) or path in self._known.has_more_paths):
                if path not in self._known.has_more_paths:
                    self._learned.add_first("has_more_paths", path, "observed")
                items = page.items(self._known)
                return f"{path} and the last item's id", str(items[1][-1].get("id")) if items and items[1] else ""
        return None, ""

    async def _find_cursor_param(self, page: ProbeResponse, params: Mapping[str, str], cursor: str) -> str | None:
        """Return the name of the parameter that takes a cursor: with it, other items are returned."""
        for name in dict.fromkeys((self._known.cursor_param, *CURSORS)):
            before = self._ids(page)
            after = self._ids(await self._get("/signings", {**params, name: cursor}))
            if not after or before & after:
                continue
            # A signing created meanwhile also changes the first page.
            if self._ids(await self._get("/signings", params)) & after:
                continue
            return name
        return None

    def _ids(self, page: ProbeResponse) -> frozenset[str]:
        items = page.items(self._known)
        return frozenset(str(item["id"]) for item in (items[1] if items else ()) if "id" in item)

    # Records

    async def _record(self, item: Mapping[str, Any]) -> Finding:
        response = await self._get(f"/signings/{urls.segment('id', str(item.get('id') or NO_SUCH))}")
        data = response.data
        if not response.ok or not isinstance(data, dict):
            words = f"a signing cannot be read: HTTP {response.status}"
            return Finding("record", "failed", words, {"status": response.status})
        if "id" in data:
            return Finding("record", "ok", "the response is the signing itself")
        for path, value in [*((path, look_up(data, path)) for path in self._known.record_paths), *walk(data)]:
            if isinstance(value, dict) and "id" in value:
                self._learned.add_first("record_paths", path, "observed")
                return Finding("record", "ok", f"a signing is in {path}", {"record": path})
        return Finding("record", "failed", "no id in the response for a signing")

    def _timestamps(self, items: Sequence[Mapping[str, Any]]) -> Finding:
        value = next((value for item in items if (value := item.get("updated_at")) is not None), None)
        if value is None:
            return Finding("timestamps", "unknown", "no signing has updated_at")
        shown = self._requests.redact_and_truncate(repr(value))
        try:
            moment = timestamp(value)
        except Unreadable:
            return Finding("timestamps", "failed", f"cannot be read: {shown}")
        kind = "numbers since 1970" if not isinstance(value, str) or value.isdecimal() else "ISO 8601"
        words = f"{kind}, such as {shown}: {'' if moment is None else moment.isoformat()}"
        return Finding("timestamps", "ok", words)

    async def _recipients(self, items: Sequence[Mapping[str, Any]]) -> Finding:
        """Determine which field shows that a recipient has finished."""
        some = [item for item in items if item.get("id")]
        some.sort(key=lambda item: (not item.get("is_completed"), bool(item.get("is_draft"))))
        empty: dict[str, None] = {}
        for item in some[:MAX_RECIPIENT_LISTS]:
            page = await self._get(f"/signings/{urls.segment('id', str(item['id']))}/recipients")
            path, people = page.items(self._known) or ("", [])
            if path and path not in self._known.item_paths:
                self._learned.add_first("item_paths", path, "observed in the list of recipients")
            fields = [(name, value) for person in people for name, value in person.items()]
            candidates = [(name, value) for name, value in fields if _is_done_field(name)]
            filled = next((name for name, value in candidates if value is not None), None)
            if filled is not None:
                return self._done_field(filled, "observed with a value", "ok")
            empty.update(dict.fromkeys(name for name, _ in candidates))
        if not empty:
            return Finding("recipients", "unknown", "no field shows whether a recipient has finished")
        return self._done_field(next(iter(empty)), "observed, but always empty: chosen by its name", "warning")

    def _done_field(self, name: str, evidence: str, state: State) -> Finding:
        if name in self._known.recipient_done_fields:
            state = "ok"
        self._learned.add_first("recipient_done_fields", name, evidence)
        return Finding(
            "recipients", state, f"recipients who have finished have a {name!r} ({evidence})", {"field": name}
        )


def _scalar(value: object) -> str:
    """Return a non-empty string or number as a string; "" for anything else."""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) and value else ""


def _is_done_field(name: object) -> bool:
    return isinstance(name, str) and _DONE.search(name) is not None and _TIME.search(name) is not None
