"""Read files at an offset: on the event loop if the system has the data in memory, otherwise in a thread."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager

from .._files import unusable

__all__ = ["OpenFile", "buffer_errors", "read_cached", "read_fully", "source_errors"]

# Missing on macOS and Windows.
_NO_WAIT: int | None = getattr(os, "RWF_NOWAIT", None) if hasattr(os, "preadv") else None


class OpenFile:
    """An open file. If it is closed while a thread uses it, its descriptor stays open until the thread is done.

    Otherwise the system could give the descriptor's number to another file, which the thread would read or write.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._users = 1
        self._closed = False
        self._lock = threading.Lock()
        self._position_lock = threading.Lock()
        self.status: os.stat_result = os.fstat(descriptor)

    def __enter__(self) -> int:
        """Return the descriptor, for a thread that may outlive the upload."""
        with self._lock:
            if self._closed:
                raise ValueError("the file is closed")
            self._users += 1
        return self.descriptor

    def __exit__(self, *_: object) -> None:
        self._leave()

    def read(self, block: memoryview, at: int) -> int:
        """Read from an offset into the block, and return how many bytes were read. Call it in a thread."""
        if hasattr(os, "preadv"):
            return os.preadv(self.descriptor, [block], at)
        with self._position_lock:  # Windows reads only from the position that all threads share
            os.lseek(self.descriptor, at, os.SEEK_SET)
            data = os.read(self.descriptor, len(block))
        block[: len(data)] = data
        return len(data)

    def has_changed(self) -> bool:
        """Return whether the file differs from when it was opened, or can no longer be examined."""
        try:
            now = os.fstat(self.descriptor)
        except OSError:
            return True
        return now.st_mtime_ns != self.status.st_mtime_ns or now.st_size != self.status.st_size

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            os.close(self.descriptor)

    def __del__(self) -> None:
        # If `fstat` fails in `__init__`, nothing else closes the descriptor.
        self.close()


def read_cached(file: OpenFile, block: memoryview, at: int) -> bool:
    """Fill the block if the system has the data in memory; return whether it had. Never waits for a disk."""
    if _NO_WAIT is None:
        return False
    try:
        return os.preadv(file.descriptor, [block], at, _NO_WAIT) == len(block)
    except OSError:  # not in memory, or the file system cannot tell
        return False


def read_fully(file: OpenFile, block: memoryview, at: int) -> bool:
    """Fill the block from an offset; return whether the file has that many bytes."""
    with file:
        while block and (count := file.read(block, at)):
            block, at = block[count:], at + count
    return not block


@contextlib.contextmanager
def source_errors(problem: str) -> Iterator[None]:
    """Turn `OSError` and `ValueError` into `InvalidRequest`. Closed files and invalid paths raise `ValueError`."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise unusable(f"source: {problem}: {reason}", error) from None


def buffer_errors(filename: str) -> AbstractContextManager[None]:
    """Turn an error of the temporary file that holds a stream into `InvalidRequest`."""
    return source_errors(f"cannot buffer {filename} in a temporary file (TMPDIR sets its folder)")
