"""The journal entry of one claimed package. Also opens journals, and guards calls to them; the archive uses both."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import attrs
from attrs import validators

from .. import telemetry
from .._api import Api
from .._foreign import is_transient
from ..bulk import log
from ..errors import ConfigurationError, InvalidRequest, OutcomeUnknown, SigningError, amended
from ..models import Document, Language, Signing, SigningOrder
from ..reconcile import SigningLedger
from ..signings import signing_path
from ..storage.journal import SqliteJournal
from ..telemetry.names import JOURNAL_DURATION, JOURNAL_OPERATION
from .journal import Claim, ClaimLost, Journal, JournalError
from .package import Prepared

__all__ = [
    "DRAFT",
    "SENDING",
    "SENT",
    "Entry",
    "GuardedJournal",
    "NoJournal",
    "PackageState",
    "known_ids",
    "open_journal",
]

T = TypeVar("T")

DRAFT, SENDING, SENT = "draft", "sending", "sent"
_MAX_ERROR = 1000

_text = validators.instance_of(str)
_ids = validators.deep_mapping(validators.matches_re(r"\d+"), validators.optional(_text), validators.instance_of(dict))


def open_journal(journal: Any) -> Journal:
    """Return the given journal, or a new `SqliteJournal` for a path, which the caller closes."""
    if isinstance(journal, str) and "://" in journal:
        # The URL may hold a password.
        raise ConfigurationError("journal: must be a path, got a URL; for PostgreSQL give a PostgresJournal(dsn)")
    if isinstance(journal, str | os.PathLike):
        return SqliteJournal(journal)
    if not all(callable(getattr(journal, name, None)) for name in ("claim", "write", "release")):
        raise InvalidRequest(f"journal: must be a path or a Journal, got {journal!r}")
    given: Journal = journal
    return given


class NoJournal:
    """Stands in for the journal of a call without one: nothing outlives the call."""

    async def claim(self, key: str) -> Claim | None:
        return Claim(key, None, 1)

    async def write(self, claim: Claim, state: str) -> None: ...

    async def release(self, claim: Claim) -> None: ...

    async def aclose(self) -> None: ...


class GuardedJournal:
    """Wraps a journal: raises its foreign errors as `JournalError`, and records its operations in telemetry."""

    def __init__(self, journal: Journal, *, telemetry: bool) -> None:
        self._journal = journal
        self._telemetry = telemetry

    async def claim(self, key: str) -> Claim | None:
        return await self._run("claim", self._journal.claim(key))

    async def write(self, claim: Claim, state: str) -> None:
        await self._run("write", self._journal.write(claim, state))

    async def release(self, claim: Claim) -> None:
        """Release the claim, even if the run is cancelled or the journal has failed."""
        releasing = asyncio.ensure_future(self._run("release", self._journal.release(claim)))
        try:
            await asyncio.shield(releasing)
        except (ClaimLost, SigningError) as error:
            log.warning("%s", error)

    async def _run(self, name: str, operation: Awaitable[T]) -> T:
        with telemetry.active(self._telemetry).timed(JOURNAL_DURATION, {JOURNAL_OPERATION: name}):
            try:
                return await operation
            except (ClaimLost, SigningError):
                raise
            except Exception as error:
                message = f"the journal failed: {type(error).__name__}: {error}"
                raise JournalError(message, transient=is_transient(error)) from error


@attrs.define
class PackageState:
    """What is known of a package. ``documents`` and ``recipients`` map their numbers to the ids at the service.

    An id is None from the start of its step until the outcome is known.
    """

    content: str = attrs.field(validator=_text)
    service: str = attrs.field(validator=_text)
    status: str = attrs.field(default=DRAFT, validator=validators.in_((DRAFT, SENDING, SENT)))
    signing: str | None = attrs.field(default=None, validator=validators.optional(_text))
    documents: dict[str, str | None] = attrs.field(factory=dict, validator=_ids)
    recipients: dict[str, str | None] = attrs.field(factory=dict, validator=_ids)
    error: str | None = None
    abandoned: list[str] = attrs.Factory(list)

    def __attrs_post_init__(self) -> None:
        if self.status != DRAFT and not self.signing:
            raise ValueError(f"status {self.status!r} without a signing")


class Entry:
    """The entry of one claimed package: what is known of its draft, and how that is saved."""

    def __init__(self, api: Api, package: Prepared, journal: GuardedJournal, claim: Claim) -> None:
        self.package = package
        self.state: PackageState = PackageState(package.content, api.origin)
        self._api = api
        self._journal = journal
        self._claim = claim
        self._is_loaded = self._is_saved = self._may_be_sending = False
        self._writing = asyncio.Lock()

    @property
    def id(self) -> str:
        """The id of the draft, which exists."""
        assert self.state.signing is not None
        return self.state.signing

    @property
    def ledger(self) -> SigningLedger:
        """What the client knows about its own requests to the draft."""
        return self._api.ledger.signing(signing_path(self.id))

    @property
    def is_other(self) -> bool:
        """Whether the entry is that of a package with other content."""
        return self.state.content != self.package.content

    def load(self) -> None:
        """Load the state that earlier runs saved. Raise if it can't be decoded, or belongs to another service."""
        if self._claim.state is None:
            self._is_loaded = True
            return
        try:
            state = PackageState(**json.loads(self._claim.state))
        except (TypeError, ValueError):
            message = "the journal entry of this package cannot be decoded: the package may have been sent"
            raise OutcomeUnknown(message) from None
        origin = self._api.origin
        if state.service != origin:
            message = f"the journal holds this package for {state.service}; use another journal for {origin}"
            # Other packages of the run may be unaffected.
            raise ConfigurationError(message, client_wide=False)
        self.state, self._is_loaded = state, True
        self._may_be_sending = state.status != DRAFT

    async def save(self) -> None:
        """Save the current state. Raises `ClaimLost` if the claim is stale.

        If the send request may have been made, and was not refused, a journal error has the effect ``"unknown"``.
        """
        async with self._writing:
            self._is_saved = True
            state, is_draft = attrs.asdict(self.state), self.state.status == DRAFT
            if is_draft and self.state.signing is not None and self.ledger.is_tainted:
                # A lost request may still add to the draft: the next run abandons a draft with a step of unknown
                # outcome.
                state |= {name: dict.fromkeys(state[name]) for name in ("documents", "recipients")}
            try:
                await self._journal.write(self._claim, json.dumps(state))
            except SigningError as error:
                if is_draft or not self._may_be_sending:
                    raise
                raise amended(error, effect="unknown") from error.__cause__
            self._may_be_sending = not is_draft

    def abandon(self, reason: str) -> None:
        """Forget the draft: it stays at the service, unsent. No run sends a draft that no journal entry names."""
        state = self.state
        log.warning("package %s: draft %s was abandoned: %s", self.package.label, self.id, reason)
        state.abandoned.append(self.id)
        state.signing, state.documents, state.recipients = None, {}, {}

    async def note_failure(self, error: Exception) -> None:
        """Tell in the error's notes where the package stands; log the error, and save it if anything was saved."""
        state, label = self.state, self.package.label
        where = f"its signing is {state.signing}" if state.signing else "it has no draft"
        drafts = f"; abandoned drafts: {', '.join(state.abandoned)}" if state.abandoned else ""
        facts = f": {where}; status {state.status!r}{drafts}" if self._is_loaded else ""
        error.add_note(f"package {label}{facts}")
        text = self._api.transport.redacted(str(error))
        # An `InvalidRequest` may say that another package, with the same key, may have been sent.
        is_unknown = getattr(error, "effect", "none") == "unknown" and not isinstance(error, InvalidRequest)
        message = "it is not known whether package %s was sent: %s" if is_unknown else "package %s was not sent: %s"
        log.warning(message, label, text)
        if self._is_saved:
            state.error = text[:_MAX_ERROR]
            try:
                await self.save()
            except SigningError as unsaved:
                if unsaved.client_wide:
                    raise
                log.warning("%s", unsaved)

    def describe(self) -> Signing:
        """Return what the entry says of the draft, or of the signing."""
        state, package, fields = self.state, self.package, self.package.fields
        is_draft = {DRAFT: True, SENDING: None, SENT: False}[state.status]
        if self.is_other:
            return Signing(self.id, is_draft=is_draft)
        ids = [(state.documents.get(str(n)), pdf.source.filename) for n, pdf in enumerate(package.documents)]
        return Signing(
            self.id,
            name=fields["name"],
            language=Language(fields["language"]),
            signing_order=fields["signing_order"] and SigningOrder(fields["signing_order"]),
            message=fields["message"],
            is_draft=is_draft,
            documents=tuple(Document(id_, name) for id_, name in ids if id_ is not None),
        )


def known_ids(ids: Mapping[str, str | None]) -> list[str]:
    """Return the ids of the steps whose outcome is known, sorted."""
    return sorted(id_ for id_ in ids.values() if id_ is not None)
