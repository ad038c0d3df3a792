"""Find out how a tenant answers where the specification says "not shown": by reading only, and by few requests.

Nothing but GET requests is made, one of them for a record that does not exist and one without a token. A wrong token is
sent only where that is asked for: a service may count it as an attempt to break in.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal
from urllib.parse import urlsplit

import attrs

from ..assumptions import Assumptions
from ..client import SigningClient
from ..errors import NotFound, SigningError, TransportError
from ..models import Token
from ..transport import retry, wire
from ..transport.decode import Unreadable, parse, timestamp
from ..transport.error_response import error_from, look_up, one_line, record, request_id

__all__ = ["Finding", "Learned", "Probe"]

LIMITS: tuple[str, ...] = (
    *("limit", "per_page", "page_size", "perPage", "pageSize", "size", "count", "take", "max_results", "maxResults"),
    *("page[size]", "page_limit", "results_per_page", "first", "max"),
)
CURSORS: tuple[str, ...] = (
    *("cursor", "after", "starting_after", "page_token", "pageToken", "next_cursor", "nextCursor", "next"),
    *("page[after]", "page[cursor]", "continuation", "continuation_token", "start", "offset", "page", "from"),
)
NO_SUCH = "00000000-0000-0000-0000-000000000000"
MOST_RECIPIENT_LISTS = 5
SOON_DAYS = 21
SKEW = 10.0

_PREFIX = "/api/1.0"
_NAME = re.compile(r"[A-Za-z0-9_.\[\]$:-]{1,60}")
_ONWARD = re.compile(r"next|cursor|after|continu", re.IGNORECASE)
_BACK = re.compile(r"prev|before|first|last|self|current", re.IGNORECASE)
_MORE = re.compile(r"more", re.IGNORECASE)
_DONE = re.compile(r"complet|sign|done|finish|approv", re.IGNORECASE)
_MOMENT = re.compile(r"(_at|_on|At|On|date|time|timestamp)$")
_IDENTITY = re.compile(r"request.?id|correlation|trace.?id|^x-amzn-trace", re.IGNORECASE)
_RATE = re.compile(r"rate.?limit|quota", re.IGNORECASE)
_ADDRESS = re.compile(r"https?:|/", re.IGNORECASE)
_LINKED = re.compile(r';\s*rel="?next\b')
_WAITS = 3

State = Literal["ok", "warning", "failed", "unknown"]


@attrs.frozen
class Finding:
    """What one check found."""

    check: str
    state: State
    words: str
    facts: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class Learned:
    """A value for one of `Assumptions`; ``sure`` is how it is known. None as a value: the default stays."""

    name: str
    value: Any
    sure: str


@attrs.frozen(slots=False)
class Answer:
    """An answer as it came."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    began: float
    ended: float

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def data(self) -> Any:
        """Its JSON; None where it is none."""
        try:
            return parse(self.body)
        except Unreadable:
            return None


class Probe:
    """One look at a tenant, through a client's settings."""

    def __init__(self, client: SigningClient, *, wrong_token: bool = False) -> None:
        self._client = client
        self._shared = client._shared
        self._options = client._transport.options
        self._assumptions: Assumptions = self._options.assumptions
        self._wrong_token = wrong_token
        self._answers: list[Answer] = []
        self._limited = 0
        self.learned: list[Learned] = []

    async def findings(self) -> AsyncGenerator[Finding, None]:
        """Look, and tell of each thing; where the token is not accepted the rest cannot be looked at."""
        yield await self._certificate()
        me = await self._get("/me")
        yield self._clock(me)
        yield self._token(me)
        if not me.ok:
            return
        yield await self._without_token()
        if self._wrong_token:
            yield await self._with_wrong_token()
        listed = True
        async with aclosing(self._lists()) as findings:
            async for finding in findings:
                listed = listed and (finding.check, finding.state) != ("list", "failed")
                yield finding
        yield await self._unknown_record()
        yield self._request_ids()
        yield self._rate_limits()
        if listed:
            yield await self._try_out()

    @property
    def assumptions(self) -> Assumptions:
        """Those that the client has, with what was learned."""
        return attrs.evolve(self._assumptions, **{one.name: one.value for one in self.learned if one.value is not None})

    # Asking

    async def _get(self, path: str, params: Mapping[str, str] = {}, *, token: Token | str | None = "own") -> Answer:
        """One answer, whatever its status; after a 429 it is asked for again when the service says so."""
        timeouts = self._options.timeouts
        waits, may_renew = _WAITS, token == "own"
        try:
            async with asyncio.timeout(timeouts.call):
                while True:
                    used = await self._shared.auth.token() if isinstance(token, str) else token
                    answer = await self._once(path, params, used)
                    if may_renew and used and answer.status in self._assumptions.expired_token_statuses:
                        may_renew = False
                        if await self._shared.auth.renewed(used):
                            continue
                    if answer.status != 429 or not waits:
                        break
                    waits -= 1
                    self._limited += 1
                    wait = retry.read_retry_after(answer.headers.get("Retry-After"), date=None, now=time.time)
                    await asyncio.sleep(1.0 if wait is None else max(wait, 0.1))
        except TimeoutError:
            raise TransportError(f"GET {path}: no answer came within {timeouts.call:g} s") from None
        self._answers.append(answer)
        return answer

    async def _once(self, path: str, params: Mapping[str, str], token: Token | None) -> Answer:
        request = wire.Request("GET", self._shared.origin, _PREFIX + path, params)
        began = time.time()
        response = await wire.send(self._shared.sessions, request, token, connect=self._options.timeouts.connect)
        if isinstance(response, wire.Failure):
            raise TransportError(f"GET {path}: {response.message}")
        try:
            ended = time.time()
            body = await response.read(self._assumptions.max_answer_bytes)
            return Answer(response.status, response.headers, body, began, ended)
        except wire.BrokenResponse as broken:
            words = broken.failure.message
        finally:
            response.close()
        raise TransportError(f"GET {path}: {words}")

    def _said(self, text: str) -> str:
        """A text of the server's, as it may be shown."""
        return self._client._transport.redacted(text)[:200]

    # The connection and the token

    async def _certificate(self) -> Finding:
        parts = urlsplit(self._shared.origin)
        if parts.scheme == "http":
            return Finding("https", "ok", "plain HTTP, to this machine itself")
        try:
            async with asyncio.timeout(self._options.timeouts.connect):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port or 443, ssl=True)
        except (OSError, TimeoutError) as error:
            said = getattr(error, "verify_message", "") or getattr(error, "strerror", "") or type(error).__name__
            raise TransportError(f"no secure connection to {self._shared.origin}: {said}") from None
        certificate = writer.get_extra_info("peercert")
        version = writer.get_extra_info("ssl_object").version()
        writer.transport.abort()
        days = int((ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()) // 86_400)
        words = f"{version}; the certificate is valid for {days} more days"
        return Finding("https", "warning" if days < SOON_DAYS else "ok", words, {"days_left": days})

    def _clock(self, answer: Answer) -> Finding:
        try:
            date = parsedate_to_datetime(answer.headers.get("Date", ""))
        except ValueError:
            return Finding("clock", "unknown", "the answers carry no date")
        # The header counts whole seconds.
        skew = date.timestamp() + 0.5 - (answer.began + answer.ended) / 2
        uncertain = 0.5 + (answer.ended - answer.began) / 2
        facts = {"skew_seconds": round(skew, 1)}
        if abs(skew) <= SKEW + uncertain:
            return Finding(
                "clock", "ok", f"this machine and the service agree within {abs(skew) + uncertain:.1f} s", facts
            )
        words = f"this machine's clock is {abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'} the service's"
        return Finding("clock", "failed", f"{words}: tokens and signed webhooks may seem expired", facts)

    def _token(self, me: Answer) -> Finding:
        if me.ok:
            user = record(me.data, self._assumptions)
            named = [str(user[name]) for name in ("name", "email") if isinstance(user, dict) and user.get(name)]
            return Finding("token", "ok", f"works: {self._said(', '.join(named)) or 'GET /me is answered'}")
        if 400 <= me.status <= 499 and me.status not in (404, 429):
            self._learn_rejection(me.status, "seen: a token that the service does not accept")
        return Finding("token", "failed", f"is not accepted: HTTP {me.status} on GET /me", {"status": me.status})

    async def _without_token(self) -> Finding:
        answer = await self._get("/me", token=None)
        words = f"HTTP {answer.status} without a token"
        if answer.ok:
            return Finding(
                "no token", "warning", f"{words}: anybody may ask who is logged in", {"status": answer.status}
            )
        if not self._wrong_token and answer.status != 401:
            words += "; an expired one may get the same or another (--wrong-token finds out)"
        return Finding("no token", "ok", words, {"status": answer.status})

    async def _with_wrong_token(self) -> Finding:
        answer = await self._get("/me", token=Token("not-a-token-of-this-service"))
        if not 400 <= answer.status <= 499:
            words = f"HTTP {answer.status} with a wrong token: that says nothing of expired ones"
            return Finding("wrong token", "warning", words, {"status": answer.status})
        self._learn_rejection(answer.status, "seen: a token that is none")
        return Finding("wrong token", "ok", f"HTTP {answer.status} with a wrong token", {"status": answer.status})

    def _learn_rejection(self, status: int, sure: str) -> None:
        statuses = sorted({*self._assumptions.expired_token_statuses, status})
        self.learned.append(Learned("expired_token_statuses", statuses, sure))

    # Lists

    async def _lists(self) -> AsyncGenerator[Finding, None]:
        page = await self._get("/signings")
        items = self._items(page)
        if items is None:
            words = f"GET /signings is answered by HTTP {page.status} without a list"
            yield Finding("list", "failed", words, {"status": page.status})
            return
        path, found = items
        if path:
            self._learn_first("item_paths", path, "seen")
        where = f"in {path}" if path else "the answer itself"
        yield Finding("list", "ok", f"{len(found)} signings on the first page, {where}", {"items": path or None})
        page, params, finding = await self._limited_to_one(page, found)
        yield finding
        yield await self._onward(page, params)
        if found:
            yield await self._record(found[0])
            yield self._timestamps(found)
            yield await self._recipients(found)

    def _items(self, answer: Answer) -> tuple[str, list[dict[str, Any]]] | None:
        """Where the items of a page are, and those that are records."""
        data = answer.data if answer.ok else None
        known = [(path, look_up(data, path)) for path in self._assumptions.item_paths]
        lists = [
            (path, [item for item in value if isinstance(item, dict)])
            for path, value in [("", data), *known, *_walk(data)]
            if isinstance(value, list)
        ]
        return next((one for one in lists if one[1]), next(iter(lists), None))

    async def _limited_to_one(self, page: Answer, found: Sequence[Any]) -> tuple[Answer, Mapping[str, str], Finding]:
        """A page of one item and what it was asked for with; the page that is given where that is not to be had."""
        if len(found) < 2:
            words = "cannot be found out: there are fewer than two signings"
            self.learned.append(Learned("limit_param", None, words))
            return page, {}, Finding("page size", "unknown", words)
        for name in dict.fromkeys((self._assumptions.limit_param, *LIMITS)):
            one = await self._get("/signings", {name: "1"})
            items = self._items(one)
            if items is not None and len(items[1]) == 1:
                self.learned.append(Learned("limit_param", name, "seen: one item was asked for, and one came"))
                return one, {name: "1"}, Finding("page size", "ok", f"is asked for as {name!r}", {"limit_param": name})
        words = f"none of the names that were tried has an effect: {', '.join(LIMITS)}"
        self.learned.append(Learned("limit_param", None, words))
        return page, {}, Finding("page size", "warning", words)

    async def _onward(self, page: Answer, params: Mapping[str, str]) -> Finding:
        """How a list goes on."""
        place, cursor = self._next(page)
        if place is None:
            few = "cannot be found out: there are not enough signings for a second page"
            words = "the first page does not say how to go on" if params else few
            self.learned.append(Learned("cursor_param", None, words))
            return Finding("next page", "unknown", words)
        if _ADDRESS.match(cursor):
            self.learned.append(Learned("cursor_param", None, "not needed: a page gives the address of the next one"))
            return Finding("next page", "ok", f"its address is in {place}", {"next": place})
        name = await self._cursor(page, params, cursor)
        if name is None:
            words = f"a page gives a cursor in {place}, and none of the names that were tried takes it"
            self.learned.append(Learned("cursor_param", None, f"{words}: {', '.join(CURSORS)}"))
            return Finding("next page", "failed", words, {"next": place})
        self.learned.append(Learned("cursor_param", name, "seen: it led to other items"))
        return Finding("next page", "ok", f"{place} is sent back as {name!r}", {"next": place, "cursor_param": name})

    def _next(self, page: Answer) -> tuple[str | None, str]:
        """Where a page says how to go on, and what it says; what is not known yet is learned."""
        data = page.data
        for path in self._assumptions.next_paths:
            if found := _scalar(look_up(data, path)):
                return path, found
        if _LINKED.search(page.headers.get("Link", "")):
            return "the Link header", "/"
        scalars = [(path, _scalar(value)) for path, value in _walk(data)]
        for path, value in scalars:
            last = path.rpartition(".")[2]
            if value and _ONWARD.search(path) and not _BACK.search(last):
                self._learn_first("next_paths", path, "seen")
                return path, value
        items = self._items(page)
        known = [(path, look_up(data, path)) for path in self._assumptions.has_more_paths]
        for path, value in [*known, *_walk(data)]:
            if value is True and (_MORE.search(path) or path in self._assumptions.has_more_paths):
                if path not in self._assumptions.has_more_paths:
                    self._learn_first("has_more_paths", path, "seen")
                return f"{path}, with the last item's id", str(items[1][-1].get("id")) if items and items[1] else ""
        return None, ""

    async def _cursor(self, page: Answer, params: Mapping[str, str], cursor: str) -> str | None:
        """The name of the parameter that takes a cursor: with it other items come than without."""
        for name in dict.fromkeys((self._assumptions.cursor_param, *CURSORS)):
            before = self._ids(page)
            after = self._ids(await self._get("/signings", {**params, name: cursor}))
            if not after or before & after:
                continue
            # A signing that was made meanwhile also changes the first page.
            if self._ids(await self._get("/signings", params)) & after:
                continue
            return name
        return None

    def _ids(self, page: Answer) -> frozenset[str]:
        items = self._items(page)
        return frozenset(str(item["id"]) for item in (items[1] if items else ()) if "id" in item)

    # Records

    async def _record(self, item: Mapping[str, Any]) -> Finding:
        answer = await self._get(f"/signings/{wire.segment('id', str(item.get('id') or NO_SUCH))}")
        data = answer.data
        if not answer.ok or not isinstance(data, dict):
            return Finding(
                "record", "failed", f"a signing cannot be read: HTTP {answer.status}", {"status": answer.status}
            )
        if "id" in data:
            return Finding("record", "ok", "a signing is the answer itself")
        for path, value in [*((path, look_up(data, path)) for path in self._assumptions.record_paths), *_walk(data)]:
            if isinstance(value, dict) and "id" in value:
                self._learn_first("record_paths", path, "seen")
                return Finding("record", "ok", f"a signing is in {path}", {"record": path})
        return Finding("record", "failed", "a signing has no id anywhere")

    def _timestamps(self, items: Sequence[Mapping[str, Any]]) -> Finding:
        for item in items:
            value = item.get("updated_at")
            if value is None:
                continue
            try:
                shown = timestamp(value)
            except Unreadable:
                return Finding("timestamps", "failed", f"cannot be read: {self._said(repr(value))}")
            kind = "numbers since 1970" if not isinstance(value, str) or value.isdecimal() else "ISO 8601"
            words = f"{kind}, such as {self._said(repr(value))}: {'' if shown is None else shown.isoformat()}"
            return Finding("timestamps", "ok", words)
        return Finding("timestamps", "unknown", "no signing says when it was updated")

    async def _recipients(self, items: Sequence[Mapping[str, Any]]) -> Finding:
        """Which of their fields says that they have finished."""
        some = [item for item in items if item.get("id")]
        some.sort(key=lambda item: (not item.get("is_completed"), bool(item.get("is_draft"))))
        empty: dict[str, None] = {}
        for item in some[:MOST_RECIPIENT_LISTS]:
            path, people = self._items(
                await self._get(f"/signings/{wire.segment('id', str(item['id']))}/recipients")
            ) or ("", [])
            if path and path not in self._assumptions.item_paths:
                self._learn_first("item_paths", path, "seen in the list of recipients")
            fields = [(name, value) for person in people for name, value in person.items()]
            candidates = [(name, value) for name, value in fields if _is_done_field(name)]
            filled = next((name for name, value in candidates if value is not None), None)
            if filled is not None:
                return self._finished(filled, "seen filled in", "ok")
            empty.update(dict.fromkeys(name for name, _ in candidates))
        if not empty:
            return Finding("recipients", "unknown", "none of those that were read has a field for having finished")
        return self._finished(next(iter(empty)), "seen, always empty: a guess by its name", "warning")

    def _finished(self, name: str, sure: str, state: State) -> Finding:
        if name in self._assumptions.recipient_done_fields:
            state = "ok"
        self._learn_first("recipient_done_fields", name, sure)
        return Finding("recipients", state, f"who has finished is told by {name!r} ({sure})", {"field": name})

    # Errors and headers

    async def _unknown_record(self) -> Finding:
        answer = await self._get(f"/signings/{NO_SUCH}")
        if answer.ok or answer.status >= 500:
            words = f"HTTP {answer.status} for a signing that does not exist"
            return Finding("errors", "warning", words, {"status": answer.status})
        error = error_from(
            answer.status,
            answer.headers,
            answer.body,
            reason="",
            operation="signings.get",
            not_found=NotFound,
            retry_after=None,
            secrets=self._shared.auth.secrets(),
            assumptions=self._assumptions,
        )
        data = answer.data
        shape = f"an object with {', '.join(sorted(map(str, data)))}" if isinstance(data, dict) else "no object"
        kind = answer.headers.get("Content-Type", "no type").partition(";")[0]
        words = f"HTTP {answer.status}, {self._said(kind)}, {self._said(shape)}; code {error.code or 'not told'}"
        return Finding("errors", "ok", words, {"status": answer.status, "code": error.code})

    def _request_ids(self) -> Finding:
        for answer in self._answers:
            name = next((name for name in self._assumptions.request_id_headers if answer.headers.get(name)), None)
            if name is None:
                name = next((name for name in answer.headers if _IDENTITY.search(name) and _NAME.fullmatch(name)), None)
            if name is not None:
                self._learn_first("request_id_headers", name, "seen")
                return Finding("request id", "ok", f"in the header {name}", {"header": name})
        if any(request_id({}, answer.data, self._assumptions) for answer in self._answers):
            return Finding("request id", "ok", "in the body")
        return Finding("request id", "unknown", "no answer carries one that is known")

    def _rate_limits(self) -> Finding:
        names = sorted({name for answer in self._answers for name in answer.headers if _RATE.search(name)})
        if names:
            return Finding("rate limit", "ok", f"told in {self._said(', '.join(names))}", {"headers": names})
        if self._limited:
            return Finding(
                "rate limit", "warning", f"{self._limited} requests were too many; no header tells how many may be"
            )
        return Finding("rate limit", "unknown", "no header tells of one")

    async def _try_out(self) -> Finding:
        """Read two pages as the client does, by what was learned."""
        client = self._client.with_options(assumptions=self.assumptions)
        seen: set[str] = set()
        pages = 0
        sized = any(one.name == "limit_param" and one.value for one in self.learned)
        try:
            async with aclosing(client.signings.list(limit=1 if sized else None, read_ahead=False).pages()) as listed:
                async for page in listed:
                    pages += 1
                    if seen & {signing.id for signing in page.items}:
                        return Finding("client", "failed", f"page {pages} of a list repeats an earlier one")
                    seen |= {signing.id for signing in page.items}
                    if pages == 2:
                        break
        except SigningError as error:
            return Finding("client", "failed", f"a list cannot be read: {error}")
        words = f"{'2 pages' if pages == 2 else '1 page'} with {len(seen)} signings were read with these assumptions"
        return Finding("client", "ok", words, {"pages": pages})

    def _learn_first(self, name: str, value: str, sure: str) -> None:
        """Put a name before those that are looked for already; one that is there needs nothing."""
        known: tuple[str, ...] = getattr(self.assumptions, name)
        if value not in known and all(_NAME.fullmatch(part) for part in value.split(".")):
            self.learned = [one for one in self.learned if one.name != name]
            self.learned.append(Learned(name, [value, *known], sure))
        elif value in known and not any(one.name == name for one in self.learned):
            self.learned.append(Learned(name, list(known), f"{sure}: {value}"))


def _scalar(value: object) -> str:
    """A text or a number that leads somewhere; empty for what does not."""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) and value else ""


def _walk(data: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """What stands in the objects of an answer, not in its lists, by dotted paths; what is near comes first."""
    if not isinstance(data, dict) or depth > 2:
        return
    names = [name for name in data if isinstance(name, str) and "." not in name]
    for name in names:
        yield path + name, data[name]
    for name in names:
        yield from _walk(data[name], f"{path}{name}.", depth + 1)


def _is_done_field(name: object) -> bool:
    return isinstance(name, str) and _DONE.search(name) is not None and _MOMENT.search(name) is not None


def described(probe_of: str, learned: Iterable[Learned], defaults: Assumptions) -> str:
    """The file of assumptions, with a remark on each."""
    import json

    lines = [
        f"# How {probe_of} answers, as `signing-async doctor` saw it at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
        "# Used where the settings name it (assumptions, SIGNING_ASSUMPTIONS), or by Assumptions.from_file(...).",
    ]
    for one in learned:
        value = getattr(defaults, one.name) if one.value is None else one.value
        # Names of the service's may stand in it.
        sure = one_line(one.sure)
        lines += ["", f"# {sure[0].upper()}{sure[1:]}."]
        lines.append(f"{'# ' if one.value is None else ''}{one.name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"
