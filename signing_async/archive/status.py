"""What is stuck: drafts never sent, signings without progress, documents not sealed, dispatches without an outcome."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Collection
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Literal, get_args

import attrs

from .. import _checks
from .._api import Api, Client
from ..bulk import Results
from ..dispatch.entry import SENDING, SENT, GuardedJournal, NoJournal, PackageState, open_journal
from ..dispatch.journal import ClaimLost, Journal, JournalRecord, ListedJournal
from ..errors import InvalidRequest, NotFound
from ..models import Document, Recipient, Signing, SigningState
from ..recipients import RemindResult
from .collector import raise_if_client_wide

__all__ = ["ArchiveStatus", "OpenDispatch", "StuckSigning", "archive_status"]

_CONCURRENCY = 8
_WEEK = timedelta(days=7)
_HOUR = timedelta(hours=1)

StuckKind = Literal["not_sent", "no_progress", "not_sealed"]
_ALL_KINDS: tuple[StuckKind, ...] = get_args(StuckKind)
_KIND_OF: dict[SigningState, StuckKind] = {
    SigningState.DRAFT: "not_sent",
    SigningState.SENT: "no_progress",
    SigningState.COMPLETED: "not_sealed",
}


@attrs.frozen
class StuckSigning:
    """A signing that makes no progress, or that could not be examined.

    ``not_sent``: a draft that holds documents. ``no_progress``: a signing that was sent and is not completed.
    ``not_sealed``: a completed signing with documents that are not sealed yet. ``not_examined``: the signing or its
    recipients could not be read; ``error`` says why.
    """

    kind: StuckKind | Literal["not_examined"]
    signing: Signing
    pending: tuple[Recipient, ...] = ()
    """The recipients of a sent signing who have not finished."""
    documents: tuple[Document, ...] = ()
    """The documents of a draft, or the documents of a completed signing that are not sealed yet."""
    reminders: tuple[RemindResult, ...] = ()
    """The reminders that this call sent, or failed to send."""
    error: Exception | None = None


@attrs.frozen
class OpenDispatch:
    """A package in a journal whose dispatch has no outcome: it failed, or its run was interrupted."""

    key: str
    signing: str | None
    """The id of its draft, or of the signing that may have been sent."""
    may_be_sent: bool
    """Whether sending had begun."""
    error: str | None
    updated_at: datetime


@attrs.frozen
class ArchiveStatus:
    """The result of `archive_status`."""

    signings: tuple[StuckSigning, ...]
    dispatches: tuple[OpenDispatch, ...]

    @property
    def ok(self) -> bool:
        """Whether all signings could be examined, and nothing is stuck."""
        return not self.signings and not self.dispatches


async def archive_status(
    client: Client,
    journal: Journal | str | os.PathLike[str] | None = None,
    *,
    after: timedelta = _WEEK,
    dispatches_after: timedelta = _HOUR,
    since: datetime | timedelta | None = None,
    remind_every: timedelta | None = None,
    kinds: Collection[StuckKind] = _ALL_KINDS,
) -> ArchiveStatus:
    """Find what is stuck among all signings of the tenant, and among the dispatches in a journal.

    A signing is stuck if it was not updated for ``after``; a dispatch without an outcome, if nothing was written for
    ``dispatches_after``. Signings and dispatches last updated before ``since`` (a time, or a timedelta before now) are
    left out. With ``remind_every``, the recipients who have not finished a stuck signing are reminded, at most once in
    that time: the journal records when. A reminder that was surely not sent does not count.

    The whole list of signings is fetched; of each that may be stuck, the signing or its recipients are read. To examine
    fewer signings, pass ``since``, or the ``kinds`` to look for. A signing that cannot be examined is reported with its
    error, whatever the ``kinds``. An error that is ``client_wide`` is raised. ::

        status = await archive_status(client, "leases.journal", remind_every=timedelta(days=7))
        for stuck in status.signings:
            print(stuck.kind, stuck.signing.name, [recipient.email for recipient in stuck.pending])
    """
    now = datetime.now(UTC)
    for name, value in (("after", after), ("dispatches_after", dispatches_after), ("remind_every", remind_every)):
        if not isinstance(value, timedelta) and (name, value) != ("remind_every", None):
            raise InvalidRequest(f"{name}: must be a timedelta, got {value!r}")
    if isinstance(since, timedelta):
        since = now - since
    elif since is not None and not _checks.is_aware(since):
        raise InvalidRequest(f"since: must be a datetime with a time zone, or a timedelta, got {since!r}")
    if isinstance(kinds, str) or not set(kinds) <= set(_ALL_KINDS):
        raise InvalidRequest(f"kinds: must be among {', '.join(_ALL_KINDS)}, got {kinds!r}")
    if journal is None and remind_every is not None:
        raise InvalidRequest("remind_every: needs a journal, which keeps when recipients were reminded")
    opened = NoJournal() if journal is None else open_journal(journal)
    search = _Search(client._api, opened, kinds, since, now - after, remind_every)
    try:
        dispatches: list[OpenDispatch] = []
        if journal is not None:
            if not isinstance(opened, ListedJournal):
                raise InvalidRequest(f"journal: must be a ListedJournal, got {journal!r}")
            async for record in opened.records():
                if (since or record.updated_at) <= record.updated_at <= now - dispatches_after:
                    dispatches += _open_dispatch(record)
        async with Results[StuckSigning](search.candidates(), search.examine, _CONCURRENCY, flat=True) as results:
            found = [stuck async for stuck in results]
    finally:
        if opened is not journal:
            await opened.aclose()
    found.sort(key=lambda stuck: (stuck.kind, stuck.signing.updated_at or now))
    return ArchiveStatus(tuple(found), tuple(dispatches))


def _open_dispatch(record: JournalRecord) -> list[OpenDispatch]:
    """Return the dispatch of a record unless it has an outcome or the record is not of a dispatch."""
    try:
        state = PackageState(**json.loads(record.state))
    except (ValueError, TypeError):
        return []
    if state.status == SENT:
        return []
    return [OpenDispatch(record.key, state.signing, state.status == SENDING, state.error, record.updated_at)]


@attrs.frozen
class _Search:
    """The search for stuck signings, last updated between ``since`` and ``before``."""

    api: Api
    journal: Journal
    kinds: Collection[StuckKind]
    since: datetime | None
    before: datetime
    remind_every: timedelta | None

    async def candidates(self) -> AsyncIterator[Signing]:
        """Yield the listed signings that may be stuck."""
        async with aclosing(aiter(self.api.signings.list())) as signings:
            async for signing in signings:
                updated = signing.updated_at
                # A signing whose date is unknown is reported rather than missed.
                is_due = updated is None or (self.since or updated) <= updated <= self.before
                if is_due and self._is_wanted(signing):
                    yield signing

    def _is_wanted(self, signing: Signing) -> bool:
        return signing.state is SigningState.UNKNOWN or _KIND_OF.get(signing.state) in self.kinds

    async def examine(self, signing: Signing) -> list[StuckSigning]:
        try:
            if signing.state is not SigningState.SENT and not signing.documents:
                signing = await self.api.signings.get(signing)  # the list may lack the documents
            if not self._is_wanted(signing):
                return []
            if signing.state is SigningState.SENT:
                pending = tuple(await self.api.recipients.pending(signing))
                reminders = await self._remind(signing, pending) if pending else ()
                return [StuckSigning("no_progress", signing, pending, reminders=reminders)]
            if signing.state is SigningState.DRAFT and signing.documents:
                return [StuckSigning("not_sent", signing, documents=signing.documents)]
            if signing.state is SigningState.COMPLETED:
                unsealed = [one for one in signing.documents if not (one.completed_at or one.signed_file_path)]
                return [StuckSigning("not_sealed", signing, documents=tuple(unsealed))] if unsealed else []
        except NotFound:
            return []  # the signing was deleted after it was listed
        except Exception as error:
            raise_if_client_wide(error)
            return [StuckSigning("not_examined", signing, error=error)]
        return []

    async def _remind(self, signing: Signing, pending: tuple[Recipient, ...]) -> tuple[RemindResult, ...]:
        """Remind recipients, except those who were reminded within ``remind_every``; the journal records when."""
        if self.remind_every is None:
            return ()
        journal = GuardedJournal(self.journal, telemetry=self.api.telemetry)
        claim = await journal.claim(f"archive-remind:{self.api.origin}:{signing.id}")
        if claim is None:
            return ()
        try:
            now, reminded = datetime.now(UTC), json.loads(claim.state or "{}")
            latest = (now - self.remind_every).isoformat()
            due = [one for one in pending if reminded.get(one.id, "") <= latest]
            if not due:
                return ()
            # Written first: if the run is killed after this, the recipients are not reminded twice.
            await journal.write(claim, json.dumps(reminded | {one.id: now.isoformat() for one in due}))
            results = await self.api.recipients.remind_pending(signing, due)
            sent = [one.recipient.id for one in results if one.error is None or one.error.effect == "unknown"]
            if len(sent) < len(due):
                await journal.write(claim, json.dumps(reminded | dict.fromkeys(sent, now.isoformat())))
            return tuple(results)
        except ClaimLost:
            return ()
        finally:
            await journal.release(claim)
