"""Foreign bytes raise only the package's errors, cost linear time and little memory, and break no line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from signing_async import APIError, Assumptions, DecodeError, NotFound, RetryPolicy, Signing, SigningClient
from signing_async.pagination import _linked  # private: over HTTP the noise hides how time grows
from signing_async.transport.decode import Unreadable, decode_record, parse, timestamp  # private: the same
from signing_async.transport.problems import error_from  # private: the same
from signing_async.transport.redaction import redact  # private: the same
from signing_async.transport.retry import (  # private: any delay and deadline, without waiting for it
    Kind,
    Retries,
    Safety,
    read_retry_after,
)
from signing_async.transport.urls import resolve  # private: thousands of references, without a request for each
from signing_async.transport.wire import Request  # private: the same
from tests.fuzz.__main__ import NAMES, load
from tests.fuzz.promises import check_error
from tests.fuzz.running import by_mutation
from tests.growth import grows_linearly
from tests.servers import serving

TOKEN = "secret/token+0123456789"
ESCAPES = "\x1b[31m\r\n\u202e\x9b"


# Fuzzing


@pytest.mark.parametrize("name", NAMES)
def test_fuzz_target_holds_for_a_moment(name: str) -> None:
    """`python -m tests.fuzz` runs them for longer."""
    assert by_mutation(load(name), seconds=0.2, seed=7) >= 100


# Found by fuzzing


def _error(body: bytes, reason: str = "Bad Request", **headers: str) -> APIError:
    return error_from(
        400,
        {name.replace("_", "-"): value for name, value in headers.items()},
        body,
        reason=reason,
        operation="signings.create",
        not_found=NotFound,
        retry_after=None,
        secrets=(TOKEN,),
        assumptions=Assumptions(),
    )


async def test_no_control_character_of_a_response_reaches_errors_or_logs(caplog: pytest.LogCaptureFixture) -> None:
    body: Any = {}

    async def handler(request: web.Request) -> web.Response:
        return web.json_response(body, headers={"Link": "<\x9b31m?>; rel=next"})

    with caplog.at_level(logging.DEBUG, "signing_async"):
        async with serving(handler) as server, SigningClient(server.origin, TOKEN) as client:
            body = {"id": "u1", "request_id": f"a{ESCAPES}b"}
            assert (await client.me()).id == "u1"
            for body in (
                {"id": {}, "request_id": ESCAPES, "email": ESCAPES},
                {"data": [{"id": "s1", "is_draft": ESCAPES}], "request_id": ESCAPES},
                {"data": [], "next_cursor": ESCAPES, "request_id": ESCAPES},
            ):
                with pytest.raises(DecodeError) as caught:
                    await client.me() if "id" in body else [each async for each in client.signings.list()]
                check_error(caught.value)
    lines = [record.getMessage() for record in caplog.records if record.name == "signing_async"]
    assert len(lines) >= 4
    assert all(line.isprintable() for line in lines)


async def test_cursor_longer_than_16_kib_raises_decode_error() -> None:

    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"data": [], "next_cursor": "c" * length})

    async with serving(handler) as server, SigningClient(server.origin, TOKEN) as client:
        length = 16 * 1024 + 1
        with pytest.raises(DecodeError, match=f"the next cursor has {length} characters: no request can carry it"):
            await client.signings.list()
        length = 16 * 1024
        assert (await client.signings.list()).next_cursor == "c" * length


# Time


def _decode(body: bytes) -> None:
    with suppress(Unreadable):
        decode_record(parse(body), Signing)


def _parse_time(text: bytes) -> None:
    with suppress(Unreadable):
        timestamp(text.decode())


def _parse_link(header: bytes) -> None:
    _linked(CIMultiDictProxy(CIMultiDict([("Link", header.decode())])))


READERS: dict[str, tuple[Callable[[bytes], object], int, tuple[bytes, ...]]] = {
    "error": (
        _error,
        16_000,
        (
            *(b"<", b"<title>", b"&#1;", b"a/", b"bearer+", b'{"errors":[', b'{"a":', TOKEN[:-1].encode(), b"\xff"),
        ),
    ),
    "error in JSON": (
        lambda part: _error(b'{"errors": [' + part + b'0], "message": "x"}'),
        16_000,
        (b'{"field": [[]]},', b"[[[[]]]],", b'{"loc": ["a", "b"]},', b'"#/:",'),
    ),
    "redaction": (
        lambda part: redact(part.decode(), [TOKEN, "a", "aa"]),
        50_000,
        (b"a", b"bearer+", b"bearer+a,", b"%2F", b"\\/"),
    ),
    "record": (
        lambda part: _decode(b'{"id": "s", "x": [' + part + b"0]}"),
        100_000,
        (b"[[[]]],", b"1,", b'{"a":{"a":1}},'),
    ),
    "timestamp": (_parse_time, 100_000, (b"1", b" ", b"2026-01-01", b"T", b".")),
    "Retry-After": (
        lambda part: read_retry_after("Fri, 31 Dec 1999 23:59:59 GMT", date=part.decode(), now=lambda: 0.0),
        2_000,
        (b"(", b",", b" ", b"1", b"Fri, ", b"\\"),
    ),
    "Link": (_parse_link, 50_000, (b"<", b"<a>;", b"<a>; rel=", b";", b",", b" ", b'"')),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_time_grows_linearly_with_the_input(name: str) -> None:
    reader, size, parts = READERS[name]
    for part in parts:

        def work(amount: int, part: bytes = part) -> None:
            reader(part * (amount // len(part)))

        assert grows_linearly(work, size // 4), part


ODD = st.sampled_from(
    ["/", "//", "\\", "@", ":", "?", "#", "%", "..", "tenant.example", "http:", "https://", "\t", "\u3002"]
)


@given(st.lists(ODD | st.text(max_size=8), max_size=8).map("".join))
@example("https://tenant.example:443//evil.example/x")
@example("//tenant.example\\@evil.example/x")
def test_resolved_reference_is_on_the_tenants_origin(reference: str) -> None:
    """Of a redirect or a next page."""
    path = resolve("https://tenant.example", "/api/1.0/signings", reference)
    if path is None:
        return
    url = Request("GET", "https://tenant.example", path).url
    assert path.startswith("/")
    assert str(url).isascii()
    assert (url.scheme, url.host, url.port, url.user) == ("https", "tenant.example", 443, None)
    assert urlsplit("https://tenant.example" + path).netloc == "tenant.example"


# Retries


@given(
    attempt=st.integers(1, 5000),
    base=st.floats(0, 1e6),
    most=st.floats(0, 1e6),
    retry_after=st.none() | st.floats(0, 1e9),
    remaining=st.floats(-10, 1e9),
)
def test_delay_is_never_shorter_than_retry_after_and_never_past_the_deadline(
    attempt: int, base: float, most: float, retry_after: float | None, remaining: float
) -> None:
    """Full jitter: from nothing to the doubled base."""
    policy = RetryPolicy(max_attempts=10_000, base_delay=base, max_delay=most)
    retries = Retries(policy, Safety.READ)
    delay = retries.decide(Kind.FAILED, attempt, retry_after, remaining, may_retry=True, others_accepted=False).delay
    shortest = retry_after or 0.0
    longest = max(shortest, min(most, base * 2.0 ** min(attempt - 1, 60)))
    if delay is None:
        assert longest >= remaining or shortest > policy.max_retry_after
    else:
        assert shortest <= delay <= longest
        assert delay < remaining
        assert shortest <= policy.max_retry_after
