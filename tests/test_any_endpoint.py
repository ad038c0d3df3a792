"""`client.request`, ``paginate`` and ``stream``: any endpoint, with the guarantees of every call."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from typing import Any

import aiohttp
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
from tests.servers import answering, echo, serving, talking

QUICK = RetryPolicy(max_attempts=3, base_delay=0.01, settle=0.1)
WRITES = ["POST", "DELETE"]


@attrs.frozen
class Template:
    """A record that the package does not know."""

    id: str
    name: str = ""
    extra: dict[str, Any] = attrs.field(factory=dict)


def _responding(*responses: Callable[[], web.StreamResponse]) -> Any:
    """Give these responses in turn, and the last one from then on."""
    left = list(responses)

    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        return (left.pop(0) if len(left) > 1 else left[0])()

    return handle


def _status(status: int, **body: Any) -> Callable[[], web.Response]:
    return lambda: web.json_response(body, status=status)


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
    handle = _responding(lambda: web.Response(body=body, headers={"Content-Type": content_type}))
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

_DROP = "drop"


def _failing(kind: str, then: int = 200) -> Any:
    """The first request fails."""
    count = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal count
        await request.read()
        count += 1
        if count > 1:
            return web.json_response({"id": "t1"}, status=then)
        if kind == _DROP:
            assert request.transport is not None
            request.transport.close()
        if kind == "429":
            return web.Response(status=429, headers={"Retry-After": "0"})
        if kind == "303":
            return web.Response(status=303, headers={"Location": "/elsewhere"})
        return web.json_response({"code": "busy"}, status=int(kind) if kind.isdecimal() else 200)

    return handle


AMBIGUOUS = ["500", "503", "504", _DROP]


@pytest.mark.parametrize(
    ("method", "kind", "options"),
    [
        *(("GET", kind, {}) for kind in [*AMBIGUOUS, "429"]),
        *(("HEAD", kind, {}) for kind in ["503", _DROP, "429"]),
        *((method, "429", {"json": {"a": 1}}) for method in WRITES),
        *(("POST", kind, {"body": b"abc", "repeat": True}) for kind in [*AMBIGUOUS, "429"]),
        *((method, _DROP, {"repeat": True}) for method in WRITES[1:]),
    ],
)
async def test_request_is_repeated_if_it_is_a_reading_or_harmless_or_had_no_effect(
    method: str, kind: str, options: Any
) -> None:
    async with serving(_failing(kind)) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
        assert (await client.request(method, "/x", **options)).status == 200
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("method", "kind"), [*(("POST", kind) for kind in [*AMBIGUOUS, "303"]), *((method, _DROP) for method in WRITES[1:])]
)
async def test_write_that_may_have_taken_effect_is_not_repeated(method: str, kind: str) -> None:
    async with serving(_failing(kind)) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
        with pytest.raises(OutcomeUnknown, match=f"{method} /x: the outcome is unknown") as caught:
            await client.request(method, "/x", json={"a": 1})
    assert (caught.value.effect, caught.value.attempts, len(server.requests)) == ("unknown", 1, 1)


@pytest.mark.parametrize("method", WRITES)
async def test_write_is_repeated_if_nothing_was_sent(method: str, unused_tcp_port: int) -> None:
    attempts: list[Attempt] = []
    async with SigningClient(
        f"http://127.0.0.1:{unused_tcp_port}", "token", retry=QUICK, on_attempt=attempts.append
    ) as client:
        with pytest.raises(TransportError, match="could not connect") as caught:
            await client.request(method, "/x")
    assert (caught.value.effect, len(attempts)) == ("none", 3)


@pytest.mark.parametrize("method", WRITES)
async def test_write_on_a_connection_that_was_closed_is_not_repeated_behind_the_clients_back(method: str) -> None:
    """aiohttp repeats a PUT or DELETE by itself: it may have been carried out."""
    received: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            received.append(head.split()[0])
            if received[-1] != b"GET":
                return
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async with talking(talk) as origin, SigningClient(origin, "token", retry=QUICK) as client:
        await client.request("GET", "/x")
        with pytest.raises(OutcomeUnknown):
            await client.request(method, "/x")
    assert received == [b"GET", method.encode()]


# Lists


async def test_paginate_keeps_path_and_params_on_every_page() -> None:
    async def handle(request: web.Request) -> web.Response:
        number = int(request.query.get("cursor", "0"))
        following = None if number == 2 else str(number + 1)
        return web.json_response({"data": [{"id": f"{number}"}], "next_cursor": following})

    async with serving(handle) as server, SigningClient(server.origin, "token") as client:
        pager = client.paginate(
            "/api/{id}/x", into=Template, path={"id": "a/b"}, params={"state": "new", "tag": ["a", "b"]}
        )
        assert [each.id async for each in pager] == ["0", "1", "2"]
        assert {request.raw_path.partition("&cursor")[0] for request in server.requests} == {
            "/api/a%2Fb/x?state=new&tag=a&tag=b"
        }


# Streams


def _sending(data: bytes, *, pause: asyncio.Event | None = None) -> Any:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"X-Request-Id": "req_1", "Content-Type": "text/csv"})
        await response.prepare(request)
        for at in range(0, len(data), 65536):
            await response.write(data[at : at + 65536])
            if pause is not None:
                await pause.wait()
        return response

    return handle


async def _read_stream(client: SigningClient) -> bytes:
    async with client.stream("GET", "/x") as response:
        return b"".join([chunk async for chunk in response])


async def test_stream_yields_the_body_in_chunks_with_status_and_headers() -> None:
    data = bytes(range(256)) * 4000
    async with serving(_sending(data)) as server, SigningClient(server.origin, "token") as client:
        async with client.stream("get", "/exports/{id}", path={"id": "a b"}, params={"x": 1}) as response:
            assert (response.status, response.request_id, response.headers["content-type"]) == (
                200,
                "req_1",
                "text/csv",
            )
            assert repr(response) == "<ResponseStream 200>"
            chunks = [chunk async for chunk in response]
        assert b"".join(chunks) == data
        assert len(chunks) > 1
        assert server.requests[0].raw_path == "/exports/a%20b?x=1"
        assert server.requests[0].headers["Accept"] == "*/*"


async def test_stream_that_is_left_early_closes_its_connection() -> None:
    async with serving(_sending(bytes(5_000_000))) as server, aiohttp.ClientSession() as session:
        client = SigningClient(server.origin, "token", session=session)
        assert isinstance(session.connector, aiohttp.TCPConnector)
        for leave in ("before", "early", "error"):
            try:
                async with client.stream("GET", "/x") as response:
                    if leave != "before":
                        async for _ in response:
                            if leave == "error":
                                raise LookupError
                            break
            except LookupError:
                assert leave == "error"
            assert not session.connector._acquired
            assert not session.connector._conns


async def test_stream_that_breaks_off_is_a_transport_error() -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"
    async with answering(raw) as origin, SigningClient(origin, "token", retry=QUICK) as client:
        with pytest.raises(TransportError, match="GET /x: the response was cut off"):
            await _read_stream(client)


# Hooks


async def test_on_attempt_gets_the_headers_of_each_response() -> None:
    """Of errors too; none without a response."""
    attempts: list[Attempt] = []

    def limited() -> web.Response:
        return web.Response(status=429, headers={"Retry-After": "0", "X-RateLimit-Reset": "9"})

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


def _page() -> web.Response:
    return web.Response(text="<html>Sign in</html>", content_type="text/html")


async def test_page_of_html_is_no_response_unless_it_is_asked_for() -> None:
    """A proxy responded."""
    async with serving(_responding(_page)) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
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
