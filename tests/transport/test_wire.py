"""One request and one response: errors of bodies that cannot be sent, and where a response ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from signing_async import ClientClosed, OutcomeUnknown, RetryPolicy, SigningClient, SigningError, TransportError
from signing_async.sandbox import Sandbox
from signing_async.transport import wire  # its check of the pool is replaced, as if aiohttp had changed
from tests.auth.oauth_servers import warnings_in
from tests.pdfs import make_pdf
from tests.servers import Web, serving, talking


async def _raise(session: aiohttp.ClientSession) -> None:
    raise ValueError("bug")


def _failing_session(
    signal: str, fail: Callable[[aiohttp.ClientSession], Awaitable[None]] = _raise
) -> aiohttp.ClientSession:
    """Return a session whose trace hook fails for a request that changes a sent or ready signing."""

    async def trace(session: aiohttp.ClientSession, context: object, params: Any) -> None:
        if params.url.path.endswith(("/send", "/remind")):
            await fail(session)

    config = aiohttp.TraceConfig()
    getattr(config, signal).append(trace)
    return aiohttp.ClientSession(trace_configs=[config])


async def test_session_that_fails_after_a_request_was_sent_leaves_a_lost_response(
    sandbox: Sandbox, client: SigningClient
) -> None:
    signing = await client.signings.create(name="x", language="EN")
    await client.documents.upload(signing, make_pdf(), "a.pdf")
    recipient = await client.recipients.add(signing, email="anna@example.com")
    async with _failing_session("on_request_end") as session:
        failing = SigningClient(sandbox.base_url, sandbox.access_token(), session=session)
        await failing.signings.send(signing)
        with pytest.raises(OutcomeUnknown, match=r"the session failed \(ValueError\)"):
            await failing.recipients.remind(signing, recipient)
    assert sandbox.signing(signing.id).times_sent == 1
    assert len(sandbox.requests_of("recipients.remind")) == 1


@pytest.mark.parametrize(
    ("fail", "error", "said"),
    [
        (_raise, TransportError, r"the session failed \(ValueError\)"),
        (aiohttp.ClientSession.close, ClientClosed, "the session was closed"),
    ],
)
async def test_session_that_fails_before_a_request_is_sent_leaves_no_unknown_outcome(
    sandbox: Sandbox, fail: Callable[[aiohttp.ClientSession], Awaitable[None]], error: type[SigningError], said: str
) -> None:
    async with _failing_session("on_request_start", fail) as session:
        failing = SigningClient(sandbox.base_url, sandbox.access_token(), session=session, retry=RetryPolicy.none())
        with pytest.raises(error, match=said) as caught:
            await failing.signings.send("s1")
    assert (caught.value.effect, caught.value.__context__) == ("none", None)
    assert sandbox.requests == []


# aiohttp's pool


async def _respond(request: web.Request) -> web.Response:
    return web.json_response({"id": "u1"})


def _connections(server: Web) -> tuple[int, set[str | None]]:
    """Return the number of connections that were used, and the Connection headers that were sent."""
    headers = {request.headers.get("Connection") for request in server.requests}
    return len({id(request.protocol) for request in server.requests}), headers


async def test_the_pool_of_this_aiohttp_can_be_checked(caplog: pytest.LogCaptureFixture) -> None:
    """A canary: it fails if a release of aiohttp keeps its connections differently."""
    async with serving(_respond) as server, SigningClient(server.origin, "token") as client:
        for _ in range(3):
            await client.me()
        sessions = client._shared.sessions
        [waiting] = sessions.get().connector._conns.values()  # type: ignore[union-attr]  # what is tested
        [(protocol, _)] = waiting
        assert protocol.should_close is False
    assert _connections(server) == (1, {None})
    assert not warnings_in(caplog)


@pytest.mark.parametrize("pool", [None, {("host", 80): 5}], ids=repr)
async def test_connections_are_not_reused_if_the_pool_cannot_be_checked(
    pool: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With an unknown aiohttp, calls succeed without reusing connections, and one warning is logged."""

    def hidden(self: wire.Sessions, session: aiohttp.ClientSession) -> None:
        connector: Any = SimpleNamespace() if pool is None else SimpleNamespace(_conns=pool)
        drop(self, SimpleNamespace(connector=connector))  # type: ignore[arg-type]  # stands for another aiohttp

    drop = wire.Sessions.drop_desynchronized
    monkeypatch.setattr(wire.Sessions, "drop_desynchronized", hidden)
    async with serving(_respond) as server, SigningClient(server.origin, "token") as client:
        for _ in range(3):
            assert (await client.me()).id == "u1"
    assert _connections(server) == (3, {"close"})
    [warned] = warnings_in(caplog)
    assert f"aiohttp {aiohttp.__version__} (" in warned


# Desynchronized connections


@asynccontextmanager
async def _talkative() -> AsyncIterator[str]:
    """A server that responds correctly, and a moment later sends a response that nobody asked for."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"id": "right"}')
            await asyncio.sleep(0.02)
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"id": "wrong"}')

    async with talking(talk) as origin:
        yield origin


async def _desynchronized(session: aiohttp.ClientSession) -> None:
    """Wait until every idle connection has foreign bytes."""
    assert session.connector is not None
    for _ in range(500):
        waiting = [protocol for each in session.connector._conns.values() for protocol, _ in each]
        if waiting and all(protocol.should_close for protocol in waiting):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("no foreign bytes arrived")


@pytest.mark.parametrize("settings", [{}, {"ssl": False}, {"proxy": "{origin}"}], ids=str)
async def test_desynchronized_connection_is_not_reused_whatever_else_uses_the_session(settings: dict[str, Any]) -> None:
    """The caller's own requests to the service, with other settings, do not hide the client's connections."""
    async with _talkative() as origin, aiohttp.ClientSession() as session:
        client = SigningClient(origin, "token", session=session)
        settings = {key: origin if value == "{origin}" else value for key, value in settings.items()}
        async with session.get(origin, **settings) as response:
            await response.read()
        await _desynchronized(session)
        for _ in range(3):
            assert (await client.me()).id == "right"
            await _desynchronized(session)


def test_upload_body_decodes_to_its_size_alone() -> None:
    assert wire.bytes_body(b"secret").decode() == "<6 bytes>"
