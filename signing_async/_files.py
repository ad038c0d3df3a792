"""Open, lock, move and sync local files, on POSIX systems and on Windows, and classify their errors."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from .errors import ConfigurationError, InvalidRequest

# Windows has no flock; other systems have no msvcrt.
fcntl: Any
msvcrt: Any
try:
    import fcntl
except ModuleNotFoundError:
    fcntl = None
try:
    import msvcrt
except ModuleNotFoundError:
    msvcrt = None

__all__ = [
    "check_locks",
    "expand_user",
    "hash_file",
    "is_transient",
    "locked",
    "place_new",
    "remove_locked",
    "resolve_path",
    "retry_while_open",
    "sync_folder",
    "try_lock",
    "unlock",
    "unusable",
]

T = TypeVar("T")

# Windows lets no other process read a locked byte, so the locked byte lies far behind the content.
_LOCKED_BYTE = 1 << 40
_PAUSE = 0.02
_ATTEMPTS = 50
# The path or descriptor is unusable, the access is denied, or the file system does not support the operation.
_PERMANENT = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EILSEQ),
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EBADF, errno.ENXIO),
        *(errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS),
    }
)

# Errors of these modules have their own numbers: the 1 of an `SSLError` is not EPERM.
_NETWORK_MODULES = ("ssl", "socket")


def is_transient(error: OSError) -> bool:
    """Return whether the failed operation may succeed later, for example after a full disk or an I/O error."""
    if isinstance(error, ValueError):  # an untrusted certificate, or a file object that cannot be read or written
        return False
    # Compare names, because importing these modules is slow.
    if any(base.__module__ in _NETWORK_MODULES for base in type(error).__mro__):
        return True
    if error.errno is None:  # not from the system: a lost connection may be transient, a corrupt gzip file is not
        return isinstance(error, ConnectionError | TimeoutError)
    return error.errno not in _PERMANENT


def unusable(message: str, error: Exception) -> InvalidRequest:
    """Return the error for a caller's file. It is transient if the failed operation may succeed later."""
    return InvalidRequest(message, transient=isinstance(error, OSError) and is_transient(error))


def expand_user(path: str) -> str:
    """Replace a leading ``~``. A path of an unknown user stays as it is."""
    try:
        return str(Path(path).expanduser())
    except RuntimeError:
        return path


def resolve_path(name: str, path: Any) -> Path:
    """Return the path without ``~`` and symbolic links, so that all processes look for its lock in the same folder."""
    problem = ConfigurationError(f"{name}: must be a path, got {path!r}")
    if path == "":
        raise problem
    try:
        return Path(os.path.realpath(expand_user(path)))
    except (TypeError, ValueError):
        raise problem from None


def hash_file(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, if its file system can sync folders."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows cannot open folders
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def place_new(source: Path, target: Path) -> None:
    """Move a file to another name on its file system. Raise `FileExistsError` if a file has that name already."""
    try:
        os.link(source, target)
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError:  # no hard links on this file system: claim the name first
        target.open("xb").close()
        try:
            source.replace(target)
        except BaseException:
            if source.exists():
                target.unlink()
            raise
    else:
        source.unlink()


def retry_while_open(work: Callable[[], T]) -> T:
    """Call ``work`` and return its result. Retry for a second while Windows refuses a file that is open elsewhere."""
    for _ in range(_ATTEMPTS):
        try:
            return work()
        except PermissionError as error:
            if not hasattr(error, "winerror"):
                raise
        time.sleep(_PAUSE)
    return work()


def check_locks(required_by: str) -> None:
    """Raise `ConfigurationError` if the system lacks the locks that the class ``required_by`` needs."""
    if fcntl is None and msvcrt is None:
        raise ConfigurationError(
            f"{required_by} needs file locks, which this system does not have: use Redis, PostgreSQL or S3"
        )


def try_lock(descriptor: int) -> bool:
    """Lock a file unless another descriptor holds its lock; return whether that succeeded.

    Unlike lockf, flock also excludes two descriptors in one process. The position in the file may change.
    """
    if fcntl is None:
        return _try_lock_byte(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _try_lock_byte(descriptor: int) -> bool:
    os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except PermissionError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Release the lock of a locked file. The position in the file may change."""
    if fcntl is None:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """Hold the lock of a file; wait in this thread until no other descriptor holds it."""
    if fcntl is None:
        while not try_lock(descriptor):
            time.sleep(_PAUSE)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        unlock(descriptor)


def remove_locked(path: Path, close: Callable[[], None]) -> None:
    """Remove a file that the caller has locked, and close it."""
    try:
        # Unlink while locked: a process that locks the file afterwards finds that it has no name any more.
        path.unlink(missing_ok=True)
    except OSError:
        close()
        # Windows removes a file only if no process has it open, so no process can hold its lock.
        with contextlib.suppress(PermissionError):
            path.unlink(missing_ok=True)
    else:
        close()
