"""`client.request`, ``paginate`` and ``stream``: any endpoint, with the guarantees of every call."""

from __future__ import annotations

import json
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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
    Recipient,
    Response,
    RetryPolicy,
    Signing,
    SigningClient,
    TransportError,
)
from signing_async.sandbox import Sandbox
from tests.servers import Web, answering, echo, serving

QUICK = RetryPolicy(max_attempts=3, base_delay=0.01, settle=0.1)
WRITES = ["POST", "DELETE"]


@attrs.frozen
class Template:
    """A record that the package does not know."""

    id: str
    name: str = ""
    extra: dict[str, Any] = attrs.field(factory=dict)


Respond = Callable[[web.Request], web.StreamResponse]


def _responding(*responses: Respond) -> Any:
    """Give these responses in turn, and the last one from then on."""
    left = list(responses)

    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        return (left.pop(0) if len(left) > 1 else left[0])(request)

    return handle


def _status(status: int, headers: dict[str, str] | None = None, **body: Any) -> Respond:
    return lambda request: web.json_response(body, status=status, headers=headers)


# What is sent


async def test_request_is_sent_as_it_was_given() -> None:
    @attrs.frozen
    class Record:
        id: str

    async with serving(echo) as server, SigningClient(server.origin, "token") as client:
        response = await client.request(
            "post",
            "/api/1.0/signings/{id}/parts/{part}.{kind}",
            path={"id": Record("a/b å"), "part": 7, "kind": "pdf"},
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
        (
            {"json": {}, "headers": {"Content-Type": "application/merge-patch+json"}},
            "application/merge-patch+json",
            "{}",
        ),
        ({"body": b"a,b"}, "application/octet-stream", "a,b"),
        ({"body": bytearray(b"a,b"), "headers": {"content-type": "text/csv"}}, "text/csv", "a,b"),
        ({"body": memoryview(b"")}, None, ""),
    ],
)
@pytest.mark.parametrize("method", WRITES)
async def test_body_and_its_type(method: str, options: dict[str, Any], content_type: str | None, body: str) -> None:
    async with serving(echo) as server, SigningClient(server.origin, "token") as client:
        sent = (await client.request(method, "/x", **options)).json()
    assert (sent["headers"].get("content-type"), sent["body"]) == (content_type, body)
    assert sent["headers"]["content-length"] == str(len(body))


# Responses


async def test_response_shows_status_headers_request_id_and_body() -> None:
    async with serving(echo) as server, SigningClient(server.origin, "token") as client:
        response = await client.request("GET", "/api/1.0/limits")
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
    ("body", "content_type", "text"),
    [
        ("Öl".encode(), "text/plain", "Öl"),
        ("Öl".encode("latin-1"), 'text/plain; charset="ISO-8859-1"', "Öl"),
        ("Öl".encode(), "text/plain; charset=klingon", "Öl"),
    ],
)
async def test_text_is_decoded_in_the_charset_of_the_response(body: bytes, content_type: str, text: str) -> None:
    handle = _responding(lambda _: web.Response(body=body, headers={"Content-Type": content_type}))
    async with serving(handle) as server, SigningClient(server.origin, "token") as client:
        response = await client.request("GET", "/x")
    assert (response.text, response.bytes) == (text, body)


async def test_head_has_the_headers_of_a_get() -> None:
    async with serving(echo) as server, SigningClient(server.origin, "token") as client:
        response = await client.request("HEAD", "/x")
        assert (response.status, response.bytes, response.headers["x-ratelimit-remaining"]) == (200, b"", "7")
        await client.request("GET", "/x")
        assert len({id(request.transport) for request in server.requests}) == 1


@pytest.mark.parametrize(
    ("method", "repeat", "effect"), [("GET", False, "none"), ("PUT", True, "none"), ("POST", False, "unknown")]
)
async def test_response_that_does_not_fit_is_a_decode_error(method: str, repeat: bool, effect: str) -> None:
    """After a write, the effect has taken place: its error says so, and holds the body."""
    handle = _responding(_status(201, id=5, request_id="req_2"))
    async with serving(handle) as server, SigningClient(server.origin, "token") as client:
        response = await client.request(method, "/x", repeat=repeat)
        with pytest.raises(DecodeError, match=r"id: expected a string, got 5 \(HTTP 201, request id req_2\)") as caught:
            response.decode(Template)
        assert (caught.value.effect, caught.value.body) == (effect, {"id": 5, "request_id": "req_2"})
        with pytest.raises(DecodeError) as caught:
            await client.request(method, "/x", repeat=repeat, into=Template)
        assert caught.value.effect == effect
        with pytest.raises(InvalidRequest, match="into: cannot decode JSON to"):
            response.decode(object)


# Repeating


def _drop(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


FAILURES = {
    "drop": _drop,
    "303": _status(303, {"Location": "/elsewhere"}),
    "429": _status(429, {"Retry-After": "0"}),
    **{status: _status(int(status), code="busy") for status in ("500", "503", "504")},
}


@asynccontextmanager
async def _failing(kind: str) -> AsyncIterator[tuple[SigningClient, Web]]:
    """A service, and a client of it, whose first request fails."""
    handle = _responding(FAILURES[kind], _status(200, id="t1"))
    async with serving(handle) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
        yield client, server


@pytest.mark.parametrize(
    ("method", "kind", "options"),
    [
        *(("GET", kind, {}) for kind in ("503", "drop", "429")),
        ("HEAD", "drop", {}),
        *((method, "429", {"json": {"a": 1}}) for method in WRITES),
        *(("POST", kind, {"body": b"abc", "repeat": True}) for kind in ("503", "drop")),
    ],
)
async def test_request_is_repeated_if_it_is_a_reading_or_harmless_or_had_no_effect(
    method: str, kind: str, options: Any
) -> None:
    async with _failing(kind) as (client, server):
        assert (await client.request(method, "/x", **options)).status == 200
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("method", "kind"),
    [("POST", "500"), ("POST", "504"), ("POST", "drop"), ("POST", "303"), ("DELETE", "drop"), ("PUT", "drop")],
)
async def test_write_that_may_have_taken_effect_is_not_repeated(method: str, kind: str) -> None:
    async with _failing(kind) as (client, server):
        with pytest.raises(OutcomeUnknown, match=f"{method} /x: the outcome is unknown") as caught:
            await client.request(method, "/x", json={"a": 1})
    assert (caught.value.effect, caught.value.attempts, len(server.requests)) == ("unknown", 1, 1)


async def test_write_is_repeated_if_nothing_was_sent() -> None:
    attempts: list[Attempt] = []
    async with SigningClient("http://127.0.0.1:9", "token", retry=QUICK, on_attempt=attempts.append) as client:
        with pytest.raises(TransportError, match="could not connect") as caught:
            await client.request("POST", "/x")
    assert (caught.value.effect, len(attempts)) == ("none", 3)


# Lists


async def test_paginate_keeps_path_and_params_on_every_page() -> None:
    cursors = ["1", "2", None]
    handle = _responding(*(_status(200, data=[{"id": f"{n}"}], next_cursor=one) for n, one in enumerate(cursors)))
    async with serving(handle) as server, SigningClient(server.origin, "token") as client:
        pager = client.paginate(
            "/api/{id}/x", into=Template, path={"id": "a/b"}, params={"state": "new", "tag": ["a", "b"]}
        )
        assert [each.id async for each in pager] == ["0", "1", "2"]
        assert {request.raw_path.partition("&cursor")[0] for request in server.requests} == {
            "/api/a%2Fb/x?state=new&tag=a&tag=b"
        }


# Streams


async def test_stream_yields_the_body_in_chunks_with_status_and_headers() -> None:
    data = bytes(range(256)) * 4000
    handle = _responding(lambda _: web.Response(body=data, content_type="text/csv", headers={"X-Request-Id": "req_1"}))
    async with serving(handle) as server, SigningClient(server.origin, "token") as client:
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
    async with (
        serving(_responding(limited, _status(200, id="u1"))) as server,
        SigningClient(server.origin, "token", retry=QUICK, on_attempt=attempts.append) as client,
    ):
        await client.me()
    assert [attempt.headers.get("x-ratelimit-reset") for attempt in attempts] == ["9", None]
    assert attempts[1].headers["content-type"].startswith("application/json")
    assert "X-RateLimit-Reset" not in repr(attempts)
    assert len({*attempts}) == 2
    assert pickle.loads(pickle.dumps(attempts)) == attempts


async def test_on_response_gets_the_responses_of_typed_calls(sandbox: Sandbox, client: SigningClient) -> None:
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
    count = len(responses)
    await client.me()
    assert len(responses) == count


async def test_on_response_is_not_called_for_downloads_and_streams(sandbox: Sandbox, client: SigningClient) -> None:
    """Their bodies are not kept; their errors are passed on."""
    responses: list[Response] = []
    watched = client.with_options(on_response=responses.append)
    async with watched.stream("GET", "/api/1.0/me") as response:
        assert [chunk async for chunk in response]
    assert responses == []
    with pytest.raises(NotFound):
        async with watched.stream("GET", "/api/1.0/signings/missing"):
            raise AssertionError
    assert [response.status for response in responses] == [404]


async def test_page_of_html_is_no_response_unless_it_is_asked_for() -> None:
    """A proxy responded."""
    handle = _responding(lambda _: web.Response(text="<html>Sign in</html>", content_type="text/html"))
    async with serving(handle) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
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
