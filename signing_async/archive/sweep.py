"""Go over all signings of a tenant. The position in the list is saved, and an interrupted sweep resumes there."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TypeAlias

import attrs

from .. import telemetry
from ..bulk import Deferrals, ProgressReporter, log
from ..dispatch.entry import find_context
from ..dispatch.journal import Claim, ClaimLost
from ..errors import SigningError
from ..models import Signing, SigningState
from ..telemetry.names import ARCHIVE_SIGNINGS, SWEEP_SPAN
from ..transport.problems import one_line
from .collector import ArchiveResult, Collector

__all__ = ["Sweep"]


@attrs.define(eq=False)
class _Page:
    """A page of the list. ``unfinished`` counts its pending signings, plus one until the whole page is listed."""

    next_cursor: str | None
    unfinished: int = 1
    has_jobs: bool = False


_Job: TypeAlias = tuple[Signing, _Page]


class Sweep:
    """One sweep. It first resumes an interrupted sweep, then covers the rest of the list, from its start.

    The journal keeps the cursor of the first page that is not finished. Of several concurrent sweeps, only the holder
    of the claim saves its position.
    """

    def __init__(self, collector: Collector, matches: Callable[[Signing], bool], reporter: ProgressReporter) -> None:
        self._collector = collector
        self._matches = matches
        self._reporter = reporter
        self._claim: Claim | None = None
        self._saved: str | None = None
        self._context: str | None = None
        """The context of this sweep's span."""
        self._pages: deque[_Page] = deque()
        self._is_whole = False
        self.jobs: AsyncGenerator[_Job, None] = self._pull()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Hold the claim of the saved position."""
        journal, earlier = self._collector.journal, None
        try:
            self._claim = await journal.claim(f"archive-sweep:{self._collector.service}")
            if self._claim is not None and self._claim.state is not None:
                with suppress(ValueError, KeyError, TypeError):
                    cursor = json.loads(self._claim.state)["cursor"]
                    self._saved = cursor if isinstance(cursor, str) else None
                earlier = None if self._saved is None else find_context(self._claim.state)
            # The tasks of the workers inherit the current span.
            with telemetry.active(self._collector.telemetry).span(SWEEP_SPAN, links=[earlier]) as span:
                self._context = span.context
                yield
        finally:
            await self.jobs.aclose()
            if self._claim is not None:
                try:
                    if self._is_whole and not self._pages:
                        await self._save(None)
                finally:
                    await journal.release(self._claim)

    async def work(self, job: _Job) -> list[ArchiveResult]:
        """Archive the missing documents of a signing. If another run is working on it, wait for that run."""
        signing, page = job
        deferrals = Deferrals(f"signing {one_line(signing.id)}")
        while (results := await self._collector.collect(signing)) is None:
            await deferrals.wait()
        for result in results:
            if result.entry is not None:
                self._reporter.add(1, result.entry.size)
        await self._leave(page)
        return results

    async def _pull(self) -> AsyncGenerator[_Job, None]:
        await self._collector.manifest.refresh()
        start = self._saved
        if start is not None:
            try:
                async with aclosing(self._list(start)) as jobs:
                    async for job in jobs:
                        yield job
            except SigningError as error:
                if error.transient or error.client_wide:
                    raise
                # The cursor may have expired. A sweep from the start of the list covers all signings.
                log.info("cannot resume the sweep at its saved cursor, starting from the beginning: %s", error)
                start = None
        async with aclosing(self._list(None, until=start)) as jobs:
            async for job in jobs:
                yield job
        self._is_whole = True

    async def _list(self, start: str | None, until: str | None = None) -> AsyncGenerator[_Job, None]:
        async with aclosing(self._collector.api.signings.list(cursor=start).pages()) as pages:
            async for found in pages:
                page = _Page(found.next_cursor)
                self._pages.append(page)
                telemetry.active(self._collector.telemetry).record(ARCHIVE_SIGNINGS, len(found.items))
                for signing in found.items:
                    if self._is_due(signing):
                        page.unfinished += 1
                        page.has_jobs = True
                        yield signing, page
                await self._leave(page)
                if found.next_cursor == until:
                    return

    def _is_due(self, signing: Signing) -> bool:
        """Return whether the signing may have documents that are not archived."""
        if signing.state not in (SigningState.COMPLETED, SigningState.UNKNOWN) or self._collector.has_all(signing):
            return False
        return self._matches(signing)

    async def _leave(self, page: _Page) -> None:
        """Note that the page is listed, or that one of its signings is finished."""
        page.unfinished -= 1
        finished = []
        while self._pages and not self._pages[0].unfinished:
            finished.append(self._pages.popleft())
        # A page without jobs need not be saved: a resumed sweep reads it again quickly.
        if any(one.has_jobs for one in finished) and finished[-1].next_cursor is not None:
            await self._save(finished[-1].next_cursor)

    async def _save(self, cursor: str | None) -> None:
        if self._claim is not None and cursor != self._saved:
            self._saved = cursor
            # Another sweep may have taken over the claim: it saves its own position.
            with suppress(ClaimLost):
                state = {"cursor": cursor, "trace_context": self._context}
                await self._collector.journal.write(self._claim, json.dumps(state))
