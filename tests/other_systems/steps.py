"""What the tests run in a process of the other system: ``python -m tests.other_systems.steps NAME JSON``."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest

from signing_async import FileTokenStore, InvalidRequest, OAuth, SigningClient
from signing_async.archive import Archive, verify_archive
from signing_async.webhooks import Event, Inbox, Receiver, SQLiteSeenEvents, WebhookVerifier, wsgi_app
from tests.webhooks.deliveries import SECRET, event_body, signed


def _names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    data = path.read_bytes()
    for start in range(0, len(data), 100_000):
        yield data[start : start + 100_000]


async def transfers(
    base_url: str, token: str, draft: str, small: str, large: str, signing: str, document: str, folder: str
) -> None:
    """Upload the small file twice and the large one six times; download a sealed document, and archive all of them."""
    target = Path(folder, "sealed.pdf")
    async with SigningClient(base_url, token) as client:
        await client.documents.upload(draft, small)
        await client.documents.upload(draft, large)
        await client.documents.upload(draft, _chunks(Path(large)), "stream.pdf")
        with Path(large).open("rb") as file:
            # At once, though Windows reads a file object only from its current position.
            await asyncio.gather(*(client.documents.upload(draft, file, f"{name}.pdf") for name in "abc"))
            assert file.tell() == 0
        async for result in client.documents.upload_many(draft, [small, large]):
            assert result.error is None

        first = await client.documents.download_signed(signing, document, target, overwrite=False)
        assert await client.documents.download_signed(signing, document, target) == first
        with pytest.raises(InvalidRequest, match="already exists"):
            await client.documents.download_signed(signing, document, target, overwrite=False)
        assert _names(folder) == ["sealed.pdf"]
        archived = []
        for _ in range(2):
            async with Archive(client, Path(folder, "archive"), journal=Path(folder, "archive.db")) as archive:
                archived.append([result.error async for result in archive.sweep()])
        assert archived == [[None], []]
        report = await verify_archive(Path(folder, "archive"))
        assert (report.ok, report.documents) == (True, 1)
    assert _names(folder) == ["archive", "archive.db", "sealed.pdf"]


async def refresh(file: str, base_url: str, **app: str) -> None:
    """Use the expired token of the file at the same time as other processes."""
    async with (
        OAuth(base_url, store=FileTokenStore(file), **app) as oauth,
        SigningClient(base_url, oauth) as client,
    ):
        assert (await client.me()).email == "user@sandbox.example"


async def events(folder: str) -> None:
    """Receive events into an inbox through WSGI, handle them, and end a body that does not arrive."""
    handled: list[Event] = []
    async with Inbox(Path(folder, "inbox.db")) as inbox:
        inbox.on("*")(handled.append)
        receiver = Receiver(WebhookVerifier(SECRET), inbox, body_timeout=0.5)
        with make_server("127.0.0.1", 0, wsgi_app(receiver), handler_class=_Quiet) as server:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            async with inbox.running():
                statuses = [await asyncio.to_thread(_post, server.server_port, f"evt_{n}") for n in (1, 2, 1)]
                while len(handled) < 2:
                    await asyncio.sleep(0.01)
            assert await asyncio.to_thread(_send_half, server.server_port) == b"HTTP/1.0 408"
            server.shutdown()
    assert (statuses, sorted(event.id for event in handled)) == ([202, 202, 202], ["evt_1", "evt_2"])
    assert _names(folder) == ["inbox.db"]
    seen = SQLiteSeenEvents(Path(folder, "seen.db"))
    assert [seen.claim("evt_1").value, seen.claim("evt_1").value] == ["new", "pending"]
    seen.close()


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


def _post(port: int, event_id: str) -> int:
    body = event_body(event_id)
    request = urllib.request.Request(f"http://127.0.0.1:{port}/", body, signed(body))
    with urllib.request.urlopen(request, timeout=30) as response:
        status: int = response.status
    return status


def _send_half(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        return connection.makefile("rb").readline()[:12]


async def hold(file: str) -> None:
    """Hold the lock of a token file until the process is killed."""
    async with FileTokenStore(file).lock():
        print("held", flush=True)
        await asyncio.to_thread(time.sleep, 600)


async def lock(file: str) -> None:
    """Acquire the lock of a token file, one task after another."""
    store, held = FileTokenStore(file), 0
    print("waiting", flush=True)

    async def once() -> None:
        nonlocal held
        async with store.lock():
            held += 1
            assert held == 1
            await asyncio.sleep(0.01)
            held -= 1

    await asyncio.gather(once(), once(), once())


if __name__ == "__main__":
    arguments: dict[str, Any] = json.loads(sys.argv[2])
    asyncio.run(globals()[sys.argv[1]](**arguments))
