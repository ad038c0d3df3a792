"""Paginated lists: await one page, or iterate over all items while the next page is prefetched."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import aclosing
from typing import Any, Generic, TypeVar, cast

import attrs
from multidict import MultiMapping

from . import _checks
from .assumptions import Assumptions
from .errors import DecodeError, InvalidRequest
from .reconcile import Read
from .transport import urls
from .transport.call import Transport
from .transport.decode import Unreadable, decode_each, look_up, parse
from .transport.operation import Operation
from .transport.response import Response
from .transport.retry import Safety

__all__ = ["Page", "Pager"]

T = TypeVar("T")
_MAX_CURSOR = 16 * 1024  # characters; a longer one does not fit into a request line
_LINK = re.compile(r"<([^<>]*)>([^<]*)")
# An opaque cursor may begin with a slash, as in Base64, but it has no question mark and names no host.
_URL = re.compile(r"https?:|//[^/?#]*[.:@\[]|\?|/[^?]*\?", re.IGNORECASE)


@attrs.frozen(slots=False)
class Page(Generic[T]):
    """One page of a list. ``list(cursor=page.next_cursor)`` continues after it."""

    items: tuple[T, ...]
    next_cursor: str | None


@attrs.define(eq=False, repr=False, slots=False)
class Pager(Generic[T]):
    """A list that is fetched page by page, as it is used.

    ::

        page = await client.signings.list(limit=50)             # one page
        async for signing in client.signings.list():            # everything
            ...
        async for page in client.signings.list().pages():       # page by page
            ...

    Iteration prefetches one page while the caller works on the page before it, unless ``prefetch=False``.
    """

    _transport: Transport
    _name: str
    _path: str
    _model: type[T]
    _cursor: str | None = attrs.field(default=None, kw_only=True)
    _limit: int | None = attrs.field(default=None, kw_only=True)
    _prefetch: bool = attrs.field(default=True, kw_only=True)
    _finish: Callable[[T], T] | None = attrs.field(default=None, kw_only=True)
    """Completes each decoded item."""
    _call: Read = attrs.field(default=attrs.Factory(lambda self: self._transport.call, takes_self=True), kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self._cursor is not None and not _checks.is_text(self._cursor):
            raise InvalidRequest(f"cursor: invalid cursor {self._cursor!r}; pass the next_cursor of a page")
        if self._limit is not None:
            _checks.integer("limit", self._limit, error=InvalidRequest)

    def through(self, read: Read) -> Pager[T]:
        """Return the whole list, read as part of another call."""
        return attrs.evolve(self, cursor=None, limit=None, prefetch=False, call=read)

    def __await__(self) -> Generator[Any, None, Page[T]]:
        return self._fetch(self._cursor).__await__()

    async def __aiter__(self) -> AsyncGenerator[T, None]:
        async with aclosing(self.pages()) as pages:
            async for page in pages:
                for item in page.items:
                    yield item

    async def pages(self) -> AsyncGenerator[Page[T], None]:
        """Iterate over the pages, from the cursor on."""
        # Hashes: a list may have many pages with long cursors.
        seen = {hash(self._cursor)}
        page = await self._fetch(self._cursor)
        while page.next_cursor is not None:
            if hash(page.next_cursor) in seen:
                text = (
                    f"{self._name}: the service returned the cursor"
                    f" {self._transport.redacted(page.next_cursor)[:80]!r} a second time;"
                    f" check Assumptions.cursor_param, now {self._transport.options.assumptions.cursor_param!r}"
                )
                raise DecodeError(text, operation=self._name)
            seen.add(hash(page.next_cursor))
            if not self._prefetch:
                yield page
                page = await self._fetch(page.next_cursor)
                continue
            following = asyncio.create_task(self._fetch(page.next_cursor), name=f"signing_async {self._name} prefetch")
            try:
                await asyncio.sleep(0)  # send the next request before the caller works on this page
                yield page
                page = await following
            finally:
                await _cancel(following)
        yield page

    async def _fetch(self, cursor: str | None) -> Page[T]:
        assumptions, path = self._transport.options.assumptions, self._path
        params = {} if self._limit is None else {assumptions.limit_param: str(self._limit)}
        if cursor is not None and self._is_url(cursor):
            url = self._resolve(cursor)
            if url is None:
                raise InvalidRequest(f"cursor: the URL is not on the tenant's origin: {cursor[:80]!r}")
            path, params = url, {}
        elif cursor is not None:
            params[assumptions.cursor_param] = cursor
        page: Page[T] = await self._call(
            Operation(self._name, "GET", path, Safety.READ, decode=self._decode, params=params)
        )
        return page

    def _decode(self, response: Response) -> Page[T]:
        assumptions = self._transport.options.assumptions
        data = parse(response.bytes)
        items, path = _items(data, assumptions)
        last_id = items[-1].get("id") if items and isinstance(items[-1], dict) else None
        cursor = _next_cursor(data, response.headers, last_id, assumptions)
        if cursor is not None:
            self._check_cursor(cursor)
        try:
            decoded = decode_each(items, self._model)
        except Unreadable as error:
            raise error.under(path) from None
        return Page(decoded if self._finish is None else tuple(map(self._finish, decoded)), cursor)

    def _check_cursor(self, cursor: str) -> None:
        if not _checks.is_text(cursor) or len(cursor) > _MAX_CURSOR:
            raise Unreadable(f"the next cursor has {len(cursor)} characters: no request can carry it")
        if self._is_url(cursor) and self._resolve(cursor) is None:
            raise Unreadable("the URL of the next page is not on the tenant's origin, and is not followed")

    def _is_url(self, cursor: str) -> bool:
        return _URL.match(cursor) is not None or cursor.startswith(self._path.partition("?")[0])

    def _resolve(self, cursor: str) -> str | None:
        """Return the path and query of a next page's URL, or None if it is on another origin."""
        return urls.resolve(self._transport.shared.origin, self._path, cursor)


def _items(data: Any, assumptions: Assumptions) -> tuple[list[Any], str]:
    """Return the items of a page, and their path in the response."""
    if isinstance(data, list):
        return data, ""
    for path in assumptions.item_paths:
        found = look_up(data, path)
        if isinstance(found, list):
            return found, path
    tried = ", ".join(assumptions.item_paths)
    raise Unreadable(f"no list of items: neither the response itself nor any of {tried}")


def _next_cursor(data: Any, headers: Mapping[str, str], last_id: Any, assumptions: Assumptions) -> str | None:
    flags = [look_up(data, path) for path in assumptions.has_more_paths]
    more = next((bool(flag) for flag in flags if isinstance(flag, int) and flag in (0, 1)), None)
    if more is False:
        return None
    for path in assumptions.next_paths:
        found = look_up(data, path)
        # Some services end a list with a zero.
        if isinstance(found, str | int) and not isinstance(found, bool) and found:
            return str(found)
    linked = _linked(headers)
    if linked is not None or not more:
        return linked
    if not isinstance(last_id, str | int) or last_id == "":
        raise Unreadable("the response announces more items, but has neither a next cursor nor a last item with an id")
    return str(last_id)


def _linked(headers: Mapping[str, str]) -> str | None:
    """Return the URL with the relation ``next`` in the Link headers."""
    lines = cast("MultiMapping[str]", headers).getall("Link", [])  # aiohttp's headers may repeat a name
    for match in _LINK.finditer(", ".join(lines)):
        for parameter in match[2].split(";"):
            name, _, value = parameter.partition("=")
            if name.strip().lower() == "rel" and "next" in value.strip(' \t",').lower().split():
                return match[1]
    return None


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end, whatever its result."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
