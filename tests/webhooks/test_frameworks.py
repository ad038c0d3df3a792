"""Receivers in aiohttp, FastAPI, Flask, Django and plain WSGI, over real sockets."""

from __future__ import annotations

import contextlib
import io
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flask
import pytest
from django.core.handlers.asgi import ASGIRequest
from django.core.handlers.wsgi import WSGIRequest

from signing_async.webhooks import Event, Receiver, WebhookVerifier, django_view, wsgi_app
from tests.webhooks.deliveries import SECRET, event_body, hex_of, request, signed
from tests.webhooks.servers import ASYNC, PATH, THREADED, Before, serve
from tests.webhooks.test_adapters import respond

LIMIT = 20_000
CHUNKED = {"CONTENT_LENGTH": "", "HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}
"""What a server that decodes chunks passes on."""
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning:wsgiref")


class Endpoint:
    """A server under test, and the ids of the events it handled."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.port = 0
        self.ids: list[str] = []
        self.receiver = Receiver(WebhookVerifier(SECRET, max_body=LIMIT), self.handle, body_timeout=5)

    def handle(self, event: Event) -> None:
        """Record the event."""
        self.ids.append(event.id)

    def post(self, body: bytes, headers: dict[str, str]) -> int:
        """Return the status of one delivery."""
        return request(self.port, PATH, body, headers)[0]

    def raw(self, *parts: bytes, pause: float = 0.0) -> int:
        """Send raw bytes with pauses until there is a response, and return its status."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            with contextlib.suppress(OSError):
                for part in parts:
                    connection.sendall(part)
                    if select.select([connection], [], [], pause)[0]:
                        break
            return int(connection.recv(65536).split()[1])


def head(*lines: str, method: str = "POST") -> bytes:
    """Return the head of a request."""
    return "\r\n".join([f"{method} {PATH} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


@pytest.fixture(scope="module", params=[*ASYNC, *THREADED])
def running(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    """A server of each kind. The tests of the module share it: their events have different ids."""
    endpoint = Endpoint(request.param)
    with serve(endpoint.kind, endpoint.receiver) as endpoint.port:
        yield endpoint


@pytest.fixture
def endpoint(running: Endpoint) -> Endpoint:
    """A server of each kind that has not handled any event yet."""
    running.ids.clear()
    return running


def test_genuine_events_are_handled_once_and_others_are_refused(endpoint: Endpoint) -> None:
    body, second = event_body(), b'\n{"event":\t{"id": "b", "\\u0074ype": "x", "name": "\xc3\xa5"}}\r\n'
    assert [endpoint.post(each, signed(each)) for each in (body, body, second, body)] == [202] * 4
    first, *others = endpoint.ids
    for refused, headers, status in (
        (body, signed(body, "another"), 401),
        (body + b" ", signed(body), 401),
        (body, {}, 401),
        (body, {"X-Signature": "sha256=\xe9\xff"}, 401),
        (body, {"X-Signature": "f" * 6000}, 401),
        (b"[]", signed(b"[]"), 400),
        (b"", signed(b""), 400),
    ):
        assert endpoint.post(refused, headers) == status
    assert request(endpoint.port, PATH, b"", {}, "GET")[0] == 405
    assert first.encode() in body
    assert endpoint.ids == [first, *others] == [first, "b"]


def test_two_routes_answer_both_addresses_without_a_redirect() -> None:
    """As the guide shows for FastAPI, which otherwise redirects one of them; senders don't follow."""
    endpoint, body = Endpoint("fastapi"), event_body()
    with serve(endpoint.kind, endpoint.receiver) as port:
        assert [request(port, path, body, signed(body))[0] for path in ("/hooks", "/hooks/")] == [202, 202]


def test_body_over_the_limit_or_with_a_bad_length_is_refused_after_the_head_alone(endpoint: Endpoint) -> None:
    assert endpoint.raw(head(f"Content-Length: {LIMIT + 1}", "X-Signature: x")) == 413
    for length in ("nonsense", "-5", "1_0", "+9"):
        assert endpoint.raw(head(f"Content-Length: {length}", f"X-Signature: {hex_of(b'')}")) == 400
    body = event_body(pad="x" * 19_000)
    assert endpoint.post(body, signed(body)) == 202


def test_trickling_or_stalled_body_gets_408(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint.receiver, "body_timeout", 0.1)
    body = event_body()
    start = head(f"Content-Length: {len(body)}", f"X-Signature: {hex_of(body)}")
    for parts, pause in (([body[:5]], 30), ([bytes((byte,)) for byte in body[:-1]], 0.05)):
        assert endpoint.raw(start + parts[0], *parts[1:], pause=pause) == 408
    assert endpoint.ids == []


def test_chunked_body_is_read_and_limited_or_gets_411(endpoint: Endpoint) -> None:
    """411 tells the sender that the length is missing; 401 would mislead."""
    body = event_body(pad="x" * 3000)
    start = head("Transfer-Encoding: chunked", f"X-Signature: {hex_of(body)}")
    parts = [body[begin : begin + 700] for begin in range(0, len(body), 700)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])
    reads = endpoint.kind not in ("wsgi", "django")
    assert endpoint.raw(start, chunks) == (202 if reads else 411)
    assert not reads or endpoint.raw(start, *[b"%x\r\n%s\r\n" % (5000, b"x" * 5000)] * 5) == 413
    assert len(endpoint.ids) == reads


@pytest.mark.parametrize("running", ASYNC, indirect=True)
def test_refusal_closes_the_connection_and_a_lost_sender_does_not_affect_the_next_delivery(endpoint: Endpoint) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=4) as connection:
        connection.sendall(head("Content-Length: 0", method="PUT"))
        response = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b" 405 " in response.partition(b"\r\n")[0]
    assert b"connection: close" in response.lower()
    body = event_body()
    with socket.create_connection(("127.0.0.1", endpoint.port)) as connection:
        connection.sendall(head(f"Content-Length: {len(body)}", f"X-Signature: {hex_of(body)}") + body[:9])
    assert endpoint.post(body, signed(body)) == 202


@pytest.mark.parametrize("running", ["aiohttp", "wsgi"], indirect=True)
def test_concurrent_duplicates_are_handled_once(endpoint: Endpoint) -> None:
    bodies = [event_body() for _ in range(16)] * 2
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda body: endpoint.post(body, signed(body)), bodies))
    assert set(statuses) <= {202, 503}
    assert len(endpoint.ids) == len(set(endpoint.ids)) == 16


async def read_twice(request: Any) -> None:
    await request.text()
    await request.json()


# The guide lists them. Each framework keeps the body in one place, however it was asked for it.
KEPT: list[tuple[str, Before]] = [
    ("aiohttp", read_twice),
    ("fastapi", lambda request: request.json()),
    ("flask", lambda request: request.get_json()),
    ("flask", lambda request: request.form),
    ("django", lambda request: request.body),
]
CONSUMED: list[tuple[str, Before]] = [
    ("aiohttp", lambda request: request.content.read()),
    ("flask", lambda request: request.get_data(cache=False)),
    ("flask", lambda request: request.stream.read(10)),
    ("django", lambda request: request.read()),
]


@pytest.mark.parametrize(
    ("kind", "read", "is_kept"), [*((*row, True) for row in KEPT), *((*row, False) for row in CONSUMED)]
)
def test_body_that_a_middleware_has_read_is_used_if_the_framework_keeps_it_and_else_gets_503(
    kind: str, read: Before, is_kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    target, body = Endpoint(kind), event_body("a")
    with serve(kind, target.receiver, read) as target.port:
        status, headers, _ = request(target.port, PATH, body, signed(body))
        if is_kept:
            assert (status, target.ids) == (202, ["a"])
            assert target.post(body + b" ", signed(body)) == 401
        else:
            assert (status, headers["Retry-After"], target.ids) == (503, "5", [])
            assert "a middleware or hook has read the body before the webhook receiver" in caplog.text


def test_chunked_body_is_bounded_although_a_hook_of_flask_has_looked_for_a_form() -> None:
    class Endless(io.RawIOBase):
        taken = 0

        def read(self, size: int = -1) -> bytes:
            assert size > 0, "it is read without a bound"
            self.taken += size
            return b"x" * size

    app, stream = flask.Flask("receiver"), Endless()
    app.before_request(lambda: bool(flask.request.form) or None)
    app.post("/")(lambda: wsgi_app(Receiver(WebhookVerifier(SECRET, max_body=LIMIT), print)))
    place = {"PATH_INFO": "/", "SERVER_NAME": "x", "SERVER_PORT": "80", "wsgi.url_scheme": "http"}
    streams = {"wsgi.input": stream, "wsgi.errors": io.StringIO()}
    assert respond(b"{}", app, **streams, **CHUNKED, **place)[0].startswith("413")
    assert stream.taken < 100_000


def test_django_view_works_under_asgi_and_with_a_server_that_decodes_chunks() -> None:
    """An ASGI request has no WSGI environ. gunicorn marks the end of the input, and there is no Content-Length."""
    events: list[Event] = []
    view = django_view(Receiver(WebhookVerifier(SECRET), events.append))
    first, second = event_body("a"), event_body("b")
    scope = {"type": "http", "method": "POST", "path": PATH, "query_string": b""}
    headers = [(b"x-signature", hex_of(first).encode()), (b"content-length", str(len(first)).encode())]
    environ = {"REQUEST_METHOD": "POST", "HTTP_X_SIGNATURE": hex_of(second), "wsgi.input": io.BytesIO(second)}
    for given in (ASGIRequest(scope | {"headers": headers}, io.BytesIO(first)), WSGIRequest(environ | CHUNKED)):
        response = view(given)
        assert (response.status_code, response.content) == (202, b'{"message": "accepted"}')
    assert [event.id for event in events] == ["a", "b"]
