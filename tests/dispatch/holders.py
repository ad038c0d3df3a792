"""Claims held by this process or by another one."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from signing_async import Claim, SqliteJournal

HOLD = """
import asyncio, sys
from signing_async import SqliteJournal

async def main():
    journal = SqliteJournal(sys.argv[1])
    claim = await journal.claim("lease")
    await journal.write(claim, "begun")
    print("held", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@contextlib.contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the package ``lease``."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


async def taken(journal: SqliteJournal, key: str = "lease") -> Claim:
    """The claim on a package that is free."""
    claim = await journal.claim(key)
    assert claim is not None
    return claim
