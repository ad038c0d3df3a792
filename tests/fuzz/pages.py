"""Pages, cursors and Link headers: the way on stays on the tenant's origin, and the next request can be made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from signing_async import DecodeError, SigningClient
from signing_async.transport.call import Operation
from signing_async.transport.decode import Unreadable, parse
from signing_async.transport.wire import Request
from tests.fuzz.promises import TOKEN, check_error, check_record, parted
from tests.fuzz.running import Attack, Target

ORIGIN = "https://tenant.example"


class _Answer:
    """As much of a response as a page is read from."""

    status = 200

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self.headers = CIMultiDictProxy(CIMultiDict(pairs))


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
            try:
                assert operation.decode is not None
                return operation.decode(parse(body), _Answer(pairs))  # type: ignore[arg-type]  # enough of a response
            except Unreadable as error:
                raise client._transport.shared.decode_error(operation.name, str(error), 200, None) from None

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
