"""`client.request`, ``paginate`` and ``stream``: any endpoint, with the guarantees of every call."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
from aiohttp import web

from signing_async import (
    Attempt,
    CannotBeSent,
    DecodeError,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    PdfSource,
    Recipient,
    RequestTimeout,
    Response,
    RetryPolicy,
    Signing,
    SigningClient,
    TransportError,
)
from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf
from tests.servers import Web, answering, echo, serving

QUICK = RetryPolicy(max_attempts=3, base_delay=0.01, settle=0.1)


@attrs.frozen
class Template:
    """A record that the package does not know."""

    id: str
    name: str = ""
    extra: dict[str, Any] = attrs.field(factory=dict)


Respond = Callable[[web.Request], web.StreamResponse]


@asynccontextmanager
async def _responding(*responses: Respond, **options: Any) -> AsyncIterator[tuple[SigningClient, Web]]:
    """A service that gives these responses in turn, and the last one from then on; and a client of it."""
    left = list(responses)

    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        return (left.pop(0) if len(left) > 1 else left[0])(request)

    async with serving(handle) as server, SigningClient(server.origin, "token", retry=QUICK, **options) as client:
        yield client, server


@asynccontextmanager
async def _echoing() -> AsyncIterator[tuple[SigningClient, Web]]:
    async with serving(echo) as server, SigningClient(server.origin, "token") as client:
        yield client, server


def _status(status: int, headers: dict[str, str] | None = None, **body: Any) -> Respond:
    return lambda request: web.json_response(body, status=status, headers=headers)


def _bytes(body: bytes, content_type: str) -> Respond:
    return lambda request: web.Response(body=body, headers={"Content-Type": content_type, "X-Request-Id": "req_1"})


# What is sent


async def test_request_is_sent_as_it_was_given() -> None:
    async with _echoing() as (client, _):
        response = await client.request(
            "post",
            "/api/1.0/signings/{id}/parts/{part}.{kind}",
            path={"id": Template("a/b å"), "part": 7, "kind": "pdf"},
            params={"q": "x&y", "n": 5, "on": True, "many": ["a", "b"], "none": None, "empty": ""},
            headers={"X-Trace": "t", "accept": "application/xml"},
            json={"name": "Öl"},
        )
    sent = response.json()
    assert sent["method"] == "POST"
    assert sent["path"] == ("/api/1.0/signings/a%2Fb%20%C3%A5/parts/7.pdf?q=x%26y&n=5&on=true&many=a&many=b&empty=")
    assert sent["headers"]["authorization"] == "Bearer token"
    assert sent["headers"]["accept"] == "application/xml"
    assert sent["headers"]["x-trace"] == "t"
    assert sent["headers"]["content-type"] == "application/json"
    assert json.loads(sent["body"]) == {"name": "Öl"}


@pytest.mark.parametrize(
    ("options", "content_type", "body"),
    [
        ({}, None, ""),
        ({"json": []}, "application/json", "[]"),
        ({"json": {}, "headers": {"Content-Type": "application/json-patch+json"}}, "application/json-patch+json", "{}"),
        ({"body": b"a,b"}, "application/octet-stream", "a,b"),
        ({"body": bytearray(b"a,b"), "headers": {"content-type": "text/csv"}}, "text/csv", "a,b"),
        ({"body": memoryview(b"")}, None, ""),
    ],
)
async def test_body_and_its_type(options: dict[str, Any], content_type: str | None, body: str) -> None:
    async with _echoing() as (client, _):
        sent = (await client.request("DELETE", "/x", **options)).json()
    assert (sent["headers"].get("content-type"), sent["body"]) == (content_type, body)
    assert sent["headers"]["content-length"] == str(len(body))


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("GETT", "/x"), {}, "method: must be one of GET, HEAD, POST, PUT, PATCH, DELETE, got 'GETT'"),
        *(
            (("GET", template), {}, "the path must begin with one slash and be percent-encoded, without query or")
            for template in (None, "https://evil.example/x", "//evil.example/x", "/x?a=1", "/å", "/x\r\nHost: y")
        ),
        (("GET", "/{id.x}"), {"path": {"id": "1"}}, "and its placeholders must be names: got"),
        (("GET", "/x/%2e%2E"), {}, "the path must have no segments . and .."),
        (("GET", "/{id}"), {}, r"path: must have a value for each of ['id'] of '/{id}', got []"),
        (("GET", "/x"), {"path": {"id": "1"}}, r"path: must have a value for each of [] of '/x', got ['id']"),
        *((("GET", "/{id}"), {"path": {"id": value}}, "path: id: must be an id") for value in ("", "..", None, True)),
        (("GET", "/{id}"), {"path": "1"}, "path: must be a mapping, got str"),
        (("GET", "/x"), {"params": {5: "a"}}, "params: names must be non-empty strings, got 5"),
        (("GET", "/x"), {"params": {"a": {}}}, "params: a: must be a string, a number, true, false, None or a list"),
        *((("GET", "/x"), {"params": {"a": bad}}, "params: a: must be") for bad in ([None], float("nan"), "\ud800")),
        (("GET", "/x"), {"headers": {"a b": "c"}}, "headers: invalid name 'a b'"),
        *((("POST", "/x"), {"headers": {name: "x"}}, "is set by the client") for name in ("authorization", "expect")),
        (("GET", "/x"), {"headers": {"X": "hush\r\n"}}, "headers: X: must be a string of printable ASCII"),
        (("HEAD", "/x"), {"body": b""}, "json, body: a HEAD has no body"),
        (("POST", "/x"), {"json": {}, "body": {"a": "b"}}, "json, body: pass only one of them"),
        (("POST", "/x"), {"json": {"a": float("inf")}}, "json: cannot encode as JSON: Out of range"),
        (("POST", "/x"), {"body": io.BytesIO(b"x")}, "got BytesIO: encode a string, or use json=; wrap a file in a"),
        (("POST", "/x"), {"body": {}}, "body: a form must have a field"),
        (("POST", "/x"), {"body": {5: "x"}}, "body: names of fields must be non-empty strings, got 5"),
        (("POST", "/x"), {"body": {"a": 5}}, "body: a: must be a string or a PdfSource, got int"),
        (("POST", "/x"), {"body": {"a": "b"}, "headers": {"content-type": "x"}}, "the client sets that of a form"),
        (("POST", "/x"), {"repeat": 1}, "repeat: must be true or false, got 1"),
        (("POST", "/x"), {"reconcile": 1}, "reconcile: must be an async function of a Reader, got 1"),
        (("POST", "/x"), {"into": object}, "into: cannot decode JSON to <class 'object'>"),
    ],
)
async def test_bad_argument_is_refused_by_name_before_anything_is_sent(
    arguments: tuple[Any, Any], options: dict[str, Any], said: str
) -> None:
    async with _echoing() as (client, server):
        with pytest.raises(InvalidRequest) as caught:
            await client.request(*arguments, **options)
        assert said in str(caught.value)
        assert "hush" not in str(caught.value)
        assert not server.requests


# Forms


async def test_form_has_texts_and_files_in_their_order(tmp_path: Path) -> None:
    small, large = make_pdf(), make_pdf(1_000_000)
    path = tmp_path / "large.pdf"
    path.write_bytes(large)
    form = {"title": "Öl", "terms": PdfSource(small, 'a"b.pdf'), "note": "", "annex": PdfSource(path), "end": "x"}
    async with _echoing() as (client, _):
        sent = (await client.request("POST", "/api/1.0/templates", body=form)).json()
    boundary = sent["headers"]["content-type"].partition("boundary=")[2].encode()
    disposition, pdf = b"Content-Disposition: form-data; name=", b"\r\nContent-Type: application/pdf"
    assert sent["body"].encode("latin-1").split(b"--" + boundary) == [
        b"",
        b'\r\n%b"title"\r\n\r\n%b\r\n' % (disposition, "Öl".encode()),
        b'\r\n%b"terms"; filename="a%%22b.pdf"%b\r\n\r\n%b\r\n' % (disposition, pdf, small),
        b'\r\n%b"note"\r\n\r\n\r\n' % disposition,
        b'\r\n%b"annex"; filename="large.pdf"%b\r\n\r\n%b\r\n' % (disposition, pdf, large),
        b'\r\n%b"end"\r\n\r\nx\r\n' % disposition,
        b"--\r\n",
    ]
    assert sent["headers"]["content-length"] == str(len(sent["body"]))


async def test_source_that_fails_is_not_sent_and_a_source_alone_is_the_selected_file() -> None:
    """The content of a source is not checked."""

    async def never() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    async def fails() -> AsyncIterator[bytes]:
        raise TimeoutError("the bucket")
        yield b""

    async with _echoing() as (client, server):
        with pytest.raises(InvalidRequest, match="sha256 mismatch"):
            await client.request("POST", "/x", body=PdfSource(b"no PDF", "a.pdf", sha256="0" * 64))
        with pytest.raises(InvalidRequest, match="cannot open"):
            await client.request("POST", "/x", body=PdfSource("/missing/a.pdf"))
        with pytest.raises(RequestTimeout, match="deadline passed before anything was sent") as caught:
            await client.request("POST", "/x", body=PdfSource(never(), "a.pdf"), timeout=0.1)
        assert caught.value.effect == "none"
        with pytest.raises(TimeoutError, match="the bucket"):
            await client.request("POST", "/x", body=PdfSource(fails(), "a.pdf"), timeout=5)
        assert not server.requests
        response = await client.request("POST", "/x", body=PdfSource(b"no PDF", "a.pdf"))
        assert 'name="selected_file"; filename="a.pdf"' in response.json()["body"]


# Responses


async def test_response_shows_status_headers_request_id_and_body() -> None:
    async with _echoing() as (client, server):
        response = await client.request("GET", "/api/1.0/limits")
        head = await client.request("HEAD", "/x")
        assert (head.status, head.bytes, head.headers["x-ratelimit-remaining"]) == (200, b"", "7")
        await client.request("GET", "/x")
        assert len({id(request.transport) for request in server.requests}) == 1
    assert isinstance(response, Response)
    assert (response.status, response.request_id, response.operation) == (200, "req_1", "GET /api/1.0/limits")
    assert response.headers["x-ratelimit-remaining"] == response.headers["X-RATELIMIT-REMAINING"] == "7"
    assert json.loads(response.bytes) == json.loads(response.text) == response.json()
    assert response.json() is not response.json()
    assert repr(response) == f"<Response 200 to GET /api/1.0/limits, {len(response.bytes)} bytes>"


async def test_response_is_decoded_to_records_and_classes(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await client.signings.create(name="Lease", language="EN")
    response = await client.request("GET", "/api/1.0/signings/{id}", path={"id": signing})
    assert response.decode(Signing) == response.decode(Signing)
    assert response.decode(Signing).id == signing.id
    template = response.decode(Template)
    assert (template.id, template.name, template.extra["is_draft"]) == (signing.id, "Lease", True)
    listed = await client.request("GET", "/api/1.0/signings")
    assert listed.decode(list[Signing]) == list((await client.signings.list()).items)
    created = await client.request("POST", "/api/1.0/signings", json={"name": "B", "language": "SV"}, into=Signing)
    assert (await client.signings.get(created)).name == created.name == "B"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ("Öl".encode(), "text/plain"),
        ("Öl".encode("latin-1"), 'text/plain; charset="ISO-8859-1"'),
        ("Öl".encode(), "text/plain; charset=klingon"),
    ],
)
async def test_text_is_decoded_in_the_charset_of_the_response(body: bytes, content_type: str) -> None:
    async with _responding(_bytes(body, content_type)) as (client, _):
        response = await client.request("GET", "/x")
    assert (response.text, response.bytes) == ("Öl", body)


@pytest.mark.parametrize(
    ("method", "repeat", "effect"), [("GET", False, "none"), ("PUT", True, "none"), ("POST", False, "unknown")]
)
async def test_response_that_does_not_fit_is_a_decode_error(method: str, repeat: bool, effect: str) -> None:
    """After a write, the effect has taken place: its error says so, and holds the body."""
    async with _responding(_status(201, id=5, request_id="req_2")) as (client, _):
        response = await client.request(method, "/x", repeat=repeat)
        with pytest.raises(DecodeError, match=r"id: expected a string, got 5 \(HTTP 201, request id req_2\)") as caught:
            response.decode(Template)
        assert (caught.value.effect, caught.value.body) == (effect, {"id": 5, "request_id": "req_2"})
        with pytest.raises(DecodeError) as caught:
            await client.request(method, "/x", repeat=repeat, into=Template)
        assert caught.value.effect == effect
        with pytest.raises(InvalidRequest, match="into: cannot decode JSON to"):
            response.decode(object)


async def test_page_of_html_is_no_response_unless_it_is_asked_for() -> None:
    """Such a page comes from a proxy."""
    async with _responding(_bytes(b"<html>Sign in</html>", "text/html")) as (client, _):
        with pytest.raises(DecodeError, match="an HTML page"):
            await client.request("GET", "/x")
        with pytest.raises(OutcomeUnknown, match="an HTML page"):
            await client.request("POST", "/x")
        with pytest.raises(DecodeError, match="an HTML page"):
            async with client.stream("GET", "/x"):
                raise AssertionError
        for method in ("GET", "POST"):
            assert "Sign in" in (await client.request(method, "/x", headers={"Accept": "text/html"})).text
        async with client.stream("GET", "/x", headers={"Accept": "text/html"}) as response:
            assert b"".join([chunk async for chunk in response]) == b"<html>Sign in</html>"


# Repeating


def _drop(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


FAILURES = {
    "drop": _drop,
    "303": _status(303, {"Location": "/elsewhere"}),
    "429": _status(429, {"Retry-After": "0"}),
    "503": _status(503, code="busy"),
}


@pytest.mark.parametrize(
    ("method", "kind", "options"),
    [
        ("GET", "503", {}),
        ("HEAD", "drop", {}),
        ("POST", "429", {"json": {"a": 1}}),
        *(("POST", kind, {"body": b"abc", "repeat": True}) for kind in ("503", "drop")),
    ],
)
async def test_request_is_repeated_if_it_is_a_reading_or_harmless_or_had_no_effect(
    method: str, kind: str, options: Any
) -> None:
    async with _responding(FAILURES[kind], _status(200)) as (client, server):
        assert (await client.request(method, "/x", **options)).status == 200
    assert len(server.requests) == 2


@pytest.mark.parametrize(("method", "kind"), [("POST", "503"), ("POST", "drop"), ("POST", "303"), ("DELETE", "drop")])
async def test_write_that_may_have_taken_effect_is_not_repeated(method: str, kind: str) -> None:
    async with _responding(FAILURES[kind], _status(200)) as (client, server):
        with pytest.raises(OutcomeUnknown, match=f"{method} /x: the outcome is unknown") as caught:
            await client.request(method, "/x", json={"a": 1})
    assert (caught.value.effect, caught.value.attempts, len(server.requests)) == ("unknown", 1, 1)


# Lists and streams


async def test_paginate_keeps_path_and_params_on_every_page() -> None:
    pages = [_status(200, data=[{"id": f"{number}"}], next_cursor=("1", "2", None)[number]) for number in range(3)]
    async with _responding(*pages) as (client, server):
        params = {"state": "new", "tag": ["a", "b"]}
        pager = client.paginate("/api/{id}/x", into=Template, path={"id": "a/b"}, params=params)
        assert [each.id async for each in pager] == ["0", "1", "2"]
        assert {request.raw_path.partition("&cursor")[0] for request in server.requests} == {
            "/api/a%2Fb/x?state=new&tag=a&tag=b"
        }
        assert [each async for each in client.paginate("/api/x")] == [{"id": "2"}]  # without `into`: dicts


async def test_stream_yields_the_body_in_chunks_with_status_and_headers() -> None:
    data = bytes(range(256)) * 4000
    async with _responding(_bytes(data, "text/csv")) as (client, server):
        async with client.stream("get", "/exports/{id}", path={"id": "a b"}, params={"x": 1}) as response:
            assert (response.status, response.request_id) == (200, "req_1")
            assert response.headers["content-type"] == "text/csv"
            assert repr(response) == "<ResponseStream 200>"
            chunks = [chunk async for chunk in response]
        assert b"".join(chunks) == data
        assert len(chunks) > 1
        assert server.requests[0].raw_path == "/exports/a%20b?x=1"
        assert server.requests[0].headers["Accept"] == "*/*"


async def test_stream_that_breaks_off_is_a_transport_error() -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"
    async with answering(raw) as origin, SigningClient(origin, "token", retry=QUICK) as client:
        with pytest.raises(TransportError, match="GET /x: the response was cut off"):
            async with client.stream("GET", "/x") as response:
                assert [chunk async for chunk in response] == [b"abc"]


# Hooks


async def test_on_attempt_gets_the_headers_of_each_response() -> None:
    """Of errors too; none without a response."""
    attempts: list[Attempt] = []
    limited = _status(429, {"Retry-After": "0", "X-RateLimit-Reset": "9"})
    async with _responding(limited, _status(200, id="u1"), on_attempt=attempts.append) as (client, _):
        await client.me()
    assert [attempt.headers.get("x-ratelimit-reset") for attempt in attempts] == ["9", None]
    assert attempts[1].headers["content-type"].startswith("application/json")
    assert "X-RateLimit-Reset" not in repr(attempts)
    assert len({*attempts}) == 2
    assert pickle.loads(pickle.dumps(attempts)) == attempts


async def test_on_response_gets_the_responses_of_typed_calls_but_not_of_streams(
    sandbox: Sandbox, client: SigningClient
) -> None:
    """The bodies of downloads and streams are not kept; their errors are passed on."""
    responses: list[Response] = []
    watched = client.with_options(on_response=responses.append)
    signing = await watched.signings.create(name="Lease", language="EN")
    assert responses[-1].decode(Signing) == signing
    assert (responses[-1].status, responses[-1].operation) == (201, "signings.create")
    recipient = await watched.recipients.add(signing, email="a@example.com", order=1)
    assert responses[-1].decode(Recipient) == recipient
    with pytest.raises(CannotBeSent):
        await watched.signings.send(signing)
    assert (responses[-1].status, responses[-1].json()["code"]) == (400, "cannot_be_sent")
    sandbox.faults.add("me", "503")
    await watched.me()
    assert [response.status for response in responses[-2:]] == [503, 200]
    responses.clear()
    await client.me()
    async with watched.stream("GET", "/api/1.0/me") as response:
        assert [chunk async for chunk in response]
    assert responses == []
    with pytest.raises(NotFound):
        async with watched.stream("GET", "/api/1.0/signings/missing"):
            raise AssertionError
    assert [response.status for response in responses] == [404]
