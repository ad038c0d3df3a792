"""Open local files without blocking, and sync their folders."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["open_regular", "sync_folder"]

# Without O_NONBLOCK, opening a pipe waits for its writer. Not every system has these flags.
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


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
