"""TLS: on by default, a custom authority by the caller's session, and no token before the handshake is trusted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp import web

from signing_async import OutcomeUnknown, RetryPolicy, SigningClient, Timeouts, TransportError
from tests.fuzz.promises import TOKEN
from tests.pdfs import make_pdf
from tests.servers import Web, serving, talking
from tests.transport.hostile import OPERATIONS, connected

MARK = "S3CR3T"
QUICK = RetryPolicy(base_delay=0.01, settle=0.1)
assert MARK in TOKEN


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """A certificate authority that nobody trusts yet."""
    return trustme.CA()


def _server_side(authority: trustme.CA, name: str = "127.0.0.1", **valid: Any) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name, **valid).configure_cert(context)
    return context


def _client_side(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def _respond(request: web.Request) -> web.Response:
    if request.content_type == "multipart/form-data":
        part = await (await request.multipart()).next()
        assert isinstance(part, aiohttp.BodyPartReader)
        return web.json_response({"id": str(len(await part.read()))})
    return web.json_response({"id": "s1", "documents": [], "access_token": f"{MARK}-new"})


# What is trusted


async def test_unknown_authority_is_refused_before_any_request(authority: trustme.CA) -> None:
    async with serving(_respond, ssl=_server_side(authority)) as server:
        async with SigningClient(server.origin, TOKEN, retry=QUICK) as client:
            with pytest.raises(TransportError, match=r"certificate is not trusted.*local issuer") as caught:
                await client.me()
        assert caught.value.attempts == 1
        assert (caught.value.fatal, caught.value.effect) == (True, "none")
        assert server.requests == []


async def test_custom_authority_of_the_callers_session_is_accepted(authority: trustme.CA) -> None:
    """Uploads of several megabytes arrive whole."""
    async with (
        serving(_respond, ssl=_server_side(authority)) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=_client_side(authority))) as session,
    ):
        client = SigningClient(server.origin, TOKEN, session=session)
        assert (await client.me()).id == "s1"
        data = make_pdf(3_000_000)
        assert (await client.documents.upload("s1", data, "a.pdf")).id == str(len(data))
        assert server.requests[0].headers["Authorization"] == f"Bearer {TOKEN}"


ASK = """
import asyncio, sys
from signing_async import SigningClient

async def main():
    async with SigningClient(sys.argv[1], "token") as client:
        print((await client.me()).id)

asyncio.run(main())
"""


async def test_ssl_cert_file_adds_an_authority(authority: trustme.CA, tmp_path: Path) -> None:
    """The variable is read when a process starts."""
    bundle = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(str(bundle))
    async with serving(_respond, ssl=_server_side(authority)) as server:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            ASK,
            server.origin,
            env={**os.environ, "SSL_CERT_FILE": str(bundle)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, said = await child.communicate()
    assert out.decode().strip() == "s1", said.decode()


# What is not


LAST_YEAR = {"not_before": datetime(2025, 1, 1, tzinfo=UTC), "not_after": datetime(2025, 2, 1, tzinfo=UTC)}


@pytest.mark.parametrize(
    ("certificate", "said"),
    [({"name": "other.example.com"}, r"IP address mismatch.*127\.0\.0\.1"), (LAST_YEAR, "certificate has expired")],
    ids=["another host", "expired"],
)
async def test_untrusted_server_receives_no_request(
    authority: trustme.CA, tmp_path: Path, certificate: dict[str, Any], said: str
) -> None:
    """In no call; and the outcome is not unknown."""
    said = f"certificate is not trusted: {said}"
    async with (
        serving(_respond, ssl=_server_side(authority, **certificate)) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=_client_side(authority))) as session,
        connected(server, session=session, retry=QUICK) as client,
    ):
        for operate in OPERATIONS.values():
            with pytest.raises(TransportError, match=said) as caught:
                await operate(client, tmp_path)
            assert not isinstance(caught.value, OutcomeUnknown)
            assert MARK not in str(caught.value)
            # A certificate does not become right by trying again.
            assert caught.value.attempts == 1
        assert server.requests == []


async def test_server_without_tls_receives_no_secret(tmp_path: Path) -> None:
    """Nothing is sent in clear."""
    seen = bytearray()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.read(65_536))
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with talking(refuse) as origin, connected(Web(origin.replace("http", "https")), retry=QUICK) as client:
        for operate in OPERATIONS.values():
            with pytest.raises(TransportError, match=r"could not connect: .*(VERSION|RECORD|REQUEST)") as caught:
                await operate(client, tmp_path)
            assert not isinstance(caught.value, OutcomeUnknown)
    assert seen
    assert MARK.encode() not in seen


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
