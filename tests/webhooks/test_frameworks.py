"""Receivers in aiohttp, Starlette, FastAPI, Flask, Django and bare servers, over real sockets."""

from __future__ import annotations

import http.client
import io
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.core.wsgi import get_wsgi_application  # type: ignore[import-untyped]  # Django ships no types

from signing_async.webhooks import Event, Receiver, WebhookVerifier, asgi_app, django_view, wsgi_app
from tests.webhooks.deliveries import SECRET, event_body, hex_of, signed
from tests.webhooks.servers import ASYNC, PATH, THREADED, serve

LIMIT = 20_000
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning:wsgiref")


class Endpoint:
    """A server under test, and what its receiver handed over."""

    def __init__(self) -> None:
        self.port = 0
        self.ids: list[str] = []
        self.fail = False

    def hand_off(self, event: Event) -> None:
        """The receiver's callback."""
        if self.fail:
            raise RuntimeError("down")
        self.ids.append(event.id)

    def request(
        self, body: bytes, headers: dict[str, str], method: str = "POST"
    ) -> tuple[int, http.client.HTTPMessage]:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, PATH, body, headers)
            response = connection.getresponse()
            response.read()
            return response.status, response.headers
        finally:
            connection.close()

    def post(self, body: bytes, headers: dict[str, str]) -> int:
        """The status of one delivery."""
        return self.request(body, headers)[0]

    def raw(self, *pieces: bytes, pause: float = 0.0) -> bytes:
        """Send pieces as they are, with pauses, until the server answers or closes; its answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            try:
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(pause)
            except OSError:
                pass
            try:
                return connection.recv(65536)
            except ConnectionResetError:
                return b""


def head(*lines: str) -> bytes:
    """A request's head."""
    return "\r\n".join([f"POST {PATH} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


@pytest.fixture(params=[*ASYNC, *THREADED])
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    """A running server of each kind."""
    target = Endpoint()
    receiver = Receiver(WebhookVerifier(SECRET, max_body=LIMIT), target.hand_off, body_timeout=0.3)
    with serve(request.param, receiver) as target.port:
        yield target


def test_genuine_events_are_handed_over_once(endpoint: Endpoint) -> None:
    """202 and handed over; a duplicate 202 and not handed over; any layout of the bytes."""
    first, second = event_body("a"), b'\n{"event":\t{"id": "b", "\\u0074ype": "x", "name": "\xc3\xa5"}}\r\n'
    assert [endpoint.post(body, signed(body)) for body in (first, first, second, first)] == [202] * 4
    assert endpoint.ids == ["a", "b"]


def test_what_is_not_genuine_is_refused(endpoint: Endpoint) -> None:
    """401 for forged, unsigned and nonsense headers; 400 for what is genuine and no event; 405 for a GET."""
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


def test_a_failed_hand_off_comes_again(endpoint: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    """503 with Retry-After, and the next delivery is handed over."""
    body = event_body("a")
    endpoint.fail = True
    status, headers = endpoint.request(body, signed(body))
    assert (status, headers["Retry-After"]) == (503, "5")
    endpoint.fail = False
    assert endpoint.post(body, signed(body)) == 202
    assert endpoint.ids == ["a"]


def test_a_body_over_the_limit_is_refused_before_it_is_sent(endpoint: Endpoint) -> None:
    """413 comes after the head alone; a body at the limit is read."""
    answer = endpoint.raw(head(f"Content-Length: {LIMIT + 1}", "X-Signature: x"))
    assert b" 413 " in answer.partition(b"\r\n")[0]
    body = event_body("a", pad="x" * 19_000)
    assert endpoint.post(body, signed(body)) == 202


def test_a_slow_body_is_cut_off(endpoint: Endpoint) -> None:
    """Whether it trickles or stands still: 408, and the connection is not held."""
    body = event_body("a")
    start = head(f"Content-Length: {len(body)}", f"X-Signature: {hex_of(body)}")
    trickle = [bytes((byte,)) for byte in body[:-1]]
    for pieces in ([start, body[:5]], [start, *trickle]):
        answer = endpoint.raw(*pieces, pause=0.05)
        assert b" 408 " in answer.partition(b"\r\n")[0]
    assert endpoint.ids == []


def test_many_senders_at_once(endpoint: Endpoint) -> None:
    """Every event is acknowledged and handed over once, with duplicates in flight at the same time."""
    bodies = [event_body(f"evt_{number}") for number in range(40)] * 2
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda body: endpoint.post(body, signed(body)), bodies))
    assert set(statuses) <= {202, 503}
    assert sorted(endpoint.ids) == sorted({f"evt_{number}" for number in range(40)})


@pytest.mark.parametrize("kind", [*ASYNC, "flask"])
def test_chunked_bodies(kind: str) -> None:
    """A body without a length is taken, and counted while it comes."""
    target = Endpoint()
    receiver = Receiver(WebhookVerifier(SECRET, max_body=LIMIT), target.hand_off, body_timeout=5)
    body = event_body("a", pad="x" * 3000)
    with serve(kind, receiver) as target.port:
        pieces = [body[start : start + 700] for start in range(0, len(body), 700)]
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])
        answer = target.raw(head("Transfer-Encoding: chunked", f"X-Signature: {hex_of(body)}"), chunks)
        assert b" 202 " in answer.partition(b"\r\n")[0]
        endless = [b"%x\r\n%s\r\n" % (5000, b"x" * 5000)] * 5
        answer = target.raw(head("Transfer-Encoding: chunked", f"X-Signature: {hex_of(body)}"), *endless)
        assert b" 413 " in answer.partition(b"\r\n")[0]
    assert target.ids == ["a"]


@pytest.mark.parametrize("kind", ASYNC)
def test_an_accepted_connection_stays_open(kind: str) -> None:
    """A sender that delivers again needs no new one; the answer is JSON, and short."""
    with serve(kind, Receiver(WebhookVerifier(SECRET), print)) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        opened = set()
        for body in (event_body("a"), event_body("b")):
            connection.request("POST", PATH, body, signed(body))
            opened.add(connection.sock)
            response = connection.getresponse()
            assert (response.status, response.read()) == (202, b'{"message": "accepted"}')
            assert response.headers["Content-Type"] == "application/json"
        connection.close()
    assert len(opened) == 1


@pytest.mark.parametrize("kind", ASYNC)
def test_a_refused_connection_is_closed(kind: str) -> None:
    """Where the answer says that the connection ends, the server ends it."""
    with (
        serve(kind, Receiver(WebhookVerifier(SECRET), print)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=4) as connection,
    ):
        connection.sendall(f"PUT {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b" 405 " in answer.partition(b"\r\n")[0]
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("kind", ASYNC)
def test_a_sender_that_goes_away_hurts_nobody(kind: str) -> None:
    """Half a body and a closed connection: nothing is handed over, and the next delivery is."""
    target = Endpoint()
    body = event_body("a")
    with serve(kind, Receiver(WebhookVerifier(SECRET), target.hand_off)) as target.port:
        with socket.create_connection(("127.0.0.1", target.port)) as connection:
            connection.sendall(head(f"Content-Length: {len(body)}", f"X-Signature: {hex_of(body)}") + body[:9])
        assert target.post(body, signed(body)) == 202
    assert target.ids == ["a"]


async def test_asgi_disconnect_and_other_protocols() -> None:
    """A disconnect in the middle of a body is no delivery; a websocket is refused loudly."""
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
    with pytest.raises(ValueError, match="websocket"):
        await app({"type": "websocket"}, receive, send)


@pytest.mark.parametrize(("kind", "status"), [("flask", 202), ("wsgi", 411), ("django", 411)])
def test_a_chunked_body_where_threads_serve(kind: str, status: int) -> None:
    """Read where the server decodes it; else the sender is told that the length is missing, not that it is forged."""
    target = Endpoint()
    body = event_body("a")
    with serve(kind, Receiver(WebhookVerifier(SECRET), target.hand_off)) as target.port:
        chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        answer = target.raw(head("Transfer-Encoding: chunked", f"X-Signature: {hex_of(body)}"), chunks)
    assert answer.split()[1] == b"%d" % status
    assert target.ids == ["a"][: status == 202]


def test_django_reads_a_chunked_body_that_its_server_decodes() -> None:
    """As gunicorn does: it marks the end of the input, and there is no Content-Length."""
    target = Endpoint()
    body = event_body("a")
    with serve("django", Receiver(WebhookVerifier(SECRET), target.hand_off)):  # which sets Django up
        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": PATH, "SERVER_NAME": "localhost", "SERVER_PORT": "80"}
        environ |= {"HTTP_TRANSFER_ENCODING": "chunked", "HTTP_X_SIGNATURE": hex_of(body)}
        server = {"wsgi.input": io.BytesIO(body), "wsgi.input_terminated": True, "wsgi.url_scheme": "http"}
        statuses: list[str] = []
        answer = get_wsgi_application()({**environ, **server}, lambda status, headers: statuses.append(status))
        answer.close()
    assert statuses == ["202 Accepted"]
    assert target.ids == ["a"]


def test_wsgi_without_a_socket_to_get_at() -> None:
    """A server whose input is no socket works too, and one that marks the end of a chunked body."""
    target = Endpoint()
    app = wsgi_app(Receiver(WebhookVerifier(SECRET), target.hand_off))
    statuses: list[str] = []
    body = event_body("a")
    for environ in (
        {"CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body + b"next request")},
        {"wsgi.input_terminated": True, "wsgi.input": io.BytesIO(body)},
        {"CONTENT_LENGTH": "", "wsgi.input": io.BytesIO(body)},
        {"CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body[:9])},
    ):
        environ |= {"REQUEST_METHOD": "POST", "HTTP_X_SIGNATURE": hex_of(body)}
        app(environ, lambda status, headers: statuses.append(status))  # type: ignore[arg-type]  # all that is used
    assert statuses == ["202 Accepted", "202 Accepted", "401 Unauthorized", "401 Unauthorized"]
    assert target.ids == ["a"]


@pytest.mark.parametrize("length", ["nonsense", "-5", "1_0", "+9"])
def test_a_length_that_is_no_number_is_a_bad_request(endpoint: Endpoint, length: str) -> None:
    """400 from whoever sees it first, and never an error of the server."""
    answer = endpoint.raw(head(f"Content-Length: {length}", f"X-Signature: {hex_of(b'')}"))
    assert b" 400 " in answer.partition(b"\r\n")[0]


def test_an_input_that_is_no_socket_leaves_no_file_open(tmp_path: Path) -> None:
    """A server may hand over a file that it spooled the body to: each delivery closes what it opened."""
    target = Endpoint()
    app = wsgi_app(Receiver(WebhookVerifier(SECRET), target.hand_off))
    body = event_body("a")
    spooled = tmp_path / "body"
    spooled.write_bytes(body)
    with spooled.open("rb") as stream:
        following = os.dup(stream.fileno())
        os.close(following)
        environ = {"CONTENT_LENGTH": str(len(body)), "wsgi.input": stream, "REQUEST_METHOD": "POST"}
        app(environ | {"HTTP_X_SIGNATURE": hex_of(body)}, lambda status, headers: None)  # type: ignore[arg-type]  # all that is used
        again = os.dup(stream.fileno())
        os.close(again)
    assert target.ids == ["a"]
    assert again <= following


def test_django_served_by_asgi() -> None:
    """Its requests have no environment to look for a socket in: they are taken all the same."""
    target = Endpoint()
    receiver = Receiver(WebhookVerifier(SECRET), target.hand_off)
    body = event_body("a")
    headers = [(b"x-signature", hex_of(body).encode()), (b"content-length", str(len(body)).encode())]
    with serve("django", receiver):  # which sets Django up
        from django.core.handlers.asgi import ASGIRequest  # type: ignore[import-untyped]  # Django ships no types

        scope = {"type": "http", "method": "POST", "path": PATH, "query_string": b"", "headers": headers}
        answer = django_view(receiver)(ASGIRequest(scope, io.BytesIO(body)))
    assert (answer.status_code, answer.content) == (202, b'{"message": "accepted"}')
    assert target.ids == ["a"]


@pytest.mark.parametrize("kind", THREADED)
def test_async_callbacks_work_where_threads_serve(kind: str) -> None:
    """Each runs in a loop of its own."""
    target = Endpoint()

    async def hand_off(event: Event) -> None:
        target.hand_off(event)

    body = event_body("a")
    with serve(kind, Receiver(WebhookVerifier(SECRET), hand_off)) as target.port:
        assert target.post(body, signed(body)) == 202
    assert target.ids == ["a"]
