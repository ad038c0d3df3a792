"""`dispatch --broker`: Taskiq's workers in the place of a client, and what they tell of each package."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import attrs

from ..dispatch.run import DispatchResult, SigningPackage
from ..errors import ConfigurationError, InvalidRequest, SigningError, WaitTimeout
from ..models import Signing

__all__ = ["Patience", "Workers", "workers"]

AT_ONCE = 100
"""So many are asked for in one round: those that were enqueued first."""

BETWEEN = 0.2

QUIET = 30.0
"""Seconds in which no worker tells of anything, after which that is said."""


@attrs.frozen
class Patience:
    """How long workers are waited for: for ever where no seconds are said; and who is warned while they are silent."""

    seconds: float | None
    warn: Callable[[str], None]


@asynccontextmanager
async def workers(url: str, journal: str, most: int, patience: Patience | None) -> AsyncIterator[Workers]:
    """Those who find their work at this URL. Without ``patience`` they are not waited for."""
    if "://" not in journal:
        raise InvalidRequest("--broker: needs a journal that all workers reach: --journal postgresql://...")
    try:
        from ..taskiq import enqueuing, redis_streams
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"--broker: {error}") from None
    async with enqueuing(redis_streams(url), max_pdf_bytes=most) as enqueue:
        yield Workers(enqueue, patience)


class Workers:
    """What `dispatch` needs of a client."""

    def __init__(self, enqueue: Callable[[SigningPackage], Awaitable[Any]], patience: Patience | None) -> None:
        self._enqueue = enqueue
        self._patience = patience

    @asynccontextmanager
    async def dispatch_many(
        self, packages: Iterable[SigningPackage], journal: object, concurrency: int
    ) -> AsyncIterator[AsyncIterator[DispatchResult]]:
        """What came of each: that it was enqueued, or what its worker tells."""
        yield self._results(packages)

    async def _results(self, packages: Iterable[SigningPackage]) -> AsyncIterator[DispatchResult]:
        waiting: dict[Any, SigningPackage] = {}
        for package in packages:
            try:
                enqueued = await self._enqueue(package)
            except InvalidRequest as error:
                yield DispatchResult(package, None, error)
                continue
            if self._patience is None:
                yield DispatchResult(package)
            else:
                waiting[enqueued] = package
        if self._patience is not None:
            async for result in self._told(waiting, self._patience):
                yield result

    async def _told(self, waiting: dict[Any, SigningPackage], patience: Patience) -> AsyncIterator[DispatchResult]:
        """What workers tell while there is time, and then what nobody has told of."""
        began = heard = time.monotonic()
        over = False
        while waiting and not over:
            now = time.monotonic()
            over = patience.seconds is not None and now - began >= patience.seconds
            for enqueued in list(waiting)[: None if over else AT_ONCE]:
                outcome = await enqueued.outcome()
                if outcome is not None:
                    heard = now
                    yield _result(waiting.pop(enqueued), outcome)
            if now - heard >= QUIET:
                patience.warn(f"no worker has told of anything for {now - heard:.0f} s; waited for: {len(waiting)}")
                heard = now
            await asyncio.sleep(BETWEEN)
        for package in waiting.values():
            words = f"no worker has told of it within {patience.seconds:g} s: it may be sent later"
            yield DispatchResult(package, None, WaitTimeout(words))


def _result(package: SigningPackage, outcome: Any) -> DispatchResult:
    if outcome.error is None:
        return DispatchResult(package, Signing(outcome.signing))
    error = {"InvalidRequest": InvalidRequest}.get(outcome.kind, SigningError)(outcome.error)
    error.effect = outcome.effect
    return DispatchResult(package, None, error)
