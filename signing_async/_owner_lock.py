"""Lock files that show whether the owner of a claim is alive. Standard library only: `webhooks` imports it too."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
from pathlib import Path
from typing import IO
from weakref import WeakValueDictionary

from ._files import check_locks, remove_locked, try_lock

__all__ = ["OwnerLock"]


class OwnerLock:
    """A locked file beside ``path``, which shows that its owner is alive.

    The owner counts as alive while its file is locked; the system releases the lock when the process ends, even by
    SIGKILL. ``required_by`` is the class that needs the lock, for the error on systems without such locks.
    """

    def __init__(self, path: Path, required_by: str) -> None:
        check_locks(required_by)
        self.path = path
        self.owner = ""
        """The name of the owner, new each time that the lock is acquired."""
        self._file: IO[bytes] | None = None
        _locks[id(self)] = self

    @property
    def is_held(self) -> bool:
        """Whether this object holds its lock."""
        return self._file is not None

    def acquire(self) -> None:
        """Create and lock a file, unless the lock is held; remove the files of dead owners.

        Call this and `is_alive` in one process at a time: both lock the files of others for a moment.
        """
        if self._file is not None:
            return
        for left in self.path.parent.glob(f"{glob.escape(self.path.name)}.*.lock"):
            self.is_alive(left.name[len(self.path.name) + 1 : -len(".lock")])
        while True:
            owner = secrets.token_hex(8)
            file = os.fdopen(os.open(self._lock_path(owner), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b", 0)
            # Between create and lock, another process may have removed the file as that of a dead owner; try again.
            if try_lock(file.fileno()) and os.fstat(file.fileno()).st_nlink:
                break
            file.close()
        self.owner, self._file = owner, file

    def is_alive(self, owner: str) -> bool:
        """Return whether the owner's lock is held; remove the lock file of a dead owner."""
        try:
            lock = self._lock_path(owner).open("r+b", 0)
        except FileNotFoundError:
            return False
        with lock:
            if try_lock(lock.fileno()):
                remove_locked(self._lock_path(owner), lock.close)
                return False
            return True

    def release(self) -> None:
        """Remove and unlock the file."""
        if self._file is not None:
            # If this fails, the next owner that finds the file unlocked removes it.
            with contextlib.suppress(OSError):
                remove_locked(self._lock_path(self.owner), self.drop)

    def drop(self) -> None:
        """Close the file, but do not remove it. The lock stays if a parent process holds it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lock_path(self, owner: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{owner}.lock")


_locks: WeakValueDictionary[int, OwnerLock] = WeakValueDictionary()


def _after_fork_in_child() -> None:
    """Close the parent's lock files; otherwise the child would keep the claims of a dead parent."""
    # A copy of the references, because other threads may add and remove locks.
    for lock in filter(None, [reference() for reference in _locks.valuerefs()]):
        lock.drop()


_register_at_fork = getattr(os, "register_at_fork", dict)  # Windows has no fork
_register_at_fork(after_in_child=_after_fork_in_child)
