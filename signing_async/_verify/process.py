"""The worker process: one file in, one report out, with limits on time and memory.

It reads a line of JSON and the bytes of the file from standard input, and writes a JSON object to standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._files import is_transient
from ..errors import ConfigurationError, SigningError

__all__ = ["main", "run_worker"]

MEMORY = 512 * 2**20  # a file of 90 MiB takes 470 MiB in all
MEMORY_PER_BYTE = 4
OUT_OF_MEMORY = 3
# Signals from outside, for example when the machine runs out of memory. The file causes all others.
_KILLED = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
_PROBLEM = "signing_async.sealed: could not verify"
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from signing_async._verify.process import main; main()"
)


def run_worker(content: bytes, roots: list[str] | None, settings: Mapping[str, bool], timeout: float) -> dict[str, Any]:
    """Return the fields of a `sealed.Report` from a worker process. A file that exceeds the limits is not sound.

    Raises a transient `SigningError` if the worker process is killed from outside or temporarily cannot be started,
    `ConfigurationError` if it can never be started, as in a frozen application.
    """
    # Another executable than Python is the application: it would start itself again.
    if getattr(sys, "frozen", False) or not re.match("python|pypy|graalpy", Path(sys.executable or "").name.lower()):
        problem = "this application is frozen or embeds Python, and a worker process needs a Python to start"
        raise ConfigurationError(f"{_PROBLEM}: {problem}; run signing-async verify-sealed")
    memory = MEMORY + MEMORY_PER_BYTE * len(content)
    head = json.dumps({**settings, "roots": roots, "seconds": int(timeout) + 1, "memory": memory}).encode() + b"\n"
    path = json.dumps([str(Path(each).absolute()) for each in sys.path])  # an empty entry is the current folder
    command = [sys.executable, "-P", "-W", "ignore", "-c", _START, path]
    try:
        done = subprocess.run(  # noqa: S603  # no shell, and no argument comes from the PDF
            command, input=head + content, capture_output=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return not_verified(f"verification took more than {timeout:g} seconds")
    except OSError as error:
        problem = f"{_PROBLEM}: worker process cannot be started: {error.strerror}"
        if is_transient(error):
            raise SigningError(problem, transient=True) from None
        raise ConfigurationError(f"{problem}: {sys.executable}") from None
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    if done.returncode == OUT_OF_MEMORY:
        return not_verified(f"verification took more than {memory >> 20} MiB of memory")
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        if name not in _KILLED:
            return not_verified(f"the verifying process was ended by {name}")
        raise SigningError(f"{_PROBLEM}: worker process was killed by {name}", transient=True)
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    raise RuntimeError(f"signing_async.sealed: worker process failed: {lines[-1] if lines else done.returncode}")


def not_verified(problem: str) -> dict[str, Any]:
    """Return the fields of a `sealed.Report` on a file that could not be judged."""
    return {"revisions": 0, "seals": [], "problems": [problem], "trust_problems": []}


def main() -> None:
    """Verify one file and write the report: the worker process runs this function."""
    settings = json.loads(sys.stdin.buffer.readline())
    _limit(settings["seconds"], settings["memory"])
    logging.disable()
    out, sys.stdout = sys.stdout, sys.stderr  # output of libraries must not mix with the report
    try:
        from .judge import judge

        roots = settings["roots"]
        roots = None if roots is None else [bytes.fromhex(root) for root in roots]
        data = sys.stdin.buffer.read()
        found = asyncio.run(judge(data, roots, fetch=settings["fetch"], form_filling=settings["form_filling"]))
        json.dump(found, out)
        out.flush()
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)


def _limit(seconds: int, memory: int) -> None:
    """Limit the CPU time and the memory of this process, where the system can."""
    with contextlib.suppress(ModuleNotFoundError):  # Windows
        import resource

        # Linux sends SIGXCPU at the soft limit. The hard limit is later: its SIGKILL looks like a kill from outside.
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # macOS also counts memory that is only reserved.
        most = memory if sys.platform == "linux" else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
