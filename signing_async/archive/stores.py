"""The stores that keep the files of an archive: their protocols, and the store in a local folder."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from .._files import check_locks, hash_file, is_transient, locked, sync_folder
from ..errors import ArchiveConflict, ArchiveError, ConfigurationError, InvalidRequest

__all__ = ["ArchiveStore", "FolderStore", "ListedStore", "MissingBytes", "as_store", "check_name"]

T = TypeVar("T")

_BLOCK = 1024 * 1024


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


def as_store(to: ArchiveStore | str | os.PathLike[str]) -> ArchiveStore:
    """Return the store. For a path, return a `FolderStore`."""
    if isinstance(to, str) and "://" in to:
        # The URL may contain a password.
        raise ConfigurationError("to: must be a folder, got a URL; for a bucket give an S3Store(url)")
    if isinstance(to, str | os.PathLike):
        return FolderStore(to)
    if not all(callable(getattr(to, name, None)) for name in ("put", "read", "append")):
        raise InvalidRequest(f"to: must be a folder or an ArchiveStore, got {to!r}")
    return to


class FolderStore:
    """An archive in a folder, which any number of processes may share. The folder is created with its first file.

    Names that begin with a dot are not part of the archive: incomplete downloads, and other files such as a journal.
    The file system must support file locks.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_locks("FolderStore")
        if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
            raise ConfigurationError(f"path: must be a path, got {path!r}")
        self.path: Path = Path(path).expanduser().absolute()
        if self.path.exists() and not self.path.is_dir():
            raise ConfigurationError(f"path: {str(self.path)!r} is not a folder")

    def __repr__(self) -> str:
        return f"FolderStore({str(self.path)!r})"

    @property
    def incoming(self) -> Path:
        """The folder of incomplete downloads, on the file system of the archive."""
        return self.path / ".incoming"

    async def put(self, name: str, source: Path, sha256: str) -> None:
        await self._in_thread(_put, self.path, self._path(name), source, sha256)

    async def read(self, name: str, offset: int = 0) -> AsyncIterator[bytes]:
        path = self._path(name)
        while block := await self._in_thread(_read, path, offset):
            yield block
            offset += len(block)

    async def append(self, name: str, offset: int, data: bytes) -> None:
        await self._in_thread(_append, self.path, self._path(name), offset, data)

    async def names(self) -> AsyncIterator[str]:
        walk = os.walk(self.path, onerror=_raise_unless_missing)
        while (found := await self._in_thread(next, walk, None)) is not None:
            folder, folders, files = found
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                if not name.startswith("."):
                    yield Path(folder, name).relative_to(self.path).as_posix()

    def _path(self, name: str) -> Path:
        check_name(name)
        return self.path.joinpath(*name.split("/"))

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return await asyncio.to_thread(work, *arguments)
        except FileNotFoundError:
            raise
        except OSError as error:
            # The second name is the target of a replacement.
            message = f"the archive {self.path}: {error.strerror}: {error.filename2 or error.filename or ''}"
            raise ArchiveError(message, transient=is_transient(error)) from None


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


# The functions below run in threads, which may outlive a cancelled call.


def _put(root: Path, target: Path, source: Path, sha256: str) -> None:
    _make_folders(root, root)
    with source.open("r+b") as file:  # Windows syncs only files that are open for writing
        os.fsync(file.fileno())
    conflict = ArchiveConflict(f"the archive {root}: {str(target.relative_to(root))!r} holds another file")
    try:
        _make_folders(target.parent, root)
        _place(source, target)
    except (FileExistsError, NotADirectoryError):
        if target.is_symlink() or not target.is_file() or hash_file(target) != sha256:
            raise conflict from None
    # Even if the file was stored before: the run that placed it may have been killed before it synced the folder.
    sync_folder(target.parent)


def _make_folders(folder: Path, root: Path) -> None:
    """Make a folder in the archive ``root``, durably."""
    if not folder.is_dir():
        if folder != root:
            _make_folders(folder.parent, root)
        folder.mkdir(parents=folder == root, exist_ok=True)
        sync_folder(folder.parent)


def _place(source: Path, target: Path) -> None:
    """Link or copy the file to its target. Raise `FileExistsError` if the target exists."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        # Another file system, or one without links. Only the holder of the signing's claim places its files.
        if os.path.lexists(target):
            raise FileExistsError from None
        part = target.with_name(f".{secrets.token_hex(8)}.part")
        try:
            with source.open("rb") as reading, part.open("xb") as writing:
                shutil.copyfileobj(reading, writing, _BLOCK)
                writing.flush()
                os.fsync(writing.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    source.unlink()  # with two names, a change of the source would change the archived file


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_BLOCK)
    except (NotADirectoryError, IsADirectoryError) as error:
        raise FileNotFoundError(error.errno, error.strerror, error.filename) from None


def _append(root: Path, path: Path, offset: int, data: bytes) -> None:
    if offset == 0:
        _make_folders(path.parent, root)
    conflict = ArchiveConflict(f"the archive {root}: the whole lines of {path.name} do not end at byte {offset}")
    try:
        file = path.open("r+b" if offset else "a+b", buffering=0)
    except FileNotFoundError:
        raise conflict from None
    with file, locked(file.fileno()):
        file.seek(max(0, offset - 1))
        ends_here = offset == 0 or file.read(1) == b"\n"
        if not ends_here or file.readline().endswith(b"\n"):
            raise conflict
        file.truncate(offset)  # an incomplete last line
        file.seek(offset)
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    if offset == 0:
        sync_folder(path.parent)
