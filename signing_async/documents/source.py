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
from collections.abc import AsyncIterable, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import PurePath
from typing import IO, Any

from .._files import open_regular, unusable
from ..errors import InvalidRequest, PdfRejected
from ..transport import wire
from .form import form_body
from .preflight import BLOCK, preflight

__all__ = ["OpenPdf", "PdfSource", "Source", "buffer_errors"]

# Missing on macOS and Windows.
_NO_WAIT: int | None = getattr(os, "RWF_NOWAIT", None) if hasattr(os, "preadv") else None
_HAS_PREAD = hasattr(os, "pread")
# Up to this size the form is sent in a single write.
_SINGLE_WRITE = 64 * 1024
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
        if isinstance(source, PdfSource):
            filename = filename or source.filename
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

    async def open(self, max_bytes: float | None = None) -> OpenPdf:
        """Return the open file; the caller closes it.

        With ``max_bytes``, raise `PdfRejected` if the file is larger or the service is sure to refuse it. A path is
        opened on the event loop, and up to 1 MiB are read there if the system has them in memory, at a fifth of the
        cost of a thread. Reads that may wait for a disk, and checks of larger files, run in a thread.
        """
        source, sha256 = self.source, self.sha256
        if isinstance(source, str | os.PathLike):
            pdf = _open_path(source, self.filename)
            is_ready = pdf.load_cached() or (pdf.size > BLOCK and max_bytes is None)
        elif isinstance(source, bytes | bytearray | memoryview):
            pdf = _open_memory(source, self.filename)
            is_ready = pdf.size <= BLOCK
        elif isinstance(source, AsyncIterable):
            with contextlib.closing(_Spool(self.filename, max_bytes)) as spool:
                async for chunk in source:
                    if spool.add(chunk):
                        await asyncio.to_thread(spool.flush)
                return await asyncio.to_thread(lambda: spool.open().prepared(max_bytes, sha256))
        else:
            # If the call is cancelled, a file that the thread opens later is closed when its result is dropped.
            return await asyncio.to_thread(
                lambda: _open_file(source, self.filename, max_bytes).prepared(max_bytes, sha256)
            )
        try:
            if is_ready:
                return pdf.prepared(max_bytes, sha256)
            return await asyncio.to_thread(pdf.prepared, max_bytes, sha256)
        except BaseException:
            pdf.close()  # if its thread never starts
            raise


class OpenPdf:
    """A PDF that can be sent repeatedly: bytes in memory, or an open file of its own.

    The first ``start`` bytes of the content do not belong to it.
    """

    def __init__(self, filename: str, content: bytes | bytearray | memoryview | _File, start: int = 0) -> None:
        self.filename = filename
        self._content = content
        self._start = start
        self._is_moved = start > 0
        self._sha256: str | None = None
        total = content.status.st_size if isinstance(content, _File) else len(content)
        self.size: int = max(0, total - start)

    def __enter__(self) -> OpenPdf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        content, self._content = self._content, b""
        if isinstance(content, _File):
            content.close()

    def load_cached(self) -> bool:
        """Read a small file into memory if that does not wait for a disk; return whether it did."""
        assert isinstance(self._content, _File)
        block = self._content.read_cached(0, self.size) if self.size <= BLOCK else None
        if block is None or self._content.has_changed():
            return False
        self._content.close()
        self._content = block
        return True

    def prepared(self, max_bytes: float | None, sha256: str | None) -> OpenPdf:
        """Read a small file into memory, check the content, and return this object. Call it in a thread."""
        try:
            if isinstance(self._content, _File) and self.size <= BLOCK:
                block = self.read(0, self.size)
                self._check_unchanged()
                self._content.close()
                self._content, self._start = block, 0
            if max_bytes is not None:
                self._check(max_bytes)
            self._sha256 = sha256
        except BaseException:
            self.close()
            raise
        return self

    def _check(self, max_bytes: float) -> None:
        if self.size > max_bytes:
            raise _too_large(self.filename, max_bytes, f"{self.size} bytes")
        if not self.size:
            problem = "the file is at its end: seek(0)?" if self._is_moved else "the file is empty"
            raise PdfRejected(f"{self.filename}: {problem}", reason="not_pdf", filename=self.filename)
        content = self._content
        if isinstance(content, (bytes, bytearray)):
            # Without the checks that `read` makes for files.
            reason = preflight(lambda at, size: content[at : at + size], self.size)
        else:
            reason = preflight(self.read, self.size)
        if reason is not None:
            raise PdfRejected(f"{self.filename}: {_REASONS[reason]}", reason=reason, filename=self.filename)

    def read(self, at: int, size: int) -> bytes | bytearray:
        """Return a part of the content; less only if it ends before. Call it in a thread if the file is large."""
        content, size, at = self._content, max(0, min(size, self.size - at)), self._start + at
        if isinstance(content, bytes | bytearray):
            return content if size == len(content) else content[at : at + size]
        if isinstance(content, memoryview):
            return bytes(content[at : at + size])
        with _source_errors(f"cannot read {self.filename}"):
            block = content.read(at, size)
        if len(block) < size:
            raise self._changed()
        return block

    def blocks(self) -> Iterator[memoryview]:
        """Yield the content in blocks. Call it in a thread if the file is large."""
        for at in range(0, self.size, BLOCK):
            yield memoryview(self.read(at, BLOCK))

    def digest(self) -> str:
        """Read the file and return its sha256."""
        digest = hashlib.sha256()
        for block in self.blocks():
            digest.update(block)
        return digest.hexdigest()

    def body(self, sent: Callable[[int], None]) -> wire.Body:
        """Return a form with this file as ``selected_file``, for one attempt; report its progress to ``sent``."""
        return form_body({"selected_file": self}, sent)

    async def write(
        self, write: wire.Write, most: int, sent: Callable[[int], None], before: bytes, after: bytes
    ) -> None:
        """Write the content between the other bytes of a form, at most ``most`` bytes at once."""
        content = self._content
        if not isinstance(content, _File):
            if self._sha256 is not None:
                self._check_hash(self.digest())
            view = memoryview(content)[self._start :]
            if self.size <= _SINGLE_WRITE:
                await write(b"".join((before, view, after)))
                sent(self.size)
                return
            await write(before)
            await _write_block(view, write, most, sent)
        else:
            await write(before)
            digest = None if self._sha256 is None else hashlib.sha256()
            for at in range(0, self.size, BLOCK):
                size = min(BLOCK, self.size - at)
                block: bytes | bytearray | None = content.read_cached(self._start + at, size)
                if block is None:
                    block = await asyncio.to_thread(self.read, at, size)
                if digest is not None:
                    digest.update(block)
                if at + size == self.size:
                    # Checked before the last block is written: without that block the upload is incomplete.
                    self._check_unchanged()
                    self._check_hash(digest.hexdigest() if digest is not None else None)
                await _write_block(memoryview(block), write, most, sent)
        await write(after)

    def _check_hash(self, found: str | None) -> None:
        if found != self._sha256:
            raise InvalidRequest(f"source: {self.filename}: sha256 mismatch: expected {self._sha256}, found {found}")

    def _check_unchanged(self) -> None:
        if isinstance(self._content, _File) and self._content.has_changed():
            raise self._changed()

    def _changed(self) -> InvalidRequest:
        return InvalidRequest(f"source: {self.filename} changed while it was read")


class _File:
    """An open file. If it is closed while a thread uses it, its descriptor stays open until the thread is done.

    Otherwise the system could give the descriptor's number to another file, which the thread would read or write.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._closed = False
        self._is_open = True
        self.status: os.stat_result = os.fstat(descriptor)

    @contextlib.contextmanager
    def _use(self) -> Iterator[int]:
        try:
            with self._lock:
                if not self._is_open:
                    raise ValueError("the file is closed")
                yield self._descriptor
        finally:
            if self._closed:
                self.close()

    def read(self, at: int, size: int) -> bytes:
        """Return bytes from an offset; less only if the file ends before. Call it in a thread."""
        data = b""
        with self._use() as descriptor:
            while len(data) < size:
                if _HAS_PREAD:
                    part = os.pread(descriptor, size - len(data), at + len(data))
                else:  # Windows
                    os.lseek(descriptor, at + len(data), os.SEEK_SET)
                    part = os.read(descriptor, size - len(data))
                data = data + part if data else part
                if not part:
                    break
        return data

    def read_cached(self, at: int, size: int) -> bytearray | None:
        """Return bytes from an offset if the system has them in memory, otherwise None. Never waits for a disk."""
        if _NO_WAIT is None:
            return None
        block = bytearray(size)
        try:
            return block if os.preadv(self._descriptor, [block], at, _NO_WAIT) == size else None
        except OSError:  # not in memory, or the file system cannot tell
            return None

    def append(self, data: bytearray) -> None:
        with self._use() as descriptor:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            self.status = os.fstat(descriptor)

    def has_changed(self) -> bool:
        """Return whether the file differs from when it was opened, or can no longer be examined."""
        try:
            now = os.fstat(self._descriptor)
        except OSError:
            return True
        return now.st_mtime_ns != self.status.st_mtime_ns or now.st_size != self.status.st_size

    def close(self) -> None:
        self._closed = True
        if self._lock.acquire(blocking=False):
            if self._is_open:
                self._is_open = False
                os.close(self._descriptor)
            self._lock.release()

    def __del__(self) -> None:
        # For files that a thread opens after its caller was cancelled, and if `fstat` fails in `__init__`.
        self.close()


class _Spool:
    """A buffer for a stream: in memory while it is small, then in an unnamed temporary file."""

    def __init__(self, filename: str, max_bytes: float | None) -> None:
        self._filename = filename
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._file: _File | None = None
        self._size = 0

    def add(self, chunk: object) -> bool:
        """Add a chunk; return whether to call `flush`."""
        if not isinstance(chunk, bytes | bytearray | memoryview):
            raise InvalidRequest(f"source: must yield bytes, got {type(chunk).__name__}")
        self._buffer += chunk
        self._size += memoryview(chunk).nbytes
        if self._max_bytes is not None and self._size > self._max_bytes:
            raise _too_large(self._filename, self._max_bytes, "more")
        return len(self._buffer) > BLOCK

    def flush(self) -> None:
        """Move the buffer to the file."""
        with buffer_errors(self._filename):
            if self._file is None:
                with tempfile.TemporaryFile(buffering=0) as made:
                    self._file = _File(os.dup(made.fileno()))
            self._file.append(self._buffer)
            self._buffer = bytearray()

    def open(self) -> OpenPdf:
        if self._file is None:
            return OpenPdf(self._filename, self._buffer)
        self.flush()
        file, self._file = self._file, None
        return OpenPdf(self._filename, file)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@contextlib.contextmanager
def _source_errors(problem: str) -> Iterator[None]:
    """Turn `OSError` and `ValueError` into `InvalidRequest`. Closed files and invalid paths raise `ValueError`."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise _unusable_source(problem, error) from None


def _unusable_source(problem: str, error: OSError | ValueError) -> InvalidRequest:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return unusable(f"source: {problem}: {reason}", error)


def buffer_errors(filename: str) -> AbstractContextManager[None]:
    """Turn an error of the temporary file that holds a stream into `InvalidRequest`."""
    return _source_errors(f"cannot buffer {filename} in a temporary file (TMPDIR sets its folder)")


async def _write_block(view: memoryview, write: wire.Write, most: int, sent: Callable[[int], None]) -> None:
    for at in range(0, len(view), most):
        part = view[at : at + most]
        await write(part)
        sent(len(part))


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


def _open_path(path: str | os.PathLike[str], filename: str) -> OpenPdf:
    try:
        descriptor = open_regular(path)
        if descriptor is not None:
            return OpenPdf(filename, _File(descriptor))
    except (OSError, ValueError) as error:
        raise _unusable_source(f"cannot open {os.fspath(path)!r}", error) from None
    raise InvalidRequest(f"source: {os.fspath(path)!r} is not a regular file")


def _open_memory(source: bytes | bytearray | memoryview, filename: str) -> OpenPdf:
    if isinstance(source, bytes):
        return OpenPdf(filename, source)
    with _source_errors(f"cannot read {filename}"):
        view = memoryview(source)
        return OpenPdf(filename, view.cast("B") if view.c_contiguous else view.tobytes())


def _open_file(source: IO[bytes], filename: str, max_bytes: float | None) -> OpenPdf:
    """Open a file object from its current position, and restore that position if the object was read."""
    with _source_errors(f"cannot read {filename}"):
        if type(source) is io.BytesIO:
            return OpenPdf(filename, memoryview(source.getvalue()), source.tell())
        if _is_plain(source):
            source.flush()
            start = source.tell()
            return OpenPdf(filename, _File(os.dup(source.fileno())), start)
        is_seekable = source.seekable() if hasattr(source, "seekable") else hasattr(source, "seek")
    with _position_lock if is_seekable else contextlib.nullcontext():
        return _copy_file(source, filename, max_bytes, is_seekable)


def _copy_file(source: IO[bytes], filename: str, max_bytes: float | None, is_seekable: bool) -> OpenPdf:
    with _source_errors(f"cannot read {filename}"):
        position = source.tell() if is_seekable else 0
    try:
        with contextlib.closing(_Spool(filename, max_bytes)) as spool:
            while True:
                with _source_errors(f"cannot read {filename}"):
                    chunk = source.read(BLOCK)
                if spool.add(chunk):
                    spool.flush()
                if not chunk:
                    pdf = spool.open()
                    return pdf if pdf.size else OpenPdf(filename, b"", position)
    finally:
        if is_seekable:
            source.seek(position)


def _is_plain(source: Any) -> bool:
    """Return whether the file's descriptor has the same bytes; that of a `GzipFile` has the compressed ones."""
    if not _HAS_PREAD:
        return False  # reading a duplicate of the descriptor would move the caller's file
    raw = source.raw if type(source) in (io.BufferedReader, io.BufferedRandom) else source
    return type(raw) is io.FileIO and stat.S_ISREG(os.fstat(raw.fileno()).st_mode)


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


def _too_large(filename: str, max_bytes: float, size: str) -> PdfRejected:
    return PdfRejected(
        f"{filename}: too large: at most {max_bytes} bytes may be uploaded, this file has {size}",
        reason="too_large",
        filename=filename,
    )
