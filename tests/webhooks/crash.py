"""Kill a receiver repeatedly under load: ``python -m tests.webhooks.crash 100000 --kills 25 --seed 1``.

The sender repeats each delivery until it is acknowledged, and some beyond that. The handler appends the event id and
the time to a file. At the end no event may be missing, and none may have been handled after its acknowledgement.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from signing_async.webhooks import Event, Receiver, SQLiteSeenEvents, WebhookVerifier, aiohttp_handler
from tests.guides import ROOT
from tests.webhooks.deliveries import SECRET, event_body, signed

LEASE = 1.5
SENDERS = 32
OF_ONE_SIGNING = 20


@dataclass
class Outcome:
    """The result of a run."""

    events: int
    kills: int = 0
    deliveries: int = 0
    repeats: int = 0
    acknowledged: dict[str, int] = field(default_factory=dict)
    """The events, and when each was acknowledged first."""
    handled: list[tuple[str, int]] = field(default_factory=list)
    """The ledger: the events in the order in which handlers ended, and what the handler noted."""

    def __str__(self) -> str:
        return (
            f"{self.events} events in {self.deliveries} deliveries ({self.repeats} repeated on purpose),"
            f" {self.kills} kills: {len(self.lost())} lost, {self.twice()} handled twice"
        )

    def lost(self) -> set[str]:
        """Return the events that were acknowledged and never handled."""
        return set(self.acknowledged) - {name for name, _ in self.handled}

    def twice(self) -> int:
        """Count the handlings beyond the first of each event."""
        return len(self.handled) - len({name for name, _ in self.handled})

    def late(self) -> list[str]:
        """Return the events that were handled after their acknowledgement, if the handler noted the time."""
        return [name for name, when in self.handled if when > self.acknowledged[name]]


def open_ledger(directory: Path) -> Callable[[str, int], object]:
    """Return a function that appends an event and a number to the ledger, as the last step of a handler."""
    ledger = os.open(directory / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return lambda name, number: os.write(ledger, f"{name} {number}\n".encode())


def read_ledger(directory: Path) -> list[tuple[str, int]]:
    """Return the lines of the ledger."""
    lines = (line.split() for line in (directory / "ledger").read_text().splitlines())
    return [(name, int(number)) for name, number in lines]


def serve(receiver: Receiver, port: int) -> None:
    """Run a receiver that is killed."""
    app = web.Application()
    app.router.add_post("/", aiohttp_handler(receiver))
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, reuse_address=True)


class Victim:
    """A process of a module, which can be killed and restarted. ``serve`` listens on the port once it has started."""

    def __init__(self, module: str, role: str, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self._listens = role == "serve"
        self._command = [sys.executable, "-m", module, role, str(directory), str(self.port)]

    def start(self) -> None:
        """Start the process and wait until it listens."""
        self._process = subprocess.Popen(self._command, cwd=ROOT)
        deadline = time.monotonic() + 60
        while self._listens:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
            except OSError:
                assert time.monotonic() < deadline, "the receiver did not start within 60 s"
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        """Send SIGKILL, which leaves no chance to clean up."""
        self._process.kill()
        self._process.wait()


class Sender:
    """Delivers events, each until it is acknowledged, and some of them again."""

    def __init__(self, outcome: Outcome, chance: random.Random) -> None:
        self.may_send = asyncio.Event()
        self.may_send.set()
        self._outcome = outcome
        self._chance = chance
        self._waiting = iter(range(outcome.events))

    async def deliver_all(self, port: int) -> None:
        """Deliver all events, some at a time."""
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            await asyncio.gather(*(self._deliver_next(session) for _ in range(SENDERS)))

    async def reach(self, share: float) -> None:
        """Wait until this share of the events is acknowledged."""
        while len(self._outcome.acknowledged) < self._outcome.events * share:
            await asyncio.sleep(0.005)

    async def _deliver_next(self, session: aiohttp.ClientSession) -> None:
        for number in self._waiting:
            await self.may_send.wait()
            name = f"evt_{number}"
            body = event_body(name, signing={"id": f"sig_{number // OF_ONE_SIGNING}"})
            await self._until_acknowledged(session, body)
            self._outcome.acknowledged[name] = time.monotonic_ns()
            if self._chance.random() < 0.1:
                self._outcome.repeats += 1
                await self._until_acknowledged(session, body)

    async def _until_acknowledged(self, session: aiohttp.ClientSession, body: bytes) -> None:
        while True:
            self._outcome.deliveries += 1
            try:
                async with session.post("/", data=body, headers=signed(body)) as response:
                    if response.status == 202:
                        return
                    assert response.status == 503, response.status
            except (aiohttp.ClientError, OSError):
                pass
            await asyncio.sleep(0.1)


async def run(events: int, kills: int, seed: int, directory: Path) -> Outcome:
    """Deliver the events while killing the receiver ``kills`` times."""
    outcome, victim = Outcome(events), Victim("tests.webhooks.crash", "serve", directory)
    sender = Sender(outcome, random.Random(seed))
    victim.start()
    try:
        sending = asyncio.create_task(sender.deliver_all(victim.port))
        for number in range(1, kills + 1):
            await sender.reach(number / (kills + 1))
            await asyncio.to_thread(victim.kill)
            outcome.kills += 1
            await asyncio.to_thread(victim.start)
        await sending
    finally:
        victim.kill()
    outcome.handled = read_ledger(directory)
    return outcome


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return the arguments of a run."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("events", type=int, default=100_000, nargs="?")
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    return parser


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["serve"]:
        note = open_ledger(Path(sys.argv[2]))

        async def handle(event: Event) -> None:
            note(event.id, time.monotonic_ns())

        seen = SQLiteSeenEvents(Path(sys.argv[2]) / "seen.db", lease=LEASE)
        receiver = Receiver(WebhookVerifier(SECRET), handle, seen=seen, hand_off_timeout=LEASE / 2)
        return serve(receiver, int(sys.argv[3]))
    given = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        outcome = asyncio.run(run(given.events, given.kills, given.seed, Path(directory)))
    print(f"{outcome}, {len(outcome.late())} after their acknowledgement")
    sys.exit(bool(outcome.lost() or outcome.late()))


if __name__ == "__main__":
    main()
