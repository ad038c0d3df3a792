"""Pages, cursors and Link headers: the way on stays on the tenant's origin, and the next request can be made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from signing_async import Assumptions, DecodeError, SigningClient
from signing_async.transport.decode import Unreadable
from signing_async.transport.operation import Operation
from signing_async.transport.response import Response
from signing_async.transport.retry import Safety
from signing_async.transport.wire import Request
from tests.fuzz.promises import TOKEN, check_error, check_record, parted
from tests.fuzz.running import Attack, Target

ORIGIN = "https://tenant.example"


def _response(operation: Operation[Any], pairs: list[tuple[str, str]], body: bytes) -> Response:
    headers = CIMultiDictProxy(CIMultiDict(pairs))
    return Response(
        operation.name,
        200,
        headers,
        body,
        secrets=lambda: (TOKEN,),
        assumptions=Assumptions(),
        safety=Safety.READ,
    )


@contextmanager
def attacking() -> Iterator[Attack]:
    client = SigningClient(ORIGIN, TOKEN)

    def attack(data: bytes) -> None:
        pairs, body = parted(data)
        asked: list[URL] = []

        async def read(operation: Operation[Any]) -> Any:
            url = Request(operation.method, ORIGIN, operation.path, operation.params).url
            asked.append(url)
            assert url.origin() == URL(ORIGIN), url
            assert str(url).isascii()
            assert not set(str(url)) & set("\r\n\t \0")
            assert operation.decode is not None
            response = _response(operation, pairs, body)
            try:
                return operation.decode(response)
            except Unreadable as error:
                raise response.decode_error(str(error)) from None

        async def page_through() -> None:
            pages = client.signings.list().through(read).pages()
            check_record(await anext(pages))
            await anext(pages, None)

        try:
            _finish(page_through())
        except DecodeError as error:
            check_error(error, data)

    yield attack


def _finish(work: Any) -> None:
    """Run what never waits."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waited")


SEEDS = (
    b'Link: </api/1.0/signings?cursor=2>; rel="next", <x>; rel=prev\n\n[{"id": "s1"}]',
    b'\n\n{"data": [{"id": "s1", "name": "a", "is_draft": true}], "meta": {"next_cursor": "abc="}}',
    b'\n\n{"items": [{"id": 1}], "next": "https://tenant.example/api/1.0/signings?cursor=2&limit=1"}',
    b'\n\n{"results": [{"id": "x"}], "has_more": true, "request_id": "r"}',
    b'X-Request-Id: r\n\n{"signings": [], "links": {"next": "//tenant.example:443/api?x=y#z"}}',
    b'\n\n{"data": [], "next_page_url": "?cursor=%2e%2e/"}',
    b'\n\n{"data": [], "next_cursor": "' + TOKEN.encode() + b'"}',
)
WORDS = (
    b"https://", b"http:", b"//", b"/", b"?", b"#", b"@", b":", b"[::1]", b"..", b"%00", b"%", b"\\", b"\t",
    b"\\u0000", b"\\ud800", b"\xff", b"\xe3\x80\x82", b"\xe2\x84\x80", b"tenant.example", b"evil.example", b":443",
    b":99999999", b"/api/1.0/signings", b'"next": "', b'"next_cursor": ', b'"has_more": true', b'"data": ', b"Link: <",
    b">; rel=next", b"null", b"0", b"[]", b"{}", b'"', b",", b"<", b">", b"\n", b"\n\n", TOKEN.encode(), b"x" * 500,
    b'"id": ',
)  # fmt: skip
TARGET = Target("pages", attacking, SEEDS, WORDS)
