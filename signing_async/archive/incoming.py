"""Folders for incomplete downloads, one for each archive object. A later run removes those of killed processes."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from ..storage.claims import OwnerLock
from .folder import FolderStore
from .store import ArchiveStore

__all__ = ["Incoming"]

_PREFIX = "signing-archive-"


class Incoming:
    """The folder of one archive object: on the file system of a `FolderStore`, otherwise among the temporary files.

    The folder has the name of its owner's lock. Closing the object removes the folders of dead owners, too.
    """

    def __init__(self, store: ArchiveStore) -> None:
        self._in_archive = store.incoming if isinstance(store, FolderStore) else None
        self._opening = asyncio.Lock()
        self._folder: Path | None = None
        self._lock: OwnerLock | None = None

    async def new_path(self) -> Path:
        """Return an unused path in the folder."""
        async with self._opening:
            folder = await asyncio.to_thread(self._open)
        return folder / f"{secrets.token_hex(8)}.pdf"

    async def aclose(self) -> None:
        """Remove the folder, and the folders of dead processes."""
        await asyncio.to_thread(self._close)

    def _open(self) -> Path:
        if self._folder is not None and self._folder.is_dir():
            return self._folder
        # A cleaner of temporary files may have removed the folder.
        self._close()
        parent = self._find_parent()
        if parent is None:
            self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
            return self._folder
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _lock_in(parent)
        self._lock.acquire()
        self._folder = parent / self._lock.owner
        self._folder.mkdir(mode=0o700)
        return self._folder

    def _close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()
        self._folder = self._lock = None
        parent = self._find_parent()
        if parent is not None:
            lock = _lock_in(parent)
            for folder in [each for each in parent.glob("*") if each.is_dir()]:
                if not lock.is_alive(folder.name):
                    shutil.rmtree(folder, ignore_errors=True)

    def _find_parent(self) -> Path | None:
        # Not cached: once the temporary folder was removed, another user may create a folder of that name.
        return self._in_archive or _own_temporary_folder()


def _lock_in(parent: Path) -> OwnerLock:
    return OwnerLock(parent / "download", "Archive")


def _own_temporary_folder() -> Path | None:
    """Return a temporary folder that only this user can access; None if another user may have made it, or on Windows.

    Unlike a folder of `tempfile.mkdtemp` it has a fixed name, so the next process finds it if this one is killed.
    """
    getuid = getattr(os, "getuid", None)  # Windows has none; its temporary folder belongs to the user
    if getuid is None:
        return None
    folder = Path(tempfile.gettempdir(), f"{_PREFIX}{getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == getuid() and not found.st_mode & 0o077
    return folder if is_own else None
