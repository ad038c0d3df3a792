"""The inbox: which handler runs, in which order, what becomes of its failures, and how events are managed."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from signing_async import AuthError, ConfigurationError, InboxError, InvalidRequest
from signing_async.webhooks import (
    Drop,
    Event,
    EventFilter,
    EventStatus,
    HandlerRetryPolicy,
    Inbox,
    RetryLater,
    Wakeups,
)
from tests.webhooks.inboxes import AT_ONCE, add, altered_store, delivery, fail, settled, stored, until

LOGGER = "signing_async.webhooks"


# Handlers


async def test_one_handler_runs_the_exact_type_before_the_longest_pattern_before_the_catch_all(inbox: Inbox) -> None:
    calls: dict[str, str] = {}
    for pattern in ("*", "recipient.*", "recipient.signed", "recipient.s*"):

        @inbox.on(pattern)
        async def handle(event: Event, pattern: str = pattern) -> None:
            calls[event.type] = pattern

    expected = {
        "recipient.signed": "recipient.signed",
        "recipient.sent": "recipient.s*",
        "recipient.declined": "recipient.*",
        "recipient": "*",
        "signing.completed": "*",
    }
    for kind in expected:
        await add(inbox, f"e {kind}", kind=kind)
    async with inbox.running():
        await settled(inbox)
    assert calls == expected


async def test_event_without_a_handler_counts_as_handled_and_wakes_its_waiters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wakeups = Wakeups()
    async with Inbox(tmp_path / "inbox.db", wakeups=wakeups) as inbox:
        inbox.on("has.handler")(print)
        with wakeups.subscribe("sig_1") as subscription, caplog.at_level(logging.DEBUG, LOGGER):
            async with inbox.running():
                for kind in ("has.handler", "has.none"):
                    await add(inbox, kind, "sig_1", kind)
                    assert await subscription.wait(30)
                _, event = await settled(inbox)
    assert (event.status, event.error, event.attempts) == (EventStatus.HANDLED, "no handler", 1)
    assert event.event.id == "has.none"
    assert [record.getMessage() for record in caplog.records] == ["no handler for event has.none (type 'has.none')"]


async def test_plain_handler_runs_in_a_thread_and_a_returned_coroutine_is_awaited(inbox: Inbox) -> None:
    in_main: dict[str, bool] = {}

    def plain(event: Event) -> None:
        in_main[event.id] = threading.current_thread() is threading.main_thread()

    async def coroutine(event: Event, extra: str = "") -> None:
        plain(event)

    handlers: dict[str, Any] = {
        "plain": plain,
        "lambda": lambda event: coroutine(event),
        "partial": partial(coroutine, extra="of a partial"),
    }
    for kind, handler in handlers.items():
        assert inbox.on(kind)(handler) is handler
        await add(inbox, kind, kind=kind)
    async with inbox.running():
        await settled(inbox)
    assert in_main == {"plain": False, "lambda": True, "partial": True}


async def test_type_that_a_database_cannot_hold_reaches_the_handler_as_received(inbox: Inbox) -> None:
    types: list[str] = []
    inbox.on("odd*")(lambda event: types.append(event.type))
    await add(inbox, "e1", kind=r"odd \ud800 \u0000 type")
    async with inbox.running():
        [kept] = await settled(inbox)
    assert (kept.type, types) == (r"odd \ud800 \0 type", ["odd \ud800 \0 type"])


# Failures


async def test_failed_handler_is_retried_and_the_event_is_dead_after_the_last_attempt(
    inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    """The next event of its signing waits until then, and other signings do not."""
    handled: list[str] = []

    @inbox.on("*")
    async def handle(event: Event) -> None:
        handled.append(event.id)
        if event.id == "poison":
            # No lone surrogate: pytest-xdist cannot send a captured traceback that holds one, and its worker ends.
            raise ValueError("cannot \0 parse")

    for name, signing in (("poison", "a"), ("next", "a"), ("other", "b")):
        await add(inbox, name, signing)
    async with inbox.running():
        poison, *_ = await settled(inbox)
    assert [name for name in handled if name != "other"] == ["poison"] * 3 + ["next"]
    assert (poison.status, poison.attempts) == (EventStatus.DEAD, 3)
    assert poison.error == "ValueError: cannot \\0 parse"
    levels = [(record.levelname, bool(record.exc_info)) for record in caplog.records if record.name == LOGGER]
    assert levels == [("WARNING", True), ("WARNING", True), ("ERROR", True)]
    assert "event poison is dead after 3 attempts" in caplog.text


class Panic(BaseException):
    """As an extension module raises it."""


class Mute(Exception):
    """An exception with a bug: it has no text."""

    def __str__(self) -> str:
        raise AttributeError("response")


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (Drop("another tenant's \ud800"), EventStatus.DROPPED, r"another tenant's \ud800"),
        (Drop(), EventStatus.DROPPED, None),
        (RetryLater(0), EventStatus.DEAD, "retry in 0 s"),
        (TimeoutError("the database did not respond"), EventStatus.DEAD, "TimeoutError: the database did not respond"),
        (asyncio.CancelledError(), EventStatus.DEAD, "CancelledError"),
        (StopIteration(), EventStatus.DEAD, "RuntimeError: .* raised StopIteration"),
        (Panic("in Rust"), EventStatus.DEAD, "Panic: in Rust"),
        (Mute(), EventStatus.DEAD, "Mute"),
    ],
)
async def test_each_error_of_a_handler_ends_the_event_with_its_text(
    inbox: Inbox, error: BaseException, status: EventStatus, text: str | None
) -> None:
    @inbox.on("plain")
    def fail(event: Event) -> None:
        raise error

    @inbox.on("async")
    async def fail_async(event: Event) -> None:
        raise error

    for kind in ("plain", "async"):
        await add(inbox, kind, kind=kind)
    async with inbox.running():
        events = await settled(inbox)
    for event in events:
        assert (event.status, event.attempts) == (status, 1 if status is EventStatus.DROPPED else 3)
        assert event.error == text or (text and re.fullmatch(text, str(event.error)))


async def test_retry_later_sets_the_delay_and_counts_as_an_attempt(inbox: Inbox) -> None:
    @inbox.on("*")
    async def handle(event: Event) -> None:
        raise RetryLater(3600, "not signed yet")

    await add(inbox, "hour")
    async with inbox.running(), asyncio.timeout(30):
        while not (event := await stored(inbox, "hour")).due_at:
            await asyncio.sleep(0.005)
    assert (event.attempts, event.error) == (1, "not signed yet")
    assert timedelta(minutes=59) < event.due_at - datetime.now(UTC) < timedelta(minutes=61)


async def test_async_handler_is_cancelled_at_its_deadline_and_tried_again(tmp_path: Path) -> None:
    cancelled = 0
    async with Inbox(tmp_path / "inbox.db", retry=AT_ONCE, handler_timeout=0.02) as inbox:

        @inbox.on("*")
        async def hang(event: Event) -> None:
            nonlocal cancelled
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled += 1
                raise

        await add(inbox, "hangs")
        async with inbox.running():
            [event] = await settled(inbox)
    assert (event.status, event.error) == (EventStatus.DEAD, "TimeoutError: the handler took longer than 0.02 s")
    assert cancelled == 3


async def test_plain_handler_beyond_its_deadline_keeps_its_signing_until_it_returns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Inbox(tmp_path / "inbox.db", handler_timeout=0.02) as inbox:
        proceed = threading.Event()
        handled: list[str] = []

        @inbox.on("*")
        def handle(event: Event) -> None:
            if event.id == "slow":
                assert proceed.wait(30)
            handled.append(event.id)

        for name, signing in (("slow", "a"), ("next", "a"), ("other", "b")):
            await add(inbox, name, signing)
        async with inbox.running():
            await until(lambda: "has taken more than 0.02 s" in caplog.text and handled == ["other"])
            proceed.set()
            events = await settled(inbox)
    assert handled == ["other", "slow", "next"]
    assert {(event.status, event.attempts) for event in events} == {(EventStatus.HANDLED, 1)}


# Events that the worker cannot handle: more signings than are handled at once

POISONED = 6
PENDING = EventFilter(status=EventStatus.PENDING)


async def add_good(inbox: Inbox) -> None:
    """Add the next event of each poisoned signing, and 20 events of other signings."""
    for number in range(POISONED):
        await add(inbox, f"next{number}", f"poisoned{number}")
    for number in range(20):
        await add(inbox, f"good{number}", f"sound{number % 5}")


async def blocked(inbox: Inbox, handled: list[str]) -> None:
    """Wait until all good events were handled and each poisoned one was tried: their attempts do not count."""
    async with asyncio.timeout(60):
        while True:
            waiting = [event async for event in inbox.store.select(PENDING) if event.error is not None]
            if len(handled) == 20 and len(waiting) == POISONED:
                break
            await asyncio.sleep(0.005)
    assert all(name.startswith("good") for name in handled)
    assert {event.attempts for event in waiting} == {0}


async def test_events_that_cannot_be_decrypted_stay_pending_and_block_no_other_signing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong key is a fault of the worker. The next events of their signings wait. Keys can be rotated."""
    path, old, new = tmp_path / "inbox.db", b"o" * 32, b"n" * 32
    handled: list[str] = []
    async with Inbox(path, key=old) as inbox:
        for number in range(POISONED):
            await add(inbox, f"poison{number}", f"poisoned{number}")
    async with Inbox(path, key=new) as inbox:
        inbox.on("*")(lambda event: handled.append(event.id))
        await add_good(inbox)
        words = "the body of event poison0 cannot be decrypted: none of the given keys decrypts it"
        with pytest.raises(InboxError, match=words) as caught:
            await inbox.get("poison0")
        assert (caught.value.transient, caught.value.client_wide) == (True, False)
        async with inbox.running(concurrency=2):
            await blocked(inbox, handled)
        assert f"no attempt is counted: {words}" in caplog.text
    async with Inbox(path, key=[new, old]) as inbox:
        inbox.on("*")(lambda event: handled.append(event.id))
        assert await inbox.retry(PENDING) == 2 * POISONED
        async with inbox.running():
            events = await settled(inbox)
    assert {(event.status, event.attempts) for event in events} == {(EventStatus.HANDLED, 1)}
    for number in range(POISONED):
        assert handled.index(f"poison{number}") < handled.index(f"next{number}")
    assert b'"signing"' not in path.read_bytes()
    assert repr(Inbox(path, key=new)) == f"Inbox(SqliteEventStore({str(path)!r}))"


async def test_handlers_whose_client_fails_use_up_no_attempts_and_block_no_other_signing(
    inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    """With a policy without delays, these events still wait until the due events have been handled."""
    fails, handled = True, list[str]()

    @inbox.on("*")
    async def handle(event: Event) -> None:
        if fails and event.id.startswith("poison"):
            raise AuthError("cannot refresh the token")
        handled.append(event.id)

    for number in range(POISONED):
        await add(inbox, f"poison{number}", f"poisoned{number}")
    await add_good(inbox)
    async with inbox.running(concurrency=2):
        await blocked(inbox, handled)
        fails = False
        await inbox.retry(PENDING)
        events = await settled(inbox)
    assert {(event.status, event.attempts) for event in events} == {(EventStatus.HANDLED, 1)}
    record = next(record for record in caplog.records if "event poison0 is retried in 5.0 s" in record.message)
    assert (record.levelname, bool(record.exc_info)) == ("ERROR", True)
    assert "no attempt is counted: AuthError: cannot refresh the token" in record.message


# Settings


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (HandlerRetryPolicy, {"max_attempts": 0}, "max_attempts: must be an integer of at least 1, got 0"),
        (HandlerRetryPolicy, {"base_delay": 10, "max_delay": 5}, r"max_delay: must be .* of at least 10 .*, got 5"),
        (Inbox, {"store": None}, "inbox: must be a path or an EventStore, got None"),
        (Inbox, {"store": ""}, "inbox: must be a path, got ''"),
        (Inbox, {"key": "short"}, "Inbox: an encryption key must be 32 bytes, or their base64"),
        (Inbox, {"retention": 1e12}, r"retention: .* of at most 1e\+09, got 1000000000000\.0"),
        (Inbox, {"handler_timeout": 0}, "handler_timeout: must be a number above 0, got 0"),
        (EventFilter, {"ids": "e1"}, "ids: must be a sequence of event ids, got the string 'e1'"),
        (EventFilter, {"since": datetime(2031, 1, 1)}, "since: must be a datetime with a time zone, got .*"),
        (EventFilter, {"type": "*.signed"}, r"type: must be an event type, or the start of one and '\*', got .*"),
    ],
)
def test_invalid_setting_is_refused(make: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigurationError, InvalidRequest), match=f"^{words}$"):
        make(**({"store": "inbox.db"} if make is Inbox else {}) | settings)


async def test_invalid_argument_of_a_method_is_refused(inbox: Inbox) -> None:
    inbox.on("a.*")(print)
    with pytest.raises(ConfigurationError, match=r"^pattern: 'a\.\*' has a handler already, <built-in .*>$"):
        inbox.on("a.*")(print)
    with pytest.raises(ConfigurationError, match=r"^pattern: must be an event type, or the start of one and '\*'"):
        inbox.on("*.signed")
    with pytest.raises(ConfigurationError, match=r"^concurrency: must be an integer of at least 1, got 0$"):
        await inbox.run(concurrency=0)
    with pytest.raises(ConfigurationError, match=r"^drain_timeout: must be a number of at least 0, got -1$"):
        await inbox.run(drain_timeout=-1)
    with pytest.raises(ConfigurationError, match=r"^older_than: must be a number of at least 0 .*, got -1$"):
        await inbox.purge(older_than=-1)


# Managing


async def test_purged_event_has_no_body(inbox: Inbox) -> None:
    await add(inbox, "e1")
    async with inbox.running():
        await settled(inbox)
    assert await inbox.purge(older_than=3600) == 0
    assert await inbox.purge(older_than=0) == 1
    purged = await stored(inbox, "e1")
    with pytest.raises(InboxError, match=r"^event e1 has no body: the event was purged$") as caught:
        _ = purged.event
    assert not caught.value.client_wide
    assert await inbox.get("e3") is None


async def test_run_purges_handled_events_after_the_retention_and_still_knows_their_ids(tmp_path: Path) -> None:
    async with Inbox(tmp_path / "inbox.db", retention=0.001) as inbox:
        await add(inbox, "e1")
        async with inbox.running():
            await settled(inbox)
        await asyncio.sleep(0.01)
        async with inbox.running(), asyncio.timeout(30):
            while (await stored(inbox, "e1")).body:
                await asyncio.sleep(0.005)
        assert not await inbox.add(*delivery("e1"))
        assert await inbox.retry(EventFilter()) == 0


@pytest.mark.parametrize(("retention", "purges"), [(None, 0), (1e9, 1)])
async def test_failing_purge_is_logged_and_without_a_retention_nothing_is_purged(
    retention: float | None, purges: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = altered_store(tmp_path / "inbox.db", {"purge": fail})
    async with Inbox(store, retention=retention) as inbox, inbox.running():
        await add(inbox, "e1")
        await settled(inbox)
    assert caplog.text.count("cannot purge events now: locked") == purges
