"""Sources of uploads: opened and checked once, sent in each attempt, and not held in memory if they are large."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import os
import re
import tempfile
import threading
from collections.abc import AsyncIterable, Callable, Iterator, Mapping
from pathlib import PurePath
from typing import IO, Any

from .._files import open_regular, unusable
from .._tasks import finish
from ..errors import InvalidRequest, PdfRejected
from ..transport import wire
from .preflight import BLOCK, preflight

__all__ = ["OpenPdf", "PdfSource", "Source", "form_body", "is_seekable"]

# Missing on macOS and Windows.
_NO_WAIT: int | None = getattr(os, "RWF_NOWAIT", None) if hasattr(os, "preadv") else None
_SINGLE_WRITE = 64 * 1024
_PART = 256 * 1024
# Reading a file object moves its position, which other uploads of the object need.
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
        source = PdfSource(self if content is None else content.as_source(), self.filename, sha256=sha256)
        source._is_checked = True
        return source

    async def open(self, max_bytes: float | None = None) -> OpenPdf:
        """Return the open file; the caller closes it.

        With ``max_bytes``, raise `PdfRejected` if the file is larger or the service is sure to refuse it. Reads that
        may wait for a disk, and checks of large files, run in a thread.
        """
        source = self.source
        if (at_once := _read_at_once(source)) is not None:
            return OpenPdf(self, at_once).checked(max_bytes)
        if not isinstance(source, AsyncIterable):
            # If the call is cancelled, a file that the thread opens later is closed when its result is dropped.
            return await asyncio.to_thread(lambda: OpenPdf(self, self._read(max_bytes)).checked(max_bytes))
        with contextlib.closing(_Spool(self.filename, max_bytes)) as spool:
            async for chunk in source:
                if isinstance(chunk, bytes) and spool.size + len(chunk) > BLOCK:
                    await finish(asyncio.to_thread(spool.add, chunk))
                else:
                    spool.add(chunk)
            content = await finish(asyncio.to_thread(spool.content))
        return await asyncio.to_thread(OpenPdf(self, content).checked, max_bytes)

    def _read(self, max_bytes: float | None) -> bytes | _File:
        """Return the content, in memory if it is small."""
        source: Any = self.source
        if isinstance(source, str | os.PathLike):
            return _open_path(source, self.filename)
        with _source_errors(f"cannot read {self.filename}"):
            if isinstance(source, bytes | bytearray | memoryview):
                return bytes(source)
            has_position = is_seekable(source)
            # A source without a position, such as a pipe, may stall: it must not keep others waiting.
            lock = _position_lock if has_position else contextlib.nullcontext()
            with contextlib.closing(_Spool(self.filename, max_bytes)) as spool, lock:
                position = source.tell() if has_position else 0
                try:
                    while spool.add(source.read(_PART)):
                        pass
                finally:
                    if has_position:
                        source.seek(position)
                return spool.content()


class OpenPdf:
    """A PDF that can be sent repeatedly: bytes in memory, or an open file of its own."""

    def __init__(self, source: PdfSource, content: bytes | bytearray | _File) -> None:
        self._source = source
        self.content = content
        self.filename: str = source.filename
        self.size: int = content.version[1] if isinstance(content, _File) else len(content)

    def __enter__(self) -> OpenPdf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        content, self.content = self.content, b""
        if isinstance(content, _File):
            content.close()

    def as_source(self) -> bytes | bytearray | IO[bytes]:
        """Return the content as a source of further uploads, until this object is closed."""
        if not isinstance(self.content, _File):
            return self.content
        file = os.fdopen(self.content.descriptor, "rb", closefd=False)
        file.seek(0)
        return file

    def checked(self, max_bytes: float | None) -> OpenPdf:
        """Check the content, and return this object. Call it in a thread if the file is large."""
        try:
            if max_bytes is not None:
                self._preflight(max_bytes)
            if self._source.sha256 is not None and not isinstance(self.content, _File):
                self._check_hash(self.digest())
        except BaseException:
            self.close()
            raise
        return self

    def _preflight(self, max_bytes: float) -> None:
        if self.size > max_bytes:
            raise _too_large(self.filename, max_bytes, f"{self.size} bytes")
        reason = preflight(self.read, self.size) if self.size else "not_pdf"
        if reason is None:
            return
        problem = _REASONS[reason]
        if not self.size:
            source: Any = self._source.source
            is_at_end = is_seekable(source) and source.tell() > 0
            problem = "the file is at its end: seek(0)?" if is_at_end else "the file is empty"
        raise PdfRejected(f"{self.filename}: {problem}", reason=reason, filename=self.filename)

    def read(self, at: int, size: int) -> bytes | bytearray:
        """Return a part of the content; less only if it ends before. Call it in a thread if the file is large."""
        content = self.content
        if isinstance(content, _File):
            return content.read(at, min(size, self.size - at), self.filename)
        return content if not at and size >= len(content) else content[at : at + size]

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
                    content.check_unchanged(self.filename)
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
        # Small files in memory are sent together with the rest of the form, in a single write.
        pending: list[bytes | bytearray] = []
        unreported = 0
        for part in parts:
            if isinstance(part, bytes):
                pending.append(part)
            elif part.size <= _SINGLE_WRITE and not isinstance(part.content, _File):
                pending.append(part.content)
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


class _File:
    """An open file, read in threads. If it is closed during a read, it stays open until the read ends.

    Otherwise the thread could read another file, which has the same descriptor by then.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor: int = descriptor
        self._lock = threading.Lock()
        self._is_closed = False
        self.version: tuple[int, int] = self._examine()

    def _examine(self) -> tuple[int, int]:
        status = os.fstat(self.descriptor)
        return status.st_mtime_ns, status.st_size

    def check_unchanged(self, filename: str) -> None:
        """Raise `InvalidRequest` if the file differs from when it was opened."""
        with _source_errors(f"cannot read {filename}"):
            if self._examine() != self.version:
                raise _changed(filename)

    def read(self, at: int, size: int, filename: str) -> bytes:
        """Return so many bytes from an offset; raise `InvalidRequest` if the file ends before."""
        try:
            with self._lock, _source_errors(f"cannot read {filename}"):
                os.lseek(self.descriptor, at, os.SEEK_SET)
                block = os.read(self.descriptor, size)
        finally:
            if self._is_closed:
                self.close()
        if len(block) < size:
            raise _changed(filename)
        return block

    def close(self) -> None:
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            descriptor = self.descriptor
            self.descriptor = -1
            if descriptor >= 0:
                os.close(descriptor)
            self._lock.release()

    __del__ = close  # for files that a thread opens after its caller was cancelled


def _read_at_once(source: object) -> bytes | bytearray | None:
    """Return the content of a small source that needs no disk, otherwise None.

    For a file that the system has in memory, this takes a fifth of the time that a thread takes.
    """
    if isinstance(source, bytes):
        return source if len(source) <= BLOCK else None
    if _NO_WAIT is not None and isinstance(source, str | os.PathLike):
        # The thread raises the error, or succeeds: not every file system can tell what is in memory.
        with contextlib.suppress(OSError, ValueError):
            if (descriptor := open_regular(source)) is not None:
                with contextlib.closing(_File(descriptor)) as file:
                    size = file.version[1]
                    block = bytearray(size if size <= BLOCK else 0)
                    if os.preadv(descriptor, [block], 0, _NO_WAIT) == size:
                        file.check_unchanged("")
                        return block
    return None


def _open_path(path: str | os.PathLike[str], filename: str) -> bytes | _File:
    """Open a file; return its content if it is small."""
    with _source_errors(f"cannot open {os.fspath(path)!r}"):
        if (descriptor := open_regular(path)) is None:
            raise InvalidRequest(f"source: {os.fspath(path)!r} is not a regular file")
        file = _File(descriptor)
    if file.version[1] > BLOCK:
        return file
    with contextlib.closing(file):
        content = file.read(0, file.version[1], filename)
        file.check_unchanged(filename)
        return content


class _Spool:
    """A buffer for a stream: in memory up to `BLOCK`, then in an unnamed temporary file."""

    def __init__(self, filename: str, max_bytes: float | None) -> None:
        self._filename = filename
        self._max_bytes = max_bytes
        self.size = 0
        self._file = tempfile.SpooledTemporaryFile(max_size=BLOCK)  # noqa: SIM115  # `close` closes it

    def add(self, chunk: object) -> int:
        """Add a chunk and return its size. Call it in a thread if the buffer is large."""
        if not isinstance(chunk, bytes | bytearray | memoryview):
            raise InvalidRequest(f"source: must yield bytes, got {type(chunk).__name__}")
        with self._errors():
            self._file.write(chunk)
        size = memoryview(chunk).nbytes
        self.size += size
        if self._max_bytes is not None and self.size > self._max_bytes:
            raise _too_large(self._filename, self._max_bytes, "more")
        return size

    def content(self) -> bytes | _File:
        """Return what was added. Call it in a thread."""
        with self._errors():
            if self.size > BLOCK:
                self._file.flush()
                return _File(os.dup(self._file.fileno()))
            self._file.seek(0)
            return self._file.read()

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return _source_errors(f"cannot buffer {self._filename} in a temporary file (TMPDIR sets its folder)")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a full disk, again
            self._file.close()


# Arguments and errors


@contextlib.contextmanager
def _source_errors(problem: str) -> Iterator[None]:
    """Turn `OSError` and `ValueError` into `InvalidRequest`. Closed files and invalid paths raise `ValueError`."""
    try:
        yield
    except InvalidRequest:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise unusable(f"source: {problem}: {reason}", error) from None


def _changed(filename: str) -> InvalidRequest:
    return InvalidRequest(f"source: {filename} changed while it was read")


def _too_large(filename: str, max_bytes: float, found: str) -> PdfRejected:
    text = f"{filename}: too large: at most {max_bytes} bytes may be uploaded, this file has {found}"
    return PdfRejected(text, reason="too_large", filename=filename)


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
        return PurePath(os.fsdecode(source)).name
    # An uploaded file of werkzeug has a `filename`, and the `name` of the form's field. That of a `GzipFile` warns.
    for name in (getattr(source, "__dict__", {}).get("filename"), getattr(source, "name", None)):
        if isinstance(name, str) and PurePath(name).name:
            return "" if name[0] + name[-1] == "<>" else PurePath(name).name  # "<stdin>"
    return ""
