"""Separate processes for the tests, ``python -m tests.postgres.workers <task> <dsn>``, and how to talk to them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from signing_async.postgres import PostgresInbox, PostgresJournal
from signing_async.webhooks import Event

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def worker(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process of this module."""
    command = [sys.executable, "-m", "tests.postgres.workers", *arguments]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


async def next_line(process: subprocess.Popen[str], text: str) -> None:
    """Wait until the process prints a line with the text."""
    assert process.stdout is not None
    while text not in (line := await asyncio.to_thread(process.stdout.readline)):
        assert line, "the process has ended"


def write_line(process: subprocess.Popen[str], line: str = "") -> None:
    """Send a line to the process."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


# In the process


async def claim(dsn: str) -> None:
    """Claim a package; write every line of input to the journal."""
    async with PostgresJournal(dsn, lease=1.5, timeout=0.5) as journal:
        claimed = await journal.claim("package")
        assert claimed is not None
        print("claimed", claimed.fence, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                await journal.write(claimed, line.strip())
                print("written", flush=True)
            except Exception as error:
                print(type(error).__name__, flush=True)


async def handle(dsn: str) -> None:
    """Handle events one at a time; each handler ends with a line of input. Print the package's log too."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    async with PostgresInbox(dsn, lease=3, timeout=1) as inbox:

        @inbox.on("*")
        async def handle(event: Event) -> None:
            print("started", event.id, flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            print("ended", event.id, flush=True)

        await inbox.run(concurrency=1)


if __name__ == "__main__":
    asyncio.run({"claim": claim, "handle": handle}[sys.argv[1]](sys.argv[2]))
