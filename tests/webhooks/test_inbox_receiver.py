"""A receiver with an inbox: a 202 means that the event is stored, whatever the server."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from signing_async import SigningClient
from signing_async.errors import ConfigurationError
from signing_async.sandbox import Sandbox
from signing_async.storage.events import SqliteEventStore
from signing_async.webhooks import (
    Event,
    EventStatus,
    Inbox,
    MemorySeenEvents,
    Receiver,
    WebhookVerifier,
    aiohttp_handler,
)
from tests.pdfs import make_pdf
from tests.webhooks.deliveries import SECRET, event_body, signed
from tests.webhooks.inboxes import locked, settled
from tests.webhooks.servers import ASYNC, PATH, THREADED, serve

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning:wsgiref")


@contextlib.asynccontextmanager
async def receiving(receiver: Receiver) -> AsyncIterator[str]:
    """Serve the receiver with aiohttp in this event loop, and yield its URL."""
    app = web.Application()
    app.router.add_post("/hooks", aiohttp_handler(receiver))
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://localhost:{runner.addresses[0][1]}/hooks"
    finally:
        await runner.cleanup()


def post(port: int, body: bytes) -> tuple[int, dict[str, Any], str | None]:
    """Return the status, the body and Retry-After of a delivery."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", PATH, body, signed(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read()), response.headers["Retry-After"]


def rows(path: Path) -> list[tuple[str, bytes]]:
    """Return what another process sees in the inbox."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT id, body FROM events ORDER BY seq").fetchall()


@pytest.mark.parametrize("kind", [*ASYNC, *THREADED])
def test_delivery_is_acknowledged_once_it_is_stored_and_a_failing_store_is_a_503(kind: str, tmp_path: Path) -> None:
    """The body is stored as it was received; a duplicate is acknowledged and stored once."""
    path = tmp_path / "inbox.db"
    inbox = Inbox(SqliteEventStore(path, timeout=0.05))
    body = event_body("evt_1", padding="ö ").replace(b", ", b"  ,\t")
    with serve(kind, Receiver(WebhookVerifier(SECRET), inbox, retry_after=7)) as port:
        assert post(port, body) == (202, {"message": "accepted"}, None)
        assert rows(path) == [("evt_1", body)]
        assert post(port, body) == (202, {"message": "duplicate"}, None)
        other = event_body("evt_2")
        with locked(path):
            assert post(port, other) == (503, {"error": "cannot store events now"}, "7")
        assert rows(path) == [("evt_1", body)]
        assert post(port, other) == (202, {"message": "accepted"}, None)
    assert rows(path) == [("evt_1", body), ("evt_2", other)]
    asyncio.run(inbox.aclose())


async def test_response_waits_for_the_commit(tmp_path: Path) -> None:
    """While another program locks the file there is neither a response nor an error."""
    path = tmp_path / "inbox.db"
    async with Inbox(path) as inbox, receiving(Receiver(WebhookVerifier(SECRET), inbox)) as url:
        await inbox.stats()
        body = event_body("evt_1")
        async with aiohttp.ClientSession() as session:
            with locked(path):
                posting = asyncio.create_task(session.post(url, data=body, headers=signed(body)))
                await asyncio.wait([posting], timeout=0.1)
                assert not posting.done()
            assert (await posting).status == 202
            assert rows(path) == [("evt_1", body)]


async def test_failing_store_is_logged_with_the_event_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Inbox(tmp_path / "nowhere" / "inbox.db") as inbox:
        body = event_body("evt_1")
        decision = await Receiver(WebhookVerifier(SECRET), inbox).receive(signed(body), body)
    assert decision.status == 503
    assert "could not store event evt_1: it must be delivered again" in caplog.text


async def test_draining_receiver_finishes_what_it_stores_and_refuses_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "inbox.db"
    async with Inbox(path) as inbox:
        receiver = Receiver(WebhookVerifier(SECRET), inbox)
        await inbox.stats()
        first, second = event_body("evt_1"), event_body("evt_2")
        with locked(path):
            receiving = asyncio.create_task(receiver.receive(signed(first), first))
            await asyncio.sleep(0)
            assert not await receiver.drain(timeout=0.01)
        assert await receiver.drain()
        assert (await receiving).status == 202
        late = await receiver.receive(signed(second), second)
        assert (late.status, late.message) == (503, "shutting down")
        assert receiver.receive_blocking(signed(second), second).status == 503
    assert rows(path) == [("evt_1", first)]


def test_seen_events_beside_an_inbox_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^seen: must be None with an inbox, which deduplicates by itself$"):
        Receiver(WebhookVerifier(SECRET), Inbox(tmp_path / "inbox.db"), seen=MemorySeenEvents())
    Receiver(WebhookVerifier(SECRET), Inbox(tmp_path / "inbox.db"), hand_off_timeout=3600)


async def test_lifecycle_of_a_signing_in_the_sandbox_reaches_the_handlers_in_order(tmp_path: Path) -> None:
    """The handler of the completion reads the signing and downloads its sealed PDF."""
    types: list[str] = []
    async with (
        Inbox(tmp_path / "inbox.db") as inbox,
        receiving(Receiver(WebhookVerifier(SECRET), inbox)) as url,
        Sandbox(webhook_url=url, webhook_secret=SECRET) as sandbox,
        SigningClient(sandbox.base_url, sandbox.access_token()) as client,
    ):

        @inbox.on("*")
        async def record(event: Event) -> None:
            types.append(event.type)

        @inbox.on("signing.completed")
        async def archive(event: Event) -> None:
            await record(event)
            signing = await client.signings.get(event.signing_id or "")
            await client.documents.download_signed(signing, signing.documents[0], tmp_path / "sealed.pdf")

        async with inbox.running():
            signing = await client.signings.create(name="Lease", language="EN")
            await client.documents.upload(signing, make_pdf(), "lease.pdf")
            await client.recipients.add(signing, email="anna@example.com")
            await client.signings.send(signing)
            await sandbox.complete(signing.id)
            await sandbox.webhooks.settled()
            events = await settled(inbox)
    assert (types[0], types[-1]) == ("signing.created", "signing.completed")
    assert {event.status for event in events} == {EventStatus.HANDLED}
    assert {event.signing_id for event in events} == {signing.id}
    assert (tmp_path / "sealed.pdf").read_bytes().startswith(b"%PDF-")
