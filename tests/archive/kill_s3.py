"""Kill processes that archive into a bucket: ``python -m tests.archive.kill_s3 --signings 80 --kills 40 --seed 1``.

As `tests.archive.kill`, with an `S3Store` behind a proxy that fails a tenth of the requests to it: some are refused,
and of some the request or the response is lost.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from aiohttp import web

from signing_async import ArchiveError
from signing_async.archive import S3Store
from tests.archive import kill
from tests.archive.s3_server import CREDENTIALS, S3Server, failing
from tests.archive.victim import UNFINISHED

S3_FAULTS: dict[str | int, float] = {503: 0.04, "lose request": 0.03, "lose response": 0.03}


@asynccontextmanager
async def bucket_store(folder: Path, url: str, endpoint_url: str) -> AsyncIterator[S3Store]:
    """Open a store that is a bucket. A run ends if the bucket fails more often than botocore repeats a request."""
    os.environ.update(CREDENTIALS)
    try:
        async with S3Store(url, endpoint_url=endpoint_url) as store:
            yield store
    except ArchiveError as error:
        sys.exit(UNFINISHED if error.transient else 1)


async def run(signings: int, kills: int, seed: int, processes: int = 1) -> kill.Outcome:
    """Archive completed signings of two documents into a bucket, with this number of processes and kills."""
    chance, faults = random.Random(seed), 0
    kinds = ["forward", *S3_FAULTS]
    weights = [1 - sum(S3_FAULTS.values()), *S3_FAULTS.values()]

    def fail(request: web.Request) -> str | int:
        nonlocal faults
        todo = chance.choices(kinds, weights)[0]
        faults += todo != "forward"
        return todo

    with S3Server() as s3:
        async with failing(s3.url) as proxy:
            proxy.fail = fail
            store = partial(bucket_store, url=f"s3://{s3.new_bucket()}/archive", endpoint_url=proxy.url)
            outcome = await kill.run(signings, kills, seed, processes, store)
    outcome.faults += faults
    return outcome


def main() -> None:
    """Run from the command line."""
    given = kill.parser(__doc__).parse_args()
    kill.report(given, asyncio.run(run(given.signings, given.kills, given.seed, given.processes)))


if __name__ == "__main__":
    main()
