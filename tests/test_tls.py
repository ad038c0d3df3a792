"""TLS: on by default, a custom authority by the caller's session, and no token before the handshake is trusted."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import aiohttp
import pytest
import trustme
from aiohttp import web

from signing_async import RetryPolicy, SigningClient, TransportError
from tests.pdfs import make_pdf
from tests.servers import serving


@pytest.fixture(scope="module")
def authority() -> Iterator[trustme.CA]:
    """A certificate authority that nobody trusts yet."""
    return trustme.CA()


def _server_side(authority: trustme.CA, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    return context


async def _answer(request: web.Request) -> web.Response:
    if request.content_type == "multipart/form-data":
        part = await (await request.multipart()).next()
        assert isinstance(part, aiohttp.BodyPartReader)
        return web.json_response({"id": str(len(await part.read()))})
    return web.json_response({"id": "s1", "documents": []})


async def test_an_unknown_authority_is_refused(authority: trustme.CA) -> None:
    """At once, with a clear error, and without any request."""
    async with serving(_answer, ssl=_server_side(authority, "127.0.0.1")) as server:
        async with SigningClient(server.origin, "token", retry=RetryPolicy(base_delay=0.01)) as client:
            with pytest.raises(TransportError, match=r"certificate is not trusted.*local issuer") as caught:
                await client.me()
        assert caught.value.attempts == 1
        assert server.requests == []


async def test_a_custom_authority_is_accepted(authority: trustme.CA) -> None:
    """By the caller's own session; uploads of several megabytes arrive whole."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    async with (
        serving(_answer, ssl=_server_side(authority, "127.0.0.1")) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
    ):
        client = SigningClient(server.origin, "token", session=session)
        assert (await client.me()).id == "s1"
        data = make_pdf(3_000_000)
        assert (await client.documents.upload("s1", data, "a.pdf")).id == str(len(data))


async def test_a_wrong_host_is_refused(authority: trustme.CA) -> None:
    """A certificate for another name is not enough, even of a trusted authority."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    async with (
        serving(_answer, ssl=_server_side(authority, "other.example.com")) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
    ):
        client = SigningClient(server.origin, "token", session=session)
        with pytest.raises(TransportError, match="certificate is not trusted"):
            await client.me()
        assert server.requests == []


async def test_a_server_that_speaks_no_tls() -> None:
    """It is an error of the connection, and nothing is sent."""
    async with serving(_answer) as server:
        origin = server.origin.replace("http://", "https://")
        async with SigningClient(origin, "token", retry=RetryPolicy(base_delay=0.01)) as client:
            with pytest.raises(TransportError, match="no connection could be made"):
                await client.me()
        assert server.requests == []
