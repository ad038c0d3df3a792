"""The SQLite file of an inbox: shared by processes, killed processes and forks; foreign, newer, unclosed."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from signing_async import InboxError
from signing_async.webhooks import EventStatus, Inbox, Receiver, WebhookVerifier
from tests.webhooks.deliveries import SECRET, event_body, signed
from tests.webhooks.inboxes import add, settled

WORK = """
import asyncio, sys
from signing_async.webhooks import Inbox

async def main():
    inbox = Inbox(sys.argv[1])

    @inbox.on("*")
    async def handle(event):
        print(event.id, flush=True)
        await asyncio.Event().wait()

    await inbox.run(concurrency=1)

asyncio.run(main())
"""


@contextlib.contextmanager
def worker(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that handles the inbox and prints the id of each event."""
    command = [sys.executable, "-W", "error", "-c", WORK, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


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
        with worker(path) as process:
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
