"""The SQLite file of an inbox: shared by processes, killed processes and forks; foreign, newer, unclosed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from signing_async.errors import InboxError
from signing_async.storage.events import SqliteEventStore
from signing_async.webhooks import (
    Event,
    EventFilter,
    EventStatus,
    Inbox,
    Receiver,
    WebhookVerifier,
)
from signing_async.webhooks.event import parse_event
from tests.webhooks.deliveries import SECRET, event_body, signed
from tests.webhooks.inboxes import add, settled

WORK = """
import asyncio, os, signal, sys
from signing_async.webhooks import HandlerRetryPolicy, Inbox

async def main():
    inbox = Inbox(sys.argv[1], retry=HandlerRetryPolicy(max_attempts=4, base_delay=0))

    @inbox.on("*")
    async def handle(event):
        print(event.id, flush=True)
        if event.id == "poison":
            os.kill(os.getpid(), signal.SIGKILL)
        if event.id == "hangs":
            await asyncio.Event().wait()
        await asyncio.sleep(0.1 if event.id.startswith("slow") else 0.001)

    task = asyncio.create_task(inbox.run(concurrency=int(sys.argv[2])))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await asyncio.gather(task, return_exceptions=True)
    await inbox.aclose()

asyncio.run(main())
"""


@contextlib.contextmanager
def worker(path: Path, concurrency: int = 4) -> Iterator[subprocess.Popen[str]]:
    """Another process that handles the inbox and prints the id of each event."""
    command = [sys.executable, "-W", "error", "-c", WORK, str(path), str(concurrency)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    """Return the rest of the output, after the end of the process."""
    assert process.stdout is not None
    return process.stdout.read().split()


async def test_events_from_before_the_clock_was_set_back_are_handled_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that a process with a wrong clock has left behind."""
    now = time.time
    async with Inbox(tmp_path / "inbox.db") as inbox:
        started, proceed = asyncio.Event(), asyncio.Event()

        @inbox.on("*")
        async def handle(event: Event) -> None:
            started.set()
            if event.id == "e1":
                await proceed.wait()

        with monkeypatch.context() as tomorrow:
            tomorrow.setattr(time, "time", lambda: now() + 86_400)
            await add(inbox, "left")
        async with inbox.running():
            await settled(inbox)
            with monkeypatch.context() as tomorrow:
                tomorrow.setattr(time, "time", lambda: now() + 86_400)
                started.clear()
                await add(inbox, "e1", "s1")
                await add(inbox, "e2", "s1")
                await started.wait()
            proceed.set()
            assert {event.status for event in await settled(inbox)} == {EventStatus.HANDLED}


@pytest.mark.parametrize("change", ["removed", "replaced"])
async def test_no_event_is_acknowledged_once_the_file_is_gone(tmp_path: Path, change: str) -> None:
    path = tmp_path / "inbox.db"
    async with Inbox(path) as inbox:
        receiver = Receiver(WebhookVerifier(SECRET), inbox)
        assert (await receiver.receive(signed(event_body("e1")), event_body("e1"))).status == 202
        path.unlink()
        if change == "replaced":
            async with Inbox(path) as other:
                await other.stats()
        for number in range(2):
            body = event_body(f"late {number}")
            assert (await receiver.receive(signed(body), body)).status == 503
        with pytest.raises(InboxError, match=rf"inbox\.db was {change}.* while it was open: restore it, then restart"):
            await inbox.stats()
        assert path.exists() == (change == "replaced")


async def test_event_of_a_killed_worker_is_handled_again_at_once_by_a_living_one(tmp_path: Path) -> None:
    path = tmp_path / "inbox.db"
    async with Inbox(path) as inbox:
        await add(inbox, "hangs", "a")
        await add(inbox, "next", "a")
        # With a concurrency of 1, the worker is busy and cannot claim the other event.
        with worker(path, concurrency=1) as process:
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == "hangs\n"
            handled: list[str] = []
            inbox.on("*")(lambda event: handled.append(event.id))
            async with inbox.running():
                await add(inbox, "other", "b")
                while "other" not in handled:
                    await asyncio.sleep(0.005)
                assert handled == ["other"]
                process.kill()
                first, *_ = await settled(inbox)
    assert handled == ["other", "hangs", "next"]
    assert (first.status, first.attempts, first.error) == (EventStatus.HANDLED, 2, None)


async def test_event_that_kills_its_process_is_dead_after_its_attempts_and_takes_no_other_with_it(
    tmp_path: Path,
) -> None:
    """Not even events that are always being handled when the process dies."""
    path = tmp_path / "inbox.db"
    async with Inbox(path) as inbox:
        for name in ("slow1", "slow2", "poison", "slow3"):
            await add(inbox, name, name)
        await add(inbox, "next", "poison")
        codes: list[int] = []
        settling = asyncio.create_task(settled(inbox))
        while not settling.done():
            with worker(path) as process:
                ended = asyncio.create_task(asyncio.to_thread(process.wait))
                await asyncio.wait([ended, settling], return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    codes.append(process.returncode)
                else:
                    process.kill()
                    await ended
        events = {event.id: (event.status, event.error) for event in settling.result()}
        attempts = {event.id: event.attempts for event in settling.result()}
    assert codes == [-signal.SIGKILL] * (2 + 4)  # twice with the others, then each attempt alone
    assert events.pop("poison") == (EventStatus.DEAD, "the process ended during the attempt")
    assert events == dict.fromkeys(("slow1", "slow2", "slow3", "next"), (EventStatus.HANDLED, None))
    assert {attempts[name] for name in events} == {1}


async def test_events_survive_a_restart_in_every_status(tmp_path: Path) -> None:
    path = tmp_path / "inbox.db"
    async with Inbox(path) as inbox:
        for status in (EventStatus.HANDLED, EventStatus.DROPPED, EventStatus.DEAD):
            await add(inbox, status)
            (claim,) = await inbox.store.claim(1)
            await inbox.store.settle(claim, status)
        await add(inbox, "pending")
        before = [event async for event in inbox.events()]
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600
    async with Inbox(path) as inbox:
        assert [event async for event in inbox.events()] == before


FORK = """
import asyncio, os, sys
from signing_async.webhooks import Inbox, Receiver, WebhookVerifier, sign

inbox = Inbox(sys.argv[1])
receiver = Receiver(WebhookVerifier("secret"), inbox)

def deliver_in_child(body):
    child = os.fork()
    if not child:
        print(receiver.receive_blocking(sign("secret", body), body).message, flush=True)
        os._exit(0)
    os.waitpid(child, 0)

async def use():
    print("stored" if await inbox.get("evt_1") else "lost", flush=True)

deliver_in_child(b'{"id": "evt_1"}')
asyncio.run(use())
deliver_in_child(b'{"id": "evt_2"}')
asyncio.run(inbox.aclose())
"""


def test_inbox_made_before_a_fork_works_in_the_child_and_one_that_was_used_says_so(tmp_path: Path) -> None:
    """As in gunicorn with --preload."""
    command = [sys.executable, "-c", FORK, str(tmp_path / "inbox.db")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["accepted", "stored", "cannot store events now"]
    assert "was opened before a fork; open it again in the child process" in done.stderr


async def test_database_of_another_program_or_version_is_refused(tmp_path: Path) -> None:
    foreign, newer, earlier = tmp_path / "foreign.db", tmp_path / "newer.db", tmp_path / "earlier.db"
    with contextlib.closing(sqlite3.connect(foreign)) as database:
        database.execute("CREATE TABLE events (date)")
    for path, version in ((newer, 4), (earlier, 2)):
        async with Inbox(path) as inbox:
            await inbox.stats()
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute(f"PRAGMA user_version = {version}")
    for path, words in (
        (foreign, "is the database of another program; it was not changed"),
        (newer, "was written by a newer version of signing-async; upgrade this one"),
        (
            earlier,
            "was written by an earlier version of signing-async; finish its work with that version, then move it away",
        ),
    ):
        async with Inbox(path) as inbox:
            with pytest.raises(InboxError, match=f"^the inbox {path} {words}$"):
                await inbox.stats()


async def test_stored_event_is_synced_to_disk_and_the_end_of_an_attempt_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[str] = []

    class Watched(sqlite3.Connection):
        def execute(self, *arguments: object) -> sqlite3.Cursor:
            statement = str(arguments[0])
            if statement == "COMMIT":
                (mode,) = super().execute("PRAGMA synchronous").fetchone()
                settings.append({1: "normal", 2: "full"}[mode])
            return super().execute(*arguments)  # type: ignore[arg-type]  # passed on as they are

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *given, **named: connect(*given, **named, factory=Watched))
    async with Inbox(tmp_path / "inbox.db") as inbox:
        await add(inbox, "e1")
        (claim,) = await inbox.store.claim(1)
        await inbox.store.settle(claim, EventStatus.HANDLED)
        await add(inbox, "e2")
    assert (settings[0], settings[-1], set(settings[1:-1])) == ("full", "full", {"normal"})


async def test_claims_do_not_slow_down_with_the_number_of_events(tmp_path: Path) -> None:
    """Each statement of a claim and of an addition finds its rows by an index."""
    path = tmp_path / "inbox.db"
    statements: list[str] = []

    async with Inbox(path) as inbox:
        for number in range(3):
            await add(inbox, f"e{number}", "sig_1" if number else None)
        store = inbox.store
        assert isinstance(store, SqliteEventStore)
        await store.claim(0)  # the first claim of a process looks for events from before the clock was set back
        connection = store._engine._database.connection
        assert connection is not None
        connection.set_trace_callback(statements.append)
        await add(inbox, "e4", "sig_1")
        for claim in await store.claim(2):
            await store.settle(claim, EventStatus.HANDLED)
        (claim,) = await store.claim(1)
        await store.postpone(claim, 0, None)
        (claim,) = await store.claim(1)
        await store.release(claim)
        connection.set_trace_callback(None)
        plans = [
            row[3]
            for statement in statements
            if statement.startswith(("WITH", "SELECT", "UPDATE", "INSERT"))
            for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}")
        ]
    assert plans
    assert not [
        plan for plan in plans if plan.startswith("SCAN e") and "_claimed" not in plan and "_leased" not in plan
    ]
    assert not [plan for plan in plans if "events_status" in plan]


async def test_unclosed_inbox_warns_when_collected_and_frees_its_claims(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox.db")
    await add(inbox, "e1")
    assert await inbox.store.claim(1)
    await asyncio.sleep(0.05)  # the writer's thread holds it for a moment longer
    with pytest.warns(ResourceWarning, match=r"SqliteEventStore\(.*inbox\.db'\) was not closed: .*await aclose\(\)"):
        del inbox
    gc.collect()
    async with Inbox(tmp_path / "inbox.db") as other:
        assert await other.store.claim(1)


async def test_retry_of_many_events_keeps_the_order_of_each_signing(tmp_path: Path) -> None:
    """It changes them in pages."""
    async with Inbox(tmp_path / "inbox.db") as inbox:
        names = [f"e{number}" for number in range(1200)]
        for start in range(0, 1200, 100):
            page = names[start : start + 100]
            await asyncio.gather(*(add(inbox, name, f"s{int(name[1:]) % 3}" if start else None) for name in page))
        while claims := await inbox.store.claim(100):
            await asyncio.gather(*(inbox.store.settle(claim, EventStatus.DEAD) for claim in claims))
        assert await inbox.retry(EventFilter(status=EventStatus.DEAD)) == 1200
        order = [event.id async for event in inbox.events()]
        again: list[str] = []
        while claims := await inbox.store.claim(100):
            again += [claim.stored.id for claim in claims]
            await asyncio.gather(*(inbox.store.settle(claim, EventStatus.HANDLED) for claim in claims))
    for signing in range(3):
        of_signing = [name for name in order[100:] if int(name[1:]) % 3 == signing]
        assert [name for name in again if name in of_signing] == of_signing
    assert sorted(again) == sorted(names)


async def test_events_under_way_at_two_crashes_are_claimed_one_at_a_time(tmp_path: Path) -> None:
    """The crashes count for none of them."""
    path = tmp_path / "inbox.db"
    async with contextlib.AsyncExitStack() as opened:

        async def restart() -> SqliteEventStore:
            for lock in tmp_path.glob("*.lock"):
                lock.unlink()
            return (await opened.enter_async_context(Inbox(SqliteEventStore(path)))).store  # type: ignore[return-value]

        store = await restart()
        for name in ("a", "b"):
            event = parse_event(event_body(name), datetime.now(UTC))
            await store.add(event, event_body(name))
        for _ in range(2):
            assert len(await store.claim(8)) == 2
            store = await restart()
        for name in ("a", "b"):
            (claim,) = await store.claim(8)
            assert (claim.stored.id, claim.stored.attempts) == (name, 1)
            assert await store.claim(8) == []
            await store.wait(0.01)  # the other one is due, but must wait
            assert await store.settle(claim, EventStatus.HANDLED)
