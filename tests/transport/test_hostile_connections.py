"""Hostile redirects, pages and connections: the token goes nowhere else, and nothing is sent twice."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import aiohttp
import pytest

from signing_async import APIError, OutcomeUnknown, RetryPolicy, SigningClient, SigningError, TransportError
from tests.fuzz.promises import TOKEN
from tests.pdfs import make_pdf
from tests.transport.hostile import JSON, OPERATIONS, SIGNING, Conversation, connected, hostile, outcome, saying, sized

# Where the token goes


OWN = {"http:\\\\{other}\\x", "/x" * 3_000}
"""Resolved as RFC 3986 says, these are paths of the client's own origin."""


@pytest.mark.parametrize(
    "location",
    [
        "http://{other}/api/1.0/me",
        "//{other}/x",
        "http://localhost:{port}/x",
        "http://{own}@{other}/x",
        "https://{own}/x",
        "http:\\\\{other}\\x",
        "ht\ttp://{other}/x",
        "file:///etc/passwd",
        "http://0x7f000001:{port}/x",
        "http://{own}:99999/",
        "",
        "/x" * 3_000,
    ],
    ids=lambda location: repr(location[:40]),
)
async def test_redirect_is_followed_only_to_the_clients_own_origin(location: str, tmp_path: Path) -> None:
    async def redirect(talk: Conversation) -> None:
        await talk.request()
        own, strange = server.origin.removeprefix("http://"), other.origin.removeprefix("http://")
        where = location.format(own=own, other=strange, port=own.partition(":")[2])
        await talk.send(b"HTTP/1.1 302 Found\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % where.encode())

    refusal, most = ("more than 5 redirects", 6) if location in OWN else ("to another origin is not followed", 1)
    async with hostile(saying(sized(SIGNING))) as other, hostile(redirect) as server:
        for operate in OPERATIONS.values():
            server.heads.clear()
            async with connected(server) as client:
                error = await outcome(operate, client, tmp_path)
            assert isinstance(error, SigningError)
            # An ambiguous write is followed by one reading.
            reads = server.count("GET ")
            assert (refusal if reads else "redirects of writes are not followed") in str(error)
            assert reads in (0, most)
            assert len(server.heads) - reads <= 1
            host = server.origin.removeprefix("http://").encode()
            assert all(b"\r\nHost: %s\r\n" % host in head for head in server.heads)
        assert other.heads == []


async def _repeat_once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """A middleware of the caller's session."""
    try:
        return await handler(request)
    except aiohttp.ServerDisconnectedError:
        return await handler(request)


@pytest.mark.parametrize(("method", "middlewares"), [("DELETE", ()), ("POST", (_repeat_once,))])
@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "accepted"])
async def test_write_on_an_idle_connection_that_the_server_closes_is_sent_once(
    method: str, middlewares: tuple[aiohttp.ClientMiddlewareType, ...], is_refused: bool
) -> None:
    """aiohttp repeats a DELETE or PUT by itself, on a second connection."""
    received, serving = [], []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError), contextlib.closing(writer):
            received.append((await reader.readuntil(b"\r\n\r\n")).split()[0])
            writer.write(sized(b"{}"))
            received.append((await reader.readuntil(b"\r\n\r\n")).split()[0])
            if is_refused:
                server.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    retry = RetryPolicy(max_attempts=2, base_delay=0.01)
    async with (
        aiohttp.ClientSession(middlewares=middlewares) as session,
        SigningClient(origin, "token", session=session, retry=retry) as client,
    ):
        await client.request("GET", "/api/1.0/things/{id}", path={"id": "1"})
        with pytest.raises(OutcomeUnknown):
            await client.request(method, "/api/1.0/things/{id}", path={"id": "1"})
    server.close()
    await asyncio.gather(*filter(None, serving))
    assert received == [b"GET", method.encode()]


async def test_clients_own_session_keeps_no_cookies() -> None:
    raw = sized(SIGNING, JSON + b"Set-Cookie: session=of-somebody; Path=/\r\n")
    async with hostile(saying(raw)) as server:
        # Of a host without a name nobody keeps cookies.
        async with SigningClient(server.origin.replace("127.0.0.1", "localhost"), TOKEN) as client:
            await client.me()
            await client.me()
        assert all(b"cookie" not in head.lower() for head in server.heads)


# Connections


BIG = make_pdf(4_000_000)


@pytest.mark.parametrize("ending", ["close", "reset", "drain"])
async def test_upload_refused_while_it_is_sent_is_not_repeated(ending: str, tmp_path: Path) -> None:
    """A 413 during the upload is raised as such, or as a broken connection; a repeat is preceded by a reading."""

    async def behave(talk: Conversation) -> None:
        while True:
            head = await talk.head()
            if head.startswith(b"GET"):
                await talk.send(sized(b'{"id": "s1", "is_draft": true, "documents": []}'))
                continue
            await talk.reader.readexactly(50_000)
            await talk.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            if ending == "reset":
                talk.reset()
            elif ending == "drain":
                while await talk.reader.read(2**20):
                    pass
            return

    async with hostile(behave) as server, connected(server) as client:
        found = await outcome(lambda client, folder: client.documents.upload("s1", BIG, "a.pdf"), client, tmp_path)
        assert isinstance(found, APIError | TransportError)
        assert isinstance(found, APIError) or ending != "drain"
        assert isinstance(found, TransportError) or found.status == 413
        # Each repeat is preceded by a reading.
        assert server.count("GET /api/1.0/signings/s1 ") >= server.count("POST")
