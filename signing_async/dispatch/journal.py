"""The journal of a dispatch: the state of each package, and the claims of the runs that work on them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Protocol, runtime_checkable

import attrs

from .. import _checks
from ..errors import InvalidRequest, JournalError

__all__ = ["Claim", "ClaimLost", "Journal", "JournalError", "JournalRecord", "ListedJournal", "check_key", "check_text"]

_MAX_KEY_BYTES = 1000  # PostgreSQL indexes at most 2,704


class ClaimLost(Exception):
    """Another run has claimed the package, named by ``key``. Nothing was written."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"the claim on package {self.key!r} was lost: another run has claimed it"


@attrs.frozen
class Claim:
    """The exclusive right to work on a package."""

    key: str
    state: str | None
    """The text that was last written for this key, if any."""
    fence: int
    """The fencing token. It grows with each claim of the key, so that a stale holder's writes are refused."""


class Journal(Protocol):
    """Keeps one text for each package, and lets one run at a time work on the package.

    Its failures are raised as `JournalError`, which ends a run. A `SigningError` that is not ``client_wide``, such as
    an `InvalidRequest` for a key, fails only its package.
    """

    async def claim(self, key: str) -> Claim | None:
        """Claim a package; return None while it is claimed by this journal object or by another live run.

        The claim of a dead run is free.
        """

    async def write(self, claim: Claim, state: str) -> None:
        """Write the package's text durably: once this returns, the text survives a crash and a power cut.

        Raises `ClaimLost`, and writes nothing, if another run has claimed the package.
        """

    async def release(self, claim: Claim) -> None:
        """Release the claim; the text stays. Raises `ClaimLost` if another run has claimed the package."""

    async def aclose(self) -> None:
        """Release all claims."""


@attrs.frozen
class JournalRecord:
    """A package's text, as a journal lists it."""

    key: str
    state: str
    updated_at: datetime


@runtime_checkable
class ListedJournal(Protocol):
    """A journal that can list its texts. `archive_status` needs one to find dispatches without an outcome."""

    def records(self) -> AsyncIterator[JournalRecord]:
        """Yield the texts of all packages, claimed or not, sorted by key. Keys without a text are left out."""


def check_key(key: str) -> None:
    """Raise `InvalidRequest` if not every journal can hold the key."""
    check_text("key", key)
    size = len(key.encode())
    if size > _MAX_KEY_BYTES:
        raise InvalidRequest(f"key: must be at most {_MAX_KEY_BYTES:,} bytes in UTF-8, got {size:,}: {key[:40]!r}...")


def check_text(name: str, value: object) -> None:
    """Raise `InvalidRequest` if the value is blank, or a database can't hold it as text."""
    if not isinstance(value, str) or not _checks.is_text(value.strip()) or "\0" in value:
        raise InvalidRequest(f"{name}: must be a non-empty string without null characters, got {value!r}")
