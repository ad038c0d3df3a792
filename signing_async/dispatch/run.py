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
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING, TypeAlias

import attrs

from .. import _checks, telemetry
from .._api import Api
from ..bulk import Deferrals, FileProgress, Progress, ProgressReporter, Results, copy_unsent, iterate
from ..errors import Flags, InvalidRequest, OutcomeUnknown, SigningError, amended
from ..models import NewRecipient, Signing
from ..telemetry.names import DISPATCH_SPAN, OUTCOME, PACKAGE_NUMBER, PACKAGE_SPAN, SIGNING_ID
from ..transport.operation import log
from .entry import Entry, GuardedJournal, NoJournal, open_journal
from .journal import ClaimLost, Journal, JournalError
from .package import CheckedPdf, Prepared, SigningPackage, prepare
from .send import Uploads, send_package

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
    run = _Run(api, NoJournal() if journal is None else journal, _MAX_UPLOADS, ordered, None)
    async with run.opened():
        result = await run.work((0, package))
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
    run = _Run(api, journal, concurrency, ordered, on_progress)
    return Results(run.number(packages), run.work, concurrency, around=run.opened())


class _Run:
    """One run over packages, with one journal."""

    def __init__(
        self,
        api: Api,
        journal: Journal | str | os.PathLike[str],
        concurrency: int,
        ordered: bool,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._api = api
        self._reporter = ProgressReporter(on_progress)
        self._raw_journal = open_journal(journal)
        self._is_own_journal = self._raw_journal is not journal
        self._has_journal = not isinstance(journal, NoJournal)
        self._journal = GuardedJournal(self._raw_journal, telemetry=api.telemetry and self._has_journal)
        self._concurrency = 1 if ordered else concurrency
        self._ordered = ordered
        self._free_uploads = asyncio.Semaphore(concurrency)
        self._unprepared = 1
        """The packages that are not prepared yet; the end of the packages counts as one more."""
        self._files = self._bytes = 0
        self._without_key: dict[str, int] = {}
        """The numbers of this run's packages without a key, by the hash of their content."""
        self._ended_by: SigningError | None = None
        """The error after which nothing more is sent."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Close the journal at the end of the block, if it is this run's own."""
        try:
            # The tasks of the workers inherit the current span.
            with telemetry.active(self._api.telemetry).span(DISPATCH_SPAN):
                yield
        finally:
            if self._is_own_journal:
                await self._raw_journal.aclose()

    async def number(
        self, packages: Iterable[SigningPackage] | AsyncIterable[SigningPackage]
    ) -> AsyncIterator[tuple[int, SigningPackage]]:
        """Yield the packages with their numbers."""
        number = 0
        async for package in iterate(packages):
            self._unprepared += 1
            yield number, package
            number += 1
        self._count(())

    def _count(self, documents: Sequence[CheckedPdf]) -> None:
        """Count the documents of a prepared package, none if it is invalid. The end of the packages counts too."""
        self._unprepared -= 1
        self._files += len(documents)
        self._bytes += sum(document.size for document in documents)
        if not self._unprepared:
            self._reporter.files_total, self._reporter.bytes_total = self._files, self._bytes
            # If the end is reached after the last upload, only this reports the totals.
            self._reporter.add(0, 0)

    async def work(self, numbered: tuple[int, SigningPackage]) -> DispatchResult:
        """Return the result of a package. If another run is working on it, wait for that run."""
        number, package = numbered
        documents: Sequence[CheckedPdf] = ()
        try:
            if self._ended_by is not None:
                raise copy_unsent(self._ended_by)
            prepared = await prepare(package, self._api.transport.options.assumptions.max_pdf_bytes)
            first = number if package.key is not None else self._without_key.setdefault(prepared.content, number)
            if first != number:
                prepared.close()
                problem = f"key: missing, and packages[{number}] is the same package as packages[{first}]"
                raise InvalidRequest(f"{problem}; if both are to be sent, give each a key")
            documents = prepared.documents
        except Exception as error:
            return DispatchFailure(package, None, error)
        finally:
            self._count(documents)
        files = [FileProgress(self._reporter) for _ in documents]
        uploads = Uploads(files, self._ordered, self._concurrency, self._free_uploads)
        deferrals = Deferrals(f"package {prepared.label}")
        try:
            with closing(prepared):
                while (result := await self._attempt(number, package, prepared, uploads)) is None:
                    await deferrals.wait()
        except SigningError as error:
            self._ended_by = error
            raise
        if result.error is not None and package.key is None:
            # The caller can repeat the package.
            del self._without_key[prepared.content]
        return result

    async def _attempt(
        self, number: int, package: SigningPackage, prepared: Prepared, uploads: Uploads
    ) -> DispatchResult | None:
        """Send the package under its claim; return None if another run holds the claim, or takes it."""
        if self._ended_by is not None:
            return DispatchFailure(package, None, copy_unsent(self._ended_by))
        try:
            claim = await self._journal.claim(prepared.key)
        except SigningError as error:
            if error.client_wide:
                raise
            return DispatchFailure(package, None, error)
        if claim is None:
            return None
        entry = Entry(self._api, prepared, self._journal, claim)
        with telemetry.active(self._api.telemetry).span(PACKAGE_SPAN, {PACKAGE_NUMBER: number}) as span:
            try:
                result = await self._send(package, entry, uploads)
            except ClaimLost as error:
                log.warning("%s", error)
                span.set({OUTCOME: "deferred"})
                return None
            finally:
                await self._journal.release(claim)
            span.set({SIGNING_ID: entry.state.signing})
            if result.error is not None:
                span.fail(result.error)
            return result

    async def _send(self, package: SigningPackage, entry: Entry, uploads: Uploads) -> DispatchResult:
        """Return the result of a claimed package. Raise an error that ends the run, and `ClaimLost`."""
        try:
            signing, sent_earlier = await send_package(self._api, entry, uploads)
            return DispatchSuccess(package, signing, tuple(entry.state.abandoned), sent_earlier)
        except ClaimLost:
            raise
        except Exception as caught:
            error = caught
        if isinstance(error, JournalError) and error.client_wide:
            raise error
        # From the journal the next run knows what is ambiguous, and reads the service first. Without a journal the next
        # call would make another draft.
        if isinstance(error, SigningError) and error.effect == "unknown":
            flags: Flags = {}
            if self._has_journal:
                flags = {"transient": error.may_clear} if isinstance(error, OutcomeUnknown) else {}
            elif error.transient:
                flags = {"transient": False, "client_wide": False}  # other calls may succeed later: it is not fatal
            error = amended(error, **flags).with_traceback(error.__traceback__)
        await entry.note_failure(error)
        if isinstance(error, SigningError) and error.fatal:
            self._ended_by = error
        draft = None if entry.state.signing is None else entry.describe()
        return DispatchFailure(package, draft, error, tuple(entry.state.abandoned))
