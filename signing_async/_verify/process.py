"""Run the worker process with limits on time and memory."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._files import is_transient
from ..errors import ConfigurationError, SigningError

__all__ = ["run_worker"]

MEMORY = 512 * 2**20  # a file of 90 MiB takes 470 MiB in all
MEMORY_PER_BYTE = 4
OUT_OF_MEMORY = 3
# Signals from outside, for example when the machine runs out of memory. The file causes all others.
_KILLED = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from signing_async._verify.worker import main; main()"
)


def run_worker(content: bytes, roots: list[str] | None, settings: Mapping[str, bool], timeout: float) -> dict[str, Any]:
    """Return the fields of a `sealed.Report` from a worker process. A file that exceeds the limits is not sound.

    Raises a transient `SigningError` if the worker process is killed from outside or temporarily cannot be started,
    `ConfigurationError` if it can never be started, as in a frozen application.
    """
    memory = MEMORY + MEMORY_PER_BYTE * len(content)
    head = json.dumps({**settings, "roots": roots, "seconds": int(timeout) + 1, "memory": memory}).encode() + b"\n"
    path = json.dumps([str(Path(each).absolute()) for each in sys.path])  # an empty entry is the current folder
    command = [_interpreter(), "-P", "-W", "ignore", "-c", _START, path]
    try:
        done = subprocess.run(command, input=head + content, capture_output=True, timeout=timeout, check=False)  # noqa: S603  # sys.executable with fixed arguments
    except subprocess.TimeoutExpired:
        return _not_verified(f"verification took more than {timeout:g} seconds")
    except OSError as error:
        problem = f"worker process cannot be started: {error.strerror}"
        if is_transient(error):
            raise _not_run(problem) from None
        raise ConfigurationError(f"signing_async.sealed: could not verify: {problem}: {sys.executable}") from None
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    if done.returncode == OUT_OF_MEMORY:
        return _not_verified(f"verification took more than {memory >> 20} MiB of memory")
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        if name not in _KILLED:
            return _not_verified(f"the verifying process was ended by {name}")
        raise _not_run(f"worker process was killed by {name}")
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    raise RuntimeError(f"signing_async.sealed: worker process failed: {lines[-1] if lines else done.returncode}")


def _interpreter() -> str:
    """Return the Python that runs this program. Another executable is the application: it would start itself again."""
    if getattr(sys, "frozen", False) or not re.match("python|pypy|graalpy", Path(sys.executable or "").name.lower()):
        problem = "this application is frozen or embeds Python, and a worker process needs a Python to start"
        raise ConfigurationError(f"signing_async.sealed: could not verify: {problem}; run signing-async verify-sealed")
    return sys.executable


def _not_run(problem: str) -> SigningError:
    return SigningError(f"signing_async.sealed: could not verify: {problem}", transient=True)


def _not_verified(problem: str) -> dict[str, Any]:
    return {"revisions": 0, "seals": [], "problems": [problem], "trust_problems": []}
