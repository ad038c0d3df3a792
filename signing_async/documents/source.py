"""A PDF to upload, from wherever it comes: opened once, sent as often as it takes, not held whole if it is large."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import io
import os
import re
import secrets
import stat
import tempfile
import threading
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterator
from functools import cache
from typing import IO, TYPE_CHECKING, Any

from .._files import open_regular
from ..errors import InvalidRequest, PdfRejected
from ..transport import wire

if TYPE_CHECKING:
    from .pdf_syntax import Bytes, Read
    from .preflight import Verdict

__all__ = ["OpenPdf", "PdfSource", "Source"]

# A file of this size is read at once; more of a stream than this is not kept in memory.
_BLOCK = 256 * 1024
# What is read of a larger file at once, and how much of that is written at once: what fits into a packet of the
# loopback, and into four records of TLS. Both measured.
_READ = 120 * 1024
_WRITTEN = 60 * 1024
_JOINED = 64 * 1024
# Rooms for that which are free, the last one used first: it is in the processor's cache, where a new one is not.
_rooms: deque[memoryview] = deque(maxlen=4)
_READ_NOW: int | None = getattr(os, "RWF_NOWAIT", None)
_one_at_a_time = threading.Lock()
_REASONS = {
    "not_pdf": "it is not a PDF",
    "protected": "it is password protected",
    "already_signed": "it is signed already",
}

Source = str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes] | AsyncIterable[bytes]


class PdfSource:
    """A PDF and the name it is uploaded under.

    ``source`` is a path, bytes, a binary file object (from where it stands), or an async iterator of bytes. With
    ``sha256``, in hexadecimal, nothing is uploaded but what has that hash.
    """

    def __init__(self, source: Source | PdfSource, filename: str | None = None, *, sha256: str | None = None) -> None:
        if isinstance(source, PdfSource):
            filename = filename or source.filename
            sha256 = sha256 or source.sha256
            source = source.source
        _check_kind(source)
        if filename is not None and (not isinstance(filename, str) or not filename.strip()):
            raise InvalidRequest(f"filename: must be a name, not {filename!r}")
        if sha256 is not None and not (isinstance(sha256, str) and re.fullmatch("[0-9a-fA-F]{64}", sha256)):
            raise InvalidRequest(f"sha256: must be 64 hexadecimal digits, not {sha256!r}")
        self.source: Source = source
        self.sha256: str | None = None if sha256 is None else sha256.lower()
        # A path may hold what is not UTF-8; the name that is sent, and looked for afterwards, is.
        self.filename: str = (filename or _name_of(source) or "document.pdf").encode("utf-8", "replace").decode()

    def __repr__(self) -> str:
        return f"PdfSource({self.filename!r})"

    async def open(self, most: float | None = None) -> OpenPdf:
        """The file, opened; the caller closes it.

        With ``most``, a larger file is a `PdfRejected`, and so is one that the service is sure to refuse. A path is
        opened here and now, and read at once as far as the system has it in memory, at a fifth of what a thread
        costs; what may wait for a disk is read in a thread, while the event loop goes on.
        """
        pdf = await self._open(most)
        pdf.sha256 = self.sha256
        return pdf

    async def _open(self, most: float | None) -> OpenPdf:
        source = self.source
        if isinstance(source, str | os.PathLike):
            pdf = _open_path(source, self.filename)
            known = pdf.load_now()
        elif isinstance(source, bytes | bytearray | memoryview):
            pdf = _open_memory(source, self.filename)
            known = pdf.size <= _BLOCK
        elif isinstance(source, AsyncIterable):
            return await self._open_stream(source, most)
        else:
            return await asyncio.to_thread(_checked, lambda: _open_file(source, self.filename, most), most)
        # The first check runs in a thread: importing the preflight takes longer than the event loop may be held up.
        ready = most is None or _preflight.cache_info().currsize > 0
        if ready and pdf.passes_now(most):
            return pdf
        return _checked(lambda: pdf, most) if known and ready else await asyncio.to_thread(_checked, lambda: pdf, most)

    async def _open_stream(self, source: AsyncIterable[bytes], most: float | None) -> OpenPdf:
        spool = _Spool(self.filename, most)
        try:
            async for chunk in source:
                if spool.add(chunk):
                    await asyncio.to_thread(spool.flush)
            return await asyncio.to_thread(_checked, spool.opened, most)
        finally:
            spool.close()


class OpenPdf:
    """A PDF that can be sent as often as it takes: bytes in memory, or an open file of its own."""

    def __init__(self, filename: str, content: memoryview | _File, start: int = 0) -> None:
        self.filename = filename
        self._content: memoryview | _File | None = content
        self._start = start
        self.sha256: str | None = None
        """What its hash has to be when it is sent."""
        self.size: int = len(content) if isinstance(content, memoryview) else max(0, content.status.st_size - start)

    def passes_now(self, most: float | None) -> bool:
        """Whether what is larger than a block needs no more than a glance now, which does not wait for a disk."""
        if self.size <= _BLOCK:
            return False
        if most is None or self.size > most:
            return most is None
        glance, _ = _preflight()
        try:
            return glance(self._peek_now, self.size)
        except BlockingIOError:
            return False

    def _peek_now(self, at: int, size: int) -> bytearray | memoryview:
        if isinstance(self._content, memoryview):
            return self._content[at : at + size]
        block = bytearray(size)
        if not _read_now(self._file, memoryview(block), self._start + at):
            raise BlockingIOError
        return block

    def _peek(self, at: int, size: int) -> bytearray:
        block = bytearray(size)
        with _told(f"{self.filename} cannot be read"):
            whole = _read(self._file, memoryview(block), self._start + at)
        if not whole:
            raise self._changed()
        return block

    def load_now(self) -> bool:
        """Read the file if that does not wait for a disk."""
        assert isinstance(self._content, _File)
        if self.size > _BLOCK:
            return False
        block = memoryview(bytearray(self.size))
        if not _read_now(self._content, block, self._start) or self._content.is_changed():
            return False
        self._content.close()
        self._content = block
        return True

    def load(self) -> None:
        """Read the file at once if it is small, to be run in a thread."""
        if isinstance(self._content, _File) and self.size <= _BLOCK:
            block = self._peek(0, self.size)
            self._check_state()
            self._content.close()
            self._content = memoryview(block)

    def __enter__(self) -> OpenPdf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        if isinstance(self._content, _File):
            self._content.close()
        self._content = None

    def check(self, most: float) -> None:
        """The preflight, to be run in a thread: a `PdfRejected` for what the service is sure to refuse."""
        if self.size > most:
            raise _too_large(self.filename, most, f"{self.size} bytes")
        if not self.size:
            raise PdfRejected(f"{self.filename}: it is empty", reason="not_pdf", filename=self.filename)
        self._refuse(self._verdict())

    def _refuse(self, reason: Verdict | None) -> None:
        if reason is not None:
            raise PdfRejected(f"{self.filename}: {_REASONS[reason]}", reason=reason, filename=self.filename)

    def _verdict(self) -> Verdict | None:
        glance, preflight = _preflight()
        if isinstance(self._content, memoryview):
            return preflight(self._content)
        with _one_at_a_time:
            # The whole of it in memory is seldom needed, and never of more than one file at a time.
            return None if glance(self._peek, self.size) else preflight(self._peek(0, self.size))

    def blocks(self) -> Iterator[memoryview]:
        """Its content, in memory that is used again for the next block; to be run in a thread if it is large."""
        room = memoryview(bytearray(min(_BLOCK, self.size)))
        for at in range(0, self.size, _BLOCK):
            size = min(_BLOCK, self.size - at)
            if isinstance(self._content, memoryview):
                yield self._content[at : at + size]
                continue
            with _told(f"{self.filename} cannot be read"):
                whole = _read(self._file, room[:size], self._start + at)
            if not whole:
                raise self._changed()
            yield room[:size]

    def digest(self) -> str:
        """Return the sha256 of the file; it is read for that."""
        found = hashlib.sha256()
        for block in self.blocks():
            found.update(block)
        return found.hexdigest()

    def body(self, sent: Callable[[int], None]) -> wire.Body:
        """The form with this file as ``selected_file``, made anew for each attempt; ``sent`` is told of its bytes."""
        boundary = secrets.token_hex(16)
        head = (
            f"--{boundary}\r\n"
            f'Content-Disposition: form-data; name="selected_file"; filename="{_escaped(self.filename)}"\r\n'
            "Content-Type: application/pdf\r\n\r\n"
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()

        async def produce(write: wire.Write, waiting: Callable[[], int]) -> None:
            if isinstance(self._content, memoryview) and self.size <= _JOINED:
                if self.sha256 is not None:
                    self._check_read(hashlib.sha256(self._content))
                await write(b"".join((head, self._content, tail)))
                sent(self.size)
                return
            await write(head)
            await self._send(write, waiting, sent)
            await write(tail)

        return wire.Body(produce, len(head) + self.size + len(tail), f"multipart/form-data; boundary={boundary}")

    async def _send(self, write: wire.Write, waiting: Callable[[], int], sent: Callable[[int], None]) -> None:
        digest = None if self.sha256 is None else hashlib.sha256()
        room = spare = None
        for at in range(0, self.size, _READ):
            size = min(_READ, self.size - at)
            if isinstance(self._content, memoryview):
                block = self._content[at : at + size]
            else:
                room = room or _take_room()
                block = room[:size]
                if not _read_now(self._file, block, self._start + at):
                    await self._fetch(block, self._start + at)
            if digest is not None:
                digest.update(block)
            if at + size == self.size:
                # Without its last block it is no upload.
                self._check_read(digest)
            for start in range(0, size, _WRITTEN):
                await write(block[start : start + _WRITTEN])
            left = waiting()
            if left:
                # What still waits to be sent must stay as it is: some of this block, and seldom of the one before.
                room, spare = spare if left <= size else None, room
            elif room is not None:
                _rooms.append(room)
                room = None
            sent(size)

    async def _fetch(self, block: memoryview, at: int) -> None:
        """Read a block that the system has not in memory."""
        with _told(f"{self.filename} cannot be read"):
            whole = await asyncio.to_thread(_read, self._file, block, at)
        if not whole:
            raise self._changed()

    def _check_read(self, digest: hashlib._Hash | None) -> None:
        """All of it was read: was it one version, and the one that was meant?"""
        self._check_state()
        if digest is not None and digest.hexdigest() != self.sha256:
            raise InvalidRequest(f"source: {self.filename} has other content than its sha256 tells")

    def _check_state(self) -> None:
        if isinstance(self._content, _File) and self._content.is_changed():
            raise self._changed()

    @property
    def _file(self) -> _File:
        assert isinstance(self._content, _File)
        return self._content

    def _changed(self) -> InvalidRequest:
        """Half of one version and half of another make no document."""
        return InvalidRequest(f"source: {self.filename} was changed while it was uploaded")


class _File:
    """An open file. Closed while a thread uses it, it stays open for that: its number must not come to mean another."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._users = 1
        self._closed = False
        self._lock = threading.Lock()
        self.status: os.stat_result = os.fstat(number)

    def __enter__(self) -> int:
        """Use it in a thread that may outlive the upload."""
        with self._lock:
            if self._closed:
                raise ValueError("the file is closed")
            self._users += 1
        return self.number

    def __exit__(self, *_: object) -> None:
        self._leave()

    def is_changed(self) -> bool:
        """Whether it is another version than when it was opened, or the system cannot tell any more."""
        try:
            now = os.fstat(self.number)
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
            last = not self._users
        if last:
            os.close(self.number)

    def __del__(self) -> None:
        # A thread opened it for an upload that had been cancelled by then.
        self.close()


class _Spool:
    """Keeps a stream aside: in memory while it is small, then in a file without a name."""

    def __init__(self, filename: str, most: float | None) -> None:
        self._filename = filename
        self._most = most
        self._buffer = bytearray()
        self._file: _File | None = None
        self._size = 0

    def add(self, chunk: object) -> bool:
        """Take a chunk; whether it is time to flush."""
        if not isinstance(chunk, bytes | bytearray | memoryview):
            raise InvalidRequest(f"source: must give bytes, not {type(chunk).__name__}")
        self._buffer += chunk
        self._size += memoryview(chunk).nbytes
        if self._most is not None and self._size > self._most:
            raise _too_large(self._filename, self._most, "more")
        return len(self._buffer) > _BLOCK

    def flush(self) -> None:
        """Move what is in memory to the file."""
        if self._file is None:
            with tempfile.TemporaryFile(buffering=0) as made:
                self._file = _File(os.dup(made.fileno()))
        with self._file as number:
            view = memoryview(self._buffer)
            while view:
                view = view[os.write(number, view) :]
            self._buffer = bytearray()

    def opened(self) -> OpenPdf:
        if self._file is None:
            return OpenPdf(self._filename, memoryview(self._buffer))
        self.flush()
        with self._file as number:
            return OpenPdf(self._filename, _File(os.dup(number)))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@cache
def _preflight() -> tuple[Callable[[Read, int], bool], Callable[[Bytes], Verdict | None]]:
    """`glance` and `preflight`, imported at the first upload: their patterns take 10 ms to compile."""
    from .preflight import glance, preflight

    return glance, preflight


def _checked(make: Callable[[], OpenPdf], most: float | None) -> OpenPdf:
    pdf = make()
    try:
        pdf.load()
        if most is not None:
            pdf.check(most)
    except BaseException:
        pdf.close()
        raise
    return pdf


def _check_kind(source: Any) -> None:
    if isinstance(source, str | os.PathLike | bytes | bytearray | memoryview | AsyncIterable):
        return
    if not hasattr(source, "read"):
        raise InvalidRequest(
            f"source: must be a path, bytes, a binary file or an async iterator, not {type(source).__name__}"
        )
    if hasattr(source, "encoding"):
        raise InvalidRequest("source: the file is open as text; open it with mode 'rb'")
    if inspect.iscoroutinefunction(source.read):
        raise InvalidRequest("source: its read() is asynchronous; give a binary file, or an async iterator of bytes")


def _open_memory(source: bytes | bytearray | memoryview, filename: str) -> OpenPdf:
    with _told(f"{filename} cannot be read"):
        view = memoryview(source)
        return OpenPdf(filename, view.cast("B") if view.c_contiguous else memoryview(view.tobytes()))


def _open_path(path: str | os.PathLike[str], filename: str) -> OpenPdf:
    try:
        number = open_regular(path)
        file = None if number is None else _File(number)
    except (OSError, ValueError) as error:
        raise _unusable(f"{os.fspath(path)!r} cannot be opened", error) from None
    if file is None:
        raise InvalidRequest(f"source: {os.fspath(path)!r} is not a file")
    return OpenPdf(filename, file)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Say of which source it is that the system says no; closed files and strange paths are ValueErrors."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise _unusable(what, error) from None


def _unusable(what: str, error: OSError | ValueError) -> InvalidRequest:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return InvalidRequest(f"source: {what}: {why}")


def _open_file(source: IO[bytes], filename: str, most: float | None) -> OpenPdf:
    """A file object, from where it stands, which is where it is left if it can be."""
    with _told(f"{filename} cannot be read"):
        if type(source) is io.BytesIO:
            return OpenPdf(filename, memoryview(source.getvalue())[source.tell() :])
        if _is_plain(source):
            source.flush()
            start = source.tell()
            return OpenPdf(filename, _File(os.dup(source.fileno())), start)
        position = source.tell() if source.seekable() else None
    spool = _Spool(filename, most)
    try:
        _read_aside(source, filename, spool)
        return spool.opened()
    finally:
        spool.close()
        if position is not None:
            source.seek(position)


def _is_plain(source: Any) -> bool:
    """Whether this is the file of its descriptor and nothing else: a `GzipFile`, say, has the descriptor of another."""
    raw = source.raw if type(source) in (io.BufferedReader, io.BufferedRandom) else source
    return type(raw) is io.FileIO and stat.S_ISREG(os.fstat(raw.fileno()).st_mode)


def _read_aside(source: IO[bytes], filename: str, spool: _Spool) -> None:
    while True:
        with _told(f"{filename} cannot be read"):
            chunk = source.read(_BLOCK)
        if spool.add(chunk):
            spool.flush()
        if not chunk:
            return


def _take_room() -> memoryview:
    try:
        return _rooms.pop()
    except IndexError:
        return memoryview(bytearray(_READ))


def _read_now(file: _File, block: memoryview, at: int) -> bool:
    """Read the whole block if the system has it in memory; this never waits for a disk."""
    if _READ_NOW is None:
        return False
    try:
        return os.preadv(file.number, [block], at, _READ_NOW) == len(block)
    except OSError:  # not in memory, or a file system that cannot tell
        return False


def _read(file: _File, block: memoryview, at: int) -> bool:
    """Read the block; whether the file has all of it."""
    with file as number:
        while block and (got := os.preadv(number, [block], at)):
            block, at = block[got:], at + got
    return not block


def _name_of(source: object) -> str:
    if isinstance(source, str | os.PathLike):
        return os.path.basename(os.fsdecode(source))  # noqa: PTH119  # a PurePath costs ten times as much
    name = getattr(source, "name", None)
    return os.path.basename(name) if isinstance(name, str) else ""  # noqa: PTH119  # as above


def _escaped(filename: str) -> str:
    """As browsers write it: UTF-8, with what would end the header's value percent-encoded."""
    return filename.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


def _too_large(filename: str, most: float, size: str) -> PdfRejected:
    return PdfRejected(
        f"{filename}: it is too large: at most {most} bytes may be uploaded, this has {size}",
        reason="too_large",
        filename=filename,
    )
