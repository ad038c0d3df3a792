"""The journal of a dispatch: the state of each package, and the claims of the runs that work on them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import glob
import os
import secrets
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self
from weakref import WeakSet

import attrs

from .. import _checks
from .._files import sync_folder
from .._sqlite import SharedDatabase, is_transient
from ..errors import ConfigurationError, InvalidRequest, JournalError

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no flock
    fcntl = None  # type: ignore[assignment]  # a module's type does not allow None

__all__ = ["Claim", "ClaimLost", "Journal", "JournalError", "SqliteJournal", "check_text"]

_Work = Callable[[sqlite3.Connection], object]

_APPLICATION = 0x5369676E
_VERSION = 1
_TABLE = (
    "CREATE TABLE packages (key TEXT PRIMARY KEY, state TEXT, owner TEXT, fence INTEGER NOT NULL,"
    " updated_at REAL NOT NULL) WITHOUT ROWID"
)


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
    """Keeps one text for each package, and lets one run at a time work on it.

    Its failures are raised as `JournalError`. ``signing_async.testing`` has a suite that implementations should pass.
    """

    async def claim(self, key: str) -> Claim | None:
        """Claim a package; return None while it is claimed by this journal object or by another live run.

        The claim of a dead run is free.
        """

    async def write(self, claim: Claim, state: str) -> None:
        """Write the package's text durably: it survives a crash and a power cut from here on.

        Raises `ClaimLost`, and writes nothing, if another run has claimed the package.
        """

    async def release(self, claim: Claim) -> None:
        """Release the claim; the text stays. Raises `ClaimLost` if another run has claimed the package."""

    async def aclose(self) -> None:
        """Release all claims."""


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
        if fcntl is None:
            raise ConfigurationError("SqliteJournal needs POSIX file locks, which this system does not have")
        timeout = _checks.number("timeout", timeout, above=0, at_most=3600)
        invalid_path = ConfigurationError(f"journal: must be a path, got {path!r}")
        if path == "":
            raise invalid_path
        try:
            expanded = os.path.expanduser(path)  # noqa: PTH111  # pathlib's raises if there is no such user
            # Symbolic links are resolved, so that all processes look for the lock files in the same folder.
            self.path: Path = Path(os.path.realpath(expanded))
        except (TypeError, ValueError):
            raise invalid_path from None
        prepare = partial(_prepare, path=self.path)
        self._database = SharedDatabase(self.path, prepare, timeout=timeout, mode=0o600)
        self._owner = ""
        self._lock: IO[bytes] | None = None
        self._process = os.getpid()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="signing-journal")
        self._queue = threading.Lock()
        self._waiting: list[_Operation] = []
        self._writing = False
        self._closing: Future[None] | None = None
        _journals.add(self)

    def __repr__(self) -> str:
        return f"SqliteJournal({str(self.path)!r})"

    def __del__(self) -> None:
        # The constructor may have raised.
        lock = getattr(self, "_lock", None)
        if lock is not None:
            warnings.warn(
                f"{self!r} was not closed: use `async with`, or await aclose()", ResourceWarning, stacklevel=2
            )
            lock.close()

    async def claim(self, key: str) -> Claim | None:
        check_text("key", key)
        waiter = self._request(lambda connection: self._claim(connection, key))
        try:
            claim: Claim | None = await waiter
        except asyncio.CancelledError:
            # The claim may have been made at the moment of the cancellation.
            if not waiter.cancelled() and waiter.exception() is None:
                self._release_unused(waiter.result())
            raise
        return claim

    async def write(self, claim: Claim, state: str) -> None:
        check_text("state", state)
        await self._request(self._change(claim, "state = ?, updated_at = ?", state, time.time()))

    async def release(self, claim: Claim) -> None:
        await self._request(self._change(claim, "owner = NULL"))

    async def aclose(self) -> None:
        """Finish what was requested, close the file, and release all claims."""
        if self._process != os.getpid():
            return  # the parent process closes it
        with self._queue:
            if self._closing is None:
                self._closing = self._writer.submit(self._close)
                self._writer.shutdown(wait=False)
            closing = self._closing
        await asyncio.shield(asyncio.wrap_future(closing))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    # On the event loop

    def _change(self, claim: Claim, changes: str, *values: object) -> _Work:
        # A stale or released claim matches no row.
        statement = f"UPDATE packages SET {changes} WHERE key = ? AND fence = ? AND owner = ?"  # noqa: S608  # constants

        def run(connection: sqlite3.Connection) -> ClaimLost | None:
            changed = connection.execute(statement, (*values, claim.key, claim.fence, self._owner))
            return None if changed.rowcount else ClaimLost(claim.key)

        return run

    def _request(self, work: _Work) -> asyncio.Future[Any]:
        """Queue work for the writer's thread. It is done in order, even if the waiter is cancelled."""
        waiter = asyncio.get_running_loop().create_future()
        self._submit(_Operation(work, waiter))
        return waiter

    def _submit(self, operation: _Operation) -> None:
        if self._process != os.getpid():
            message = f"the journal {self.path} was opened before a fork; open it again in the child process"
            raise JournalError(message, transient=False)
        with self._queue:
            if self._closing is not None:
                raise JournalError(f"the journal {self.path} is closed", transient=False)
            self._waiting.append(operation)
            if not self._writing:
                self._writing = True
                self._writer.submit(self._write_all)

    def _deliver(self, operations: list[_Operation]) -> None:
        """Wake the waiters of one event loop."""
        for operation in operations:
            assert operation.waiter is not None
            if operation.waiter.cancelled():
                self._release_unused(operation.outcome)
            elif isinstance(operation.outcome, Exception):
                operation.waiter.set_exception(operation.outcome)
            else:
                operation.waiter.set_result(operation.outcome)

    def _release_unused(self, outcome: object) -> None:
        """Release a claim whose waiter is gone."""
        if isinstance(outcome, Claim):
            # A closed journal has no claims.
            with contextlib.suppress(JournalError):
                self._submit(_Operation(self._change(outcome, "owner = NULL"), None))

    # In the writer's thread

    def _write_all(self) -> None:
        """Commit all waiting operations together, until none wait."""
        while True:
            with self._queue:
                operations, self._waiting = self._waiting, []
                self._writing = bool(operations)
            if not operations:
                return
            self._commit(operations)
            # One call for each loop: waking an event loop costs more than a statement.
            waiting = [operation for operation in operations if operation.waiter is not None]
            for loop in {operation.loop for operation in waiting}:
                same_loop = [operation for operation in waiting if operation.loop is loop]
                try:
                    loop.call_soon_threadsafe(self._deliver, same_loop)
                except RuntimeError:
                    # The loop is closed.
                    for operation in same_loop:
                        self._release_unused(operation.outcome)

    def _commit(self, operations: list[_Operation]) -> None:
        try:
            with self._database.connected() as connection:
                if self._lock is None:
                    self._take_lock()
                connection.execute("BEGIN IMMEDIATE")
                for operation in operations:
                    operation.outcome = operation.work(connection)
                connection.execute("COMMIT")
            return
        except JournalError as error:
            failure = error
        except Exception as error:  # waiting callers must get an error
            failure = JournalError(f"the journal {self.path}: {_describe(error)}", transient=is_transient(error))
        for operation in operations:
            operation.outcome = copy.copy(failure)

    def _claim(self, connection: sqlite3.Connection, key: str) -> Claim | None:
        row = connection.execute("SELECT state, owner, fence FROM packages WHERE key = ?", (key,)).fetchone()
        state, owner, fence = row or (None, None, 0)
        if owner is not None and self._is_alive(owner):
            return None
        connection.execute(
            "INSERT INTO packages (key, state, owner, fence, updated_at) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, fence = excluded.fence",
            (key, state, self._owner, fence + 1, time.time()),
        )
        return Claim(key, state, fence + 1)

    def _close(self) -> None:
        self._database.close()
        if self._lock is not None:
            # A lock file that stays is removed by the next journal object that finds it unlocked.
            with contextlib.suppress(OSError):
                self._lock_path(self._owner).unlink()
            self._lock.close()
            self._lock = None

    # Owners, each with a lock file

    def _lock_path(self, owner: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{owner}.lock")

    def _take_lock(self) -> None:
        """Create and lock this journal's lock file; its claims last as long as the lock."""
        for left in self.path.parent.glob(f"{glob.escape(self.path.name)}.*.lock"):
            self._is_alive(left.name[len(self.path.name) + 1 : -len(".lock")])
        while True:
            owner = secrets.token_hex(8)
            lock = os.fdopen(os.open(self._lock_path(owner), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b", 0)
            # Before it was locked, another process may have taken it for a dead owner's and removed it.
            if _locked(lock.fileno(), exclusively=True) and os.fstat(lock.fileno()).st_nlink:
                break
            lock.close()
        self._owner, self._lock = owner, lock

    def _is_alive(self, owner: str) -> bool:
        """Return whether the owner's lock is held; remove the lock file of a dead owner."""
        try:
            lock = os.open(self._lock_path(owner), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            if not _locked(lock, exclusively=False):
                return True
            self._lock_path(owner).unlink(missing_ok=True)
            return False
        finally:
            os.close(lock)


class _Operation:
    """Work on the database, its outcome, and the future of the caller that waits for it."""

    def __init__(self, work: _Work, waiter: asyncio.Future[Any] | None) -> None:
        self.work = work
        self.waiter = waiter
        self.outcome: object = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self.waiter is not None
        return self.waiter.get_loop()


def check_text(name: str, value: object) -> None:
    """Raise `InvalidRequest` if the value is blank, or a database can't hold it as text."""
    if not isinstance(value, str) or not _checks.is_text(value.strip()) or "\0" in value:
        raise InvalidRequest(f"{name}: must be a non-empty string without null characters, got {value!r}")


def _describe(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _locked(handle: int, *, exclusively: bool) -> bool:
    """Try to lock the file; return whether that succeeded.

    Unlike lockf, flock also excludes two owners in one process.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if exclusively else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    def value(statement: str) -> int:
        found: int = connection.execute(statement).fetchone()[0]
        return found

    with connection:
        # One transaction: another run may be creating the table.
        connection.execute("BEGIN")
        is_ours = value("PRAGMA application_id") == _APPLICATION
        version = value("PRAGMA user_version")
        tables = value("SELECT count(*) FROM sqlite_master")
    if not is_ours and tables:
        message = f"the journal {path} is the database of another program; it was not changed"
        raise JournalError(message, transient=False)
    if is_ours and version > _VERSION:
        message = f"the journal {path} was written by a newer version of signing-async; upgrade this one"
        raise JournalError(message, transient=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    if not is_ours:
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            if not value("SELECT count(*) FROM sqlite_master"):
                connection.execute(_TABLE)
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {_VERSION}")
        sync_folder(path.parent)


_journals: WeakSet[SqliteJournal] = WeakSet()


def _after_fork_in_child() -> None:
    """Close the locks of the parent's journals; otherwise a child would keep the claims of a dead parent."""
    for journal in _journals:
        if journal._lock is not None:
            journal._lock.close()
            journal._lock = None


_register_at_fork = getattr(os, "register_at_fork", dict)  # Windows has no fork
_register_at_fork(after_in_child=_after_fork_in_child)
