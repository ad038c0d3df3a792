"""An event that cannot be handled blocks no other signing, in either kind of inbox."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sized
from pathlib import Path

import pytest

from signing_async import AuthError, InboxError
from signing_async.webhooks import Event, EventFilter, EventStatus, Inbox, StoredEvent
from tests.webhooks.inboxes import AT_ONCE, add, delivery, settled

POISONED = 6
"""More signings than are handled at once."""
PENDING = EventFilter(status=EventStatus.PENDING)

OpenInbox = Callable[..., Inbox]


@pytest.fixture(params=["sqlite", "postgres"])
async def open_inbox(request: pytest.FixtureRequest, tmp_path: Path) -> OpenInbox:
    """Opens the same inbox again, with these settings."""
    if request.param == "sqlite":
        return lambda **settings: Inbox(tmp_path / "inbox.db", **settings)
    from signing_async.postgres import PostgresInbox

    dsn = await request.getfixturevalue("postgres").new_schema()
    return lambda **settings: PostgresInbox(dsn, **{"lease": 60, "timeout": 20, **settings})


async def add_good(inbox: Inbox) -> None:
    """Add the next event of each poisoned signing, and 20 events of other signings."""
    for number in range(POISONED):
        await add(inbox, f"next{number}", f"poisoned{number}")
    for number in range(20):
        await add(inbox, f"good{number}", f"sound{number % 5}")


async def waiting(inbox: Inbox) -> list[StoredEvent]:
    """Return the poisoned events of which an attempt has ended."""
    return [event async for event in inbox.store.select(PENDING) if event.error is not None]


async def blocked(inbox: Inbox, handled: Sized) -> None:
    """Wait until all good events were handled, and each poisoned one was tried."""
    while len(handled) < 20 or len(await waiting(inbox)) < POISONED:
        await asyncio.sleep(0.005)


async def test_events_whose_handler_always_fails_or_whose_bytes_are_no_event_block_no_other_signing(
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
            event, body = delivery(f"poison{number}", f"poisoned{number}")
            await inbox.add(event, body if number else b"\xff\x00 no JSON")
        await add_good(inbox)
        async with inbox.running(concurrency=2):
            events = {event.id: event for event in await settled(inbox)}
    for name, event in events.items():
        is_poison = name.startswith("poison")
        assert event.status is (EventStatus.DEAD if is_poison else EventStatus.HANDLED)
        assert event.attempts == (3 if is_poison else 1) == handled.count(name) or name == "poison0"
    assert events["poison0"].error == "MalformedEvent: the body is not UTF-8 (byte 0)"
    for number in range(1, POISONED):
        assert handled.index(f"next{number}") > max(i for i, name in enumerate(handled) if name == f"poison{number}")


async def test_events_that_cannot_be_decrypted_stay_pending_and_block_no_other_signing(
    open_inbox: OpenInbox, caplog: pytest.LogCaptureFixture
) -> None:
    """Their attempts are not used up: a wrong key is a fault of the worker. The next events of their signings wait."""
    old, new = b"o" * 32, b"n" * 32
    handled: list[str] = []
    async with open_inbox(key=old) as inbox:
        for number in range(POISONED):
            await add(inbox, f"poison{number}", f"poisoned{number}")
    async with open_inbox(key=new) as inbox:
        inbox.on("*")(lambda event: handled.append(event.id))
        await add_good(inbox)
        words = "the body of event poison0 cannot be decrypted: none of the given keys decrypts it"
        with pytest.raises(InboxError, match=words) as caught:
            await inbox.get("poison0")
        assert (caught.value.transient, caught.value.client_wide) == (True, False)
        async with inbox.running(concurrency=2), asyncio.timeout(60):
            await blocked(inbox, handled)
        assert all(name.startswith("good") for name in handled)
        assert f"no attempt is counted: {words}" in caplog.text
        assert {event.attempts for event in await waiting(inbox)} == {0}
    async with open_inbox(key=[new, old]) as inbox:
        inbox.on("*")(lambda event: handled.append(event.id))
        assert await inbox.retry(PENDING) == 2 * POISONED
        async with inbox.running():
            events = await settled(inbox)
    assert {(event.status, event.attempts) for event in events} == {(EventStatus.HANDLED, 1)}
    for number in range(POISONED):
        assert handled.index(f"poison{number}") < handled.index(f"next{number}")


@pytest.mark.parametrize("transient", [False, True])
async def test_handlers_whose_client_fails_use_up_no_attempts_and_block_no_other_signing(
    open_inbox: OpenInbox, transient: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The policy retries at once, but these events wait behind those that are due."""
    fails = True
    handled: Counter[str] = Counter()
    async with open_inbox(retry=AT_ONCE) as inbox:

        @inbox.on("*")
        async def handle(event: Event) -> None:
            if fails and event.id.startswith("poison"):
                raise AuthError("cannot refresh the token", transient=transient)
            handled[event.id] += 1

        for number in range(POISONED):
            await add(inbox, f"poison{number}", f"poisoned{number}")
        await add_good(inbox)
        async with inbox.running(concurrency=2), asyncio.timeout(60):
            await blocked(inbox, handled)
            assert all(name.startswith("good") for name in handled)
            assert {event.attempts for event in await waiting(inbox)} == {0}
            fails = False
            await inbox.retry(PENDING)
            events = await settled(inbox)
    assert {(event.status, event.attempts) for event in events} == {(EventStatus.HANDLED, 1)}
    record = next(record for record in caplog.records if "event poison0 is retried in 5.0 s" in record.message)
    assert (record.levelname, bool(record.exc_info)) == ("ERROR", True)
    assert "no attempt is counted: AuthError: cannot refresh the token" in record.message
