"""A receiver with an inbox: a 202 means that the event is stored, and each tenant has its own events."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from signing_async.webhooks import (
    Event,
    EventFilter,
    Inbox,
    Receiver,
    SQLiteSeenEvents,
    WebhookVerifier,
)
from tests.webhooks.deliveries import SECRET, event_body, request, signed
from tests.webhooks.inboxes import altered_store, fail, settled
from tests.webhooks.servers import PATH, serve

VERIFIER = WebhookVerifier(SECRET)
BODY = event_body("evt_1", signing={"id": "sig_1"})
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning:wsgiref")


def rows(path: Path) -> list[tuple[str, bytes]]:
    """Return what another process sees in the inbox."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT id, body FROM events ORDER BY seq").fetchall()


@pytest.mark.parametrize("kind", ["aiohttp", "wsgi"])
def test_delivery_is_acknowledged_once_it_is_stored_and_a_failing_store_is_a_503(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The body is stored as it was received; a duplicate is acknowledged and stored once."""
    path = tmp_path / "inbox.db"
    methods: dict[str, Any] = {}
    inbox = Inbox(altered_store(path, methods))
    body, other = event_body("evt_1", padding="ö ").replace(b", ", b"  ,\t"), event_body("evt_2")
    with serve(kind, Receiver(VERIFIER, inbox, retry_after=7)) as port:

        def post(body: bytes) -> tuple[int, str | None, bytes]:
            status, headers, content = request(port, PATH, body, signed(body))
            return status, headers["Retry-After"], content

        assert post(body) == (202, None, b'{"message": "accepted"}')
        assert rows(path) == [("evt_1", body)]
        assert post(body) == (202, None, b'{"message": "duplicate"}')
        methods["add"] = fail
        assert post(other) == (503, "7", b'{"error": "cannot store events now"}')
        methods.clear()
        assert "event evt_2 must be delivered again: cannot store events now" in caplog.text
        assert post(other) == (202, None, b'{"message": "accepted"}')
    assert rows(path) == [("evt_1", body), ("evt_2", other)]
    asyncio.run(inbox.aclose())


# Tenants that share a store, each with a namespace


async def test_equal_ids_of_two_tenants_are_two_events_of_two_signings(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox.db", key=b"k" * 32)
    handled: set[tuple[str | None, str, str | None]] = set()
    both = asyncio.Barrier(2)

    @inbox.on("*")
    async def handle(event: Event) -> None:
        handled.add((event.namespace, event.id, event.signing_id))
        await both.wait()  # neither waits for the other's signing

    async with inbox:
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
