"""`dispatch --broker`: Taskiq's workers in the place of a client, and what they tell of each package."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from ..dispatch import DispatchResult, SigningPackage
from ..errors import ConfigurationError, InvalidRequest, OutcomeUnknown, SigningError
from ..models import Signing

__all__ = ["Workers", "workers"]

AT_ONCE = 100
"""So many are asked for in one round: those that were enqueued first."""

BETWEEN = 0.2


@asynccontextmanager
async def workers(url: str, journal: str, most: int, aim: str) -> AsyncIterator[Workers]:
    """Those who find their work at this URL; ``aim``: what is to become of the packages before this tells of them."""
    if "://" not in journal:
        raise InvalidRequest("--broker: needs a journal that all workers reach: --journal postgresql://...")
    try:
        from ..taskiq import enqueuing, redis_streams
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"--broker: {error}") from None
    async with enqueuing(redis_streams(url), max_pdf_bytes=most) as enqueue:
        yield Workers(enqueue, waits=aim == "sent")


class Workers:
    """What `dispatch` needs of a client."""

    def __init__(self, enqueue: Callable[[SigningPackage], Awaitable[Any]], *, waits: bool) -> None:
        self._enqueue = enqueue
        self._waits = waits

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
            if self._waits:
                waiting[enqueued] = package
            else:
                yield DispatchResult(package)
        while waiting:
            for enqueued in list(waiting)[:AT_ONCE]:
                outcome = await enqueued.outcome()
                if outcome is not None:
                    yield _result(waiting.pop(enqueued), outcome)
            await asyncio.sleep(BETWEEN)


def _result(package: SigningPackage, outcome: Any) -> DispatchResult:
    if outcome.error is None:
        return DispatchResult(package, Signing(outcome.signing))
    kind = {"OutcomeUnknown": OutcomeUnknown, "OutcomeUnknownTimeout": OutcomeUnknown, "InvalidRequest": InvalidRequest}
    return DispatchResult(package, None, kind.get(outcome.kind, SigningError)(outcome.error))
