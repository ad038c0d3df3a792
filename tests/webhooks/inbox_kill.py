"""Kill receivers and workers of an inbox: ``python -m tests.webhooks.inbox_kill 100000 --kills 25 --seed 1``. With
``--postgres``, the inbox is in PostgreSQL.

One process receives events into an inbox, and another handles them; both are killed with SIGKILL at random moments, and
started again. The sender repeats each delivery until it is acknowledged, and some beyond that. The handler appends the
event's id to a file as its last step. At the end every acknowledged event must be in that file, in order for each
signing, and each event that is there twice must be explained by a kill between the handler's end and its record.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from signing_async.webhooks import Event, EventStatus, Inbox, Receiver, StoredEvent, WebhookVerifier
from tests.webhooks import crash
from tests.webhooks.crash import SENDERS, Sender, Victim, open_ledger, read_ledger
from tests.webhooks.deliveries import SECRET

MODULE = "tests.webhooks.inbox_kill"
CONCURRENCY = 8
TIMEOUT = 60.0
LEASE = 3.0
"""In PostgreSQL: the events of a killed worker wait for its end."""


@dataclass
class Outcome(crash.Outcome):
    """The result of a run. In the ledger, each event has the number of the worker's process."""

    stored: list[StoredEvent] = field(default_factory=list)
    """In order of arrival."""

    def skipped(self) -> set[str]:
        """Return the events that the inbox calls handled although no handler ended."""
        settled = {stored.id for stored in self.stored if stored.status is not EventStatus.PENDING}
        return settled - {name for name, _ in self.handled}

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

    return PostgresInbox(dsn.read_text(), lease=LEASE, timeout=LEASE / 3)


async def work(directory: Path) -> None:
    """Run the worker that is killed."""
    note, inbox = open_ledger(directory), open_inbox(directory)

    @inbox.on("*")
    async def handle(event: Event) -> None:
        await asyncio.sleep(0.005)  # so that a kill interrupts handlers
        note(event.id, os.getpid())

    await inbox.run(concurrency=CONCURRENCY)


async def run(events: int, kills: int, seed: int, directory: Path) -> Outcome:
    """Deliver and handle the events while killing the receiver, the worker, or both."""
    outcome, chance = Outcome(events), random.Random(seed)
    receiver, worker = Victim(MODULE, "serve", directory), Victim(MODULE, "work", directory)
    ledger, noted = directory / "ledger", 0
    ledger.touch()
    sender = Sender(outcome, chance)
    receiver.start()
    worker.start()
    try:
        async with open_inbox(directory) as inbox:
            sending = asyncio.create_task(sender.deliver_all(receiver.port))
            for number in range(1, kills + 1):
                await sender.reach(number / (kills + 1))
                # A worker takes longer to start than a few hundred events to arrive.
                sender.may_send.clear()
                async with asyncio.timeout(TIMEOUT):
                    while ledger.stat().st_size == noted and (await inbox.stats()).oldest_pending is not None:
                        await asyncio.sleep(0.02)
                sender.may_send.set()
                # Counted, not timed: on a fast machine, all deliveries might end before a kill.
                enough = outcome.deliveries + chance.randrange(SENDERS)
                while outcome.deliveries < enough and not sending.done():
                    await asyncio.sleep(0.005)
                victims = [[receiver], [receiver, worker], [worker]][number % 3]
                for victim in victims:
                    await asyncio.to_thread(victim.kill)
                if worker in victims:
                    noted = ledger.stat().st_size
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
    outcome.handled = read_ledger(directory)
    return outcome


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["serve"]:
        receiver = Receiver(WebhookVerifier(SECRET), open_inbox(Path(sys.argv[2])))
        return crash.serve(receiver, int(sys.argv[3]))
    if sys.argv[1:2] == ["work"]:
        return asyncio.run(work(Path(sys.argv[2])))
    parser = crash.arguments(__doc__)
    parser.add_argument("--postgres", action="store_true", help="use an inbox in PostgreSQL")
    given = parser.parse_args()
    with contextlib.ExitStack() as used:
        directory = Path(used.enter_context(tempfile.TemporaryDirectory()))
        if given.postgres:
            from tests.postgres.server import PostgresServer

            # As on any server: without statistics, each claim reads the whole backlog.
            server = used.enter_context(PostgresServer(autovacuum="on", autovacuum_naptime="1s"))
            (directory / "dsn").write_text(asyncio.run(server.new_schema()))
        outcome = asyncio.run(run(given.events, given.kills, given.seed, directory))
    print(
        f"{outcome} ({len(outcome.unexplained())} without a kill that explains it), {len(outcome.skipped())} skipped,"
        f" {len(outcome.out_of_order())} signings out of order"
    )
    sys.exit(any([outcome.lost(), outcome.skipped(), outcome.unexplained(), outcome.out_of_order()]))


if __name__ == "__main__":
    main()
