"""Uploads files as the first thing a process does, and prints which modules were imported in which thread."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from aiohttp import web

from signing_async import SigningClient
from tests.servers import serving


class Watch:
    """Is asked for each module that is not loaded yet, and finds none."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {"on the loop": [], "in threads": []}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Write the module's name down."""
        here = threading.current_thread() is threading.main_thread()
        self.found["on the loop" if here else "in threads"].append(name)
        return None


async def answer(request: web.Request) -> web.Response:
    """The service's answer to an upload."""
    return web.json_response({"id": "d1", "name": "a.pdf"}, status=201)


async def main(*paths: str) -> None:
    """Upload the files twice: once while nothing is loaded, once afterwards."""
    async with serving(answer) as server:
        # What the loop and the server load by themselves.
        await asyncio.to_thread(int)
        async with SigningClient(server.origin, "token") as client:
            watch = Watch()
            sys.meta_path.insert(0, watch)
            for path in (*paths, *paths):
                await client.documents.upload("s1", Path(path), "a.pdf")
            sys.meta_path.remove(watch)
    print(json.dumps(watch.found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
