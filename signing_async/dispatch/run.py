"""Dispatch packages: one or thousands, each sent once, however often a run is killed and repeated.

Each step is saved to the journal before it begins and after its outcome is known. A later run, after a crash at any
moment, therefore knows what may have happened. A draft with a step of unknown outcome is abandoned, and another one is
created: a spare draft notifies nobody. Only the sending is never repeated with another draft; the service sends a
signing once. The sending is saved first, which the journal refuses unless this run holds the package's claim.
"""

from __future__ import annotations

import asyncio
import itertools
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
from ..worker_pool import Progress, Results, Teller
from .entry import JournalEntry, journaled
from .journal import Claim, ClaimLost, Journal, JournalError, SqliteJournal
from .package import NewRecipient, Prepared, SigningPackage, prepare
from .steps import Resources, Sending, Uploads

__all__ = ["DispatchResult", "Dispatcher", "NewRecipient", "SigningPackage"]

_MAX_UPLOADS = 8
_FIRST_PAUSE, _MAX_PAUSE = 0.05, 1.0
_TRIES_BEFORE_LOG = 4
_POSTPONED_PER_WORKER = 4
_END: Any = object()


@attrs.frozen
class DispatchResult:
    """The result of one package. ``error`` is None if it was sent, by this run or an earlier one.

    ``signing`` is the signing as sent; with an error, what is known of the draft. ``abandoned`` are the ids of drafts that
    were given up for another one, by this run or an earlier one: they stay at the service, unsent.
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
        opened = _NoJournal() if journal is None else _open_journal(journal)
        run = _Run(self._resources, [package], opened, opened is not journal, _MAX_UPLOADS, ordered, None)
        async with run.opened():
            result = await run.work(await anext(run.queue))
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
        opened = _open_journal(journal)
        run = _Run(self._resources, packages, opened, opened is not journal, concurrency, ordered, on_progress)
        return Results(run.queue, run.work, concurrency, around=run.opened())


def _open_journal(journal: Any) -> Journal:
    """Return the journal; a new `SqliteJournal` if it is a path, which the run closes."""
    if isinstance(journal, str | os.PathLike):
        return SqliteJournal(journal)
    if not all(callable(getattr(journal, name, None)) for name in ("claim", "write", "release")):
        raise InvalidRequest(f"journal: must be a path or a Journal, got {journal!r}")
    callers: Journal = journal
    return callers


class _NoJournal:
    """The journal of one call that has none: the state ends with the call."""

    async def claim(self, key: str) -> Claim | None:
        return Claim(key, None, 1)

    async def write(self, claim: Claim, state: str) -> None: ...

    async def release(self, claim: Claim) -> None: ...

    async def aclose(self) -> None: ...


class _Run:
    """One run over packages, with one journal."""

    _uploads: Uploads

    def __init__(
        self,
        resources: Resources,
        packages: Iterable[SigningPackage] | AsyncIterable[SigningPackage],
        journal: Journal,
        is_own_journal: bool,
        concurrency: int,
        ordered: bool,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._resources = resources
        self._journal = journal
        self._is_own_journal = is_own_journal
        self._concurrency = concurrency
        self._ordered = ordered
        self._meter = _Meter(on_progress)
        self.queue: _Queue = _Queue(packages, concurrency, self._meter)
        self._without_key: dict[bytes, int] = {}
        """The numbers of this run's packages without a key, by the hash of their content."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        self._uploads = Uploads(self._concurrency, ordered=self._ordered)
        try:
            yield
        finally:
            await self.queue.aclose()
            if self._is_own_journal:
                await self._journal.aclose()

    async def work(self, job: _Job) -> DispatchResult:
        """Return the result of this package; or of another one, if another run is working on this package."""
        try:
            while True:
                result = await self._try(job)
                if result is not None:
                    self._note_result(job, result)
                    return result
                job = await self.queue.exchange(job)
        except JournalError as error:
            self.queue.stop(error)
            raise

    async def _try(self, job: _Job) -> DispatchResult | None:
        """Return the result; None if another run is working on the package."""
        try:
            prepared = await self._prepared(job)
        except Exception as error:
            return DispatchResult(job.package, None, error)
        try:
            claim = await journaled(self._journal.claim(prepared.key))
            result = None if claim is None else await self._send(job, prepared, claim)
        except BaseException:
            prepared.close()
            raise
        if result is not None:
            prepared.close()
        return result

    async def _prepared(self, job: _Job) -> Prepared:
        if job.prepared is not None:
            return job.prepared
        try:
            prepared = await prepare(job.package, self._resources.max_pdf_bytes)
            self._check_distinct(job, prepared)
            job.prepared = prepared
            return prepared
        finally:
            job.share = self._meter.share(job.prepared)

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

    def _note_result(self, job: _Job, result: DispatchResult) -> None:
        """Let the caller repeat a package without a key that failed."""
        if result.error is not None and job.prepared is not None and job.package.key is None:
            del self._without_key[bytes.fromhex(job.prepared.content)]

    async def _send(self, job: _Job, prepared: Prepared, claim: Claim) -> DispatchResult | None:
        assert job.share is not None
        entry = JournalEntry(self._journal, claim, prepared.content, self._resources.service)
        sending = Sending(self._resources, prepared, entry, self._uploads, job.share)
        try:
            return DispatchResult(job.package, await sending.run(), None, sending.abandoned)
        except ClaimLost as error:
            log.warning("%s", error)
            return None
        except JournalError:
            raise
        except Exception as error:
            return await self._note_failure(sending, job, error)
        finally:
            await self._release(claim)

    async def _note_failure(self, sending: Sending, job: _Job, error: Exception) -> DispatchResult | None:
        try:
            await sending.note_failure(error)
        except ClaimLost as lost:
            log.warning("%s", lost)
            return None
        return DispatchResult(job.package, sending.known_signing(), error, sending.abandoned)

    async def _release(self, claim: Claim) -> None:
        """Release the claim, even if the run is cancelled or the journal has failed."""
        releasing = asyncio.ensure_future(journaled(self._journal.release(claim)))
        try:
            await asyncio.shield(releasing)
        except ClaimLost:
            pass
        except JournalError as error:
            log.warning("%s", error)


class _Job:
    """A package from when it is pulled until its result."""

    def __init__(self, number: int, package: SigningPackage) -> None:
        self.number = number
        self.package = package
        self.prepared: Prepared | None = None
        self.share: _Share | None = None
        self.tries = 0
        self.due = 0.0


class _Queue:
    """The packages, pulled one by one as workers need them.

    A package that another run is working on is postponed: it is tried again later, between others. The number of
    postponed packages is bounded.
    """

    def __init__(
        self, packages: Iterable[SigningPackage] | AsyncIterable[SigningPackage], concurrency: int, meter: _Meter
    ) -> None:
        self._packages = _as_generator(packages)
        self._concurrency = concurrency
        self._meter = meter
        self._numbers = itertools.count()
        self._postponed: list[_Job] = []
        self._exchanges = 0
        """Workers that have postponed a package, and wait for another one."""
        self._pulling: asyncio.Task[Any] | None = None
        """A task of its own: workers have other packages to try if it takes long."""
        self._is_exhausted = False
        self._iterable_error: BaseException | None = None
        self._failure: JournalError | None = None

    def __aiter__(self) -> _Queue:
        return self

    async def __anext__(self) -> _Job:
        job = await self._next(for_exchange=False)
        if job is not None:
            return job
        raise StopAsyncIteration if self._iterable_error is None else self._iterable_error

    async def exchange(self, job: _Job) -> _Job:
        """Postpone this package, and return one to work on: another one, or later the same one."""
        pause = min(_FIRST_PAUSE * 2.0 ** min(job.tries, 20), _MAX_PAUSE) * random.uniform(0.5, 1.0)
        job.due = asyncio.get_running_loop().time() + pause
        job.tries += 1
        assert job.prepared is not None
        if job.tries == _TRIES_BEFORE_LOG:
            log.info("waiting for package %s: another run is working on it", job.prepared.label)
        self._postponed.append(job)
        self._exchanges += 1
        try:
            other = await self._next(for_exchange=True)
        finally:
            self._exchanges -= 1
        assert other is not None
        return other

    def stop(self, failure: JournalError) -> None:
        """Give out no more packages."""
        self._failure = self._failure or failure

    async def aclose(self) -> None:
        for job in self._postponed:
            assert job.prepared is not None
            job.prepared.close()
        if self._pulling is not None:
            self._pulling.cancel()
            await asyncio.gather(self._pulling, return_exceptions=True)
        await self._packages.aclose()

    async def _next(self, *, for_exchange: bool) -> _Job | None:
        while self._failure is None:
            # Each exchange must find a postponed package: other workers leave as many as there are exchanges.
            free = self._postponed if for_exchange or len(self._postponed) > self._exchanges else []
            first = min(free, key=lambda job: job.due, default=None)
            pause = None if first is None else max(0.0, first.due - asyncio.get_running_loop().time())
            if first is not None and not pause:
                self._postponed.remove(first)
                return first
            may_pull = len(self._postponed) < _POSTPONED_PER_WORKER * self._concurrency
            if self._pulling is None and not self._is_exhausted and may_pull:
                self._pulling = asyncio.create_task(self._pull())
            if self._pulling is not None:
                await asyncio.wait([self._pulling], timeout=pause)
                job = self._take_pulled()
                if job is not None:
                    return job
            elif pause is None:
                return None
            else:
                await asyncio.sleep(pause)
        raise self._failure

    async def _pull(self) -> Any:
        return await anext(self._packages, _END)

    def _take_pulled(self) -> _Job | None:
        """Return the package that was pulled, unless the pull is under way or another worker took the package."""
        pulling = self._pulling
        if pulling is None or not pulling.done():
            return None
        self._pulling = None
        self._iterable_error = pulling.exception()
        if self._iterable_error is None and pulling.result() is not _END:
            self._meter.expect()
            return _Job(next(self._numbers), pulling.result())
        self._is_exhausted = True
        if self._iterable_error is None:
            self._meter.expect(-1)
        return None


async def _as_generator(packages: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    if isinstance(packages, AsyncIterable):
        async for package in packages:
            yield package
    else:
        for package in packages:
            yield package


class _Meter:
    """How far a whole run is: of the documents of all packages how many, and how many bytes, are uploaded."""

    def __init__(self, listener: Callable[[Progress], None] | None) -> None:
        self._teller = Teller(listener)
        # The end of the line is one that is not known yet.
        self._unknown = 1
        self._done = [0, 0]
        self._total = [0, 0]

    def expect(self, packages: int = 1) -> None:
        """So many packages more, or fewer, whose documents are not known yet."""
        self._unknown += packages
        self._tell_when_known()

    def share(self, prepared: Prepared | None) -> _Share:
        """The part of one of them; of one that is no good there are no documents."""
        self._unknown -= 1
        share = _Share(self, () if prepared is None else [kept.size for kept in prepared.documents])
        self._total[0] += len(share.sizes)
        self._total[1] += sum(share.sizes)
        self._tell_when_known()
        return share

    def _tell_when_known(self) -> None:
        """The end may be found after the last upload."""
        if not self._unknown:
            self.move(0, 0)

    def move(self, files: int, size: int) -> None:
        self._done[0] += files
        self._done[1] += size
        known = not self._unknown
        files_total, bytes_total = self._total if known else (None, None)
        self._teller.tell(Progress(self._done[0], files_total, self._done[1], bytes_total))


class _Share:
    """How far the documents of one package are."""

    def __init__(self, meter: _Meter, sizes: Sequence[int]) -> None:
        self._meter = meter
        self.sizes = sizes
        self._done = [(0, 0) for _ in sizes]

    def __call__(self, number: int, progress: Progress) -> None:
        before, now = self._done[number], (progress.files_done, progress.bytes_done)
        if before != now:
            self._done[number] = now
            self._meter.move(now[0] - before[0], now[1] - before[1])
