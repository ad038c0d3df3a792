"""Files of this machine: opened without waiting for anybody, and their names made durable."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["open_regular", "sync_folder"]

# Opening a pipe for reading would wait for its writer. Not every system has all of these.
_TO_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


def open_regular(path: str | os.PathLike[str]) -> int | None:
    """The descriptor of a file, opened for reading; None where the path leads to something else, such as a pipe."""
    number = os.open(path, _TO_READ)
    try:
        regular = stat.S_ISREG(os.fstat(number).st_mode)
    except BaseException:
        os.close(number)
        raise
    if regular:
        return number
    os.close(number)
    return None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder as durable as the files are, as far as its file system has a way to."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)
