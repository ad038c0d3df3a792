"""The inbox: which handler runs, in which order, and what becomes of its failures."""

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

from signing_async.errors import ConfigurationError, InvalidRequest
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
from tests.webhooks.inboxes import AT_ONCE, add, settled, stored

LOGGER = "signing_async.webhooks"


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[Inbox]:
    """An inbox that retries at once."""
    async with Inbox(tmp_path / "inbox.db", retry=AT_ONCE) as opened:
        yield opened


# Which handler


async def test_one_handler_runs_the_exact_type_before_the_longest_pattern_before_the_catch_all(inbox: Inbox) -> None:
    calls: list[tuple[str, str]] = []
    for pattern in ("*", "recipient.*", "recipient.signed", "recipient.s*"):

        @inbox.on(pattern)
        async def handle(event: Event, pattern: str = pattern) -> None:
            calls.append((event.type, pattern))

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
    assert sorted(calls) == sorted(expected.items())


async def test_event_without_a_handler_counts_as_handled_and_is_kept(
    inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    await add(inbox, "e1")
    with caplog.at_level(logging.DEBUG, LOGGER):
        async with inbox.running():
            [event] = await settled(inbox)
    assert (event.status, event.error, event.attempts) == (EventStatus.HANDLED, "no handler", 1)
    assert event.event.id == "e1"
    assert [record.getMessage() for record in caplog.records] == ["no handler for event e1 (type 'signing.completed')"]


async def test_plain_handler_runs_in_a_thread_and_a_returned_coroutine_is_awaited(inbox: Inbox) -> None:
    threads: list[str] = []

    @inbox.on("plain")
    def plain(event: Event) -> None:
        threads.append(threading.current_thread().name)

    async def coroutine(event: Event, extra: str) -> None:
        threads.append(f"{threading.current_thread().name} {extra}")

    inbox.on("lambda")(lambda event: coroutine(event, "of a lambda"))
    inbox.on("partial")(partial(coroutine, extra="of a partial"))
    for kind in ("plain", "lambda", "partial"):
        await add(inbox, kind, kind=kind)
    async with inbox.running():
        await settled(inbox)
    assert sorted(name.replace("_0", "") for name in threads) == [
        "MainThread of a lambda",
        "MainThread of a partial",
        threads[[name.startswith("signing-handler") for name in threads].index(True)].replace("_0", ""),
    ]


@pytest.mark.parametrize("pattern", ["", "*.signed", "recipient.*.signed", None, 5])
def test_pattern_must_be_a_type_or_the_start_of_one(tmp_path: Path, pattern: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^pattern: must be an event type, or the start of one and '\*', got "
    ):
        Inbox(tmp_path / "inbox.db").on(pattern)
    if pattern is not None:
        with pytest.raises(InvalidRequest, match=r"^type: must be an event type"):
            EventFilter(type=pattern)


def test_second_handler_for_a_pattern_is_refused(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox.db")
    assert inbox.on("a.*")(print) is print
    with pytest.raises(ConfigurationError, match=r"^pattern: 'a\.\*' has a handler already, <built-in .*>$"):
        inbox.on("a.*")(print)


async def test_wakeups_get_every_event_whichever_handler_it_has(tmp_path: Path) -> None:
    wakeups = Wakeups()
    async with Inbox(tmp_path / "inbox.db", wakeups=wakeups) as inbox:
        inbox.on("has.handler")(print)
        with wakeups.subscribe("sig_1") as subscription:
            async with inbox.running():
                for kind in ("has.handler", "has.none"):
                    await add(inbox, kind, "sig_1", kind)
                    assert await subscription.wait(30)


# Order


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

    await add(inbox, "poison", "a")
    await add(inbox, "next", "a")
    await add(inbox, "other", "b")
    async with inbox.running():
        events = {event.id: event for event in await settled(inbox)}
    assert [name for name in handled if name != "other"] == ["poison"] * 3 + ["next"]
    assert handled.count("other") == 1
    poison = events["poison"]
    assert (poison.status, poison.attempts) == (EventStatus.DEAD, 3)
    assert poison.error == "ValueError: cannot \\0 parse"
    assert poison.settled_at is not None
    levels = [(record.levelname, bool(record.exc_info)) for record in caplog.records if record.name == LOGGER]
    assert levels == [("WARNING", True), ("WARNING", True), ("ERROR", True)]
    assert "event poison is dead after 3 attempts" in caplog.text


async def test_drop_ends_the_event_with_its_reason(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    @inbox.on("*")
    def handle(event: Event) -> None:
        raise Drop(*(["another tenant's \ud800"] if event.id == "e1" else []))

    await add(inbox, "e1")
    await add(inbox, "e2")
    with caplog.at_level(logging.INFO, LOGGER):
        async with inbox.running():
            first, second = await settled(inbox)
    assert (first.status, first.error, first.attempts) == (EventStatus.DROPPED, r"another tenant's \ud800", 1)
    assert (second.status, second.error) == (EventStatus.DROPPED, None)
    assert r"the handler dropped event e1: another tenant's \ud800" in caplog.text


async def test_retry_later_sets_the_delay_and_counts_as_an_attempt(inbox: Inbox) -> None:
    @inbox.on("*")
    async def handle(event: Event) -> None:
        raise RetryLater(*((3600, "not signed yet") if event.id == "hour" else (0,)))

    await add(inbox, "hour")
    await add(inbox, "now")
    async with inbox.running(), asyncio.timeout(30):
        while (await stored(inbox, "now")).status is EventStatus.PENDING or not (await stored(inbox, "hour")).due_at:
            await asyncio.sleep(0.005)
    hour, now = await stored(inbox, "hour"), await stored(inbox, "now")
    assert (hour.attempts, hour.error) == (1, "not signed yet")
    assert hour.due_at is not None
    assert timedelta(minutes=59) < hour.due_at - datetime.now(UTC) < timedelta(minutes=61)
    assert (now.status, now.attempts, now.error) == (EventStatus.DEAD, 3, "retry in 0 s")


async def test_async_handler_is_cancelled_at_its_deadline_and_tried_again(tmp_path: Path) -> None:
    cancelled = 0
    async with Inbox(tmp_path / "inbox.db", retry=AT_ONCE, handler_timeout=0.02) as inbox:

        @inbox.on("hangs")
        async def hang(event: Event) -> None:
            nonlocal cancelled
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled += 1
                raise

        @inbox.on("its.own")
        async def own(event: Event) -> None:
            raise TimeoutError("the database did not respond")

        await add(inbox, "hangs", kind="hangs")
        await add(inbox, "own", kind="its.own")
        async with inbox.running():
            hanging, its_own = await settled(inbox)
    assert (hanging.status, hanging.error) == (
        EventStatus.DEAD,
        "TimeoutError: the handler took longer than 0.02 s",
    )
    assert its_own.error == "TimeoutError: the database did not respond"
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

        await add(inbox, "slow", "a")
        await add(inbox, "next", "a")
        await add(inbox, "other", "b")
        async with inbox.running():
            async with asyncio.timeout(30):
                while "has taken more than 0.02 s" not in caplog.text or handled != ["other"]:
                    await asyncio.sleep(0.005)
            proceed.set()
            events = await settled(inbox)
    assert handled == ["other", "slow", "next"]
    assert {(event.status, event.attempts) for event in events} == {(EventStatus.HANDLED, 1)}


async def test_cancellation_inside_a_handler_is_a_failure(inbox: Inbox) -> None:
    """Such as the result of a task that somebody else cancelled; the worker goes on."""

    @inbox.on("*")
    async def handle(event: Event) -> None:
        raise asyncio.CancelledError

    await add(inbox, "e1")
    async with inbox.running():
        [event] = await settled(inbox)
    assert (event.status, event.error) == (EventStatus.DEAD, "CancelledError")


async def test_plain_handler_that_raises_stop_iteration_is_a_failure(inbox: Inbox) -> None:
    @inbox.on("*")
    def handle(event: Event) -> None:
        next(iter(()))

    await add(inbox, "e1")
    async with inbox.running():
        [event] = await settled(inbox)
    assert (event.status, event.error) == (EventStatus.DEAD, "RuntimeError: the handler raised StopIteration")


async def test_base_exception_of_a_handler_is_a_failure(inbox: Inbox) -> None:
    """Such as a panic in an extension module."""

    class Panic(BaseException):
        pass

    @inbox.on("async")
    async def panic(event: Event) -> None:
        raise Panic("in Rust")

    @inbox.on("plain")
    def panic_in_thread(event: Event) -> None:
        raise Panic

    await add(inbox, "e1", kind="async")
    await add(inbox, "e2", kind="plain")
    async with inbox.running():
        events = await settled(inbox)
    assert [(event.status, event.error) for event in events] == [
        (EventStatus.DEAD, "Panic: in Rust"),
        (EventStatus.DEAD, "Panic"),
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_attempts": 0}, "max_attempts: must be an integer of at least 1, got 0"),
        ({"base_delay": -1}, r"base_delay: must be a number of at least 0 and of at most 1e\+09, got -1"),
        (
            {"base_delay": 10, "max_delay": 5},
            r"max_delay: must be a number of at least 10 and of at most 1e\+09, got 5",
        ),
        ({"max_delay": 1e12}, r"max_delay: .* of at most 1e\+09, got 1000000000000\.0"),
    ],
)
def test_invalid_retry_policy_is_refused(settings: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{words}$"):
        HandlerRetryPolicy(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"store": None}, "inbox: must be a path or an EventStore, got None"),
        ({"store": ""}, "inbox: must be a path, got ''"),
        ({"key": "short"}, "Inbox: an encryption key must be 32 bytes, or their base64"),
        ({"retention": 0}, r"retention: must be a number above 0 and of at most 1e\+09, got 0"),
        ({"retention": 1e12}, r"retention: .* of at most 1e\+09, got 1000000000000\.0"),
        ({"handler_timeout": 0}, "handler_timeout: must be a number above 0, got 0"),
    ],
)
def test_invalid_setting_of_an_inbox_is_refused(settings: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{words}$"):
        Inbox(**{"store": "inbox.db", **settings})


async def test_invalid_setting_of_a_run_is_refused(inbox: Inbox) -> None:
    with pytest.raises(ConfigurationError, match=r"^concurrency: must be an integer of at least 1, got 0$"):
        await inbox.run(concurrency=0)
    with pytest.raises(ConfigurationError, match=r"^drain_timeout: must be a number of at least 0, got -1$"):
        await inbox.run(drain_timeout=-1)


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
