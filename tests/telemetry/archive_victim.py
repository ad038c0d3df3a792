"""The process that is killed: it stops before a file gets its name, and prints the id of the span.

``python -m tests.telemetry.archive_victim BASE_URL TOKEN SIGNING FOLDER JOURNAL``
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from signing_async import SigningClient
from signing_async.archive import Archive, FolderStore


class Stuck(FolderStore):
    """A folder that does not respond."""

    async def put(self, name: str, source: Path, sha256: str) -> None:
        print(trace.format_span_id(trace.get_current_span().get_span_context().span_id), flush=True)
        await asyncio.Event().wait()


async def main(base_url: str, token: str, signing: str, folder: str, journal: str) -> None:
    trace.set_tracer_provider(TracerProvider())
    async with SigningClient(base_url, token) as client, Archive(client, Stuck(folder), journal=journal) as archive:
        await archive.collect(signing)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
