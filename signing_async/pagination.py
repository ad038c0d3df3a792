"""Lists, page by page: await one page, or iterate over everything while the next page is on its way."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing
from typing import Any, Generic, TypeVar, cast

import attrs
from multidict import MultiMapping

from .assumptions import Assumptions
from .errors import DecodeError, InvalidRequest
from .reconcile import Read
from .transport import wire
from .transport.call import Operation, Transport
from .transport.decode import Unreadable, decode_records
from .transport.error_response import look_up, request_id
from .transport.retry import Repeat

__all__ = ["Page", "Pager"]

T = TypeVar("T")
_LONGEST_CURSOR = 16 * 1024  # of what could be sent in a request's first line
_LINK = re.compile(r"<([^<>]*)>([^<]*)")
# An opaque cursor may begin with a slash, as Base64 does; but it holds no question mark, and names no host.
_ADDRESS = re.compile(r"https?:|//[^/?#]*[.:@\[]|\?|/[^?]*\?", re.IGNORECASE)


@attrs.frozen(slots=False)
class Page(Generic[T]):
    """Some items of a list, and where the next ones are: ``list(cursor=page.next_cursor)`` goes on from there."""

    items: tuple[T, ...]
    next_cursor: str | None


@attrs.frozen(slots=False)
class _Parsed:
    """A page whose items are still as they were parsed, and what an error about them has to tell."""

    items: list[Any] = attrs.field(repr=False)
    found: str
    next_cursor: str | None
    status: int
    request_id: str | None = attrs.field(repr=False)


class Pager(Generic[T]):
    """A list that is fetched as it is used.

    ::

        page = await client.signings.list(limit=50)             # one page
        async for signing in client.signings.list():            # everything
            ...
        async for page in client.signings.list().pages():       # page by page; page.next_cursor can be kept
            ...

    While one page is worked on the next is fetched, at most one; ``read_ahead=False`` leaves that off.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        path: str,
        model: type[T],
        *,
        cursor: str | None = None,
        limit: int | None = None,
        read_ahead: bool = True,
    ) -> None:
        if cursor is not None and (not isinstance(cursor, str) or not cursor or not _can_be_sent(cursor)):
            raise InvalidRequest(f"cursor: must be a page's next_cursor, not {cursor!r}")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise InvalidRequest(f"limit: must be a whole number from 1, not {limit!r}")
        self._transport = transport
        self._name = name
        self._path = path
        self._model = model
        self._cursor = cursor
        self._limit = limit
        self._read_ahead = read_ahead
        self._call: Read = transport.call

    def through(self, read: Read) -> Pager[T]:
        """The same list, read as a part of another call."""
        pager = Pager(self._transport, self._name, self._path, self._model, read_ahead=False)
        pager._call = read
        return pager

    def __await__(self) -> Generator[Any, None, Page[T]]:
        return self._first().__await__()

    async def _first(self) -> Page[T]:
        return self._page(await self._fetch(self._cursor))

    async def __aiter__(self) -> AsyncGenerator[T, None]:
        async with aclosing(self.pages()) as pages:
            async for page in pages:
                for item in page.items:
                    yield item

    async def pages(self) -> AsyncGenerator[Page[T], None]:
        """All pages from here on."""
        # Hashes, since a list may have many pages and their cursors be long.
        seen = {hash(self._cursor)}
        parsed = await self._fetch(self._cursor)
        while parsed.next_cursor is not None:
            if hash(parsed.next_cursor) in seen:
                raise self._repeated(parsed.next_cursor)
            seen.add(hash(parsed.next_cursor))
            if not self._read_ahead:
                yield self._page(parsed)
                parsed = await self._fetch(parsed.next_cursor)
                continue
            ahead = asyncio.create_task(self._fetch(parsed.next_cursor), name=f"signing_async {self._name} read-ahead")
            try:
                # The next request goes out before the records of this page are made.
                await asyncio.sleep(0)
                yield self._page(parsed)
                parsed = await ahead
            finally:
                await _stop(ahead)
        yield self._page(parsed)

    def _repeated(self, cursor: str) -> DecodeError:
        shown = self._transport.redacted(cursor)[:80]
        text = (
            f"{self._name}: the service gave the cursor {shown!r} a second time; does it take it as"
            f" {self._transport.options.assumptions.cursor_param!r}? See Assumptions.cursor_param"
        )
        return DecodeError(text, operation=self._name)

    async def _fetch(self, cursor: str | None) -> _Parsed:
        assumptions = self._transport.options.assumptions
        params: dict[str, str] = {}
        path = self._path
        if self._limit is not None:
            params[assumptions.limit_param] = str(self._limit)
        if cursor is not None and self._is_address(cursor):
            address = self._address(cursor)
            if address is None:
                raise InvalidRequest(f"cursor: an address that is not on the tenant's origin: {cursor[:80]!r}")
            path, params = address, {}
        elif cursor is not None:
            params[assumptions.cursor_param] = cursor
        parsed: _Parsed = await self._call(
            Operation(self._name, "GET", path, Repeat.READ, decode=self._scan, params=params)
        )
        return parsed

    def _scan(self, data: Any, response: wire.Response) -> _Parsed:
        """Find a page's items and its next cursor; the records are made later, while the next page is on its way."""
        assumptions = self._transport.options.assumptions
        items, found = _items(data, assumptions)
        last_id = items[-1].get("id") if items and isinstance(items[-1], dict) else None
        cursor = _next_cursor(data, response.headers, last_id, assumptions)
        if cursor is not None and not _can_be_sent(cursor):
            raise Unreadable("the next cursor is no text that can be sent")
        if cursor is not None and len(cursor) > _LONGEST_CURSOR:
            raise Unreadable(f"the next cursor has {len(cursor)} characters: no request can carry it")
        if cursor is not None and self._is_address(cursor) and self._address(cursor) is None:
            raise Unreadable("the address of the next page is not on the tenant's origin, and is not followed")
        return _Parsed(items, found, cursor, response.status, request_id(response.headers, data, assumptions))

    def _page(self, parsed: _Parsed) -> Page[T]:
        try:
            return Page(decode_records(parsed.items, self._model), parsed.next_cursor)
        except Unreadable as error:
            problem = str(error.under(parsed.found))
        identity = None if parsed.request_id is None else self._transport.redacted(parsed.request_id)
        raise self._transport.unreadable(self._name, problem, parsed.status, identity)

    def _is_address(self, cursor: str) -> bool:
        return _ADDRESS.match(cursor) is not None or cursor.startswith(self._path)

    def _address(self, cursor: str) -> str | None:
        """The path and query of a next page's address, if that is on the same origin."""
        return wire.resolve(wire.Request("GET", self._transport.shared.origin, self._path), cursor)


def _can_be_sent(cursor: str) -> bool:
    """Whether it is UTF-8: a lone surrogate, from JSON or from the bytes of a header, is none."""
    return cursor.encode("utf-8", "ignore").decode() == cursor


def _items(data: Any, assumptions: Assumptions) -> tuple[list[Any], str]:
    """The items of a page, and where they stood."""
    if isinstance(data, list):
        return data, ""
    for path in assumptions.item_paths:
        found = look_up(data, path)
        if isinstance(found, list):
            return found, path
    tried = ", ".join(assumptions.item_paths)
    raise Unreadable(f"no list of items: neither the answer itself nor any of {tried}")


def _next_cursor(data: Any, headers: Mapping[str, str], last_id: Any, assumptions: Assumptions) -> str | None:
    flags = [look_up(data, path) for path in assumptions.has_more_paths]
    more = next((bool(flag) for flag in flags if isinstance(flag, int) and flag in (0, 1)), None)
    if more is False:
        return None
    for path in assumptions.next_paths:
        found = look_up(data, path)
        # Some services say with a zero that there is no more; it never leads on.
        if isinstance(found, str | int) and not isinstance(found, bool) and found:
            return str(found)
    linked = _linked(headers)
    if linked is not None or not more:
        return linked
    if not isinstance(last_id, str | int) or last_id == "":
        raise Unreadable("there is more, but neither a next cursor nor a last item with an id")
    return str(last_id)


def _linked(headers: Mapping[str, str]) -> str | None:
    """The address in a Link header whose relation is ``next``."""
    lines = cast("MultiMapping[str]", headers).getall("Link", [])  # aiohttp's headers: there may be several of a name
    for match in _LINK.finditer(", ".join(lines)):
        for parameter in match[2].split(";"):
            name, _, value = parameter.partition("=")
            if name.strip().lower() == "rel" and "next" in value.strip(' \t",').lower().split():
                return match[1]
    return None


async def _stop(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it is gone; what came of it does not matter any more."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
