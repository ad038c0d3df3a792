"""Kill receivers and workers of an inbox: ``python -m tests.webhooks.inbox_kill 100000 --kills 25 --seed 1``. With
``--postgres``, the inbox is in PostgreSQL.

One process receives events into an inbox, and another handles them; both are killed with SIGKILL at random moments, and
started again. The sender repeats each delivery until it is acknowledged, and some beyond that. The handler appends the
event's id to a file as its last step. At the end every acknowledged event must be in that file, in order for each
signing, and each event that is there twice must be explained by a kill between the handler's end and its record.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from signing_async.webhooks import Event, EventStatus, Inbox, Receiver, StoredEvent, WebhookVerifier, aiohttp_handler
from tests.webhooks.crash import Victim, until_acknowledged
from tests.webhooks.deliveries import SECRET, event_body, signed

MODULE = "tests.webhooks.inbox_kill"
SENDERS = 32
CONCURRENCY = 8
OF_ONE_SIGNING = 20
TIMEOUT = 60.0
LEASE = 6.0
"""In PostgreSQL."""


@dataclass
class Outcome:
    """The result of a run."""

    events: int
    kills: int = 0
    deliveries: int = 0
    repeats: int = 0
    seconds: float = 0.0
    acknowledged: set[str] = field(default_factory=set)
    stored: list[StoredEvent] = field(default_factory=list)
    """In order of arrival."""
    handled: list[tuple[str, int]] = field(default_factory=list)
    """The event and the number of the worker's process, in the order in which handlers ended."""

    def lost(self) -> set[str]:
        """Return the events that were acknowledged and never handled."""
        return self.acknowledged - {name for name, _ in self.handled}

    def skipped(self) -> set[str]:
        """Return the events that the inbox calls handled although no handler ended."""
        settled = {stored.id for stored in self.stored if stored.status is not EventStatus.PENDING}
        return settled - {name for name, _ in self.handled}

    def twice(self) -> int:
        """Count the handlings beyond the first of each event."""
        return len(self.handled) - len({name for name, _ in self.handled})

    def unexplained(self) -> list[str]:
        """Return the repeated events of which no kill explains an earlier handling.

        A kill explains it if the handler was one of the last to end in a process that was killed: at most as many as
        run at once can be between the handler's end and its record.
        """
        last: dict[int, list[str]] = {}
        for name, process in self.handled:
            last[process] = [*last.get(process, [])[1 - CONCURRENCY :], name]
        final = dict(self.handled)
        return [
            name
            for (name, process), count in Counter(self.handled).items()
            if count > 1 or (final[name] != process and name not in last[process])
        ]

    def out_of_order(self) -> list[str]:
        """Return the signings whose events were not handled in order of arrival."""
        position = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in self.handled))}
        positions: dict[str | None, list[int]] = {}
        for stored in self.stored:
            positions.setdefault(stored.signing_id, []).append(position.get(stored.id, -1))
        return [str(signing) for signing, found in positions.items() if found != sorted(found)]


def open_inbox(directory: Path) -> Inbox:
    """Return the inbox of the run: in PostgreSQL if the directory has a file with a DSN."""
    dsn = directory / "dsn"
    if not dsn.exists():
        return Inbox(directory / "inbox.db")
    from signing_async.postgres import PostgresInbox

    return PostgresInbox(dsn.read_text(), lease=LEASE)


def serve(directory: Path, port: int) -> None:
    """Run the receiver that is killed."""
    app = web.Application()
    app.router.add_post("/", aiohttp_handler(Receiver(WebhookVerifier(SECRET), open_inbox(directory))))
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, reuse_address=True)


async def work(directory: Path, number: int) -> None:
    """Run the worker that is killed."""
    ledger = os.open(directory / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    inbox = open_inbox(directory)

    @inbox.on("*")
    async def handle(event: Event) -> None:
        await asyncio.sleep(0.005)  # so that a kill interrupts handlers
        os.write(ledger, f"{event.id} {number}\n".encode())

    await inbox.run(concurrency=CONCURRENCY)


class Worker:
    """The worker's process, which can be killed and restarted."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = 0
        self._handled_before = 0

    def start(self) -> None:
        """Start the process."""
        self._number += 1
        self._handled_before = self._ledger_size()
        command = [sys.executable, "-m", MODULE, "work", str(self._directory), str(self._number)]
        self._process = subprocess.Popen(command, cwd=Path(__file__).parents[2])

    def has_handled(self) -> bool:
        """Return whether the process has handled an event."""
        return self._ledger_size() > self._handled_before

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()
        self._process.wait()

    def _ledger_size(self) -> int:
        ledger = self._directory / "ledger"
        return ledger.stat().st_size if ledger.exists() else 0


async def run(events: int, kills: int, seed: int, directory: Path) -> Outcome:
    """Deliver and handle the events while killing the receiver, the worker, or both."""
    outcome = Outcome(events)
    chance = random.Random(seed)
    receiver, worker = Victim(directory, MODULE), Worker(directory)
    crew: list[Victim | Worker] = [receiver, worker]
    receiver.start()
    worker.start()
    started = time.monotonic()
    waiting = iter(range(events))
    may_send = asyncio.Event()
    may_send.set()
    try:
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{receiver.port}") as session,
            open_inbox(directory) as inbox,
        ):
            sending = asyncio.gather(*(_send(session, waiting, outcome, chance, may_send) for _ in range(SENDERS)))
            for number in range(1, kills + 1):
                while len(outcome.acknowledged) < events * number / (kills + 1):
                    await asyncio.sleep(0.001)
                # A worker takes longer to start than a few hundred events to arrive.
                may_send.clear()
                async with asyncio.timeout(TIMEOUT):
                    while not worker.has_handled() and (await inbox.stats()).oldest_pending is not None:
                        await asyncio.sleep(0.001)
                may_send.set()
                # Counted, not timed: on a fast machine, all deliveries might end before a kill.
                enough = outcome.deliveries + chance.randrange(SENDERS)
                while outcome.deliveries < enough and not sending.done():
                    await asyncio.sleep(0.001)
                victims = [crew[:1], crew[1:], crew][number % 3]
                for victim in victims:
                    await asyncio.to_thread(victim.kill)
                for victim in victims:
                    await asyncio.to_thread(victim.start)
                outcome.kills += 1
            await sending
            async with asyncio.timeout(TIMEOUT + events / 500):
                while (await inbox.stats()).oldest_pending is not None:
                    await asyncio.sleep(0.1)
            outcome.stored = [stored async for stored in inbox.events()]
    finally:
        receiver.kill()
        worker.kill()
    outcome.seconds = time.monotonic() - started
    lines = (directory / "ledger").read_text().split("\n")[:-1]
    outcome.handled = [(name, int(number)) for name, number in (line.split() for line in lines)]
    return outcome


async def _send(
    session: aiohttp.ClientSession,
    waiting: Iterator[int],
    outcome: Outcome,
    chance: random.Random,
    may_send: asyncio.Event,
) -> None:
    for number in waiting:
        await may_send.wait()
        name = f"evt_{number}"
        body = event_body(name, signing={"id": f"sig_{number // OF_ONE_SIGNING}"})
        headers = signed(body)
        await until_acknowledged(session, body, headers, outcome)
        outcome.acknowledged.add(name)
        if chance.random() < 0.1:
            outcome.repeats += 1
            await until_acknowledged(session, body, headers, outcome)


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["serve"]:
        return serve(Path(sys.argv[2]), int(sys.argv[3]))
    if sys.argv[1:2] == ["work"]:
        return asyncio.run(work(Path(sys.argv[2]), int(sys.argv[3])))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("events", type=int, default=100_000, nargs="?")
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--postgres", action="store_true", help="use an inbox in PostgreSQL")
    given = parser.parse_args()
    with contextlib.ExitStack() as used:
        directory = used.enter_context(tempfile.TemporaryDirectory())
        if given.postgres:
            from tests.postgres.server import PostgresServer

            # As on any server: without statistics, each claim reads the whole backlog.
            server = used.enter_context(PostgresServer(autovacuum="on", autovacuum_naptime="1s"))
            (Path(directory) / "dsn").write_text(asyncio.run(server.new_schema()))
        outcome = asyncio.run(run(given.events, given.kills, given.seed, Path(directory)))
    failures = [outcome.lost(), outcome.skipped(), outcome.unexplained(), outcome.out_of_order()]
    print(
        f"{outcome.events} events in {outcome.deliveries} deliveries ({outcome.repeats} repeated on purpose),"
        f" {outcome.kills} kills, {outcome.seconds:.0f} s: {len(outcome.lost())} lost,"
        f" {len(outcome.skipped())} skipped, {outcome.twice()} handled twice"
        f" ({len(outcome.unexplained())} without a kill that explains it),"
        f" {len(outcome.out_of_order())} signings out of order"
    )
    sys.exit(any(failures))


if __name__ == "__main__":
    main()
