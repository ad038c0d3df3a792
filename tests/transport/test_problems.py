"""An error response of any shape becomes an exception that says what the service said, and holds no secret."""

from __future__ import annotations

import json
import pickle
from collections.abc import Awaitable, Mapping
from typing import Any

import pytest
from aiohttp import web

from signing_async import (
    APIError,
    Assumptions,
    BadRequest,
    CannotBeSent,
    NotFound,
    RetryPolicy,
    SigningClient,
    Unauthorized,
)
from signing_async.sandbox import Profile, Sandbox
from tests.servers import answering, serving

TOKEN = "secret/token+0123456789"


async def _error(
    body: object, status: int = 400, *, headers: Mapping[str, str] = {}, reason: str = "Bad Request"
) -> APIError:
    """The exception for a body: bytes as they are, anything else as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
    raw = "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data
    async with answering(raw) as origin, SigningClient(origin, TOKEN, retry=RetryPolicy.none()) as client:
        with pytest.raises(APIError) as caught:
            await client.signings.create(name="Lease", language="EN")
    return caught.value


_BAD = "The language must be EN or SV."


@pytest.mark.parametrize(
    ("body", "code", "message", "messages"),
    [
        ({"code": "invalid", "message": "No."}, "invalid", "No.", {}),
        ({"error": "invalid", "error_description": "No."}, "invalid", "No.", {}),
        ({"error": "No way."}, None, "No way.", {}),
        ({"code": True, "message": 5}, None, "5", {}),
        ({"statusCode": 400, "message": ["a", "b"], "error": "Bad Request"}, None, "Bad Request", {"": ["a", "b"]}),
        # RFC 9457
        (
            {
                "type": "https://example.com/problems/invalid-language",
                "title": "Invalid",
                "detail": "No.",
                "status": 400,
                "errors": [{"pointer": "#/language", "detail": _BAD}],
            },
            "invalid-language",
            "No.",
            {"language": [_BAD]},
        ),
        # JSON:API
        (
            {"errors": [{"code": "invalid", "title": "No.", "source": {"pointer": "/data/attributes/name"}}]},
            "invalid",
            "No.",
            {"data.attributes.name": ["No."]},
        ),
        # Laravel
        (
            {"message": "No.", "errors": {"name": ["required"], "message": ["too long"]}},
            None,
            "No.",
            {"name": ["required"], "message": ["too long"]},
        ),
        # Django REST framework
        ({"language": [_BAD], "name": []}, None, _BAD, {"language": [_BAD]}),
        # FastAPI
        (
            {"detail": [{"loc": ["body", "recipients", 0, "email"], "msg": "bad", "type": "value_error"}]},
            None,
            "bad",
            {"recipients.0.email": ["bad"]},
        ),
        # lists
        ({"errors": [{"field": "name", "messages": ["a", "b"]}]}, None, "a", {"name": ["a", "b"]}),
        ({"error": {"message": "No.", "details": [{"field": "name", "message": "a"}]}}, None, "No.", {"name": ["a"]}),
        # nothing to go by
        ({}, None, "Bad Request", {}),
        ({"errors": [[[[[[["deep"]]]]]]]}, None, "Bad Request", {}),
        ("No.", None, "No.", {}),
        # not JSON
        (b"No way.\nReally.", None, "No way. Really.", {}),
        (b"<html><title></title><h1>No &amp; no</h1></html>", None, "No & no", {}),
        (b"\x89PNG\xff\xfe\x00", None, "Bad Request", {}),
        (b"[" * 100_000, None, "[" * 500, {}),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_code_message_and_field_messages_are_found_in_every_shape(
    body: object, code: str | None, message: str, messages: dict[str, list[str]]
) -> None:
    error = await _error(body)
    assert (error.code, error.message, error.messages) == (code, message, messages)
    assert type(error) is BadRequest
    assert error.status == 400
    assert str(error).startswith("HTTP 400 on signings.create: ")


@pytest.mark.parametrize(
    "body",
    [
        {"code": "cannot_be_sent", "message": "No recipients."},
        {"code": 400, "error": "cannotBeSent"},
        {"type": "https://example.com/problems/cannot-be-sent", "title": "Cannot be sent"},
        {"errors": [{"code": "no_recipient"}, {"code": "cannot_be_sent"}]},
        {"errors": {"cannot_be_sent": ["No recipients."]}},
        b"cannot_be_sent\n",
    ],
    ids=str,
)
async def test_cannot_be_sent_is_recognized_wherever_the_response_holds_it(body: object) -> None:
    error = await _error(body)
    assert type(error) is CannotBeSent
    assert error.code == "cannot_be_sent"
    assert "recipient" in str(error) or "Cannot be sent" in str(error)
    assert str(error).endswith("(code cannot_be_sent)")


async def test_sentence_with_the_words_is_not_the_code_cannot_be_sent() -> None:
    for body in ({"message": "A signing cannot_be_sent."}, {"code": "cannot_be_sent_yet"}, b"<p>cannot_be_sent so</p>"):
        assert type(await _error(body)) is BadRequest


async def test_text_names_status_operation_message_code_and_request_id_once() -> None:
    body = {"code": "invalid", "message": "The data is invalid.", "errors": {"language": [_BAD], "": ["Also this."]}}
    assert str(await _error(body, headers={"X-Request-Id": "req-1"})) == (
        "HTTP 400 on signings.create: The data is invalid; language: The language must be EN or SV; Also this"
        " (code invalid, request id req-1)"
    )
    assert str(await _error([{"message": _BAD, "field": "language"}])) == (
        "HTTP 400 on signings.create: language: The language must be EN or SV"
    )
    failed, refused = await _error(b"", 503, reason=""), await _error(b"", 418, reason="")
    assert str(failed) == "HTTP 503 on signings.create: the service failed (no retry is allowed)"
    assert str(refused) == "HTTP 418 on signings.create: the service refused the request"
    assert "redirects this request; redirects of writes are not followed" in str(await _error(b"", 302, reason="Found"))


# Secrets


@pytest.mark.parametrize(
    "body",
    [
        {"message": f"The token {TOKEN} is expired", "code": TOKEN, "request_id": TOKEN},
        {"errors": {TOKEN: [TOKEN]}, "error": TOKEN},
        {"message": "y" * 482 + TOKEN},
        f"<title>{TOKEN}</title>".encode(),
        ("{" + " " * 4_080 + TOKEN).encode(),
        json.dumps({"message": TOKEN}).replace("/", "\\/").encode(),
        TOKEN.encode("utf-16-le") * 2,
        b"\xff" + TOKEN.encode(),
    ],
    ids=lambda body: str(body)[:40],
)
async def test_echoed_secret_is_redacted_in_every_text_attribute_and_pickle(body: object) -> None:
    """``body`` alone is as received."""
    error = await _error(body, 401, reason=f"No {TOKEN}", headers={"X-Request-Id": TOKEN})
    attributes = {name: value for name, value in vars(error).items() if name != "body"}
    pickled = pickle.dumps(error)
    for shown in (str(error), repr(error), repr(attributes), repr(error.args), repr(vars(pickle.loads(pickled)))):
        assert TOKEN not in shown
        assert TOKEN[:16] not in shown
    assert TOKEN.encode() not in pickled
    assert TOKEN.encode("utf-16-le") not in pickled
    assert error.body == (body if isinstance(body, bytes) else json.dumps(body).encode())


# Over real sockets


@pytest.mark.parametrize(
    ("error_shape", "request_ids"), [("flat", "both"), ("nested", "header"), ("rfc9457", "body"), ("list", "none")]
)
async def test_error_shapes_of_the_sandbox_are_read_with_default_assumptions(
    error_shape: Any, request_ids: Any
) -> None:
    profile = Profile(error_shape=error_shape, request_id=request_ids, required_signing_fields=("message",))
    async with (
        Sandbox(profile=profile) as sandbox,
        SigningClient(sandbox.base_url, sandbox.access_token(), retry=RetryPolicy.none()) as client,
        SigningClient(sandbox.base_url, "invalid-token") as other,
    ):
        signing = await client.signings.create(name="Lease", language="EN", message="Hello")
        refused: dict[type[APIError], Awaitable[object]] = {
            BadRequest: client.signings.create(name="Lease", language="EN"),
            CannotBeSent: client.signings.send(signing),
            NotFound: client.signings.get("no-such-signing"),
            Unauthorized: other.me(),
        }
        for kind, call in refused.items():
            with pytest.raises(kind) as caught:
                await call
            error = caught.value
            assert f"HTTP {error.status} on {error.operation}: " in str(error)
            assert f"code {error.code}" in str(error)
            assert kind is not BadRequest or list(error.messages) == ["message"]
            assert bool(error.request_id) == (request_ids != "none")
            assert request_ids == "none" or f"request id {error.request_id}" in str(error)


async def test_replaced_assumptions_say_where_an_error_holds_its_parts() -> None:
    fault = {
        "ref": "E17",
        "says": "No way.",
        "per": [{"field": "name", "reason": "too short"}, {"loc": ["documents", 2], "reason": "too long"}],
    }

    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"fault": fault, "trace": "t-1", "code": "other", "message": "Other."}, status=400)

    paths = {"code": "fault.ref", "message": "fault.says", "fields": "fault.per"}
    assumptions = Assumptions(request_id_paths="trace", error_paths=paths)
    async with serving(handler) as server, SigningClient(server.origin, TOKEN, assumptions=assumptions) as client:
        with pytest.raises(BadRequest) as caught:
            await client.signings.create(name="Lease", language="EN")
    error = caught.value
    assert (error.code, error.message, error.request_id) == ("E17", "No way.", "t-1")
    assert error.messages == {"name": ["too short"], "documents.2": ["too long"]}


async def test_error_keeps_status_and_start_of_a_body_that_is_cut_off() -> None:
    raw = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 500\r\nX-Request-Id: r\r\n\r\nNo recip"
    async with answering(raw) as origin, SigningClient(origin, TOKEN) as client:
        with pytest.raises(BadRequest, match=r"^HTTP 400 on me: No recip \(request id r\)$"):
            await client.me()
