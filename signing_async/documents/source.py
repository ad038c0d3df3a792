"""Sources of uploads: opened and checked once, sent in each attempt, and not held in memory if they are large."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import io
import os
import re
import stat
import tempfile
import threading
from collections.abc import AsyncIterable, Callable, Mapping
from pathlib import PurePath
from typing import IO, Any

from .._files import unusable
from .._tasks import finish
from ..errors import InvalidRequest, PdfRejected, RequestTimeout
from ..transport import wire
from .preflight import BLOCK, preflight

__all__ = ["OpenPdf", "PdfSource", "Source", "form_body", "is_seekable"]

# Without O_NONBLOCK, opening a pipe waits for its writer. Without O_BINARY, Windows converts line endings.
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_SINGLE_WRITE = 64 * 1024
_PART = 256 * 1024
# Reading a file object moves its position, which other uploads of the object need.
_position_lock = threading.Lock()
_REASONS = {"not_pdf": "not a PDF", "protected": "password protected", "already_signed": "already signed"}

Source = str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes] | AsyncIterable[bytes]


class PdfSource:
    """A PDF and the name it is uploaded under.

    ``source`` is a path, bytes, a binary file (read from its current position), or an async iterable of bytes. If
    ``sha256`` (hexadecimal) is given, content with another hash is not uploaded.
    """

    def __init__(self, source: Source | PdfSource, filename: str | None = None, *, sha256: str | None = None) -> None:
        self._is_checked = False
        if isinstance(source, PdfSource):
            filename = filename or source.filename
            sha256, self._is_checked = sha256 or source.sha256, source._is_checked
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
        source: Any = self if content is None else content.content
        if isinstance(source, _File):
            source.seek(0)
        pinned = PdfSource(source, self.filename, sha256=sha256)
        pinned._is_checked = True
        return pinned

    async def open(self, max_bytes: float | None = None, deadline: float | None = None, operation: str = "") -> OpenPdf:
        """Return the open file; the caller closes it.

        With ``max_bytes``, raise `PdfRejected` if the file is larger or the service is sure to refuse it. Reads that
        may wait for a disk, and checks of large files, run in a thread. Raises the ``operation``'s `RequestTimeout` at
        the deadline.
        """
        source = self.source
        content: bytes | bytearray | _File | None = None
        if isinstance(source, str | os.PathLike):
            content = _open_path(source, self.filename)
        elif isinstance(source, bytes | bytearray | memoryview):
            content = bytes(source)  # a buffer may change before the last attempt
        if isinstance(content, bytes | bytearray) and len(content) <= BLOCK:
            pdf = OpenPdf(self, content)
            pdf.check(max_bytes)
            return pdf
        try:
            async with asyncio.timeout_at(deadline) as waiting:
                return await self._load(content, max_bytes)
        except TimeoutError:
            if not waiting.expired():
                raise
            text = f"{operation}: deadline passed before anything was sent"
            raise RequestTimeout(text, operation=operation, attempts=0) from None

    async def _load(self, content: bytes | bytearray | _File | None, max_bytes: float | None) -> OpenPdf:
        source = self.source
        if isinstance(content, _File):
            content = await _read_if_small(content, self.filename)
        elif isinstance(source, AsyncIterable):
            with contextlib.closing(_Spool(self.filename, max_bytes)) as spool:
                async for chunk in source:
                    if isinstance(chunk, bytes) and spool.size + len(chunk) > BLOCK:
                        await finish(asyncio.to_thread(spool.add, chunk))
                    else:
                        spool.add(chunk)
                content = spool.content()
        elif content is None:
            content = await asyncio.to_thread(_copy_file, source, self.filename, max_bytes)
        pdf = OpenPdf(self, content)
        try:
            if pdf.size <= BLOCK:
                pdf.check(max_bytes)
            else:
                await asyncio.to_thread(pdf.check, max_bytes)
        except BaseException:
            pdf.close()
            raise
        return pdf


class OpenPdf:
    """A PDF that can be sent repeatedly: bytes in memory, or an open file of its own."""

    def __init__(self, source: PdfSource, content: bytes | bytearray | _File) -> None:
        self._source = source
        self.content = content
        self.filename: str = source.filename
        self._version = content.opened if isinstance(content, _File) else (len(content), 0)
        self.size: int = self._version[0]

    def __enter__(self) -> OpenPdf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        content, self.content = self.content, b""
        if isinstance(content, _File):
            content.close()

    def check(self, max_bytes: float | None) -> None:
        """Check size, format and sha256; of a large file not the sha256. Call it in a thread if the file is large."""
        if max_bytes is not None:
            if self.size > max_bytes:
                raise _too_large(self.filename, max_bytes, f"{self.size} bytes")
            if (reason := preflight(self.read, self.size)) is not None:
                problem = _REASONS[reason] if self.size else _describe_empty(self._source.source)
                raise PdfRejected(f"{self.filename}: {problem}", reason=reason, filename=self.filename)
        if self._source.sha256 is not None and not isinstance(self.content, _File):
            self._check_hash(self.digest())

    def read(self, at: int, size: int) -> bytes | bytearray:
        """Return a part of the content; less only if it ends before. Call it in a thread if the file is large."""
        content = self.content
        if not isinstance(content, _File):
            return content if not at and size >= len(content) else content[at : at + size]
        size = min(size, self.size - at)
        with _SourceErrors(f"cannot read {self.filename}"):
            block = content.read_at(at, size)
        if len(block) < size:
            raise _changed(self.filename)
        return block

    def digest(self) -> str:
        """Read the file and return its sha256. Call it in a thread if the file is large."""
        digest = hashlib.sha256()
        for at in range(0, self.size, BLOCK):
            digest.update(self.read(at, BLOCK))
        return digest.hexdigest()

    async def write(self, write: wire.Write, most: int, sent: Callable[[int], None]) -> None:
        """Write the content, at most ``most`` bytes at once. Raise `InvalidRequest` if the file has changed."""
        content, digest = self.content, hashlib.sha256()
        for at in range(0, self.size, BLOCK):
            if isinstance(content, _File):
                block = memoryview(await asyncio.to_thread(self.read, at, BLOCK))
                if self._source.sha256 is not None:
                    digest.update(block)
                # Checked before the last block is written: without that block the upload is incomplete.
                if at + BLOCK >= self.size:
                    if content.version() != self._version:
                        raise _changed(self.filename)
                    self._check_hash(digest.hexdigest())
            else:
                block = memoryview(content)[at : at + BLOCK]
            for start in range(0, len(block), most):
                part = block[start : start + most]
                await write(part)
                sent(len(part))
            del block, part  # before the next block is read

    def _check_hash(self, found: str) -> None:
        expected = self._source.sha256
        if expected not in (None, found):
            problem = f": sha256 mismatch: expected {expected}, found {found}"
            if self._source._is_checked:
                problem = " changed after it was checked (sha256 mismatch)"
            raise InvalidRequest(f"source: {self.filename}{problem}")


def form_body(fields: Mapping[str, str | OpenPdf], sent: Callable[[int], None]) -> wire.Body:
    """Return a form with these fields, for one attempt; report the progress of its files to ``sent``."""
    boundary = os.urandom(16).hex()
    parts: list[bytes | OpenPdf] = []
    for name, value in fields.items():
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{_escape(name)}"'
        if isinstance(value, str):
            parts.append(f"{head}\r\n\r\n{value}\r\n".encode())
        else:
            head += f'; filename="{_escape(value.filename)}"\r\nContent-Type: application/pdf\r\n\r\n'
            parts += [head.encode(), value, b"\r\n"]
    parts.append(f"--{boundary}--\r\n".encode())

    async def produce(write: wire.Write, most: int) -> None:
        # Small files are sent together with the rest of the form, in a single write.
        pending: list[bytes | bytearray] = []
        unreported = 0
        for part in parts:
            if isinstance(part, bytes):
                pending.append(part)
            elif part.size <= _SINGLE_WRITE:
                pending.append(part.read(0, part.size))
                unreported += part.size
            else:
                await write(b"".join(pending))
                pending.clear()
                await part.write(write, most, sent)
        await write(b"".join(pending))
        sent(unreported)

    size = sum(part.size if isinstance(part, OpenPdf) else len(part) for part in parts)
    return wire.Body(produce, size, f"multipart/form-data; boundary={boundary}")


def _escape(filename: str) -> str:
    """Escape as browsers do: UTF-8, with percent-encoding for what would end the header's value."""
    return filename.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


# Reading


class _File(io.FileIO):
    """A file that threads read. If it is closed during a read, it stays open until the read ends.

    Otherwise the thread could read another file, which has the same descriptor by then.
    """

    def __init__(self, descriptor: int, version: tuple[int, int] | None = None) -> None:
        self._lock = threading.Lock()
        self._is_closing = False
        super().__init__(descriptor)
        self.opened: tuple[int, int] = version or self.version()
        """The version when it was opened."""

    def read_at(self, at: int, size: int) -> bytes:
        try:
            with self._lock:
                self.seek(at)
                return self.read(size)
        finally:
            if self._is_closing:
                self.close()

    def version(self) -> tuple[int, int]:
        """Return the size and the time of the last change."""
        return _version(os.fstat(self.fileno()))

    def close(self) -> None:
        self._is_closing = True
        if self._lock.acquire(blocking=False):
            super().close()
            self._lock.release()

    __del__ = close  # for files that a thread opens after its caller was cancelled


def _version(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _open_path(path: str | os.PathLike[str], filename: str) -> bytearray | _File:
    """Return the content of a small file that the system has in memory, or the open file."""
    with _SourceErrors(f"cannot open {os.fspath(path)!r}"):
        descriptor = os.open(path, _READ_FLAGS)
    file = None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequest(f"source: {os.fspath(path)!r} is not a regular file")
        version = size, _ = _version(status)
        if size <= BLOCK:
            content, taken = bytearray(size), -1
            # This takes a fifth of the time of a thread. Not every file system can tell, and macOS and Windows lack the
            # function.
            with contextlib.suppress(OSError, AttributeError):
                taken = os.preadv(descriptor, [content], 0, os.RWF_NOWAIT)
            if taken == size:
                if _version(os.fstat(descriptor)) != version:
                    raise _changed(filename)
                return content
        file = _File(descriptor, version)
        return file
    finally:
        if file is None:
            os.close(descriptor)


async def _read_if_small(file: _File, filename: str) -> bytes | _File:
    """Return the content of a small file, or the file."""
    size = file.opened[0]
    if size > BLOCK:
        return file
    with contextlib.closing(file):
        with _SourceErrors(f"cannot read {filename}"):
            content = await asyncio.to_thread(file.read_at, 0, size)
        if len(content) < size or file.version() != file.opened:
            raise _changed(filename)
        return content


def _copy_file(source: Any, filename: str, max_bytes: float | None) -> bytes | _File:
    """Copy a file object from its position, and restore the position."""
    with contextlib.closing(_Spool(filename, max_bytes)) as spool, _SourceErrors(f"cannot read {filename}"):
        has_position = is_seekable(source)
        # A source without a position, such as a pipe, may stall: it must not keep others waiting.
        with _position_lock if has_position else contextlib.nullcontext():
            position = source.tell() if has_position else 0
            try:
                while spool.add(source.read(_PART)):
                    pass
            finally:
                if has_position:
                    source.seek(position)
            return spool.content()


class _Spool:
    """A buffer for a stream: in memory up to `BLOCK`, then in an unnamed temporary file."""

    def __init__(self, filename: str, max_bytes: float | None) -> None:
        self._filename = filename
        self._max_bytes = max_bytes
        self.size = 0
        self._file = tempfile.SpooledTemporaryFile(max_size=BLOCK)  # noqa: SIM115  # `close` closes it
        self._problem = f"cannot buffer {filename} in a temporary file (TMPDIR sets its folder)"

    def add(self, chunk: object) -> int:
        """Add a chunk and return its size. Call it in a thread if the buffer is large."""
        if not isinstance(chunk, bytes | bytearray | memoryview):
            raise InvalidRequest(f"source: must yield bytes, got {type(chunk).__name__}")
        with _SourceErrors(self._problem):
            size = self._file.write(chunk)
        self.size += size
        if self._max_bytes is not None and self.size > self._max_bytes:
            raise _too_large(self._filename, self._max_bytes, "more")
        return size

    def content(self) -> bytes | _File:
        """Return what was added."""
        with _SourceErrors(self._problem):
            if self.size > BLOCK:
                self._file.flush()
                return _File(os.dup(self._file.fileno()))
            self._file.seek(0)
            return self._file.read()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a full disk, again
            self._file.close()


# Arguments and errors


class _SourceErrors:
    """Turns `OSError` and `ValueError` into `InvalidRequest`. Closed files and invalid paths raise `ValueError`."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError | ValueError) and not isinstance(error, InvalidRequest):
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise unusable(f"source: {self._problem}: {reason}", error) from None


def _changed(filename: str) -> InvalidRequest:
    return InvalidRequest(f"source: {filename} changed while it was read")


def _too_large(filename: str, max_bytes: float, found: str) -> PdfRejected:
    text = f"{filename}: too large: at most {max_bytes} bytes may be uploaded, this file has {found}"
    return PdfRejected(text, reason="too_large", filename=filename)


def _describe_empty(source: Any) -> str:
    if isinstance(source, AsyncIterable):
        return "the stream is empty: was it read before? Pass a new one"
    is_at_end = is_seekable(source) and source.tell() > 0
    return "the file is at its end: seek(0)?" if is_at_end else "the file is empty"


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


def is_seekable(source: Any) -> bool:
    # A `mmap` has no `seekable` before Python 3.13.
    return bool(source.seekable()) if hasattr(source, "seekable") else hasattr(source, "seek")


def _name_of(source: object) -> str:
    if isinstance(source, str | os.PathLike):
        return (source if isinstance(source, PurePath) else PurePath(os.fsdecode(source))).name
    # A file uploaded to Flask has a `filename`; its `name` is the form field's. That of a `GzipFile` warns.
    name = getattr(source, "__dict__", {}).get("filename") or getattr(source, "name", None)
    # Standard input is named "<stdin>", and a temporary file by a number.
    return "" if not isinstance(name, str) or name.startswith("<") else PurePath(name).name
