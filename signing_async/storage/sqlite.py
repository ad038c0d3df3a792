"""SQLite files that threads, processes and forks share, and the engine on one: a thread, and group commit.

Standard library only: `webhooks` imports it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

from .. import _checks, _files
from .._files import resolve_path, sync_folder
from ..errors import ConfigurationError, StorageError
from .claims import OwnerLock

__all__ = ["FileFormat", "SharedDatabase", "SqliteEngine", "is_new_file", "is_transient", "set_up"]

_PAUSE = 0.02
_TRANSIENT = (
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_INTERRUPT),
    # A file cannot be opened for lack of descriptors, too.
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_CANTOPEN),
)
_INSPECT = """\
SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master)
FROM pragma_application_id, pragma_user_version"""
DIALECT = {
    "serial": "INTEGER PRIMARY KEY",
    "time": "REAL",
    "moment": "0",
    "bytes": "BLOB",
    "now": "now()",
    "at": "",
    "seconds": "",
    "each": "json_each",
    "json": "",
    "skip_locked": "",
    "clustered": "WITHOUT ROWID",
    "owner": "owner()",
    "dead": "NOT owner_is_alive(held.owner)",
}


@dataclass(frozen=True, slots=True)
class FileFormat:
    """What a file holds, and how errors name it."""

    name: str
    """A noun, such as "journal"."""
    user: str
    """The class that opens such files."""
    application: int
    """SQLite's ``application_id`` of the files: the database of another program is not changed."""
    version: int
    table: str
    setup: tuple[str, ...]
    """The statements that set up a new file."""
    failure: type[StorageError]

    def render(self, statement: str) -> str:
        """Return the statement in SQLite's dialect."""
        return statement.format(table=self.table, name=self.table, **DIALECT)


@dataclass(eq=False, slots=True)
class _Operation:
    """A statement, and the future of the caller that waits for its rows."""

    statement: str
    parameters: dict[str, object]
    durable: bool
    waiter: asyncio.Future[list[Any]]
    outcome: Any = None


class SqliteEngine:
    """Runs statements on a SQLite file in its own thread, and commits all waiting ones in one transaction.

    The result of a durable statement is on disk when the caller gets it (WAL, ``synchronous=FULL``); others survive the
    death of the process, but may be lost in a power cut. Failures are raised as the format's ``failure``. ``timeout``
    is how many seconds to wait while another program locks the file.
    """

    def __init__(self, path: object, file_format: FileFormat, *, timeout: float) -> None:
        if sqlite3.sqlite_version_info < (3, 35):
            found = sqlite3.sqlite_version
            raise ConfigurationError(f"{file_format.user} needs SQLite 3.35 (RETURNING), found {found}")
        timeout = _checks.number("timeout", timeout, above=0, at_most=3600)
        self.path: Path = resolve_path(file_format.name, path)
        self.address: str = str(self.path)
        self._format = file_format
        self._title = f"the {file_format.name} {self.path}"
        # Held from the first statement until the file is closed.
        self._lock = OwnerLock(self.path, file_format.user)
        prepare = partial(_prepare, title=self._title, file_format=file_format, lock=self._lock)
        self._database = SharedDatabase(self.path, prepare, timeout=timeout, mode=0o600)
        self._file: tuple[int, int] | None = None
        """The device and the inode of the file since the first commit."""
        self._process = 0
        """The id of the process that ran the first statement: a server may create the object before it forks."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"signing-{file_format.name}")
        self._queue = threading.Lock()
        self._waiting: list[_Operation] = []
        self._writing = False
        self._closing: Future[None] | None = None

    async def run(self, statement: str, *parameters: object, durable: bool = True) -> list[Any]:
        """Run a statement in a transaction, and return its rows. Statements run in order, cancelled or not."""
        self._process = self._process or os.getpid()
        if self._process != os.getpid():
            raise self._permanent("was opened before a fork; open it again in the child process")
        # To SQLite, `$1` is the parameter named "1".
        named = {f"{number}": value for number, value in enumerate(parameters, 1)}
        waiter: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        with self._queue:
            if self._closing is not None:
                raise self._permanent("is closed")
            self._waiting.append(_Operation(self._format.render(statement), named, durable, waiter))
            if not self._writing:
                self._writing = True
                self._writer.submit(self._write_all)
        return await waiter

    def _permanent(self, problem: str) -> Exception:
        return self._format.failure(f"{self._title} {problem}", transient=False)

    def warn_if_open(self, owner: object) -> None:
        """Warn that ``owner`` was not closed; for its ``__del__``."""
        if self._lock.is_held:
            self._lock.release()
            warnings.warn(
                f"{owner!r} was not closed: use `async with`, or await aclose()", ResourceWarning, stacklevel=3
            )

    async def aclose(self) -> None:
        """Finish the submitted work, close the file and release the lock."""
        if self._process not in (0, os.getpid()):
            return  # the parent process closes it
        with self._queue:
            if self._closing is None:
                self._closing = self._writer.submit(self._close)
                self._writer.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(self._closing))

    # In the writer's thread

    def _close(self) -> None:
        self._database.close()
        self._lock.release()

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
            for loop in {operation.waiter.get_loop() for operation in operations}:
                done = [operation for operation in operations if operation.waiter.get_loop() is loop]
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(_wake, done)

    def _commit(self, operations: list[_Operation]) -> None:
        try:
            with self._database.connected() as connection:
                is_durable = any(operation.durable for operation in operations)
                connection.execute(f"PRAGMA synchronous = {'FULL' if is_durable else 'NORMAL'}")
                connection.execute("BEGIN IMMEDIATE")
                self._lock.acquire()  # inside the transaction: only one process at a time has one
                for each in operations:
                    each.outcome = connection.execute(each.statement, each.parameters).fetchall()
                connection.execute("COMMIT")
            self._check_file()
            return
        except self._format.failure as error:
            failure = error
        except Exception as error:  # waiting callers must get an error
            text = getattr(error, "strerror", None) or str(error)
            failure = self._format.failure(f"{self._title}: {text}", transient=is_transient(error))
        if not failure.transient and len(operations) > 1:
            # One operation may have failed all of them: commit each on its own.
            for each in operations:
                self._commit([each])
            return
        for each in operations:
            each.outcome = copy.copy(failure)

    def _check_file(self) -> None:
        """Raise if the file was removed or replaced: what is written to it is lost, and a new one knows nothing."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            raise self._permanent("was removed while it was open: restore it, then restart") from None
        self._file = self._file or (status.st_dev, status.st_ino)
        if self._file != (status.st_dev, status.st_ino):
            raise self._permanent("was replaced while it was open: restore it, then restart")


def _wake(operations: list[_Operation]) -> None:
    """Give the waiters of one event loop their outcomes."""
    for each in operations:
        if each.waiter.done():  # the caller was cancelled
            continue
        if isinstance(each.outcome, Exception):
            each.waiter.set_exception(each.outcome)
        else:
            each.waiter.set_result(each.outcome)


def _prepare(connection: sqlite3.Connection, title: str, file_format: FileFormat, lock: OwnerLock) -> None:
    def owner_is_alive(owner: str) -> bool:
        try:
            return owner == lock.owner or lock.is_alive(owner)
        except OSError:
            return True  # an error in a function of SQL would lose its cause; the claim can be tried again

    is_new = is_new_file(connection, title, file_format)
    connection.row_factory = sqlite3.Row
    connection.create_function("now", 0, lambda: time.time())
    connection.create_function("owner", 0, lambda: lock.owner)
    connection.create_function("owner_is_alive", 1, owner_is_alive)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    if is_new:
        set_up(connection, file_format)
        sync_folder(lock.path.parent)


def is_new_file(connection: sqlite3.Connection, title: str, file_format: FileFormat) -> bool:
    """Return whether the file has no tables yet. Raise if it is not of this format: it is not changed then."""
    application, version, tables = connection.execute(_INSPECT).fetchone()
    if application != file_format.application:
        if tables:
            text = f"{title} is the database of another program; it was not changed"
            raise file_format.failure(text, transient=False)
        return True
    if version != file_format.version:
        advice = "a newer version of signing-async; upgrade this one"
        if version < file_format.version:
            advice = "an earlier version of signing-async; finish its work with that version, then move it away"
        raise file_format.failure(f"{title} was written by {advice}", transient=False)
    return False


def set_up(connection: sqlite3.Connection, file_format: FileFormat) -> None:
    """Make a new file one of this format, at once."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        for statement in file_format.setup:
            connection.execute(file_format.render(statement))
        connection.execute(f"PRAGMA application_id = {file_format.application}")
        connection.execute(f"PRAGMA user_version = {file_format.version}")


# Files that processes share


def is_transient(error: Exception) -> bool:
    """Return whether a failed operation on a database may succeed later: it is locked, or the disk is full or fails."""
    return _files.is_transient(error) if isinstance(error, OSError) else _primary_code(error) in _TRANSIENT


def _primary_code(error: Exception) -> int:
    """Return SQLite's result code without its extension: SQLITE_BUSY_RECOVERY is a SQLITE_BUSY too."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


class SharedDatabase:
    """One connection to a SQLite file, opened on first use and closed before a fork.

    ``prepare`` sets up each new connection: the journal mode, the tables. It must be idempotent: it is repeated for up
    to ``timeout`` seconds while another process keeps the file locked, because SQLite itself doesn't wait for every
    lock, for example when two processes switch a new file to WAL at once. ``mode`` is the permissions of a new file;
    None leaves them to SQLite.
    """

    def __init__(
        self,
        path: Path,
        prepare: Callable[[sqlite3.Connection], None],
        *,
        timeout: float,
        mode: int | None = None,
    ) -> None:
        self.path = path
        self.lock: threading.Lock = threading.Lock()
        """Held while the connection is used, and during a fork."""
        self.connection: sqlite3.Connection | None = None
        self._prepare = prepare
        self._timeout = timeout
        self._mode = mode
        with _registering:
            _databases.add(self)

    def __del__(self) -> None:
        # Python 3.13 warns about connections that are open when they are collected.
        self.disconnect()

    @contextlib.contextmanager
    def connected(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection, locked. An error closes it, which rolls back; the next use opens a new one."""
        with self.lock:
            try:
                if self.connection is None:
                    self._connect()
                assert self.connection is not None
                yield self.connection
            except BaseException:
                self.disconnect()
                raise

    def close(self) -> None:
        """Close the connection; the next use opens a new one."""
        with self.lock:
            self.disconnect()

    def disconnect(self) -> None:
        """Close the connection while the lock is held."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _connect(self) -> None:
        if self._mode is not None:
            # O_EXCL: closing a descriptor of an existing file would release this process's locks on it.
            with _creating, contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._mode))
        self.connection = sqlite3.connect(
            self.path, timeout=self._timeout, isolation_level=None, check_same_thread=False
        )
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return self._prepare(self.connection)
            except sqlite3.OperationalError as error:
                if _primary_code(error) != sqlite3.SQLITE_BUSY or not _pause_until(deadline):
                    raise


def _pause_until(deadline: float) -> bool:
    """Wait a moment; return whether the deadline has not passed."""
    time.sleep(_PAUSE)
    return time.monotonic() < deadline


# A connection carried across a fork undoes the locks on the file: one side may delete the log that the other writes to.
# A lock held by another thread at the fork would never be released in the child.
_databases: WeakSet[SharedDatabase] = WeakSet()
_forking: list[SharedDatabase] = []
_registering = threading.Lock()
_creating = threading.Lock()


def _before_fork() -> None:
    _registering.acquire()
    _forking.extend(_databases)
    for database in _forking:
        database.lock.acquire()
        database.disconnect()


def _after_fork() -> None:
    while _forking:
        _forking.pop().lock.release()
    _registering.release()


_register_at_fork = getattr(os, "register_at_fork", dict)  # Windows has no fork
_register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
