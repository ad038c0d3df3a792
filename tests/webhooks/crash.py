"""Kill a receiver repeatedly under load: ``python -m tests.webhooks.crash 100000 [kills] [seed]``.

The sender repeats each delivery until it is acknowledged, and some beyond that. The handler appends the event id and
the time to a file. At the end no event may be missing, and none may have been handled after its acknowledgement.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import aiohttp
from aiohttp import web

from signing_async.webhooks import Event, Receiver, SQLiteSeenEvents, WebhookVerifier, aiohttp_handler
from tests.webhooks.deliveries import SECRET, event_body, signed

LEASE = 1.5
SENDERS = 32


class Deliveries(Protocol):
    """Counts deliveries."""

    deliveries: int


@dataclass
class Outcome:
    """The result of a run."""

    events: int
    kills: int = 0
    deliveries: int = 0
    repeats: int = 0
    seconds: float = 0.0
    acknowledged: dict[str, int] = field(default_factory=dict)
    handled: dict[str, list[int]] = field(default_factory=dict)

    def lost(self) -> list[str]:
        """Return the events that were acknowledged but never handled."""
        return [name for name in self.acknowledged if name not in self.handled]

    def repeated(self) -> list[str]:
        """Return the events that were handled again after their acknowledgement."""
        return [name for name, times in self.handled.items() if any(when > self.acknowledged[name] for when in times)]

    def twice(self) -> int:
        """Count the events handled more than once before their acknowledgement, which a crash makes unavoidable."""
        return sum(len(times) > 1 for times in self.handled.values())


def serve(directory: Path, port: int) -> None:
    """Run the receiver that is killed."""
    ledger = os.open(directory / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def handler(event: Event) -> None:
        os.write(ledger, f"{event.id} {time.monotonic_ns()}\n".encode())

    seen = SQLiteSeenEvents(directory / "seen.db", lease=LEASE)
    receiver = Receiver(WebhookVerifier(SECRET), handler, seen=seen, hand_off_timeout=LEASE / 2)
    app = web.Application()
    app.router.add_post("/", aiohttp_handler(receiver))
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, reuse_address=True)


class Victim:
    """The receiver's process, which can be killed and restarted."""

    def __init__(self, directory: Path, module: str = "tests.webhooks.crash") -> None:
        self._directory = directory
        self._module = module
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]

    def start(self) -> None:
        """Start the process and wait until it listens."""
        command = [sys.executable, "-m", self._module, "serve", str(self._directory), str(self.port)]
        self._process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
            except OSError:
                time.sleep(0.02)
            else:
                return
        raise TimeoutError("the receiver did not start within 60 s")

    def kill(self) -> None:
        """Send SIGKILL, which leaves no chance to clean up."""
        self._process.kill()
        self._process.wait()


async def run(events: int, kills: int, seed: int, directory: Path) -> Outcome:
    """Deliver the events while killing the receiver ``kills`` times."""
    outcome = Outcome(events)
    chance = random.Random(seed)
    victim = Victim(directory)
    victim.start()
    started = time.monotonic()
    waiting = iter(range(events))
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{victim.port}") as session:
            sending = asyncio.gather(*(_send(session, waiting, outcome, chance) for _ in range(SENDERS)))
            for number in range(1, kills + 1):
                while len(outcome.acknowledged) < events * number / (kills + 1):
                    await asyncio.sleep(0.001)
                await asyncio.to_thread(victim.kill)
                outcome.kills += 1
                await asyncio.to_thread(victim.start)
            await sending
    finally:
        victim.kill()
    outcome.seconds = time.monotonic() - started
    for line in (directory / "ledger").read_text().splitlines():
        name, when = line.split()
        outcome.handled.setdefault(name, []).append(int(when))
    return outcome


async def _send(session: aiohttp.ClientSession, waiting: object, outcome: Outcome, chance: random.Random) -> None:
    for number in waiting:  # type: ignore[attr-defined]  # an iterator shared by the senders
        name = f"evt_{number}"
        body = event_body(name)
        headers = signed(body)
        await until_acknowledged(session, body, headers, outcome)
        outcome.acknowledged[name] = time.monotonic_ns()
        if chance.random() < 0.1:
            outcome.repeats += 1
            await until_acknowledged(session, body, headers, outcome)


async def until_acknowledged(
    session: aiohttp.ClientSession, body: bytes, headers: dict[str, str], outcome: Deliveries
) -> None:
    """Deliver an event again and again until the response is 202."""
    while True:
        outcome.deliveries += 1
        try:
            async with session.post("/", data=body, headers=headers) as response:
                if response.status == 202:
                    return
                assert response.status == 503, response.status
        except (aiohttp.ClientError, OSError):
            pass
        await asyncio.sleep(0.1)


def main() -> None:
    """Run the command line."""
    if sys.argv[1] == "serve":
        serve(Path(sys.argv[2]), int(sys.argv[3]))
        return
    events, kills, seed = (int(value) for value in [*sys.argv[1:], *("20", "1")[len(sys.argv) - 2 :]])
    with tempfile.TemporaryDirectory() as directory:
        outcome = asyncio.run(run(events, kills, seed, Path(directory)))
    print(
        f"{outcome.events} events in {outcome.deliveries} deliveries ({outcome.repeats} repeated on purpose),"
        f" {outcome.kills} kills, {outcome.seconds:.0f} s: {len(outcome.lost())} lost,"
        f" {len(outcome.repeated())} handled after their acknowledgement, {outcome.twice()} twice before it"
    )
    sys.exit(1 if outcome.lost() or outcome.repeated() else 0)


if __name__ == "__main__":
    main()
