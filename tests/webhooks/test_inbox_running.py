"""How the work of an inbox begins and ends, and what it does while its store fails."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from signing_async.errors import InboxError
from signing_async.storage.events import SqliteEventStore
from signing_async.webhooks import (
    Event,
    EventClaim,
    EventStatus,
    Inbox,
)
from signing_async.webhooks import inbox as inbox_worker
from tests.webhooks.inboxes import AT_ONCE, add, locked, settled, stored

LOGGER = "signing_async.webhooks"


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[Inbox]:
    """An inbox that retries at once."""
    async with Inbox(tmp_path / "inbox.db", retry=AT_ONCE) as opened:
        yield opened


async def test_cancelled_run_waits_for_running_handlers_and_starts_no_new_ones(inbox: Inbox) -> None:
    started, proceed = asyncio.Event(), asyncio.Event()
    handled: list[str] = []

    @inbox.on("*")
    async def handle(event: Event) -> None:
        started.set()
        await proceed.wait()
        handled.append(event.id)

    await add(inbox, "a1", "a")
    await add(inbox, "a2", "a")
    running = asyncio.create_task(inbox.run())
    await started.wait()
    running.cancel()
    await asyncio.sleep(0.01)
    assert not running.done()
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert handled == ["a1"]
    first, second = [event async for event in inbox.events()]
    assert first.status is EventStatus.HANDLED
    assert (second.status, second.attempts) == (EventStatus.PENDING, 0)


@pytest.mark.parametrize("in_block", [False, True], ids=["run", "running"])
async def test_handlers_that_do_not_end_are_cancelled_and_their_attempts_do_not_count(
    inbox: Inbox, in_block: bool
) -> None:
    started = asyncio.Event()
    timeout = 0.01

    @inbox.on("*")
    async def handle(event: Event) -> None:
        started.set()
        await asyncio.Event().wait()

    async def work() -> None:
        if not in_block:
            await inbox.run(drain_timeout=timeout)
        async with inbox.running(drain_timeout=timeout):
            await asyncio.Event().wait()

    await add(inbox, "e1")
    working = asyncio.create_task(work())
    await started.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    event = await stored(inbox, "e1")
    assert (event.status, event.attempts, event.due_at) == (EventStatus.PENDING, 0, None)


@pytest.mark.parametrize("in_block", [False, True], ids=["run", "running"])
async def test_anyio_scope_that_cancels_again_and_again_lets_handlers_end(inbox: Inbox, in_block: bool) -> None:
    started, proceed = asyncio.Event(), asyncio.Event()

    @inbox.on("*")
    async def handle(event: Event) -> None:
        started.set()
        await proceed.wait()

    async def work() -> None:
        if not in_block:
            await inbox.run()
        async with inbox.running():
            await anyio.sleep_forever()

    await add(inbox, "e1")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        await started.wait()
        tasks.cancel_scope.cancel()
        # The scope cancels in each iteration of the loop.
        asyncio.get_running_loop().call_later(0.05, proceed.set)
    event = await stored(inbox, "e1")
    assert (event.status, event.attempts) == (EventStatus.HANDLED, 1)


async def test_drain_waits_for_a_plain_handler_however_long_it_takes(inbox: Inbox) -> None:
    """Its thread cannot be stopped, and another worker must not handle the event meanwhile."""
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


async def test_store_that_cannot_be_opened_is_an_inbox_error_of_run_and_running(tmp_path: Path) -> None:
    async with Inbox(tmp_path / "nowhere" / "inbox.db") as inbox:
        with pytest.raises(InboxError, match=r"the inbox .*nowhere/inbox\.db: No such file or directory"):
            await inbox.run()
        with pytest.raises(InboxError, match="No such file"):
            async with inbox.running():
                pytest.fail("it runs")


async def test_store_that_fails_for_a_while_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a claim nor the record of a handled event is lost."""
    monkeypatch.setattr(inbox_worker, "_PAUSE", 0.01)
    path = tmp_path / "inbox.db"
    calls = 0
    async with Inbox(SqliteEventStore(path, timeout=0.01)) as inbox:
        lock = contextlib.ExitStack()

        @inbox.on("*")
        async def handle(event: Event) -> None:
            nonlocal calls
            calls += 1
            if event.id == "e1":
                lock.enter_context(locked(path))

        await add(inbox, "e1")
        async with inbox.running(), asyncio.timeout(30):
            while not ("cannot claim events now" in caplog.text and "cannot record the end of event e1" in caplog.text):
                await asyncio.sleep(0.005)
            lock.close()
            await add(inbox, "e2")
            events = await settled(inbox)
    assert [(event.status, event.attempts) for event in events] == [(EventStatus.HANDLED, 1)] * 2
    assert calls == 2


@pytest.mark.parametrize("when", ["between events", "during an attempt"])
async def test_store_that_fails_for_good_ends_the_run_with_its_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    async with Inbox(tmp_path / "inbox.db") as inbox:
        calls: list[str] = []

        @inbox.on("*")
        async def handle(event: Event) -> None:
            calls.append(event.id)
            if when == "during an attempt":
                await inbox.aclose()

        await add(inbox, "e1")
        running = asyncio.create_task(inbox.run())
        if when == "between events":
            await settled(inbox)
            await inbox.aclose()
        done, _ = await asyncio.wait([running], timeout=60)
        assert done, "the run goes on"
        with pytest.raises(InboxError, match="is closed"):
            running.result()
    assert calls == ["e1"]
    assert "no more events are handled: the inbox " in caplog.text
    assert caplog.text.count("cannot record the end of event e1: ") == (when == "during an attempt")


async def test_lost_claim_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Inbox(tmp_path / "inbox.db") as inbox, Inbox(tmp_path / "inbox.db") as other:

        @inbox.on("*")
        async def handle(event: Event) -> None:
            for lock in tmp_path.glob("*.lock"):
                lock.unlink()
            assert await other.store.claim(1)

        await add(inbox, "e1")
        async with inbox.running(), asyncio.timeout(30):
            while "the claim on event e1 was lost: the event may be handled again" not in caplog.text:
                await asyncio.sleep(0.005)
        assert (await stored(inbox, "e1")).status is EventStatus.PENDING


REFUSE = "CREATE TRIGGER refuse BEFORE UPDATE ON events WHEN OLD.id = 'e0' AND {} BEGIN SELECT RAISE(ABORT, 'no'); END"


@pytest.mark.parametrize("waiting", [0, 5])
async def test_end_that_the_store_refuses_for_good_ends_no_run_and_its_event_stays_claimed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    """The handler doesn't run again at once, but after the claim has ended."""
    monkeypatch.setattr(inbox_worker, "_IDLE", 0.01)
    path, handled = tmp_path / "inbox.db", list[str]()
    async with Inbox(path) as inbox:
        inbox.on("*")(lambda event: handled.append(event.id))
        for number in range(1 + waiting):
            await add(inbox, f"e{number}", f"s{number}")
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute(REFUSE.format("NEW.owner IS NULL"))
        async with inbox.running(concurrency=2), asyncio.timeout(60):
            while "cannot record the end of event e0" not in caplog.text:
                await asyncio.sleep(0.005)
            for number in range(10):
                await add(inbox, f"later{number}")
            while (await inbox.stats()).counts[EventStatus.HANDLED] < 10 + waiting:
                await asyncio.sleep(0.005)
        assert (await stored(inbox, "e0")).fence is not None
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("DROP TRIGGER refuse")
    assert handled.count("e0") == 1
    [record] = [record for record in caplog.records if "the end of event e0" in record.message]
    assert record.levelname == "ERROR"
    async with Inbox(path) as inbox:
        inbox.on("*")(lambda event: handled.append(event.id))
        async with inbox.running():
            await settled(inbox)
    assert handled.count("e0") == 2


class OftenLocked(SqliteEventStore):
    """Its file is locked whenever the end of an attempt should be recorded, for as many times as ``failures``."""

    failures = 5

    async def settle(self, claim: EventClaim, status: EventStatus, error: str | None = None) -> bool:
        self.failures -= 1
        await asyncio.sleep(0.01)
        with locked(self._engine.path) if self.failures >= 0 else contextlib.nullcontext():
            return await super().settle(claim, status, error)


async def test_handler_does_not_run_again_while_its_end_waits_for_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No event is claimed until then: the store holds no claim whose end failed."""
    monkeypatch.setattr(inbox_worker, "_PAUSE", 0.02)
    monkeypatch.setattr(inbox_worker, "_IDLE", 0.005)
    store = OftenLocked(tmp_path / "inbox.db", timeout=0.01)
    async with Inbox(store) as inbox:
        handled: list[Event] = []
        inbox.on("*")(handled.append)
        await add(inbox, "e1")
        async with inbox.running(), asyncio.timeout(30):
            while store.failures >= 0:
                await asyncio.sleep(0.005)
            [event] = await settled(inbox)
    assert (event.status, event.attempts, len(handled)) == (EventStatus.HANDLED, 1, 1)


class SlowToRecord(SqliteEventStore):
    """The end of an attempt is recorded when the test allows it, while claims take effect at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.recording = asyncio.Semaphore(0)

    async def settle(self, claim: EventClaim, status: EventStatus, error: str | None = None) -> bool:
        async with self.recording:
            return await super().settle(claim, status, error)

    async def wait(self, timeout: float) -> None:
        await asyncio.sleep(0.005)


async def test_no_more_ended_handlers_wait_for_their_record_than_run_at_once(tmp_path: Path) -> None:
    """A kill lets no more handlers run again than that."""
    store = SlowToRecord(tmp_path / "inbox.db")
    async with Inbox(store) as inbox:
        handled: list[str] = []
        inbox.on("*")(lambda event: handled.append(event.id))
        for number in range(12):
            await add(inbox, f"e{number}")
        async with inbox.running(concurrency=3, drain_timeout=60), asyncio.timeout(60):
            while len(handled) < 3:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            assert len(handled) == 3
            store.recording.release()
            events = await settled(inbox)
    assert {(event.status, event.attempts) for event in events} == {(EventStatus.HANDLED, 1)}
    assert len(handled) == 12


EXIT = """
import asyncio, sys
from datetime import datetime, UTC
from signing_async.webhooks import Inbox
from signing_async.webhooks.event import parse_event

async def work():
    async with Inbox(sys.argv[1]) as inbox:

        @inbox.on("*")
        async def handle(event):
            sys.exit("the configuration is wrong")

        await inbox.add(parse_event(b'{"id": "e1"}', datetime.now(UTC)), b'{"id": "e1"}')
        await inbox.run()

asyncio.run(work())
"""


async def test_handler_that_exits_ends_the_program_and_its_event_is_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXIT, str(tmp_path / "inbox.db")]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the configuration is wrong" in done.stderr
    async with Inbox(tmp_path / "inbox.db") as inbox:
        assert [claim.stored.id for claim in await inbox.store.claim(1)] == ["e1"]


async def test_store_that_fails_at_the_end_does_not_keep_a_run_from_ending(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "inbox.db"
    async with Inbox(SqliteEventStore(path, timeout=0.01)) as inbox:
        started = asyncio.Event()

        @inbox.on("*")
        async def handle(event: Event) -> None:
            started.set()
            await asyncio.Event().wait()

        await add(inbox, "e1")
        running = asyncio.create_task(inbox.run(drain_timeout=0))
        await started.wait()
        with locked(path):
            running.cancel()
            await asyncio.wait([running], timeout=30)
            assert running.done()
    assert "cannot record the end of event e1" in caplog.text
    async with Inbox(path) as inbox:
        assert [claim.stored.id for claim in await inbox.store.claim(1)] == ["e1"]


async def test_error_that_is_not_an_inbox_error_ends_the_run_and_is_raised(tmp_path: Path) -> None:
    """As from a store with a mistake in it."""

    class Faulty(SqliteEventStore):
        async def wait(self, timeout: float) -> None:
            raise LookupError("a mistake")

    async def work() -> None:
        async with Inbox(Faulty(tmp_path / "inbox.db")) as inbox, inbox.running(), asyncio.timeout(30):
            while len(asyncio.all_tasks()) > 1:  # the run has not ended
                await asyncio.sleep(0.001)

    with pytest.raises(LookupError, match="a mistake"):
        await work()


async def test_run_ends_while_the_end_of_an_attempt_cannot_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, failing = SqliteEventStore(tmp_path / "inbox.db"), asyncio.Event()

    async def settle(*_: object) -> bool:
        failing.set()
        raise InboxError("the disk is full", transient=True)

    monkeypatch.setattr(store, "settle", settle)
    async with Inbox(store) as inbox:
        inbox.on("*")(lambda _: None)
        await add(inbox, "a1", "a")
        running = asyncio.create_task(inbox.run(drain_timeout=0.1))
        await failing.wait()
        running.cancel()
        async with asyncio.timeout(60):
            await asyncio.wait([running])
        assert running.cancelled()
