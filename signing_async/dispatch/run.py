"""Dispatch packages: one or thousands, each sent once, however often a run is killed and repeated.

Each step is saved to the journal before it begins and after its outcome is known. A later run, after a crash at any
moment, therefore knows what may have happened. A draft with a step of unknown outcome is abandoned, and another one is
created: a spare draft sends no notifications. Once the send request may have taken effect, no other draft is created:
the service sends a signing once. The status is saved before that request; the journal refuses the write if the run has
lost its claim.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import attrs

from ..errors import InvalidRequest, OutcomeUnknown, SigningError
from ..models import Signing
from ..reconcile import Tracker
from ..telemetry import switch
from ..telemetry.names import DISPATCH_SPAN
from ..transport.call import Transport, log
from ..worker_pool import Deferrals, Deferred, FileProgress, Progress, ProgressReporter, Results, copy_unsent
from .entry import GuardedJournal, JournalEntry, NoJournal, open_journal
from .journal import Claim, ClaimLost, Journal, JournalError
from .package import CheckedPdf, NewRecipient, Prepared, SigningPackage, prepare
from .steps import Draft, Resources, Sending, Uploads

if TYPE_CHECKING:
    from ..telemetry.spans import Telemetry

__all__ = ["DispatchResult", "Dispatcher", "NewRecipient", "SigningPackage"]

_MAX_UPLOADS = 8


@attrs.frozen
class DispatchResult:
    """The result of one package. ``error`` is None if it was sent, by this run or an earlier one.

    ``signing`` is the signing as sent; with an error, what is known of the draft. ``abandoned`` are the ids of drafts
    that this run or an earlier one abandoned: they stay at the service, unsent.
    """

    package: SigningPackage
    signing: Signing | None = None
    error: Exception | None = None
    abandoned: tuple[str, ...] = ()


class Dispatcher:
    """``client.dispatch`` and ``client.dispatch_many``."""

    def __init__(self, transport: Transport, tracker: Tracker) -> None:
        self._resources = Resources(transport, tracker)

    async def one(
        self, package: SigningPackage, journal: Journal | str | os.PathLike[str] | None, ordered: bool
    ) -> Signing:
        """Send one package. If another run is working on it, wait for that run."""
        opened = NoJournal() if journal is None else open_journal(journal)
        reporter = ProgressReporter(None)
        run = _Run(self._resources, [package], opened, opened is not journal, _MAX_UPLOADS, ordered, reporter)
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
        ordered: bool,
    ) -> Results[DispatchResult]:
        """Send packages, ``concurrency`` at a time."""
        if not isinstance(packages, Iterable | AsyncIterable):
            raise InvalidRequest(f"packages: must be an iterable of SigningPackage, got {type(packages).__name__}")
        reporter = ProgressReporter(on_progress)
        opened = open_journal(journal)
        run = _Run(self._resources, packages, opened, opened is not journal, concurrency, ordered, reporter)
        return Results(run.jobs, run.work, concurrency, around=run.opened())


class _Run:
    """One run over packages, with one journal."""

    _uploads: Uploads
    _observed: Telemetry | None = None

    def __init__(
        self,
        resources: Resources,
        packages: Iterable[SigningPackage] | AsyncIterable[SigningPackage],
        journal: Journal,
        is_own_journal: bool,
        concurrency: int,
        ordered: bool,
        reporter: ProgressReporter,
    ) -> None:
        self._resources = resources
        self._journal = journal
        observed = resources.telemetry and not isinstance(journal, NoJournal)
        self._guarded = GuardedJournal(journal, telemetry=observed)
        self._is_own_journal = is_own_journal
        self._concurrency = concurrency
        self._ordered = ordered
        self._totals = _Totals(reporter)
        self._prepared: set[_Job] = set()
        self.jobs: AsyncGenerator[_Job, None] = self._pull(packages)
        self._without_key: dict[bytes, int] = {}
        """The numbers of this run's packages without a key, by the hash of their content."""
        self._fatal: SigningError | None = None
        """The error after which nothing more is sent."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        self._uploads = Uploads(self._concurrency, ordered=self._ordered)
        try:
            with self._span():
                yield
        finally:
            for job in self._prepared:
                job.close()
            await self.jobs.aclose()
            if self._is_own_journal:
                await self._journal.aclose()

    def _span(self) -> AbstractContextManager[object]:
        """Make the span of the run the current one; the tasks of the workers inherit it."""
        self._observed = switch.active() if self._resources.telemetry else None
        return nullcontext() if self._observed is None else self._observed.span(DISPATCH_SPAN)

    async def _pull(self, packages: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[_Job, None]:
        number = 0
        if isinstance(packages, AsyncIterable):
            async for package in packages:
                self._totals.expect()
                yield _Job(number, package)
                number += 1
        else:
            for package in packages:
                self._totals.expect()
                yield _Job(number, package)
                number += 1
        self._totals.add([])

    async def work(self, job: _Job) -> DispatchResult | Deferred:
        """Return the result of a package; defer a package that another run is working on."""
        if self._fatal is not None:
            if job.prepared is None:
                self._totals.add([])
            return DispatchResult(job.package, None, copy_unsent(self._fatal))
        try:
            prepared = await self._prepare(job)
        except Exception as error:
            return DispatchResult(job.package, None, error)
        result = await self._claim(job, prepared)
        if result is None:
            return job.defer()
        job.close()
        self._prepared.discard(job)
        self._forget_failed(job, prepared, result)
        return result

    async def _prepare(self, job: _Job) -> Prepared:
        if job.prepared is not None:
            return job.prepared
        try:
            prepared = await prepare(job.package, self._resources.max_pdf_bytes)
            self._check_distinct(job, prepared)
            job.prepared = prepared
            self._prepared.add(job)
            return prepared
        finally:
            job.on_progress = self._totals.add([] if job.prepared is None else job.prepared.documents)

    def _check_distinct(self, job: _Job, prepared: Prepared) -> None:
        """Raise `InvalidRequest` if the package has no key, and the same content as an earlier one of this run."""
        if job.package.key is not None:
            return
        first = self._without_key.setdefault(bytes.fromhex(prepared.content), job.number)
        if first != job.number:
            prepared.close()
            text = (
                f"key: missing, and packages[{job.number}] is the same package as packages[{first}];"
                " if both are to be sent, give each a key"
            )
            raise InvalidRequest(text)

    def _forget_failed(self, job: _Job, prepared: Prepared, result: DispatchResult) -> None:
        """Forget the content of a failed package without a key, so that the caller can repeat the package."""
        if result.error is not None and job.package.key is None:
            del self._without_key[bytes.fromhex(prepared.content)]

    async def _claim(self, job: _Job, prepared: Prepared) -> DispatchResult | None:
        """Send the package under its claim; return None if another run holds the claim."""
        try:
            claim = await self._guarded.claim(prepared.key)
        except SigningError as error:
            if error.client_wide:
                raise
            return DispatchResult(job.package, None, error)
        return None if claim is None else await self._observe(job, prepared, claim)

    async def _observe(self, job: _Job, prepared: Prepared, claim: Claim) -> DispatchResult | None:
        if self._observed is None:
            return await self._send(job, prepared, claim, None)
        from ..telemetry.work import Package

        with Package(self._observed, job.number, claim.state) as package:
            result = await self._send(job, prepared, claim, package.span.context)
            if result is None:
                package.defer()
            else:
                package.end_with(None if result.signing is None else result.signing.id, result.error)
            return result

    async def _send(self, job: _Job, prepared: Prepared, claim: Claim, context: str | None) -> DispatchResult | None:
        entry = JournalEntry(self._guarded, claim, prepared.content, self._resources.service, context)
        draft = Draft(self._resources, prepared, entry, self._uploads, job.on_progress)
        sending = Sending(self._resources, prepared, entry, draft)
        try:
            return DispatchResult(job.package, await sending.run(), None, sending.abandoned)
        except ClaimLost as error:
            log.warning("%s", error)
            return None
        except Exception as error:
            if isinstance(error, JournalError) and error.client_wide:
                raise
            if isinstance(error, OutcomeUnknown) and not isinstance(self._journal, NoJournal):
                # The next run knows from the journal what is ambiguous, and reads the service first.
                error.transient = error.may_clear
            return await self._note_failure(sending, job, error)
        finally:
            await self._guarded.release(claim)

    async def _note_failure(self, sending: Sending, job: _Job, error: Exception) -> DispatchResult | None:
        try:
            await sending.note_failure(error)
        except ClaimLost as lost:
            log.warning("%s", lost)
            return None
        except SigningError as failure:
            if failure.client_wide:
                raise
            log.warning("%s", failure)
        if isinstance(error, SigningError) and error.fatal:
            self._fatal = error
        return DispatchResult(job.package, sending.known_signing(), error, sending.abandoned)


class _Job:
    """A package that was pulled and has no result yet."""

    on_progress: Callable[[int, Progress], None]

    def __init__(self, number: int, package: SigningPackage) -> None:
        self.number = number
        self.package = package
        self.prepared: Prepared | None = None
        self._deferrals = Deferrals()

    def defer(self) -> Deferred:
        """Return the delay before the next attempt: another run is working on the package."""
        assert self.prepared is not None
        return self._deferrals.next(f"package {self.prepared.label}")

    def close(self) -> None:
        assert self.prepared is not None
        self.prepared.close()


class _Totals:
    """The totals of a run, reported once all packages are prepared."""

    def __init__(self, reporter: ProgressReporter) -> None:
        self._reporter = reporter
        # The end of the packages counts as one more package.
        self._unprepared = 1
        self._files = self._bytes = 0

    def expect(self) -> None:
        """Count a package whose documents are not known yet."""
        self._unprepared += 1

    def add(self, documents: Sequence[CheckedPdf]) -> Callable[[int, Progress], None]:
        """Count the documents of a package, and return the progress callback of their uploads.

        An invalid package, and the end of the packages, count without documents.
        """
        self._unprepared -= 1
        self._files += len(documents)
        self._bytes += sum(document.size for document in documents)
        if not self._unprepared:
            self._reporter.files_total, self._reporter.bytes_total = self._files, self._bytes
            # If the end is reached after the last upload, only this reports the totals.
            self._reporter.add(0, 0)
        files = [FileProgress(self._reporter) for _ in documents]
        return lambda number, progress: files[number](progress)
