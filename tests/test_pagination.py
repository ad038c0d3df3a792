"""Lists: one page, all items, or page by page, in any convention of the service; prefetch."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from signing_async import (
    Assumptions,
    DecodeError,
    InvalidRequest,
    NotFound,
    Page,
    Pager,
    RetryPolicy,
    Signing,
    SigningClient,
)
from tests.servers import serving

TOKEN = "secret-token"
PATH = "/api/1.0/signings"


def _items(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"id": str(number), "name": f"Lease {number}"} for number in range(start, stop)]


Shape = Callable[[list[dict[str, Any]], int | None, web.Request], web.Response]


def _json(data: Any, **headers: str) -> web.Response:
    return web.json_response(data, headers={name.replace("_", "-"): value for name, value in headers.items()})


def _url(request: web.Request, offset: int | None) -> str | None:
    return None if offset is None else f"{request.url.origin()}{PATH}?cursor={offset}"


_SHAPES: dict[str, Shape] = {
    "meta.next_cursor": lambda items, to, _: _json({"data": items, "meta": {"next_cursor": to and str(to)}}),
    "next_cursor": lambda items, to, _: _json({"signings": items, "next_cursor": to and str(to)}),
    "pagination": lambda items, to, _: _json({"results": items, "pagination": {"next_cursor": to and str(to)}}),
    "next_page_url": lambda items, to, request: _json({"data": items, "next_page_url": _url(request, to)}),
    "a number": lambda items, to, _: _json({"items": items, "next_cursor": to or 0}),
    "links.next": lambda items, to, request: _json({"data": items, "links": {"next": _url(request, to)}}),
    "next": lambda items, to, request: _json({"recipients": items, "next": _url(request, to)}),
    "path only": lambda items, to, _: _json({"data": items, "next": to and f"{PATH}?cursor={to}"}),
    "upper case": lambda items, to, request: _json(
        {"data": items, "next": to and str(_url(request, to)).replace("http", "HTTP")}
    ),
    "Base64": lambda items, to, _: _json({"data": items, "next_cursor": to and f"/w+/{to}=="}),
    "Link": lambda items, to, request: _json(
        items,
        Link=f'<{_url(request, 0)}>; rel="first", <{_url(request, to)}>; title="x"; rel="last next"' if to else "",
    ),
    "bare Link": lambda items, to, request: _json(
        items, Link=f"<?cursor={to}>;REL = Next" if to else '<?cursor=0>; rel="prev"'
    ),
    "has_more": lambda items, to, _: _json({"data": items, "has_more": to is not None}),
    "has_more number": lambda items, to, _: _json({"data": items, "meta": {"has_more": int(to is not None)}}),
    "has_more wins": lambda items, to, _: _json(
        {"data": items, "has_more": to is not None, "next_cursor": str(to or 9)}
    ),
    "order": lambda items, to, _: _json(
        {"data": items, "meta": {"next_cursor": to and str(to)}, "next_cursor": None, "next": to and "wrong"}
    ),
}


def _service(shape: Shape, total: int = 7, size: int = 3) -> Callable[[web.Request], Any]:
    """Serve ``total`` signings in pages of ``size``. The cursor is the number of the first, or of the one before it."""
    is_after = shape in (_SHAPES["has_more"], _SHAPES["has_more number"])

    async def handler(request: web.Request) -> web.Response:
        assert request.path == PATH
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        cursor = request.query.get("cursor", "-1" if is_after else "0").removeprefix("/w+/").removesuffix("==")
        start = int(cursor) + is_after
        stop = min(start + size, total)
        return shape(_items(start, stop), stop if stop < total else None, request)

    return handler


def _client(origin: str, **options: Any) -> SigningClient:
    return SigningClient(origin, TOKEN, retry=RetryPolicy(base_delay=0.0), **options)


@asynccontextmanager
async def _responding(body: Any, **headers: str) -> AsyncIterator[SigningClient]:
    """A client of a service that gives this response to every request."""

    async def handler(request: web.Request) -> web.Response:
        return _json(body, **headers)

    async with serving(handler) as server, _client(server.origin) as client:
        yield client


def _prefetches() -> set[asyncio.Task[Any]]:
    return {task for task in asyncio.all_tasks() if "prefetch" in task.get_name()}


async def _collect(pager: Pager[Signing], found: list[str]) -> None:
    """Work on each item for a moment, while the next page is prefetched."""
    async for signing in pager:
        found.append(signing.id)
        await asyncio.sleep(0.02)


async def _settled() -> None:
    """Let generators and tasks end that nobody waits for."""
    gc.collect()
    for _ in range(20):
        await asyncio.sleep(0)


# Conventions


@pytest.mark.parametrize("name", _SHAPES)
async def test_all_items_are_listed_once_and_in_order_in_every_convention(name: str) -> None:
    """With one request for each page."""
    async with serving(_service(_SHAPES[name])) as server, _client(server.origin) as client:
        for prefetch in (True, False):
            found = [signing.id async for signing in client.signings.list(prefetch=prefetch)]
            assert found == [str(number) for number in range(7)]
        assert len(server.requests) == 6


async def test_cursor_and_limit_are_sent_under_their_assumed_names() -> None:
    """The URL of a next page is sent unchanged."""
    async with serving(_service(_SHAPES["meta.next_cursor"], 0)) as server:
        renamed = Assumptions(cursor_param="starting after", limit_param="per_page")
        async with _client(server.origin, assumptions=renamed) as client:
            await client.signings.list(cursor="a&b=c /å", limit=50)
            await client.signings.list()
            await client.signings.list(cursor="?page=2", limit=50)
    queries = [dict(request.query) for request in server.requests]
    assert queries == [{"starting after": "a&b=c /å", "per_page": "50"}, {}, {"page": "2"}]


@pytest.mark.parametrize(
    ("body", "link", "said"),
    [
        ({"data": [], "has_more": True}, "", "the response announces more items, but has neither"),
        ({"data": [{"id": {"x": 1}}], "has_more": True}, "", "the response announces more items, but has neither"),
        ([], "<>; rel=next", "the next cursor has 0 characters"),
    ],
)
async def test_page_that_announces_another_without_a_cursor_raises_decode_error(
    body: Any, link: str, said: str
) -> None:
    """A list is never silently incomplete."""
    async with _responding(body, Link=link) as client:
        with pytest.raises(DecodeError, match=said):
            await client.signings.list()


async def test_page_without_a_usable_cursor_is_the_last() -> None:
    """Only a string, a number or a true ``has_more`` continues a list."""
    bodies: list[Any] = [{"data": [], "has_more": False}, {"data": [], "next": {"cursor": "x"}}, []]
    for body in (*bodies, {"data": [], "links": [{"url": "x"}], "next": ""}):
        async with _responding(body) as client:
            assert await client.signings.list() == Page((), None)


# Other origins


@pytest.mark.parametrize(
    "address",
    [
        "http://{other}/api/1.0/signings?cursor=2",
        "https://{own}/api/1.0/signings?cursor=2",
        "//{other}/api/1.0/signings?cursor=2",
        "http://{own}@{other}/x?y",
        "http://[::1/x?y",
        " http://{other}/x?y",
    ],
)
async def test_token_is_not_sent_to_the_url_of_a_next_page_on_another_origin(address: str) -> None:

    async def other(request: web.Request) -> web.Response:
        return _json([])

    async def handler(request: web.Request) -> web.Response:
        return _json([] if "cursor" in request.query else {"data": _items(0, 1), "next": link})

    async with serving(other) as stranger, serving(handler) as server, _client(server.origin) as client:
        link = address.format(own=server.origin[7:], other=stranger.origin[7:])
        if address.startswith(" "):  # not a URL: it is sent as a cursor
            assert len([signing async for signing in client.signings.list()]) == 1
        else:
            with pytest.raises(DecodeError, match="not on the tenant's origin"):
                [signing async for signing in client.signings.list()]
            with pytest.raises(InvalidRequest, match="cursor: the URL is not on the tenant's origin"):
                await client.signings.list(cursor=link)
        assert stranger.requests == []
        assert {request.url.raw_authority for request in server.requests} == {server.origin[7:]}


# Repeated cursors


@pytest.mark.parametrize(("cycle", "prefetch"), [(["a", "a"], True), (["a", "b", "a"], False)])
async def test_repeated_cursor_raises_decode_error(cycle: list[str], prefetch: bool) -> None:
    """A service that ignores the parameter is found out, and no item comes twice."""
    given = iter(cycle)

    async def handler(request: web.Request) -> web.Response:
        return _json({"data": _items(len(server.requests), len(server.requests) + 1), "next_cursor": next(given)})

    found: list[str] = []
    async with serving(handler) as server, _client(server.origin) as client:
        with pytest.raises(DecodeError, match=r"signings\.list: .* the cursor '.' a second time; .*Assumptions"):
            await _collect(client.signings.list(prefetch=prefetch), found)
        assert len(found) == len(set(found)) == len(cycle) - 1
        assert not _prefetches()


# Arguments and use


async def test_invalid_arguments_are_refused_before_any_request() -> None:
    async with _client("http://127.0.0.1:9") as client:
        with pytest.raises(InvalidRequest, match=r"^cursor: invalid cursor ''; pass the next_cursor of a page$"):
            client.signings.list(cursor="")
        with pytest.raises(InvalidRequest, match=r"^limit: must be an integer of at least 1, got 0$"):
            client.signings.list(limit=0)


# Prefetch


class _Slow:
    """A list of four pages that are sent on command; it counts the requests."""

    def __init__(self) -> None:
        self.requested = 0
        self.arrived = asyncio.Condition()
        self.gates = [asyncio.Event() for _ in range(4)]
        self.failing: set[int] = set()

    def open(self, *pages: int) -> None:
        for page in pages:
            self.gates[page].set()

    async def wait_for_requests(self, count: int) -> None:
        async with self.arrived, asyncio.timeout(30):
            await self.arrived.wait_for(lambda: self.requested >= count)

    async def __call__(self, request: web.Request) -> web.Response:
        page = int(request.query.get("cursor", "0"))
        async with self.arrived:
            self.requested += 1
            self.arrived.notify_all()
        await self.gates[page].wait()
        if page in self.failing:
            return web.Response(status=404, text="gone")
        return _json({"data": _items(page, page + 1), "next_cursor": page + 1 if page < 3 else None})


@asynccontextmanager
async def _slow() -> AsyncIterator[tuple[_Slow, SigningClient]]:
    slow = _Slow()
    async with serving(slow) as server:
        async with _client(server.origin) as client:
            yield slow, client
            await _settled()
            assert not _prefetches()
        slow.open(0, 1, 2, 3)


async def test_one_page_is_prefetched_while_the_caller_works() -> None:
    async with _slow() as (slow, client):
        slow.open(0, 1, 2, 3)
        async with aclosing(client.signings.list().pages()) as pages:
            for number in range(4):
                page = await anext(pages)
                assert page.items[0].id == str(number)
                await slow.wait_for_requests(min(number + 2, 4))
                await asyncio.sleep(0.02)
                assert slow.requested == min(number + 2, 4)
            with pytest.raises(StopAsyncIteration):
                await anext(pages)


async def test_error_of_a_prefetched_page_is_raised_after_the_items_before_it() -> None:
    async with _slow() as (slow, client):
        slow.failing = {2}
        slow.open(0, 1, 2)
        found: list[str] = []
        with pytest.raises(NotFound):
            await _collect(client.signings.list(), found)
        assert found == ["0", "1"]


@pytest.mark.parametrize("by", ["break", "aclose", "cancellation"])
async def test_leaving_a_list_early_cancels_the_prefetch(by: str) -> None:
    """No task, no connection and no warning is left."""
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    async with _slow() as (slow, client):
        slow.open(0)
        in_body = asyncio.Event()

        async def consume() -> None:
            pages = client.signings.list().pages() if by == "aclose" else None
            async for _ in pages or client.signings.list():
                await slow.wait_for_requests(2)
                assert len(_prefetches()) == 1
                in_body.set()
                if by == "break":
                    break
                if pages is not None:
                    await pages.aclose()
                    assert not _prefetches()
                else:
                    await asyncio.sleep(60)

        consumer = asyncio.create_task(consume())
        async with asyncio.timeout(30):
            await in_body.wait()
            if by == "cancellation":
                consumer.cancel()
            await asyncio.wait([consumer])
        assert consumer.cancelled() == (by == "cancellation")
        await _settled()
        assert not _prefetches()
        connector = client._shared.sessions.get().connector
        assert connector is not None
        assert not connector._acquired
    assert reports == []
