"""Archive the documents of one signing, under its claim.

Before a file is placed, the journal records its name. After a crash at any moment, a later run can therefore find the
files that lack only their line in the manifest. A document is archived once the manifest has its line.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import attrs

from .. import telemetry
from .._api import Api
from .._files import is_transient
from .._tasks import finish
from ..bulk import log
from ..dispatch.entry import GuardedJournal, NoJournal, find_context
from ..dispatch.journal import Claim, ClaimLost, Journal
from ..documents.download import load_verifier
from ..errors import ArchiveConflict, ArchiveError, NotYetSigned, SigningError
from ..models import Document, Signing, SigningState
from ..telemetry.names import ARCHIVE_SIZE, DOCUMENT_ID, DOCUMENT_SPAN, OUTCOME, SIGNING_ID
from ..transport.problems import one_line
from .manifest import ArchivedDocument, Manifest, Verdict, digest
from .names import Template
from .stores import ArchiveStore, FolderStore

if TYPE_CHECKING:
    from .._verify.roots import Roots
    from ..sealed import Trust

__all__ = ["ArchiveResult", "Collector", "Judgement"]

_PREFIX = "signing-archive-"
_DAY = 86_400


if TYPE_CHECKING:

    class _Result: ...

    # Type checkers narrow the union by `result.error is None`.
    ArchiveResult: TypeAlias = "ArchiveSuccess | ArchiveFailure"
else:

    class ArchiveResult:
        """The result of archiving one document: its line in the manifest, or an error."""

        __slots__ = ()

    _Result = ArchiveResult


@attrs.frozen
class ArchiveSuccess(_Result):
    """A document that was archived; ``entry`` is its line in the manifest."""

    signing: Signing
    document: Document
    entry: ArchivedDocument
    error: None = None


@attrs.frozen
class ArchiveFailure(_Result):
    """A document that was not archived. A `NotYetSigned` is reported by each sweep until the sealed file exists."""

    signing: Signing
    document: Document | None
    """None if the signing itself can't be claimed or read."""
    error: Exception
    entry: None = None


@attrs.frozen
class Judgement:
    """How the seals of downloads are judged."""

    verify: bool
    roots: Roots | None
    verdict: Verdict

    @classmethod
    def by(cls, verify: bool, trust: Trust | Iterable[Trust] | None) -> Judgement:
        """Return the judgement for ``verify`` and ``trust``. A missing extra or an unreadable root raises here."""
        if not verify and trust is None:
            return cls(False, None, "complete")
        from .._verify.roots import load_roots

        load_verifier(None)
        return cls(True, None, "sound") if trust is None else cls(True, load_roots(trust), "trusted")


class Collector:
    """Downloads the sealed documents of signings, places their files and appends their lines to the manifest."""

    def __init__(
        self, api: Api, store: ArchiveStore, journal: Journal, template: Template, judgement: Judgement
    ) -> None:
        self.api = api
        self.store = store
        self.template = template
        self.judgement = judgement
        self.service: str = api.origin
        self.telemetry: bool = api.telemetry
        self.journal: GuardedJournal = GuardedJournal(journal, telemetry=self.telemetry)
        self.manifest: Manifest = Manifest(store)
        self._has_journal = not isinstance(journal, NoJournal)

    def has_all(self, signing: Signing) -> bool:
        """Return whether all documents of the signing have a line in the manifest that was read."""
        return self.manifest.is_complete(self.service, signing.id)

    async def collect(
        self, signing: Signing, matches: Callable[[Signing], bool] | None = None
    ) -> list[ArchiveResult] | None:
        """Archive what is missing of a signing; return None if another run is working on it.

        ``matches`` is called with the signing after it is read; without it, every completed signing matches.
        """
        try:
            claim = await self.journal.claim(f"archive:{self.service}:{signing.id}")
        except Exception as error:
            return [_failed(signing, error)]
        if claim is None:
            return None
        try:
            return await _OneSigning(self, claim, signing).collect(matches)
        except ClaimLost as error:
            log.warning("%s", error)
            return None
        finally:
            await self.journal.release(claim)

    async def aclose(self) -> None:
        """Wait until the manifest is written, and remove old downloads of killed runs."""
        await self.manifest.aclose()
        await asyncio.to_thread(self.remove_leftovers)

    def make_folder(self, signing: Signing) -> Path:
        """Create a private folder for a download, on the file system of a `FolderStore`."""
        if isinstance(self.store, FolderStore):
            self._downloads.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=self._prefix(signing), dir=self._downloads))

    def remove_leftovers(self, signing: Signing | None = None) -> None:
        """Remove downloads that killed runs left: those of a day ago, and of a signing whose claim is held."""
        for leftover in self._downloads.glob(f"{_PREFIX if signing is None else self._prefix(signing)}*"):
            with suppress(FileNotFoundError):
                is_old = time.time() - leftover.stat().st_mtime > _DAY
                if is_old or (signing is not None and self._has_journal):
                    shutil.rmtree(leftover, ignore_errors=True)

    @property
    def _downloads(self) -> Path:
        return self.store.incoming if isinstance(self.store, FolderStore) else Path(tempfile.gettempdir())

    def _prefix(self, signing: Signing) -> str:
        return f"{_PREFIX}{digest(self.service, signing.id).hex()}-"


class _OneSigning:
    """Archives one claimed signing. Its journal entry holds the manifest lines of files that are about to be placed."""

    def __init__(self, archive: Collector, claim: Claim, signing: Signing) -> None:
        self._archive = archive
        self._claim = claim
        self._signing = signing
        self._names: dict[str, str] = {}
        self._pending: dict[str, ArchivedDocument] = {}
        self._earlier = find_context(claim.state)
        self._context: str | None = None
        """The trace context of the current document."""
        with suppress(KeyError, TypeError, ValueError, RecursionError, AttributeError):
            # If the entry cannot be decoded, its files are downloaded again.
            pending = json.loads(claim.state or "{}")["pending"].items()
            self._pending = {id_: ArchivedDocument.from_dict(fields) for id_, fields in pending}

    async def collect(self, matches: Callable[[Signing], bool] | None) -> list[ArchiveResult]:
        if self._pending:
            # Another run may have appended their lines since the manifest was read.
            await self._archive.manifest.refresh()
            if self._archive.has_all(self._signing):
                return []
        try:
            await self._read_signing()
        except Exception as error:
            return [_failed(self._signing, error)]
        if self._signing.state is not SigningState.COMPLETED or (matches is not None and not matches(self._signing)):
            return []
        self._names = self._archive.template.names(self._archive.service, self._signing)
        documents = [document for document in self._signing.documents if not self._has(document.id)]
        await asyncio.to_thread(self._archive.remove_leftovers, self._signing)
        found = [await self._collect_one(document) for document in documents]
        return [result for result in found if result is not None]

    async def _read_signing(self) -> None:
        # The signings of a list response may lack their documents.
        if self._signing.state is not SigningState.COMPLETED or not self._signing.documents:
            self._signing = await self._archive.api.signings.get(self._signing.id)

    async def _collect_one(self, document: Document) -> ArchiveResult | None:
        recorder = telemetry.active(self._archive.telemetry)
        ids = {SIGNING_ID: self._signing.id, DOCUMENT_ID: document.id}
        earlier = self._earlier if document.id in self._pending else None
        with recorder.span(DOCUMENT_SPAN, ids, links=[earlier]) as span:
            self._context = span.context
            result = await self._try_one(document)
            if result is None:
                span.set({OUTCOME: "present"})
            elif isinstance(result.error, NotYetSigned):
                span.set({OUTCOME: "not_yet_signed"})
            elif result.error is not None:
                span.fail(result.error)
            else:
                assert result.entry is not None
                recorder.record(ARCHIVE_SIZE, result.entry.size)
            return result

    async def _try_one(self, document: Document) -> ArchiveResult | None:
        """Return the result of a document; None if an earlier run had archived it."""
        try:
            entry = await self._find_placed(document)
            if entry is None:
                entry, is_new = await self._fetch(document)
            else:
                is_new = await self._archive.manifest.append(entry)
        except Exception as error:
            raise_if_client_wide(error)
            level = logging.INFO if isinstance(error, NotYetSigned) else logging.WARNING
            ids = one_line(document.id), one_line(self._signing.id)
            log.log(level, "document %s of signing %s was not archived: %s", *ids, error)
            return ArchiveFailure(self._signing, document, error)
        return ArchiveSuccess(self._signing, document, entry) if is_new else None

    async def _find_placed(self, document: Document) -> ArchivedDocument | None:
        """Return the line of a document whose file an earlier run placed, but whose line it did not append.

        Return None if there is no such file, or if it was not verified as this run requires.
        """
        entry = self._pending.get(document.id)
        if entry is None or entry.verdict != self._archive.judgement.verdict:
            return None
        found = hashlib.sha256()
        try:
            async for chunk in self._archive.store.read(entry.path):
                found.update(chunk)
        except FileNotFoundError:
            return None
        return entry if found.hexdigest() == entry.sha256 else None

    async def _fetch(self, document: Document) -> tuple[ArchivedDocument, bool]:
        """Download a document, place its file and append its line; return whether the line is new."""
        archive, judgement = self._archive, self._archive.judgement
        path: Path | None = None
        try:
            path = await asyncio.to_thread(archive.make_folder, self._signing) / "sealed.pdf"
            sealed = await archive.api.documents._save_signed(
                self._signing, document, path, verify=judgement.verify, trust=judgement.roots
            )
            entry = ArchivedDocument(
                service=archive.service,
                signing=self._signing.id,
                document=document.id,
                documents=len(self._names),
                path=self._names[document.id],
                size=sealed.size,
                sha256=sealed.sha256,
                completed_at=document.completed_at,
                fetched_at=datetime.now(UTC).replace(microsecond=0),
                verdict=judgement.verdict,
            )
            # Finish even if cancelled: a file that is placed needs its line.
            return await finish(self._keep(document, entry, sealed.path))
        except OSError as error:
            if isinstance(error, SigningError):
                raise
            message = f"cannot keep a download: {error.strerror}: {error.filename or path}"
            # A download that was removed, as by a cleaner of temporary files, is not a failure of the archive.
            is_removed = isinstance(error, FileNotFoundError) and path is not None and not path.exists()
            transient = is_removed or is_transient(error)
            raise ArchiveError(message, transient=transient, client_wide=not is_removed) from None
        finally:
            if path is not None:
                shutil.rmtree(path.parent, ignore_errors=True)

    async def _keep(self, document: Document, entry: ArchivedDocument, source: Path) -> tuple[ArchivedDocument, bool]:
        """Place the file and append its line. If another file has the name, use a unique name."""
        unique = self._archive.template.unique_name(self._archive.service, self._signing, document)
        try:
            await self._put(document, entry, source)
        except ArchiveConflict:
            if unique == entry.path:
                raise
            entry = attrs.evolve(entry, path=unique)
            await self._put(document, entry, source)
        return entry, await self._archive.manifest.append(entry)

    async def _put(self, document: Document, entry: ArchivedDocument, source: Path) -> None:
        """Place the file, after the journal has recorded its name."""
        self._pending[document.id] = entry
        await self._save()
        await self._archive.store.put(entry.path, source, entry.sha256)

    def _has(self, document_id: str) -> bool:
        return (self._archive.service, self._signing.id, document_id) in self._archive.manifest

    async def _save(self) -> None:
        pending = {id_: entry.as_dict() for id_, entry in self._pending.items()}
        state = {"pending": pending, "trace_context": self._context}
        await self._archive.journal.write(self._claim, json.dumps(state))


def _failed(signing: Signing, error: Exception) -> ArchiveResult:
    """Log an error of the signing itself and return it as a result; raise it if other signings would fail too."""
    raise_if_client_wide(error)
    log.warning("signing %s was not archived: %s", one_line(signing.id), error)
    return ArchiveFailure(signing, None, error)


def raise_if_client_wide(error: Exception) -> None:
    """Raise the error if other signings would fail with it too."""
    if isinstance(error, ClaimLost) or (isinstance(error, SigningError) and error.client_wide):
        raise error
