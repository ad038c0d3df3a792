"""The source of an upload: opened once, sent as often as needed, and not held in memory as a whole if it is large."""

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
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterator
from functools import cache
from pathlib import PurePath
from typing import IO, TYPE_CHECKING, Any

from .._files import open_regular
from ..errors import InvalidRequest, PdfRejected
from ..transport import wire
from .files import OpenFile, buffer_errors, read_cached, read_fully, source_errors
from .form import form_body

if TYPE_CHECKING:
    from .pdf_syntax import Bytes, Read
    from .preflight import Verdict

__all__ = ["OpenPdf", "PdfSource", "Source"]

# Files up to this size are read at once; streams are kept in memory up to this size.
_BLOCK = 256 * 1024
# The size of one write, and of one read of a larger file from the system's memory. Measured: TLS is slower with more.
_WRITE_SIZE = 120 * 1024
# The size of one read in a thread: each thread costs as much as sending 60 KiB.
_THREAD_READ_SIZE = 1024 * 1024
# Up to this size the form is sent in a single write.
_SINGLE_WRITE = 64 * 1024
# Reusable buffers, the last one used first: unlike a new one it is in the processor's cache.
_buffers: deque[memoryview] = deque(maxlen=4)
_whole_file_lock = threading.Lock()
# Without `preadv` an upload of a file object moves its position, which other uploads of the object need.
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
        opened on the event loop and read there if the system has it in memory, at a fifth of the cost of a thread.
        Reads that may wait for a disk run in a thread.
        """
        pdf = await self._open(max_bytes)
        pdf.sha256 = self.sha256
        return pdf

    async def _open(self, max_bytes: float | None) -> OpenPdf:
        source = self.source
        if isinstance(source, str | os.PathLike):
            pdf = _open_path(source, self.filename)
            in_memory = pdf.load_cached()
        elif isinstance(source, bytes | bytearray | memoryview):
            pdf = _open_memory(source, self.filename)
            in_memory = pdf.size <= _BLOCK
        elif isinstance(source, AsyncIterable):
            return await self._open_stream(source, max_bytes)
        else:
            return await _open_in_thread(lambda: _open_file(source, self.filename, max_bytes), max_bytes)
        # The first check runs in a thread: importing the preflight would block the event loop for too long.
        is_imported = max_bytes is None or _preflight.cache_info().currsize > 0
        try:
            if is_imported and pdf.passes_cached(max_bytes):
                return pdf
            if is_imported and in_memory:
                return _load_and_check(pdf, max_bytes)
            return await asyncio.to_thread(_load_and_check, pdf, max_bytes)
        except BaseException:
            pdf.close()
            raise

    async def _open_stream(self, source: AsyncIterable[bytes], max_bytes: float | None) -> OpenPdf:
        spool = _Spool(self.filename, max_bytes)
        try:
            async for chunk in source:
                if spool.add(chunk):
                    await asyncio.to_thread(spool.flush)
            return await _open_in_thread(spool.open, max_bytes)
        finally:
            spool.close()


class OpenPdf:
    """A PDF that can be sent repeatedly: bytes in memory, or an open file of its own."""

    def __init__(self, filename: str, content: memoryview | OpenFile, start: int = 0) -> None:
        self.filename = filename
        self._content: memoryview | OpenFile | None = content
        self._start = start
        self.sha256: str | None = None
        """The hash that the content must have when it is sent."""
        self.size: int = len(content) if isinstance(content, memoryview) else max(0, content.status.st_size - start)

    def __enter__(self) -> OpenPdf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        # A thread that outlives the upload may replace the content meanwhile.
        content, self._content = self._content, None
        if isinstance(content, OpenFile):
            content.close()

    # Checks

    def passes_cached(self, max_bytes: float | None) -> bool:
        """Return whether a large file passes the checks, judged by the parts that the system has in memory."""
        if self.size <= _BLOCK:
            return False
        if max_bytes is None:
            return True
        if self.size > max_bytes:
            return False
        glance, _ = _preflight()
        try:
            return glance(self._peek_cached, self.size)
        except BlockingIOError:
            return False

    def check(self, max_bytes: float) -> None:
        """Raise `PdfRejected` if the service is sure to refuse the file. Call it in a thread."""
        if self.size > max_bytes:
            raise _too_large(self.filename, max_bytes, f"{self.size} bytes")
        if not self.size:
            raise PdfRejected(f"{self.filename}: the file is empty", reason="not_pdf", filename=self.filename)
        reason = self._verdict()
        if reason is not None:
            raise PdfRejected(f"{self.filename}: {_REASONS[reason]}", reason=reason, filename=self.filename)

    def _verdict(self) -> Verdict | None:
        glance, preflight = _preflight()
        if isinstance(self._content, memoryview):
            return preflight(self._content)
        with _whole_file_lock:
            # Files that `glance` cannot judge are read as a whole, one at a time.
            return None if glance(self._peek, self.size) else preflight(self._peek(0, self.size))

    def _peek_cached(self, at: int, size: int) -> bytearray | memoryview:
        if isinstance(self._content, memoryview):
            return self._content[at : at + size]
        block = bytearray(size)
        if not read_cached(self._file, memoryview(block), self._start + at):
            raise BlockingIOError
        return block

    def _peek(self, at: int, size: int) -> bytearray:
        block = bytearray(size)
        self._read(memoryview(block), at)
        return block

    # Content

    def load_cached(self) -> bool:
        """Read a small file into memory if that does not wait for a disk."""
        assert isinstance(self._content, OpenFile)
        if self.size > _BLOCK:
            return False
        block = memoryview(bytearray(self.size))
        if not read_cached(self._content, block, self._start) or self._content.has_changed():
            return False
        self._content.close()
        self._content = block
        return True

    def load(self) -> None:
        """Read a small file into memory. Call it in a thread."""
        if isinstance(self._content, OpenFile) and self.size <= _BLOCK:
            block = self._peek(0, self.size)
            self._check_unchanged()
            self._content.close()
            self._content = memoryview(block)

    def blocks(self) -> Iterator[memoryview]:
        """Yield the content in blocks; the next block may overwrite it. Call it in a thread if the file is large."""
        buffer = memoryview(bytearray(min(_BLOCK, self.size)))
        for at in range(0, self.size, _BLOCK):
            size = min(_BLOCK, self.size - at)
            if isinstance(self._content, memoryview):
                yield self._content[at : at + size]
            else:
                self._read(buffer[:size], at)
                yield buffer[:size]

    def digest(self) -> str:
        """Read the file and return its sha256."""
        digest = hashlib.sha256()
        for block in self.blocks():
            digest.update(block)
        return digest.hexdigest()

    # Sending

    def body(self, sent: Callable[[int], None]) -> wire.Body:
        """Return a form with this file as ``selected_file``, for one attempt; report its progress to ``sent``."""
        return form_body({"selected_file": self}, sent)

    async def write(
        self, write: wire.Write, waiting: Callable[[], int], sent: Callable[[int], None], before: bytes, after: bytes
    ) -> None:
        """Write the content between the other bytes of a form."""
        if isinstance(self._content, memoryview) and self.size <= _SINGLE_WRITE:
            if self.sha256 is not None:
                self._check_sent(hashlib.sha256(self._content))
            await write(b"".join((before, self._content, after)))
            sent(self.size)
            return
        await write(before)
        await self._send(write, waiting, sent)
        await write(after)

    async def _send(self, write: wire.Write, waiting: Callable[[], int], sent: Callable[[int], None]) -> None:
        digest = None if self.sha256 is None else hashlib.sha256()
        buffer = spare = None
        at = 0
        while at < self.size:
            size = min(_WRITE_SIZE, self.size - at)
            if isinstance(self._content, memoryview):
                block = self._content[at : at + size]
            else:
                buffer = buffer or _take_buffer()
                block = buffer[:size]
                if not read_cached(self._file, block, self._start + at):
                    size = min(_THREAD_READ_SIZE, self.size - at)
                    block = memoryview(await asyncio.to_thread(self._peek, at, size))
            at += size
            if digest is not None:
                digest.update(block)
            if at == self.size:
                # Checked before the last block is written: without that block the upload is incomplete.
                self._check_sent(digest)
            for start in range(0, size, _WRITE_SIZE):
                part = block[start : start + _WRITE_SIZE]
                await write(part)
                sent(len(part))
            unsent = waiting()
            if unsent:
                # Unsent bytes must not be overwritten: they are in this block, and rarely in the one before, too.
                buffer, spare = spare if unsent <= size else None, buffer
            elif buffer is not None:
                _buffers.append(buffer)
                buffer = None

    def _read(self, block: memoryview, at: int) -> None:
        with source_errors(f"cannot read {self.filename}"):
            is_whole = read_fully(self._file, block, self._start + at)
        if not is_whole:
            raise self._changed()

    def _check_sent(self, digest: hashlib._Hash | None) -> None:
        """Raise `InvalidRequest` unless all bytes are from one version of the file, and have the expected hash."""
        self._check_unchanged()
        if digest is not None and digest.hexdigest() != self.sha256:
            raise InvalidRequest(
                f"source: {self.filename}: sha256 mismatch: expected {self.sha256}, found {digest.hexdigest()}"
            )

    def _check_unchanged(self) -> None:
        if isinstance(self._content, OpenFile) and self._content.has_changed():
            raise self._changed()

    @property
    def _file(self) -> OpenFile:
        assert isinstance(self._content, OpenFile)
        return self._content

    def _changed(self) -> InvalidRequest:
        return InvalidRequest(f"source: {self.filename} changed while it was read")


class _Spool:
    """A buffer for a stream: in memory while it is small, then in an unnamed temporary file."""

    def __init__(self, filename: str, max_bytes: float | None) -> None:
        self._filename = filename
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._file: OpenFile | None = None
        self._closed = False
        self._size = 0

    def add(self, chunk: object) -> bool:
        """Add a chunk; return whether to call `flush`."""
        if not isinstance(chunk, bytes | bytearray | memoryview):
            raise InvalidRequest(f"source: must yield bytes, got {type(chunk).__name__}")
        self._buffer += chunk
        self._size += memoryview(chunk).nbytes
        if self._max_bytes is not None and self._size > self._max_bytes:
            raise _too_large(self._filename, self._max_bytes, "more")
        return len(self._buffer) > _BLOCK

    def flush(self) -> None:
        """Move the buffer to the file."""
        with buffer_errors(self._filename):
            if self._file is None:
                with tempfile.TemporaryFile(buffering=0) as made:
                    self._file = OpenFile(os.dup(made.fileno()))
                if self._closed:  # the upload was cancelled, and `close` found no file
                    self._file.close()
            with self._file as descriptor:
                view = memoryview(self._buffer)
                while view:
                    view = view[os.write(descriptor, view) :]
                self._buffer = bytearray()

    def open(self) -> OpenPdf:
        if self._file is None:
            return OpenPdf(self._filename, memoryview(self._buffer))
        self.flush()
        with buffer_errors(self._filename), self._file as descriptor:
            return OpenPdf(self._filename, OpenFile(os.dup(descriptor)))

    def close(self) -> None:
        self._closed = True
        if self._file is not None:
            self._file.close()


@cache
def _preflight() -> tuple[Callable[[Read, int], bool], Callable[[Bytes], Verdict | None]]:
    """Import `glance` and `preflight` at the first upload: compiling their patterns takes 10 ms."""
    from .preflight import glance, preflight

    return glance, preflight


async def _open_in_thread(open_pdf: Callable[[], OpenPdf], max_bytes: float | None) -> OpenPdf:
    """Open and check a file in a thread. If the call is cancelled, the thread closes a file that it opens later."""
    opened: list[OpenPdf] = []
    failed = threading.Event()

    def work() -> OpenPdf:
        pdf = open_pdf()
        opened.append(pdf)
        if failed.is_set():
            pdf.close()
            return pdf
        return _load_and_check(pdf, max_bytes)

    try:
        return await asyncio.to_thread(work)
    except BaseException:
        failed.set()
        for pdf in opened:
            pdf.close()
        raise


def _load_and_check(pdf: OpenPdf, max_bytes: float | None) -> OpenPdf:
    pdf.load()
    if max_bytes is not None:
        pdf.check(max_bytes)
    return pdf


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
    shown = repr(os.fspath(path))
    with source_errors(f"cannot open {shown}"):
        descriptor = open_regular(path)
        if descriptor is not None:
            return OpenPdf(filename, OpenFile(descriptor))
    raise InvalidRequest(f"source: {shown} is not a regular file")


def _open_memory(source: bytes | bytearray | memoryview, filename: str) -> OpenPdf:
    with source_errors(f"cannot read {filename}"):
        view = memoryview(source)
        return OpenPdf(filename, view.cast("B") if view.c_contiguous else memoryview(view.tobytes()))


def _open_file(source: IO[bytes], filename: str, max_bytes: float | None) -> OpenPdf:
    """Open a file object from its current position, and restore that position if the object was read."""
    with source_errors(f"cannot read {filename}"):
        if type(source) is io.BytesIO:
            return OpenPdf(filename, memoryview(source.getvalue())[source.tell() :])
        if _is_plain(source):
            source.flush()
            start = source.tell()
            return OpenPdf(filename, OpenFile(os.dup(source.fileno())), start)
        is_seekable = source.seekable()
    with _position_lock if is_seekable and not hasattr(os, "preadv") else contextlib.nullcontext():
        return _copy_file(source, filename, max_bytes, is_seekable)


def _copy_file(source: IO[bytes], filename: str, max_bytes: float | None, is_seekable: bool) -> OpenPdf:
    with source_errors(f"cannot read {filename}"):
        position = source.tell() if is_seekable else None
    spool = _Spool(filename, max_bytes)
    try:
        while True:
            with source_errors(f"cannot read {filename}"):
                chunk = source.read(_BLOCK)
            if spool.add(chunk):
                spool.flush()
            if not chunk:
                return spool.open()
    finally:
        spool.close()
        if position is not None:
            source.seek(position)


def _is_plain(source: Any) -> bool:
    """Return whether the file's descriptor has the same bytes; that of a `GzipFile` has the compressed ones."""
    if not hasattr(os, "preadv"):
        return False  # reading a duplicate of the descriptor would move the caller's file
    raw = source.raw if type(source) in (io.BufferedReader, io.BufferedRandom) else source
    return type(raw) is io.FileIO and stat.S_ISREG(os.fstat(raw.fileno()).st_mode)


def _take_buffer() -> memoryview:
    try:
        return _buffers.pop()
    except IndexError:
        return memoryview(bytearray(_WRITE_SIZE))


def _name_of(source: object) -> str:
    name = os.fsdecode(source) if isinstance(source, str | os.PathLike) else getattr(source, "name", None)
    return PurePath(name).name if isinstance(name, str) else ""


def _too_large(filename: str, max_bytes: float, size: str) -> PdfRejected:
    return PdfRejected(
        f"{filename}: too large: at most {max_bytes} bytes may be uploaded, this file has {size}",
        reason="too_large",
        filename=filename,
    )
