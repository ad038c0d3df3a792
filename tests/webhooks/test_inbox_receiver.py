"""A receiver with an inbox: a 202 means that the event is stored, whatever the server, and for each tenant."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from signing_async import ConfigurationError, SigningClient
from signing_async.postgres import PostgresInbox
from signing_async.sandbox import Sandbox
from signing_async.webhooks import (
    Event,
    EventFilter,
    EventStatus,
    Inbox,
    MemorySeenEvents,
    Receiver,
    SQLiteSeenEvents,
    WebhookVerifier,
)
from tests.pdfs import make_pdf
from tests.webhooks.deliveries import SECRET, event_body, signed
from tests.webhooks.inboxes import altered_store, fail, settled
from tests.webhooks.servers import ASYNC, PATH, THREADED, serve

VERIFIER = WebhookVerifier(SECRET)
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning:wsgiref")


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
def test_delivery_is_acknowledged_once_it_is_stored_and_a_failing_store_is_a_503(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The body is stored as it was received; a duplicate is acknowledged and stored once."""
    path = tmp_path / "inbox.db"
    methods: dict[str, Any] = {}
    inbox = Inbox(altered_store(path, methods))
    body, other = event_body("evt_1", padding="ö ").replace(b", ", b"  ,\t"), event_body("evt_2")
    with serve(kind, Receiver(VERIFIER, inbox, retry_after=7)) as port:
        assert post(port, body) == (202, {"message": "accepted"}, None)
        assert rows(path) == [("evt_1", body)]
        assert post(port, body) == (202, {"message": "duplicate"}, None)
        methods["add"] = fail
        assert post(port, other) == (503, {"error": "cannot store events now"}, "7")
        methods.clear()
        assert "event evt_2 must be delivered again: cannot store events now" in caplog.text
        assert post(port, other) == (202, {"message": "accepted"}, None)
    assert rows(path) == [("evt_1", body), ("evt_2", other)]
    asyncio.run(inbox.aclose())


async def test_response_waits_for_the_commit_and_a_draining_receiver_finishes_it(tmp_path: Path) -> None:
    proceed, methods = asyncio.Event(), dict[str, Any]()
    async with Inbox(altered_store(tmp_path / "inbox.db", methods)) as inbox:
        add = inbox.store.add

        async def add_slowly(event: Event, body: bytes) -> bool:
            await proceed.wait()
            return await add(event, body)

        methods["add"] = add_slowly
        receiver = Receiver(VERIFIER, inbox)
        first, second = event_body("evt_1"), event_body("evt_2")
        receiving = asyncio.create_task(receiver.receive(signed(first), first))
        await asyncio.wait([receiving], timeout=0.05)
        assert not receiving.done()
        assert not await receiver.drain(timeout=0.01)
        proceed.set()
        assert await receiver.drain()
        assert (await receiving).status == 202
        late = await receiver.receive(signed(second), second)
        assert (late.status, late.message) == (503, "shutting down")
        assert receiver.receive_blocking(signed(second), second).status == 503
        assert [stored.id async for stored in inbox.events()] == ["evt_1"]


def test_seen_events_beside_an_inbox_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^seen: must be None with an inbox, which deduplicates by itself$"):
        Receiver(VERIFIER, Inbox(tmp_path / "inbox.db"), seen=MemorySeenEvents())
    Receiver(VERIFIER, Inbox(tmp_path / "inbox.db"), hand_off_timeout=3600)


async def test_completion_in_the_sandbox_reaches_the_handler_which_downloads_the_sealed_pdf(tmp_path: Path) -> None:
    types: list[str] = []
    inbox = Inbox(tmp_path / "inbox.db")
    with serve("aiohttp", Receiver(VERIFIER, inbox)) as port:
        async with (
            inbox,
            Sandbox(webhook_url=f"http://127.0.0.1:{port}{PATH}", webhook_secret=SECRET) as sandbox,
            SigningClient(sandbox.base_url, sandbox.access_token()) as client,
        ):

            @inbox.on("*")
            async def handle(event: Event) -> None:
                types.append(event.type)
                if event.type == "signing.completed":
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
    assert {(event.status, event.signing_id) for event in events} == {(EventStatus.HANDLED, signing.id)}
    assert (tmp_path / "sealed.pdf").read_bytes().startswith(b"%PDF-")


# Tenants that share a store, each with a namespace

BODY = event_body("evt_1", signing={"id": "sig_1"})


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_equal_ids_of_two_tenants_are_two_events_of_two_signings(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "sqlite":
        inbox = Inbox(tmp_path / "inbox.db", key=b"k" * 32)
    else:
        inbox = PostgresInbox(await request.getfixturevalue("postgres").new_schema(), key=b"k" * 32)
    handled: set[tuple[str | None, str, str | None]] = set()
    both = asyncio.Barrier(2)

    @inbox.on("*")
    async def handle(event: Event) -> None:
        handled.add((event.namespace, event.id, event.signing_id))
        await both.wait()  # neither waits for the other's signing

    async with inbox:
        if isinstance(inbox, PostgresInbox):
            await inbox.create_table()
        for tenant in ("acme", "globex"):
            receiver = Receiver(VERIFIER, inbox, namespace=tenant)
            messages = [(await receiver.receive(signed(BODY), BODY)).message for _ in range(2)]
            assert messages == ["accepted", "duplicate"]
        async with inbox.running():
            stored = await settled(inbox)
        assert handled == {("acme", "evt_1", "sig_1"), ("globex", "evt_1", "sig_1")}
        assert [event.id for event in stored] == ["acme:evt_1", "globex:evt_1"]
        assert await inbox.retry(EventFilter(ids=["acme:evt_1"])) == 1


async def test_receivers_that_share_a_store_of_seen_events_keep_their_tenants_apart(tmp_path: Path) -> None:
    handled: list[Any] = []
    seen = SQLiteSeenEvents(tmp_path / "seen.db")
    for tenant in ("acme", "globex", "acme"):
        receiver = Receiver(VERIFIER, handled.append, seen=seen, namespace=tenant)
        assert (await receiver.receive(signed(BODY), BODY)).status == 202
    assert [(event.namespace, event.key) for event in handled] == [("acme", "acme:evt_1"), ("globex", "globex:evt_1")]
    seen.close()
