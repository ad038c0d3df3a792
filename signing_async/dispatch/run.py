"""Dispatch packages: one or thousands, each sent once, however often a run is killed and repeated.

Each step is saved to the journal before it begins and after its outcome is known. A later run, after a crash at any
moment, therefore knows what may have happened. A draft with a step of unknown outcome is abandoned, and another one is
created: a spare draft sends no notifications. Once the send request may have taken effect, no other draft is created:
the service sends a signing once. The status is saved before that request; the journal refuses the write if the run has
lost its claim.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from .. import _checks, telemetry
from .._api import Api
from ..bulk import Deferrals, FileProgress, Progress, ProgressReporter, Results, copy_unsent
from ..errors import InvalidRequest, OutcomeUnknown, SigningError, amended
from ..models import Signing
from ..telemetry.names import DISPATCH_SPAN, OUTCOME, PACKAGE_NUMBER, PACKAGE_SPAN, SIGNING_ID
from ..transport.operation import log
from .entry import GuardedJournal, JournalEntry, NoJournal, find_context, open_journal
from .journal import ClaimLost, Journal, JournalError
from .package import CheckedPdf, NewRecipient, Prepared, SigningPackage, prepare
from .send import OnProgress, Uploads, send_package

__all__ = ["DispatchResult", "NewRecipient", "SigningPackage", "dispatch_many", "dispatch_one"]

_MAX_UPLOADS = 8


if TYPE_CHECKING:

    class _Result: ...

    # Type checkers narrow the union by `result.error is None`.
    DispatchResult: TypeAlias = "DispatchSuccess | DispatchFailure"
else:

    class DispatchResult:
        """The result of one package: its signing, or an error."""

        __slots__ = ()

    _Result = DispatchResult


@attrs.frozen
class DispatchSuccess(_Result):
    """A package that was sent."""

    package: SigningPackage
    signing: Signing
    """The signing as sent."""
    abandoned: tuple[str, ...] = ()
    """The ids of drafts that this run or an earlier one abandoned: they stay at the service, unsent."""
    sent_earlier: bool = False
    """Whether the package was found sent, instead of being sent by this call."""
    error: None = None


@attrs.frozen
class DispatchFailure(_Result):
    """A package that was not sent, or whose outcome is unknown."""

    package: SigningPackage
    signing: Signing | None
    """What is known of the draft."""
    error: Exception
    abandoned: tuple[str, ...] = ()
    """The ids of drafts that this run or an earlier one abandoned: they stay at the service, unsent."""
    sent_earlier: bool = False


async def dispatch_one(
    api: Api, package: SigningPackage, journal: Journal | str | os.PathLike[str] | None, ordered: bool
) -> Signing:
    """Send one package. If another run is working on it, wait for that run."""
    run = _Run(api, [package], NoJournal() if journal is None else journal, _MAX_UPLOADS, ordered, None)
    async with run.opened():
        result = await run.work(await anext(run.packages))
        if result.error is not None:
            raise result.error
        return result.signing


def dispatch_many(
    api: Api,
    packages: Iterable[SigningPackage] | AsyncIterable[SigningPackage],
    journal: Journal | str | os.PathLike[str],
    concurrency: int,
    on_progress: Callable[[Progress], None] | None,
    ordered: bool,
) -> Results[DispatchResult]:
    """Send packages, ``concurrency`` at a time."""
    if not isinstance(packages, Iterable | AsyncIterable):
        raise InvalidRequest(f"packages: must be an iterable of SigningPackage, got {type(packages).__name__}")
    _checks.integer("concurrency", concurrency, error=InvalidRequest)
    run = _Run(api, packages, journal, concurrency, ordered, on_progress)
    return Results(run.packages, run.work, concurrency, around=run.opened())


class _Run:
    """One run over packages, with one journal."""

    def __init__(
        self,
        api: Api,
        packages: Iterable[SigningPackage] | AsyncIterable[SigningPackage],
        journal: Journal | str | os.PathLike[str],
        concurrency: int,
        ordered: bool,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._api = api
        self._reporter = ProgressReporter(on_progress)
        self._journal = open_journal(journal)
        self._is_own_journal = self._journal is not journal
        self._is_kept = not isinstance(journal, NoJournal)
        self._guarded = GuardedJournal(self._journal, telemetry=api.telemetry and self._is_kept)
        self._uploads = Uploads(concurrency, ordered=ordered)
        self.packages: AsyncGenerator[tuple[int, SigningPackage], None] = self._pull(packages)
        self._pulled = 0
        # The end of the packages counts as one more package.
        self._unprepared = 1
        self._files = self._bytes = 0
        self._without_key: dict[str, int] = {}
        """The numbers of this run's packages without a key, by the hash of their content."""
        self._fatal: SigningError | None = None
        """The error after which nothing more is sent."""
        self._failure: SigningError | None = None
        """The error that ends the run: it ends the wait for other runs, too."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        try:
            # The tasks of the workers inherit the current span.
            with telemetry.active(self._api.telemetry).span(DISPATCH_SPAN):
                yield
        finally:
            await self.packages.aclose()
            if self._is_own_journal:
                await self._journal.aclose()

    async def _pull(self, packages: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[tuple[int, Any], None]:
        if isinstance(packages, AsyncIterable):
            async for package in packages:
                yield self._number(package)
        else:
            for package in packages:
                yield self._number(package)
        self._count(())

    def _number(self, package: Any) -> tuple[int, Any]:
        self._pulled += 1
        self._unprepared += 1
        return self._pulled - 1, package

    def _count(self, documents: Sequence[CheckedPdf]) -> OnProgress:
        """Count the documents of a package, and return the progress callback of their uploads.

        An invalid package, and the end of the packages, count without documents. Totals are reported once all packages
        are prepared.
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

    async def work(self, numbered: tuple[int, SigningPackage]) -> DispatchResult:
        """Return the result of a package. If another run is working on it, wait for that run."""
        number, package = numbered
        documents: Sequence[CheckedPdf] = ()
        try:
            if self._fatal is not None:
                return DispatchFailure(package, None, copy_unsent(self._fatal))
            prepared = await self._prepare(number, package)
            documents = prepared.documents
        except Exception as error:
            return DispatchFailure(package, None, error)
        finally:
            on_progress = self._count(documents)
        deferrals = Deferrals(f"package {prepared.label}")
        try:
            with closing(prepared):
                while (result := await self._attempt(number, package, prepared, on_progress)) is None:
                    await deferrals.wait()
                    if self._failure is not None:
                        raise copy_unsent(self._failure)
        except SigningError as error:
            self._failure = error
            raise
        if result.error is not None and package.key is None:
            # The caller can repeat the package.
            del self._without_key[prepared.content]
        return result

    async def _prepare(self, number: int, package: SigningPackage) -> Prepared:
        """Check a package. Without a key, it must differ from the earlier ones of this run."""
        prepared = await prepare(package, self._api.transport.options.assumptions.max_pdf_bytes)
        first = number if package.key is not None else self._without_key.setdefault(prepared.content, number)
        if first != number:
            prepared.close()
            raise InvalidRequest(
                f"key: missing, and packages[{number}] is the same package as packages[{first}];"
                " if both are to be sent, give each a key"
            )
        return prepared

    async def _attempt(
        self, number: int, package: SigningPackage, prepared: Prepared, on_progress: OnProgress
    ) -> DispatchResult | None:
        """Send the package under its claim; return None if another run holds the claim, or takes it."""
        if self._fatal is not None:
            return DispatchFailure(package, None, copy_unsent(self._fatal))
        try:
            claim = await self._guarded.claim(prepared.key)
        except SigningError as error:
            if error.client_wide:
                raise
            return DispatchFailure(package, None, error)
        if claim is None:
            return None
        recorder, links = telemetry.active(self._api.telemetry), [find_context(claim.state)]
        with recorder.span(PACKAGE_SPAN, {PACKAGE_NUMBER: number}, links=links) as span:
            entry = JournalEntry(self._guarded, claim, prepared, self._api, span.context)
            try:
                result = await self._send(package, prepared, entry, on_progress)
            except ClaimLost as error:
                log.warning("%s", error)
                span.set({OUTCOME: "deferred"})
                return None
            finally:
                await self._guarded.release(claim)
            span.set({SIGNING_ID: None if result.signing is None else result.signing.id})
            if result.error is not None:
                span.fail(result.error)
            return result

    async def _send(
        self, package: SigningPackage, prepared: Prepared, entry: JournalEntry, on_progress: OnProgress
    ) -> DispatchResult:
        try:
            signing, sent_earlier = await send_package(self._api, prepared, entry, self._uploads, on_progress)
            return DispatchSuccess(package, signing, entry.abandoned, sent_earlier)
        except ClaimLost:
            raise
        except BaseException as error:
            entry.add_notes(error)
            if not isinstance(error, Exception) or (isinstance(error, JournalError) and error.client_wide):
                raise
            failure = error
        if isinstance(failure, OutcomeUnknown) and self._is_kept:
            # The next run knows from the journal what is ambiguous, and reads the service first.
            failure = amended(failure, transient=failure.may_clear).with_traceback(failure.__traceback__)
        try:
            await entry.note_failure(failure)
        except SigningError as error:
            if error.client_wide:
                raise
            log.warning("%s", error)
        if isinstance(failure, SigningError) and failure.fatal:
            self._fatal = failure
        return DispatchFailure(package, entry.known_signing() if entry.has_signing else None, failure, entry.abandoned)
