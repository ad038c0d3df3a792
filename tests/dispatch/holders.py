"""Claims held by this process or by another one."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from signing_async import Claim, SqliteJournal

HOLD = """
import asyncio, os, sys
from signing_async import SqliteJournal

async def main():
    journal = SqliteJournal(sys.argv[1])
    claim = await journal.claim("lease")
    await journal.write(claim, "begun")
    if not os.fork():
        print("held", flush=True)
        sys.stdin.read()
        os._exit(0)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@contextlib.contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the package ``lease``, and a child that lives until the end of the block."""
    command = [sys.executable, "-W", "ignore", "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
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
