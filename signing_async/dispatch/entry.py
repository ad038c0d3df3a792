"""The journal entry of one package: what is known of its draft, saved before each step begins and after it ends.

Also opens journals and guards the calls to them; the archive uses both.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, Literal, TypeVar

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
    "find_context",
    "open_journal",
    "with_effect",
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
        except ClaimLost:
            pass
        except SigningError as error:
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
    trace_context: str | None = None
    """The context of the span of the last run; the next run links to it."""

    def __attrs_post_init__(self) -> None:
        if self.status != DRAFT and not self.signing:
            raise ValueError(f"status {self.status!r} without a signing")


class Entry:
    """What the journal keeps of a claimed package."""

    def __init__(self, journal: GuardedJournal, claim: Claim, package: Prepared, api: Api, context: str | None) -> None:
        self._journal = journal
        self._claim = claim
        self._package = package
        self._api = api
        self._context = context
        self.state: PackageState = PackageState(package.content, api.origin)
        self._is_saved = self._may_be_sending = False
        self._writing = asyncio.Lock()

    @property
    def id(self) -> str:
        """The id of the draft, or of the signing."""
        assert self.state.signing is not None
        return self.state.signing

    @property
    def ledger(self) -> SigningLedger:
        """What the client knows about its own requests to the draft."""
        return self._api.ledger.signing(signing_path(self.id))

    def load(self) -> PackageState:
        """Return the state that earlier runs saved; raise `OutcomeUnknown` if it can't be decoded."""
        if self._claim.state is not None:
            try:
                self.state = PackageState(**json.loads(self._claim.state))
            except (TypeError, ValueError):
                message = "the journal entry of this package cannot be decoded: the package may have been sent"
                raise OutcomeUnknown(message) from None
            self._may_be_sending = self.state.status != DRAFT
        return self.state

    async def save(self) -> None:
        """Write the current state. Raises `ClaimLost` if the claim is stale.

        If the send request may have been made, and was not refused, a journal error has the effect ``"unknown"``.
        """
        async with self._writing:
            self._is_saved = True
            state, is_draft = attrs.asdict(self.state) | {"trace_context": self._context}, self.state.status == DRAFT
            if is_draft and self.state.signing is not None and self.ledger.is_tainted:
                # A lost request may still add to the draft: the next run abandons a draft with a step of unknown
                # outcome.
                state |= {name: dict.fromkeys(state[name]) for name in ("documents", "recipients")}
            try:
                await self._journal.write(self._claim, json.dumps(state))
            except SigningError as error:
                if is_draft or not self._may_be_sending:
                    raise
                raise with_effect(error, "unknown") from error.__cause__
            self._may_be_sending = not is_draft

    async def note_failure(self, error: Exception) -> None:
        """Save the error, if this run has saved anything, and log it."""
        text = self._api.transport.redacted(str(error))
        if self._is_saved:
            self.state.error = text[:_MAX_ERROR]
            await self.save()
        log.warning("package %s was not sent: %s", self._package.label, text)

    def add_notes(self, error: BaseException) -> None:
        """Tell in the notes of an error where the package stands."""
        state, label = self.state, self._package.label
        where = f"its signing is {state.signing}" if state.signing else "it has no draft"
        error.add_note(f"package {label}: {where}; status {state.status!r}")
        if state.abandoned:
            error.add_note(f"package {label}: abandoned drafts: {', '.join(state.abandoned)}")

    @property
    def abandoned(self) -> tuple[str, ...]:
        """The ids of the package's abandoned drafts at this service."""
        return tuple(self.state.abandoned) if self.state.service == self._api.origin else ()

    @property
    def signing(self) -> Signing | None:
        """What the entry says of the package's signing at this service."""
        state, package, fields = self.state, self._package, self._package.fields
        if state.signing is None or state.service != self._api.origin:
            return None
        if state.content != package.content:
            return Signing(state.signing)
        ids = [(state.documents.get(str(n)), pdf.source.filename) for n, pdf in enumerate(package.documents)]
        return Signing(
            state.signing,
            name=fields["name"],
            language=Language(fields["language"]),
            signing_order=fields["signing_order"] and SigningOrder(fields["signing_order"]),
            message=fields["message"],
            is_draft={DRAFT: True, SENDING: None, SENT: False}[state.status],
            documents=tuple(Document(id_, name) for id_, name in ids if id_ is not None),
        )


def with_effect(error: SigningError, effect: Literal["none", "unknown"]) -> SigningError:
    """Return a copy of the error with this effect."""
    return amended(error, effect=effect).with_traceback(error.__traceback__)


def find_context(state: str | None) -> str | None:
    """Return the trace context in the saved state of a package, a sweep or an archived signing."""
    with suppress(ValueError, AttributeError):
        context: str | None = json.loads(state or "{}").get("trace_context")
        return context
    return None
