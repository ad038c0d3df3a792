"""Kill dispatching processes repeatedly: ``python -m tests.dispatch.kill --packages 300 --kills 200 --seed 1``.

The sandbox runs in the parent, with faults: 5xx after a commit, dropped and truncated responses, 429. The workers share
one journal. One at a time is killed with SIGKILL at a random moment, and started again. In the end each package must
have been sent once, with exactly its documents and recipients. With ``--postgres``, the journal is in PostgreSQL, and
a killed process's claims end with their leases.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from signing_async.sandbox import Sandbox
from tests.dispatch.parcels import Verdict, judge, make_parcel
from tests.dispatch.victim import UNFINISHED, work
from tests.postgres.server import PostgresServer

FAULTS = {
    "500-after-commit": 0.02,
    "drop-after-commit": 0.02,
    "502-html-after-commit": 0.01,
    "truncate": 0.01,
    "drop-before-commit": 0.01,
    "503": 0.01,
    "429": 0.03,
}


@dataclass
class Outcome:
    """The outcome of one trial."""

    verdict: Verdict
    kills: int = 0
    runs: int = 0
    faults: int = 0
    seconds: float = 0.0
    failures: list[int] = field(default_factory=list)
    """Unexpected exit codes: neither 0, nor `UNFINISHED`, nor a kill."""


class Worker:
    """A process that dispatches all packages, or does other work, restarted until a run has finished it."""

    def __init__(self, *arguments: object, target: Callable[..., None] = work) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([target.__module__])
        self._target = target
        self._arguments = arguments
        self._process: BaseProcess | None = None
        self.done = False
        self.runs = 0
        self.failures: list[int] = []

    def is_running(self) -> bool:
        """Return whether the process runs; restart it if it ended before its work was finished."""
        process = self._process
        if process is not None and process.is_alive():
            return True
        if process is not None:
            self.done = process.exitcode == 0
            if process.exitcode not in (0, UNFINISHED, -signal.SIGKILL):
                self.failures.append(process.exitcode or 0)
        if self.done or self.failures:
            return False
        self._process = self._context.Process(target=self._target, args=self._arguments)
        self._process.start()
        self.runs += 1
        return True

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


async def run(packages: int, kills: int, seed: int, workers: int = 1, dsn: str = "") -> Outcome:
    """Dispatch packages with this number of workers and kills."""
    chance = random.Random(seed)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        parcels = [make_parcel(number, Path(folder), seed) for number in range(packages)]
        async with Sandbox(seed=seed, keep_requests=1_000_000) as sandbox:
            for index, (kind, share) in enumerate(FAULTS.items()):
                details = {"retry_after": 0} if kind == "429" else {}
                sandbox.faults.add("*", kind, times=None, probability=share, seed=f"{seed} {index}", **details)
            arguments = (sandbox.base_url, sandbox.access_token(), folder, packages, seed, dsn)
            crew = [Worker(*arguments) for _ in range(workers)]
            outcome = Outcome(Verdict())
            try:
                await _run_and_kill(sandbox, crew, packages, kills, chance, outcome)
            finally:
                for worker in crew:
                    worker.kill()
            outcome.verdict = judge(sandbox, parcels)
            outcome.runs = sum(worker.runs for worker in crew)
            outcome.failures = [code for worker in crew for code in worker.failures]
            outcome.faults = sum(fault.hits for fault in sandbox.faults.arranged)
    outcome.seconds = time.monotonic() - started
    return outcome


async def run_with_postgres(packages: int, kills: int, seed: int, workers: int = 1) -> Outcome:
    """As `run`, with the journal in a PostgreSQL of its own."""
    with PostgresServer() as server:
        return await run(packages, kills, seed, workers, await server.new_schema())


async def _run_and_kill(
    sandbox: Sandbox, crew: list[Worker], packages: int, kills: int, chance: random.Random, outcome: Outcome
) -> None:
    while sum(worker.is_running() for worker in crew) and not any(worker.failures for worker in crew):
        sent = len(sandbox.requests_of("signings.send"))
        if outcome.kills < kills and sent >= packages * (outcome.kills + 1) / (kills + 1):
            await asyncio.sleep(chance.expovariate(1 / 0.02))
            victim = chance.choice(crew)
            await asyncio.to_thread(victim.kill)
            outcome.kills += 1
        await asyncio.sleep(0.005)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("packages", 100), ("kills", 20), ("seed", 1), ("workers", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--postgres", action="store_true", help="use a journal in PostgreSQL")
    given = parser.parse_args()
    trial = run_with_postgres if given.postgres else run
    outcome = asyncio.run(trial(given.packages, given.kills, given.seed, given.workers))
    verdict = outcome.verdict
    print(
        f"{given.packages} packages, {given.workers} workers, {outcome.kills} kills, {outcome.runs} runs,"
        f" {outcome.faults} faults, {outcome.seconds:.0f} s: {verdict.sent} sent, {verdict.spare} spare drafts,"
        f" {len(verdict.wrong)} wrong; failures {outcome.failures}"
    )
    for wrong in verdict.wrong:
        print(wrong)
    sys.exit(verdict.sent != given.packages or bool(verdict.wrong) or bool(outcome.failures))


if __name__ == "__main__":
    main()
