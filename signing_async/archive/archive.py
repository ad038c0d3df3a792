"""The archive of a tenant: sweep over all signings, follow their events, collect one."""

from __future__ import annotations

import asyncio
import fnmatch
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast
from weakref import WeakSet

from .. import _checks, telemetry
from .._api import Client
from ..bulk import Deferrals, Progress, ProgressReporter, Results, log
from ..dispatch.entry import NoJournal, open_journal
from ..dispatch.journal import Journal
from ..errors import ConfigurationError, DecodeError, InvalidRequest, SigningError
from ..models import Signing, SigningState
from ..signings import id_of, signing_path
from ..storage.journal import SqliteJournal
from ..telemetry.names import ARCHIVE_SIGNINGS, SWEEP_SPAN
from ..transport.problems import one_line
from .collector import ArchiveResult, Collector
from .manifest import ArchivedDocument, decode_line, read_lines
from .names import DEFAULT_TEMPLATE, Template
from .stores import ArchiveStore, FolderStore, as_store

if TYPE_CHECKING:
    from ..sealed import Trust
    from ..webhooks import Wakeups
    from ..webhooks.wakeups import Subscription

__all__ = ["Archive", "archive_one"]

_REQUESTED_SWEEP_DELAY = 1.0


class Archive:
    """An archive of the sealed PDFs of a tenant: each document of every completed signing, once.

    ``to`` is a folder or an `ArchiveStore`; ``journal`` is a path or a `Journal`, as for ``client.dispatch_many``. Any
    number of processes may share both. ``template`` names the files. A signing is archived if its name matches the
    pattern ``name`` (``*``, ``?``, ``[...]``), if it was updated at ``since`` or later (or within this timedelta), and
    if ``where`` returns true; ``where`` gets the signing as listed, perhaps without its documents. ``verify`` and
    ``trust`` are as for ``client.documents.download_signed``. Up to ``concurrency`` signings are archived at once. ::

        async with Archive(client, "archive/", journal="archive.db") as archive:
            async for result in archive.sweep():
                print(result.entry.path if result.error is None else result.error)
    """

    def __init__(
        self,
        client: Client,
        to: ArchiveStore | str | os.PathLike[str],
        *,
        journal: Journal | str | os.PathLike[str],
        template: str = DEFAULT_TEMPLATE,
        name: str | None = None,
        since: datetime | timedelta | None = None,
        where: Callable[[Signing], bool] | None = None,
        verify: bool = False,
        trust: Trust | Iterable[Trust] | None = None,
        concurrency: int = 8,
    ) -> None:
        _checks.integer("concurrency", concurrency)
        self._matches = _filter(name, since, where)
        self.store: ArchiveStore = as_store(to)
        self._concurrency = concurrency
        named, opened = Template(template), open_journal(journal)
        self._own_journal = opened if opened is not journal else None
        self._collector = Collector(client._api, self.store, opened, named, verify, trust)
        if isinstance(opened, SqliteJournal) and isinstance(self.store, FolderStore):
            _check_place(opened.path, self.store.path.resolve())
        self._results: WeakSet[Results[ArchiveResult]] = WeakSet()
        self._sweeps: set[asyncio.Task[Any]] = set()
        """The tasks of sweeps. The task of a dropped `Results` may still be running."""

    def __repr__(self) -> str:
        return f"Archive({self.store!r})"

    def sweep(self, on_progress: Callable[[Progress], None] | None = None) -> Results[ArchiveResult]:
        """Archive what is missing, over all signings; return an async iterator of results in completion order.

        The signings come in the order of the service's list. Documents that are archived already have no result. A
        document that fails is a result with an error; the sweep continues, and the next one tries the document again. A
        ``client_wide`` error stops the sweep: the store or the journal fails, or there is no token. ``on_progress``
        receives the documents and bytes archived so far; their totals are not known.
        """
        reporter = ProgressReporter(on_progress)

        async def work(signing: Signing) -> list[ArchiveResult]:
            results = await self._archive(signing)
            for result in results:
                if result.entry is not None:
                    reporter.add(1, result.entry.size)
            return results

        results: Results[ArchiveResult] = Results(
            self._missing(), work, self._concurrency, around=self._sweeping(), flat=True
        )
        self._results.add(results)
        return results

    async def collect(self, signing: str | Signing) -> tuple[ArchivedDocument, ...]:
        """Archive what is missing of one signing, and return the documents that were added.

        The tuple is empty if the signing is not completed, if it does not match the archive's filters, or if all were
        archived before. The first error is raised after all documents were tried, so that an inbox delivers the event
        again. If another run is working on the signing, the call waits for that run.
        """
        signing_path(signing)  # an invalid id raises before anything is read
        signing = Signing(signing) if isinstance(signing, str) else signing
        results = [] if await self._is_archived(signing) else await self._archive(signing)
        for result in results:
            if result.error is not None:
                raise result.error
        return tuple(result.entry for result in results if result.entry is not None)

    async def follow(
        self,
        wakeups: Wakeups | None = None,
        every: float = 300,
        on_result: Callable[[ArchiveResult], None] | None = None,
    ) -> None:
        """Keep archiving until the task is cancelled: sweep every ``every`` seconds, and collect what events name.

        With the ``wakeups`` of a webhook receiver, the signing of an event is collected at once, also during a sweep;
        a missed event costs no more than the time until the next sweep. An event that names no signing starts a sweep,
        a second later. ``on_result`` is called with each result. A sweep that fails with a transient error is
        logged, and the next one tries again; any other error is raised. ::

            wakeups = Wakeups()
            receiver = Receiver(WebhookVerifier(secret), wakeups.publish)
            await archive.follow(wakeups)
        """
        _checks.number("every", every, above=0, error=InvalidRequest)
        report, requested = on_result or (lambda result: None), asyncio.Event()
        with nullcontext() if wakeups is None else wakeups.subscribe() as subscription:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._sweep_repeatedly(every, requested, report))
                    if subscription is not None:
                        group.create_task(self._collect_events(subscription, requested, report))
            except BaseExceptionGroup as errors:
                failure = errors.exceptions[0]
        raise failure

    async def entries(self) -> AsyncIterator[ArchivedDocument]:
        """Iterate over the archived documents, in the order of the manifest; changed lines are skipped."""
        async for line in read_lines(self.store):
            try:
                document, _ = decode_line(line)
            except ValueError:
                continue
            yield document

    async def aclose(self) -> None:
        """Stop all sweeps, remove old incomplete downloads, and close the journal unless it is the caller's."""
        for results in list(self._results):
            await results.aclose()
        if self._sweeps:
            await asyncio.wait(self._sweeps)
        try:
            await self._collector.remove_old_leftovers()
        finally:
            if self._own_journal is not None:
                await self._own_journal.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @asynccontextmanager
    async def _sweeping(self) -> AsyncIterator[None]:
        """Keep the task of a sweep in ``_sweeps`` until it ends, with a span."""
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._sweeps.add(task)
        task.add_done_callback(self._sweeps.discard)
        # The tasks of the workers inherit the current span.
        with telemetry.active(self._collector.api.telemetry).span(SWEEP_SPAN):
            yield

    async def _missing(self) -> AsyncGenerator[Signing, None]:
        """Yield the listed signings that match, and of which documents are missing."""
        manifest, api = self._collector.manifest, self._collector.api
        await manifest.refresh()
        async with aclosing(api.signings.list().pages()) as pages:
            async for page in pages:
                telemetry.active(api.telemetry).record(ARCHIVE_SIGNINGS, len(page.items))
                for signing in page.items:
                    may_be_completed = signing.state in (SigningState.COMPLETED, SigningState.UNKNOWN)
                    if may_be_completed and self._matches(signing) and not manifest.is_complete(api.origin, signing.id):
                        yield signing

    async def _sweep_repeatedly(
        self, every: float, requested: asyncio.Event, report: Callable[[ArchiveResult], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + every
            requested.clear()
            with _transient_errors_logged():
                async with self.sweep() as results:
                    async for result in results:
                        report(result)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await requested.wait()
                    await asyncio.sleep(_REQUESTED_SWEEP_DELAY)

    async def _collect_events(
        self, subscription: Subscription, requested: asyncio.Event, report: Callable[[ArchiveResult], None]
    ) -> None:
        while await subscription.wait():
            if None in subscription.signings:
                requested.set()
            for signing in subscription.signings - {None}:
                with _transient_errors_logged():
                    found = Signing(str(signing))
                    is_archived = await self._is_archived(found)
                    # A signing that another run works on is left to that run: other events must not wait.
                    for result in () if is_archived else await self._collector.collect(found, self._matches) or ():
                        report(result)

    async def _is_archived(self, signing: Signing) -> bool:
        await self._collector.manifest.refresh()
        return self._collector.manifest.is_complete(self._collector.service, signing.id)

    async def _archive(self, signing: Signing) -> list[ArchiveResult]:
        """Archive what is missing of a signing if it matches. If another run is working on it, wait for that run."""
        deferrals = Deferrals(f"signing {one_line(signing.id)}")
        while (results := await self._collector.collect(signing, self._matches)) is None:
            await deferrals.wait()
            await self._collector.manifest.refresh()
        return results


async def archive_one(
    client: Client,
    signing: str | Signing,
    to: ArchiveStore | str | os.PathLike[str],
    journal: Journal | str | os.PathLike[str] | None,
    *,
    template: str | None,
    verify: bool,
    trust: Trust | Iterable[Trust] | None,
) -> tuple[ArchivedDocument, ...]:
    """Archive the documents of one signing; return them all. See `SigningClient.archive`."""
    given = NoJournal() if journal is None else journal
    named = DEFAULT_TEMPLATE if template is None else template
    async with Archive(client, to, journal=given, template=named, verify=verify, trust=trust) as archive:
        await archive.collect(signing)
        wanted = (client._api.origin, id_of(signing))
        return tuple([entry async for entry in archive.entries() if (entry.service, entry.signing) == wanted])


def _filter(
    name: str | None, since: datetime | timedelta | None, where: Callable[[Signing], bool] | None
) -> Callable[[Signing], bool]:
    """Return a function that decides which signings to archive."""
    if name is not None and not isinstance(name, str):
        raise ConfigurationError(f"name: must be a pattern such as 'Lease *', got {name!r}")
    if since is not None and not isinstance(since, timedelta) and not _checks.is_aware(since):
        raise ConfigurationError(f"since: must be a datetime with a time zone, or a timedelta, got {since!r}")
    if where is not None and not callable(where):
        raise ConfigurationError(f"where: must be callable, got {where!r}")

    def matches(signing: Signing) -> bool:
        earliest = datetime.now(UTC) - since if isinstance(since, timedelta) else since
        # A signing whose date is unknown is archived rather than missed.
        is_recent = earliest is None or signing.updated_at is None or signing.updated_at >= earliest
        is_named = name is None or fnmatch.fnmatchcase(signing.name, name)
        return is_recent and is_named and (where is None or bool(where(signing)))

    return matches


def _check_place(journal: Path, root: Path) -> None:
    """Create the folder of a journal inside the archive; refuse a journal that would count as an archived file."""
    if journal.is_relative_to(root):
        if not any(part.startswith(".") for part in journal.relative_to(root).parts):
            problem = "is in the archive: choose another folder, or a name that begins with a dot"
            raise ConfigurationError(f"journal: {journal} {problem}")
        with suppress(OSError):  # without its folder, the journal raises an error
            journal.parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def _transient_errors_logged() -> Iterator[None]:
    try:
        yield
    except SigningError as error:
        # A list that cannot be decoded may be a page of a proxy, such as one for maintenance.
        if not error.transient and not isinstance(error, DecodeError):
            log.error("archiving ends: %s", error)  # `follow` raises it
            raise
        log.warning("archiving continues after: %s", error)
