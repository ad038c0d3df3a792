"""Receivers of several tenants share an inbox or a store of seen events; each has a namespace."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from signing_async.errors import ConfigurationError
from signing_async.postgres import PostgresInbox
from signing_async.webhooks import (
    Event,
    EventFilter,
    EventStatus,
    Inbox,
    Receiver,
    SQLiteSeenEvents,
    WebhookVerifier,
)
from tests.webhooks.deliveries import SECRET, event_body, signed
from tests.webhooks.inboxes import settled

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
    both = asyncio.Event()

    @inbox.on("*")
    async def handle(event: Event) -> None:
        handled.add((event.namespace, event.id, event.signing_id))
        if len(handled) == 2:
            both.set()
        await both.wait()  # neither waits for the other's signing

    async with inbox:
        if isinstance(inbox, PostgresInbox):
            await inbox.create_table()
        for tenant in ("acme", "globex"):
            receiver = Receiver(WebhookVerifier(SECRET), inbox, namespace=tenant)
            messages = [(await receiver.receive(signed(BODY), BODY)).message for _ in range(2)]
            assert messages == ["accepted", "duplicate"]
        async with inbox.running():
            stored = await settled(inbox)
        assert handled == {("acme", "evt_1", "sig_1"), ("globex", "evt_1", "sig_1")}
        assert [(event.id, event.status) for event in stored] == [
            ("acme:evt_1", EventStatus.HANDLED),
            ("globex:evt_1", EventStatus.HANDLED),
        ]
        assert await inbox.retry(EventFilter(ids=["acme:evt_1"])) == 1


async def test_receivers_that_share_a_store_of_seen_events_keep_their_tenants_apart(tmp_path: Path) -> None:
    handled: list[Any] = []
    seen = SQLiteSeenEvents(tmp_path / "seen.db")
    for tenant in ("acme", "globex", "acme"):
        receiver = Receiver(WebhookVerifier(SECRET), handled.append, seen=seen, namespace=tenant)
        assert (await receiver.receive(signed(BODY), BODY)).status == 202
    assert [(event.namespace, event.id, event.key) for event in handled] == [
        ("acme", "evt_1", "acme:evt_1"),
        ("globex", "evt_1", "globex:evt_1"),
    ]
    seen.close()


@pytest.mark.parametrize("name", ["", "a:b", "å", 5])
def test_invalid_namespace_is_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^namespace: must be "):
        Receiver(WebhookVerifier(SECRET), print, namespace=name)
