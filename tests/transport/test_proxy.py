"""The proxy between the client and the service: the argument, the setting, the environment, and a .netrc file."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import ssl
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp import web

from signing_async import ConfigurationError, MemoryTokenStore, OAuth, RetryPolicy, SigningClient, Token, TransportError
from tests.auth.oauth_servers import oauth_for
from tests.pdfs import make_pdf
from tests.servers import serving, talking

PASSWORD = "S3CR3T-of-the-proxy"
QUICK = RetryPolicy(max_attempts=3, base_delay=0.01)


class Proxy:
    """A running proxy that wants a password: its URL, and the first line of each request that it accepted."""

    def __init__(self) -> None:
        self.url = ""
        self.accepted: list[str] = []
        self.refused = 0


@asynccontextmanager
async def proxying(refusal: str = "407 Proxy Authentication Required") -> AsyncIterator[Proxy]:
    """An HTTP proxy that forwards plain requests and opens tunnels, for the user ``anna``."""
    proxy = Proxy()
    expected = "Basic " + base64.b64encode(f"anna:{PASSWORD}".encode()).decode()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
        writer.close()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split("\r\n")[0].split(" ")
        if f"proxy-authorization: {expected}".lower() not in head.lower():
            proxy.refused += 1
            writer.write(f"HTTP/1.1 {refusal}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
            return
        proxy.accepted.append(f"{method} {target}")
        address = target if method == "CONNECT" else target.removeprefix("http://").partition("/")[0]
        host, port = address.split(":")
        there, back = await asyncio.open_connection(host, int(port))
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            back.write(head.replace("\r\n", "\r\nConnection: close\r\n", 1).encode())
        try:
            await asyncio.gather(copy(reader, back), copy(there, writer))
        finally:
            back.close()
            await back.wait_closed()

    async with talking(carry) as origin:
        proxy.url = origin.replace("http://", f"http://anna:{PASSWORD}@")
        yield proxy


async def _respond(request: web.Request) -> web.Response:
    return web.json_response({"id": "s1", "access_token": "new", "authorization": request.headers.get("Authorization")})


def _oauth(origin: str, **options: Any) -> OAuth:
    return oauth_for(origin, store=MemoryTokenStore(Token("old", "refresh")), **options)


def _format_traceback(error: BaseException) -> str:
    """Return the traceback with the variables of all frames but the test's own."""
    below = error.__traceback__.tb_next if error.__traceback__ else None
    shown = traceback.TracebackException(type(error), error, below, capture_locals=True)
    return "".join(shown.format())


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


async def test_calls_uploads_and_token_requests_go_through_the_proxy() -> None:
    async with serving(_respond) as server, proxying() as proxy:
        async with _oauth(server.origin, proxy=proxy.url) as oauth:
            await oauth.refresh()
            async with SigningClient(server.origin, oauth, proxy=proxy.url) as client:
                await client.me()
                await client.documents.upload("s1", make_pdf(), "a.pdf")
                await oauth.refresh()
        token = f"POST {server.origin}/api/oauth/token"
        upload = f"POST {server.origin}/api/1.0/signings/s1/documents"
        assert [line for line in proxy.accepted if line.startswith("POST")] == [token, upload, token]
        assert f"GET {server.origin}/api/1.0/me" in proxy.accepted
        assert len(server.requests) == len(proxy.accepted)


async def test_tls_goes_through_a_tunnel_of_the_proxy() -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with (
        serving(_respond, ssl=context) as server,
        proxying() as proxy,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as session,
        SigningClient(server.origin, "token", session=session, proxy=proxy.url) as client,
    ):
        assert (await client.me()).id == "s1"
        assert proxy.accepted == [f"CONNECT {server.origin.removeprefix('https://')}"]


@pytest.mark.parametrize(
    ("name", "without", "requests"),
    [("http_proxy", "", 1), ("ALL_PROXY", "", 1), ("HTTP_PROXY", "a,127.0.0.1", 0), ("HTTP_PROXY", "127.0.0.1:{}", 0)],
)
async def test_proxy_of_the_environment_is_used_except_for_the_hosts_of_no_proxy(
    monkeypatch: pytest.MonkeyPatch, name: str, without: str, requests: int
) -> None:
    async with serving(_respond) as server, proxying() as proxy:
        monkeypatch.setenv(name, proxy.url.removeprefix("http://"))
        monkeypatch.setenv("NO_PROXY", without.format(server.origin.rpartition(":")[2]))
        async with SigningClient(server.origin, "token") as client:
            await client.me()
        assert len(proxy.accepted) == requests


@pytest.mark.parametrize(
    ("origin", "refusal", "said"),
    [
        ("http://tenant.localhost", "407 Proxy Authentication Required", r"\(HTTP 407\).*the password"),
        ("https://tenant.example.com", "407 Proxy Authentication Required", r"\(HTTP 407\).*the password"),
        ("https://tenant.example.com", "403 Forbidden", r"\(HTTP 403\)"),
        ("https://tenant.example.com", "503 Busy", r"\(HTTP 503\)"),
    ],
)
async def test_request_that_a_proxy_refuses_to_connect_was_not_sent(
    origin: str, refusal: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is permanent unless the proxy is busy, and does not show the password."""
    caplog.set_level(logging.DEBUG)
    async with proxying(refusal) as proxy:
        options: Any = {"proxy": proxy.url.replace("anna", "bert"), "retry": QUICK}
        async with SigningClient(origin, "token", **options) as client:
            with pytest.raises(TransportError, match=f"the proxy refused to connect {said}") as caught:
                await client.signings.send("s")
    error, transient = caught.value, refusal == "503 Busy"
    assert (error.transient, error.client_wide, error.effect) == (transient, not transient, "none")
    assert proxy.refused == (3 if transient else 1)
    assert PASSWORD not in _format_traceback(error) + caplog.text + repr(client)


async def test_proxy_that_is_down_is_named_in_the_error() -> None:
    once = RetryPolicy.none()
    async with SigningClient("https://tenant.example.com", "token", proxy="127.0.0.1:9", retry=once) as client:
        with pytest.raises(TransportError, match="could not connect to the proxy") as caught:
            await client.me()
    assert caught.value.transient


@pytest.mark.parametrize("value", ["", "socks5://proxy.example.com", f"http://u:{PASSWORD}@h:port", 5])
def test_invalid_proxy_is_a_configuration_error_that_does_not_show_it(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^proxy: must be the URL of an HTTP proxy") as caught:
        SigningClient("https://tenant.example.com", "token", proxy=value)
    shown = _format_traceback(caught.value)
    assert PASSWORD not in shown


async def _add_header(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    request.headers["X-Own"] = "1"
    return await handler(request)


@pytest.mark.parametrize("trust_env", [False, True])
async def test_netrc_file_is_never_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trust_env: bool) -> None:
    file = tmp_path / "netrc"
    file.write_text("machine 127.0.0.1 login anna password netrc-password\n")
    monkeypatch.setenv("NETRC", str(file))
    async with (
        serving(_respond) as server,
        aiohttp.ClientSession(trust_env=trust_env, middlewares=[_add_header]) as session,
    ):
        oauth = _oauth(server.origin, session=session)
        client = SigningClient(server.origin, oauth, session=session)
        await client.me()
        await oauth.refresh()
        assert [request.headers.get("Authorization") for request in server.requests] == ["Bearer old", None]
        assert all(request.headers["X-Own"] == "1" for request in server.requests)


async def test_default_content_type_of_the_session_does_not_replace_the_bodys_own() -> None:
    async with serving(_respond) as server, aiohttp.ClientSession(headers={"Content-Type": "text/odd"}) as session:
        oauth = _oauth(server.origin, session=session)
        client = SigningClient(server.origin, oauth, session=session)
        await client.signings.create(name="Lease", language="EN")
        await client.documents.upload("s1", make_pdf(), "a.pdf")
        await client.request("POST", "/x", body=b"data", headers={"Content-Type": "text/plain"}, repeat=True)
        await oauth.refresh()
    types = [request.headers["Content-Type"].partition(";")[0] for request in server.requests]
    assert types == ["application/json", "multipart/form-data", "text/plain", "application/x-www-form-urlencoded"]
