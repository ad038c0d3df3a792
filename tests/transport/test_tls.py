"""TLS: on by default, a custom authority by the caller's session, and no token before the handshake is trusted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp import web

from signing_async import (
    MemoryTokenStore,
    OAuth,
    OutcomeUnknown,
    RetryPolicy,
    SigningClient,
    Timeouts,
    Token,
    TransportError,
)
from tests.pdfs import make_pdf
from tests.servers import serving, talking

MARK = "S3CR3T"
TOKEN = f"{MARK}-token-0123456789"
QUICK = RetryPolicy(base_delay=0.01, settle=0.1)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """A certificate authority that nobody trusts yet."""
    return trustme.CA()


def _server_side(
    authority: trustme.CA, name: str, *, since: datetime | None = None, until: datetime | None = None
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name, not_before=since, not_after=until).configure_cert(context)
    return context


def _client_side(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def _answer(request: web.Request) -> web.Response:
    if request.content_type == "multipart/form-data":
        part = await (await request.multipart()).next()
        assert isinstance(part, aiohttp.BodyPartReader)
        return web.json_response({"id": str(len(await part.read()))})
    return web.json_response({"id": "s1", "documents": [], "access_token": f"{MARK}-new"})


class Line:
    """A wire between a client and a server, and every byte that went to the server over it."""

    def __init__(self) -> None:
        self.origin = ""
        self.raw = bytearray()
        self.connections = 0


@asynccontextmanager
async def tapped(origin: str) -> AsyncIterator[Line]:
    """A line to this server that writes down what it carries."""
    line = Line()
    host, port = origin.rpartition("//")[2].split(":")

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                if note:
                    line.raw += data
                writer.write(data)
                await writer.drain()
        writer.close()

    async def both(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line.connections += 1
        try:
            there, back = await asyncio.open_connection(host, int(port))
            try:
                await asyncio.gather(carry(reader, back, True), carry(there, writer, False))
            finally:
                back.close()
        finally:
            writer.close()

    async with talking(both) as plain:
        line.origin = plain.replace("http", "https", 1)
        yield line


def _oauth(origin: str, session: aiohttp.ClientSession | None = None) -> OAuth:
    return OAuth(
        origin,
        client_id="app",
        client_secret=f"{MARK}-client-secret",
        redirect_uri="https://app.example.com/",
        store=MemoryTokenStore(Token(TOKEN, f"{MARK}-refresh")),
        session=session,
        retry=QUICK,
    )


async def _streamed(client: SigningClient) -> None:
    async with client.documents.stream_signed("s1", "d1"):
        pass


CALLS: dict[str, Callable[[SigningClient, OAuth, Path], Awaitable[Any]]] = {
    "me": lambda client, oauth, folder: client.me(),
    "create": lambda client, oauth, folder: client.signings.create(name="x", language="EN"),
    "get": lambda client, oauth, folder: client.signings.get("s1"),
    "list": lambda client, oauth, folder: client.signings.list(),
    "send": lambda client, oauth, folder: client.signings.send("s1"),
    "upload": lambda client, oauth, folder: client.documents.upload("s1", make_pdf(), "a.pdf"),
    "read": lambda client, oauth, folder: client.documents.read_signed("s1", "d1"),
    "download": lambda client, oauth, folder: client.documents.download_signed("s1", "d1", folder / "a.pdf"),
    "stream": lambda client, oauth, folder: _streamed(client),
    "add": lambda client, oauth, folder: client.recipients.add("s1", email="a@example.com"),
    "remind": lambda client, oauth, folder: client.recipients.remind("s1", "r1"),
    "exchange": lambda client, oauth, folder: oauth.exchange(f"{MARK}-code"),
    "refresh": lambda client, oauth, folder: oauth.refresh(),
}


# What is trusted


async def test_unknown_authority_is_refused_before_any_request(authority: trustme.CA) -> None:
    async with serving(_answer, ssl=_server_side(authority, "127.0.0.1")) as server:
        async with SigningClient(server.origin, TOKEN, retry=QUICK) as client:
            with pytest.raises(TransportError, match=r"certificate is not trusted.*local issuer") as caught:
                await client.me()
        assert caught.value.attempts == 1
        assert (caught.value.fatal, caught.value.effect) == (True, "none")
        assert server.requests == []


async def test_custom_authority_of_the_callers_session_is_accepted(authority: trustme.CA) -> None:
    """Uploads of several megabytes arrive whole, and no secret is on the wire in clear."""
    async with (
        serving(_answer, ssl=_server_side(authority, "127.0.0.1")) as server,
        tapped(server.origin) as line,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=_client_side(authority))) as session,
    ):
        client = SigningClient(line.origin, TOKEN, session=session)
        assert (await client.me()).id == "s1"
        data = make_pdf(3_000_000)
        assert (await client.documents.upload("s1", data, "a.pdf")).id == str(len(data))
        await _oauth(line.origin, session).exchange(f"{MARK}-code")
        assert server.requests[0].headers["Authorization"] == f"Bearer {TOKEN}"
        assert len(line.raw) > len(data)
        assert MARK.encode() not in line.raw
        assert b"%PDF" not in line.raw


ASK = """
import asyncio, sys
from signing_async import SigningClient

async def main():
    async with SigningClient(sys.argv[1], "token") as client:
        print((await client.me()).id)

asyncio.run(main())
"""


@pytest.mark.parametrize("named", [True, False])
async def test_ssl_cert_file_adds_an_authority(authority: trustme.CA, tmp_path: Path, named: bool) -> None:
    bundle = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(str(bundle))
    environment = {name: value for name, value in os.environ.items() if name not in ("SSL_CERT_FILE", "SSL_CERT_DIR")}
    async with serving(_answer, ssl=_server_side(authority, "127.0.0.1")) as server:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            ASK,
            server.origin,
            env=environment | ({"SSL_CERT_FILE": str(bundle)} if named else {}),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, said = await child.communicate()
    assert out.decode().strip() == ("s1" if named else ""), said.decode()
    assert named or b"certificate is not trusted" in said


# What is not


DAY = timedelta(days=1)
UNTRUSTED: dict[str, tuple[Callable[[trustme.CA, str], ssl.SSLContext | None], str]] = {
    "another authority": (lambda _, name: _server_side(trustme.CA(), name), "certificate is not trusted: .*issuer"),
    "another host": (
        lambda authority, _: _server_side(authority, "other.example.com"),
        r"certificate is not trusted: IP address mismatch.*127\.0\.0\.1",
    ),
    "expired": (
        lambda authority, name: _server_side(
            authority, name, since=datetime.now(UTC) - 9 * DAY, until=datetime.now(UTC) - DAY
        ),
        "certificate is not trusted: certificate has expired",
    ),
    "not valid yet": (
        lambda authority, name: _server_side(
            authority, name, since=datetime.now(UTC) + DAY, until=datetime.now(UTC) + 9 * DAY
        ),
        "certificate is not trusted: certificate is not yet valid",
    ),
    "no TLS": (lambda _, __: None, "could not connect: .*(VERSION|RECORD|REQUEST)"),
}


@pytest.mark.parametrize("name", UNTRUSTED)
async def test_untrusted_server_receives_no_secret(authority: trustme.CA, tmp_path: Path, name: str) -> None:
    """In no call: nothing is sent in clear or encrypted, and the outcome is not unknown."""
    make, said = UNTRUSTED[name]
    async with (
        serving(_answer, ssl=make(authority, "127.0.0.1")) as server,
        tapped(server.origin) as line,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=_client_side(authority))) as session,
    ):
        oauth = _oauth(line.origin, session)
        async with SigningClient(line.origin, oauth, session=session, retry=QUICK) as client:
            for call in CALLS.values():
                line.connections = 0
                with pytest.raises(TransportError, match=said) as caught:
                    await call(client, oauth, tmp_path)
                assert not isinstance(caught.value, OutcomeUnknown)
                assert MARK not in str(caught.value)
                # A certificate does not become right by trying again.
                assert 1 <= line.connections <= (1 if "certificate" in said else 5)
        assert server.requests == []
        assert line.raw
        assert MARK.encode() not in line.raw


async def test_handshake_that_never_ends_is_given_up_after_the_connect_timeout() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.read(65_536))
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
        writer.close()
        left.set()

    seen, left = bytearray(), asyncio.Event()
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listening:
        origin = f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        times = Timeouts(call=2.0, transfer=2.0, connect=0.2)
        async with SigningClient(origin, TOKEN, timeout=times, retry=RetryPolicy.none()) as client:
            with pytest.raises(TransportError, match=r"could not connect|no response within") as caught:
                await client.signings.send("s1")
        await left.wait()
    assert not isinstance(caught.value, OutcomeUnknown)
    assert seen[:1] == b"\x16"  # a handshake, and nothing else
    assert MARK.encode() not in seen
