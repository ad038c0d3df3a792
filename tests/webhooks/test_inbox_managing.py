"""An inbox is read, counted, retried, purged and encrypted; its settings are checked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from signing_async.errors import ConfigurationError, InboxError, InvalidRequest
from signing_async.storage.events import SqliteEventStore
from signing_async.webhooks import (
    Event,
    EventFilter,
    EventStatus,
    Inbox,
)
from signing_async.webhooks import inbox as inbox_module
from signing_async.webhooks.event import parse_event
from tests.webhooks.inboxes import AT_ONCE, add, settled, stored

LOGGER = "signing_async.webhooks"


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[Inbox]:
    """An inbox that retries at once."""
    async with Inbox(tmp_path / "inbox.db", retry=AT_ONCE) as opened:
        yield opened


async def test_run_purges_handled_events_after_the_retention_and_still_knows_their_ids(tmp_path: Path) -> None:
    async with Inbox(tmp_path / "inbox.db", retention=0.001) as inbox:
        await add(inbox, "e1")
        async with inbox.running():
            await settled(inbox)
        await asyncio.sleep(0.01)
        async with inbox.running(), asyncio.timeout(30):
            while (await stored(inbox, "e1")).body:
                await asyncio.sleep(0.005)
        event = parse_event(b'{"id": "e1"}', datetime.now(UTC))
        assert not await inbox.add(event, b"{}")
        assert await inbox.retry(EventFilter()) == 0


async def test_failing_purge_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(SqliteEventStore):
        async def purge(self, settled_before: datetime) -> int:
            raise InboxError("locked")

    async with Inbox(Failing(tmp_path / "inbox.db")) as inbox, inbox.running(), asyncio.timeout(30):
        while "cannot purge events now: locked" not in caplog.text:
            await asyncio.sleep(0.005)


async def test_events_can_be_read_counted_retried_and_purged(inbox: Inbox) -> None:
    calls: list[str] = []

    @inbox.on("*")
    async def handle(event: Event) -> None:
        calls.append(event.id)
        if len(calls) <= 3:
            raise RuntimeError("down")

    await add(inbox, "e1", kind="signing.sent")
    async with inbox.running():
        await settled(inbox)
        await add(inbox, "e2")
        await settled(inbox)
        assert (await inbox.stats()).counts == {"pending": 0, "handled": 1, "dropped": 0, "dead": 1}
        assert [event.id async for event in inbox.events(EventFilter(type="signing.s*"))] == ["e1"]
        assert await inbox.retry(EventFilter(status=EventStatus.DEAD)) == 1
        first, _ = await settled(inbox)
    assert (first.status, first.attempts, first.error) == (EventStatus.HANDLED, 1, None)
    assert calls == ["e1"] * 3 + ["e2", "e1"]
    assert await inbox.purge(older_than=3600) == 0
    assert await inbox.purge(older_than=0) == 2
    assert (await stored(inbox, "e1")).body == b""
    assert await inbox.get("e3") is None
    with pytest.raises(
        ConfigurationError, match=r"^older_than: must be a number of at least 0 and of at most 1e\+09, got -1$"
    ):
        await inbox.purge(older_than=-1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ids": "e1"}, "ids: must be a sequence of event ids, got the string 'e1'"),
        (
            {"since": datetime(2031, 1, 1)},
            r"since: must be a datetime with a time zone, got datetime.datetime\(2031, 1, 1, 0, 0\)",
        ),
        ({"until": "2031-01-01"}, "until: must be a datetime with a time zone, got '2031-01-01'"),
    ],
)
def test_invalid_filter_is_refused(settings: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{words}$"):
        EventFilter(**settings)


async def test_key_encrypts_bodies_at_rest_and_can_be_rotated(tmp_path: Path) -> None:
    old, new = b"o" * 32, b"n" * 32
    path = tmp_path / "inbox.db"
    async with Inbox(path, key=old) as inbox:
        await add(inbox, "e1", "a very secret signing"[2:])
    async with Inbox(path, key=[new, old]) as inbox:
        await add(inbox, "e2", "another")
        handled: list[str] = []
        inbox.on("*")(lambda event: handled.append(event.id))
        async with inbox.running():
            first, second = await settled(inbox)
    assert handled == ["e1", "e2"]
    assert first.event.payload["signing"] == {"id": "very secret signing"}
    assert second.event.id == "e2"
    assert b'"signing"' not in path.read_bytes()
    assert repr(Inbox(path, key=new)) == f"Inbox(SqliteEventStore({str(path)!r}))"


async def test_event_that_cannot_be_decrypted_stays_pending_until_a_worker_has_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attempts are not used up: a wrong key is a fault of the worker."""
    monkeypatch.setattr(inbox_module, "_UNCOUNTED_PAUSE", 0.001)
    path = tmp_path / "inbox.db"
    handled: list[str] = []
    key = b"o" * 32
    async with Inbox(path) as inbox:
        await add(inbox, "plain")
    async with Inbox(path, key=key) as inbox:
        await add(inbox, "sealed")
    for wrong, name, cause in (
        (b"n" * 32, "sealed", "none of the given keys decrypts it"),
        (key, "plain", "it is not encrypted, though a key was given"),
    ):
        async with Inbox(path, key=wrong, retry=AT_ONCE) as inbox:
            inbox.on("*")(lambda event: handled.append(event.id))
            words = f"the body of event {name} cannot be decrypted: {cause}"
            with pytest.raises(InboxError, match=words) as caught:
                await inbox.get(name)
            assert (caught.value.transient, caught.value.client_wide) == (True, False)
            caplog.clear()
            async with inbox.running(), asyncio.timeout(30):
                while caplog.text.count(f"event {name} is not handled: {words}") < 5:
                    await asyncio.sleep(0.005)
    assert {record.levelname for record in caplog.records} == {"ERROR"}
    assert handled == ["sealed"]
    async with Inbox(path) as inbox:
        inbox.on("*")(lambda event: handled.append(event.id))
        first, second = [event async for event in inbox.store.select(EventFilter())]
        # The end of each run may have interrupted one attempt.
        assert (first.status, first.attempts <= 2) == (EventStatus.PENDING, True)
        assert (second.status, second.attempts) == (EventStatus.HANDLED, 1)
        async with inbox.running(), asyncio.timeout(30):
            while handled != ["sealed", "plain"]:
                await asyncio.sleep(0.005)


async def test_payload_of_a_purged_event_is_an_error_that_says_so(inbox: Inbox) -> None:
    await add(inbox, "e1")
    async with inbox.running():
        await settled(inbox)
    assert await inbox.purge(older_than=0) == 1
    purged = await stored(inbox, "e1")
    with pytest.raises(InboxError, match=r"^event e1 has no body: the event was purged$") as caught:
        _ = purged.event
    assert not caught.value.client_wide


async def test_type_that_a_database_cannot_hold_is_stored_and_reaches_the_handler_as_received(inbox: Inbox) -> None:
    body = rb'{"event": {"id": "e1", "type": "odd \ud800 \u0000 type"}}'
    event = parse_event(body, datetime.now(UTC))
    types: list[str] = []
    inbox.on("odd \ud800*")(lambda event: types.append(event.type))
    assert await inbox.add(event, body)
    async with inbox.running():
        [kept] = await settled(inbox)
    assert kept.type == r"odd \ud800 \0 type"
    assert types == ["odd \ud800 \0 type"]


async def test_events_are_kept_forever_without_a_retention(tmp_path: Path) -> None:
    purges: list[datetime] = []

    class Watched(SqliteEventStore):
        async def purge(self, settled_before: datetime) -> int:
            purges.append(settled_before)
            return 0

    for retention in (None, 1e9):
        async with Inbox(Watched(tmp_path / "inbox.db"), retention=retention) as inbox, inbox.running():
            await add(inbox, f"e {retention}")
            await settled(inbox)
        assert len(purges) == (retention is not None)
