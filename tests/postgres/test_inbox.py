"""The inbox in PostgreSQL: processes that share it, killed and paused ones, and outages while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from signing_async import InboxError
from signing_async.postgres import PostgresInbox
from signing_async.webhooks import Event, EventStatus, Receiver, WebhookVerifier
from tests.postgres.processes import next_line, worker, write_line
from tests.postgres.server import PostgresServer
from tests.storage.event_stores import delivery
from tests.webhooks.deliveries import SECRET, event_body, signed
from tests.webhooks.servers import PATH, serve


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


async def test_paused_process_cannot_record_that_an_event_was_handled_after_a_takeover(dsn: str) -> None:
    async with opened(dsn) as inbox:
        taken, finish = asyncio.Event(), asyncio.Event()

        @inbox.on("*")
        async def handle(event: Event) -> None:
            taken.set()
            await finish.wait()

        with worker("handle", dsn) as process:
            await inbox.add(*delivery("a", "s"))
            await next_line(process, "started a")
            process.send_signal(signal.SIGSTOP)
            async with inbox.running(), asyncio.timeout(60):
                await taken.wait()
                process.send_signal(signal.SIGCONT)
                write_line(process)
                await next_line(process, "ended a")
                await next_line(process, "the claim on event a was lost")
                assert await status(inbox, "a") == (EventStatus.PENDING, 2)
                finish.set()
                await until(inbox, 1)


# Outages


@pytest.mark.parametrize("how", ["restarted", "connections terminated"])
async def test_no_event_is_lost_or_handled_twice_when_the_server_fails(
    how: str, postgres: PostgresServer, dsn: str
) -> None:
    handled: Counter[str] = Counter()
    stored: set[str] = set()
    async with opened(dsn, lease=60) as receiver, opened(dsn, lease=60) as inbox:

        @inbox.on("*")
        async def handle(event: Event) -> None:
            await asyncio.sleep(0.01)
            handled[event.id] += 1

        async def receive(number: int) -> None:
            while f"e{number}" not in stored:
                with contextlib.suppress(InboxError):
                    await receiver.add(*delivery(f"e{number}", f"s{number % 20}"))
                    stored.add(f"e{number}")

        async def fail() -> None:
            for share in (50, 150, 250):
                while len(handled) < share:
                    await asyncio.sleep(0.001)
                if how == "restarted":
                    await asyncio.to_thread(postgres.restart)
                else:
                    own = "pid <> pg_backend_pid() AND datname = current_database()"
                    await postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {own}")

        async with inbox.running(), asyncio.timeout(100):
            failing = asyncio.create_task(fail())
            for start in range(0, 400, 20):
                await asyncio.gather(*(receive(number) for number in range(start, start + 20)))
            await failing
            await until(inbox, 400)
    assert handled == Counter({f"e{number}": 1 for number in range(400)})


# Receivers


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

    dsn = asyncio.run(postgres.new_schema())
    inbox = PostgresInbox(dsn, timeout=3)

    async def close() -> list[str]:
        async with inbox:
            return [stored.id async for stored in inbox.events()]

    with serve("wsgi", Receiver(WebhookVerifier(SECRET), inbox)) as port:
        assert deliver("a") == 202
        with postgres.down():
            assert deliver("b") == 503
        assert [deliver(name) for name in ("a", "b")] == [202, 202]
    assert asyncio.run(close()) == ["a", "b"]


async def test_inbox_works_on_a_pool_with_a_json_codec(dsn: str) -> None:
    async def init(connection: Any) -> None:
        await connection.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")

    async with asyncpg.create_pool(dsn, min_size=0, init=init) as pool, PostgresInbox(pool, timeout=10) as inbox:
        await inbox.add(*delivery("a"))
        async with inbox.running():
            await until(inbox, 1)
        assert await status(inbox, "a") == (EventStatus.HANDLED, 1)


FORKING = """
import asyncio, os, sys, threading
from signing_async.postgres import PostgresInbox
from tests.storage.event_stores import delivery

inbox, loop = PostgresInbox(sys.argv[1], timeout=10), asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
asyncio.run_coroutine_threadsafe(inbox.add(*delivery("a")), loop).result(60)
child = os.fork()
if child == 0:

    async def use():
        async with asyncio.timeout(60):
            await inbox.add(*delivery("b"))
            await inbox.aclose()

    code = 1
    try:
        asyncio.run(use())
        code = 0
    finally:
        os._exit(code)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
asyncio.run(inbox.aclose())
sys.exit(code)
"""


async def test_inbox_that_was_used_before_a_fork_works_in_the_child(dsn: str) -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", FORKING, dsn, stderr=subprocess.PIPE)
    _, errors = await child.communicate()
    assert child.returncode == 0, errors.decode()
    async with opened(dsn) as inbox:
        assert {stored.id async for stored in inbox.events()} == {"a", "b"}
