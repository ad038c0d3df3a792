"""A caller of the API, and the bodies of its uploads and token requests."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from yarl import URL

from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf

API = "/api/1.0"
TOKEN = "/api/oauth/token"
CALLBACK = "http://127.0.0.1:1/callback"
VERIFIER = "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"
CHALLENGE = "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM"  # both are RFC 7636's example


class Caller:
    """Calls the API; `headers` are those of the last response."""

    def __init__(self, sandbox: Sandbox, session: aiohttp.ClientSession) -> None:
        self.sandbox = sandbox
        self.session = session
        self.headers: dict[str, str] = {}

    async def __call__(self, method: str, path: str | URL, **options: Any) -> tuple[int, Any]:
        """Return the status and the body: decoded JSON, or bytes."""
        async with self.session.request(method, path, **options) as response:
            self.headers = {name.lower(): value for name, value in response.headers.items()}
            body = await response.read()
            if "json" in response.content_type and body:
                return response.status, await response.json(content_type=None)
            return response.status, body

    async def ok(self, method: str, path: str, **options: Any) -> Any:
        """Return the body of a response that must be a success."""
        status, body = await self(method, path, **options)
        assert 200 <= status < 300, (status, body)
        return body

    async def refusal(self, method: str, path: str | URL, **options: Any) -> tuple[int, str]:
        """Return the status and the code of an error response."""
        status, body = await self(method, path, **options)
        return status, body["code"]

    async def draft(self, **fields: Any) -> str:
        """Return the id of a new draft."""
        body = await self.ok("POST", f"{API}/signings", json={"name": "A contract", "language": "EN"} | fields)
        return str(body["id"])

    async def upload(self, signing_id: str, data: bytes | None = None, filename: str = "contract.pdf") -> Any:
        """Return the status and body of an upload."""
        form = aiohttp.FormData()
        file = io.BytesIO(make_pdf() if data is None else data)
        form.add_field("selected_file", file, filename=filename, content_type="application/pdf")
        return await self("POST", f"{API}/signings/{signing_id}/documents", data=form)

    async def recipient(self, signing_id: str, **fields: Any) -> str:
        """Return the id of a new recipient."""
        body = {"email": "anna@example.com", "first_name": "Anna", "last_name": "Berg"} | fields
        return str((await self.ok("POST", f"{API}/signings/{signing_id}/recipients", json=body))["id"])

    async def sent(
        self, recipients: int = 1, person: Mapping[str, Any] = {}, **fields: Any
    ) -> tuple[str, str, list[str]]:
        """Return a sent signing's id, its document's, and its recipients'."""
        signing_id = await self.draft(**fields)
        _, document = await self.upload(signing_id)
        people = [await self.recipient(signing_id, email=f"p{n}@example.com", **person) for n in range(recipients)]
        await self.ok("POST", f"{API}/signings/{signing_id}/send")
        return signing_id, document["id"], people

    async def works(self, access_token: str) -> bool:
        """Return whether the API accepts this access token."""
        status, _ = await self("GET", f"{API}/me", headers={"Authorization": f"Bearer {access_token}"})
        return bool(status == 200)


@asynccontextmanager
async def caller(sandbox: Sandbox) -> AsyncIterator[Caller]:
    """Return a caller with the default user's token."""
    headers = {"Authorization": f"Bearer {sandbox.access_token()}"}
    async with aiohttp.ClientSession(sandbox.base_url, headers=headers) as session:
        yield Caller(sandbox, session)


def contents(sandbox: Sandbox) -> list[object]:
    """Return what the sandbox holds, without events and deliveries."""
    held = [sandbox.signings, sandbox.documents(), sandbox.recipients(), sandbox.notifications, sandbox.apps]
    return [*held, sandbox.accounts.users(), sandbox.webhooks.endpoints(), sandbox.clock.offset]


async def begin_upload(
    sandbox: Sandbox, signing_id: str, sent: bytes = b"--b\r\n", size: int = 9000
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send the head and the first bytes of an upload over a connection of its own; wait until it is being received."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(sandbox.base_url.rpartition(":")[2]))
    head = f"POST {API}/signings/{signing_id}/documents HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n"
    head += f"Authorization: Bearer {sandbox.access_token()}\r\n"
    head += "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    before = len(sandbox.requests)
    writer.write(head.encode() + sent)
    async with asyncio.timeout(10):
        while len(sandbox.requests) == before:
            await asyncio.sleep(0.01)
    return reader, writer


def multipart(*dispositions: str) -> dict[str, Any]:
    """Return the options of an upload: a small PDF for each of these Content-Disposition headers."""
    parts = [f"--b\r\nContent-Disposition: {one}\r\n\r\n".encode() + make_pdf() + b"\r\n" for one in dispositions]
    return {"data": b"".join(parts) + b"--b--\r\n", "headers": {"Content-Type": "multipart/form-data; boundary=b"}}


def exchange(sandbox: Sandbox, app: Any, **changes: str) -> dict[str, str]:
    """Return the parameters of a valid code exchange with changes."""
    return {
        "grant_type": "authorization_code",
        "client_id": app.client_id,
        "client_secret": app.client_secret,
        "redirect_uri": app.redirect_uri,
        "code": sandbox.authorize(app),
    } | changes


def refresh(app: Any, token: str) -> dict[str, str]:
    """Return the parameters of a valid refresh."""
    secret = {"client_id": app.client_id, "client_secret": app.client_secret}
    return {"grant_type": "refresh_token", "refresh_token": token} | secret
