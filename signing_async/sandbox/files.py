"""Uploaded and sealed files on disk. Uploads get a temporary name, are synced if durable, then renamed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

from .._files import sync_folder

BLOCK = 512 * 1024
"""How many bytes of an upload are buffered in memory."""

_OWN_NAME = re.compile(r"[0-9a-f]{24}\.(pdf|part)")


class Files:
    """A folder of files with random names; finished files never change."""

    def __init__(self, folder: Path, *, durable: bool) -> None:
        self.folder: Path = folder
        self.durable = durable
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        return self.folder / name

    def new_name(self, kind: str = "pdf") -> str:
        """Return an unused name."""
        return f"{secrets.token_hex(12)}.{kind}"

    def incoming(self, limit: int) -> Incoming:
        """Return a temporary file for an upload."""
        return Incoming(self.path(self.new_name("part")), limit)

    def publish(self, source: Path, name: str) -> None:
        """Give a finished file its final name. Blocking."""
        if self.durable:
            with source.open("r+b") as file:
                os.fsync(file.fileno())
        source.rename(self.path(name))
        if self.durable:
            sync_folder(self.folder)

    def remove_all_but(self, names: Iterable[str]) -> None:
        """Delete the files that a killed process left behind."""
        known = set(names)
        for path in list(self.folder.iterdir()):
            if _OWN_NAME.fullmatch(path.name) and path.name not in known:
                path.unlink()


class Incoming:
    """A file being received: written block by block, counted and hashed."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.size: int = 0
        self._limit = limit
        self._block = bytearray()
        self._hash = hashlib.sha256()

    @property
    def too_large(self) -> bool:
        """Whether more bytes than the limit were received; later bytes are discarded."""
        return self.size > self._limit

    @property
    def sha256(self) -> str:
        """The hash of all bytes, in hex, after `flush`."""
        return self._hash.hexdigest()

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        self.size += len(data)
        if self.too_large:
            return
        self._block += data
        if len(self._block) >= BLOCK:
            await asyncio.to_thread(self.flush)

    def flush(self) -> None:
        """Write the buffer to disk. Blocking."""
        self._hash.update(self._block)
        with self.path.open("ab") as file:
            file.write(self._block)
        self._block.clear()

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)
