"""The journal entry of one package: what is known of its draft, saved before each step begins and after it ends.

Also opens journals and guards the calls to them; the archive uses both.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

import attrs
from attrs import validators

from .._foreign import is_transient
from ..errors import ConfigurationError, InvalidRequest, OutcomeUnknown, SigningError
from ..telemetry import switch
from ..telemetry.kept import keep_context
from ..worker_pool import log
from .journal import Claim, ClaimLost, Journal, JournalError, SqliteJournal

__all__ = [
    "DRAFT",
    "SENDING",
    "SENT",
    "GuardedJournal",
    "JournalEntry",
    "NoJournal",
    "PackageState",
    "open_journal",
]

T = TypeVar("T")

DRAFT, SENDING, SENT = "draft", "sending", "sent"

_validate_ids = validators.deep_mapping(
    validators.matches_re(r"\d+"),
    validators.optional(validators.instance_of(str)),
    validators.instance_of(dict),
)


class GuardedJournal:
    """Wraps a journal: raises its foreign errors as `JournalError`, and records its operations in telemetry."""

    def __init__(self, journal: Journal, *, telemetry: bool) -> None:
        self._journal = journal
        self._telemetry = telemetry

    async def claim(self, key: str) -> Claim | None:
        return await self._observe("claim", self._journal.claim(key))

    async def write(self, claim: Claim, state: str) -> None:
        await self._observe("write", self._journal.write(claim, state))

    async def release(self, claim: Claim) -> None:
        """Release the claim, even if the run is cancelled or the journal has failed."""
        releasing = asyncio.ensure_future(self._observe("release", self._journal.release(claim)))
        try:
            await asyncio.shield(releasing)
        except ClaimLost:
            pass
        except SigningError as error:
            log.warning("%s", error)

    async def _observe(self, name: str, operation: Awaitable[T]) -> T:
        observed = switch.active() if self._telemetry else None
        if observed is None:
            return await _convert_errors(operation)
        from ..telemetry.work import record_journal

        began, raised = time.perf_counter(), None
        try:
            return await _convert_errors(operation)
        except BaseException as error:
            raised = error
            raise
        finally:
            record_journal(observed, name, time.perf_counter() - began, raised)
            # The error's traceback refers to this frame.
            del raised


async def _convert_errors(operation: Awaitable[T]) -> T:
    try:
        return await operation
    except (ClaimLost, SigningError):
        raise
    except Exception as error:
        message = f"the journal failed: {type(error).__name__}: {error}"
        raise JournalError(message, transient=is_transient(error)) from error


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


@attrs.define
class PackageState:
    """What is known of a package. ``documents`` and ``recipients`` map their numbers to the ids at the service.

    An id is None from the start of its step until the outcome is known.
    """

    content: str = attrs.field(validator=validators.instance_of(str))
    service: str = attrs.field(validator=validators.instance_of(str))
    status: str = attrs.field(default=DRAFT, validator=validators.in_((DRAFT, SENDING, SENT)))
    signing: str | None = attrs.field(default=None, validator=validators.optional(validators.instance_of(str)))
    documents: dict[str, str | None] = attrs.field(factory=dict, validator=_validate_ids)
    recipients: dict[str, str | None] = attrs.field(factory=dict, validator=_validate_ids)
    error: str | None = attrs.field(default=None, validator=validators.optional(validators.instance_of(str)))
    abandoned: list[str] = attrs.field(
        factory=list, validator=validators.deep_iterable(validators.instance_of(str), validators.instance_of(list))
    )

    @property
    def is_ambiguous(self) -> bool:
        """Whether a step began whose outcome is unknown."""
        return None in self.documents.values() or None in self.recipients.values()

    def abandon_draft(self) -> None:
        """Forget the draft. No run sends a draft that its journal entry no longer names."""
        if self.signing is not None:
            self.abandoned.append(self.signing)
        self.signing, self.documents, self.recipients = None, {}, {}


class JournalEntry:
    """The state of a claimed package, and the journal that keeps it."""

    def __init__(self, journal: GuardedJournal, claim: Claim, content: str, service: str, context: str | None) -> None:
        self._journal = journal
        self._claim = claim
        self._context = context
        """The trace context of this run's span for the package; the next run links to it."""
        self.state: PackageState = PackageState(content, service)
        self._changes = self._saved = 0
        self._saved_status = DRAFT
        self._writing = asyncio.Lock()

    @property
    def was_saved(self) -> bool:
        """Whether this run has saved anything."""
        return self._changes > 0

    def load(self) -> PackageState:
        """Return the state that earlier runs saved; raise `OutcomeUnknown` if it can't be decoded."""
        if self._claim.state is None:
            return self.state
        with suppress(TypeError, ValueError, RecursionError):
            state = PackageState(**json.loads(self._claim.state))
            if state.status == DRAFT or state.signing:
                self.state, self._saved_status = state, state.status
                return state
        raise OutcomeUnknown("the journal entry of this package cannot be decoded: the package may have been sent")

    async def save(self) -> None:
        """Write the current state; concurrent calls share a write. Raises `ClaimLost` if the claim is stale.

        If the send request may have been made, and was not refused, a journal error has the effect ``"unknown"``.
        """
        self._changes += 1
        change = self._changes
        async with self._writing:
            if self._saved >= change:
                return
            covered, status = self._changes, self.state.status
            text = keep_context(json.dumps(attrs.asdict(self.state)), self._context)
            try:
                await self._journal.write(self._claim, text)
            except SigningError as error:
                if DRAFT not in (self._saved_status, status):
                    error.effect = "unknown"
                raise
            self._saved, self._saved_status = covered, status
