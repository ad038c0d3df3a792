"""What a token store could not do at the end of its lock: repeated in the background until the engine responds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ..errors import AuthError

__all__ = ["Unfinished"]

log: logging.Logger = logging.getLogger("signing_async")

_POLL = 0.1


class Unfinished:
    """The save, or the unlock, that the last holder of a lock left. Until it is done, the store begins no other."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._task: asyncio.Task[None] | None = None
        self._problem = ""
        self._failure: AuthError | None = None

    def start(self, work: Callable[[], Awaitable[object]], *, unsaved: bool) -> None:
        """Repeat the work until it raises no `AuthError`. ``unsaved`` says whether it saves a token."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(_POLL)
                try:
                    await work()
                    return
                except AuthError as error:
                    self._failure = error

        self._failure = None
        self._problem = "a refreshed token is not saved yet" if unsaved else "the lock is not released yet"
        self._task = asyncio.create_task(repeat(), name="signing_async token save")

    async def wait(self, store: str) -> None:
        """Wait until the work is done; raise an `AuthError` after the timeout."""
        if not await self._is_done():
            if self._failure is not None and not self._failure.transient:
                raise AuthError(f"{self._failure}, and {self._problem}")
            raise AuthError(f"{store}: no response, and {self._problem}", transient=True)

    async def close(self, store: object) -> None:
        """Give the work ``timeout`` seconds, then give it up."""
        if not await self._is_done() and self._task is not None:
            if "saved" in self._problem:
                text = "%r was closed before a refreshed token was saved: its user may have to authorize again"
                log.error(text, store)
            self._task.cancel()
            await asyncio.wait([self._task])
        self._task = None

    async def _is_done(self) -> bool:
        if self._task is None or self._task.done():
            return True
        await asyncio.wait([self._task], timeout=self._timeout)
        return self._task.done()
