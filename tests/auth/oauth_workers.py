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

from signing_async import FileTokenStore, OAuth, RetryPolicy, SigningClient, Token


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


async def call(path: str, base_url: str, client_id: str, client_secret: str, seconds: str) -> None:
    """Make calls for some seconds with the store's token; print how many, and how many tokens were used."""
    used: set[str] = set()
    calls = 0
    oauth = OAuth(
        base_url,
        client_id=client_id,
        client_secret=client_secret,
        redirect_uri="https://app.example.com/callback",
        store=FileTokenStore(path),
    )
    until = time.monotonic() + float(seconds)
    async with oauth, SigningClient(base_url, oauth, retry=RetryPolicy(base_delay=0.01, settle=0.1)) as client:
        print("ready", flush=True)
        sys.stdin.readline()
        while time.monotonic() < until:
            await asyncio.gather(*(client.me() for _ in range(3)))
            calls += 3
            used.add(await oauth.access_token())
            await asyncio.sleep(0.02)
    print(calls, len(used), flush=True)


if __name__ == "__main__":
    tasks: dict[str, Any] = {"hold": hold, "die": die, "call": call}
    asyncio.run(tasks[sys.argv[1]](*sys.argv[2:]))
