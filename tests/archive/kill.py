"""Kill archiving processes repeatedly: ``python -m tests.archive.kill --signings 300 --kills 200 --seed 1``.

The sandbox runs in the parent, with faults on a tenth of the requests. The processes share one folder and one journal.
One at a time is killed with SIGKILL at a random moment, and started again. In the end each sealed document must have
one file and one line in the manifest, and nothing else may be left. With ``--postgres``, the journal is in PostgreSQL,
and a killed process's claims end with their leases. With ``--bucket``, the archive is in a bucket behind a proxy that
fails a tenth of the requests to it: some are refused, and of some the request or the response is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from signing_async import SigningClient
from signing_async.archive import FolderStore
from signing_async.sandbox import Sandbox
from tests.archive.s3_server import S3Server, failing
from tests.archive.tenants import Verdict, completed, count, judge
from tests.archive.victim import Place, work
from tests.dispatch.kill import Worker
from tests.postgres.server import PostgresServer

FAULTS = {"500": 0.02, "503": 0.02, "429": 0.02, "truncate": 0.02, "drop-before-commit": 0.01, "502-html": 0.01}
S3_FAULTS: dict[str | int, float] = {503: 0.04, "lose request": 0.03, "lose response": 0.03}
DOWNLOAD = "documents.download_signed"
NAMES = [("lease.pdf", "annex.pdf"), ("same.pdf", "Same.PDF"), ("../../evil.pdf", "con"), ("a.pdf", "é/b\\c.pdf")]


@dataclass
class Outcome:
    """The outcome of one trial."""

    verdict: Verdict = field(default_factory=Verdict)
    kills: int = 0
    runs: int = 0
    faults: int = 0
    downloads: int = 0
    seconds: float = 0.0
    failures: list[int] = field(default_factory=list)
    """Unexpected exit codes."""


async def run(signings: int, kills: int, seed: int, processes: int = 1, **place: str) -> Outcome:
    """Archive completed signings of two documents with this number of processes and kills, at a `Place`."""
    chance, outcome = random.Random(seed), Outcome()
    with tempfile.TemporaryDirectory() as name:
        archive = Place(Path(name), **place)
        async with Sandbox(seed=seed, keep_requests=1_000_000) as sandbox:
            async with SigningClient(sandbox.base_url, sandbox.access_token()) as client:
                for number in range(signings):
                    await completed(sandbox, client, f"Lease {number % 7}", NAMES[number % len(NAMES)])
            for index, (kind, share) in enumerate(FAULTS.items()):
                details = {"retry_after": 0} if kind == "429" else {}
                sandbox.faults.add("*", kind, times=None, probability=share, seed=f"{seed} {index}", **details)
            started = time.monotonic()
            crew = [Worker(sandbox.base_url, sandbox.access_token(), archive, target=work) for _ in range(processes)]
            try:
                await _run_and_kill(sandbox, crew, 2 * signings, kills, chance, outcome)
            finally:
                for worker in crew:
                    worker.kill()
            outcome.seconds = time.monotonic() - started
            store = archive.store()
            if isinstance(store, FolderStore):
                outcome.verdict = await judge(sandbox, store.path)
            else:
                async with store:
                    outcome.verdict = await judge(sandbox, store)
            outcome.runs = sum(worker.runs for worker in crew)
            outcome.failures = [code for worker in crew for code in worker.failures]
            outcome.faults = sum(fault.hits for fault in sandbox.faults.arranged)
            outcome.downloads = count(sandbox)[DOWNLOAD]
    return outcome


async def _run_and_kill(
    sandbox: Sandbox, crew: list[Worker], documents: int, kills: int, chance: random.Random, outcome: Outcome
) -> None:
    while sum(worker.is_running() for worker in crew) and not any(worker.failures for worker in crew):
        if outcome.kills < kills and len(sandbox.requests_of(DOWNLOAD)) >= documents * outcome.kills / (kills + 1):
            await asyncio.sleep(chance.expovariate(1 / 0.02))
            victim = chance.choice(crew)
            await asyncio.to_thread(victim.kill)
            outcome.kills += 1
        await asyncio.sleep(0.005)


async def run_with_postgres(
    server: PostgresServer, signings: int, kills: int, seed: int, processes: int = 1
) -> Outcome:
    """As `run`, with the journal in a new schema of this server."""
    return await run(signings, kills, seed, processes, dsn=await server.new_schema())


async def run_with_bucket(s3: S3Server, signings: int, kills: int, seed: int, processes: int = 1) -> Outcome:
    """As `run`, with the archive in a bucket of this server."""
    chance, faults = random.Random(seed), 0
    kinds = ["forward", *S3_FAULTS]
    weights = [1 - sum(S3_FAULTS.values()), *S3_FAULTS.values()]

    def fail(request: web.Request) -> str | int:
        nonlocal faults
        todo = chance.choices(kinds, weights)[0]
        faults += todo != "forward"
        return todo

    async with failing(s3.url) as proxy:
        proxy.fail = fail
        outcome = await run(signings, kills, seed, processes, bucket=s3.new_bucket(), endpoint_url=proxy.url)
    outcome.faults += faults
    return outcome


def main() -> None:
    """Run from the command line; exit with 0 if the archive is whole."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("signings", 100), ("kills", 20), ("seed", 1), ("processes", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--postgres", action="store_true", help="use a journal in PostgreSQL")
    parser.add_argument("--bucket", action="store_true", help="use an archive in a bucket")
    given = parser.parse_args()
    trial = (given.signings, given.kills, given.seed, given.processes)
    if given.postgres:
        with PostgresServer() as server:
            outcome = asyncio.run(run_with_postgres(server, *trial))
    elif given.bucket:
        with S3Server() as s3:
            outcome = asyncio.run(run_with_bucket(s3, *trial))
    else:
        outcome = asyncio.run(run(*trial))
    verdict = outcome.verdict
    print(
        f"{given.signings} signings, {given.processes} processes, {outcome.kills} kills, {outcome.runs} runs,"
        f" {outcome.faults} faults, {outcome.downloads} download requests, {outcome.seconds:.0f} s:"
        f" {verdict.documents} documents, {len(verdict.wrong)} wrong; failures {outcome.failures}"
    )
    for wrong in verdict.wrong:
        print(wrong)
    sys.exit(verdict.documents != 2 * given.signings or bool(verdict.wrong) or bool(outcome.failures))


if __name__ == "__main__":
    main()
