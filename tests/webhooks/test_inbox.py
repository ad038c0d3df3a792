"""The inbox: which handler runs, what becomes of its failures, how the work begins and ends, and managing events."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from signing_async import AuthError, ConfigurationError, InboxError, InvalidRequest
from signing_async.webhooks import Drop, Event, EventFilter, EventStatus, HandlerRetryPolicy, Inbox, RetryLater, Wakeups
from tests.webhooks.inboxes import AT_ONCE, add, altered_store, delivery, fail, settled, stored, until

LOGGER = "signing_async.webhooks"
PENDING = EventFilter(status=EventStatus.PENDING)


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
    [logged] = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert logged == "no handler for event has.none (type 'has.none')"


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


async def test_each_error_of_a_handler_ends_the_event_with_its_text(inbox: Inbox) -> None:
    errors: list[tuple[BaseException, EventStatus, str]] = [
        (Drop("another tenant's \ud800"), EventStatus.DROPPED, r"another tenant's \\ud800"),
        (Drop(), EventStatus.DROPPED, "None"),
        (RetryLater(0), EventStatus.DEAD, "retry in 0 s"),
        (TimeoutError("the database did not respond"), EventStatus.DEAD, "TimeoutError: the database did not respond"),
        (asyncio.CancelledError(), EventStatus.DEAD, "CancelledError"),
        (StopIteration(), EventStatus.DEAD, "RuntimeError: .* raised StopIteration"),
        (Panic("in Rust"), EventStatus.DEAD, "Panic: in Rust"),
        (Mute(), EventStatus.DEAD, "Mute"),
    ]

    @inbox.on("plain")
    def fail(event: Event) -> None:
        raise errors[int(event.id) // 2][0]

    @inbox.on("async")
    async def fail_async(event: Event) -> None:
        raise errors[int(event.id) // 2][0]

    for number in range(2 * len(errors)):
        await add(inbox, str(number), kind=("plain", "async")[number % 2])
    async with inbox.running():
        events = await settled(inbox)
    for number, event in enumerate(events):
        _, status, text = errors[number // 2]
        assert (event.status, event.attempts) == (status, 1 if status is EventStatus.DROPPED else 3)
        assert re.fullmatch(text, str(event.error))


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


# Events that the worker cannot handle


async def test_events_that_cannot_be_decrypted_stay_pending_until_a_worker_has_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong key is a fault of the worker. The next event of the signing waits. Keys can be rotated."""
    path, old, new = tmp_path / "inbox.db", b"o" * 32, b"n" * 32
    handled: list[str] = []
    async with Inbox(path, key=old) as inbox:
        await add(inbox, "sealed", "a")
    async with Inbox(path, key=new) as inbox:
        await add(inbox, "next", "a")
        words = "the body of event sealed cannot be decrypted: none of the given keys decrypts it"
        with pytest.raises(InboxError, match=words) as caught:
            await inbox.get("sealed")
        assert (caught.value.transient, caught.value.client_wide) == (True, False)
        async with inbox.running():
            await until(lambda: f"no attempt is counted: {words}" in caplog.text)
    async with Inbox(path, key=[new, old]) as inbox:
        inbox.on("*")(lambda event: handled.append(event.id))
        assert [event.attempts async for event in inbox.events()] == [0, 0]
        assert await inbox.retry(PENDING) == 2
        async with inbox.running():
            events = await settled(inbox)
    assert {(event.status, event.attempts) for event in events} == {(EventStatus.HANDLED, 1)}
    assert handled == ["sealed", "next"]
    assert b'"signing"' not in path.read_bytes()
    assert repr(Inbox(path, key=new)) == f"Inbox(SqliteEventStore({str(path)!r}))"


async def test_handlers_whose_client_fails_use_up_no_attempts_and_block_no_other_signing(
    inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    """More signings than are handled at once. With a policy without delays, these events still wait for the others."""
    fails, handled = True, list[str]()

    @inbox.on("*")
    async def handle(event: Event) -> None:
        if fails and event.id.startswith("poison"):
            raise AuthError("cannot refresh the token")
        handled.append(event.id)

    for kind in ("poison", "next"):
        for number in range(6):
            await add(inbox, f"{kind}{number}", f"poisoned{number}")
    good = [f"good{number}" for number in range(20)]
    for number, name in enumerate(good):
        await add(inbox, name, f"sound{number % 5}")
    async with inbox.running(concurrency=2):
        async with asyncio.timeout(30):
            while len(waiting := [each async for each in inbox.events(PENDING) if each.error is not None]) < 6:
                await asyncio.sleep(0.005)
        await until(lambda: len(handled) == 20)
        assert sorted(handled) == sorted(good)
        assert {event.attempts for event in waiting} == {0}
        fails = False
        await inbox.retry(PENDING)
        events = await settled(inbox)
    assert {(event.status, event.attempts) for event in events} == {(EventStatus.HANDLED, 1)}
    record = next(record for record in caplog.records if "event poison0 is retried in 5.0 s" in record.message)
    assert (record.levelname, record.exc_info) == ("ERROR", None)
    assert "no attempt is counted: AuthError: cannot refresh the token" in record.message


async def test_pauses_grow_while_the_client_of_a_handler_fails(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    """Such an event is retried for ever: it must not fill the log, nor try a rejected token too often."""

    @inbox.on("*")
    async def handle(event: Event) -> None:
        raise AuthError("cannot refresh the token")

    await add(inbox, "first")
    async with inbox.running():
        async with asyncio.timeout(30):
            while caplog.text.count("event first is retried in ") < 9:
                await inbox.retry(PENDING)
                await asyncio.sleep(0.005)
        await add(inbox, "second")
        await until(lambda: "event second is retried in 5.0 s" in caplog.text)
    pauses = re.findall(r"event first is retried in ([0-9.]+) s", caplog.text)
    assert [float(each) for each in pauses][:9] == [5, 10, 20, 40, 80, 160, 320, 600, 600]


# How the work begins and ends, and what it does while its store fails


class Gate:
    """A handler that tells when it started, and ends when the test allows it."""

    def __init__(self, inbox: Inbox) -> None:
        self.started, self.proceed = asyncio.Event(), asyncio.Event()
        inbox.on("*")(self.handle)

    async def handle(self, event: Event) -> None:
        """Handle an event."""
        self.started.set()
        await self.proceed.wait()


@pytest.mark.parametrize("in_block", [False, True], ids=["run", "running"])
async def test_work_that_is_cancelled_again_and_again_lets_running_handlers_end_and_starts_no_new_ones(
    inbox: Inbox, in_block: bool
) -> None:
    gate = Gate(inbox)

    async def work() -> None:
        if not in_block:
            await inbox.run()
        async with inbox.running():
            await asyncio.Event().wait()

    await add(inbox, "a1", "a")
    await add(inbox, "a2", "a")
    working = asyncio.create_task(work())
    await gate.started.wait()
    asyncio.get_running_loop().call_later(0.05, gate.proceed.set)
    while not working.done():
        working.cancel()  # in each iteration of the loop, as anyio does
        await asyncio.sleep(0)
    first, second = [event async for event in inbox.events()]
    assert (first.status, first.attempts) == (EventStatus.HANDLED, 1)
    assert (second.status, second.attempts) == (EventStatus.PENDING, 0)


async def test_handlers_that_do_not_end_are_cancelled_and_their_attempts_do_not_count(inbox: Inbox) -> None:
    gate = Gate(inbox)
    await add(inbox, "e1")
    async with inbox.running(drain_timeout=0.01):
        await gate.started.wait()
    event = await stored(inbox, "e1")
    assert (event.status, event.attempts, event.due_at) == (EventStatus.PENDING, 0, None)


async def test_drain_waits_for_a_plain_handler_however_long_it_takes(inbox: Inbox) -> None:
    """The handler's thread cannot be stopped, and no other worker may handle the event meanwhile."""
    started, proceed = threading.Event(), threading.Event()

    @inbox.on("*")
    def handle(event: Event) -> None:
        started.set()
        assert proceed.wait(30)

    await add(inbox, "e1")
    running = asyncio.create_task(inbox.run(drain_timeout=0))
    await asyncio.to_thread(started.wait)
    running.cancel()
    await asyncio.sleep(0.02)
    assert not running.done()
    proceed.set()
    await asyncio.wait([running])
    assert (await stored(inbox, "e1")).status is EventStatus.HANDLED


async def test_store_that_cannot_be_opened_is_an_inbox_error(tmp_path: Path) -> None:
    async with Inbox(tmp_path / "nowhere" / "inbox.db") as inbox:
        with pytest.raises(InboxError, match=r"the inbox .*nowhere/inbox\.db: No such file or directory"):
            await inbox.run()


async def test_store_that_fails_for_a_while_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a claim nor the record of a handled event is lost."""
    calls, methods = list[str](), dict[str, Any]()
    async with Inbox(altered_store(tmp_path / "inbox.db", methods)) as inbox:

        @inbox.on("*")
        async def handle(event: Event) -> None:
            calls.append(event.id)
            if event.id == "e1":
                methods.update(claim=fail, settle=fail)

        await add(inbox, "e1")
        async with inbox.running():
            await until(lambda: "cannot claim events now" in caplog.text)
            await until(lambda: "cannot record the end of event e1" in caplog.text)
            methods.clear()
            await add(inbox, "e2")
            events = await settled(inbox)
    assert [(event.status, event.attempts) for event in events] == [(EventStatus.HANDLED, 1)] * 2
    assert calls == ["e1", "e2"]


async def test_store_that_fails_for_good_is_logged_and_raised_at_the_end_of_the_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with Inbox(tmp_path / "inbox.db") as inbox, inbox.running():
            await add(inbox, "e1")
            await settled(inbox)  # the work has begun
            await inbox.aclose()
            await until(lambda: "no more events are handled: the inbox " in caplog.text)
            await asyncio.sleep(0.05)  # the work ends

    with pytest.raises(InboxError, match="is closed"):
        await work()


async def test_lost_claim_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def settle(*_: object) -> bool:
        return False

    async with Inbox(altered_store(tmp_path / "inbox.db", {"settle": settle})) as inbox:
        await add(inbox, "e1")
        async with inbox.running():
            await until(lambda: "the claim on event e1 was lost: the event may be handled again" in caplog.text)


def test_handler_that_exits_ends_the_program_and_its_event_is_free(tmp_path: Path) -> None:
    async def work() -> None:
        async with Inbox(tmp_path / "inbox.db") as inbox:

            @inbox.on("*")
            async def handle(event: Event) -> None:
                sys.exit("the configuration is wrong")

            await add(inbox, "e1")
            await inbox.run()

    async def claimed() -> list[str]:
        async with Inbox(tmp_path / "inbox.db") as inbox:
            return [claim.stored.id for claim in await inbox.store.claim(1)]

    with pytest.raises(SystemExit, match="the configuration is wrong"):
        asyncio.run(work())
    assert asyncio.run(claimed()) == ["e1"]


async def test_store_that_fails_at_the_end_does_not_keep_a_run_from_ending(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, methods = tmp_path / "inbox.db", dict[str, Any]()
    async with Inbox(altered_store(path, methods)) as inbox:
        gate = Gate(inbox)
        await add(inbox, "e1")
        running = asyncio.create_task(inbox.run(drain_timeout=0.1))
        await gate.started.wait()
        methods.update(settle=fail)
        gate.proceed.set()
        await until(lambda: "cannot record the end of event e1" in caplog.text)
        running.cancel()
        await asyncio.wait([running], timeout=30)
        assert running.cancelled()
    async with Inbox(path) as inbox:
        assert [claim.stored.id for claim in await inbox.store.claim(1)] == ["e1"]


# Settings


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (HandlerRetryPolicy, {"max_attempts": 0}, "max_attempts: must be an integer of at least 1, got 0"),
        (Inbox, {"store": None}, "inbox: must be a path or an EventStore, got None"),
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
    with pytest.raises(ConfigurationError, match=r"^older_than: must be a number of at least 0 .*, got -1$"):
        await inbox.purge(older_than=-1)


# Managing


async def test_run_purges_handled_events_after_the_retention_and_still_knows_their_ids(tmp_path: Path) -> None:
    async with Inbox(tmp_path / "inbox.db", retention=0.001) as inbox:
        await add(inbox, "e1")
        async with inbox.running():
            await settled(inbox)
        assert await inbox.purge(older_than=3600) == 0
        await asyncio.sleep(0.01)
        async with inbox.running(), asyncio.timeout(30):
            while (purged := await stored(inbox, "e1")).body:
                await asyncio.sleep(0.005)
        with pytest.raises(InboxError, match=r"^event e1 has no body: the event was purged$") as caught:
            _ = purged.event
        assert not caught.value.client_wide
        assert not await inbox.add(*delivery("e1"))
        assert await inbox.retry(EventFilter()) == await inbox.purge(older_than=0) == 0
        assert await inbox.get("e3") is None


@pytest.mark.parametrize(("retention", "purges"), [(None, 0), (1e9, 1)])
async def test_failing_purge_is_logged_and_without_a_retention_nothing_is_purged(
    retention: float | None, purges: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = altered_store(tmp_path / "inbox.db", {"purge": fail})
    async with Inbox(store, retention=retention) as inbox, inbox.running():
        await add(inbox, "e1")
        await settled(inbox)
    assert caplog.text.count("cannot purge events now: locked") == purges
