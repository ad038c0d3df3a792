"""The documents of a signing: upload PDFs, download the sealed ones."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs

from . import wire
from .answers import record, request_id
from .convert import Unreadable, structure
from .errors import DecodeError, InvalidRequest, NotYetSigned, RequestTimeout, TransportError
from .ledger import Ledger, Listed, Upload
from .models import Document, Signing
from .pdf import OpenPdf, PdfSource, Source
from .retry import Repeat
from .signings import reading, signing_path
from .token_stores import sync_folder
from .transport import Done, Operation, Read, Transport, log

__all__ = ["Documents", "Progress", "SealedFile"]

T = TypeVar("T")

_UPLOAD = "documents.upload"
_DOWNLOAD = "documents.download_signed"
_HEAD = b"%PDF-"
_END = b"%%EOF"
_END_WITHIN = 1024
_AT_ONCE = 512 * 1024


@attrs.frozen
class Progress:
    """How far a transfer has come; totals are None while they are unknown. A repeat takes its bytes back first."""

    files_done: int
    files_total: int | None
    bytes_done: int
    bytes_total: int | None


@attrs.frozen
class SealedFile:
    """A sealed PDF on disk, checked and complete."""

    path: Path
    size: int
    sha256: str


class Documents:
    """``client.documents``."""

    def __init__(self, transport: Transport, ledger: Ledger) -> None:
        self._transport = transport
        self._ledger = ledger

    async def upload(
        self,
        signing_id: str | Signing,
        source: Source | PdfSource,
        filename: str | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        *,
        preflight: bool = True,
    ) -> Document:
        """Upload one PDF to a draft, and return its record.

        After a 5xx or an answer that was lost it is not uploaded again before the signing was read; where that does not
        settle whether the document arrived, `OutcomeUnknown` is raised. (A service that takes it in only after the
        reading has shown nothing cannot be seen through.) Uploads of one name to one signing take turns.
        ``preflight=False`` leaves the check of the file to the service. ::

            document = await client.documents.upload(signing, "contract.pdf")
        """
        path = signing_path(signing_id)
        transport, most = self._transport, self._transport.options.assumptions.max_pdf_bytes
        deadline = transport.deadline(transfer=True)
        try:
            async with asyncio.timeout_at(deadline) as preparing:
                with await PdfSource(source, filename).open(most if preflight else None) as pdf:
                    sending = _Sending(pdf, on_progress)
                    async with self._ledger.upload(
                        path, pdf.filename, lambda: transport.call(self._listing(path), deadline)
                    ) as upload:
                        # From here on the call keeps the deadline itself, and tells what was sent.
                        preparing.reschedule(None)
                        document = await self._send(path, upload, sending, deadline)
                    sending.done()
                    return document
        except TimeoutError:
            if not preparing.expired():
                raise
        # Out here the exception that ended the wait, with all that it has seen, is not the context of this one.
        raise RequestTimeout(f"{_UPLOAD}: its deadline passed before anything was sent", operation=_UPLOAD, attempts=0)

    async def _send(self, path: str, upload: Upload, sending: _Sending, deadline: float) -> Document:
        async def check(read: Read, since: float) -> Done[Document] | None:
            return upload.settle(await upload.documents(lambda: read(self._listing(path)), since))

        operation = Operation(
            _UPLOAD,
            "POST",
            f"{path}/documents",
            Repeat.CHECKED,
            decode=self._decode,
            check=check,
            body=sending.body,
            transfer=True,
        )
        try:
            document = await self._transport.call(operation, deadline)
        except BaseException as error:
            upload.failed(error, checked=self._transport.options.retry.max_attempts > 1)
            raise
        upload.done(document)
        return document

    async def download_signed(
        self, signing_id: str | Signing, document_id: str | Document, path: str | os.PathLike[str]
    ) -> SealedFile:
        """Download a sealed PDF to ``path``, which is replaced only by a complete, checked file.

        Raises `NotYetSigned` until the document is fully signed, and an `OSError` where the disk fails. ::

            sealed = await client.documents.download_signed(signing, document, "archive/contract.pdf")
        """
        target = _target(path)
        operation = self._sealed(signing_id, document_id, lambda response: _save(response, target, self._most))
        return await self._transport.call(operation)

    async def read_signed(self, signing_id: str | Signing, document_id: str | Document) -> bytes:
        """A sealed PDF, in memory."""

        async def receive(response: wire.Response) -> bytes:
            parts = [chunk async for chunk in _checked(response, self._most)]
            return b"".join(parts)

        return await self._transport.call(self._sealed(signing_id, document_id, receive))

    @asynccontextmanager
    async def stream_signed(
        self, signing_id: str | Signing, document_id: str | Document
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """A sealed PDF as it arrives, for another place than a file. ::

            async with client.documents.stream_signed(signing, document) as chunks:
                async for chunk in chunks:
                    await bucket.write(chunk)

        It is repeated until it begins to arrive, not after that: whoever takes chunks has some of them already. One
        that is cut short, or is no PDF, ends in an error. The time that is spent waiting for chunks, and not the time
        between them, is bounded by ``Timeouts.transfer``.
        """

        async def receive(response: wire.Response) -> wire.Response:
            return response.kept()

        response = await self._transport.call(self._sealed(signing_id, document_id, receive))
        try:
            async with aclosing(self._streamed(response)) as chunks:
                yield chunks
        finally:
            response.close()

    async def _streamed(self, response: wire.Response) -> AsyncGenerator[bytes, None]:
        left = self._transport.options.timeouts.transfer
        loop = asyncio.get_running_loop()
        try:
            async with aclosing(_checked(response, self._most)) as chunks:
                while True:
                    began = loop.time()
                    async with asyncio.timeout(left):
                        chunk = await anext(chunks, None)
                    if chunk is None:
                        return
                    left -= loop.time() - began
                    yield chunk
        except wire.Broken as broken:
            kind: type[TransportError | DecodeError] = TransportError
            problem = broken.failure.words
        except Unreadable as unreadable:
            kind, problem = DecodeError, f"the answer cannot be read: {unreadable}"
        except TimeoutError:
            kind, problem = RequestTimeout, "it did not arrive in time"
        found = request_id(response.headers, None, self._transport.options.assumptions)
        identity = None if found is None else self._transport.redacted(found)
        raise kind(f"{_DOWNLOAD}: {problem}", operation=_DOWNLOAD, status=response.status, request_id=identity)

    @property
    def _most(self) -> int:
        return self._transport.options.assumptions.max_sealed_bytes

    def _sealed(
        self, signing_id: Any, document_id: Any, receive: Callable[[wire.Response], Awaitable[T]]
    ) -> Operation[T]:
        path = f"{signing_path(signing_id)}/documents/{wire.segment('document_id', document_id)}/download-signed"
        return Operation(_DOWNLOAD, "GET", path, Repeat.READ, receive=receive, not_found=NotYetSigned, transfer=True)

    def _listing(self, path: str) -> Operation[Listed]:
        """Reads which documents a signing has; None where the answer does not list them."""
        assumptions = self._transport.options.assumptions

        def decode(data: Any, response: wire.Response) -> Listed:
            found = record(data, assumptions)
            listed = isinstance(found, dict) and isinstance(found.get("documents"), list)
            return structure(found, Signing).documents if listed else None

        return reading(path, decode)

    def _decode(self, data: Any, response: wire.Response) -> Document:
        return structure(record(data, self._transport.options.assumptions), Document)


def _target(path: str | os.PathLike[str]) -> Path:
    """Where a download may go: a place for a file, or a file. Anything else, say a device, is not to be replaced."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise InvalidRequest(f"path: must be a path, not {type(path).__name__}")
    target = Path(path)
    try:
        kind = stat.S_IFMT(target.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        kind = stat.S_IFREG
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(f"path: {str(target)!r} cannot be written: {why}") from None
    if kind != stat.S_IFREG:
        raise InvalidRequest(f"path: {str(target)!r} is {'a folder' if kind == stat.S_IFDIR else 'not a file'}")
    if not target.parent.is_dir():
        raise InvalidRequest(f"path: {str(target)!r}: there is no folder {str(target.parent)!r}")
    return target


class _Sending:
    """The body of an upload, anew for each attempt, and what its listener is told of it."""

    def __init__(self, pdf: OpenPdf, listener: Callable[[Progress], None] | None) -> None:
        self._pdf = pdf
        self._listener = listener
        self._sent = 0

    def body(self) -> wire.Body:
        if self._sent:
            self._sent = 0
            self._tell(files=0)
        return self._pdf.body(self._add)

    def done(self) -> None:
        self._sent = self._pdf.size
        self._tell(files=1)

    def _add(self, size: int) -> None:
        self._sent += size
        self._tell(files=0)

    def _tell(self, files: int) -> None:
        if self._listener is None:
            return
        try:
            self._listener(Progress(files, 1, self._sent, self._pdf.size))
        except Exception:
            log.exception("on_progress failed; the upload goes on without it")
            self._listener = None


async def _checked(response: wire.Response, most: int) -> AsyncGenerator[bytes, None]:
    """The chunks of a download; `Unreadable` where it is not a PDF from its beginning to its end."""
    size, head, tail = 0, b"", b""
    async for chunk in response.chunks():
        size += len(chunk)
        if size > most:
            raise Unreadable(f"the sealed file is larger than {most} bytes")
        if len(head) < len(_HEAD):
            head += chunk[: len(_HEAD)]
            if not (head.startswith(_HEAD) or _HEAD.startswith(head)):
                raise Unreadable("what came is not a PDF")
        tail = (tail + chunk[-_END_WITHIN:])[-_END_WITHIN:]
        yield chunk
    if not head.startswith(_HEAD):
        raise Unreadable("what came is not a PDF")
    if _END not in tail:
        raise Unreadable("the sealed file has no end: it was cut short")


async def _save(response: wire.Response, target: Path, most: int) -> SealedFile:
    """Write a download beside its target, and put it in the target's place when it is complete."""
    part, chunks, waiting = _Part(target), [], 0
    try:
        async for chunk in _checked(response, most):
            chunks.append(chunk)
            waiting += len(chunk)
            if waiting >= _AT_ONCE:
                await asyncio.to_thread(part.add, chunks)
                chunks, waiting = [], 0
        return await asyncio.to_thread(part.finish, chunks)
    except BaseException:
        part.remove()
        raise


class _Part:
    """A file beside its target, until it is complete. All that may wait for the disk is done in a thread.

    A thread may outlive a download that was cancelled. So the file is open only inside of one call, and a call that
    comes too late cleans up behind itself.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._path = target.with_name(f".{secrets.token_hex(8)}.part")
        self._mode = "xb"
        self._digest = hashlib.sha256()
        self._size = 0
        self._given_up = False

    def add(self, chunks: Iterable[bytes], *, last: bool = False) -> None:
        try:
            with self._path.open(self._mode) as file:
                self._mode = "ab"
                for chunk in chunks:
                    self._digest.update(chunk)
                    self._size += file.write(chunk)
                file.flush()
                if last:
                    os.fsync(file.fileno())
        except OSError as error:
            if self._mode == "xb":
                raise InvalidRequest(f"path: {str(self._target)!r} cannot be written: {error.strerror}") from None
            raise OSError(error.errno, error.strerror, str(self._target)) from None
        finally:
            if self._given_up:
                self.remove()

    def finish(self, chunks: Iterable[bytes]) -> SealedFile:
        self.add(chunks, last=True)
        if not self._given_up:
            self._path.replace(self._target)
            sync_folder(self._target.parent)
        return SealedFile(self._target, self._size, self._digest.hexdigest())

    def remove(self) -> None:
        self._given_up = True
        self._path.unlink(missing_ok=True)
