"""`dispatch --broker`: Taskiq workers send the packages, and report the outcome of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import attrs

from ..bulk import copy_unsent
from ..dispatch.run import DispatchFailure, DispatchSuccess, SigningPackage
from ..errors import ConfigurationError, InvalidRequest, SigningError, TransportError, WaitTimeout, amended
from ..models import Signing

BATCH = 100
"""How many packages are polled at a time, in the order in which they were enqueued."""
POLL = 0.2
QUIET = 30.0
"""Seconds without any outcome before a warning."""


@attrs.frozen
class Enqueued:
    """A package that workers will send."""

    package: SigningPackage
    signing: None = None
    error: None = None
    abandoned: tuple[str, ...] = ()
    sent_earlier: bool = False


WorkerResult = DispatchSuccess | DispatchFailure | Enqueued


class WorkerError(Exception):
    """The error of a package, as its worker reported it; ``kind`` is the name of the original error's class."""

    def __init__(self, outcome: Any) -> None:
        super().__init__(outcome.error)
        self.kind: str = outcome.kind
        self.exit_code: int = outcome.exit_code


@asynccontextmanager
async def workers(
    url: str, journal: str, max_pdf_bytes: int, timeout: float | None, warn: Callable[[str], None], *, wait: bool
) -> AsyncIterator[Workers]:
    """Connect to the workers' broker."""
    if "://" not in journal:
        raise InvalidRequest("--broker: needs a journal that all workers can reach: --journal postgresql://...")
    try:
        from ..taskiq import enqueuing, redis_streams
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"--broker: {error}") from None
    async with enqueuing(redis_streams(url), max_pdf_bytes=max_pdf_bytes) as enqueue:
        yield Workers(enqueue, timeout, warn, wait=wait)


class Workers:
    """Replaces the part of a client that `dispatch` uses: workers send the packages.

    ``timeout`` limits the wait for an unavailable broker and for the workers. Without ``wait``, a package is done when
    it was enqueued. ``warn`` is called with a text about each delay.
    """

    def __init__(
        self,
        enqueue: Callable[[SigningPackage], Awaitable[Any]],
        timeout: float | None,
        warn: Callable[[str], None],
        *,
        wait: bool,
    ) -> None:
        self._enqueue, self._timeout, self._warn, self._wait = enqueue, timeout, warn, wait

    @asynccontextmanager
    async def dispatch_many(
        self, packages: Iterable[SigningPackage], journal: object, concurrency: int
    ) -> AsyncIterator[AsyncIterator[WorkerResult]]:
        """Yield the result of each package: that it was enqueued, or its outcome."""
        yield self._results(packages)

    async def _results(self, packages: Iterable[SigningPackage]) -> AsyncIterator[WorkerResult]:
        pending: dict[Any, SigningPackage] = {}
        ended_by: SigningError | None = None
        for package in packages:
            try:
                if ended_by is not None:
                    raise copy_unsent(ended_by)
                enqueued = await self._enqueue_through_outage(package)
            except SigningError as error:
                ended_by = error if error.client_wide else None
                yield DispatchFailure(package, None, error)
                continue
            if self._wait:
                pending[enqueued] = package
            else:
                yield Enqueued(package)
        async for result in self._outcomes(pending):
            yield result

    def _has_expired(self, began: float) -> bool:
        return self._timeout is not None and time.monotonic() - began >= self._timeout

    async def _enqueue_through_outage(self, package: SigningPackage) -> Any:
        """Enqueue a package. Wait out an outage of the broker; raise its error when the timeout expires."""
        began, is_outage = time.monotonic(), False
        while True:
            try:
                return await self._enqueue(package)
            except SigningError as error:
                if self._has_expired(began) or error.fatal or not error.client_wide:
                    # An attempt during an outage may have enqueued the package.
                    raise amended(error, effect="unknown" if is_outage else error.effect) from error.__cause__
                if not is_outage:
                    self._warn(f"{error}; waiting for it")
                is_outage = True
            await asyncio.sleep(POLL)

    async def _outcomes(self, pending: dict[Any, SigningPackage]) -> AsyncIterator[WorkerResult]:
        began = last_outcome = time.monotonic()
        is_timeout = is_outage = False
        while pending and not is_timeout:
            now = time.monotonic()
            is_timeout = self._has_expired(began)
            for enqueued in list(pending)[: None if is_timeout else BATCH]:
                try:
                    outcome = await enqueued.outcome()
                except TransportError as error:
                    if not error.transient:
                        for package in pending.values():
                            yield DispatchFailure(package, None, error)
                        return
                    if not is_outage:
                        self._warn(f"{error}; waiting for it")
                    is_outage = True
                    break
                is_outage = False
                if outcome is not None:
                    last_outcome = now
                    package = pending.pop(enqueued)
                    if outcome.error is None:
                        yield DispatchSuccess(package, Signing(outcome.signing))
                    else:
                        yield DispatchFailure(package, None, WorkerError(outcome))
            if now - last_outcome >= QUIET:
                self._warn(f"no worker has reported for {now - last_outcome:.0f} s; packages pending: {len(pending)}")
                last_outcome = now
            await asyncio.sleep(POLL)
        for package in pending.values():
            message = f"no worker reported within {self._timeout:g} s: the package may still be sent"
            yield DispatchFailure(package, None, WaitTimeout(message, effect="unknown"))
