"""The journal entry of one package. Also opens journals, and guards the calls to them; the archive uses both."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from typing import Any, TypeVar

import attrs
from attrs import validators

from .. import telemetry
from .._foreign import is_transient
from ..bulk import log
from ..errors import ConfigurationError, InvalidRequest, SigningError
from ..storage.journal import SqliteJournal
from ..telemetry.names import JOURNAL_DURATION, JOURNAL_OPERATION
from .journal import Claim, ClaimLost, Journal, JournalError

__all__ = ["DRAFT", "SENDING", "SENT", "GuardedJournal", "NoJournal", "PackageState", "open_journal"]

T = TypeVar("T")

DRAFT, SENDING, SENT = "draft", "sending", "sent"

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
