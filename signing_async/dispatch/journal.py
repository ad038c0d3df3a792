"""The journal of a dispatch: the state of each package, and the claims of the runs that work on them."""

from __future__ import annotations

import os
import sqlite3
import time
import warnings
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

import attrs

from .. import _checks
from .._group_commit import FileFormat, GroupCommit, Work
from ..errors import InvalidRequest, JournalError

__all__ = [
    "Claim",
    "ClaimLost",
    "Journal",
    "JournalError",
    "JournalRecord",
    "ListedJournal",
    "SqliteJournal",
    "check_key",
    "check_text",
]

_MAX_KEY_BYTES = 1000
_TABLE = (
    "CREATE TABLE packages (key TEXT PRIMARY KEY, state TEXT, owner TEXT, fence INTEGER NOT NULL,"
    " updated_at REAL NOT NULL) WITHOUT ROWID"
)
_FORMAT = FileFormat("journal", "SqliteJournal", 0x5369676E, 1, (_TABLE,), JournalError)


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
    an `InvalidRequest` for a key, fails only its package. ``signing_async.testing`` has a suite that implementations
    should pass.
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


class SqliteJournal:
    """A journal in a SQLite file, shared by any number of runs and processes on one machine.

    A text is on disk when ``write`` returns (WAL, ``synchronous=FULL``); concurrent writes are committed together. Each
    journal object holds a lock on a file beside the journal for as long as it lives: a claim is free as soon as its
    process is dead, however it died, and never before. ::

        async with SqliteJournal("leases.journal") as journal:
            signing = await client.dispatch(package, journal)

    The file must be on a local disk. ``timeout`` is how many seconds to wait while another program locks the file.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 10.0) -> None:
        self._commits = GroupCommit(path, _FORMAT, timeout=timeout)
        self.path: Path = self._commits.path

    def __repr__(self) -> str:
        return f"SqliteJournal({str(self.path)!r})"

    def __del__(self) -> None:
        commits = getattr(self, "_commits", None)  # the constructor may have raised
        if commits is not None and commits.lock.is_held:
            commits.lock.release()
            warnings.warn(
                f"{self!r} was not closed: use `async with`, or await aclose()", ResourceWarning, stacklevel=2
            )

    async def claim(self, key: str) -> Claim | None:
        check_key(key)
        return await self._commits.run(lambda connection: self._claim(connection, key), self._unclaim)

    async def write(self, claim: Claim, state: str) -> None:
        check_text("state", state)
        await self._commits.run(self._change(claim, "state = ?, updated_at = ?", state, time.time()))

    async def release(self, claim: Claim) -> None:
        await self._commits.run(self._change(claim, "owner = NULL"))

    async def records(self) -> AsyncIterator[JournalRecord]:
        key = ""
        while rows := await self._commits.run(partial(_select_page, after=key)):
            for key, state, updated_at in rows:
                yield JournalRecord(key, state, datetime.fromtimestamp(updated_at, UTC))

    async def aclose(self) -> None:
        """Finish what was requested, close the file, and release all claims."""
        await self._commits.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _change(self, claim: Claim, changes: str, *values: object) -> Work[ClaimLost | None]:
        # A stale or released claim matches no row.
        statement = f"UPDATE packages SET {changes} WHERE key = ? AND fence = ? AND owner = ?"  # noqa: S608  # callers pass literals

        def run(connection: sqlite3.Connection) -> ClaimLost | None:
            changed = connection.execute(statement, (*values, claim.key, claim.fence, self._commits.lock.owner))
            return None if changed.rowcount else ClaimLost(claim.key)

        return run

    def _unclaim(self, claim: Claim | None) -> Work[object] | None:
        return None if claim is None else self._change(claim, "owner = NULL")

    def _claim(self, connection: sqlite3.Connection, key: str) -> Claim | None:
        row = connection.execute("SELECT state, owner, fence FROM packages WHERE key = ?", (key,)).fetchone()
        state, owner, fence = row or (None, None, 0)
        if owner is not None and self._commits.lock.is_alive(owner):
            return None
        connection.execute(
            "INSERT INTO packages (key, state, owner, fence, updated_at) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, fence = excluded.fence",
            (key, state, self._commits.lock.owner, fence + 1, time.time()),
        )
        return Claim(key, state, fence + 1)


def _select_page(connection: sqlite3.Connection, after: str) -> list[tuple[str, str, float]]:
    statement = "SELECT key, state, updated_at FROM packages WHERE key > ? AND state IS NOT NULL ORDER BY key LIMIT 500"
    return connection.execute(statement, (after,)).fetchall()


def check_key(key: str) -> None:
    """Raise `InvalidRequest` if not every journal can hold the key. PostgreSQL indexes at most 2,704 bytes."""
    check_text("key", key)
    size = len(key.encode())
    if size > _MAX_KEY_BYTES:
        raise InvalidRequest(f"key: must be at most {_MAX_KEY_BYTES:,} bytes in UTF-8, got {size:,}: {key[:40]!r}...")


def check_text(name: str, value: object) -> None:
    """Raise `InvalidRequest` if the value is blank, or a database can't hold it as text."""
    if not isinstance(value, str) or not _checks.is_text(value.strip()) or "\0" in value:
        raise InvalidRequest(f"{name}: must be a non-empty string without null characters, got {value!r}")
