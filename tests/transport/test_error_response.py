"""An error answer of any shape becomes an exception that says what the service said, and holds no secret."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web
from hypothesis import example, given, settings
from hypothesis import strategies as st

from signing_async import (
    APIError,
    Assumptions,
    BadRequest,
    CannotBeSent,
    DocumentRejected,
    Forbidden,
    NotFound,
    NotYetSigned,
    RateLimited,
    RetryPolicy,
    ServerError,
    SigningClient,
    Unauthorized,
)
from signing_async.sandbox import Profile, Sandbox
from signing_async.transport.error_response import error_from, look_up, record, request_id
from tests.pdfs import make_pdf
from tests.servers import answering, serving

TOKEN = "secret/token+0123456789"


def _error(
    body: object,
    status: int = 400,
    *,
    headers: Mapping[str, str] = {},
    reason: str = "Bad Request",
    secrets: tuple[str, ...] = (TOKEN,),
) -> APIError:
    """The exception for a body: bytes as they are, anything else as JSON."""
    return error_from(
        status,
        headers,
        body if isinstance(body, bytes) else json.dumps(body).encode(),
        reason=reason,
        operation="signings.create",
        not_found=NotFound,
        retry_after=None,
        secrets=secrets,
        assumptions=Assumptions(),
    )


_BAD = "The language must be EN or SV."


@pytest.mark.parametrize(
    ("body", "code", "message", "messages"),
    [
        ({"code": "invalid", "message": "No."}, "invalid", "No.", {}),
        ({"error": {"code": "invalid", "message": "No."}}, "invalid", "No.", {}),
        ({"error": {"type": "invalid", "detail": "No."}}, "invalid", "No.", {}),
        ({"error": {"code": 400, "message": "No.", "status": "INVALID"}}, "INVALID", "No.", {}),
        ({"error": "invalid", "error_description": "No."}, "invalid", "No.", {}),
        ({"error": "No way."}, None, "No way.", {}),
        ({"error": "invalid"}, "invalid", "Bad Request", {}),
        ({"error_code": 17, "error_message": "No."}, "17", "No.", {}),
        ({"code": True, "message": 5}, None, "5", {}),
        ({"detail": {"code": "invalid", "message": "No."}}, "invalid", "No.", {}),
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
        ({"type": "about:blank", "title": "Invalid", "status": 400}, None, "Invalid", {}),
        ({"type": "urn:problem:invalid", "title": "Invalid"}, "invalid", "Invalid", {}),
        ({"title": "No.", "invalid-params": [{"name": "language", "reason": _BAD}]}, None, "No.", {"language": [_BAD]}),
        # JSON:API
        (
            {"errors": [{"code": "invalid", "title": "No.", "source": {"pointer": "/data/attributes/name"}}]},
            "invalid",
            "No.",
            {"data.attributes.name": ["No."]},
        ),
        ({"errors": [{"detail": "No.", "source": {"parameter": "limit"}}]}, None, "No.", {"limit": ["No."]}),
        ({"errors": [{"detail": "No.", "source": {}}]}, None, "No.", {"": ["No."]}),
        # Laravel
        ({"message": "No.", "errors": {"language": [_BAD]}}, None, "No.", {"language": [_BAD]}),
        (
            {"message": "No.", "errors": {"name": ["required"], "message": ["too long"]}},
            None,
            "No.",
            {"name": ["required"], "message": ["too long"]},
        ),
        (
            {"errors": {"name": "required", "message": "too long"}},
            None,
            "required",
            {"name": ["required"], "message": ["too long"]},
        ),
        ({"errors": {"a": {"0": {"email": ["bad"]}}}}, None, "bad", {"a.0.email": ["bad"]}),
        ({"errors": {"language": {"code": "x", "message": _BAD}}}, None, _BAD, {"language": [_BAD]}),
        # Django REST framework
        ({"language": [_BAD], "name": []}, None, _BAD, {"language": [_BAD]}),
        # FastAPI
        (
            {"detail": [{"loc": ["body", "recipients", 0, "email"], "msg": "bad", "type": "value_error"}]},
            None,
            "bad",
            {"recipients.0.email": ["bad"]},
        ),
        ({"detail": "No."}, None, "No.", {}),
        # lists
        ([{"code": "invalid", "message": "No.", "field": "language"}], "invalid", "No.", {"language": ["No."]}),
        (["a", "b"], None, "a", {"": ["a", "b"]}),
        ({"errors": ["a", 2, None, True]}, None, "a", {"": ["a", "2", "True"]}),
        ({"errors": [{"field": "name", "messages": ["a", "b"]}]}, None, "a", {"name": ["a", "b"]}),
        ({"errors": [{"message": ["a"]}]}, None, "a", {"message": ["a"]}),
        ({"errors": [{"language": ["a"]}]}, None, "a", {"language": ["a"]}),
        ({"error": {"message": "No.", "details": [{"field": "name", "message": "a"}]}}, None, "No.", {"name": ["a"]}),
        ({"violations": [{"propertyPath": "name", "title": "a"}]}, None, "a", {"name": ["a"]}),
        ({"errors": [{"path": ["a", 0], "message": "b"}]}, None, "b", {"a.0": ["b"]}),
        # nothing to go by
        ({}, None, "Bad Request", {}),
        ([], None, "Bad Request", {}),
        (None, None, "Bad Request", {}),
        (17, None, "Bad Request", {}),
        ({"errors": []}, None, "Bad Request", {}),
        ({"errors": [[[[[[["deep"]]]]]]]}, None, "Bad Request", {}),
        ({"errors": {"a": {"b": {"c": {"d": {"e": {"f": "deep"}}}}}}}, None, "Bad Request", {}),
        ({"message": " "}, None, "Bad Request", {}),
        ("No.", None, "No.", {}),
        # not JSON
        (b"", None, "Bad Request", {}),
        (b"No way.\nReally.", None, "No way. Really.", {}),
        (b"<html><TITLE lang=en>400 Bad\n Request</TITLE><p>x</p>", None, "400 Bad Request", {}),
        (b"<html><title></title><h1>No &amp; no</h1></html>", None, "No & no", {}),
        ("<p>Begäran är fel</p>".encode("latin-1"), None, "Bad Request", {}),
        (("å" * 40_000).encode()[:65_535], None, "å" * 500, {}),
        (b"\x89PNG\xff\xfe\x00", None, "Bad Request", {}),
        (b"\x00\x01", None, "Bad Request", {}),
        (b"[" * 100_000, None, "[" * 500, {}),
        (b"<" * 60_000, None, "<" * 500, {}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_every_shape_is_read(body: object, code: str | None, message: str, messages: dict[str, list[str]]) -> None:
    """Code, message and messages per field are found, whichever convention the service follows."""
    error = _error(body)
    assert (error.code, error.message, error.messages) == (code, message, messages)
    assert type(error) is BadRequest
    assert error.status == 400
    assert str(error).startswith("HTTP 400 on signings.create: ")


@pytest.mark.parametrize(
    "body",
    [
        {"code": "cannot_be_sent", "message": "No recipients."},
        {"code": "CANNOT_BE_SENT"},
        {"code": 400, "error": "cannotBeSent"},
        {"error": {"code": "cannot_be_sent"}},
        {"error": "cannot_be_sent"},
        {"message": "cannot_be_sent"},
        {"detail": {"code": "cannot_be_sent"}},
        {"detail": "cannot_be_sent"},
        {"type": "https://example.com/problems/cannot-be-sent", "title": "Cannot be sent"},
        {"type": "https://example.com/problems#cannot_be_sent"},
        {"type": "urn:problem:cannot_be_sent"},
        {"errors": [{"code": "no_recipient"}, {"code": "cannot_be_sent"}]},
        {"errors": ["cannot_be_sent"]},
        {"errors": {"signing": ["cannot_be_sent"]}},
        {"errors": {"cannot_be_sent": ["No recipients."]}},
        [{"code": "cannot_be_sent"}],
        "cannot_be_sent",
        b"cannot_be_sent\n",
    ],
    ids=str,
)
def test_cannot_be_sent_is_recognised(body: object) -> None:
    """The one code that the specification names has its own class, wherever the answer holds it."""
    error = _error(body)
    assert type(error) is CannotBeSent
    assert error.code == "cannot_be_sent"
    assert "recipient" in str(error) or "Cannot be sent" in str(error)
    assert str(error).endswith("(code cannot_be_sent)")


@pytest.mark.parametrize(
    "body",
    [
        {"code": "invalid", "message": "A signing cannot_be_sent."},
        {"code": "cannot_be_sent_yet"},
        {"a": {"b": {"c": {"d": {"e": {"f": "cannot_be_sent"}}}}}},
        {"code": "x" * 1000 + "/cannot_be_sent"},
        b"<p>cannot_be_sent or so</p>",
    ],
    ids=lambda body: str(body)[:50],
)
def test_what_only_mentions_it_is_not_cannot_be_sent(body: object) -> None:
    """A sentence that holds the words is not the code."""
    assert type(_error(body)) is BadRequest


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (302, APIError),
        (304, APIError),
        (400, BadRequest),
        (401, Unauthorized),
        (402, APIError),
        (403, Forbidden),
        (404, NotFound),
        (409, APIError),
        (418, APIError),
        (422, DocumentRejected),
        (429, RateLimited),
        (500, ServerError),
        (502, ServerError),
        (599, ServerError),
    ],
)
def test_every_status_has_its_class(status: int, kind: type[APIError]) -> None:
    """The status decides; the code matters for 400 alone."""
    error = _error({"code": "cannot_be_sent" if status != 400 else "x"}, status)
    assert type(error) is kind
    assert error.status == status


def test_the_text_is_a_sentence_to_act_on() -> None:
    """Status, operation, what the service said, code and request id; nothing twice; full stops do not pile up."""
    body = {"code": "invalid", "message": "The data is invalid.", "errors": {"language": [_BAD], "": ["Also this."]}}
    assert str(_error(body, headers={"X-Request-Id": "req-1"})) == (
        "HTTP 400 on signings.create: The data is invalid; language: The language must be EN or SV; Also this"
        " (code invalid, request id req-1)"
    )
    assert str(_error([{"message": _BAD, "field": "language"}])) == (
        "HTTP 400 on signings.create: language: The language must be EN or SV"
    )
    assert str(_error(b"", 503, reason="")) == "HTTP 503 on signings.create: the service failed"
    assert str(_error(b"", 418, reason="")) == "HTTP 418 on signings.create: the service refused the request"
    assert "redirects this request, which is not followed" in str(_error(b"", 302, reason="Found"))


def test_floods_are_cut() -> None:
    """However much the service says, an error stays short: so many messages, so long a text."""
    error = _error(
        {"message": "x" * 10_000, "code": "c" * 10_000, "errors": {str(n): ["y" * 10_000] for n in range(99)}}
    )
    assert len(error.messages) == 50
    assert {len(text) for texts in error.messages.values() for text in texts} == {500}
    assert len(error.message) == len(error.code or "") == 500
    assert len(_error({"errors": {"f": ["y"] * 999}}).messages["f"]) == 50


def test_no_line_and_no_terminal_is_broken() -> None:
    """Line breaks, escapes and marks that turn the direction of writing do not get into a log."""
    error = _error({"message": "a\r\nb\x1b[31mc\u202ed\x00", "code": "x\ny", "errors": {"f\n": ["g\th"]}})
    assert error.message == "a b [31mc d"
    assert error.messages == {"f": ["g h"]}
    assert "\n" not in str(error)
    assert str(error).isprintable()


# Secrets


@pytest.mark.parametrize(
    "body",
    [
        {"message": f"The token {TOKEN} is expired", "code": TOKEN, "request_id": TOKEN},
        {"errors": {TOKEN: [TOKEN]}, "error": TOKEN},
        {"errors": [{"field": f"a.{TOKEN}", "message": f"x{TOKEN}x"}]},
        {"detail": [{"loc": ["header", TOKEN], "msg": "bad", "input": TOKEN}]},
        {"type": f"https://x/?t={TOKEN}", "title": "x"},
        {"message": "y" * 482 + TOKEN},
        {"request_id": "y" * 482 + TOKEN},
        f"<title>{TOKEN}</title>".encode(),
        b"z" * 482 + TOKEN.encode(),
        ("{" + " " * 4_080 + TOKEN).encode(),
        json.dumps({"message": TOKEN}).replace("/", "\\/").encode(),
        TOKEN.encode("utf-16-le") * 2,
        b"\xff" + TOKEN.encode(),
    ],
    ids=lambda body: str(body)[:40],
)
@pytest.mark.parametrize("status", [400, 401, 500])
def test_an_echoed_secret_is_shown_nowhere(body: object, status: int) -> None:
    """A secret that the service repeats is in no text, attribute, pickle or key; ``body`` alone is as received."""
    error = _error(body, status, reason=f"No {TOKEN}", headers={"X-Request-Id": TOKEN})
    attributes = {name: value for name, value in vars(error).items() if name != "body"}
    pickled = pickle.dumps(error)
    for shown in (str(error), repr(error), repr(attributes), repr(error.args), repr(vars(pickle.loads(pickled)))):
        assert TOKEN not in shown
        assert TOKEN[:16] not in shown
    assert TOKEN.encode() not in pickled
    assert TOKEN.encode("utf-16-le") not in pickled
    assert error.body == (body if isinstance(body, bytes) else json.dumps(body).encode())


@settings(deadline=None)
@given(
    st.binary(max_size=80)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["error", "errors", "code", "message", "detail", "field", "loc", "name", "type", "source"]
                )
                | st.text(),
                inner,
                max_size=4,
            )
        ),
        max_leaves=15,
    ),
    st.integers(300, 599),
)
@example({"errors": [{"source": {"pointer": None}, "loc": [None]}], "type": "#"}, 400)
def test_any_body_gives_an_error_that_prints(body: object, status: int) -> None:
    """No body breaks the reading of it, and what comes out can be printed, pickled and shown on one line."""
    error = _error(body, status)
    assert error.message
    assert str(error).isprintable()
    assert str(error).encode()
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# The parts


def test_look_up() -> None:
    """A dotted path leads through objects and lists, or nowhere."""
    data = {"a": {"b": [{"c": 1}]}}
    assert look_up(data, "a.b.0.c") == 1
    for path in ("x", "a.x", "a.b.1", "a.b.-1", "a.b.x", "a.b.²", "a.b.0.c.d"):
        assert look_up(data, path) is None


def test_a_wrapped_record_is_found() -> None:
    """A record may be the answer itself, or stand in an envelope; what has an id is no envelope."""
    assumptions = Assumptions()
    assert record({"id": "s", "data": {"id": "x"}}, assumptions) == {"id": "s", "data": {"id": "x"}}
    for name in ("data", "signing", "document", "recipient", "user", "result"):
        assert record({name: {"id": "s"}, "request_id": "r"}, assumptions) == {"id": "s"}
    assert record({"data": [1]}, assumptions) == {"data": [1]}
    assert record([1], assumptions) == [1]
    assert record({"payload": {"record": {"id": "s"}}}, Assumptions(record_paths="payload.record")) == {"id": "s"}


def test_the_request_id_comes_from_the_header_first() -> None:
    """Any of the assumed headers, then the body's; never a flag, an object or an empty text."""
    assumptions = Assumptions()
    assert request_id({"X-Request-Id": "h"}, {"request_id": "b"}, assumptions) == "h"
    assert request_id({"request_id": "g", "X-Request-Id": "h"}, None, assumptions) == "g"
    assert request_id({}, {"request_id": "b"}, assumptions) == "b"
    assert request_id({}, {"meta": {"request_id": 7}}, assumptions) == "7"
    assert request_id({}, {"request_id": ""}, assumptions) is None
    assert request_id({}, {"request_id": True, "error": {"request_id": {}}}, assumptions) is None
    assert request_id({"X-Trace": "t"}, None, Assumptions(request_id_headers="X-Trace")) == "t"


# Over real sockets


@pytest.mark.parametrize("error_shape", ["flat", "nested", "rfc9457", "list"])
@pytest.mark.parametrize("request_ids", ["both", "header", "body", "none"])
async def test_every_error_shape_of_the_sandbox(error_shape: Any, request_ids: Any) -> None:
    """With default assumptions each of the sandbox's shapes gives class, code, messages and request id."""
    profile = Profile(error_shape=error_shape, request_id=request_ids, required_signing_fields=("message",))
    async with (
        Sandbox(profile=profile) as sandbox,
        SigningClient(sandbox.base_url, sandbox.access_token(), retry=RetryPolicy.none()) as client,
    ):
        with pytest.raises(BadRequest) as invalid:
            await client.signings.create(name="Lease", language="EN")
        assert list(invalid.value.messages) == ["message"]
        assert "message" in str(invalid.value)
        signing = await client.signings.create(name="Lease", language="EN", message="Hello")
        with pytest.raises(CannotBeSent) as unsent:
            await client.signings.send(signing)
        document = await client.documents.upload(signing, make_pdf(), "a.pdf")
        with pytest.raises(NotYetSigned) as unsigned:
            await client.documents.read_signed(signing, document)
        with pytest.raises(NotFound) as missing:
            await client.signings.get("no-such-signing")
        async with SigningClient(sandbox.base_url, "nobody") as other:
            with pytest.raises(Unauthorized) as stranger:
                await other.me()
        for caught in (invalid, unsent, unsigned, missing, stranger):
            error = caught.value
            assert error.code
            assert f"HTTP {error.status} on {error.operation}: " in str(error)
            assert f"code {error.code}" in str(error)
            if request_ids == "none":
                assert error.request_id is None
            else:
                assert error.request_id
                assert f"request id {error.request_id}" in str(error)


async def test_a_huge_error_is_not_read_to_its_end() -> None:
    """Of 100 MB of error the beginning is read, in bounded memory, and the rest is left."""
    sent = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(status=400, headers={"X-Request-Id": "req-9"})
        await response.prepare(request)
        block = b'{"message": "' + b"x" * 2**20
        for _ in range(100):
            await response.write(block)
            sent += len(block)
        return response

    async with serving(handler) as server, SigningClient(server.origin, TOKEN) as client:
        tracemalloc.start()
        with pytest.raises(BadRequest) as caught:
            await client.signings.create(name="Lease", language="EN")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 24 * 2**20
    assert sent < 50 * 2**20
    assert len(caught.value.body) <= 64 * 1024
    assert caught.value.request_id == "req-9"
    assert len(str(caught.value)) < 700


async def test_an_error_that_breaks_off_is_still_told() -> None:
    """Of an error whose body is cut short the status and the beginning remain."""
    raw = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 500\r\nX-Request-Id: r\r\n\r\nNo recip"

    async def hang_up(writer: Any) -> None:
        writer.close()

    async with answering(raw, then=hang_up) as origin, SigningClient(origin, TOKEN) as client:
        with pytest.raises(BadRequest, match=r"^HTTP 400 on me: No recip \(request id r\)$"):
            await client.me()


@pytest.mark.parametrize("status", [300, 304, 305, 418, 451])
async def test_odd_statuses(status: int) -> None:
    """A status that nobody expects is an `APIError` with that status, at once."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    async with serving(handler) as server, SigningClient(server.origin, TOKEN) as client:
        with pytest.raises(APIError) as caught:
            await client.me()
    assert type(caught.value) is APIError
    assert caught.value.status == status
    assert len(server.requests) == 1


async def test_a_write_is_not_redirected() -> None:
    """A redirect of a POST is told, with where it stands, and followed nowhere."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    async with serving(handler) as server, SigningClient(server.origin, TOKEN) as client:
        with pytest.raises(APIError, match=r"^HTTP 307 on signings\.create: the service redirects this request"):
            await client.signings.create(name="Lease", language="EN")
    assert [request.path for request in server.requests] == ["/api/1.0/signings"]
