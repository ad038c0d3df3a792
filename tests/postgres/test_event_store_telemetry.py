"""The contexts of deliveries in PostgreSQL, and the events that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from signing_async import InboxError
from signing_async.postgres import PostgresInbox
from signing_async.telemetry import names
from signing_async.webhooks import EventStatus, Inbox, Receiver, WebhookVerifier
from signing_async.webhooks import inbox as inbox_worker
from signing_async.webhooks.event import parse_event
from tests.postgres.server import PostgresServer
from tests.telemetry.recorded import Recorded, recording
from tests.webhooks.deliveries import SECRET, event_body, signed
from tests.webhooks.inboxes import settled

TIMEOUT = 30.0


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    with recording(monkeypatch) as found:
        yield found


async def _deliver(inbox: Inbox, name: str) -> None:
    body = event_body(name)
    assert (
        await Receiver(WebhookVerifier(SECRET), inbox, hand_off_timeout=TIMEOUT).receive(signed(body), body)
    ).status == 202


async def _handle_all(inbox: Inbox) -> None:
    async with inbox.running():
        await settled(inbox)


async def test_handler_links_to_its_delivery(dsn: str, recorded: Recorded) -> None:
    async with PostgresInbox(dsn, timeout=TIMEOUT, lease=4 * TIMEOUT) as inbox:
        await _deliver(inbox, "evt")
        await _handle_all(inbox)
        stored = await inbox.get("evt")
    delivery = recorded.one("webhook.delivery").context
    (link,) = recorded.one("inbox.handler").links
    assert delivery is not None
    assert link.context.span_id == delivery.span_id
    assert stored is not None
    assert stored.trace_context is not None
    assert f"{delivery.span_id:016x}" in stored.trace_context


async def test_thread_adds_the_context_too(dsn: str, recorded: Recorded) -> None:
    body = event_body("evt")
    async with PostgresInbox(dsn, timeout=TIMEOUT, lease=4 * TIMEOUT) as inbox:
        receiver = Receiver(WebhookVerifier(SECRET), inbox)
        decision = await asyncio.to_thread(receiver.receive_blocking, signed(body), body)
        assert decision.status == 202
        await _handle_all(inbox)
    assert len(recorded.one("inbox.handler").links) == 1


async def test_table_of_an_earlier_version_is_refused(postgres: PostgresServer, dsn: str, table: str) -> None:
    async with PostgresInbox(dsn, timeout=TIMEOUT, lease=4 * TIMEOUT) as inbox:
        await inbox.create_table()
        await postgres.execute(f"ALTER TABLE {table} DROP COLUMN error")
        advice = r"error.* does not exist .*; an earlier version made .*: finish its work there, then rename it$"
        with pytest.raises(InboxError, match=advice):
            await inbox.store.claim(1)


async def test_backlog_counts_what_is_not_settled(
    dsn: str, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_worker, "_REPORT_EVERY", 0.01)
    oldest = datetime.now(UTC) - timedelta(seconds=1000)
    async with PostgresInbox(dsn, timeout=TIMEOUT, lease=4 * TIMEOUT) as inbox:
        for name in ("dead", "handled", "waits"):
            body = event_body(name)
            await inbox.add(parse_event(body, oldest), body)
        dead, handled = await inbox.store.claim(2)
        await inbox.store.settle(dead, EventStatus.DEAD)
        await inbox.store.settle(handled, EventStatus.HANDLED)

        @inbox.on("*")
        async def wait(_: object) -> None:
            await asyncio.Event().wait()

        async with inbox.running(drain_timeout=0), asyncio.timeout(60):
            while not recorded.points(names.PENDING_EVENTS):
                await asyncio.sleep(0.01)
            values = [recorded.points(metric)[0].value for metric in (names.PENDING_EVENTS, names.DEAD_LETTERS)]
            (age,) = recorded.points(names.OLDEST_PENDING)
        assert values == [1, 1]
        assert 1000 <= age.value < 2000
