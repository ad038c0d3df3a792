"""Worker processes for the tests of tokens: ``python -m tests.auth.oauth_workers <task> <arguments>``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from signing_async import FileTokenStore, Token


async def hold(path: str) -> None:
    """Hold the lock until killed."""
    async with FileTokenStore(path).lock():
        print("held", flush=True)
        await asyncio.sleep(3600)


async def die(path: str, moment: str) -> None:
    """Be killed at one step of a save."""

    def kill(*arguments: Any, **settings: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    if moment == "mkstemp":
        tempfile.mkstemp = kill
    elif moment == "write":
        os.fdopen = kill
    elif moment == "fsync":
        os.fsync = kill
    elif moment == "replace":
        Path.replace = kill  # type: ignore[method-assign]  # this process is killed there
    await FileTokenStore(path).save(Token("new", "refresh-new"))
    kill()


if __name__ == "__main__":
    tasks: dict[str, Any] = {"hold": hold, "die": die}
    asyncio.run(tasks[sys.argv[1]](*sys.argv[2:]))
