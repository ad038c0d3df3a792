"""Foreign bytes raise only the package's errors, cost linear time and little memory, and break no line."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import time
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from signing_async import APIError, Assumptions, AuthError, DecodeError, NotFound, RetryPolicy, Signing, SigningClient
from signing_async.auth.token_stores import token_from_json
from signing_async.pagination import _linked
from signing_async.transport import decode
from signing_async.transport.decode import Unreadable, decode_record, parse, timestamp
from signing_async.transport.problems import error_from, one_line
from signing_async.transport.redaction import redact
from signing_async.transport.retry import read_retry_after
from signing_async.transport.urls import resolve
from signing_async.transport.wire import Request
from signing_async.webhooks import STANDARD_WEBHOOKS, STRIPE, Scheme, WebhookError, WebhookVerifier, diagnose, sign
from tests.auth.oauth_servers import Scripted, code_of, oauth_for, says
from tests.fuzz import running
from tests.fuzz.__main__ import NAMES, load
from tests.fuzz.promises import check_error
from tests.fuzz.running import Found, Target, by_mutation
from tests.growth import grows_linearly
from tests.servers import serving

TOKEN = "secret/token+0123456789"
ESCAPES = "\x1b[31m\r\n\u202e\x9b"


# Fuzzing


@pytest.mark.parametrize("name", NAMES)
def test_fuzz_target_holds_for_a_moment(name: str) -> None:
    """`python -m tests.fuzz` runs them for longer."""
    assert by_mutation(load(name), seconds=0.7, seed=7) >= 100


@pytest.mark.parametrize("broken", ["raises", "is slow"])
def test_fuzzing_finds_an_error_and_a_slow_input(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "SLOW", 0.2)

    def attack(data: bytes) -> None:
        if b"!" in data and broken == "raises":
            raise ValueError("a hole")
        until = time.thread_time() + 0.3
        while b"!" in data and time.thread_time() < until:
            pass

    with pytest.raises(Found, match=r"^frail: .*!") as caught:
        by_mutation(Target("frail", lambda: nullcontext(attack), (b"abc",), (b"!",)), seconds=5, seed=1)
    assert b"!" in caught.value.data


# Any text

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
ODD = st.sampled_from(
    ["/", "//", "\\", "@", ":", "?", "#", "%", "..", "tenant.example", "http:", "https://", "\t", "\u3002"]
)


@given(ANYTHING)
def test_any_json_is_parsed_alike_with_and_without_orjson(value: Any) -> None:
    body = json.dumps(value).encode()
    assert _parsed(body) == _parsed(body, orjson=None)


@given(
    st.binary(max_size=40) | st.text(st.sampled_from('[]{}",:\\ud8ef019.-+eNaIfnty \n'), max_size=30).map(str.encode)
)
def test_other_bytes_are_refused_alike_with_and_without_orjson(body: bytes) -> None:
    assert _parsed(body) == _parsed(body, orjson=None)


def _parsed(body: bytes, **changed: object) -> object:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changed.items():
            patch.setattr(decode, name, value)
        try:
            # The repr tells 1, 1.0 and True apart.
            return repr(parse(body))
        except Unreadable:
            return Unreadable


@given(st.lists(ODD | st.text(max_size=8), max_size=8).map("".join))
@example("https://tenant.example:443//evil.example/x")
@example("//tenant.example\\@evil.example/x")
def test_resolved_reference_is_on_the_tenants_origin(reference: str) -> None:
    """Of a redirect or a next page."""
    request = Request("GET", "https://tenant.example", "/api/1.0/signings")
    path = resolve(request, reference)
    if path is None:
        return
    url = Request("GET", "https://tenant.example", path).url
    assert path.startswith("/")
    assert str(url).isascii()
    assert (url.scheme, url.host, url.port, url.user) == ("https", "tenant.example", 443, None)
    assert urlsplit("https://tenant.example" + path).netloc == "tenant.example"


@given(st.text(min_size=1, max_size=40))
def test_cursor_arrives_unchanged(cursor: str) -> None:
    url = Request("GET", "https://tenant.example", "/x", {"cursor": cursor}).url
    assert parse_qs(urlsplit(str(url)).query, keep_blank_values=True, strict_parsing=True) == {"cursor": [cursor]}


@given(st.text(max_size=60))
def test_one_line_is_printable_and_idempotent(text: str) -> None:
    line = one_line(text)
    assert line.isprintable()
    assert one_line(line) == line
    assert len(line) <= len(text)


OFFSETS = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@given(st.datetimes(timezones=OFFSETS))
def test_any_datetime_in_iso_format_is_parsed(moment: datetime) -> None:
    assert timestamp(moment.isoformat()) == moment
    assert timestamp(moment.isoformat(" ")) == moment


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


@pytest.mark.parametrize("number", ["9" * 5000, "0" * 5000 + "65", "x" + "f" * 60_000])
def test_html_error_with_an_endless_character_number_is_parsed(number: str) -> None:
    """Python refuses to parse so many digits."""
    assert _error(f"Bad &#{number}; gateway".encode()).message.startswith("Bad &#" if number[0] != "x" else "Bad")


def test_long_or_unprintable_request_id_is_dropped() -> None:
    """It is not cut: half of an echoed secret would not be redacted."""
    body = json.dumps({"request_id": "y" * 482 + TOKEN}).encode()
    assert _error(body).request_id is None
    assert "secret" not in str(_error(body))
    assert _error(b'{"request_id": "r"}', X_Request_Id="a" * 501).request_id == "r"
    assert _error(b'{"request_id": "r"}', X_Request_Id="a" * 500).request_id == "a" * 500
    assert _error(json.dumps({"request_id": f"a{ESCAPES}"}).encode()).request_id is None
    assert _error(b'{"request_id": "r"}', X_Request_Id="\x9b31m").request_id == "r"


def test_error_has_a_message_if_the_reason_is_unprintable() -> None:
    assert _error(b"", reason="\x1b\x00").message == "the service refused the request"


async def test_no_control_character_of_a_response_reaches_errors_or_logs(caplog: pytest.LogCaptureFixture) -> None:
    responses: list[Any] = [
        {"id": {}, "request_id": ESCAPES, "email": ESCAPES},
        {"id": "u1", "request_id": f"a{ESCAPES}b"},
        {"data": [{"id": "s1", "is_draft": ESCAPES}], "request_id": ESCAPES},
        {"data": [], "next_cursor": ESCAPES, "request_id": ESCAPES},
    ]

    async def handler(request: web.Request) -> web.Response:
        return web.json_response(responses[0], headers={"Link": "<\x9b31m?>; rel=next"})

    with caplog.at_level(logging.DEBUG, "signing_async"):
        async with serving(handler) as server, SigningClient(server.origin, TOKEN) as client:
            with pytest.raises(DecodeError) as caught:
                await client.me()
            check_error(caught.value)
            del responses[0]
            assert (await client.me()).id == "u1"
            del responses[0]
            for _ in range(2):
                with pytest.raises(DecodeError) as caught:
                    [signing async for signing in client.signings.list()]
                check_error(caught.value)
                responses[:] = responses[-1:]
    lines = [record.getMessage() for record in caplog.records if record.name == "signing_async"]
    assert len(lines) >= 4
    assert all(line.isprintable() for line in lines)


def test_error_of_a_callback_is_one_printable_line() -> None:
    found = code_of("https://a/?state=s&error=%0aE%1b[31m&error_description=%1b[31m%0d%0aDone", "s")
    assert isinstance(found, AuthError)
    check_error(found)
    assert str(found) == "authorization was refused: [31m Done (code E [31m)"
    assert found.code == "E [31m"


async def test_error_of_a_token_endpoint_is_one_printable_line() -> None:
    refusal = says({"error": f"no{ESCAPES}", "error_description": ESCAPES}, status=400)
    async with Scripted(refusal) as server, oauth_for(server.base_url) as oauth:
        with pytest.raises(AuthError) as caught:
            await oauth.exchange("a-code")
    check_error(caught.value)
    assert caught.value.code == "no [31m"


def _nested(depth: int) -> bytes:
    odd = depth % 2
    return (
        b'{"id": "s1", "x": ' + b"[" * odd + b'{"y": [' * (depth // 2) + b"1" + b"]}" * (depth // 2) + b"]" * odd + b"}"
    )


def test_record_can_be_printed_and_pickled_or_its_response_is_too_deep() -> None:
    signing = decode_record(parse(_nested(64)), Signing)
    assert repr(signing)
    assert pickle.loads(pickle.dumps(signing)) == copy.deepcopy(signing) == signing
    with_brackets = parse(b'{"id": "s1", "name": "%b", "x": %b}' % (b"[{" * 500, _nested(60)))
    assert decode_record(with_brackets, Signing).name == "[{" * 500
    for depth in (100, 101, 200, 900):
        for body in (_nested(depth), b'{"id": "s1", "documents": [' + _nested(depth) + b"]}"):
            with pytest.raises(Unreadable, match="nested too deeply"):
                decode_record(parse(body), Signing)


def test_webhook_doctor_reads_any_header() -> None:
    """Without trying every pair of an id and a timestamp."""
    assert not diagnose("s", b"{}", "x", headers=[("x-id", "\ud800"), ("y-id", "é")]).accepted

    def read(count: int) -> None:
        stamps = ",".join(f"t={1_700_000_000 + number}" for number in range(count))
        headers = [(f"x{number}-id", str(number)) for number in range(count)]
        assert not diagnose("s", b"{}", f"{stamps},v1={'a' * 64}", headers=headers).accepted

    assert grows_linearly(read, 25)


async def test_cursor_longer_than_16_kib_raises_decode_error() -> None:

    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"data": [], "next_cursor": "c" * length})

    async with serving(handler) as server, SigningClient(server.origin, TOKEN) as client:
        length = 16 * 1024 + 1
        with pytest.raises(DecodeError, match=f"the next cursor has {length} characters: no request can carry it"):
            await client.signings.list()
        length = 16 * 1024
        assert (await client.signings.list()).next_cursor == "c" * length


async def test_secret_in_a_shortened_cursor_is_redacted() -> None:

    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"data": [], "next_cursor": "c" * 70 + TOKEN})

    async with serving(handler) as server, SigningClient(server.origin, TOKEN) as client:
        with pytest.raises(DecodeError, match=r"a second time") as caught:
            [signing async for signing in client.signings.list()]
    assert "secret" not in str(caught.value)
    assert "c" * 70 in str(caught.value)


# Time

VERIFIERS = [WebhookVerifier(b"k", scheme) for scheme in (Scheme(), STRIPE, STANDARD_WEBHOOKS)]


def _parse_webhook(body: bytes) -> None:
    try:
        VERIFIERS[0].parse(body, sign(b"k", body)["X-Signature"])
    except WebhookError:
        return


def _verify(header: bytes) -> None:
    for verifier in VERIFIERS:
        with pytest.raises(WebhookError):
            verifier.verify(b"{}", header.decode(), headers={"webhook-id": "m", "webhook-timestamp": "1"})


def _decode(body: bytes) -> None:
    try:
        decode_record(parse(body), Signing)
    except Unreadable:
        return


def _parse_time(text: bytes) -> None:
    try:
        timestamp(text.decode())
    except Unreadable:
        return


def _load_token(data: bytes) -> None:
    with pytest.raises(ValueError, match="no token in it"):
        token_from_json(data)


def _parse_link(header: bytes) -> None:
    _linked(CIMultiDictProxy(CIMultiDict([("Link", header.decode())])))


READERS: dict[str, tuple[Callable[[bytes], object], int, tuple[bytes, ...]]] = {
    "error": (
        _error,
        16_000,
        (
            *(b"<", b"<title", b"<title>", b"&#", b"&#1;", b"&amp", b"a/", b"bearer+", b"bearer 1", b" ", b"\x1b"),
            *(b'{"errors":[', b'["a",', b'{"a":', TOKEN.encode(), TOKEN[:-1].encode(), b"\xff", b"\n", b"<a>"),
        ),
    ),
    "error in JSON": (
        lambda part: _error(b'{"errors": [' + part + b'0], "message": "x"}'),
        16_000,
        (b'{"field": [[]]},', b"[[[[]]]],", b'{"loc": ["a", "b"]},', b'"cannot_be_sent ",', b"{},", b'"#/:",'),
    ),
    "redaction": (
        lambda part: redact(part.decode(), [TOKEN, "a", "aa"]),
        50_000,
        (b"a", b"bearer+", b"bearer ", b"bearer+a,", b"%2F", b"\\/"),
    ),
    "record": (
        lambda part: _decode(b'{"id": "s", "x": [' + part + b"0]}"),
        100_000,
        (b"[],", b"{},", b"[[[]]],", b"1,", b'"a",', b'{"a":{"a":1}},'),
    ),
    "documents": (
        lambda part: _decode(b'{"id": "s", "documents": [' + part + b'{"id": 1}]}'),
        100_000,
        (b'{"id": "d"},', b'{"id": 1, "completed_at": "2026-W01-1T01:02:03,5+01"},', b'{"id":"", "x": {}},'),
    ),
    "timestamp": (_parse_time, 100_000, (b"1", b" ", b"2026-01-01", b"T", b"-", b".", b":", b"+1")),
    "Retry-After": (
        lambda part: read_retry_after("Fri, 31 Dec 1999 23:59:59 GMT", date=part.decode(), now=lambda: 0.0),
        2_000,
        (b"(", b")", b",", b" ", b"1", b":", b"Fri, ", b"31 Dec ", b"-", b"\\", b"+1"),
    ),
    "Link": (_parse_link, 50_000, (b"<", b">", b"<a>", b"<a>;", b"rel=next;", b"<a>; rel=", b";", b",", b" ", b'"')),
    "callback": (
        lambda part: code_of("https://a/?" + part.decode(), "s"),
        50_000,
        (b"&", b"=", b"%", b"%41", b"+", b"?", b"#", b"state=", b"&state=s", b"/", b"[", b"@"),
    ),
    "webhook body": (
        _parse_webhook,
        100_000,
        (b"[", b"[]", b"{", b'"', b"\\", b'"\\"', b'["a"],', b'"a":1,', b"1", b" "),
    ),
    "webhook members": (
        lambda part: _parse_webhook(b'{"id": "e", ' + part + b'"type": 1}'),
        100_000,
        (b'"a":[],', b'"\\u0061":1,'),
    ),
    "webhook header": (_verify, 4_000, (b"t=1,", b"v1=", b"v1,", b" ", b",", b"v1=" + b"a" * 64 + b",", b"=", b"-_")),
    "token file": (_load_token, 100_000, (b"[", b"1", b'"', b"{", b" ", b'{"access_token":')),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_time_grows_linearly_with_the_input(name: str) -> None:
    reader, size, parts = READERS[name]
    for part in parts:

        def work(amount: int, part: bytes = part) -> None:
            reader(part * (amount // len(part)))

        assert grows_linearly(work, size // 4), part


@pytest.mark.parametrize(("power", "linear"), [(1, True), (2, False)])
def test_quadratic_time_is_noticed(power: int, linear: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the work moves."""
    now = [0]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])
    assert grows_linearly(lambda size: now.append(now.pop() + size**power), 1000) is linear


# Memory


@pytest.mark.parametrize(
    ("reader", "part", "size"),
    [
        (_decode, b'{"id": "s", "x": [%s0]}', 300_000),
        (_error, b'{"errors": [%s0]}', 60_000),
        (_parse_webhook, b'{"id": "e", "x": [%s0]}', 300_000),
        (_load_token, b"[%s0]", 300_000),
    ],
    ids=["record", "error", "webhook", "token file"],
)
@pytest.mark.parametrize("inner", [b"[],", b'"a",', b"{},", b"1.5,", b"[[[[]]]],"])
def test_memory_is_at_most_64_times_the_input(
    reader: Callable[[bytes], object], part: bytes, size: int, inner: bytes
) -> None:
    data = part % (inner * (size // len(inner)))
    reader(part % inner)
    tracemalloc.start()
    try:
        reader(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * len(data)


async def test_endless_list_keeps_no_pages() -> None:
    """Only a number for each cursor."""
    cursor = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal cursor
        cursor += 1
        return web.json_response(
            {"data": [{"id": "s1", "x": "y" * 1_000}], "next_cursor": f"{cursor:08}" + "c" * 5_000}
        )

    async with serving(handler) as server, SigningClient(server.origin, TOKEN, retry=RetryPolicy.none()) as client:
        pages = client.signings.list().pages()
        tracemalloc.start()
        for _ in range(300):  # aiohttp and yarl remember the last addresses
            await anext(pages)
        server.requests.clear()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(400):
            await anext(pages)
            server.requests.clear()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        await pages.aclose()
    assert grown < 500_000  # the cursors alone are 2 MB
