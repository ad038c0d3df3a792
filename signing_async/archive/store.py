"""The protocols of the stores that keep the files of an archive."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..errors import ArchiveError, InvalidRequest

__all__ = ["ArchiveStore", "ListedStore", "MissingBytes", "check_lines", "check_name"]


class MissingBytes(ArchiveError):
    """A file that grows by appends lacks bytes in its middle."""

    transient: bool = False


class ArchiveStore(Protocol):
    """Keeps files under relative names, whose parts are separated by ``/``.

    Failures are raised as `ArchiveError`, or as `ArchiveConflict` if another writer was first.
    """

    async def put(self, name: str, source: Path, sha256: str) -> None:
        """Store a local file, durably and atomically: readers see the whole file or none.

        If the name has the same content already, do nothing. Raises `ArchiveConflict` if it has other content, or
        cannot be used, for example because one of its folders is a file: only this name fails, not the whole archive.
        ``sha256`` is the file's hash in hexadecimal. The source may be moved.
        """

    def read(self, name: str, offset: int = 0) -> AsyncIterator[bytes]:
        """Yield the content of a file from ``offset`` on: nothing if the file is not longer.

        Raises `FileNotFoundError` if there is no such file. Bytes that another writer has appended are visible at once,
        and may end with an incomplete line.
        """

    async def append(self, name: str, offset: int, data: bytes) -> None:
        """Append whole lines to a file of exactly ``offset`` bytes, durably; an offset of 0 creates it.

        Raises `ArchiveConflict` if the file has another length: another writer was first. An incomplete last line,
        whose writer was interrupted, is removed and does not count.
        """


@runtime_checkable
class ListedStore(Protocol):
    """A store that can list its files, so that `verify_archive` finds files that the manifest does not name."""

    def names(self) -> AsyncIterator[str]:
        """Yield the names of all files, in any order, without parts that begin with a dot."""


def check_name(name: object) -> None:
    """Raise `InvalidRequest` unless this is the name of a file that lies in the archive."""
    if not isinstance(name, str) or "\\" in name or "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise InvalidRequest(f"name: must be a relative path with parts separated by '/', got {name!r}")


def check_lines(data: bytes) -> None:
    """Raise `InvalidRequest` unless the data ends with a newline."""
    if not data.endswith(b"\n"):
        raise InvalidRequest(f"data: must be whole lines, got {data[-20:]!r} at the end")
