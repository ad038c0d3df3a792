"""Sends a request for a class of its own as the first thing a process does, and prints what was imported where."""

from __future__ import annotations

import asyncio
import json
import sys

import attrs

from signing_async import SigningClient
from tests.servers import serving
from tests.transport.first_upload import Watch, answer


@attrs.frozen
class Template:
    id: str


async def main() -> None:
    async with serving(answer) as server:
        # What the loop and the server load by themselves.
        await asyncio.to_thread(int)
        async with SigningClient(server.origin, "token") as client:
            watch = Watch()
            sys.meta_path.insert(0, watch)
            await client.request("POST", "/templates", json={}, into=Template)
            sys.meta_path.remove(watch)
    print(json.dumps(watch.found))


if __name__ == "__main__":
    asyncio.run(main())
