"""Receivers in aiohttp, Starlette, FastAPI, Flask, Django and bare servers, over real sockets."""

from __future__ import annotations

import http.client
import io
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.core.wsgi import get_wsgi_application

from signing_async.webhooks import Event, Receiver, WebhookVerifier, asgi_app, django_view
from tests.webhooks.deliveries import SECRET, event_body, hex_of, signed
from tests.webhooks.servers import ASYNC, PATH, THREADED, serve

LIMIT = 20_000
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning:wsgiref")


class Endpoint:
    """A server under test, and the ids of the events it handled."""

    def __init__(self) -> None:
        self.port = 0
        self.ids: list[str] = []
        self.failing = False

    def handler(self, event: Event) -> None:
        """Record the event, or fail."""
        if self.failing:
            raise RuntimeError("down")
        self.ids.append(event.id)

    def request(
        self, body: bytes, headers: dict[str, str], method: str = "POST"
    ) -> tuple[int, http.client.HTTPMessage]:
        """Send one request on a new connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, PATH, body, headers)
            response = connection.getresponse()
            response.read()
            return response.status, response.headers
        finally:
            connection.close()

    def post(self, body: bytes, headers: dict[str, str]) -> int:
        """Return the status of one delivery."""
        return self.request(body, headers)[0]

    def raw(self, *parts: bytes, pause: float = 0.0) -> bytes:
        """Send raw bytes with pauses and return what the server responds, or nothing if it closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            try:
                for part in parts:
                    connection.sendall(part)
                    time.sleep(pause)
            except OSError:
                pass
            try:
                return connection.recv(65536)
            except ConnectionResetError:
                return b""


def head(*lines: str) -> bytes:
    """Return the head of a request."""
    return "\r\n".join([f"POST {PATH} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


@pytest.fixture(params=[*ASYNC, *THREADED])
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    """Run a server of each kind."""
    target = Endpoint()
    receiver = Receiver(WebhookVerifier(SECRET, max_body=LIMIT), target.handler, body_timeout=0.3)
    with serve(request.param, receiver) as target.port:
        yield target


def test_genuine_events_are_handled_once_in_any_json_layout(endpoint: Endpoint) -> None:
    first, second = event_body("a"), b'\n{"event":\t{"id": "b", "\\u0074ype": "x", "name": "\xc3\xa5"}}\r\n'
    assert [endpoint.post(body, signed(body)) for body in (first, first, second, first)] == [202] * 4
    assert endpoint.ids == ["a", "b"]


def test_forged_unsigned_and_malformed_deliveries_are_refused(endpoint: Endpoint) -> None:
    body = event_body("a")
    assert endpoint.post(body, signed(body, "another")) == 401
    assert endpoint.post(body + b" ", signed(body)) == 401
    assert endpoint.post(body, {}) == 401
    assert endpoint.post(body, {"X-Signature": "sha256=\xe9\xff"}) == 401
    assert endpoint.post(body, {"X-Signature": "f" * 6000}) == 401
    assert endpoint.post(b"[]", signed(b"[]")) == 400
    assert endpoint.post(b"", signed(b"")) == 400
    assert endpoint.request(b"", {}, "GET")[0] == 405
    assert endpoint.ids == []


def test_failed_handler_gets_503_and_the_next_delivery_is_handled(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    body = event_body("a")
    endpoint.failing = True
    status, headers = endpoint.request(body, signed(body))
    assert (status, headers["Retry-After"]) == (503, "5")
    endpoint.failing = False
    assert endpoint.post(body, signed(body)) == 202
    assert endpoint.ids == ["a"]


def test_body_over_the_limit_is_refused_after_the_head_alone(endpoint: Endpoint) -> None:
    response = endpoint.raw(head(f"Content-Length: {LIMIT + 1}", "X-Signature: x"))
    assert b" 413 " in response.partition(b"\r\n")[0]
    body = event_body("a", pad="x" * 19_000)
    assert endpoint.post(body, signed(body)) == 202


def test_trickling_or_stalled_body_gets_408(endpoint: Endpoint) -> None:
    body = event_body("a")
    start = head(f"Content-Length: {len(body)}", f"X-Signature: {hex_of(body)}")
    trickle = [bytes((byte,)) for byte in body[:-1]]
    for parts in ([start, body[:5]], [start, *trickle]):
        response = endpoint.raw(*parts, pause=0.05)
        assert b" 408 " in response.partition(b"\r\n")[0]
    assert endpoint.ids == []


def test_concurrent_duplicates_are_handled_once(endpoint: Endpoint) -> None:
    bodies = [event_body(f"evt_{number}") for number in range(40)] * 2
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda body: endpoint.post(body, signed(body)), bodies))
    assert set(statuses) <= {202, 503}
    assert sorted(endpoint.ids) == sorted({f"evt_{number}" for number in range(40)})


@pytest.mark.parametrize("kind", [*ASYNC, "flask"])
def test_chunked_body_is_accepted_and_limited(kind: str) -> None:
    target = Endpoint()
    receiver = Receiver(WebhookVerifier(SECRET, max_body=LIMIT), target.handler, body_timeout=5)
    body = event_body("a", pad="x" * 3000)
    with serve(kind, receiver) as target.port:
        parts = [body[start : start + 700] for start in range(0, len(body), 700)]
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])
        response = target.raw(head("Transfer-Encoding: chunked", f"X-Signature: {hex_of(body)}"), chunks)
        assert b" 202 " in response.partition(b"\r\n")[0]
        endless = [b"%x\r\n%s\r\n" % (5000, b"x" * 5000)] * 5
        response = target.raw(head("Transfer-Encoding: chunked", f"X-Signature: {hex_of(body)}"), *endless)
        assert b" 413 " in response.partition(b"\r\n")[0]
    assert target.ids == ["a"]


@pytest.mark.parametrize("kind", ASYNC)
def test_connection_is_closed_where_the_response_says_so(kind: str) -> None:
    with (
        serve(kind, Receiver(WebhookVerifier(SECRET), print)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=4) as connection,
    ):
        connection.sendall(f"PUT {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
        response = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b" 405 " in response.partition(b"\r\n")[0]
    assert b"connection: close" in response.lower()


@pytest.mark.parametrize("kind", ASYNC)
def test_sender_that_disconnects_midway_does_not_affect_the_next_delivery(kind: str) -> None:
    target = Endpoint()
    body = event_body("a")
    with serve(kind, Receiver(WebhookVerifier(SECRET), target.handler)) as target.port:
        with socket.create_connection(("127.0.0.1", target.port)) as connection:
            connection.sendall(head(f"Content-Length: {len(body)}", f"X-Signature: {hex_of(body)}") + body[:9])
        assert target.post(body, signed(body)) == 202
    assert target.ids == ["a"]


async def test_asgi_disconnect_is_a_400() -> None:
    sent: list[Any] = []
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    app = asgi_app(Receiver(WebhookVerifier(SECRET), print))
    await app({"type": "http", "method": "POST", "headers": []}, receive, send)
    assert sent[0]["status"] == 400


@pytest.mark.parametrize(("kind", "status"), [("flask", 202), ("wsgi", 411), ("django", 411)])
def test_chunked_body_in_a_threaded_server_is_read_or_gets_411(kind: str, status: int) -> None:
    """411 tells the sender that the length is missing; 401 would mislead."""
    target = Endpoint()
    body = event_body("a")
    with serve(kind, Receiver(WebhookVerifier(SECRET), target.handler)) as target.port:
        chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        response = target.raw(head("Transfer-Encoding: chunked", f"X-Signature: {hex_of(body)}"), chunks)
    assert response.split()[1] == b"%d" % status
    assert target.ids == ["a"][: status == 202]


def test_django_reads_a_chunked_body_that_its_server_decodes() -> None:
    """Like gunicorn: the server marks the end of the input, and there is no Content-Length."""
    target = Endpoint()
    body = event_body("a")
    with serve("django", Receiver(WebhookVerifier(SECRET), target.handler)):  # which sets Django up
        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": PATH, "SERVER_NAME": "localhost", "SERVER_PORT": "80"}
        environ |= {"HTTP_TRANSFER_ENCODING": "chunked", "HTTP_X_SIGNATURE": hex_of(body)}
        server = {"wsgi.input": io.BytesIO(body), "wsgi.input_terminated": True, "wsgi.url_scheme": "http"}
        statuses: list[str] = []
        response = get_wsgi_application()({**environ, **server}, lambda status, headers: statuses.append(status))
        response.close()
    assert statuses == ["202 Accepted"]
    assert target.ids == ["a"]


@pytest.mark.parametrize("length", ["nonsense", "-5", "1_0", "+9"])
def test_content_length_that_is_not_a_number_gets_400(endpoint: Endpoint, length: str) -> None:
    response = endpoint.raw(head(f"Content-Length: {length}", f"X-Signature: {hex_of(b'')}"))
    assert b" 400 " in response.partition(b"\r\n")[0]


def test_django_view_works_under_asgi() -> None:
    """An ASGI request has no WSGI environ."""
    target = Endpoint()
    receiver = Receiver(WebhookVerifier(SECRET), target.handler)
    body = event_body("a")
    headers = [(b"x-signature", hex_of(body).encode()), (b"content-length", str(len(body)).encode())]
    with serve("django", receiver):  # which sets Django up
        from django.core.handlers.asgi import ASGIRequest

        scope = {"type": "http", "method": "POST", "path": PATH, "query_string": b"", "headers": headers}
        response = django_view(receiver)(ASGIRequest(scope, io.BytesIO(body)))
    assert (response.status_code, response.content) == (202, b'{"message": "accepted"}')
    assert target.ids == ["a"]


@pytest.mark.parametrize("kind", THREADED)
def test_async_handler_works_in_a_threaded_server(kind: str) -> None:
    target = Endpoint()

    async def handler(event: Event) -> None:
        target.handler(event)

    body = event_body("a")
    with serve(kind, Receiver(WebhookVerifier(SECRET), handler)) as target.port:
        assert target.post(body, signed(body)) == 202
    assert target.ids == ["a"]


async def read_twice(request: Any) -> None:
    await request.text()
    await request.json()


CACHED: list[tuple[str, Callable[[Any], Any]]] = [
    ("aiohttp", read_twice),
    ("starlette", lambda request: request.body()),
    ("fastapi", lambda request: request.json()),
    ("flask", lambda request: request.get_data()),
    ("flask", lambda request: request.get_json()),
    ("flask", lambda request: request.form),
    ("django", lambda request: request.body),
    ("django", lambda request: request.POST),
]
CONSUMED: list[tuple[str, Callable[[Any], Any]]] = [
    ("aiohttp", lambda request: request.content.read()),
    ("aiohttp", lambda request: request.content.read(10)),
    ("flask", lambda request: request.get_data(cache=False)),
    ("flask", lambda request: request.stream.read(10)),
    ("django", lambda request: request.read()),
]


@pytest.mark.parametrize(("kind", "read"), CACHED)
def test_body_that_a_middleware_has_read_is_used(kind: str, read: Callable[[Any], Any]) -> None:
    target = Endpoint()
    body = event_body("a")
    with serve(kind, Receiver(WebhookVerifier(SECRET), target.handler), read) as target.port:
        headers = {**signed(body), "Content-Type": "application/json"}
        assert target.post(body, headers) == 202
        assert target.post(body + b" ", headers) == 401
    assert target.ids == ["a"]


@pytest.mark.parametrize(("kind", "read"), CONSUMED)
def test_body_that_a_middleware_has_read_and_not_kept_gets_503(
    kind: str, read: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    target = Endpoint()
    body = event_body("a")
    with serve(kind, Receiver(WebhookVerifier(SECRET), target.handler), read) as target.port:
        status, headers = target.request(body, signed(body))
    assert (status, headers["Retry-After"]) == (503, "5")
    assert target.ids == []
    assert "a middleware or hook has read the body before the webhook receiver" in caplog.text
