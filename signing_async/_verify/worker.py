"""The worker process of `sealed`: one file in, one report out, with limits on time and memory.

It reads a line of JSON and the bytes of the file from standard input, and writes a JSON object to standard output.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

OUT_OF_MEMORY = 3


def main() -> None:
    """Verify one file and write the report."""
    settings = json.loads(sys.stdin.buffer.readline())
    _limit(settings["seconds"], settings["memory"])
    logging.disable()
    out, sys.stdout = sys.stdout, sys.stderr  # output of libraries must not mix with the report
    try:
        json.dump(_judge(sys.stdin.buffer.read(), settings), out)
        out.flush()
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)


def _judge(data: bytes, settings: dict[str, Any]) -> dict[str, Any]:
    from .judge import judge
    from .signature import Options

    roots = settings["roots"]
    roots = None if roots is None else [bytes.fromhex(root) for root in roots]
    return asyncio.run(judge(data, Options(roots, settings["fetch"], settings["form_filling"])))


def _limit(seconds: int, memory: int) -> None:
    """Limit the CPU time and the memory of this process, where the system can."""
    try:
        import resource
    except ModuleNotFoundError:
        return
    # Linux sends SIGXCPU at the soft limit. The hard limit is later: its SIGKILL looks like a kill from outside.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # macOS also counts memory that is only reserved
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
