"""A whole signing package in one call, and thousands of them: however often one is tried, it is sent once.

Each step is written to a journal before it begins and after its outcome is known, so that whoever comes next, after a
crash at any moment, can tell what may have happened. A draft with a step whose outcome is not known is abandoned, and a
new one is made: only the sending must not be done anew, and the service sends a signing once. Whoever is about to send
first writes that down, which the journal refuses to all but the one who has the package.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs

from ..errors import InvalidRequest
from ..models import Signing
from ..reconcile import Tracker
from ..transport.call import Transport, log
from ..worker_pool import Deferred, FileProgress, Progress, ProgressReporter, Results
from .journal import Claim, ClaimLost, Journal, JournalError, SqliteJournal
from .package import KeptPdf, NewRecipient, Prepared, SigningPackage, prepare
from .steps import Room, Sending, Steps, journaled

__all__ = ["DispatchResult", "Dispatcher", "NewRecipient", "SigningPackage"]

_UPLOADS = 8
_SOON, _LATER = 0.05, 1.0
_TOLD_AFTER = 4


@attrs.frozen
class DispatchResult:
    """What came of one package: ``error`` is None when it was sent, now or by an earlier run.

    ``signing`` is the signing as sent; with an error, the draft as far as one is known.
    """

    package: SigningPackage
    signing: Signing | None = None
    error: Exception | None = None


class Dispatcher:
    """``client.dispatch`` and ``client.dispatch_many``."""

    def __init__(self, transport: Transport, tracker: Tracker) -> None:
        self._steps = Steps(transport, tracker)

    async def one(self, package: SigningPackage, journal: Journal | str | os.PathLike[str] | None) -> Signing:
        """Send one package; where another run is at work on it, wait for that."""
        run = self._run([package], _Unwritten() if journal is None else journal, _UPLOADS, None)
        async with run.opened():
            job = await anext(run.jobs)
            while isinstance(result := await run.work(job), Deferred):
                await asyncio.sleep(result.delay)
        if result.error is not None:
            raise result.error
        assert result.signing is not None
        return result.signing

    def many(
        self,
        packages: Iterable[SigningPackage] | AsyncIterable[SigningPackage],
        journal: Journal | str | os.PathLike[str],
        concurrency: int,
        on_progress: Callable[[Progress], None] | None,
    ) -> Results[DispatchResult]:
        """Send packages, so many at a time."""
        if not isinstance(packages, Iterable | AsyncIterable):
            raise InvalidRequest(f"packages: must be an iterable of SigningPackage, not {type(packages).__name__}")
        run = self._run(packages, journal, concurrency, on_progress)
        return Results(run.jobs, run.work, concurrency, around=run.opened())

    def _run(
        self,
        packages: Iterable[SigningPackage] | AsyncIterable[SigningPackage],
        journal: Journal | str | os.PathLike[str],
        concurrency: int,
        on_progress: Callable[[Progress], None] | None,
    ) -> _Run:
        reporter = ProgressReporter(on_progress)
        kept = _journal(journal)
        return _Run(self._steps, packages, kept, kept is not journal, concurrency, reporter)


def _journal(journal: Any) -> Journal:
    """What is given as a path is opened, and closed in the end; another journal is the caller's."""
    if isinstance(journal, str | os.PathLike):
        return SqliteJournal(journal)
    if not all(callable(getattr(journal, name, None)) for name in ("claim", "write", "release")):
        raise InvalidRequest(f"journal: must be a path or a Journal, not {journal!r}")
    kept: Journal = journal
    return kept


class _Unwritten:
    """For one package without a journal: what is known of it ends with the call."""

    async def claim(self, key: str) -> Claim | None:
        return Claim(key, None, 1)

    async def write(self, claim: Claim, state: str) -> None: ...

    async def release(self, claim: Claim) -> None: ...

    async def aclose(self) -> None: ...


class _Run:
    """One run over packages, with one journal."""

    _room: Room

    def __init__(
        self,
        steps: Steps,
        packages: Iterable[SigningPackage] | AsyncIterable[SigningPackage],
        journal: Journal,
        is_own: bool,
        concurrency: int,
        reporter: ProgressReporter,
    ) -> None:
        self._steps = steps
        self._journal = journal
        self._is_own = is_own
        self._concurrency = concurrency
        self._totals = _Totals(reporter)
        self._prepared: set[_Job] = set()
        self.jobs: AsyncGenerator[_Job, None] = self._each(packages)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        self._room = Room(self._concurrency)
        try:
            yield
        finally:
            for job in self._prepared:
                job.close()
            await self.jobs.aclose()
            if self._is_own:
                await self._journal.aclose()

    async def _each(self, packages: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[_Job, None]:
        if isinstance(packages, AsyncIterable):
            async for package in packages:
                self._totals.expect()
                yield _Job(package)
        else:
            for package in packages:
                self._totals.expect()
                yield _Job(package)
        self._totals.add([])

    async def work(self, job: _Job) -> DispatchResult | Deferred:
        """Return the result of a package; defer a package that another run works on."""
        try:
            prepared = await self._prepare(job)
        except Exception as error:
            return DispatchResult(job.package, None, error)
        claim = await journaled(self._journal.claim(prepared.key))
        result = None if claim is None else await self._send(job, prepared, claim)
        if result is None:
            return job.defer()
        job.close()
        self._prepared.discard(job)
        return result

    async def _prepare(self, job: _Job) -> Prepared:
        if job.prepared is None:
            try:
                job.prepared = await prepare(job.package, self._steps.most)
                self._prepared.add(job)
            finally:
                job.tell = self._totals.add([] if job.prepared is None else job.prepared.documents)
        return job.prepared

    async def _send(self, job: _Job, prepared: Prepared, claim: Claim) -> DispatchResult | None:
        sending = Sending(self._steps, prepared, self._journal, claim, self._room, job.tell)
        try:
            return DispatchResult(job.package, await sending.carry_out())
        except ClaimLost as error:
            log.warning("%s", error)
            return None
        except JournalError:
            raise
        except Exception as error:
            return await self._failed(sending, job, error)
        finally:
            await self._release(claim)

    async def _failed(self, sending: Sending, job: _Job, error: Exception) -> DispatchResult | None:
        try:
            await sending.failed(error)
        except ClaimLost as lost:
            log.warning("%s", lost)
            return None
        return DispatchResult(job.package, sending.known(), error)

    async def _release(self, claim: Claim) -> None:
        """Also on the way out of a run that is cancelled, and after a failure of the journal itself."""
        releasing = asyncio.ensure_future(journaled(self._journal.release(claim)))
        try:
            await asyncio.shield(releasing)
        except ClaimLost:
            pass
        except JournalError as error:
            log.warning("%s", error)


class _Job:
    """A package, from when it is pulled until there is a result."""

    def __init__(self, package: SigningPackage) -> None:
        self.package = package
        self.prepared: Prepared | None = None
        self.tell: Callable[[int, Progress], None]
        self._deferrals = 0

    def defer(self) -> Deferred:
        """Wait longer each time for the run that works on the package."""
        assert self.prepared is not None
        delay = min(_SOON * 2.0 ** min(self._deferrals, 20), _LATER) * random.uniform(0.5, 1.0)
        self._deferrals += 1
        if self._deferrals == _TOLD_AFTER:
            log.info("package %r is waited for: another run is at work on it", self.prepared.key)
        return Deferred(delay)

    def close(self) -> None:
        assert self.prepared is not None
        self.prepared.close()


class _Totals:
    """The totals of a run, reported once all packages are prepared."""

    def __init__(self, reporter: ProgressReporter) -> None:
        self._reporter = reporter
        # The end of the packages is still to come, too.
        self._unprepared = 1
        self._files = self._bytes = 0

    def expect(self) -> None:
        """Count a package whose documents are not known yet."""
        self._unprepared += 1

    def add(self, documents: Sequence[KeptPdf]) -> Callable[[int, Progress], None]:
        """Count the documents of a package, and return the listener of their uploads.

        An invalid package has no documents, nor has the end of the packages.
        """
        self._unprepared -= 1
        self._files += len(documents)
        self._bytes += sum(document.size for document in documents)
        if not self._unprepared:
            self._reporter.files_total, self._reporter.bytes_total = self._files, self._bytes
            # The end may be found after the last upload.
            self._reporter.add(0, 0)
        files = [FileProgress(self._reporter) for _ in documents]
        return lambda number, progress: files[number](progress)
