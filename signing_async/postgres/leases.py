"""Claims as leases by the server's clock, renewed while they are held."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, TypeVar

from .. import _checks
from ..errors import ConfigurationError, SigningError
from .database import Database

__all__ = ["Leases"]

log: logging.Logger = logging.getLogger("signing_async")

T = TypeVar("T")


class Leases:
    """The claims that a store holds. Their leases are renewed three times in each ``lease`` seconds.

    ``renewal`` is the statement that renews: its parameters are the keys, their fences and the new duration, and it
    returns the keys that are still held.
    """

    def __init__(self, database: Database, renewal: str, lease: float, *, owner: str, noun: str) -> None:
        self._database = database
        self._renewal = database.render(renewal)
        self._lease = _checks.number("lease", lease, above=0)
        if lease < 3 * database.timeout:
            raise ConfigurationError(
                f"lease: must be at least three times the timeout of {database.timeout:g} s, got {lease!r}"
            )
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
            kept = await self._database.run(lambda connection: self._renew_all(connection, held))
        except SigningError as error:
            log.warning("%s: the leases of %d %ss could not be renewed: %s", self._owner, len(held), self._noun, error)
            return True
        for key, fence in held.items():
            # A claim that was released in the meantime is not lost.
            if key not in kept and self.held.get(key) == fence:
                log.warning("%s: another worker has taken over %s %r", self._owner, self._noun, key)
        return True

    async def _renew_all(self, connection: Any, held: dict[str, int]) -> set[str]:
        rows = await connection.fetch(self._renewal, list(held), list(held.values()), self.duration)
        return {row["key"] for row in rows}


async def _renew_leases(reference: weakref.ref[Leases], interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        leases = reference()
        if leases is None or not await leases._renew():
            return
        del leases
