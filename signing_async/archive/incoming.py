"""Folders for incomplete downloads, one for each archive object. A later run removes those of killed processes."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from .._files import remove_locked, try_lock
from .folder import FolderStore
from .store import ArchiveStore

__all__ = ["Incoming"]

_PREFIX = "signing-archive-"


class Incoming:
    """The folder of one archive object: on the file system of a `FolderStore`, otherwise among the temporary files.

    A file beside the folder is locked until the object is closed or its process ends. A later run removes a folder if
    its lock is free.
    """

    def __init__(self, store: ArchiveStore) -> None:
        self._in_archive = store.incoming if isinstance(store, FolderStore) else None
        self._opening = asyncio.Lock()
        self._folder: Path | None = None
        self._lock: int | None = None

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
        self._folder = self._make_folder()
        return self._folder

    def _make_folder(self) -> Path:
        parent = self._find_parent()
        if parent is None:
            return Path(tempfile.mkdtemp(prefix=_PREFIX))
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            folder = parent / secrets.token_hex(8)
            lock = _lock_of(folder)
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            # Before the file was locked, another process may have mistaken it for a dead process's and removed it.
            if try_lock(self._lock) and os.fstat(self._lock).st_nlink:
                # Set before the folder exists: if it cannot be made, `_close` releases the lock.
                self._folder = folder
                folder.mkdir(mode=0o700)
                return folder
            os.close(self._lock)

    def _close(self) -> None:
        folder, lock = self._folder, self._lock
        self._folder = self._lock = None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if folder is not None and lock is not None:
            remove_locked(_lock_of(folder), partial(os.close, lock))
        parent = self._find_parent()
        if parent is not None:
            for lock_file in parent.glob("*.lock"):
                _remove_if_dead(lock_file)

    def _find_parent(self) -> Path | None:
        # Not cached: once the temporary folder was removed, another user may create a folder of that name.
        return self._in_archive or _own_temporary_folder()


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


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _remove_if_dead(lock: Path) -> None:
    try:
        file = lock.open("r+b", 0)
    except FileNotFoundError:
        return
    with file:
        if try_lock(file.fileno()):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            remove_locked(lock, file.close)
