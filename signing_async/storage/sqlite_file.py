"""SQLite files that threads, processes and forks share. Standard library only: `webhooks` imports it too."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from weakref import WeakValueDictionary

from .. import _files

__all__ = ["SharedDatabase", "is_transient"]

_PAUSE = 0.02
_TRANSIENT = frozenset(
    {
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_INTERRUPT),
        *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM),
    }
)


def is_transient(error: Exception, path: Path | None = None) -> bool:
    """Return whether a failed operation on a database may succeed later: it is locked, or the disk is full or fails.

    ``path`` is the database file. Without it, a failure to open the file counts as transient: the cause is unknown.
    """
    if isinstance(error, OSError):
        return _files.is_transient(error)
    code = _primary_code(error)
    if code == sqlite3.SQLITE_CANTOPEN:
        return path is None or _may_open(path)
    return code in _TRANSIENT


def _may_open(path: Path) -> bool:
    """Return whether SQLite may open the file later: nothing is wrong with it, so descriptors or memory ran out."""
    # Do not open the file: closing the descriptor would release this process's locks on it.
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return _files.is_transient(error)
    return stat.S_ISREG(mode) and os.access(path, os.R_OK) and os.access(path.parent, os.W_OK)


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
        self._process = 0
        with _forking:
            _databases[id(self)] = self

    def __del__(self) -> None:
        # Python 3.13 warns about connections that are open when they are collected.
        self._disconnect()

    @contextlib.contextmanager
    def connected(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection, locked. An error closes it, which rolls back; the next use opens a new one."""
        with self.lock:
            try:
                yield self._open()
            except BaseException:
                self._disconnect()
                raise

    def close(self) -> None:
        """Close the connection; the next use opens a new one."""
        with self.lock:
            self._disconnect()

    def _open(self) -> sqlite3.Connection:
        if self._process != os.getpid():
            self._disconnect()
        if self.connection is None:
            self.connection, self._process = self._connect(), os.getpid()
        return self.connection

    def _connect(self) -> sqlite3.Connection:
        if self._mode is not None:
            # O_EXCL: closing a descriptor of an existing file would release this process's locks on it.
            with _creating, contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._mode))
        connection = sqlite3.connect(self.path, timeout=self._timeout, isolation_level=None, check_same_thread=False)
        try:
            self._wait_until_prepared(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _wait_until_prepared(self, connection: sqlite3.Connection) -> None:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return self._prepare(connection)
            except sqlite3.OperationalError as error:
                if _primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                    raise
            time.sleep(_PAUSE)

    def _disconnect(self) -> None:
        connection, self.connection = self.connection, None
        if connection is None:
            return
        if self._process == os.getpid():
            connection.close()
        else:
            # A server written in C has forked without telling Python: to close the parent's connection here would let
            # SQLite delete the log that the parent writes to.
            _inherited.append(connection)


# A connection carried across a fork undoes the locks on the file: one side may delete the log that the other writes to.
# A lock held by another thread at the fork would never be released in the child.
_databases: WeakValueDictionary[int, SharedDatabase] = WeakValueDictionary()
_inherited: list[sqlite3.Connection] = []
_locked_databases: list[SharedDatabase] = []
_forking = threading.Lock()
_creating = threading.Lock()


def _before_fork() -> None:
    _forking.acquire()
    # A copy of the references, because other threads remove databases without this lock.
    _locked_databases.extend(filter(None, [reference() for reference in _databases.valuerefs()]))
    for database in _locked_databases:
        database.lock.acquire()
        database._disconnect()


def _after_fork() -> None:
    while _locked_databases:
        _locked_databases.pop().lock.release()
    _forking.release()


_register_at_fork = getattr(os, "register_at_fork", dict)  # Windows has no fork
_register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
