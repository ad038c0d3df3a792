"""Kill processes that archive into a bucket: ``python -m tests.archive.kill_s3 --signings 100 --kills 50 --seed 1``.

As `tests.archive.kill`, with an `S3Store` behind a proxy that fails a tenth of the requests to it: some are refused,
and of some the request or the response is lost. In the end the bucket is copied to a folder, which is judged.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import tempfile
from pathlib import Path

from aiohttp import web

from signing_async import RetryPolicy, SigningClient
from signing_async.archive import Archive, S3Store
from signing_async.errors import ArchiveError
from signing_async.sandbox import Sandbox
from tests.archive.kill import FAULTS, NAMES, Outcome
from tests.archive.s3_server import CREDENTIALS, S3Server, failing
from tests.archive.tenants import completed, count, judge
from tests.archive.victim import CONCURRENCY, JOURNAL, UNFINISHED
from tests.dispatch.kill import Worker

S3_FAULTS = {503: 0.04, "lose request": 0.03, "lose response": 0.03}


def work(base_url: str, token: str, folder: str, bucket: str, endpoint_url: str) -> None:
    """Exit with 0 after a sweep without errors, with `UNFINISHED` if a document or the bucket failed."""
    logging.getLogger("signing_async").setLevel(logging.CRITICAL)
    os.environ.update(CREDENTIALS)
    try:
        sys.exit(asyncio.run(_work(base_url, token, Path(folder), S3Store(bucket, endpoint_url=endpoint_url))))
    except ArchiveError as error:
        # The bucket failed more often than botocore repeats a request.
        sys.exit(UNFINISHED if error.transient else 1)


async def _work(base_url: str, token: str, folder: Path, store: S3Store) -> int:
    failed = 0
    async with (
        store,
        SigningClient(base_url, token, retry=RetryPolicy(base_delay=0.005, max_delay=0.1)) as client,
        Archive(client, store, journal=folder / JOURNAL, concurrency=CONCURRENCY) as archive,
    ):
        async for result in archive.sweep():
            failed += result.error is not None
    return UNFINISHED if failed else 0


async def run(signings: int, kills: int, seed: int, processes: int = 1) -> Outcome:
    """Archive completed signings of two documents into a bucket, with this number of processes and kills."""
    chance, outcome = random.Random(seed), Outcome()
    os.environ.update(CREDENTIALS)
    with tempfile.TemporaryDirectory() as name, S3Server() as s3:
        url, folder = f"s3://{s3.new_bucket()}/archive", Path(name)
        async with Sandbox(seed=seed, keep_requests=1_000_000) as sandbox, failing(s3.url) as proxy:
            async with SigningClient(sandbox.base_url, sandbox.access_token()) as client:
                for number in range(signings):
                    await completed(sandbox, client, f"Lease {number % 7}", NAMES[number % len(NAMES)])
            for index, (kind, share) in enumerate(FAULTS.items()):
                details = {"retry_after": 0} if kind == "429" else {}
                sandbox.faults.add("*", kind, times=None, probability=share, seed=f"{seed} {index}", **details)

            def fail(request: web.Request) -> str | int:
                drawn = chance.random()
                for todo, share in S3_FAULTS.items():
                    drawn -= share
                    if drawn < 0:
                        outcome.faults += 1
                        return todo
                return "forward"

            proxy.fail = fail
            arguments = (sandbox.base_url, sandbox.access_token(), name, url, proxy.url)
            crew = [Worker(*arguments, target=work) for _ in range(processes)]
            try:
                while sum(worker.is_running() for worker in crew):
                    if outcome.kills < kills:
                        await asyncio.sleep(chance.uniform(0.5, 3.0))
                        await asyncio.to_thread(chance.choice(crew).kill)
                        outcome.kills += 1
                    await asyncio.sleep(0.01)
            finally:
                for worker in crew:
                    worker.kill()
            async with S3Store(url, endpoint_url=s3.url) as store:
                await _copy(store, folder / "copy")
            outcome.verdict = await judge(sandbox, folder / "copy")
            outcome.runs = sum(worker.runs for worker in crew)
            outcome.failures = [code for worker in crew for code in worker.failures]
            outcome.faults += sum(fault.hits for fault in sandbox.faults.arranged)
            outcome.downloads = count(sandbox)["documents.download_signed"]
    return outcome


async def _copy(store: S3Store, folder: Path) -> None:
    async for name in store.names():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"".join([chunk async for chunk in store.read(name)]))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("signings", 40), ("kills", 10), ("seed", 1), ("processes", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    outcome = asyncio.run(run(given.signings, given.kills, given.seed, given.processes))
    verdict = outcome.verdict
    print(
        f"{given.signings} signings, {given.processes} processes, {outcome.kills} kills, {outcome.runs} runs,"
        f" {outcome.faults} faults, {outcome.downloads} download requests:"
        f" {verdict.documents} documents, {len(verdict.wrong)} wrong; failures {outcome.failures}"
    )
    for wrong in verdict.wrong:
        print(wrong)
    sys.exit(verdict.documents != 2 * given.signings or bool(verdict.wrong) or bool(outcome.failures))


if __name__ == "__main__":
    main()
