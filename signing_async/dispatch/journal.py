"""The journal of a dispatch: what was begun and what came of it, package by package, and who is at work on which."""

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
from .._sqlite import SharedDatabase
from ..errors import ConfigurationError, InvalidRequest, JournalError

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no flock
    fcntl = None  # type: ignore[assignment]  # a module's type does not allow None

__all__ = ["Claim", "ClaimLost", "Journal", "JournalError", "SqliteJournal"]

_Work = Callable[[sqlite3.Connection], object]

_APPLICATION = 0x5369676E
_VERSION = 1
_TABLE = (
    "CREATE TABLE packages (key TEXT PRIMARY KEY, state TEXT, owner TEXT, fence INTEGER NOT NULL,"
    " updated_at REAL NOT NULL) WITHOUT ROWID"
)


class ClaimLost(Exception):
    """Somebody else has taken the package over. What was to be written was not; ``key`` names the package."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"the claim on package {self.key!r} was lost: another run has taken it over"


@attrs.frozen
class Claim:
    """A package that was taken for working on it."""

    key: str
    state: str | None
    """What was written last for this key; None if nothing ever was."""
    fence: int
    """Grows with every claim of the key: what an earlier holder still tries to write is told from it, and refused."""


class Journal(Protocol):
    """Keeps one text for each package, and lets one run at a time work on a package.

    Any failure of its own is a `JournalError`. ``signing_async.testing`` has a suite that implementations should pass.
    """

    async def claim(self, key: str) -> Claim | None:
        """Take a package; None while it is taken, here or in another run that is alive.

        A claim of a run that has died is free.
        """

    async def write(self, claim: Claim, state: str) -> None:
        """Keep this text for the package; when it returns, neither a crash nor a power cut loses it.

        `ClaimLost`, and nothing is kept, where somebody else has taken the package over.
        """

    async def release(self, claim: Claim) -> None:
        """Let go of the package; what was written stays. `ClaimLost` where somebody else has taken it over."""

    async def aclose(self) -> None:
        """Let go of everything."""


class SqliteJournal:
    """A journal in a SQLite file, for any number of runs and processes on one machine.

    What is written is on disk when ``write`` returns (WAL, ``synchronous=FULL``); what many packages write at once is
    committed together. Each journal object holds a lock of its own in a file beside the journal for as long as it
    lives: a claim is free the moment its process is dead, however it died, and never before. ::

        async with SqliteJournal("leases.journal") as journal:
            signing = await client.dispatch(package, journal)

    The file has to be on a local disk. ``timeout`` is for how many seconds another program may keep it locked.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 10.0) -> None:
        if fcntl is None:
            raise ConfigurationError("SqliteJournal needs POSIX file locks, which this system does not have")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 3600:
            raise ConfigurationError(f"SqliteJournal: timeout must be seconds above 0, at most 3600, not {timeout!r}")
        refused = ConfigurationError(f"journal: must be a path, not {path!r}")
        if path == "":
            raise refused
        try:
            expanded = os.path.expanduser(path)  # noqa: PTH111  # pathlib's raises where there is no such user
            # Through symbolic links, so that all who share the file look for locks in the same folder.
            self.path: Path = Path(os.path.realpath(expanded))
        except (TypeError, ValueError):
            raise refused from None
        prepare = partial(_prepare, path=self.path)
        self._database = SharedDatabase(self.path, prepare, timeout=timeout, mode=0o600)
        self._owner = ""
        self._lock: IO[bytes] | None = None
        self._process = os.getpid()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="signing-journal")
        self._queue = threading.Lock()
        self._waiting: list[_Step] = []
        self._writing = False
        self._closing: Future[None] | None = None
        _journals.add(self)

    def __repr__(self) -> str:
        return f"SqliteJournal({str(self.path)!r})"

    def __del__(self) -> None:
        # A constructor that raised has opened nothing.
        lock = getattr(self, "_lock", None)
        if lock is not None:
            warnings.warn(
                f"{self!r} was not closed: use `async with`, or await aclose()", ResourceWarning, stacklevel=2
            )
            lock.close()

    async def claim(self, key: str) -> Claim | None:
        _check_text("key", key)
        waiter = self._ask(lambda connection: self._claim(connection, key))
        try:
            claim: Claim | None = await waiter
        except asyncio.CancelledError:
            # It may have come in the very moment of the cancellation.
            if not waiter.cancelled() and waiter.exception() is None:
                self._give_back(waiter.result())
            raise
        return claim

    async def write(self, claim: Claim, state: str) -> None:
        _check_text("state", state)
        await self._ask(self._change(claim, "state = ?, updated_at = ?", state, time.time()))

    async def release(self, claim: Claim) -> None:
        await self._ask(self._change(claim, "owner = NULL"))

    async def aclose(self) -> None:
        """Finish what was asked for, close the file, and let go of all claims."""
        if self._process != os.getpid():
            return  # it is the parent's
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

    # What is asked for

    def _change(self, claim: Claim, changes: str, *values: object) -> _Work:
        # A claim of a run that was taken for dead, or that was let go of, changes nothing.
        statement = f"UPDATE packages SET {changes} WHERE key = ? AND fence = ? AND owner = ?"  # noqa: S608  # own words

        def run(connection: sqlite3.Connection) -> ClaimLost | None:
            changed = connection.execute(statement, (*values, claim.key, claim.fence, self._owner))
            return None if changed.rowcount else ClaimLost(claim.key)

        return run

    def _ask(self, work: _Work) -> asyncio.Future[Any]:
        """Have it done. It is done also if its waiter is cancelled: what is asked for afterwards comes after it."""
        waiter = asyncio.get_running_loop().create_future()
        self._submit(_Step(work, waiter))
        return waiter

    def _submit(self, step: _Step) -> None:
        if self._process != os.getpid():
            raise JournalError(f"the journal {self.path} was opened before a fork: open it anew in the child process")
        with self._queue:
            if self._closing is not None:
                raise JournalError(f"the journal {self.path} is closed")
            self._waiting.append(step)
            if not self._writing:
                self._writing = True
                self._writer.submit(self._write_all)

    def _deliver(self, steps: list[_Step]) -> None:
        """On the event loop of those who wait for them."""
        for step in steps:
            assert step.waiter is not None
            if step.waiter.cancelled():
                self._give_back(step.outcome)
            elif isinstance(step.outcome, Exception):
                step.waiter.set_exception(step.outcome)
            else:
                step.waiter.set_result(step.outcome)

    def _give_back(self, outcome: object) -> None:
        """What nobody waits for any more must not be kept from others, should it be a claim."""
        if isinstance(outcome, Claim):
            # A journal that is closed meanwhile keeps nothing anyway.
            with contextlib.suppress(JournalError):
                self._submit(_Step(self._change(outcome, "owner = NULL"), None))

    # What is done, in the writer's thread

    def _write_all(self) -> None:
        """Commit what waits, all of it at once, until nothing does."""
        while True:
            with self._queue:
                steps, self._waiting = self._waiting, []
                self._writing = bool(steps)
            if not steps:
                return
            self._commit(steps)
            # Told together: to wake an event loop costs more than a statement.
            for loop in {step.waiter.get_loop() for step in steps if step.waiter is not None}:
                theirs = [step for step in steps if step.waiter is not None and step.waiter.get_loop() is loop]
                try:
                    loop.call_soon_threadsafe(self._deliver, theirs)
                except RuntimeError:
                    # The loop is closed, and nobody waits any more.
                    for step in theirs:
                        self._give_back(step.outcome)

    def _commit(self, steps: list[_Step]) -> None:
        try:
            with self._database.connected() as connection:
                if self._lock is None:
                    self._take_lock()
                connection.execute("BEGIN IMMEDIATE")
                for step in steps:
                    step.outcome = step.work(connection)
                connection.execute("COMMIT")
            return
        except JournalError as error:
            failure = error
        except Exception as error:  # waiting callers must get an error
            failure = JournalError(f"the journal {self.path}: {_words(error)}")
        for step in steps:
            step.outcome = copy.copy(failure)

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
            # One that stays is removed by whoever looks for the dead next.
            with contextlib.suppress(OSError):
                self._lock_path(self._owner).unlink()
            self._lock.close()
            self._lock = None

    # Who is alive

    def _lock_path(self, owner: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{owner}.lock")

    def _take_lock(self) -> None:
        """Be somebody, for as long as this lock is held."""
        for left in self.path.parent.glob(f"{glob.escape(self.path.name)}.*.lock"):
            self._is_alive(left.name[len(self.path.name) + 1 : -len(".lock")])
        while True:
            owner = secrets.token_hex(8)
            lock = os.fdopen(os.open(self._lock_path(owner), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b", 0)
            # Somebody who looked at it before it was locked may have taken it for a dead one's, and removed it.
            if _locked(lock.fileno(), exclusively=True) and os.fstat(lock.fileno()).st_nlink:
                break
            lock.close()
        self._owner, self._lock = owner, lock

    def _is_alive(self, owner: str) -> bool:
        """Whether the lock is held that an owner holds all its life; a dead one's is removed."""
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


class _Step:
    """Something to do with the database, what came of it, and who waits for that."""

    def __init__(self, work: _Work, waiter: asyncio.Future[Any] | None) -> None:
        self.work = work
        self.waiter = waiter
        self.outcome: object = None


def _check_text(name: str, value: str) -> None:
    """Refuse what a database cannot hold as a text."""
    if not _checks.is_text(value) or "\0" in value:
        raise InvalidRequest(f"{name}: must be a text that is not empty, without null characters, not {value!r}")


def _words(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _locked(handle: int, *, exclusively: bool) -> bool:
    """Whether the lock could be taken. flock, not lockf: it also tells two owners in one process apart."""
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
        # Read as one: another run may be making it.
        connection.execute("BEGIN")
        is_ours = value("PRAGMA application_id") == _APPLICATION
        version = value("PRAGMA user_version")
        tables = value("SELECT count(*) FROM sqlite_master")
    if not is_ours and tables:
        raise JournalError(f"the journal {path} is the database of another program; it was left as it is")
    if is_ours and version > _VERSION:
        raise JournalError(f"the journal {path} was made by a newer version of signing-async")
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
    """Close the locks of the parent's journals: else a child would keep the claims of a dead parent."""
    for journal in _journals:
        if journal._lock is not None:
            journal._lock.close()
            journal._lock = None


_register_at_fork = getattr(os, "register_at_fork", dict)  # Windows has no fork
_register_at_fork(after_in_child=_after_fork_in_child)
