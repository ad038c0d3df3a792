"""The inbox in PostgreSQL: processes that share it, killed and paused ones, and outages while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from signing_async import InboxError
from signing_async.postgres import PostgresInbox
from signing_async.webhooks import Event, EventStatus, Receiver, WebhookVerifier
from tests.postgres.processes import forked
from tests.postgres.server import PostgresServer
from tests.servers import another_loop
from tests.storage.event_stores import delivery
from tests.webhooks.deliveries import SECRET, event_body, signed
from tests.webhooks.servers import PATH, serve

forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


@contextlib.asynccontextmanager
async def opened(dsn: str, **settings: Any) -> AsyncIterator[PostgresInbox]:
    """Open an inbox with short leases."""
    async with PostgresInbox(dsn, **{"lease": 3, "timeout": 1, **settings}) as inbox:
        yield inbox


async def status(inbox: PostgresInbox, name: str) -> tuple[EventStatus, int]:
    """Return the status of an event, and the number of its attempts."""
    stored = await inbox.get(name)
    assert stored is not None
    return stored.status, stored.attempts


async def until(inbox: PostgresInbox, number: int, wanted: EventStatus = EventStatus.HANDLED) -> None:
    """Wait until this many events have the status."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(InboxError):
                if (await inbox.stats()).counts[wanted] >= number:
                    return
            await asyncio.sleep(0.02)


# Processes


async def handle_events(dsn: str, pipe: Connection) -> None:
    """Handle events one at a time, each until the test allows it to end; send warnings."""
    logging.getLogger("signing_async.webhooks").warning = lambda text, *values: pipe.send(text % values)  # type: ignore[method-assign]
    async with opened(dsn) as inbox:

        @inbox.on("*")
        async def handle(event: Event) -> None:
            pipe.send("started")
            await asyncio.to_thread(pipe.recv)
            pipe.send("ended")

        await inbox.run(concurrency=1)


@forks
async def test_paused_process_cannot_record_that_an_event_was_handled_after_a_takeover(dsn: str) -> None:
    async with opened(dsn) as inbox:
        taken, finish = asyncio.Event(), asyncio.Event()

        @inbox.on("*")
        async def handle(event: Event) -> None:
            taken.set()
            await finish.wait()

        with forked(handle_events, dsn) as process:
            await inbox.add(*delivery("a", "s"))
            await process.says("started")
            os.kill(process.pid, signal.SIGSTOP)
            async with inbox.running(), asyncio.timeout(60):
                await taken.wait()
                os.kill(process.pid, signal.SIGCONT)
                process.proceed()
                await process.says("ended")
                await process.says("the claim on event a was lost")
                assert await status(inbox, "a") == (EventStatus.PENDING, 2)
                finish.set()
                await until(inbox, 1)


# Outages


async def test_no_event_is_lost_or_handled_twice_when_the_server_fails(postgres: PostgresServer, dsn: str) -> None:
    handled: Counter[str] = Counter()
    names = [f"e{number}" for number in range(200)]
    async with opened(dsn, lease=60) as receiver, opened(dsn, lease=60) as inbox:

        @inbox.on("*")
        async def handle(event: Event) -> None:
            await asyncio.sleep(0.01)
            handled[event.id] += 1

        async def receive(number: int) -> None:
            while True:
                with contextlib.suppress(InboxError):
                    await receiver.add(*delivery(names[number], f"s{number % 20}"))
                    return

        async def fail() -> None:
            for share in (50, 120):
                while len(handled) < share:
                    await asyncio.sleep(0.001)
                await asyncio.to_thread(postgres.kill)
                await asyncio.to_thread(postgres.start)

        async with inbox.running(), asyncio.timeout(100):
            failing = asyncio.create_task(fail())
            for start in range(0, len(names), 20):
                await asyncio.gather(*(receive(number) for number in range(start, start + 20)))
            await failing
            await until(inbox, len(names))
    assert handled == Counter(names)


# Receivers


async def close(inbox: PostgresInbox) -> list[str]:
    """Return the stored events, and close the inbox."""
    async with inbox:
        return [stored.id async for stored in inbox.events()]


def test_threaded_server_stores_deliveries(postgres: PostgresServer) -> None:
    def deliver(name: str) -> int:
        body = event_body(name)
        request = urllib.request.Request(f"http://127.0.0.1:{port}{PATH}", body, signed(body))
        try:
            with urllib.request.urlopen(request) as response:
                found: int = response.status
                return found
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    inbox = PostgresInbox(asyncio.run(postgres.new_schema()), timeout=3)
    with serve("wsgi", Receiver(WebhookVerifier(SECRET), inbox)) as port:
        assert deliver("a") == 202
        with postgres.down():
            assert deliver("b") == 503
        assert [deliver(name) for name in ("a", "b")] == [202, 202]
    assert asyncio.run(close(inbox)) == ["a", "b"]


def use_in_child(inbox: PostgresInbox) -> None:
    """Add an event, and close the inbox."""

    async def use() -> None:
        async with asyncio.timeout(60), inbox:
            await inbox.add(*delivery("b"))

    asyncio.run(use())


@forks
def test_inbox_that_was_used_before_a_fork_works_in_the_child(postgres: PostgresServer) -> None:
    inbox = PostgresInbox(asyncio.run(postgres.new_schema()), timeout=10)
    with another_loop() as run:
        run(inbox.add(*delivery("a"))).result(60)
        child = multiprocessing.get_context("fork").Process(target=use_in_child, args=(inbox,))
        child.start()
        child.join(90)
        assert child.exitcode == 0
        assert asyncio.run(close(inbox)) == ["a", "b"]
