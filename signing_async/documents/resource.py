"""Upload PDFs to a signing, and download its sealed PDFs."""

from __future__ import annotations

import asyncio
import os
import reprlib
from collections import defaultdict
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence, Sized
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, overload

import attrs

from ..bulk import FileProgress, Progress, ProgressReporter, Results, copy_unsent
from ..errors import InvalidRequest, NotYetSigned, SigningError
from ..models import Document, Signing
from ..reconcile import Creation, DocumentMatch, Ledger, Listed
from ..transport import urls, wire
from ..transport.call import Transport
from ..transport.decode import decode_record, parse, record, record_decoder
from ..transport.operation import Operation
from ..transport.response import Response
from ..transport.retry import Safety
from .download import DOWNLOAD, SealedFile, check_target, checked_chunks, load_verifier, save, stream, target_exists
from .source import OpenPdf, PdfSource, Source, form_body

if TYPE_CHECKING:
    from ..sealed import Trust

__all__ = ["Documents", "Progress", "SealedFile", "UploadResult"]

OneSource = TypeVar("OneSource", bound=Source | PdfSource)
Pair = TypeVar("Pair", bound=tuple[str | Signing, Source | PdfSource])
Item_co = TypeVar("Item_co", covariant=True)
T = TypeVar("T")
Report = Callable[[int, int, int], None]
"""Takes the number of files done (0 or 1), the bytes done, and the size of the file."""

_UPLOAD = "documents.upload"


class _Mixed:
    """Nothing: mypy takes the overload for lists of several kinds of sources only if it accepts more than the other."""


_AnySource = Source | PdfSource | _Mixed


if TYPE_CHECKING:

    class _Result(Generic[Item_co]): ...

    # Type checkers narrow the union by `result.error is None`.
    UploadResult: TypeAlias = "UploadSuccess[Item_co] | UploadFailure[Item_co]"
else:

    class UploadResult(Generic[Item_co]):
        """The result of uploading one source: a document, or an error."""

        __slots__ = ()

    _Result = UploadResult


@attrs.frozen
class UploadSuccess(_Result[Item_co]):
    """A source that was uploaded, or that the draft already held."""

    source: Item_co = attrs.field(repr=reprlib.repr)
    """The item as given: a source, or a pair of signing and source."""
    document: Document
    error: None = None


@attrs.frozen
class UploadFailure(_Result[Item_co]):
    """A source that was not uploaded, or whose upload has an unknown outcome."""

    source: Item_co = attrs.field(repr=reprlib.repr)
    """The item as given: a source, or a pair of signing and source."""
    document: None
    error: Exception
    """A `SigningError`, or an exception that the caller's own file or iterator raised while it was read."""


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
        """Upload one PDF to a draft and return its record.

        The first upload to a signing that this client did not create reads the signing first. After a 5xx or a lost
        response, the signing is read before the file is sent again. If that does not show whether the document arrived,
        `OutcomeUnknown` is raised. Uploads of the same name to the same signing run one after another. A document that
        another client uploads at the same time counts as this upload's if the names are equal, and also the size and
        SHA-256 if the service reports them.
        ``preflight=False`` skips the local check of the file. ::

            document = await client.documents.upload(signing, "contract.pdf")
        """

        def ignore(files_done: int, bytes_done: int, size: int) -> None: ...

        report = ignore if on_progress is None else FileProgress(ProgressReporter(on_progress, files_total=1)).update
        return await self._upload(signing_id, PdfSource(source, filename), report, preflight)

    async def _upload(
        self,
        signing_id: str | Signing,
        source: PdfSource,
        report: Report,
        preflight: bool,
        find_existing: Callable[[str, DocumentMatch, float], Awaitable[Document | None]] | None = None,
    ) -> Document:
        path = urls.signing_path(signing_id)
        transport, assumptions = self._transport, self._transport.options.assumptions
        deadline = transport.deadline(transfer=True)
        max_bytes = assumptions.max_pdf_bytes if preflight else None
        with await source.open(max_bytes, deadline, _UPLOAD) as pdf:
            report(0, 0, pdf.size)
            match = DocumentMatch(pdf.filename, pdf.size, pdf.digest, assumptions)
            document = None if find_existing is None else await find_existing(path, match, deadline)
            if document is None:
                document = await self._send(path, pdf, match, report, deadline)
            report(1, pdf.size, pdf.size)
            return document

    async def _send(self, path: str, pdf: OpenPdf, match: DocumentMatch, report: Report, deadline: float) -> Document:
        def body() -> wire.Body:
            done = 0
            report(0, done, pdf.size)

            def sent(size: int) -> None:
                nonlocal done
                done += size
                report(0, done, pdf.size)

            return form_body({"selected_file": pdf}, sent)

        signing = self._ledger.signing(path)
        creation = Creation(
            _UPLOAD,
            deadline,
            signing.additions,
            signing.documents,
            match,
            lambda read: read(self._list(path)),
            lambda: self._transport.call(self._list(path), deadline),
        )
        operation = Operation(
            _UPLOAD,
            "POST",
            f"{path}/documents",
            Safety.RECONCILED,
            decode=record_decoder(Document, self._transport.options.assumptions),
            effect=creation,
            body=body,
            transfer=True,
        )
        async with creation:
            document = await self._transport.call(operation, deadline)
            creation.note_created(document)
        return document

    @overload
    def upload_many(
        self,
        signing_id: str | Signing,
        sources: Iterable[OneSource] | AsyncIterable[OneSource],
        concurrency: int = ...,
        on_progress: Callable[[Progress], None] | None = ...,
        *,
        preflight: bool = ...,
        skip_existing: bool = ...,
    ) -> Results[UploadResult[OneSource]]: ...

    @overload
    def upload_many(
        self,
        signing_id: str | Signing,
        sources: Iterable[_AnySource] | AsyncIterable[_AnySource],
        concurrency: int = ...,
        on_progress: Callable[[Progress], None] | None = ...,
        *,
        preflight: bool = ...,
        skip_existing: bool = ...,
    ) -> Results[UploadResult[Source | PdfSource]]: ...

    @overload
    def upload_many(
        self,
        signing_id: None,
        sources: Iterable[Pair] | AsyncIterable[Pair],
        concurrency: int = ...,
        on_progress: Callable[[Progress], None] | None = ...,
        *,
        preflight: bool = ...,
        skip_existing: bool = ...,
    ) -> Results[UploadResult[Pair]]: ...

    @overload
    def upload_many(
        self,
        signing_id: None,
        sources: Iterable[tuple[str | Signing, _AnySource]] | AsyncIterable[tuple[str | Signing, _AnySource]],
        concurrency: int = ...,
        on_progress: Callable[[Progress], None] | None = ...,
        *,
        preflight: bool = ...,
        skip_existing: bool = ...,
    ) -> Results[UploadResult[tuple[str | Signing, Source | PdfSource]]]: ...

    def upload_many(
        self,
        signing_id: str | Signing | None,
        sources: Iterable[Any] | AsyncIterable[Any],
        concurrency: int = 8,
        on_progress: Callable[[Progress], None] | None = None,
        *,
        preflight: bool = True,
        skip_existing: bool = False,
    ) -> Results[Any]:
        """Upload many PDFs, ``concurrency`` at a time, and return their results in completion order; see `Results`. ::

            async for result in client.documents.upload_many(signing, Path("leases").glob("*.pdf")):
                if result.error is None:
                    print(result.source, result.document.id)

        ``sources`` is an iterable or async iterable of sources for `upload`. They are pulled as workers become free:
        100,000 items need no more memory than a few. With ``signing_id=None`` the items are pairs ``(signing_id,
        source)``. Use `PdfSource` to name a file.

        An error of one file is the ``error`` of its result and does not affect the others. An error raised by
        ``sources`` itself is raised after the results of the items before it. If no upload can succeed any more (the
        client is closed, the token is rejected for good), every remaining item gets that error and nothing is sent.

        ``skip_existing`` resumes an interrupted run: a file is not sent if the draft already held a document with its
        name, and with its size and SHA-256 if the service reports them. The result has that document.

        ``on_progress`` is called with the progress of all files together. The number of files is known if ``sources``
        has a length, the number of bytes if it is a sequence of paths or bytes. A failed file counts as done.

        Leaving the loop cancels the uploads in progress; ``async with`` waits until they have ended. ::

            async with client.documents.upload_many(signing, sources) as results:
                async for result in results:
                    if result.error is not None:
                        break
        """
        if signing_id is not None:
            urls.signing_path(signing_id)
        is_one = isinstance(sources, str | bytes | bytearray | memoryview | os.PathLike | PdfSource | Mapping)
        if is_one or hasattr(sources, "read") or not isinstance(sources, Iterable | AsyncIterable):
            raise InvalidRequest(f"sources: must be an iterable of sources, got {type(sources).__name__}")
        reporter = ProgressReporter(on_progress, files_total=len(sources) if isinstance(sources, Sized) else None)
        uploads = _BulkUpload(self, signing_id, reporter, preflight, skip_existing)
        measured = uploads.measured(sources) if reporter.enabled and isinstance(sources, Sequence) else None
        return Results(sources, uploads.upload, concurrency, around=measured)

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

        With ``overwrite=False`` an existing file, even one that appears during the download, is not replaced:
        `InvalidRequest` is raised. With ``verify`` (extra ``verify``) the file is also judged by
        `signing_async.sealed.inspect_sealed`; with ``trust`` its certificates must lead to these roots. Raises
        `NotSound` if the file is not sound or not trusted, `NotYetSigned` until the document is fully signed (or if an
        id is wrong), and `OSError` if the disk fails. ::

            sealed = await client.documents.download_signed(signing, document, "archive/contract.pdf")
        """
        target = check_target(path)
        if not overwrite and os.path.lexists(target):
            raise target_exists(target)
        verifier = load_verifier(trust) if verify or trust is not None else None
        return await self._save_signed(signing_id, document_id, target, verifier, overwrite=overwrite, is_argument=True)

    async def _save_signed(
        self,
        signing_id: str | Signing,
        document_id: str | Document,
        target: Path,
        verifier: Callable[[Path], None] | None,
        *,
        overwrite: bool = True,
        is_argument: bool = False,
    ) -> SealedFile:
        """Save a sealed PDF. Unless ``target`` is an argument of the user, all failures of its disk are `OSError`."""

        async def receive(response: wire.Response) -> SealedFile:
            chunks = checked_chunks(response, self._max_bytes)
            return await save(chunks, target, overwrite=overwrite, verify=verifier, is_argument=is_argument)

        return await self._transport.call(self._download(signing_id, document_id, receive))

    async def read_signed(self, signing_id: str | Signing, document_id: str | Document) -> bytes:
        """Return a sealed PDF as bytes."""

        async def receive(response: wire.Response) -> bytes:
            return b"".join([chunk async for chunk in checked_chunks(response, self._max_bytes)])

        return await self._transport.call(self._download(signing_id, document_id, receive))

    @asynccontextmanager
    async def stream_signed(
        self, signing_id: str | Signing, document_id: str | Document
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Stream a sealed PDF, for example to object storage. ::

            async with client.documents.stream_signed(signing, document) as chunks:
                async for chunk in chunks:
                    await bucket.write(chunk)

        The request is retried until the first chunk arrives, and not afterwards. A response that is not a PDF raises an
        error at its start, a truncated one at its end. ``Timeouts.transfer`` limits the time spent waiting for chunks,
        not the time between them.
        """

        async def receive(response: wire.Response) -> wire.Response:
            return response.detach()

        operation = self._download(signing_id, document_id, receive)
        response = await self._transport.call(operation)
        try:
            received = checked_chunks(response, self._max_bytes)
            async with aclosing(stream(operation, response, self._transport, received)) as chunks:
                yield chunks
        finally:
            response.close()

    @property
    def _max_bytes(self) -> int:
        return self._transport.options.assumptions.max_sealed_bytes

    def _download(
        self, signing_id: Any, document_id: Any, receive: Callable[[wire.Response], Awaitable[T]]
    ) -> Operation[T]:
        path = f"{urls.signing_path(signing_id)}/documents/{urls.segment('document_id', document_id)}/download-signed"
        return Operation(
            DOWNLOAD,
            "GET",
            path,
            Safety.READ,
            decode=receive,
            stream=True,
            not_found=NotYetSigned,
            transfer=True,
            accept=self._transport.options.assumptions.download_accept,
        )

    def _list(self, path: str) -> Operation[Listed]:
        """Return the operation that reads the documents of a signing. Its result is None if the response lists none."""
        assumptions = self._transport.options.assumptions

        def decode(response: Response) -> Listed:
            found = record(parse(response.bytes), assumptions)
            has_list = isinstance(found, dict) and isinstance(found.get("documents"), list)
            return decode_record(found, Signing).documents if has_list else None

        return Operation("signings.get", "GET", path, Safety.READ, decode=decode)


@attrs.define(eq=False)
class _BulkUpload:
    """The uploads of one `Documents.upload_many`."""

    _documents: Documents
    _signing_id: str | Signing | None
    _reporter: ProgressReporter
    _preflight: bool
    _skip_existing: bool
    _fatal: SigningError | None = None
    """The error after which nothing more is sent."""
    _drafts: dict[str, list[Document]] = attrs.field(factory=dict, init=False)
    """The documents that each draft held before the first of its files was sent, and that match no file yet."""
    _locks: defaultdict[str, asyncio.Lock] = attrs.field(factory=lambda: defaultdict(asyncio.Lock), init=False)

    async def upload(self, item: Any) -> UploadResult[Any]:
        progress = FileProgress(self._reporter)
        find_existing = self._find_existing if self._skip_existing else None
        try:
            if self._fatal is not None:
                raise copy_unsent(self._fatal)
            signing_id, source = self._split(item)
            document = await self._documents._upload(
                signing_id, PdfSource(source), progress.update, self._preflight, find_existing
            )
        except Exception as error:
            if isinstance(error, SigningError) and error.fatal:
                self._fatal = self._fatal or error
            progress.finish(self._size(item) if progress.size is None else progress.size)
            return UploadFailure(item, None, error)
        return UploadSuccess(item, document)

    def _split(self, item: Any) -> tuple[Any, Any]:
        """Return the signing and the source of an item."""
        if self._signing_id is not None:
            return self._signing_id, item
        if isinstance(item, tuple) and len(item) == 2:
            return item
        raise InvalidRequest(
            f"sources: without signing_id each item must be a pair (signing_id, source), got {reprlib.repr(item)}"
        )

    async def _find_existing(self, path: str, match: DocumentMatch, deadline: float) -> Document | None:
        """Return the draft's document for this file, or None. Each document is returned once."""
        async with self._locks[path]:
            if path not in self._drafts:
                listed = await self._documents._transport.call(self._documents._list(path), deadline)
                if listed is None:
                    raise InvalidRequest("skip_existing: the service does not list the documents of the signing")
                self._drafts[path] = list(listed)
            document = await match.find(self._drafts[path])
            if document is not None:
                self._drafts[path].remove(document)
            return document

    def _size(self, item: Any) -> int | None:
        """Return the size of an item's source if it is known without reading the source; 0 if it cannot be read."""
        try:
            _, source = self._split(item)
            source = source.source if isinstance(source, PdfSource) else source
            if isinstance(source, bytes | bytearray | memoryview):
                return memoryview(source).nbytes
            return Path(source).stat().st_size if isinstance(source, str | os.PathLike) else None
        except Exception:
            # A path of the caller's own class may raise anything. Its upload fails too and sends nothing.
            return 0

    @asynccontextmanager
    async def measured(self, sources: Sequence[Any]) -> AsyncIterator[None]:
        """Add up the sizes before the uploads begin."""
        sizes = await asyncio.to_thread(lambda: [self._size(item) for item in sources])
        self._reporter.bytes_total = None if None in sizes else sum(size or 0 for size in sizes)
        yield
