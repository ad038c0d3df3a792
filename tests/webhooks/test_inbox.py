"""The inbox: which handler runs, in which order, what becomes of its failures, and how events are managed."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from signing_async import ConfigurationError, InboxError, InvalidRequest
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


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[Inbox]:
    """An inbox that retries at once."""
    async with Inbox(tmp_path / "inbox.db", retry=AT_ONCE) as opened:
        yield opened


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


async def test_events_of_one_signing_are_handled_in_order_and_those_of_others_side_by_side(inbox: Inbox) -> None:
    handled: list[str] = []
    running: set[str | None] = set()
    together = asyncio.Barrier(4)

    @inbox.on("*")
    async def handle(event: Event) -> None:
        assert event.signing_id not in running
        running.add(event.signing_id)
        if event.id.endswith("0"):
            await together.wait()  # all four signings at the same time
        await asyncio.sleep(0)
        running.discard(event.signing_id)
        handled.append(event.id)

    for number in range(6):
        for signing in "abcd":
            await add(inbox, f"{signing}{number}", signing)
    async with inbox.running(concurrency=4):
        assert {event.status for event in await settled(inbox)} == {EventStatus.HANDLED}
    for signing in "abcd":
        assert [name for name in handled if name.startswith(signing)] == [f"{signing}{number}" for number in range(6)]


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
@pytest.mark.parametrize("is_async", [False, True])
async def test_each_error_of_a_handler_ends_the_event_with_its_text(
    inbox: Inbox, error: BaseException, status: EventStatus, text: str | None, is_async: bool
) -> None:
    def fail(event: Event) -> None:
        raise error

    async def fail_async(event: Event) -> None:
        raise error

    inbox.on("*")(fail_async if is_async else fail)
    await add(inbox, "e1")
    async with inbox.running():
        [event] = await settled(inbox)
    assert (event.status, event.attempts) == (status, 1 if status is EventStatus.DROPPED else 3)
    assert event.error == text or (text and "StopIteration" in text and "StopIteration" in str(event.error))


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


async def test_event_with_more_attempts_than_the_policy_allows_is_dead_without_another(tmp_path: Path) -> None:
    """As after deaths of its process, or if the policy was tightened."""
    handled: list[Event] = []
    async with Inbox(tmp_path / "inbox.db", retry=HandlerRetryPolicy(max_attempts=1)) as inbox:
        inbox.on("*")(handled.append)
        await add(inbox, "e1")
        (claim,) = await inbox.store.claim(1)
        await inbox.store.postpone(claim, 0, "ValueError: no")
        async with inbox.running():
            [event] = await settled(inbox)
    assert (event.status, event.error, handled) == (EventStatus.DEAD, "ValueError: no", [])


# Settings


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (HandlerRetryPolicy, {"max_attempts": 0}, "max_attempts: must be an integer of at least 1, got 0"),
        (HandlerRetryPolicy, {"base_delay": 10, "max_delay": 5}, r"max_delay: must be .* of at least 10 .*, got 5"),
        (Inbox, {"store": None}, "inbox: must be a path or an EventStore, got None"),
        (Inbox, {"store": ""}, "inbox: must be a path, got ''"),
        (Inbox, {"key": "short"}, "Inbox: an encryption key must be 32 bytes, or their base64"),
        (Inbox, {"retention": 0}, r"retention: must be a number above 0 .*, got 0"),
        (Inbox, {"retention": 1e12}, r"retention: .* of at most 1e\+09, got 1000000000000\.0"),
        (Inbox, {"handler_timeout": 0}, "handler_timeout: must be a number above 0, got 0"),
        (EventFilter, {"ids": "e1"}, "ids: must be a sequence of event ids, got the string 'e1'"),
        (EventFilter, {"since": datetime(2031, 1, 1)}, "since: must be a datetime with a time zone, got .*"),
        (EventFilter, {"until": "2031-01-01"}, "until: must be a datetime with a time zone, got '2031-01-01'"),
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


async def test_failing_purge_is_logged_and_without_a_retention_nothing_is_purged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for retention in (None, 1e9):
        store = altered_store(tmp_path / "inbox.db", {"purge": fail})
        async with Inbox(store, retention=retention) as inbox, inbox.running():
            await add(inbox, f"e {retention}")
            await settled(inbox)
        assert caplog.text.count("cannot purge events now: locked") == (retention is not None)


async def test_key_encrypts_bodies_at_rest_and_can_be_rotated(tmp_path: Path) -> None:
    old, new = b"o" * 32, b"n" * 32
    path = tmp_path / "inbox.db"
    async with Inbox(path, key=old) as inbox:
        await add(inbox, "e1", "a very secret signing")
    async with Inbox(path, key=[new, old]) as inbox:
        await add(inbox, "e2", "another")
        async with inbox.running():
            first, second = await settled(inbox)
    assert first.event.payload["signing"] == {"id": "a very secret signing"}
    assert second.event.id == "e2"
    assert b'"signing"' not in path.read_bytes()
    assert repr(Inbox(path, key=new)) == f"Inbox(SqliteEventStore({str(path)!r}))"
