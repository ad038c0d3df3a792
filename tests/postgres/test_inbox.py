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
from multiprocessing.connection import Connection

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


async def until_handled(inbox: PostgresInbox, number: int) -> None:
    """Wait until this many events were handled."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(InboxError):
                if (await inbox.stats()).counts[EventStatus.HANDLED] >= number:
                    return
            await asyncio.sleep(0.02)


# Processes


async def handle_events(dsn: str, pipe: Connection) -> None:
    """Handle events one at a time, each until the test allows it to end; send warnings."""
    logging.getLogger("signing_async.webhooks").warning = lambda text, *values: pipe.send(text % values)  # type: ignore[method-assign]
    async with PostgresInbox(dsn, lease=60) as inbox:

        @inbox.on("*")
        async def handle(event: Event) -> None:
            pipe.send("started")
            await asyncio.to_thread(pipe.recv)
            pipe.send("ended")

        await inbox.run(concurrency=1)


@forks
async def test_paused_process_cannot_record_that_an_event_was_handled_after_a_takeover(
    postgres: PostgresServer, dsn: str, table: str
) -> None:
    async with PostgresInbox(dsn, lease=60) as inbox:
        taken, finish = asyncio.Event(), asyncio.Event()

        @inbox.on("*")
        async def handle(event: Event) -> None:
            taken.set()
            await finish.wait()

        with forked(handle_events, dsn) as process:
            await inbox.add(*delivery("a", "s"))
            await process.says("started")
            os.kill(process.pid, signal.SIGSTOP)
            await postgres.execute(f"UPDATE {table} SET leased_until = now() - interval '1 s'")
            async with inbox.running(), asyncio.timeout(60):
                await taken.wait()
                os.kill(process.pid, signal.SIGCONT)
                process.proceed()
                await process.says("ended")
                await process.says("the claim on event a was lost")
                stored = await inbox.get("a")
                assert stored is not None
                assert (stored.status, stored.attempts) == (EventStatus.PENDING, 2)
                finish.set()
                await until_handled(inbox, 1)


# Outages


async def test_no_event_is_lost_or_handled_twice_when_the_server_fails(postgres: PostgresServer, dsn: str) -> None:
    handled: Counter[str] = Counter()
    names = [f"e{number}" for number in range(120)]
    async with (
        PostgresInbox(dsn, lease=60, timeout=1) as receiver,
        PostgresInbox(dsn, lease=60, timeout=1) as inbox,
    ):

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
            for share in (30, 70):
                while len(handled) < share:
                    await asyncio.sleep(0.001)
                await asyncio.to_thread(postgres.kill)
                await asyncio.to_thread(postgres.start)

        async with inbox.running(), asyncio.timeout(100):
            failing = asyncio.create_task(fail())
            for start in range(0, len(names), 20):
                await asyncio.gather(*(receive(number) for number in range(start, start + 20)))
            await failing
            await until_handled(inbox, len(names))
    assert handled == Counter(names)


# Receivers


async def add_all(inbox: PostgresInbox, names: list[str]) -> list[bool]:
    """Add events at once, and return whether each was new."""
    return await asyncio.gather(*(inbox.add(*delivery(name)) for name in names))


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

    inbox = PostgresInbox(asyncio.run(postgres.new_schema()), timeout=1.5)
    with serve("wsgi", Receiver(WebhookVerifier(SECRET), inbox)) as port:
        assert deliver("a") == 202
        with postgres.down():
            assert deliver("b") == 503
        assert [deliver(name) for name in ("a", "b")] == [202, 202]
    assert asyncio.run(close(inbox)) == ["a", "b"]


@forks
def test_inbox_works_in_two_event_loops_and_in_a_child_that_was_forked_after_its_first_use(
    postgres: PostgresServer,
) -> None:
    """The threads of a server share one event loop; the handlers run in another one."""
    inbox = PostgresInbox(asyncio.run(postgres.new_schema()), timeout=10)

    async def use_in_child() -> None:
        async with asyncio.timeout(60), inbox:
            await inbox.add(*delivery("b"))

    with another_loop() as run:
        run(inbox.add(*delivery("a"))).result(60)
        child = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(use_in_child()))
        child.start()
        child.join(90)
        assert child.exitcode == 0
        names = [f"e{number}" for number in range(40)]
        adding = [run(inbox.add(*delivery(name))) for name in names]
        assert sum(asyncio.run(add_all(inbox, names))) + sum(added.result(60) for added in adding) == 40
        assert sorted(asyncio.run(close(inbox))) == sorted(["a", "b", *names])
        with pytest.raises(InboxError, match="is closed") as caught:
            run(inbox.add(*delivery("late"))).result(60)
        assert not caught.value.transient
