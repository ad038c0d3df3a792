"""What is stuck: drafts never sent, signings without progress, documents not sealed, dispatches without an outcome."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import aclosing, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, get_args

import attrs

from .. import _checks
from .._api import Api, Client
from ..bulk import Results, log
from ..dispatch.entry import SENDING, SENT, GuardedJournal, PackageState, open_journal
from ..dispatch.journal import ClaimLost, Journal, JournalRecord, ListedJournal
from ..errors import InvalidRequest, NotFound, NotYetSigned
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

    The whole list of signings is fetched; of each that may be stuck, the signing or its recipients are read. If the
    service does not say which documents are sealed, a download of each is opened. To examine fewer signings, pass
    ``since``, or the ``kinds`` to look for. A signing that cannot be examined is reported with its error, whatever the
    ``kinds``. An error that is ``client_wide`` is raised. ::

        status = await archive_status(client, "leases.journal", remind_every=timedelta(days=7))
        for stuck in status.signings:
            print(stuck.kind, stuck.signing.name, [recipient.email for recipient in stuck.pending])
    """
    for name, value in (("after", after), ("dispatches_after", dispatches_after), ("remind_every", remind_every)):
        if not isinstance(value, timedelta) and not (name == "remind_every" and value is None):
            raise InvalidRequest(f"{name}: must be a timedelta, got {value!r}")
    if isinstance(since, timedelta):
        since = datetime.now(UTC) - since
    elif since is not None and not _checks.is_aware(since):
        raise InvalidRequest(f"since: must be a datetime with a time zone, or a timedelta, got {since!r}")
    if isinstance(kinds, str) or not set(kinds) <= set(_ALL_KINDS):
        raise InvalidRequest(f"kinds: must be among {', '.join(_ALL_KINDS)}, got {kinds!r}")
    if journal is None:
        if remind_every is not None:
            raise InvalidRequest("remind_every: needs a journal, which keeps when recipients were reminded")
        return ArchiveStatus(await _Search(client._api, None, after, since, None, kinds).run(), ())
    opened = open_journal(journal)
    try:
        if not isinstance(opened, ListedJournal):
            raise InvalidRequest(f"journal: must be a ListedJournal, got {journal!r}")
        dispatches = await _open_dispatches(opened, datetime.now(UTC) - dispatches_after, since)
        return ArchiveStatus(await _Search(client._api, opened, after, since, remind_every, kinds).run(), dispatches)
    finally:
        if opened is not journal:
            await opened.aclose()


async def _open_dispatches(
    journal: ListedJournal, before: datetime, since: datetime | None
) -> tuple[OpenDispatch, ...]:
    found = [
        _open_dispatch(record)
        async for record in journal.records()
        if record.updated_at <= before and (since is None or record.updated_at >= since)
    ]
    return tuple(dispatch for dispatch in found if dispatch is not None)


def _open_dispatch(record: JournalRecord) -> OpenDispatch | None:
    """Return the dispatch of a record; None if it has an outcome, or if the record is not of a dispatch."""
    fields: Any = None
    try:
        fields = json.loads(record.state)
        state = PackageState(**fields)
    except (ValueError, TypeError, RecursionError):
        if not isinstance(fields, dict) or "content" not in fields:
            return None
        # A newer version wrote the entry of a dispatch.
        return OpenDispatch(record.key, None, True, "the journal entry cannot be decoded", record.updated_at)
    if state.status == SENT:
        return None
    return OpenDispatch(record.key, state.signing, state.status == SENDING, state.error, record.updated_at)


@attrs.define(eq=False)
class _Search:
    """One search among the signings of a tenant."""

    _api: Api
    _journal: Journal | None
    _stuck_after: timedelta
    _since: datetime | None
    _remind_every: timedelta | None
    _kinds: Collection[StuckKind]
    _now: datetime = attrs.field(factory=lambda: datetime.now(UTC), init=False)

    async def run(self) -> tuple[StuckSigning, ...]:
        pool: Results[StuckSigning] = Results(self._candidates(), self._examine, _CONCURRENCY, flat=True)
        async with pool as results:
            found = [stuck async for stuck in results]
        return tuple(sorted(found, key=lambda stuck: (stuck.kind, stuck.signing.updated_at or self._now)))

    async def _candidates(self) -> AsyncIterator[Signing]:
        async with aclosing(self._api.signings.list().pages()) as pages:
            async for page in pages:
                for signing in page.items:
                    if self._is_wanted(signing) and self._is_old(signing.updated_at):
                        yield signing

    def _is_wanted(self, signing: Signing) -> bool:
        return signing.state is SigningState.UNKNOWN or _KIND_OF.get(signing.state) in self._kinds

    def _is_old(self, updated: datetime | None) -> bool:
        # A signing whose date is unknown is reported rather than missed.
        if updated is None:
            return True
        return updated <= self._now - self._stuck_after and (self._since is None or updated >= self._since)

    async def _examine(self, signing: Signing) -> list[StuckSigning]:
        try:
            stuck = await self._find_stuck(signing)
        except NotFound:
            # The signing was deleted after it was listed.
            stuck = None
        except Exception as error:
            raise_if_client_wide(error)
            stuck = StuckSigning("not_examined", signing, error=error)
        return [] if stuck is None else [stuck]

    async def _find_stuck(self, signing: Signing) -> StuckSigning | None:
        if signing.state is not SigningState.SENT and not signing.documents:
            # The list may lack the documents.
            signing = await self._api.signings.get(signing)
            if not self._is_wanted(signing):
                return None
        if signing.state is SigningState.SENT:
            pending = tuple(await self._api.recipients.pending(signing))
            return StuckSigning("no_progress", signing, pending, reminders=await self._remind(signing, pending))
        if signing.state is SigningState.DRAFT and signing.documents:
            return StuckSigning("not_sent", signing, documents=signing.documents)
        if signing.state is SigningState.COMPLETED and (documents := await self._unsealed(signing)):
            return StuckSigning("not_sealed", signing, documents=documents)
        return None

    async def _unsealed(self, signing: Signing) -> tuple[Document, ...]:
        unmarked = [one for one in signing.documents if one.completed_at is None and one.signed_file_path is None]
        if len(unmarked) < len(signing.documents):
            return tuple(unmarked)
        # The service may send neither field for any document. Then only a download shows whether it is sealed.
        return tuple([one for one in unmarked if not await self._is_sealed(signing, one)])

    async def _is_sealed(self, signing: Signing, document: Document) -> bool:
        try:
            async with self._api.documents.stream_signed(signing, document):
                return True
        except NotYetSigned:
            return False

    async def _remind(self, signing: Signing, pending: tuple[Recipient, ...]) -> tuple[RemindResult, ...]:
        """Remind the pending recipients, except those who were reminded within ``remind_every``."""
        if not pending or self._remind_every is None or self._journal is None:
            return ()
        journal = GuardedJournal(self._journal, telemetry=self._api.telemetry)
        claim = await journal.claim(f"archive-remind:{self._api.origin}:{signing.id}")
        if claim is None:
            return ()
        results: list[RemindResult] = []
        try:
            reminded = _decode_reminded(claim.state)
            latest = self._now - self._remind_every
            due = [one for one in pending if one.id not in reminded or reminded[one.id] <= latest]
            if due:
                # Written first: if the run is killed after this, the recipients are not reminded twice.
                await journal.write(claim, _encode_reminded(reminded | {one.id: self._now for one in due}))
                results = await self._api.recipients.remind_pending(signing, due)
                sent = [one.recipient.id for one in results if one.error is None or one.error.effect == "unknown"]
                if len(sent) < len(due):
                    await journal.write(claim, _encode_reminded(reminded | dict.fromkeys(sent, self._now)))
        except ClaimLost as error:
            log.warning("%s", error)
        finally:
            await journal.release(claim)
        return tuple(results)


def _encode_reminded(reminded: Mapping[str, datetime]) -> str:
    return json.dumps({recipient: time.isoformat() for recipient, time in reminded.items()})


def _decode_reminded(state: str | None) -> dict[str, datetime]:
    """Return when each recipient was reminded, by id."""
    with suppress(ValueError, TypeError, AttributeError, RecursionError):
        return {recipient: datetime.fromisoformat(time) for recipient, time in json.loads(state or "{}").items()}
    # If the entry cannot be decoded, the recipients are reminded again.
    return {}
