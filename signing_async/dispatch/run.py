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
from ..worker_pool import Progress, Results, Teller
from .journal import Claim, ClaimLost, Journal, JournalError, SqliteJournal
from .package import NewRecipient, Prepared, SigningPackage, prepare
from .steps import Room, Sending, Steps, journaled

__all__ = ["DispatchResult", "Dispatcher", "NewRecipient", "SigningPackage"]

_UPLOADS = 8
_SOON, _LATER = 0.05, 1.0
_TOLD_AFTER = 4
_ASIDE = 4
_END: Any = object()


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
        kept = _Unwritten() if journal is None else _journal(journal)
        run = _Run(self._steps, [package], kept, kept is not journal, _UPLOADS, None)
        async with run.opened():
            result = await run.work(await anext(run.line))
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
        kept = _journal(journal)
        run = _Run(self._steps, packages, kept, kept is not journal, concurrency, on_progress)
        return Results(run.line, run.work, concurrency, around=run.opened())


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
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._steps = steps
        self._journal = journal
        self._is_own = is_own
        self._concurrency = concurrency
        self._meter = _Meter(on_progress)
        self.line: _Line = _Line(packages, concurrency, self._meter)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        self._room = Room(self._concurrency)
        try:
            yield
        finally:
            await self.line.aclose()
            if self._is_own:
                await self._journal.aclose()

    async def work(self, job: _Job) -> DispatchResult:
        """The result of this package; or, where another run is at work on it, of another one, and of this one later."""
        try:
            while True:
                result = await self._try(job)
                if result is not None:
                    return result
                job = await self.line.instead_of(job)
        except JournalError as error:
            self.line.stop(error)
            raise

    async def _try(self, job: _Job) -> DispatchResult | None:
        """The result; None where another run is at work on the package."""
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
            job.prepared = await prepare(job.package, self._steps.most)
            return job.prepared
        finally:
            job.share = self._meter.share(job.prepared)

    async def _send(self, job: _Job, prepared: Prepared, claim: Claim) -> DispatchResult | None:
        assert job.share is not None
        sending = Sending(self._steps, prepared, self._journal, claim, self._room, job.share)
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
        self.share: _Share | None = None
        self.tries = 0
        self.due = 0.0


class _Line:
    """The packages in the order in which they are to be worked on, pulled one by one.

    One that another run is at work on is put aside and comes again later, between others; there are never many aside.
    """

    def __init__(
        self, packages: Iterable[SigningPackage] | AsyncIterable[SigningPackage], concurrency: int, meter: _Meter
    ) -> None:
        self._packages = _each(packages)
        self._concurrency = concurrency
        self._meter = meter
        self._aside: list[_Job] = []
        self._exchanges = 0
        """Workers that wait for another package in the place of one that they have put aside."""
        self._pulling: asyncio.Task[Any] | None = None
        """Apart from those who wait for it, who have other work to do if it takes long."""
        self._is_over = False
        self._broken: BaseException | None = None
        self._failure: JournalError | None = None

    def __aiter__(self) -> _Line:
        return self

    async def __anext__(self) -> _Job:
        job = await self._next(for_exchange=False)
        if job is not None:
            return job
        raise StopAsyncIteration if self._broken is None else self._broken

    async def instead_of(self, job: _Job) -> _Job:
        """Put this one aside, and get one to work on: another one, or in the end the same again."""
        wait = min(_SOON * 2.0 ** min(job.tries, 20), _LATER) * random.uniform(0.5, 1.0)
        job.due = asyncio.get_running_loop().time() + wait
        job.tries += 1
        assert job.prepared is not None
        if job.tries == _TOLD_AFTER:
            log.info("package %r is waited for: another run is at work on it", job.prepared.key)
        self._aside.append(job)
        self._exchanges += 1
        try:
            other = await self._next(for_exchange=True)
        finally:
            self._exchanges -= 1
        assert other is not None
        return other

    def stop(self, failure: JournalError) -> None:
        """Give out nothing more."""
        self._failure = self._failure or failure

    async def aclose(self) -> None:
        for job in self._aside:
            assert job.prepared is not None
            job.prepared.close()
        if self._pulling is not None:
            self._pulling.cancel()
            await asyncio.gather(self._pulling, return_exceptions=True)
        await self._packages.aclose()

    async def _next(self, *, for_exchange: bool) -> _Job | None:
        while self._failure is None:
            # Of those aside each exchange has to find one.
            free = self._aside if for_exchange or len(self._aside) > self._exchanges else []
            first = min(free, key=lambda job: job.due, default=None)
            wait = None if first is None else max(0.0, first.due - asyncio.get_running_loop().time())
            if first is not None and not wait:
                self._aside.remove(first)
                return first
            if self._pulling is None and not self._is_over and len(self._aside) < _ASIDE * self._concurrency:
                self._pulling = asyncio.create_task(self._pull())
            if self._pulling is not None:
                await asyncio.wait([self._pulling], timeout=wait)
                job = self._pulled()
                if job is not None:
                    return job
            elif wait is None:
                return None
            else:
                await asyncio.sleep(wait)
        raise self._failure

    async def _pull(self) -> Any:
        return await anext(self._packages, _END)

    def _pulled(self) -> _Job | None:
        """What was pulled, if it is there and nobody else has taken it."""
        pulling = self._pulling
        if pulling is None or not pulling.done():
            return None
        self._pulling = None
        self._broken = pulling.exception()
        if self._broken is None and pulling.result() is not _END:
            self._meter.expect()
            return _Job(pulling.result())
        self._is_over = True
        if self._broken is None:
            self._meter.expect(-1)
        return None


async def _each(packages: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
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
