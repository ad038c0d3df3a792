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
from pathlib import Path

import pytest

from signing_async.errors import InboxError
from signing_async.webhooks import EventStatus, Inbox, Receiver, WebhookVerifier
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

    await inbox.run(concurrency=int(sys.argv[2]))

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


async def test_events_from_before_the_clock_was_set_back_are_handled_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    async with Inbox(tmp_path / "inbox.db") as inbox:
        with monkeypatch.context() as tomorrow:
            tomorrow.setattr(time, "time", lambda: now() + 86_400)
            await add(inbox, "e1")
        async with inbox.running():
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
        events = {event.id: event for event in settling.result()}
    assert codes == [-signal.SIGKILL] * (2 + 4)  # twice with the others, then each attempt alone
    poison = events.pop("poison")
    assert (poison.status, poison.error) == (EventStatus.DEAD, "the process ended during the attempt")
    assert {(event.status, event.attempts) for event in events.values()} == {(EventStatus.HANDLED, 1)}


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
    for path, change in ((newer, 1), (earlier, -1)):
        async with Inbox(path) as inbox:
            await inbox.stats()
        with contextlib.closing(sqlite3.connect(path)) as database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            database.execute(f"PRAGMA user_version = {version + change}")
    for path, words in (
        (foreign, "is the database of another program; it was not changed"),
        (newer, "was written by a newer version of signing-async; upgrade this one"),
        (earlier, "was written by an earlier version of signing-async; finish its work with that version, .*"),
    ):
        async with Inbox(path) as inbox:
            with pytest.raises(InboxError, match=f"^the inbox {path} {words}$"):
                await inbox.stats()


async def test_stored_event_is_synced_to_disk_and_the_end_of_an_attempt_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[int] = []

    class Watched(sqlite3.Connection):
        def execute(self, *arguments: object) -> sqlite3.Cursor:
            if arguments[0] == "COMMIT":
                settings.extend(super().execute("PRAGMA synchronous").fetchone())
            return super().execute(*arguments)  # type: ignore[arg-type]  # passed on as they are

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *given, **named: connect(*given, **named, factory=Watched))
    normal, full = 1, 2
    async with Inbox(tmp_path / "inbox.db") as inbox:
        await add(inbox, "e1")
        (claim,) = await inbox.store.claim(1)
        await inbox.store.settle(claim, EventStatus.HANDLED)
        await add(inbox, "e2")
    assert (settings[0], settings[-1], set(settings[1:-1])) == (full, full, {normal})


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
