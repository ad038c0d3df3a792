"""Writing and reading files of an archive store."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from signing_async.archive import ArchiveStore


async def put(store: ArchiveStore, name: str, content: bytes, folder: Path) -> None:
    """Store content under a name, from a new local file."""
    # Never reuse a name: a thread of a cancelled call may still read its source.
    source = folder / f"source-{secrets.token_hex(8)}"
    source.write_bytes(content)
    try:
        await store.put(name, source, hashlib.sha256(content).hexdigest())
    finally:
        source.unlink(missing_ok=True)


async def content_of(store: ArchiveStore, name: str, offset: int = 0) -> bytes:
    """Return the content of a file from ``offset`` on."""
    return b"".join([chunk async for chunk in store.read(name, offset)])
