"""The uploaded and the sealed files, on disk: written aside, made durable, and then given their name."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

BLOCK = 512 * 1024
"""So much of an upload is held in memory before it goes to disk."""

OWN_NAME = re.compile(r"\.?[0-9a-f]{24}\.(pdf|part)(\.\w+)?")
"""Names of files that are made here; sealing puts a dot before and a suffix behind while it writes."""


class Files:
    """A folder of files with names of its own making; finished files never change."""

    def __init__(self, folder: Path, *, durable: bool) -> None:
        self._folder = folder
        self.durable = durable
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Where the file of that name is."""
        return self._folder / name

    def new_name(self) -> str:
        """A name that nothing has yet."""
        return f"{secrets.token_hex(12)}.pdf"

    def incoming(self, limit: int) -> Incoming:
        """A file that is being received."""
        return Incoming(self, self.path(f"{secrets.token_hex(12)}.part"), limit)

    def publish(self, source: Path, name: str) -> None:
        """Give a finished file its name, for good. Blocking."""
        if self.durable:
            with source.open("r+b") as file:
                os.fsync(file.fileno())
        source.rename(self.path(name))
        if self.durable:
            sync_folder(self._folder)

    def remove_all_but(self, names: Iterable[str]) -> int:
        """Delete what a killed process left behind: every file of its own making but these; how many it were."""
        known = set(names)
        strays = [p for p in self._folder.iterdir() if OWN_NAME.fullmatch(p.name) and p.name not in known]
        for path in strays:
            path.unlink()
        return len(strays)


class Incoming:
    """Bytes on their way to disk: block by block, never more than one block in memory, counted and hashed."""

    def __init__(self, files: Files, path: Path, limit: int) -> None:
        self.files = files
        self.path = path
        self.size: int = 0
        self._limit = limit
        self._block = bytearray()
        self._hash = hashlib.sha256()

    @property
    def too_large(self) -> bool:
        """More came than the limit allows; nothing further is kept."""
        return self.size > self._limit

    @property
    def sha256(self) -> str:
        """Of all bytes, in hex; once `flush` was called."""
        return self._hash.hexdigest()

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take these bytes."""
        self.size += len(data)
        if self.too_large:
            self._block.clear()
            return
        self._block += data
        if len(self._block) >= BLOCK:
            await asyncio.to_thread(self.flush)

    def flush(self) -> None:
        """Put on disk what is held in memory. Blocking."""
        self._hash.update(self._block)
        with self.path.open("ab") as file:
            file.write(self._block)
        self._block = bytearray()

    def __enter__(self) -> Incoming:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Make a folder's entries survive a power cut."""
    with suppress(PermissionError):  # where folders cannot be opened (Windows), the system has its own guarantees
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
