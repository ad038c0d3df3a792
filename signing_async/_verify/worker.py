"""The worker process of `sealed`: limits of time and memory, one file in, one report out.

It is given a line of JSON and the file's bytes on standard input, and writes one object of JSON on standard output.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

OUT_OF_MEMORY = 3


def main() -> None:
    """Judge one file, and write the report."""
    settings = json.loads(sys.stdin.buffer.readline())
    _limit(settings["seconds"], settings["memory"])
    logging.disable()
    out, sys.stdout = sys.stdout, sys.stderr  # a library that prints must not spoil the report
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
    """Let the system end the process when it has used up its time or its memory, where the system can."""
    try:
        import resource
    except ModuleNotFoundError:
        return
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # macOS counts what is only reserved, and cannot do with less
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
