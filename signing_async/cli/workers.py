"""`dispatch --broker`: Taskiq workers send the packages, and report the outcome of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import attrs

from ..dispatch.run import DispatchFailure, DispatchSuccess, SigningPackage
from ..errors import SigningError
from ..models import Signing

QUIET = 30.0
"""Seconds without an outcome before a warning."""


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

    ``timeout`` limits the wait for each package. ``warn`` is called with a text about a long delay.
    """
    from ..taskiq import enqueuing, redis_streams

    loop = asyncio.get_running_loop()

    async def results() -> AsyncIterator[WorkerResult]:
        pending: list[tuple[SigningPackage, Any, float]] = []
        for package in packages:
            try:
                pending.append((package, await enqueue(package), loop.time()))
            except SigningError as error:
                if error.client_wide:
                    raise
                yield DispatchFailure(package, None, error)
            else:
                if not wait:
                    yield Enqueued(package)
        for package, enqueued, began in pending if wait else ():
            warning = loop.call_later(QUIET, warn, f"no worker has reported for {QUIET:.0f} s; are workers running?")
            try:
                # The workers had this long already; a timeout must be positive.
                left = None if timeout is None else max(timeout - (loop.time() - began), 0.01)
                outcome = await enqueued.wait(timeout=left)
            except SigningError as error:
                yield DispatchFailure(package, None, error)
            else:
                if outcome.error is None:
                    yield DispatchSuccess(package, Signing(outcome.signing))
                else:
                    yield DispatchFailure(package, None, WorkerError(outcome))
            finally:
                warning.cancel()

    async with enqueuing(redis_streams(url), max_pdf_bytes=max_pdf_bytes) as enqueue:
        yield results()
