"""The archive of a tenant: sweep over all signings, follow their events, collect one."""

from __future__ import annotations

import asyncio
import fnmatch
import os
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

from .. import _checks
from .._api import Client
from .._files import is_transient
from ..bulk import Deferrals, Progress, ProgressReporter, Results, log
from ..dispatch.entry import NoJournal, open_journal
from ..dispatch.journal import Journal
from ..errors import ArchiveError, ConfigurationError, InvalidRequest, SigningError
from ..models import Signing
from ..signings import id_of, signing_path
from ..storage.journal import SqliteJournal
from ..transport.problems import one_line
from .collector import ArchiveResult, Collector, Judgement
from .manifest import MANIFEST, ArchivedDocument, decode_line, split_lines
from .names import DEFAULT_TEMPLATE, Template
from .stores import ArchiveStore, FolderStore, as_store, make_folders
from .sweep import Sweep

if TYPE_CHECKING:
    from ..sealed import Trust
    from ..webhooks import Wakeups
    from ..webhooks.wakeups import Subscription

__all__ = ["Archive", "archive_one"]

_REQUESTED_SWEEP_PAUSE = 5.0


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
        self._matches = _Filter(name, since, where)
        judgement = Judgement.by(verify, trust)
        self.store: ArchiveStore = as_store(to)
        self._concurrency = concurrency
        named = Template(template)
        opened = open_journal(journal)
        self._own_journal = opened if opened is not journal else None
        _check_place(opened, self.store)
        self._collector = Collector(client._api, self.store, opened, named, judgement)
        self._sweeps: WeakSet[Results[ArchiveResult]] = WeakSet()
        self._sweeping: set[asyncio.Task[Any]] = set()
        """The tasks of sweeps. The task of a dropped `Results` may still be running."""

    def __repr__(self) -> str:
        return f"Archive({self.store!r})"

    def sweep(self, on_progress: Callable[[Progress], None] | None = None) -> Results[ArchiveResult]:
        """Archive what is missing, over all signings; return an async iterator of results in completion order.

        The rest of an interrupted sweep comes first, then all signings in the order of the service's list. Documents
        that are archived already have no result. A document that fails is a result with an error; the sweep continues,
        and the next one tries the document again. A ``client_wide`` error stops the sweep: the store or the journal
        fails, or there is no token. ``on_progress`` receives the documents and bytes archived so far; their totals are
        not known.
        """
        sweep = Sweep(self._collector, self._matches, ProgressReporter(on_progress))
        results: Results[ArchiveResult] = Results(
            sweep.jobs, sweep.work, self._concurrency, around=self._tracked(sweep), flat=True
        )
        self._sweeps.add(results)
        return results

    async def collect(self, signing: str | Signing) -> tuple[ArchivedDocument, ...]:
        """Archive what is missing of one signing, and return the documents that were added.

        The tuple is empty if the signing is not completed, if it does not match the archive's filters, or if all were
        archived before. The first error is raised after all documents were tried, so that an inbox delivers the event
        again. If another run is working on the signing, the call waits for that run.
        """
        signing_path(signing)  # an invalid id raises before anything is read
        deferrals = Deferrals(f"signing {one_line(id_of(signing))}")
        while (results := await self._collect(signing)) is None:
            await deferrals.wait()
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
        at most every 5 seconds. ``on_result`` is called with each result. A sweep that fails with a transient error is
        logged, and the next one tries again; any other error is raised. ::

            wakeups = Wakeups()
            receiver = Receiver(WebhookVerifier(secret), wakeups.publish)
            await archive.follow(wakeups)
        """
        _checks.number("every", every, above=0, error=InvalidRequest)
        report, sweep_requested = on_result or (lambda result: None), asyncio.Event()
        with nullcontext() if wakeups is None else wakeups.subscribe() as subscription:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._sweep_repeatedly(every, sweep_requested, report))
                    if subscription is not None:
                        group.create_task(self._collect_events(subscription, sweep_requested, report))
            except BaseExceptionGroup as errors:
                failure = errors.exceptions[0]
        raise failure

    async def entries(self) -> AsyncIterator[ArchivedDocument]:
        """Iterate over the archived documents, in the order of the manifest; changed lines are skipped."""
        with suppress(FileNotFoundError):
            async for line in split_lines(self.store.read(MANIFEST)):
                with suppress(ValueError):
                    yield decode_line(line)[0]

    async def aclose(self) -> None:
        """Stop all sweeps, finish the manifest, and remove incomplete downloads.

        The journal is closed unless it is the caller's.
        """
        for results in list(self._sweeps):
            await results.aclose()
        if self._sweeping:
            await asyncio.wait(self._sweeping)
        try:
            await self._collector.aclose()
        finally:
            if self._own_journal is not None:
                await self._own_journal.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @asynccontextmanager
    async def _tracked(self, sweep: Sweep) -> AsyncIterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._sweeping.add(task)
        task.add_done_callback(self._sweeping.discard)
        async with sweep.opened():
            yield

    async def _sweep_repeatedly(
        self, every: float, requested: asyncio.Event, report: Callable[[ArchiveResult], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        is_requested, earliest = False, 0.0
        while True:
            due = loop.time() + every
            requested.clear()
            with _transient_errors_logged():
                async with self.sweep() as results:
                    async for result in results:
                        report(result)
            if is_requested:
                earliest = loop.time() + _REQUESTED_SWEEP_PAUSE
            is_requested = False
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await requested.wait()
                    await asyncio.sleep(earliest - loop.time())
                    is_requested = True

    async def _collect_events(
        self, subscription: Subscription, sweep_requested: asyncio.Event, report: Callable[[ArchiveResult], None]
    ) -> None:
        while await subscription.wait():
            if None in subscription.signings:
                sweep_requested.set()
            for signing in subscription.signings - {None}:
                with _transient_errors_logged():
                    for result in await self._collect(str(signing)) or ():
                        report(result)

    async def _collect(self, signing: str | Signing) -> list[ArchiveResult] | None:
        """Archive what is missing of a signing if it matches; return None if another run is working on it."""
        await self._collector.manifest.refresh()
        if isinstance(signing, str):
            signing = Signing(signing)
        if self._collector.has_all(signing):
            return []
        return await self._collector.collect(signing, self._matches)


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


class _Filter:
    """Decides which signings to archive."""

    def __init__(
        self, name: str | None, since: datetime | timedelta | None, where: Callable[[Signing], bool] | None
    ) -> None:
        if name is not None and not isinstance(name, str):
            raise ConfigurationError(f"name: must be a pattern such as 'Lease *', got {name!r}")
        if since is not None and not isinstance(since, timedelta) and not _checks.is_aware(since):
            raise ConfigurationError(f"since: must be a datetime with a time zone, or a timedelta, got {since!r}")
        if where is not None and not callable(where):
            raise ConfigurationError(f"where: must be callable, got {where!r}")
        self._name = None if name is None else re.compile(fnmatch.translate(name))
        self._since = since
        self._where = where

    def __call__(self, signing: Signing) -> bool:
        if self._name is not None and self._name.match(signing.name) is None:
            return False
        since = datetime.now(UTC) - self._since if isinstance(self._since, timedelta) else self._since
        # A signing whose date is unknown is archived rather than missed.
        if since is not None and signing.updated_at is not None and signing.updated_at < since:
            return False
        return self._where is None or bool(self._where(signing))


def _check_place(journal: Journal, store: ArchiveStore) -> None:
    """Create the folder of a journal inside the archive; refuse a journal that would count as an archived file."""
    if not isinstance(journal, SqliteJournal) or not isinstance(store, FolderStore):
        return
    path, root = journal.path, store.path.resolve()
    if not path.is_relative_to(root):
        return
    if not any(part.startswith(".") for part in path.relative_to(root).parts):
        problem = "is in the archive: choose another folder, or a name that begins with a dot"
        raise ConfigurationError(f"journal: {path} {problem}")
    try:
        make_folders(path.parent, root)
    except OSError as error:
        raise ArchiveError(f"journal: {error.strerror}: {path.parent}", transient=is_transient(error)) from None


@contextmanager
def _transient_errors_logged() -> Iterator[None]:
    try:
        yield
    except SigningError as error:
        if not error.transient:
            raise
        log.warning("archiving continues after: %s", error)
