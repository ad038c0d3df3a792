"""The documents of a signing: upload PDFs, download the sealed ones."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import os
import reprlib
import secrets
import stat
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
    Sized,
)
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

import attrs

from .._files import sync_folder
from ..errors import (
    DecodeError,
    InvalidRequest,
    NotSound,
    NotYetSigned,
    RequestTimeout,
    SigningError,
    TransportError,
)
from ..models import Document, Signing
from ..reconcile import Creation, Listed, Tracker
from ..record_matching import DocumentMatch
from ..signings import reading, signing_path
from ..transport import wire
from ..transport.call import Operation, Transport
from ..transport.deadlines import until
from ..transport.decode import Unreadable, structure
from ..transport.error_response import record, request_id
from ..transport.retry import Repeat
from ..worker_pool import Progress, Results, Tally, Teller
from .source import OpenPdf, PdfSource, Source

if TYPE_CHECKING:
    from ..sealed import Trust

__all__ = ["Documents", "Progress", "SealedFile", "UploadResult"]

S = TypeVar("S")
T = TypeVar("T")
OneSource = TypeVar("OneSource", bound=Source | PdfSource)
Pair = TypeVar("Pair", bound=tuple[str | Signing, Source | PdfSource])

_UPLOAD = "documents.upload"
_DOWNLOAD = "documents.download_signed"
_HEAD = b"%PDF-"
_END = b"%%EOF"
_END_WITHIN = 1024
_AT_ONCE = 1024 * 1024


@attrs.frozen
class UploadResult(Generic[S]):
    """What came of one source of `Documents.upload_many`: a document, or an error."""

    source: S = attrs.field(repr=reprlib.repr)
    """The object that was given, a pair where pairs were."""
    document: Document | None
    error: Exception | None
    """A `SigningError`, or what a source of the caller's own raised while it was read."""


@attrs.frozen
class SealedFile:
    """A sealed PDF on disk, checked and complete."""

    path: Path
    size: int
    sha256: str


class Documents:
    """``client.documents``."""

    def __init__(self, transport: Transport, tracker: Tracker) -> None:
        self._transport = transport
        self._tracker = tracker

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

        After a 5xx or a lost response the signing is read before the file is sent again; if that cannot tell whether
        the document arrived, `OutcomeUnknown` is raised. Uploads of one name to one signing take turns. A document that
        another host uploads to the signing at that moment is told apart by its name, and by its size and sha256 where
        the service reports them: if all of these are equal, or only the name is known, it counts as this upload's.
        ``preflight=False`` leaves the check of the file to the service. ::

            document = await client.documents.upload(signing, "contract.pdf")
        """
        path = signing_path(signing_id)
        teller = Teller(on_progress)
        transport, most = self._transport, self._transport.options.assumptions.max_pdf_bytes
        deadline = transport.deadline(transfer=True)
        try:
            with (
                until(deadline) as preparing,
                await PdfSource(source, filename).open(most if preflight else None) as pdf,
            ):
                # From here on the call keeps the deadline itself, and its errors say what was sent.
                preparing.lift()
                return await self._send(path, pdf, _Sending(pdf, teller), deadline)
        except TimeoutError:
            if not preparing.expired:
                raise
        # Out here the exception that ended the wait, with all that it has seen, is not the context of this one.
        raise RequestTimeout(f"{_UPLOAD}: its deadline passed before anything was sent", operation=_UPLOAD, attempts=0)

    @overload
    def upload_many(
        self,
        signing_id: str | Signing,
        sources: Iterable[OneSource] | AsyncIterable[OneSource],
        concurrency: int = ...,
        on_progress: Callable[[Progress], None] | None = ...,
        *,
        preflight: bool = ...,
    ) -> Results[UploadResult[OneSource]]: ...

    @overload
    def upload_many(
        self,
        signing_id: None,
        sources: Iterable[Pair] | AsyncIterable[Pair],
        concurrency: int = ...,
        on_progress: Callable[[Progress], None] | None = ...,
        *,
        preflight: bool = ...,
    ) -> Results[UploadResult[Pair]]: ...

    def upload_many(
        self,
        signing_id: str | Signing | None,
        sources: Iterable[Any] | AsyncIterable[Any],
        concurrency: int = 8,
        on_progress: Callable[[Progress], None] | None = None,
        *,
        preflight: bool = True,
    ) -> Results[UploadResult[Any]]:
        """Upload many PDFs, ``concurrency`` at a time, and give each one's result as it is there. ::

            async for result in client.documents.upload_many(signing, Path("leases").glob("*.pdf")):
                print(result.source, result.error or result.document)

        ``sources`` is any iterable or async iterable of what `upload` takes, pulled as there is room: 100,000 of them
        cost no memory. A plain one is pulled on the event loop, which stands still where it blocks. With
        ``signing_id=None`` they are pairs ``(signing_id, source)``; name a file by `PdfSource`.

        Whatever one file raises is the ``error`` of its result, and sinks nothing else; what ``sources`` itself raises
        comes after the results of all that was pulled before. Once no upload can succeed any more (the client was
        closed, the token rejected for good) all that is left gets that error, and nothing is sent for it.

        ``on_progress`` is told of all files together: their number where ``sources`` has a length, their bytes where it
        is a list or a tuple of paths or bytes. A file that failed counts as done.

        To stop early, leave the loop: what is under way is cancelled. ``async with`` around it waits for that. ::

            async with client.documents.upload_many(signing, sources) as results:
                async for result in results:
                    if result.error is not None:
                        break
        """
        if signing_id is not None:
            signing_path(signing_id)
        _check_sources(sources)
        teller = Teller(on_progress)
        tally = Tally(teller, len(sources) if isinstance(sources, Sized) else None) if teller.listening else None
        many = _Many(self, signing_id, tally, preflight)
        measuring = many.measuring(sources) if tally is not None and isinstance(sources, Sequence) else None
        return Results(sources, many.upload, concurrency, around=measuring)

    async def _send(self, path: str, pdf: OpenPdf, sending: _Sending, deadline: float) -> Document:
        signing = self._tracker.signing(path)
        creation = Creation(
            _UPLOAD,
            "signings.get",
            deadline,
            signing,
            signing.documents,
            DocumentMatch(pdf.filename, pdf.size, pdf.digest, self._transport.options.assumptions),
            lambda read: read(self._listing(path)),
            lambda: self._transport.call(self._listing(path), deadline),
        )
        operation = Operation(
            _UPLOAD,
            "POST",
            f"{path}/documents",
            Repeat.RECONCILED,
            decode=self._decode,
            effect=creation,
            body=sending.body,
            transfer=True,
        )
        async with creation:
            document = await self._transport.call(operation, deadline)
            creation.note_created(document)
        sending.done()
        return document

    async def download_signed(
        self,
        signing_id: str | Signing,
        document_id: str | Document,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        verify: bool = False,
        trust: Trust | Iterable[Trust] | None = None,
    ) -> SealedFile:
        """Download a sealed PDF to ``path``, which is replaced only by a complete, checked file.

        With ``overwrite=False`` a file that exists, or that appears during the download, is never replaced: that is an
        `InvalidRequest`. With ``verify`` (extra ``verify``) the file is also judged by
        `signing_async.sealed.inspect_sealed`, and with ``trust`` it has to lead to these roots. Raises `NotSound` if it
        is not sound or not trusted, `NotYetSigned` until the document is fully signed, and an `OSError` if the disk
        fails. ::

            sealed = await client.documents.download_signed(signing, document, "archive/contract.pdf")
        """
        target = _target(path)
        if not overwrite and os.path.lexists(target):
            raise _exists(target)
        check = _verifier(trust, self._most) if verify or trust is not None else None

        async def receive(response: wire.Response) -> SealedFile:
            return await _save(response, _Part(target, overwrite=overwrite, check=check), self._most)

        return await self._transport.call(self._sealed(signing_id, document_id, receive))

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
        return Operation(
            _DOWNLOAD,
            "GET",
            path,
            Repeat.READ,
            receive=receive,
            not_found=NotYetSigned,
            transfer=True,
            accept=self._transport.options.assumptions.download_accept,
        )

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


def _exists(target: Path) -> InvalidRequest:
    return InvalidRequest(f"path: {str(target)!r} exists already, and was not replaced")


class _Many:
    """The uploads of `Documents.upload_many`, one by one."""

    def __init__(
        self, documents: Documents, signing_id: str | Signing | None, tally: Tally | None, preflight: bool
    ) -> None:
        self._documents = documents
        self._signing_id = signing_id
        self._tally = tally
        self._preflight = preflight
        self._fatal: Exception | None = None

    async def upload(self, item: Any) -> UploadResult[Any]:
        share = self._tally.share() if self._tally is not None else None
        document, error = None, self._fatal
        if error is None:
            try:
                document = await self._upload(item, share.listen if share is not None else None)
            except Exception as raised:
                error = raised
                if isinstance(raised, SigningError) and raised.client_wide and not raised.transient:
                    self._fatal = raised
        else:
            # Each gets one to itself: raised in many places, one object would gather all their tracebacks.
            error = copy.copy(error)
        if share is not None:
            share.done(lambda: _cheap_size(self._source(item)))
        return UploadResult(item, document, error)

    async def _upload(self, item: Any, on_progress: Callable[[Progress], None] | None) -> Document:
        signing_id = self._signing_id
        if signing_id is None:
            if not isinstance(item, tuple) or len(item) != 2:
                shown = reprlib.repr(item)
                raise InvalidRequest(
                    f"sources: without signing_id each must be a pair (signing_id, source), not {shown}"
                )
            signing_id = item[0]
        source = self._source(item)
        return await self._documents.upload(
            cast("str | Signing", signing_id), source, on_progress=on_progress, preflight=self._preflight
        )

    def _source(self, item: Any) -> Any:
        pair = self._signing_id is None and isinstance(item, tuple) and len(item) == 2
        return item[1] if pair else item

    @asynccontextmanager
    async def measuring(self, sources: Sequence[Any]) -> AsyncIterator[None]:
        """Find out how many bytes there are in a thread, and meanwhile begin."""
        assert self._tally is not None
        tally, left = self._tally, threading.Event()

        def total() -> int | None:
            size = 0
            for item in sources:
                one = None if left.is_set() else _cheap_size(self._source(item))
                if one is None:
                    return None
                size += one
            return size

        def found(future: asyncio.Future[int | None]) -> None:
            if not future.cancelled() and future.exception() is None:
                tally.bytes_total = future.result()

        measured = asyncio.get_running_loop().run_in_executor(None, total)
        measured.add_done_callback(found)
        try:
            yield
        finally:
            left.set()
            measured.cancel()


def _check_sources(sources: Any) -> None:
    one = isinstance(sources, str | bytes | bytearray | memoryview | os.PathLike | PdfSource) or hasattr(
        sources, "read"
    )
    if one or isinstance(sources, Mapping) or not isinstance(sources, Iterable | AsyncIterable):
        raise InvalidRequest(f"sources: must be an iterable of sources, not {type(sources).__name__}")


def _cheap_size(source: Any) -> int | None:
    """The size of a source that is had without reading it; None where there is no way to it."""
    if isinstance(source, PdfSource):
        source = source.source
    if isinstance(source, bytes | bytearray | memoryview):
        return memoryview(source).nbytes
    if not isinstance(source, str | os.PathLike):
        return None
    try:
        return Path(source).stat().st_size
    except Exception:
        # A path of the caller's own class may raise anything. It will fail as well, and counts for nothing.
        return 0


class _Sending:
    """The body of an upload, anew for each attempt, and what its listener is told of it."""

    def __init__(self, pdf: OpenPdf, teller: Teller) -> None:
        self._pdf = pdf
        self._teller = teller
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
        if self._teller.listening:
            self._teller.tell(Progress(files, 1, self._sent, self._pdf.size))


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


def _verifier(trust: Trust | Iterable[Trust] | None, most: int) -> Callable[[Path], None]:
    """Return a check of a file; that it can be made, and the roots be read, is seen before anything is downloaded."""
    from .._verify.roots import load_roots
    from ..sealed import inspect_by_roots

    roots = None if trust is None else load_roots(trust)

    def check(path: Path) -> None:
        report = inspect_by_roots(path, roots, max_bytes=most)
        problems = report.problems + report.trust_problems
        if problems:
            verdict = "trusted" if report.sound else "sound"
            raise NotSound(f"{_DOWNLOAD}: the sealed file is not {verdict}: {'; '.join(problems)}", problems=problems)

    return check


async def _save(response: wire.Response, part: _Part, most: int) -> SealedFile:
    """Write a download beside its target, and put it in the target's place when it is complete."""
    chunks: list[bytes] = []
    waiting = 0
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

    def __init__(self, target: Path, *, overwrite: bool, check: Callable[[Path], None] | None = None) -> None:
        self._target = target
        self._overwrite = overwrite
        self._check = check
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
        if self._check is not None:
            self._check(self._path)
        if not self._given_up:
            if self._overwrite:
                self._path.replace(self._target)
            else:
                self._link()
            sync_folder(self._target.parent)
        return SealedFile(self._target, self._size, self._digest.hexdigest())

    def _link(self) -> None:
        """Give the file its name, unless that is taken."""
        try:
            try:
                os.link(self._path, self._target)
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links: take the name first
                self._target.open("xb").close()
                self._path.replace(self._target)
            else:
                self._path.unlink()
        except FileExistsError:
            raise _exists(self._target) from None

    def remove(self) -> None:
        self._given_up = True
        self._path.unlink(missing_ok=True)
