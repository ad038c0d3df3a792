"""`dispatch --broker`: Taskiq workers send the packages, and report the outcome of each."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import attrs

from ..dispatch.run import DispatchFailure, DispatchSuccess, SigningPackage
from ..errors import SigningError, WaitTimeout
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
async def worker_results(
    url: str,
    packages: Iterable[SigningPackage],
    max_pdf_bytes: int,
    timeout: float | None,
    warn: Callable[[str], None],
    *,
    wait: bool,
) -> AsyncIterator[AsyncIterator[WorkerResult]]:
    """Enqueue the packages; yield the results: that each was enqueued or, with ``wait``, its outcome.

    ``timeout`` limits the wait for an unavailable broker and for the workers. ``warn`` is called with a text about each
    delay.
    """
    from ..taskiq import enqueuing, redis_streams

    async def through_outage(work: Callable[[], Any]) -> Any:
        """Call the broker. While it is unavailable, try again until the timeout expires."""
        began, is_outage = time.monotonic(), False
        while True:
            try:
                return await work()
            except SigningError as error:
                expired = timeout is not None and time.monotonic() - began >= timeout
                if expired or not error.transient or not error.client_wide:
                    raise
                if not is_outage:
                    warn(f"{error}; waiting for it")
                is_outage = True
            await asyncio.sleep(POLL)

    async def results() -> AsyncIterator[WorkerResult]:
        pending: dict[Any, SigningPackage] = {}
        for package in packages:
            try:
                enqueued = await through_outage(functools.partial(enqueue, package))
            except SigningError as error:
                if error.client_wide:
                    raise
                yield DispatchFailure(package, None, error)
                continue
            if wait:
                pending[enqueued] = package
            else:
                yield Enqueued(package)
        began = last = time.monotonic()
        is_timeout = False
        while pending and not is_timeout:
            is_timeout = timeout is not None and time.monotonic() - began >= timeout
            for enqueued in list(pending)[: None if is_timeout else BATCH]:
                outcome = await through_outage(enqueued.outcome)
                if outcome is not None:
                    last, package = time.monotonic(), pending.pop(enqueued)
                    if outcome.error is None:
                        yield DispatchSuccess(package, Signing(outcome.signing))
                    else:
                        yield DispatchFailure(package, None, WorkerError(outcome))
            if time.monotonic() - last >= QUIET:
                warn(f"no worker has reported for {time.monotonic() - last:.0f} s; packages pending: {len(pending)}")
                last = time.monotonic()
            await asyncio.sleep(POLL)
        for package in pending.values():
            message = f"no worker reported within {timeout:g} s: the package may still be sent"
            yield DispatchFailure(package, None, WaitTimeout(message, effect="unknown"))

    async with enqueuing(redis_streams(url), max_pdf_bytes=max_pdf_bytes) as enqueue:
        yield results()
