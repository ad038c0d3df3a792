"""Lists: a page, everything, or page by page, whatever the service's convention; with one page read ahead."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aioresponses import aioresponses

from signing_async import (
    Assumptions,
    DecodeError,
    InvalidRequest,
    NotFound,
    Page,
    Pager,
    RetryPolicy,
    ServerError,
    Signing,
    SigningClient,
)
from signing_async.sandbox import Profile, Sandbox
from tests.servers import Web, serving

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
    "a number": lambda items, to, _: _json({"items": items, "next_cursor": to or 0}),
    "pagination": lambda items, to, _: _json({"results": items, "pagination": {"next_cursor": to and str(to)}}),
    "links.next": lambda items, to, request: _json({"data": items, "links": {"next": _url(request, to)}}),
    "next_page_url": lambda items, to, request: _json({"data": items, "next_page_url": _url(request, to)}),
    "next": lambda items, to, request: _json({"recipients": items, "next": _url(request, to)}),
    "path only": lambda items, to, _: _json({"data": items, "next": to and f"{PATH}?cursor={to}"}),
    "query only": lambda items, to, _: _json({"data": items, "next": to and f"?cursor={to}"}),
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
    """A list of ``total`` signings in pages of ``size``, whose cursor is the number to start from."""

    async def handler(request: web.Request) -> web.Response:
        assert request.path == PATH
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        cursor = request.query.get("cursor", "0").removeprefix("/w+/").removesuffix("==")
        start = int(cursor)
        stop = min(start + int(request.query.get("limit", size)), total)
        return shape(_items(start, stop), stop if stop < total else None, request)

    async def after_id(request: web.Request) -> web.Response:
        after = request.query.get("cursor")
        start = 0 if after is None else int(after) + 1
        stop = min(start + size, total)
        return shape(_items(start, stop), stop if stop < total else None, request)

    return after_id if shape in (_SHAPES["has_more"], _SHAPES["has_more number"]) else handler


def _client(origin: str, **options: Any) -> SigningClient:
    return SigningClient(origin, TOKEN, retry=RetryPolicy(base_delay=0.0), **options)


def _strangers() -> set[asyncio.Task[Any]]:
    return {task for task in asyncio.all_tasks() if "read-ahead" in task.get_name()}


async def _collect(pager: Pager[Signing], found: list[str]) -> None:
    """Work a little on each item, so that the next page is under way."""
    async for signing in pager:
        found.append(signing.id)
        await asyncio.sleep(0.02)


async def _settled() -> None:
    """Let what was closed behind the scenes come to its end."""
    gc.collect()
    for _ in range(20):
        await asyncio.sleep(0)


# Conventions


@pytest.mark.parametrize("read_ahead", [True, False])
@pytest.mark.parametrize("name", _SHAPES)
async def test_every_convention_is_followed(name: str, read_ahead: bool) -> None:
    """Wherever the next cursor or address stands, all items come, in order, once, with one request a page."""
    async with serving(_service(_SHAPES[name])) as server, _client(server.origin) as client:
        found = [signing.id async for signing in client.signings.list(read_ahead=read_ahead)]
        assert found == [str(number) for number in range(7)]
        assert len(server.requests) == 3


@pytest.mark.parametrize("name", _SHAPES)
async def test_every_cursor_can_be_resumed_from(name: str) -> None:
    """A page's cursor, kept as text, goes on there in another client."""
    async with serving(_service(_SHAPES[name])) as server:
        async with _client(server.origin) as client:
            first = await client.signings.list()
        assert [signing.id for signing in first.items] == ["0", "1", "2"]
        async with _client(server.origin) as client:
            kept = json.loads(json.dumps(first.next_cursor))
            rest = [signing.id async for signing in client.signings.list(cursor=kept)]
        assert rest == ["3", "4", "5", "6"]


@pytest.mark.parametrize("pagination", ["meta_cursor", "top_cursor", "next_url", "link_header", "has_more", "bare"])
@pytest.mark.parametrize("recipients_list", ["envelope", "paged", "bare"])
async def test_every_convention_of_the_sandbox(pagination: Any, recipients_list: Any) -> None:
    """With default assumptions every style of the sandbox is read to its end, signings and recipients alike."""
    profile = Profile(pagination=pagination, recipients_list=recipients_list, page_size=2)
    async with (
        Sandbox(profile=profile) as sandbox,
        SigningClient(sandbox.base_url, sandbox.access_token()) as client,
    ):
        made = [(await client.signings.create(name=f"Lease {n}", language="EN")).id for n in range(5)]
        assert [signing.id async for signing in client.signings.list()] == made[::-1]
        assert {signing.id async for signing in client.signings.list(limit=1)} == set(made)
        added = [(await client.recipients.add(made[0], email=f"a{n}@example.com")).id for n in range(5)]
        assert sorted([recipient.id async for recipient in client.recipients.list(made[0])]) == sorted(added)


@pytest.mark.parametrize("preset", ["default", "laravel", "rfc9457", "numeric"])
async def test_every_preset_of_the_sandbox(preset: str) -> None:
    """Whole profiles: with the two parameter names set, everything else is found by itself."""
    profile = Profile.preset(preset)
    assumptions = Assumptions(cursor_param=profile.cursor_param, limit_param=profile.limit_param)
    async with (
        Sandbox(profile=profile) as sandbox,
        SigningClient(sandbox.base_url, sandbox.access_token(), assumptions=assumptions) as client,
    ):
        made = [(await client.signings.create(name=f"Lease {n}", language="SV")).id for n in range(5)]
        pages = [page async for page in client.signings.list(limit=2).pages()]
        assert [len(page.items) for page in pages] == [2, 2, 1]
        assert sorted(signing.id for page in pages for signing in page.items) == sorted(made)
        assert all(signing.updated_at is not None for page in pages for signing in page.items)


async def test_parameters_are_sent_under_their_assumed_names() -> None:
    """Cursor and limit go out, encoded; an address that the service gave stays as it is."""
    async with serving(_service(_SHAPES["next_cursor"], 0)) as server:
        renamed = Assumptions(cursor_param="starting after", limit_param="per_page")
        async with _client(server.origin, assumptions=renamed) as client:
            await client.signings.list(cursor="a&b=c /å", limit=50)
            await client.signings.list()
            await client.signings.list(cursor="?page=2", limit=50)
    queries = [dict(request.query) for request in server.requests]
    assert queries == [{"starting after": "a&b=c /å", "per_page": "50"}, {}, {"page": "2"}]


async def test_other_places_can_be_assumed() -> None:
    """A service that fits no convention is described in `Assumptions`."""

    async def handler(request: web.Request) -> web.Response:
        more = "cursor" not in request.query
        return _json(
            {"body": {"rows": _items(0, 1)}, "paging": {"more": more, "after": {"token": "x"} if more else None}}
        )

    assumptions = Assumptions(item_paths="body.rows", next_paths="paging.after.token", has_more_paths="paging.more")
    async with serving(handler) as server, _client(server.origin, assumptions=assumptions) as client:
        assert [signing.id async for signing in client.signings.list()] == ["0", "0"]


async def test_an_empty_page_is_no_end() -> None:
    """Services that filter late give empty pages in the middle; the cursor decides."""
    pages = {"": ([], "a"), "a": (_items(0, 1), "b"), "b": ([], "c"), "c": ([], None)}

    async def handler(request: web.Request) -> web.Response:
        items, cursor = pages[request.query.get("cursor", "")]
        return _json({"data": items, "next_cursor": cursor})

    async with serving(handler) as server, _client(server.origin) as client:
        assert [signing.id async for signing in client.signings.list()] == ["0"]
        assert [len(page.items) async for page in client.signings.list().pages()] == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "body",
    [
        {"data": [], "has_more": True},
        {"data": [{"id": ""}], "has_more": True},
        {"data": [{"id": {"x": 1}}], "has_more": True},
    ],
    ids=str,
)
async def test_more_without_a_way_on_is_an_error(body: Any) -> None:
    """A list is never silently incomplete."""

    async def handler(request: web.Request) -> web.Response:
        return _json(body)

    async with serving(handler) as server, _client(server.origin) as client:
        with pytest.raises(DecodeError, match="there is more, but neither a next cursor nor a last item with an id"):
            await client.signings.list()


@pytest.mark.parametrize(
    "body",
    [
        {"data": [], "has_more": False},
        {"data": [], "has_more": "yes"},
        {"data": [], "has_more": 7},
        {"data": [], "next": True},
        {"data": [], "next": {"cursor": "x"}},
        {"data": [], "links": [{"url": "x"}], "next": ""},
        [],
    ],
    ids=str,
)
async def test_what_does_not_lead_on_is_the_end(body: Any) -> None:
    """Only a text, a number or a true ``has_more`` leads on."""

    async def handler(request: web.Request) -> web.Response:
        return _json(body)

    async with serving(handler) as server, _client(server.origin) as client:
        assert await client.signings.list() == Page((), None)


async def test_several_link_headers() -> None:
    """A Link header may come in several lines, and hold nonsense."""

    async def handler(request: web.Request) -> web.Response:
        response = _json(_items(0, 1))
        response.headers.add("Link", '<?cursor=0>; rel=prev, nonsense, <?cursor=8>; rev="next"; rel')
        if "cursor" not in request.query:
            response.headers.add("Link", '<?cursor=1>; rel="next"')
        return response

    async with serving(handler) as server, _client(server.origin) as client:
        assert len([signing async for signing in client.signings.list()]) == 2
    assert [request.query.get("cursor") for request in server.requests] == [None, "1"]


# The token's way


@pytest.mark.parametrize(
    "address",
    [
        "http://{other}/api/1.0/signings?cursor=2",
        "https://{own}/api/1.0/signings?cursor=2",
        "HTTP://{other}/x?y",
        "//{other}/api/1.0/signings?cursor=2",
        "//{other}/x",
        "http://{own}@{other}/x?y",
        "http://user:pass@{own}/api/1.0/signings?cursor=2",
        "http://@{own}/x?y",
        "http://{own}.evil.example/x?y",
        "http://evil.example#{own}/",
        "http://[::1/x?y",
        "http://127.0.0.1:99999/x?y",
        "ftp://{own}/x?y",
        " http://{other}/x?y",
    ],
)
@pytest.mark.parametrize("where", ["next", "Link"])
async def test_the_token_stays_on_its_origin(address: str, where: str) -> None:
    """The address of a next page on another host, port or scheme is refused: nothing is sent there."""

    async def other(request: web.Request) -> web.Response:
        return _json([])

    async def handler(request: web.Request) -> web.Response:
        own = request.url.raw_authority
        link = address.format(own=own, other=stranger.origin.removeprefix("http://"))
        if "cursor" in request.query or request.path != PATH:
            return _json([])
        return (
            _json({"data": _items(0, 1), "next": link})
            if where == "next"
            else _json(_items(0, 1), Link=f"<{link}>; rel=next")
        )

    async with serving(other) as stranger, serving(handler) as server, _client(server.origin) as client:
        with contextlib.suppress(DecodeError):
            found = [signing async for signing in client.signings.list()]
            assert len(found) == 1
            assert address.startswith((" ", "ftp:"))  # no address at all: it may be sent as a cursor
        assert stranger.requests == []
        assert {request.url.raw_authority for request in server.requests} == {server.origin.removeprefix("http://")}
        if not address.startswith((" ", "ftp:")):
            link = address.format(own=server.origin[7:], other=stranger.origin[7:])
            with pytest.raises(InvalidRequest, match="cursor: an address that is not on the tenant's origin"):
                await client.signings.list(cursor=link)


async def test_a_refused_address_says_so() -> None:
    """The error names the call and the reason, with the request id."""

    async def handler(request: web.Request) -> web.Response:
        return _json({"data": [], "next": "https://evil.example/?x", "request_id": "r"})

    async with serving(handler) as server, _client(server.origin) as client:
        with pytest.raises(DecodeError, match=r"^signings\.list: .* is not on the tenant's origin.*request id r\)$"):
            await client.signings.list()


# Going round in circles


@pytest.mark.parametrize("read_ahead", [True, False])
@pytest.mark.parametrize("cycle", [["a", "a"], ["a", "b", "a"], ["a", "b", "c", "b"]])
async def test_the_same_cursor_twice_is_an_error(cycle: list[str], read_ahead: bool) -> None:
    """A service that leads in a circle, or does not know the parameter, is found out; no item comes twice."""
    given = iter(cycle)

    async def handler(request: web.Request) -> web.Response:
        return _json({"data": _items(len(server.requests), len(server.requests) + 1), "next_cursor": next(given)})

    found: list[str] = []
    async with serving(handler) as server, _client(server.origin) as client:
        with pytest.raises(DecodeError, match=r"signings\.list: .* the cursor '.' a second time; .*Assumptions"):
            await _collect(client.signings.list(read_ahead=read_ahead), found)
        assert len(found) == len(set(found)) == len(cycle) - 1
        assert not _strangers()


async def test_the_cursor_that_was_started_from_counts() -> None:
    """Also the caller's own cursor must not come back."""

    async def handler(request: web.Request) -> web.Response:
        return _json({"data": [], "next_cursor": "start"})

    async with serving(handler) as server, _client(server.origin) as client:
        with pytest.raises(DecodeError, match="second time"):
            [page async for page in client.signings.list(cursor="start").pages()]
    assert len(server.requests) == 1


# Arguments and use


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cursor": ""}, "cursor: must be a page's next_cursor, not ''"),
        ({"cursor": 5}, "cursor: must be a page's next_cursor, not 5"),
        ({"limit": 0}, "limit: must be a whole number from 1, not 0"),
        ({"limit": -1}, "limit: must be a whole number from 1, not -1"),
        ({"limit": True}, "limit: must be a whole number from 1, not True"),
        ({"limit": "5"}, "limit: must be a whole number from 1, not '5'"),
        ({"limit": 1.5}, "limit: must be a whole number from 1, not 1.5"),
    ],
)
async def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    """Before anything is sent, naming argument and value."""
    async with _client("http://127.0.0.1:9") as client:
        with pytest.raises(InvalidRequest) as caught:
            client.signings.list(**arguments)
    assert str(caught.value) == message


async def test_one_pager_can_be_used_again_and_again() -> None:
    """Each await and each iteration begins anew; two at once do not disturb each other."""
    async with serving(_service(_SHAPES["next_cursor"])) as server, _client(server.origin) as client:
        pager = client.signings.list()
        assert server.requests == []
        assert (await pager).items == (await pager).items

        async def everything() -> list[str]:
            return [signing.id async for signing in pager]

        both = await asyncio.gather(everything(), everything())
        assert list(both) == [[str(number) for number in range(7)]] * 2


async def test_paging_through_a_mocked_session(mocked: aioresponses) -> None:
    """The client's requests can be answered by aioresponses in its users' tests, large answers too."""
    url = f"http://127.0.0.1:9{PATH}"
    mocked.get(url, payload={"data": _items(0, 5000), "next_cursor": "n"})
    mocked.get(f"{url}?cursor=n", payload={"data": _items(5000, 5001)})
    async with _client("http://127.0.0.1:9") as client:
        assert [signing.id async for signing in client.signings.list()] == [str(number) for number in range(5001)]
    assert [str(made[1]) for made in mocked.requests] == [url, f"{url}?cursor=n"]


async def test_a_page_that_cannot_be_read_names_the_place() -> None:
    """Wherever the items stood, the path in the answer leads to the fault."""
    bodies: list[Any] = [{"signings": [{"id": "a"}, {"id": None}]}, [{"name": "x"}], {"data": 5}, "x"]
    given = iter(bodies)

    async def handler(request: web.Request) -> web.Response:
        return _json(next(given))

    async with serving(handler) as server, _client(server.origin) as client:
        for place in (r"signings\[1\]\.id: missing", r"\[0\]\.id: missing", "no list of items", "no list of items"):
            with pytest.raises(DecodeError, match=f": {place}"):
                await client.signings.list()


async def test_a_list_is_read_as_a_part_of_another_call(sandbox: Sandbox, client: SigningClient) -> None:
    """Adding a recipient, in doubt, reads the list of recipients within the same call."""
    signing = await client.signings.create(name="Lease", language="EN")
    sandbox.faults.add("recipients.add", "500-after-commit")
    added = await client.recipients.add(signing, email="anna@example.com")
    assert [recipient.id async for recipient in client.recipients.list(signing)] == [added.id]


# Reading ahead


class _Slow:
    """A list whose pages are given out one by one, on command; counts what was asked for."""

    def __init__(self, pages: int = 4) -> None:
        self.pages = pages
        self.asked = 0
        self.arrived = asyncio.Condition()
        self.gates = [asyncio.Event() for _ in range(pages)]
        self.failing: set[int] = set()

    def open(self, *pages: int) -> None:
        for page in pages:
            self.gates[page].set()

    async def until_asked(self, count: int) -> None:
        async with self.arrived:
            await self.arrived.wait_for(lambda: self.asked >= count)

    async def __call__(self, request: web.Request) -> web.Response:
        page = int(request.query.get("cursor", "0"))
        async with self.arrived:
            self.asked += 1
            self.arrived.notify_all()
        await self.gates[page].wait()
        if page in self.failing:
            return web.Response(status=404, text="gone")
        return _json({"data": _items(page, page + 1), "next_cursor": page + 1 if page + 1 < self.pages else None})


@asynccontextmanager
async def _slow(pages: int = 4) -> AsyncIterator[tuple[_Slow, SigningClient, Web]]:
    slow = _Slow(pages)
    async with serving(slow) as server:
        async with _client(server.origin) as client:
            yield slow, client, server
            await _settled()
            assert not _strangers()
        slow.open(*range(pages))


async def test_the_next_page_is_fetched_meanwhile_and_no_other() -> None:
    """While the consumer works on a page the next one is on its way; the one after that is not."""
    async with _slow() as (slow, client, _):
        slow.open(0, 1, 2, 3)
        async with aclosing(client.signings.list().pages()) as pages:
            for number in range(4):
                page = await anext(pages)
                assert page.items[0].id == str(number)
                await asyncio.wait_for(slow.until_asked(min(number + 2, 4)), 5)
                await asyncio.sleep(0.02)
                assert slow.asked == min(number + 2, 4)
            with pytest.raises(StopAsyncIteration):
                await anext(pages)


async def test_without_reading_ahead_nothing_is_asked_too_early() -> None:
    """``read_ahead=False`` fetches a page when it is needed."""
    async with _slow() as (slow, client, _):
        slow.open(0, 1, 2, 3)
        async with aclosing(client.signings.list(read_ahead=False).pages()) as pages:
            for number in range(4):
                await anext(pages)
                await asyncio.sleep(0.02)
                assert slow.asked == number + 1


async def test_an_awaited_page_reads_nothing_ahead() -> None:
    """One page is one request."""
    async with _slow() as (slow, client, _):
        slow.open(0)
        assert (await client.signings.list()).next_cursor == "1"
        await asyncio.sleep(0.02)
        assert slow.asked == 1


async def test_an_error_of_the_page_ahead_surfaces_when_it_is_reached() -> None:
    """All items before it are given out; then it is raised, once, and nothing goes on in the background."""
    async with _slow() as (slow, client, _):
        slow.failing = {2}
        slow.open(0, 1, 2)
        found: list[str] = []
        with pytest.raises(NotFound):
            await _collect(client.signings.list(), found)
        assert found == ["0", "1"]


async def test_an_error_ahead_that_is_never_reached_makes_no_noise() -> None:
    """Whoever leaves before it never hears of it: not even as an exception that nobody retrieved."""
    noise: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
    async with _slow() as (slow, client, _):
        slow.failing = {1}
        slow.open(0, 1)
        async with aclosing(client.signings.list().pages()) as pages:
            await anext(pages)
            await asyncio.wait_for(slow.until_asked(2), 5)
            while _strangers():
                await asyncio.sleep(0.005)
    await _settled()
    assert noise == []


@pytest.mark.parametrize("by", ["break", "exception", "aclose", "cancellation", "garbage"])
async def test_leaving_early_leaves_nothing_behind(by: str) -> None:
    """Left in whatever way while the page ahead is on its way: no task, no connection, no noise."""
    noise: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
    async with _slow() as (slow, client, _):
        slow.open(0)

        async def consume() -> None:
            async for _signing in client.signings.list():
                await asyncio.wait_for(slow.until_asked(2), 5)
                assert len(_strangers()) == 1
                if by == "break":
                    break
                if by == "exception":
                    raise LookupError
                await asyncio.sleep(60)

        if by == "cancellation":
            task = asyncio.create_task(consume())
            await asyncio.wait_for(slow.until_asked(2), 5)
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif by in ("aclose", "garbage"):
            pages = client.signings.list().pages()
            await anext(pages)
            await asyncio.wait_for(slow.until_asked(2), 5)
            if by == "aclose":
                await pages.aclose()
                assert not _strangers()
            del pages
        else:
            with contextlib.suppress(LookupError):
                await consume()
        await _settled()
        assert not _strangers()
        connector = client._shared.sessions.get().connector
        assert connector is not None
        assert not connector._acquired
    assert noise == []


async def test_cancelled_while_waiting_for_the_page_ahead() -> None:
    """A consumer that waits for the page ahead and is cancelled takes its request with it, even if cancelled twice."""
    async with _slow() as (slow, client, _):
        slow.open(0)

        async def consume() -> None:
            async for _signing in client.signings.list():
                await asyncio.wait_for(slow.until_asked(2), 5)

        for times in (1, 2):
            slow.asked = 0
            task = asyncio.create_task(consume())
            await asyncio.wait_for(slow.until_asked(2), 5)
            await asyncio.sleep(0.02)
            for _time in range(times):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
            await _settled()
            assert not _strangers()


async def test_left_at_once() -> None:
    """Whoever leaves with the first page has asked for one more, and what is on its way is given up."""
    async with _slow() as (slow, client, _):
        slow.open(0)
        async with aclosing(client.signings.list().pages()) as pages:
            await anext(pages)
        await _settled()
        assert slow.asked == 2
        assert not _strangers()


async def test_a_page_that_fails_for_a_passing_reason_is_read_again(sandbox: Sandbox) -> None:
    """Each page is a call of its own, with its own retries, also when it is read ahead."""
    async with SigningClient(sandbox.base_url, sandbox.access_token(), retry=RetryPolicy(base_delay=0.0)) as client:
        made = [(await client.signings.create(name=f"Lease {n}", language="EN")).id for n in range(4)]
        sandbox.faults.add("signings.list", "503", times=2, skip=1)
        assert [signing.id async for signing in client.signings.list(limit=1)] == made[::-1]
        assert len(sandbox.requests_of("signings.list")) == 6
        sandbox.faults.add("signings.list", "500", times=None)
        with pytest.raises(ServerError):
            await client.signings.list()


async def test_a_page_is_a_value() -> None:
    """Its items are a tuple of records; it can be compared and picked apart."""
    page = Page((Signing("a"),), "n")
    assert page == Page((Signing("a"),), "n") != Page((), "n")
    assert (page.items[0].id, page.next_cursor) == ("a", "n")
