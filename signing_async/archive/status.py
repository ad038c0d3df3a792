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
from ..dispatch.entry import SENDING, SENT, GuardedJournal, NoJournal, PackageState, open_journal
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
    now = datetime.now(UTC)
    for name, value in (("after", after), ("dispatches_after", dispatches_after), ("remind_every", remind_every)):
        if not isinstance(value, timedelta) and not (name == "remind_every" and value is None):
            raise InvalidRequest(f"{name}: must be a timedelta, got {value!r}")
    if isinstance(since, timedelta):
        since = now - since
    elif since is not None and not _checks.is_aware(since):
        raise InvalidRequest(f"since: must be a datetime with a time zone, or a timedelta, got {since!r}")
    if isinstance(kinds, str) or not set(kinds) <= set(_ALL_KINDS):
        raise InvalidRequest(f"kinds: must be among {', '.join(_ALL_KINDS)}, got {kinds!r}")
    if journal is None and remind_every is not None:
        raise InvalidRequest("remind_every: needs a journal, which keeps when recipients were reminded")
    api, opened = client._api, NoJournal() if journal is None else open_journal(journal)
    remind = None if remind_every is None else _Reminders(api, opened, now, now - remind_every)
    try:
        dispatches: list[OpenDispatch] = []
        if journal is not None:
            if not isinstance(opened, ListedJournal):
                raise InvalidRequest(f"journal: must be a ListedJournal, got {journal!r}")
            async for record in opened.records():
                if (since or record.updated_at) <= record.updated_at <= now - dispatches_after:
                    dispatches += _open_dispatch(record)
        pool: Results[StuckSigning] = Results(
            _candidates(api, kinds, since, now - after),
            lambda signing: _examine(api, signing, kinds, remind),
            _CONCURRENCY,
            flat=True,
        )
        async with pool as results:
            found = [stuck async for stuck in results]
    finally:
        if opened is not journal:
            await opened.aclose()
    return ArchiveStatus(
        tuple(sorted(found, key=lambda stuck: (stuck.kind, stuck.signing.updated_at or now))), tuple(dispatches)
    )


def _open_dispatch(record: JournalRecord) -> list[OpenDispatch]:
    """Return the dispatch of a record unless it has an outcome or the record is not of a dispatch."""
    fields: Any = None
    try:
        fields = json.loads(record.state)
        state = PackageState(**fields)
    except (ValueError, TypeError, RecursionError):
        if not isinstance(fields, dict) or "content" not in fields:
            return []
        # A newer version wrote the entry of a dispatch.
        return [OpenDispatch(record.key, None, True, "the journal entry cannot be decoded", record.updated_at)]
    if state.status == SENT:
        return []
    return [OpenDispatch(record.key, state.signing, state.status == SENDING, state.error, record.updated_at)]


async def _candidates(
    api: Api, kinds: Collection[StuckKind], since: datetime | None, before: datetime
) -> AsyncIterator[Signing]:
    async with aclosing(api.signings.list().pages()) as pages:
        async for page in pages:
            for signing in page.items:
                updated = signing.updated_at
                # A signing whose date is unknown is reported rather than missed.
                if _is_wanted(signing, kinds) and (updated is None or (since or updated) <= updated <= before):
                    yield signing


def _is_wanted(signing: Signing, kinds: Collection[StuckKind]) -> bool:
    return signing.state is SigningState.UNKNOWN or _KIND_OF.get(signing.state) in kinds


async def _examine(
    api: Api, signing: Signing, kinds: Collection[StuckKind], remind: _Reminders | None
) -> list[StuckSigning]:
    try:
        if signing.state is not SigningState.SENT and not signing.documents:
            # The list may lack the documents.
            signing = await api.signings.get(signing)
        if _is_wanted(signing, kinds):
            if signing.state is SigningState.SENT:
                pending = tuple(await api.recipients.pending(signing))
                reminders = await remind.send(signing, pending) if remind is not None and pending else ()
                return [StuckSigning("no_progress", signing, pending, reminders=reminders)]
            if signing.state is SigningState.DRAFT and signing.documents:
                return [StuckSigning("not_sent", signing, documents=signing.documents)]
            if signing.state is SigningState.COMPLETED and (documents := await _unsealed(api, signing)):
                return [StuckSigning("not_sealed", signing, documents=documents)]
    except NotFound:
        pass  # the signing was deleted after it was listed
    except Exception as error:
        raise_if_client_wide(error)
        return [StuckSigning("not_examined", signing, error=error)]
    return []


async def _unsealed(api: Api, signing: Signing) -> tuple[Document, ...]:
    unmarked = [one for one in signing.documents if one.completed_at is None and one.signed_file_path is None]
    if len(unmarked) < len(signing.documents):
        return tuple(unmarked)
    # The service may send neither field for any document. Then only a download shows whether it is sealed.
    found = []
    for document in unmarked:
        try:
            async with api.documents.stream_signed(signing, document):
                pass
        except NotYetSigned:
            found.append(document)
    return tuple(found)


@attrs.frozen
class _Reminders:
    """Reminds recipients, except those who were reminded after ``latest``. The journal records when."""

    _api: Api
    _journal: Journal
    _now: datetime
    _latest: datetime

    async def send(self, signing: Signing, pending: tuple[Recipient, ...]) -> tuple[RemindResult, ...]:
        journal = GuardedJournal(self._journal, telemetry=self._api.telemetry)
        claim = await journal.claim(f"archive-remind:{self._api.origin}:{signing.id}")
        if claim is None:
            return ()
        results: list[RemindResult] = []
        try:
            reminded = _decode_reminded(claim.state)
            due = [one for one in pending if one.id not in reminded or reminded[one.id] <= self._latest]
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
