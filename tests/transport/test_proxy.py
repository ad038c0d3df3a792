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
from tests.pdfs import make_pdf
from tests.servers import serving, talking

PASSWORD = "S3CR3T-of-the-proxy"
QUICK = RetryPolicy(base_delay=0.01)


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
    store = MemoryTokenStore(Token("old", "refresh"))
    return OAuth(origin, client_id="app", client_secret="s", redirect_uri="https://app/", store=store, **options)


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


@pytest.mark.parametrize("name", ["http_proxy", "ALL_PROXY"])
async def test_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    async with serving(_respond) as server, proxying() as proxy:
        monkeypatch.setenv(name, proxy.url.removeprefix("http://"))
        async with SigningClient(server.origin, "token") as client:
            await client.me()
        assert len(proxy.accepted) == 1


@pytest.mark.parametrize("name", ["localhost,127.0.0.1", "*", "127.0.0.1:{port}"])
async def test_no_proxy_names_hosts_without_a_proxy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    async with serving(_respond) as server, proxying() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("NO_PROXY", name.format(port=server.origin.rpartition(":")[2]))
        async with SigningClient(server.origin, "token") as client:
            await client.me()
        assert proxy.accepted == []


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_proxy_that_refuses_the_password_is_one_permanent_error(
    scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(_respond) as server, proxying() as proxy:
        wrong = proxy.url.replace("anna", "bert")
        client = SigningClient(server.origin.replace("http", scheme), "token", proxy=wrong, retry=QUICK)
        async with client:
            with pytest.raises(TransportError, match=r"proxy.*HTTP 407.*password") as caught:
                await client.signings.send("s1")
        assert (caught.value.transient, caught.value.client_wide, caught.value.effect) == (False, True, "none")
        assert (proxy.refused, server.requests) == (1, [])
    shown = _format_traceback(caught.value)
    assert PASSWORD not in shown + caplog.text + repr(client)


@pytest.mark.parametrize(("refusal", "transient"), [("403 Forbidden", False), ("503 Busy", True)])
async def test_request_that_a_proxy_refuses_to_connect_was_not_sent(refusal: str, transient: bool) -> None:
    retry = RetryPolicy(max_attempts=3, base_delay=0.01)
    async with proxying(refusal) as proxy:
        url = proxy.url.replace("anna", "bert")
        async with SigningClient("https://tenant.example.com", "token", proxy=url, retry=retry) as client:
            with pytest.raises(TransportError, match=rf"the proxy refused to connect \(HTTP {refusal[:3]}\)") as caught:
                await client.signings.send("s")
    error = caught.value
    assert (error.transient, error.client_wide, error.effect) == (transient, not transient, "none")
    assert proxy.refused == (3 if transient else 1)


async def test_proxy_that_is_down_is_named_in_the_error() -> None:
    async with SigningClient(
        "https://tenant.example.com", "token", proxy="127.0.0.1:9", retry=RetryPolicy.none()
    ) as client:
        with pytest.raises(TransportError, match="could not connect to the proxy") as caught:
            await client.me()
    assert caught.value.transient


@pytest.mark.parametrize("value", ["", "socks5://proxy.example.com", "http://", f"http://u:{PASSWORD}@h:port", 5])
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
