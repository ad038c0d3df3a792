"""Starts the processes of `tests.postgres.workers`, and talks to them."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def worker(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process of `tests.postgres.workers`."""
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
