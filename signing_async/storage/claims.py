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
import weakref
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, TypeVar
from weakref import WeakValueDictionary

from .. import _checks
from .._files import check_locks, remove_locked, try_lock
from ..errors import ConfigurationError, SigningError
from .engine import Engine

__all__ = ["Leases", "OwnerLock"]

log: logging.Logger = logging.getLogger("signing_async")

T = TypeVar("T")


class OwnerLock:
    """A locked file beside ``path``, which shows that its owner is alive.

    The owner counts as alive while its file is locked; the system releases the lock when the process ends, even by
    SIGKILL. ``required_by`` is the class that needs the lock, for the error on systems without such locks.
    """

    def __init__(self, path: Path, required_by: str) -> None:
        check_locks(required_by)
        self.path = path
        self.owner: str = ""
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


class Leases:
    """The claims that a store holds. Their leases are renewed three times in each ``lease`` seconds.

    ``renewal`` is the statement that renews: its parameters are the keys, their fences and the new duration, and it
    returns the keys that are still held. ``timeout`` is that of the engine's operations.
    """

    def __init__(self, engine: Engine, renewal: str, lease: float, *, timeout: float, owner: str, noun: str) -> None:
        self._engine = engine
        self._renewal = renewal
        self._lease = _checks.number("lease", lease, above=0)
        if lease < 3 * timeout:
            raise ConfigurationError(f"lease: must be at least three times the timeout of {timeout:g} s, got {lease!r}")
        self.duration: timedelta = timedelta(seconds=lease)
        self.held: dict[str, int | None] = {}
        """The fence of each claimed key; None while the claim is pending."""
        self._owner = owner
        self._noun = noun
        self._tasks: set[asyncio.Task[Any]] = set()
        self._renewing: asyncio.Task[None] | None = None

    def add(self, key: str, fence: int) -> None:
        """Renew this lease until its key is removed from ``held``."""
        self.held[key] = fence
        if self._renewing is None or self._renewing.done():
            # With a weak reference an unclosed store can be collected, and then warns.
            renewing = _renew_leases(weakref.ref(self), self._lease / 3)
            self._renewing = asyncio.create_task(renewing, name="signing_async leases")

    async def claim(self, work: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, None]]) -> T:
        """Return the result of ``work``. If the caller is cancelled, the work continues and its result is undone."""
        claiming = self._in_background(work)

        def undo_claim(claimed: asyncio.Task[T]) -> None:
            if not claimed.cancelled() and claimed.exception() is None:
                self._in_background(undo(claimed.result()))

        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            claiming.add_done_callback(undo_claim)
            raise

    async def stop(self) -> None:
        """Stop renewing, and wait for the claims in progress."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
            self._renewing = None
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    def _in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name="signing_async claim")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _renew(self) -> bool:
        """Renew all leases; return whether there were any."""
        held = {key: fence for key, fence in self.held.items() if fence is not None}
        if not held:
            return False
        try:
            rows = await self._engine.run(self._renewal, list(held), list(held.values()), self.duration)
        except SigningError as error:
            log.warning("%s: the leases of %d %ss could not be renewed: %s", self._owner, len(held), self._noun, error)
            return True
        kept = {row["key"] for row in rows}
        for key, fence in held.items():
            # A claim that was released in the meantime is not lost.
            if key not in kept and self.held.get(key) == fence:
                log.warning("%s: another worker has taken over %s %r", self._owner, self._noun, key)
        return True


async def _renew_leases(reference: weakref.ref[Leases], interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        leases = reference()
        if leases is None or not await leases._renew():
            return
        del leases
