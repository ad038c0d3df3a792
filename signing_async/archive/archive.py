"""The archive of a tenant: sweep over all signings, follow their events, collect one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self

import attrs

from ..dispatch.journal import Journal
from ..models import Document, Signing
from ..worker_pool import Progress, Results
from .manifest import ArchivedDocument
from .names import DEFAULT_TEMPLATE
from .store import ArchiveStore

if TYPE_CHECKING:
    from ..client import SigningClient
    from ..sealed import Trust
    from ..webhooks import Wakeups

__all__ = ["Archive", "ArchiveResult"]


@attrs.frozen
class ArchiveResult:
    """The result of one document. ``entry`` is its line in the manifest; with an error it is None.

    If the signing itself can't be read, ``document`` is None. A `NotYetSigned` error is reported until the service has
    the sealed file: each sweep tries again.
    """

    signing: Signing
    document: Document | None = None
    entry: ArchivedDocument | None = None
    error: Exception | None = None


class Archive:
    """An archive of the sealed PDFs of a tenant: each document of a completed signing once.

    ``to`` is a folder or an `ArchiveStore`, ``journal`` a path or a `Journal`, as for ``client.dispatch_many``: any
    number of processes may share both. ``template`` names the files. Only signings are archived whose name matches the
    pattern ``name`` (``*`` and ``?``), that were updated at ``since`` or later, and for which ``where`` returns true.
    ``verify`` and ``trust`` are as for ``client.documents.download_signed``. ::

        async with Archive(client, "archive/", journal="archive.db") as archive:
            async for result in archive.sweep():
                print(result.error or result.entry.path)
    """

    def __init__(
        self,
        client: SigningClient,
        to: ArchiveStore | str | os.PathLike[str],
        *,
        journal: Journal | str | os.PathLike[str],
        template: str = DEFAULT_TEMPLATE,
        name: str | None = None,
        since: datetime | None = None,
        where: Callable[[Signing], bool] | None = None,
        verify: bool = False,
        trust: Trust | Iterable[Trust] | None = None,
        concurrency: int = 8,
    ) -> None:
        raise NotImplementedError

    def sweep(self, on_progress: Callable[[Progress], None] | None = None) -> Results[ArchiveResult]:
        """Archive what is missing, over all signings; return an async iterator of results in completion order.

        What was archived before yields nothing.
        """
        raise NotImplementedError

    async def collect(self, signing: str | Signing) -> tuple[ArchivedDocument, ...]:
        """Archive one signing and return the documents that were added; raise the first error."""
        raise NotImplementedError

    async def follow(
        self,
        wakeups: Wakeups | None = None,
        every: float = 300,
        on_result: Callable[[ArchiveResult], None] | None = None,
    ) -> None:
        """Sweep every ``every`` seconds, and collect the signings of events as they arrive, until cancelled."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Close the journal unless it is the caller's."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()
