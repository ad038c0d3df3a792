"""Sources of uploads: opened and checked once, sent in each attempt, and not held in memory if they are large."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import io
import os
import re
import tempfile
import threading
from collections.abc import AsyncIterable, Callable, Iterator
from pathlib import PurePath
from typing import IO, Any

from .._files import open_regular, unusable
from .._tasks import finish
from ..errors import InvalidRequest, PdfRejected
from ..transport import wire
from .form import form_body
from .preflight import BLOCK, preflight

__all__ = ["OpenPdf", "PdfSource", "Source", "is_seekable"]

# Missing on macOS and Windows.
_NO_WAIT: int | None = getattr(os, "RWF_NOWAIT", None) if hasattr(os, "preadv") else None
# Up to this size the form is sent in a single write.
_SINGLE_WRITE = 64 * 1024
_PART = 256 * 1024
# Reading an object moves its position, which other uploads of the object need.
_position_lock = threading.Lock()
_REASONS = {
    "not_pdf": "not a PDF",
    "protected": "password protected",
    "already_signed": "already signed",
}

Source = str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes] | AsyncIterable[bytes]


class PdfSource:
    """A PDF and the name it is uploaded under.

    ``source`` is a path, bytes, a binary file (read from its current position), or an async iterable of bytes. If
    ``sha256`` (hexadecimal) is given, content with another hash is not uploaded.
    """

    def __init__(self, source: Source | PdfSource, filename: str | None = None, *, sha256: str | None = None) -> None:
        self._is_checked = False
        self._content: OpenPdf | None = None
        """The content of a source that could be read only once."""
        if isinstance(source, PdfSource):
            filename = filename or source.filename
            self._is_checked, self._content = source._is_checked, source._content
            sha256 = sha256 or source.sha256
            source = source.source
        _check_kind(source)
        if filename is not None and (not isinstance(filename, str) or not filename.strip()):
            raise InvalidRequest(f"filename: must be a non-empty string, got {filename!r}")
        if sha256 is not None and not (isinstance(sha256, str) and re.fullmatch("[0-9a-fA-F]{64}", sha256)):
            raise InvalidRequest(f"sha256: must be 64 hexadecimal digits, got {sha256!r}")
        self.source: Source = source
        self.sha256: str | None = None if sha256 is None else sha256.lower()
        # A path may contain invalid UTF-8. The name that is sent, and compared with the service's, must be valid.
        self.filename: str = (filename or _name_of(source) or "document.pdf").encode("utf-8", "replace").decode()

    def __repr__(self) -> str:
        return f"PdfSource({self.filename!r})"

    def pinned(self, sha256: str, content: OpenPdf | None = None) -> PdfSource:
        """Return this source with the sha256 of its content; with ``content`` if the source can be read only once."""
        source = PdfSource(self, sha256=sha256)
        source._is_checked = True
        source._content = content or source._content
        return source

    async def open(self, max_bytes: float | None = None) -> OpenPdf:
        """Return the open file; the caller closes it.

        With ``max_bytes``, raise `PdfRejected` if the file is larger or the service is sure to refuse it. Reads that
        may wait for a disk, and checks of large files, run in a thread.
        """
        if (at_once := _read_at_once(self.source)) is not None:
            return OpenPdf(self, at_once).checked(max_bytes)
        source = self.source
        if self._content is not None or not isinstance(source, AsyncIterable):
            # If the call is cancelled, a file that the thread opens later is closed when its result is dropped.
            return await asyncio.to_thread(lambda: self._open(max_bytes).checked(max_bytes))
        with contextlib.closing(_Spool(self.filename)) as spool:
            async for chunk in source:
                if isinstance(chunk, bytes) and spool.size + len(chunk) > BLOCK:
                    await finish(asyncio.to_thread(spool.add, chunk))
                else:
                    spool.add(chunk)
                if max_bytes is not None and spool.size > max_bytes:
                    raise _too_large(self.filename, max_bytes, None)
            content = await finish(asyncio.to_thread(spool.content))
        return await asyncio.to_thread(OpenPdf(self, content).checked, max_bytes)

    def _open(self, max_bytes: float | None) -> OpenPdf:
        source: Any = self.source
        if self._content is not None:
            return OpenPdf(self, self._content.share())
        if isinstance(source, str | os.PathLike):
            return OpenPdf(self, _open_path(source, self.filename))
        if isinstance(source, bytes | bytearray | memoryview):
            with _source_errors(f"cannot read {self.filename}"):
                return OpenPdf(self, bytes(source))
        with contextlib.closing(_Spool(self.filename)) as spool:
            position = _copy(source, spool, max_bytes)
            return OpenPdf(self, spool.content(), position)


class OpenPdf:
    """A PDF that can be sent repeatedly: bytes in memory, or an open file of its own.

    ``position`` is where the caller's file object was read from.
    """

    def __init__(self, source: PdfSource, content: bytes | bytearray | _File, position: int = 0) -> None:
        self.filename: str = source.filename
        self._content = content
        self._position = position
        self._sha256 = source.sha256
        self._is_checked = source._is_checked
        self.size: int = content.status.st_size if isinstance(content, _File) else len(content)

    def __enter__(self) -> OpenPdf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        content, self._content = self._content, b""
        if isinstance(content, _File):
            content.close()

    def share(self) -> bytes | bytearray | _File:
        """Return the content for another `OpenPdf`, which may be closed before this one, or after."""
        content = self._content
        return _File(os.dup(content.descriptor)) if isinstance(content, _File) else content

    def checked(self, max_bytes: float | None) -> OpenPdf:
        """Check the content, and return this object. Call it in a thread if the file is large."""
        try:
            if max_bytes is not None:
                self._preflight(max_bytes)
            if self._sha256 is not None and not isinstance(self._content, _File):
                self._check_hash(self.digest())
        except BaseException:
            self.close()
            raise
        return self

    def _preflight(self, max_bytes: float) -> None:
        if self.size > max_bytes:
            raise _too_large(self.filename, max_bytes, self.size)
        reason = preflight(self.read, self.size) if self.size else "not_pdf"
        if reason is None:
            return
        problem = _REASONS[reason]
        if not self.size:
            problem = "the file is at its end: seek(0)?" if self._position else "the file is empty"
        raise PdfRejected(f"{self.filename}: {problem}", reason=reason, filename=self.filename)

    def read(self, at: int, size: int) -> bytes | bytearray:
        """Return a part of the content; less only if it ends before. Call it in a thread if the file is large."""
        content = self._content
        if not isinstance(content, _File):
            return content if not at and size >= len(content) else content[at : at + size]
        size = min(size, self.size - at)
        with _source_errors(f"cannot read {self.filename}"):
            block = content.read(at, size)
        if len(block) < size:
            raise _changed(self.filename)
        return block

    def digest(self) -> str:
        """Read the file and return its sha256. Call it in a thread if the file is large."""
        digest = hashlib.sha256()
        for at in range(0, self.size, BLOCK):
            digest.update(self.read(at, BLOCK))
        return digest.hexdigest()

    def body(self, sent: Callable[[int], None]) -> wire.Body:
        """Return a form with this file as ``selected_file``, for one attempt; report its progress to ``sent``."""
        return form_body({"selected_file": self}, sent)

    async def write(
        self, write: wire.Write, most: int, sent: Callable[[int], None], before: bytes, after: bytes
    ) -> None:
        """Write the content between the other bytes of a form, at most ``most`` bytes at once."""
        content = self._content
        if self.size <= _SINGLE_WRITE and not isinstance(content, _File):
            await write(b"".join((before, content, after)))
            sent(self.size)
            return
        await write(before)
        if isinstance(content, _File):
            await self._write_file(content, write, most, sent)
        else:
            await _write_block(content, write, most, sent)
        await write(after)

    async def _write_file(self, file: _File, write: wire.Write, most: int, sent: Callable[[int], None]) -> None:
        digest = None if self._sha256 is None else hashlib.sha256()
        for at in range(0, self.size, BLOCK):
            block = await asyncio.to_thread(self.read, at, BLOCK)
            if digest is not None:
                digest.update(block)
            if at + BLOCK >= self.size:
                # Checked before the last block is written: without that block the upload is incomplete.
                if file.has_changed():
                    raise _changed(self.filename)
                self._check_hash(digest.hexdigest() if digest is not None else None)
            await _write_block(block, write, most, sent)
            del block  # before the next one is read

    def _check_hash(self, found: str | None) -> None:
        if found == self._sha256:
            return
        if self._is_checked:
            raise InvalidRequest(f"source: {self.filename} changed after it was checked (sha256 mismatch)")
        raise InvalidRequest(f"source: {self.filename}: sha256 mismatch: expected {self._sha256}, found {found}")


async def _write_block(block: bytes | bytearray, write: wire.Write, most: int, sent: Callable[[int], None]) -> None:
    view = memoryview(block)
    for at in range(0, len(view), most):
        part = view[at : at + most]
        await write(part)
        sent(len(part))


# Files


class _File:
    """An open file, read in threads. If it is closed during a read, it stays open until the read ends.

    Otherwise the thread could read another file, which has the same descriptor by then.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._file = io.FileIO(descriptor)
        self.status: os.stat_result = os.fstat(descriptor)
        self._lock = threading.Lock()
        self._closed = False

    def read(self, at: int, size: int) -> bytes:
        """Return bytes from an offset; less only if the file ends before."""
        try:
            with self._lock:
                self._file.seek(at)
                return self._file.read(size)
        finally:
            if self._closed:
                self.close()

    def has_changed(self) -> bool:
        """Return whether the file differs from when it was opened, or can no longer be examined."""
        try:
            return _version(os.fstat(self.descriptor)) != _version(self.status)
        except OSError:
            return True

    def close(self) -> None:
        self._closed = True
        if self._lock.acquire(blocking=False):
            self._file.close()
            self._lock.release()

    def __del__(self) -> None:
        # For files that a thread opens after its caller was cancelled.
        self.close()


def _version(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_size


def _read_at_once(source: object) -> bytes | bytearray | None:
    """Return the content of a small source that needs no disk, otherwise None.

    For a file that the system has in memory, this takes a fifth of the time that a thread takes.
    """
    if isinstance(source, bytes):
        return source if len(source) <= BLOCK else None
    if _NO_WAIT is None or not isinstance(source, str | os.PathLike):
        return None
    try:
        if (descriptor := open_regular(source)) is None:
            return None
        try:
            status = os.fstat(descriptor)
            if status.st_size <= BLOCK:
                block = bytearray(status.st_size)
                is_whole = os.preadv(descriptor, [block], 0, _NO_WAIT) == status.st_size
                if is_whole and _version(os.fstat(descriptor)) == _version(status):
                    return block
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        pass  # The thread raises it, or succeeds: not every file system can tell what is in memory.
    return None


def _open_path(path: str | os.PathLike[str], filename: str) -> bytes | _File:
    """Open a file; return its content if it is small."""
    with _source_errors(f"cannot open {os.fspath(path)!r}"):
        descriptor = open_regular(path)
        file = None if descriptor is None else _File(descriptor)
    if file is None:
        raise InvalidRequest(f"source: {os.fspath(path)!r} is not a regular file")
    if file.status.st_size > BLOCK:
        return file
    with contextlib.closing(file):
        with _source_errors(f"cannot read {filename}"):
            content = file.read(0, BLOCK + 1)
        if len(content) != file.status.st_size or file.has_changed():
            raise _changed(filename)
        return content


def is_seekable(source: Any) -> bool:
    # A `mmap` has no `seekable` before Python 3.13.
    return bool(source.seekable()) if hasattr(source, "seekable") else hasattr(source, "seek")


def _copy(source: IO[bytes], spool: _Spool, max_bytes: float | None) -> int:
    """Copy a file object from its current position, restore that position if it can be, and return it."""
    with _source_errors(f"cannot read {spool.filename}"):
        has_position = is_seekable(source)
    # A source without a position, such as a pipe, may stall: it must not keep others waiting.
    with _position_lock if has_position else contextlib.nullcontext():
        with _source_errors(f"cannot read {spool.filename}"):
            position = source.tell() if has_position else 0
        try:
            while True:
                with _source_errors(f"cannot read {spool.filename}"):
                    chunk = source.read(_PART)
                spool.add(chunk)
                if not chunk:
                    return position
                if max_bytes is not None and spool.size > max_bytes:
                    # Of other objects, such as a `GzipFile`, the size is known only at their end.
                    is_plain = isinstance(source, io.BytesIO | io.BufferedReader | io.FileIO)
                    with _source_errors(f"cannot read {spool.filename}"):
                        size = source.seek(0, os.SEEK_END) - position if has_position and is_plain else None
                    raise _too_large(spool.filename, max_bytes, size)
        finally:
            if has_position:
                source.seek(position)


class _Spool:
    """A buffer for a stream: in memory up to `BLOCK`, then in an unnamed temporary file."""

    def __init__(self, filename: str) -> None:
        self.filename = filename
        self.size = 0
        self._file = tempfile.SpooledTemporaryFile(max_size=BLOCK)  # noqa: SIM115  # `close` closes it

    def add(self, chunk: object) -> None:
        """Add a chunk. Call it in a thread if the buffer is large."""
        if not isinstance(chunk, bytes | bytearray | memoryview):
            raise InvalidRequest(f"source: must yield bytes, got {type(chunk).__name__}")
        with self._errors():
            self._file.write(chunk)
        self.size += memoryview(chunk).nbytes

    def content(self) -> bytes | _File:
        """Return what was added. Call it in a thread."""
        with self._errors():
            if self.size > BLOCK:
                self._file.flush()
                return _File(os.dup(self._file.fileno()))
            self._file.seek(0)
            return self._file.read()

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return _source_errors(f"cannot buffer {self.filename} in a temporary file (TMPDIR sets its folder)")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a full disk, again
            self._file.close()


# Arguments and errors


@contextlib.contextmanager
def _source_errors(problem: str) -> Iterator[None]:
    """Turn `OSError` and `ValueError` into `InvalidRequest`. Closed files and invalid paths raise `ValueError`."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise unusable(f"source: {problem}: {reason}", error) from None


def _changed(filename: str) -> InvalidRequest:
    return InvalidRequest(f"source: {filename} changed while it was read")


def _too_large(filename: str, max_bytes: float, size: int | None) -> PdfRejected:
    found = "more" if size is None else f"{size} bytes"
    return PdfRejected(
        f"{filename}: too large: at most {max_bytes} bytes may be uploaded, this file has {found}",
        reason="too_large",
        filename=filename,
    )


def _check_kind(source: Any) -> None:
    if isinstance(source, str | os.PathLike | bytes | bytearray | memoryview | AsyncIterable):
        return
    if not hasattr(source, "read"):
        kind = type(source).__name__
        raise InvalidRequest(f"source: must be a path, bytes, a binary file or an async iterable, got {kind}")
    if hasattr(source, "encoding"):
        raise InvalidRequest("source: the file is open as text; open it with mode 'rb'")
    if inspect.iscoroutinefunction(source.read):
        raise InvalidRequest("source: its read() is asynchronous; pass a binary file or an async iterable of bytes")


def _name_of(source: object) -> str:
    if isinstance(source, PurePath):
        return source.name
    if isinstance(source, str | os.PathLike):
        return PurePath(os.fsdecode(source)).name
    # An uploaded file of werkzeug has a `filename`, and the `name` of the form's field. That of a `GzipFile` warns.
    for name in (getattr(source, "__dict__", {}).get("filename"), getattr(source, "name", None)):
        if isinstance(name, str) and PurePath(name).name:
            return "" if name[0] + name[-1] == "<>" else PurePath(name).name  # "<stdin>"
    return ""
