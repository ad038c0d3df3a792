"""Open local files without blocking, lock them, sync their folders, and judge their errors."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from .errors import ConfigurationError

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no flock
    fcntl = None  # type: ignore[assignment]  # a module's type does not allow None

__all__ = ["check_locks", "is_transient", "lock", "open_regular", "sync_folder", "try_lock"]

# Without O_NONBLOCK, opening a pipe waits for its writer. Not every system has these flags.
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
# The path is unusable, the access is denied, or the file system does not support the operation.
_PERMANENT = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EILSEQ),
        *(errno.EACCES, errno.EPERM, errno.EROFS),
        *(errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS),
    }
)


def is_transient(error: OSError) -> bool:
    """Return whether the operation on a file may succeed later, as after a full disk or an I/O error."""
    return error.errno not in _PERMANENT


def open_regular(path: str | os.PathLike[str]) -> int | None:
    """Open a regular file for reading and return its descriptor; None if the path is something else, such as a pipe."""
    descriptor = os.open(path, _READ_FLAGS)
    try:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    if regular:
        return descriptor
    os.close(descriptor)
    return None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, if its file system can sync folders."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def check_locks(user: str) -> None:
    """Raise `ConfigurationError` if the system lacks the locks that the class ``user`` needs."""
    if fcntl is None:
        raise ConfigurationError(f"{user} needs POSIX file locks, which this system does not have")


def lock(descriptor: int) -> None:
    """Lock a file, and wait until no other descriptor holds its lock."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock a file unless another descriptor holds its lock; return whether that succeeded.

    Unlike lockf, flock also excludes two descriptors in one process.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
