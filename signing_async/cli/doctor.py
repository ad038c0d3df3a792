"""`doctor`: check a tenant without changing anything, and write down how it responds."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import ssl
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
import click

from .._connections import connection_error, describe_failure
from .._files import unusable
from ..assumptions import Assumptions
from ..client import SigningClient
from ..errors import APIError, DecodeError, InvalidRequest, SigningError
from ..transport.decode import look_up, record
from ..transport.response import Response
from ..transport.retry import RetryPolicy
from .command_base import State, command, replace_file
from .exits import FAILED, UNAUTHORIZED
from .output import on_one_line

_CERTIFICATE_WARNING_DAYS = 21
_MAX_CLOCK_SKEW = 10.0
_MAX_RECIPIENT_LISTS = 5
_REJECTIONS = (400, 401, 403)  # statuses of `GET /me` that reject a token
_LIMITS = ("limit", "per_page", "page_size", "perPage", "pageSize", "size", "count", "take", "page[size]")
_CURSORS = (
    *("cursor", "after", "starting_after", "page_token", "pageToken", "next_cursor", "nextCursor", "next"),
    *("page[after]", "page[cursor]", "continuation_token", "start", "offset", "page"),
)
_NAME = re.compile(r"[A-Za-z0-9_\[\]$:-]{1,60}")
_NEXT = re.compile(r"^(?!.*(prev|before|first|last|self|current)[^.]*$).*(next|cursor|after|continu)", re.IGNORECASE)
_DONE = re.compile(r"[^.]*(?i:complet|sign|done|finish|approv)[^.]*(_at|_on|At|On|date|time|timestamp)$")
_REQUEST_ID = re.compile(r"request.?id|correlation|trace.?id", re.IGNORECASE)
_MARKS = {"ok": "ok", "warning": "WARNING", "failed": "FAILED", "unknown": "unknown"}


@command()
@click.option("-o", "--output", default="assumptions.toml", show_default=True, type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--check-only", is_flag=True, help="Write no file.")
@click.option("--wrong-token", is_flag=True, help="Also send a wrong token. Some services lock a user out after a few.")
async def doctor(state: State, output: Path, force: bool, check_only: bool, wrong_token: bool) -> int:
    """Check a tenant, and write a file of assumptions for the client. Nothing at the service is changed.

    The command checks the certificate, the clock, the token, and what the service's documentation leaves open: the
    parameters of lists, where items and cursors are, errors, request ids. This takes some twenty GET requests, one of
    them for a signing that does not exist.

    The file holds assumptions in TOML, each with its evidence as a comment. SigningClient.from_env and all commands
    use it if the settings name it: assumptions = "assumptions.toml", or SIGNING_ASSUMPTIONS.

    Exit code 0: no check failed. 1: a check failed. 4: the token is not accepted.

    \b
    Example:
      signing-async doctor --output tenant.toml
    """
    if output.is_dir():
        raise InvalidRequest(f"--output: {str(output)!r} is a folder")
    if output.exists() and not force and not check_only:
        raise InvalidRequest(f"--output: {output} exists: use --force to replace it")
    failed = set()
    origin, options = state.settings.origin, state.settings.client_options()
    async with state.client() as client, SigningClient(origin, "not-a-token-of-this-service", **options) as wrong:
        examination = Examination(client)
        async with aclosing(examination.findings(wrong if wrong_token else None)) as findings:
            async for found in findings:
                facts = {"check": found.check, "state": found.state, "message": found.message, **found.facts}
                text = f"{_MARKS[found.state]:<8} {found.check:<12} {on_one_line(found.message)}"
                state.out.result(facts, text, {"failed": "red", "warning": "yellow"}.get(found.state))
                if found.state == "failed":
                    failed.add(found.check)
    if not check_only:
        try:
            replace_file(output, examination.to_toml(origin))
        except OSError as error:
            raise unusable(f"--output: {str(output)!r} cannot be written: {error.strerror}", error) from None
        words = f"Written to {output}. To use it: export SIGNING_ASSUMPTIONS={shlex.quote(str(output.absolute()))}"
        state.out.result({"assumptions": examination.values, "file": str(output)}, words)
    return UNAUTHORIZED if "token" in failed else FAILED if failed else 0


@attrs.frozen
class Finding:
    """The result of one check; ``state`` is ok, warning, failed or unknown."""

    check: str
    state: str
    message: str
    facts: Mapping[str, Any] = attrs.field(factory=dict)


class Examination:
    """The checks of one tenant, and the assumptions learned from them."""

    def __init__(self, client: SigningClient) -> None:
        self._responses: list[Response] = []
        self._client = self._observed(client)
        self.assumptions: Assumptions = client._api.transport.options.assumptions
        """The known assumptions with the learned values."""
        self._evidence: dict[str, str] = {}

    @property
    def values(self) -> dict[str, Any]:
        """The learned values, by the names of `Assumptions`."""
        values = {name: getattr(self.assumptions, name) for name in self._evidence}
        return {name: value if isinstance(value, str) else list(value) for name, value in values.items()}

    def to_toml(self, origin: str) -> str:
        """Return a file of assumptions, with the evidence for each as a comment."""
        text = (
            f"# How {origin} responds, observed by `signing-async doctor` at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.\n"
        )
        text += (
            "# To use it, set SIGNING_ASSUMPTIONS or the setting `assumptions`, or call Assumptions.from_file(...).\n"
        )
        for name, value in self.values.items():
            text += f"\n# {self._evidence[name]}.\n{name} = {json.dumps(value)}\n"
        return text

    async def findings(self, wrong: SigningClient | None = None) -> AsyncGenerator[Finding, None]:
        """Yield the finding of each check; stop if ``GET /me`` fails. ``wrong`` is a client with a wrong token."""
        yield await _certificate(self._client)
        me = await self._get("/me")
        yield _clock(me)
        yield self._token(me)
        if not _ok(me):
            return
        if wrong is not None:
            yield self._wrong_token(await self._get("/me", client=self._observed(wrong)))
        page = await self._get("/signings")
        path, items = self._items(page)
        size: dict[str, str] = {}
        if path is None:
            words = f"no list in the response to GET /signings (HTTP {page.status})"
            yield Finding("list", "failed", words, {"status": page.status})
        else:
            if path:
                self._learn("item_paths", path)
            where = f"in {path}" if path else "which is the list itself"
            yield Finding("list", "ok", f"{len(items)} signings on the first page, {where}", {"items": path or None})
            if len(items) > 1 and (name := await self._size_parameter()):
                size = {name: "1"}
                page = await self._get("/signings", size)
            words = f"the parameter is {name!r}" if size else "no usual parameter limits a page to one signing"
            if len(items) < 2:
                words = "undetermined: there are fewer than two signings"
            yield Finding("page size", "ok" if size else "unknown", words, {"limit_param": next(iter(size), None)})
            yield await self._next_page(page, size)
            if items:
                yield await self._record(items[0])
                yield await self._recipients(items)
        status = (await self._get("/signings/{id}", id="00000000-0000-0000-0000-000000000000")).status
        words = f"HTTP {status} for a signing that does not exist"
        yield Finding("errors", "ok" if 400 <= status < 500 else "warning", words, {"status": status})
        yield self._request_id()
        if path is not None:
            yield await self._read_pages(1 if size else None)

    def _observed(self, client: SigningClient) -> SigningClient:
        retry = RetryPolicy(max_attempts=3, base_delay=0.1)
        return client.with_options(retry=retry, on_response=self._responses.append)

    async def _get(
        self, path: str, params: Mapping[str, str] = {}, client: SigningClient | None = None, **ids: str
    ) -> Response:
        """Return the response, whatever its status."""
        with suppress(APIError):
            await (client or self._client).request("GET", f"/api/1.0{path}", path=ids, params=params)
        return self._responses[-1]

    def _learn(self, name: str, value: Any, evidence: str = "Observed") -> None:
        """Note a value with its evidence; one of several goes in front of the known ones."""
        known = getattr(self.assumptions, name)
        if not isinstance(known, str):
            value, evidence = tuple(dict.fromkeys((value, *known))), f"{evidence}: {value}"
        self.assumptions = attrs.evolve(self.assumptions, **{name: value})
        self._evidence[name] = evidence

    def _members(self, data: object, known: str) -> Iterator[tuple[str, Any]]:
        """Yield the members of a response with their paths; members that an assumption names come first."""
        yield from ((path, look_up(data, path)) for path in getattr(self.assumptions, known))
        yield from _walk(data)

    def _token(self, me: Response) -> Finding:
        if _ok(me):
            user = record(_json(me), self.assumptions)
            named = [str(user[name]) for name in ("name", "email") if isinstance(user, dict) and user.get(name)]
            return Finding("token", "ok", f"works: {', '.join(named) or 'GET /me succeeds'}")
        if me.status in _REJECTIONS:
            self._learn("expired_token_statuses", me.status, "Observed for a token that was not accepted")
        is_failing = me.status >= 500 or me.status == 429
        words = f"{'failing' if is_failing else 'not accepted'}: HTTP {me.status} on GET /me"
        return Finding("service" if is_failing else "token", "failed", words, {"status": me.status})

    def _wrong_token(self, me: Response) -> Finding:
        words, facts = f"HTTP {me.status} with a wrong token", {"status": me.status}
        if me.status not in _REJECTIONS:
            return Finding("wrong token", "warning", f"{words}, which says nothing about expired tokens", facts)
        self._learn("expired_token_statuses", me.status, "Observed for a wrong token")
        return Finding("wrong token", "ok", words, facts)

    def _items(self, page: Response) -> tuple[str | None, list[dict[str, Any]]]:
        """Return the path of a page's list ("" if it is the page itself) and its records; None if there is no list."""
        data = _json(page)
        lists = [one for one in [("", data), *self._members(data, "item_paths")] if isinstance(one[1], list)]
        records = [(path, [item for item in items if isinstance(item, dict)]) for path, items in lists]
        return next((one for one in records if one[1]), records[0] if records else (None, []))

    def _ids(self, page: Response) -> set[str]:
        return {str(item.get("id")) for item in self._items(page)[1]}

    async def _size_parameter(self) -> str | None:
        """Return the name of the parameter that limits a page to one item."""
        for name in dict.fromkeys((self.assumptions.limit_param, *_LIMITS)):
            if len(self._items(await self._get("/signings", {name: "1"}))[1]) == 1:
                self._learn("limit_param", name, "Observed: one item was requested, and one returned")
                return name
        return None

    async def _next_page(self, page: Response, size: dict[str, str]) -> Finding:
        """Determine where a page has its cursor, and which parameter takes it."""
        place, cursor = self._find_cursor(page)
        if place is None:
            return Finding("next page", "unknown", "the first page has no cursor, or holds all signings")
        if cursor.startswith(("http:", "https:", "/")):
            return Finding("next page", "ok", f"its URL is in {place}", {"next": place})
        first = self._ids(page)
        for name in dict.fromkeys((self.assumptions.cursor_param, *_CURSORS)):
            after = self._ids(await self._get("/signings", {**size, name: cursor}))
            # A signing created meanwhile changes the first page too.
            if after and not first & after and not self._ids(await self._get("/signings", size)) & after:
                self._learn("cursor_param", name, "Observed: with it, the service returned other items")
                words = f"the cursor in {place} is sent back as {name!r}"
                return Finding("next page", "ok", words, {"next": place, "cursor_param": name})
        words = f"a page has a cursor in {place}, but no known parameter takes it"
        return Finding("next page", "failed", words, {"next": place})

    def _find_cursor(self, page: Response) -> tuple[str | None, str]:
        """Return the place of a page's cursor, and the cursor; learn the place."""
        data = _json(page)
        for path, found in self._members(data, "next_paths"):
            is_named = path in self.assumptions.next_paths or _NEXT.match(path)
            if is_named and found and isinstance(found, str | int) and not isinstance(found, bool):
                self._learn("next_paths", path)
                return path, str(found)
        if re.search(r';\s*rel="?next\b', page.headers.get("Link", "")):
            return "the Link header", "/"
        for path, found in self._members(data, "has_more_paths"):
            if found is True and (path in self.assumptions.has_more_paths or "more" in path.lower()):
                self._learn("has_more_paths", path)
                ids = [item.get("id") for item in self._items(page)[1]]
                return f"{path} and the last item's id", str(ids[-1] if ids else "")
        return None, ""

    async def _record(self, item: Mapping[str, Any]) -> Finding:
        data = _json(await self._get("/signings/{id}", id=str(item.get("id"))))
        if isinstance(data, dict) and "id" in data:
            return Finding("record", "ok", "the response is the signing itself")
        for path, value in self._members(data, "record_paths"):
            if isinstance(value, dict) and "id" in value:
                self._learn("record_paths", path)
                return Finding("record", "ok", f"a signing is in {path}", {"record": path})
        return Finding("record", "failed", "no id in the response for a signing")

    async def _recipients(self, items: list[dict[str, Any]]) -> Finding:
        """Determine which field shows that a recipient has finished: one with a value, best of a completed signing."""
        empty = ""
        best_first = sorted(items, key=lambda item: (not item.get("is_completed"), bool(item.get("is_draft"))))
        for item in best_first[:_MAX_RECIPIENT_LISTS]:
            path, people = self._items(await self._get("/signings/{id}/recipients", id=str(item.get("id"))))
            if path and people:
                self._learn("item_paths", path)
            for name, value in (member for person in people for member in _walk(person) if _DONE.fullmatch(member[0])):
                if value:
                    self._learn("recipient_done_fields", name, "Observed with a value")
                    return Finding("recipients", "ok", f"a recipient who has finished has a {name!r}", {"field": name})
                empty = empty or name
        if not empty:
            return Finding("recipients", "unknown", "no finished recipient was found")
        state = "ok" if empty in self.assumptions.recipient_done_fields else "warning"
        self._learn("recipient_done_fields", empty, "Observed, but always empty: chosen by its name")
        words = f"a recipient who has finished may have a {empty!r}: it was always empty"
        return Finding("recipients", state, words, {"field": empty})

    def _request_id(self) -> Finding:
        headers = self._responses[0].headers
        for name in (*self.assumptions.request_id_headers, *filter(_REQUEST_ID.search, headers)):
            if headers.get(name) and _NAME.fullmatch(name):
                self._learn("request_id_headers", name)
                return Finding("request id", "ok", f"in the header {name}", {"header": name})
        if any(response.request_id for response in self._responses):
            return Finding("request id", "ok", "in the body")
        return Finding("request id", "unknown", "not found in any response")

    async def _read_pages(self, limit: int | None) -> Finding:
        """Read two pages as the client does, with the learned assumptions."""
        client = self._client.with_options(assumptions=self.assumptions)
        ids: list[set[str]] = []
        try:
            async with aclosing(client.signings.list(limit=limit, prefetch=False).pages()) as pages:
                async for page in pages:
                    ids.append({signing.id for signing in page.items})
                    if len(ids) == 2:
                        break
        except SigningError as error:
            return Finding("client", "failed", f"a list cannot be read: {error}")
        if len(ids) == 2 and ids[0] & ids[1]:
            return Finding("client", "failed", "page 2 of a list repeats earlier signings")
        shown = f"{len(ids)} page{'s' if len(ids) == 2 else ''} with {len(set().union(*ids))} signings"
        return Finding("client", "ok", f"{shown} read with these assumptions", {"pages": len(ids)})


async def _certificate(client: SigningClient) -> Finding:
    parts = urlsplit(client.base_url)
    if parts.scheme == "http":
        return Finding("https", "ok", "plain HTTP, on this machine")
    try:
        async with asyncio.timeout(client._api.transport.options.timeouts.connect):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 443, ssl=True)
    except (OSError, TimeoutError) as error:
        reason = describe_failure(error)
        raise connection_error(f"no secure connection to {client.base_url}: {reason}", error) from None
    expires = ssl.cert_time_to_seconds(writer.get_extra_info("peercert")["notAfter"])
    version = writer.get_extra_info("ssl_object").version()
    writer.transport.abort()
    days = int((expires - time.time()) // 86_400)
    words = f"{version}; the certificate is valid for {days} more days"
    return Finding("https", "warning" if days < _CERTIFICATE_WARNING_DAYS else "ok", words, {"days_left": days})


def _clock(response: Response) -> Finding:
    """Compare this machine's clock with the response's Date header, which has whole seconds."""
    try:
        skew = parsedate_to_datetime(response.headers.get("Date", "")).timestamp() - time.time()
    except ValueError:
        return Finding("clock", "unknown", "no Date header in the response")
    facts = {"skew_seconds": round(skew, 1)}
    if abs(skew) <= _MAX_CLOCK_SKEW:
        return Finding("clock", "ok", "the clocks of this machine and the service agree", facts)
    words = f"this machine's clock is {abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'} the service's"
    return Finding("clock", "failed", f"{words}: tokens and webhooks may seem expired", facts)


def _ok(response: Response) -> bool:
    return 200 <= response.status < 300


def _json(response: Response) -> Any:
    """Return the parsed body; None for an error or if it is not JSON."""
    with suppress(DecodeError):
        return response.json() if _ok(response) else None
    return None


def _walk(data: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the members of nested objects, but not of lists, by dotted paths; outer ones first."""
    if isinstance(data, dict) and depth < 3:
        members = {path + name: value for name, value in data.items() if _NAME.fullmatch(name)}
        yield from members.items()
        for name, value in members.items():
            yield from _walk(value, f"{name}.", depth + 1)
