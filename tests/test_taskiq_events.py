"""Events handled by Taskiq workers: real workers and a real inbox process, some of them killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError
from taskiq import InMemoryBroker

from signing_async import Unauthorized
from signing_async.postgres import PostgresInbox
from signing_async.taskiq import event_task, redis_streams
from signing_async.webhooks import Drop, Event, EventStatus, HandlerRetryPolicy, Inbox, RetryLater, StoredEvent
from tests.postgres.server import PostgresServer
from tests.redis.server import RedisServer, running_redis
from tests.storage.event_stores import delivery
from tests.test_taskiq import ROOT, workers, working

EVENTS = "tests.taskiq_workers:events"
KEY = bytes(range(32))


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """A Redis for all tests: each flushes it."""
    with running_redis() as server:
        yield server


@pytest.fixture
async def environment(postgres: PostgresServer, redis: RedisServer, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a worker; the queue and the inbox are empty."""
    async with Redis.from_url(redis.url) as direct:
        await direct.flushall()
    dsn = await postgres.new_schema()
    async with PostgresInbox(dsn, timeout=10) as inbox:
        await inbox.create_table()
    return {
        "SIGNING_INBOX": dsn,
        "SIGNING_BROKER": f"{redis.url}/0",
        "SIGNING_TEST_FOLDER": str(tmp_path),
    }


async def until_started(folder: Path, number: int) -> list[list[str]]:
    """Wait for this many starts of the handler, and return the event and the process of each."""
    async with asyncio.timeout(60):
        while not (folder / "started").exists() or (folder / "started").read_text().count("\n") < number:
            await asyncio.sleep(0.02)
    return [line.split() for line in (folder / "started").read_text().splitlines()]


async def one(inbox: Inbox, name: str = "a") -> StoredEvent:
    """Return a stored event."""
    stored = await inbox.get(name)
    assert stored is not None
    return stored


async def until_settled(inbox: Inbox, name: str = "a") -> StoredEvent:
    """Wait until the event is no longer pending."""
    async with asyncio.timeout(60):
        while (stored := await one(inbox, name)).status is EventStatus.PENDING:
            await asyncio.sleep(0.02)
    return stored


async def test_task_of_a_killed_worker_is_run_by_another_in_the_same_attempt(
    environment: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.taskiq_workers"]
    async with (
        workers(2, environment, tmp_path, EVENTS) as running,
        PostgresInbox(environment["SIGNING_INBOX"]) as inbox,
    ):
        with contextlib.ExitStack() as ended:
            handling = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment})
            ended.callback(handling.wait)
            ended.callback(handling.kill)
            await inbox.add(*delivery("a", "s"))
            ((_, process),) = await until_started(tmp_path, 1)
            (at_work,) = [each for each in running if each.has(int(process))]
            at_work.close()
            await until_started(tmp_path, 2)
            (tmp_path / "a").touch()
            stored = await until_settled(inbox)
    assert (stored.status, stored.attempts) == (EventStatus.HANDLED, 1)


# A worker in this process


@contextlib.asynccontextmanager
async def opened(folder: Path, broker: Any, **settings: Any) -> AsyncIterator[Inbox]:
    """Open an inbox and the broker."""
    policy = HandlerRetryPolicy(max_attempts=3, base_delay=0.01)
    async with Inbox(folder / "inbox.db", **{"retry": policy, **settings}) as inbox:
        await broker.startup()
        yield inbox
        await broker.shutdown()


async def test_what_the_handler_raises_is_recorded_as_in_the_process_of_the_inbox(tmp_path: Path) -> None:
    """Sync and async handlers; a pattern for each. A rejected token uses up no attempt; what hangs is cancelled."""
    broker = InMemoryBroker()
    async with opened(tmp_path, broker, handler_timeout=1) as inbox:
        calls: list[str] = []

        @event_task(broker, inbox, "drop")
        def drop(event: Event) -> None:
            raise Drop("not mine")

        @event_task(broker, inbox, "fail*")
        async def fail(event: Event) -> None:
            calls.append(event.type)
            raise ValueError("no archive")

        @event_task(broker, inbox, "later")
        def later(event: Event) -> Any:
            async def rest() -> None:
                calls.append(event.type)
                if calls.count("later") < 2:
                    raise RetryLater(0, "not yet")

            return rest()

        @event_task(broker, inbox, "rejected")
        async def rejected(event: Event) -> None:
            calls.append(event.type)
            if calls.count("rejected") < 2:
                raise Unauthorized("the token is rejected", status=401)

        @event_task(broker, inbox, "hang")
        async def hang(event: Event) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                calls.append("cancelled")
                raise

        kinds = ("drop", "fail.now", "later", "rejected", "hang")
        for kind in kinds:
            await inbox.add(*delivery(kind, type=kind))
        async with inbox.running():
            ends = [await until_settled(inbox, kind) for kind in kinds]
        assert [(end.status, end.attempts) for end in ends] == [
            (EventStatus.DROPPED, 1),
            (EventStatus.DEAD, 3),
            (EventStatus.HANDLED, 2),
            (EventStatus.HANDLED, 1),
            (EventStatus.DEAD, 3),
        ]
        assert ends[0].error == "not mine"
        assert "TimeoutError" in (ends[4].error or "")
        assert "cancelled" in calls
        assert ends[1].error is not None
        assert ends[1].error.endswith("ValueError: no archive")
        assert (calls.count("fail.now"), calls.count("rejected")) == (3, 2)


async def test_message_of_an_attempt_that_is_over_is_dropped(redis: RedisServer, tmp_path: Path) -> None:
    """While no worker runs, attempts time out. Their messages do not call the handler later."""
    calls: list[str] = []
    broker = redis_streams(redis.url, queue=tmp_path.name, redeliver_after=0.4)
    policy = HandlerRetryPolicy(max_attempts=30, base_delay=0.01, max_delay=0.01)
    async with (
        opened(tmp_path, broker, handler_timeout=0.5, retry=policy) as inbox,
        Redis.from_url(redis.url) as direct,
    ):
        event_task(broker, inbox, "*")(lambda event: calls.append(event.id))
        await inbox.add(*delivery("a"))
        async with inbox.running():
            while (await one(inbox)).attempts < 3:
                await asyncio.sleep(0.02)
        async with working(broker):
            while await direct.xlen(tmp_path.name):
                await asyncio.sleep(0.02)
            assert calls == []
        async with Inbox(tmp_path / "inbox.db", retry=policy) as again:
            worker = redis_streams(redis.url, queue=tmp_path.name, redeliver_after=0.4)
            event_task(worker, again, "*")(lambda event: calls.append(event.id))
            async with working(worker), again.running():
                await until_settled(again)
        assert calls == ["a"]


@pytest.mark.parametrize(
    ("fault", "uncounted"), [(ConnectionError("the broker restarts"), 0), (AuthenticationError("wrong password"), 1)]
)
async def test_result_is_waited_for_through_an_outage_of_the_broker_and_not_after_a_refusal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Exception,
    uncounted: int,
) -> None:
    """No attempt is counted that fails with the broker."""
    broker, faults = InMemoryBroker(), [fault]
    is_ready = broker.result_backend.is_result_ready

    async def fail_once(task_id: str) -> bool:
        if faults:
            raise faults.pop()
        return await is_ready(task_id)

    monkeypatch.setattr(broker.result_backend, "is_result_ready", fail_once)
    async with opened(tmp_path, broker, retry=HandlerRetryPolicy(max_attempts=1, base_delay=0)) as inbox:
        event_task(broker, inbox, "*")(lambda event: None)
        await inbox.add(*delivery("e1"))
        async with inbox.running():
            stored = await until_settled(inbox, "e1")
    assert (stored.status, stored.attempts) == (EventStatus.HANDLED, 1)
    assert sum("no attempt is counted: TransportError" in record.message for record in caplog.records) == uncounted
