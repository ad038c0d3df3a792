"""A PDF to upload, from wherever it comes: opened once, sent as often as it takes, not held whole if it is large."""

from __future__ import annotations

import asyncio
import contextlib
import io
import mmap
import os
import secrets
import stat
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Callable
from pathlib import PurePath
from typing import IO, Any

from . import wire
from .errors import InvalidRequest, PdfRejected
from .pdf_preflight import Verdict, preflight

__all__ = ["OpenPdf", "PdfSource", "Source"]

_BLOCK = 1024 * 1024
_WRITE = 256 * 1024
_READ_NOW: int | None = getattr(os, "RWF_NOWAIT", None)
_REASONS = {
    "not_pdf": "it is not a PDF",
    "protected": "it is password protected",
    "already_signed": "it is signed already",
}

Source = str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes] | AsyncIterable[bytes]


class PdfSource:
    """A PDF and the name it is uploaded under.

    ``source`` is a path, bytes, a binary file object (from where it stands), or an async iterator of bytes.
    """

    def __init__(self, source: Source | PdfSource, filename: str | None = None) -> None:
        if isinstance(source, PdfSource):
            filename = filename or source.filename
            source = source.source
        if isinstance(source, io.TextIOBase):
            raise InvalidRequest("source: the file is open as text; open it with mode 'rb'")
        known = isinstance(source, str | os.PathLike | bytes | bytearray | memoryview | AsyncIterable)
        if not known and not hasattr(source, "read"):
            raise InvalidRequest(
                f"source: must be a path, bytes, a binary file or an async iterator, not {type(source).__name__}"
            )
        if filename is not None and (not isinstance(filename, str) or not filename.strip()):
            raise InvalidRequest(f"filename: must be a name, not {filename!r}")
        self.source: Source = source
        self.filename: str = filename or _name_of(source) or "document.pdf"

    def __repr__(self) -> str:
        return f"PdfSource({self.filename!r})"

    @contextlib.asynccontextmanager
    async def opened(self, most: int | None = None) -> AsyncIterator[OpenPdf]:
        """The file, open for reading at any place. A stream is kept aside first; it may not be longer than ``most``."""
        source = self.source
        with contextlib.ExitStack() as stack:
            if isinstance(source, bytes | bytearray | memoryview):
                view = memoryview(source).cast("B")
                yield OpenPdf(self.filename, len(view), memory=view)
            elif isinstance(source, str | os.PathLike):
                handle = await _opened(source)
                stack.callback(os.close, handle)
                yield OpenPdf(self.filename, os.fstat(handle).st_size, handle=handle)
            elif isinstance(source, AsyncIterable):
                spool = stack.enter_context(_Spool(self.filename, most))
                async for chunk in source:
                    await spool.add(chunk)
                yield spool.opened()
            else:
                yield await _open_file(source, self.filename, most, stack)


class OpenPdf:
    """An open PDF of known size."""

    def __init__(
        self, filename: str, size: int, *, handle: int | None = None, memory: memoryview | None = None, start: int = 0
    ) -> None:
        self.filename = filename
        self.size: int = size - start
        self._handle = handle
        self._memory = memory
        self._start = start
        self._first: memoryview | None = None

    async def check(self, most: int) -> None:
        """The preflight: a `PdfRejected` for what the service is sure to refuse."""
        if self.size > most:
            raise _too_large(self.filename, most, f"{self.size} bytes")
        if self._memory is not None or self.size <= _BLOCK:
            self._first = await self.read(0, self.size)
            reason = preflight(self._first)
        else:
            # A page of a mapped file that is not in memory blocks whoever touches it.
            reason = await asyncio.to_thread(self._preflight_mapped)
        if reason is not None:
            raise PdfRejected(f"{self.filename}: {_REASONS[reason]}", reason=reason, filename=self.filename)

    def _preflight_mapped(self) -> Verdict | None:
        assert self._handle is not None
        with (
            mmap.mmap(self._handle, self._start + self.size, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as whole,
            whole[self._start :] as view,
        ):
            return preflight(view)

    async def read(self, offset: int, size: int) -> memoryview:
        """Exactly ``size`` bytes. What the system has not in memory is read in a thread: the event loop goes on."""
        if self._memory is not None:
            return self._memory[offset : offset + size]
        if self._first is not None and offset + size <= len(self._first):
            return self._first[offset : offset + size]
        assert self._handle is not None
        block: bytearray | bytes | None = _read_now(self._handle, size, self._start + offset)
        if block is None:
            block = await asyncio.to_thread(_read, self._handle, size, self._start + offset)
        if len(block) != size:
            raise InvalidRequest(f"source: {self.filename} became shorter while it was uploaded")
        return memoryview(block)

    def body(self, sent: Callable[[int], None]) -> wire.Body:
        """The form with this file as ``selected_file``, made anew for each attempt; ``sent`` is told of its bytes."""
        boundary = secrets.token_hex(16)
        head = (
            f"--{boundary}\r\n"
            f'Content-Disposition: form-data; name="selected_file"; filename="{_escaped(self.filename)}"\r\n'
            "Content-Type: application/pdf\r\n\r\n"
        ).encode("utf-8", "replace")
        tail = f"\r\n--{boundary}--\r\n".encode()

        async def chunks() -> AsyncIterator[wire.Chunk]:
            yield head
            for start in range(0, self.size, _BLOCK):
                block = await self.read(start, min(_BLOCK, self.size - start))
                for at in range(0, len(block), _WRITE):
                    piece = block[at : at + _WRITE]
                    yield piece
                    sent(len(piece))
            yield tail

        return wire.Body(chunks, len(head) + self.size + len(tail), f"multipart/form-data; boundary={boundary}")


class _Spool:
    """Keeps a stream aside: in memory while it is small, then in a file without a name."""

    def __init__(self, filename: str, most: int | None) -> None:
        self._filename = filename
        self._most = most
        self._buffer = bytearray()
        self._file: IO[bytes] | None = None
        self._size = 0

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    async def add(self, chunk: bytes) -> None:
        if not isinstance(chunk, bytes | bytearray | memoryview):
            raise InvalidRequest(f"source: must give bytes, not {type(chunk).__name__}")
        self._buffer += chunk
        self._size += len(chunk)
        if self._most is not None and self._size > self._most:
            raise _too_large(self._filename, self._most, "more")
        if len(self._buffer) > _BLOCK:
            await asyncio.to_thread(self._write)

    def _write(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # closed by __exit__
        view = memoryview(self._buffer)
        while view:
            view = view[self._file.write(view) :]
        self._buffer = bytearray()

    def opened(self) -> OpenPdf:
        if self._file is None:
            return OpenPdf(self._filename, self._size, memory=memoryview(self._buffer))
        self._write()
        return OpenPdf(self._filename, self._size, handle=self._file.fileno())


async def _open_file(source: IO[bytes], filename: str, most: int | None, stack: contextlib.ExitStack) -> OpenPdf:
    """A file object, from where it stands, which is where it is left if it can be."""
    try:
        handle, start = source.fileno(), source.tell()
        regular = stat.S_ISREG(os.fstat(handle).st_mode)
    except (OSError, ValueError, AttributeError):
        regular = False
    if regular:
        handle = os.dup(handle)
        stack.callback(os.close, handle)
        return OpenPdf(filename, os.fstat(handle).st_size, handle=handle, start=start)
    spool = stack.enter_context(_Spool(filename, most))
    position = source.tell() if _seekable(source) else None
    try:
        while chunk := await asyncio.to_thread(source.read, _BLOCK):
            await spool.add(chunk)
    finally:
        if position is not None:
            source.seek(position)
    return spool.opened()


def _seekable(source: Any) -> bool:
    return bool(hasattr(source, "seekable") and source.seekable())


async def _opened(path: str | os.PathLike[str]) -> int:
    """Open in a thread, since a disk may be slow; a caller that is cancelled meanwhile leaves no open file behind."""
    opening = asyncio.get_running_loop().run_in_executor(None, _open, path)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(lambda late: None if late.exception() else os.close(late.result()))
        raise


def _open(path: str | os.PathLike[str]) -> int:
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidRequest(f"source: {os.fspath(path)!r} cannot be opened: {why}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InvalidRequest(f"source: {os.fspath(path)!r} is not a file")
    return handle


def _read_now(handle: int, size: int, offset: int) -> bytearray | None:
    """The bytes, if the system has all of them in memory; this never waits for a disk."""
    if _READ_NOW is None:
        return None
    block = bytearray(size)
    try:
        got = os.preadv(handle, [block], offset, _READ_NOW)
    except OSError:  # not in memory, or a file system that cannot tell
        return None
    return block if got == size else None


def _read(handle: int, size: int, offset: int) -> bytes:
    parts = []
    while size and (part := os.pread(handle, size, offset)):
        parts.append(part)
        size -= len(part)
        offset += len(part)
    return b"".join(parts)


def _name_of(source: object) -> str:
    if isinstance(source, str | os.PathLike):
        return PurePath(os.fspath(source)).name
    name = getattr(source, "name", None)
    return PurePath(name).name if isinstance(name, str) else ""


def _escaped(filename: str) -> str:
    """As browsers write it: UTF-8, with what would end the header's value percent-encoded."""
    return filename.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


def _too_large(filename: str, most: int, size: str) -> PdfRejected:
    return PdfRejected(
        f"{filename}: it is too large: at most {most} bytes may be uploaded, this has {size}",
        reason="too_large",
        filename=filename,
    )
