"""How the work of an inbox begins and ends, and what it does while its store fails."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from signing_async import InboxError
from signing_async.webhooks import Event, EventStatus, Inbox
from tests.webhooks.inboxes import add, altered_store, fail, settled, stored, until


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
            await anyio.sleep_forever()

    await add(inbox, "a1", "a")
    await add(inbox, "a2", "a")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        await gate.started.wait()
        tasks.cancel_scope.cancel()
        # The scope cancels in each iteration of the loop.
        asyncio.get_running_loop().call_later(0.05, gate.proceed.set)
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
