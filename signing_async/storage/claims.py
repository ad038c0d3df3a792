"""Who holds a claim, and until when: an owner's lock file beside a SQLite file, or a lease by PostgreSQL's clock.

Standard library only: `webhooks` imports it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import IO, Any, TypeVar
from weakref import WeakSet

from .. import _checks
from .._files import check_locks, remove_locked, try_lock
from .._tasks import finish
from ..errors import ConfigurationError, SigningError

__all__ = ["Leases", "OwnerLock", "claim_or_undo"]

log: logging.Logger = logging.getLogger("signing_async")

T = TypeVar("T")

_ENDLESS = 1e9


async def claim_or_undo(work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]]) -> T:
    """Return the result of ``work``. If the caller is cancelled, wait for the result and undo it."""
    claiming = asyncio.create_task(work, name="signing_async claim")

    async def give_up() -> None:
        with contextlib.suppress(Exception):  # the caller wants no result any more; a lease expires
            await undo(await claiming)

    try:
        return await asyncio.shield(claiming)
    except asyncio.CancelledError:
        await finish(give_up())
        raise


class OwnerLock:
    """A locked file beside ``path``, which shows that its owner is alive.

    The system releases the lock when the process ends, even by SIGKILL. ``required_by`` is the class that needs it.
    """

    def __init__(self, path: Path, required_by: str) -> None:
        check_locks(required_by)
        self.path = path
        self.owner: str = ""
        """The name of the owner, new each time that the lock is acquired."""
        self._file: IO[bytes] | None = None
        _locks.add(self)

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


_locks: WeakSet[OwnerLock] = WeakSet()


def _after_fork_in_child() -> None:
    """Close the parent's lock files; otherwise the child would keep the claims of a dead parent."""
    for lock in list(_locks):
        lock.drop()


_register_at_fork = getattr(os, "register_at_fork", dict)  # Windows has no fork
_register_at_fork(after_in_child=_after_fork_in_child)


class Leases:
    """The claims that a store holds, and the renewal of their leases.

    ``renew`` is called with the keys of all claims and the lease, three times in each ``lease`` seconds. Without a
    ``lease`` the claims end with their process. ``timeout`` is that of the store's operations.
    """

    def __init__(
        self,
        renew: Callable[[list[str], float], Awaitable[object]],
        lease: float | None = None,
        *,
        timeout: float = 0.0,
        store: str,
    ) -> None:
        self.seconds: float = _ENDLESS if lease is None else _checks.number("lease", lease, above=0)
        if self.seconds < 3 * timeout:
            raise ConfigurationError(f"lease: must be at least three times the timeout of {timeout:g} s, got {lease!r}")
        self.held: dict[str, int] = {}
        """The fence of each claimed key."""
        self._renew = renew
        self._store = store
        self._renewing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Renew the leases as long as any are held."""
        if self.seconds < _ENDLESS and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.create_task(self._renew_all(), name="signing_async leases")

    async def end(self, release: Callable[[], Awaitable[object]]) -> None:
        """Stop renewing, and release what is held."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        try:
            if self.held:
                await release()
        except SigningError as error:
            log.warning("%s: the remaining claims end when their lease expires: %s", self._store, error)
        finally:
            self.held.clear()

    async def _renew_all(self) -> None:
        while self.held:
            await asyncio.sleep(self.seconds / 3)
            try:
                await self._renew(list(self.held), self.seconds)
            except SigningError as error:
                log.warning("%s: %d leases could not be renewed: %s", self._store, len(self.held), error)
