"""An event that cannot be handled blocks no other signing, in either kind of inbox."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from signing_async.errors import AuthError
from signing_async.webhooks import Event, EventFilter, EventStatus, Inbox
from signing_async.webhooks import inbox as inbox_module
from tests.storage.event_stores import delivery
from tests.webhooks.inboxes import AT_ONCE, add, settled, stored

CONCURRENCY = 2
POISONED = 6
"""More signings than are handled at once."""

OpenInbox = Callable[..., Inbox]


@pytest.fixture(params=["sqlite", "postgres"])
async def open_inbox(request: pytest.FixtureRequest, tmp_path: Path) -> OpenInbox:
    """Opens the same inbox again, with these settings."""
    if request.param == "sqlite":
        return lambda **settings: Inbox(tmp_path / "inbox.db", **settings)
    from signing_async.postgres import PostgresInbox

    dsn = await request.getfixturevalue("postgres").new_schema()
    return lambda **settings: PostgresInbox(dsn, **{"lease": 60, "timeout": 20, **settings})


async def handled_beside(inbox: Inbox, good: int, handled: list[str]) -> None:
    """Run the inbox until this many events without poison were handled."""
    async with inbox.running(concurrency=CONCURRENCY), asyncio.timeout(60):
        while len([name for name in handled if name.startswith("good")]) < good:
            await asyncio.sleep(0.005)


async def test_handler_that_always_fails_blocks_no_other_signing(
    open_inbox: OpenInbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "signing_async")  # a test's process cannot report a log that is not UTF-8
    async with open_inbox(retry=AT_ONCE) as inbox:
        handled: list[str] = []

        @inbox.on("*")
        async def handle(event: Event) -> None:
            handled.append(event.id)
            if event.id.startswith("poison"):
                raise ValueError("cannot \0 parse \ud800")

        for number in range(POISONED):
            await add(inbox, f"poison{number}", f"poisoned{number}")
            await add(inbox, f"next{number}", f"poisoned{number}")
            await add(inbox, f"good{number}", f"sound{number}")
        async with inbox.running(concurrency=CONCURRENCY):
            events = {event.id: event for event in await settled(inbox)}
    expected = {name: 3 if name.startswith("poison") else 1 for name in events}
    assert Counter(handled) == expected
    for name, event in events.items():
        status = EventStatus.DEAD if name.startswith("poison") else EventStatus.HANDLED
        assert (name, event.status, event.attempts) == (name, status, expected[name])
    for number in range(POISONED):
        assert handled.index(f"next{number}") > max(i for i, name in enumerate(handled) if name == f"poison{number}")


@pytest.mark.parametrize("pause", [0.0, 3600.0])
async def test_payloads_that_cannot_be_decrypted_block_no_other_signing(
    open_inbox: OpenInbox, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They arrived first, and stay due. The next events of their signings wait."""
    monkeypatch.setattr(inbox_module, "_UNCOUNTED_PAUSE", pause)
    old, new = b"o" * 32, b"n" * 32
    handled: list[str] = []
    async with open_inbox(key=old) as inbox:
        for number in range(POISONED):
            await add(inbox, f"sealed{number}", f"poisoned{number}")
    async with open_inbox(key=new) as inbox:
        inbox.on("*")(lambda event: handled.append(event.id))
        for number in range(POISONED):
            await add(inbox, f"next{number}", f"poisoned{number}")
        for number in range(20):
            await add(inbox, f"good{number}", f"sound{number % 5}")
        await handled_beside(inbox, 20, handled)
        assert all(name.startswith("good") for name in handled)
        waiting = [event async for event in inbox.store.select(EventFilter(status=EventStatus.PENDING))]
        # Without a pause, the end of the run may have undone a claim of one of them.
        assert pause == 0 or {event.attempts for event in waiting} == {0}
        assert (await inbox.stats()).counts[EventStatus.PENDING] == 2 * POISONED
    async with open_inbox(key=[new, old]) as inbox:
        inbox.on("*")(lambda event: handled.append(event.id))
        await inbox.retry(EventFilter(status=EventStatus.PENDING))
        async with inbox.running():
            events = await settled(inbox)
    assert {(event.status, event.attempts) for event in events} == {(EventStatus.HANDLED, 1)}
    for number in range(POISONED):
        assert handled.index(f"sealed{number}") < handled.index(f"next{number}")


@pytest.mark.parametrize("transient", [False, True])
async def test_handlers_whose_client_fails_use_up_no_attempts_and_block_no_other_signing(
    open_inbox: OpenInbox, transient: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The policy retries at once, but these events wait behind those that are due."""
    pause, fails = 0.2, True
    monkeypatch.setattr(inbox_module, "_UNCOUNTED_PAUSE", pause)
    calls: Counter[str] = Counter()
    handled: list[str] = []

    async with open_inbox(retry=AT_ONCE) as inbox:

        @inbox.on("*")
        async def handle(event: Event) -> None:
            calls[event.id] += 1
            if fails and event.id.startswith("poison"):
                raise AuthError("cannot refresh the token", transient=transient)
            handled.append(event.id)

        for number in range(POISONED):
            await add(inbox, f"poison{number}", f"poisoned{number}")
            await add(inbox, f"next{number}", f"poisoned{number}")
        for number in range(20):
            await add(inbox, f"good{number}", f"sound{number % 5}")
        async with inbox.running(concurrency=CONCURRENCY), asyncio.timeout(60):
            while len(handled) < 20 or any(calls[f"poison{number}"] <= 4 for number in range(POISONED)):
                await asyncio.sleep(0.005)
            assert all(name.startswith("good") for name in handled)
            waiting = await stored(inbox, "poison0")
            fails = False
            events = await settled(inbox)
    assert waiting.error == "AuthError: cannot refresh the token"
    assert {(event.status, event.attempts) for event in events} == {(EventStatus.HANDLED, 1)}
    [record] = [each for each in caplog.records if "event poison0 is retried in 0.2 s" in each.message][:1]
    assert (record.levelname, bool(record.exc_info)) == ("ERROR", True)


async def test_stored_bytes_that_are_no_event_block_no_other_signing(open_inbox: OpenInbox) -> None:
    """As after a mistake with the database."""
    handled: list[str] = []
    async with open_inbox(retry=AT_ONCE) as inbox:
        inbox.on("*")(lambda event: handled.append(event.id))
        for number in range(POISONED):
            event, _ = delivery(f"poison{number}", f"poisoned{number}")
            await inbox.add(event, b"\xff\x00 no JSON")
            await add(inbox, f"good{number}", f"poisoned{number}")
        async with inbox.running(concurrency=CONCURRENCY):
            events = await settled(inbox)
    assert sorted(handled) == [f"good{number}" for number in range(POISONED)]
    dead: list[Any] = [event for event in events if event.status is EventStatus.DEAD]
    assert {event.attempts for event in dead} == {3}
    assert {event.error for event in dead} == {"MalformedEvent: the body is not UTF-8 (byte 0)"}
