"""The SQLite file of an inbox: shared with killed processes and forks, removed, of an earlier version, unclosed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sqlite3
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from signing_async import ConfigurationError, InboxError
from signing_async.webhooks import EventStatus, HandlerRetryPolicy, Inbox, Receiver, WebhookVerifier
from tests.webhooks.deliveries import SECRET, event_body, signed
from tests.webhooks.inboxes import add, settled, until


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


async def test_no_event_is_acknowledged_once_the_file_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "inbox.db"
    async with Inbox(path) as inbox:
        receiver = Receiver(WebhookVerifier(SECRET), inbox)
        for name, status in (("e1", 202), ("late 1", 503), ("late 2", 503)):
            body = event_body(name)
            assert (await receiver.receive(signed(body), body)).status == status
            path.unlink(missing_ok=True)
        with pytest.raises(InboxError, match=r"inbox\.db was removed while it was open: restore it, then restart"):
            await inbox.stats()


HANGING = """
import asyncio, sys
from signing_async.webhooks import Inbox

async def main():
    inbox = Inbox(sys.argv[1])

    @inbox.on("*")
    async def handle(event):
        print(event.id, flush=True)
        await asyncio.Event().wait()

    await inbox.run(concurrency=1)  # busy, it cannot claim another event

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("max_attempts", "handled", "end"),
    [
        (12, ["other", "hangs", "next"], (EventStatus.HANDLED, 2, None)),
        (1, ["other", "next"], (EventStatus.DEAD, 2, "the process ended during the attempt")),
    ],
)
async def test_event_of_a_killed_worker_is_handled_again_at_once_by_a_living_one_or_is_dead(
    max_attempts: int, handled: list[str], end: tuple[EventStatus, int, str | None], tmp_path: Path
) -> None:
    path, found = tmp_path / "inbox.db", list[str]()
    async with Inbox(path, retry=HandlerRetryPolicy(max_attempts=max_attempts)) as inbox:
        inbox.on("*")(lambda event: found.append(event.id))
        for name in ("hangs", "next"):
            await add(inbox, name, "a")
        with subprocess.Popen([sys.executable, "-c", HANGING, str(path)], stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            assert await asyncio.to_thread(worker.stdout.readline) == "hangs\n"
            async with inbox.running():
                await add(inbox, "other", "b")
                await until(lambda: found)
                assert found == ["other"]
                worker.kill()
                first, *_ = await settled(inbox)
    assert found == handled
    assert (first.status, first.attempts, first.error) == end


FORK = """
import asyncio, os, sys
from signing_async.webhooks import Inbox, Receiver, WebhookVerifier, sign

inbox = Inbox(sys.argv[1])
receiver = Receiver(WebhookVerifier("secret"), inbox)

def deliver(name):
    body = f'{{"id": "{name}"}}'.encode()
    print(receiver.receive_blocking(sign("secret", body), body).message, flush=True)

def deliver_in_child(name):
    child = os.fork()
    if not child:
        deliver(name)
        os._exit(0)
    os.waitpid(child, 0)

deliver_in_child("evt_1")
deliver("evt_1")
deliver_in_child("evt_2")
asyncio.run(inbox.aclose())
"""


def test_inbox_made_before_a_fork_works_in_the_child_and_one_that_was_used_says_so(tmp_path: Path) -> None:
    """As in gunicorn with --preload."""
    command = [sys.executable, "-c", FORK, str(tmp_path / "inbox.db")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["accepted", "duplicate", "cannot store events now"]
    assert "was opened before a fork; open it again in the child process" in done.stderr


async def test_database_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "inbox.db"
    async with Inbox(path) as inbox:
        await inbox.stats()
    with contextlib.closing(sqlite3.connect(path)) as database:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        database.execute(f"PRAGMA user_version = {version - 1}")
    words = "was written by an earlier version of signing-async; finish its work with that version, "
    async with Inbox(path) as inbox:
        with pytest.raises(InboxError, match=f"^the inbox {path} {words}"):
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
    store = weakref.ref(inbox.store)
    words = r"SqliteEventStore\(.*inbox\.db'\) was not closed: .*await aclose\(\)"
    with pytest.warns(ResourceWarning, match=words):  # noqa: PT031  # the test holds the last reference
        del inbox
        await until(lambda: store() is None)  # the writer's thread holds it for a moment longer
    async with Inbox(tmp_path / "inbox.db") as other:
        assert await other.store.claim(1)


def test_inbox_that_could_not_be_opened_is_collected_silently() -> None:
    with pytest.raises(ConfigurationError, match="inbox: must be a path, got ''"):
        Inbox("")
    gc.collect()
