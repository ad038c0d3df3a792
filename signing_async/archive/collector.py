"""Archive the documents of one signing, under its claim.

Before a file is placed, the journal records its name. After a crash at any moment, a later run can therefore find the
files that lack only their line in the manifest. A document is archived once the manifest has its line.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
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
from ..dispatch.entry import GuardedJournal, NoJournal
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
    from ..sealed import Trust

__all__ = ["ArchiveResult", "Collector", "raise_if_client_wide"]

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


class Collector:
    """Downloads the sealed documents of signings, places their files and appends their lines to the manifest."""

    def __init__(
        self,
        api: Api,
        store: ArchiveStore,
        journal: Journal,
        template: Template,
        verify: bool,
        trust: Trust | Iterable[Trust] | None,
    ) -> None:
        self.api = api
        self.service: str = api.origin
        self.journal: GuardedJournal = GuardedJournal(journal, telemetry=api.telemetry)
        self.manifest: Manifest = Manifest(store)
        self._store = store
        self._template = template
        self._has_journal = not isinstance(journal, NoJournal)
        # A missing extra or an unreadable root raises here.
        self._check_seal = load_verifier(trust) if verify or trust is not None else None
        self._verdict: Verdict = "trusted" if trust is not None else "sound" if verify else "complete"
        self._downloads = store.incoming if isinstance(store, FolderStore) else Path(tempfile.gettempdir())

    async def collect(self, signing: Signing, matches: Callable[[Signing], bool]) -> list[ArchiveResult] | None:
        """Archive what is missing of a signing if it matches; return None if another run is working on it."""
        try:
            claim = await self.journal.claim(f"archive:{self.service}:{signing.id}")
        except Exception as error:
            return [_failed(signing, None, error)]
        if claim is None:
            return None
        try:
            return await self._collect_claimed(signing, claim, matches)
        except ClaimLost as error:
            log.warning("%s", error)
            return None
        finally:
            await self.journal.release(claim)

    async def _collect_claimed(
        self, signing: Signing, claim: Claim, matches: Callable[[Signing], bool]
    ) -> list[ArchiveResult]:
        pending = _decode_pending(claim)
        if pending:
            # Another run may have appended their lines since the manifest was read.
            await self.manifest.refresh()
        if self.manifest.is_complete(self.service, signing.id):
            return []
        try:
            if signing.state is not SigningState.COMPLETED or not signing.documents:  # a list may lack the documents
                signing = await self.api.signings.get(signing.id)
        except Exception as error:
            return [_failed(signing, None, error)]
        if signing.state is not SigningState.COMPLETED or not matches(signing):
            return []
        if self._has_journal:
            await asyncio.to_thread(self._remove_leftovers, self._prefix(signing))
        names, results = self._template.names(self.service, signing), []
        for document in signing.documents:
            if (self.service, signing.id, document.id) not in self.manifest:
                results.append(await self._collect_document(signing, document, names[document.id], claim, pending))
        return [result for result in results if result is not None]

    async def remove_old_leftovers(self) -> None:
        """Remove downloads of any signing that killed runs left a day ago."""
        await asyncio.to_thread(self._remove_leftovers, _PREFIX, time.time() - _DAY)

    def _remove_leftovers(self, prefix: str, before: float = math.inf) -> None:
        """Remove downloads that killed runs left. For young ones, the claim of the signing must be held."""
        for leftover in self._downloads.glob(f"{prefix}*"):
            with suppress(OSError):  # another run removed it
                if leftover.stat().st_mtime < before:
                    shutil.rmtree(leftover, ignore_errors=True)

    def _prefix(self, signing: Signing) -> str:
        return f"{_PREFIX}{digest(self.service, signing.id).hex()}-"

    async def _collect_document(
        self, signing: Signing, document: Document, name: str, claim: Claim, pending: dict[str, ArchivedDocument]
    ) -> ArchiveResult | None:
        """Return the result of a document; None if another run archived it."""
        recorder, placed = telemetry.active(self.api.telemetry), pending.get(document.id)
        with recorder.span(DOCUMENT_SPAN, {SIGNING_ID: signing.id, DOCUMENT_ID: document.id}) as span:
            try:
                if placed is not None and await self._is_intact(placed):
                    entry, is_new = placed, await finish(self.manifest.append(placed))
                else:
                    entry, is_new = await self._fetch(signing, document, name, claim, pending)
            except Exception as error:
                failed = _failed(signing, document, error)
                span.set({OUTCOME: "not_yet_signed"}) if isinstance(error, NotYetSigned) else span.fail(error)
                return failed
            if not is_new:
                span.set({OUTCOME: "present"})
                return None
            recorder.record(ARCHIVE_SIZE, entry.size)
            return ArchiveSuccess(signing, document, entry)

    async def _is_intact(self, placed: ArchivedDocument) -> bool:
        """Return whether a file that an earlier run placed is unchanged, and was verified as this run requires."""
        found = hashlib.sha256()
        with suppress(FileNotFoundError):
            async for chunk in self._store.read(placed.path):
                found.update(chunk)
        return found.hexdigest() == placed.sha256 and placed.verdict == self._verdict

    async def _fetch(
        self, signing: Signing, document: Document, name: str, claim: Claim, pending: dict[str, ArchivedDocument]
    ) -> tuple[ArchivedDocument, bool]:
        """Download a document, place its file and append its line; return whether the line is new."""

        async def put(entry: ArchivedDocument) -> bool:
            pending[document.id] = entry
            names = {id_: each.as_dict() for id_, each in pending.items()}
            await self.journal.write(claim, json.dumps({"pending": names}))
            await self._store.put(entry.path, sealed.path, entry.sha256)
            return await self.manifest.append(entry)

        async def keep(entry: ArchivedDocument) -> tuple[ArchivedDocument, bool]:
            try:
                return entry, await put(entry)
            except ArchiveConflict:  # another file has the name
                unique = attrs.evolve(entry, path=self._template.unique_name(self.service, signing, document))
                if entry == unique:
                    raise
                return unique, await put(unique)

        try:
            self._downloads.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(
                prefix=self._prefix(signing), dir=self._downloads, ignore_cleanup_errors=True
            ) as folder:
                target = Path(folder, "sealed.pdf")
                sealed = await self.api.documents._save_signed(signing, document, target, self._check_seal)
                entry = ArchivedDocument(
                    service=self.service,
                    signing=signing.id,
                    document=document.id,
                    documents=len(signing.documents),
                    path=name,
                    size=sealed.size,
                    sha256=sealed.sha256,
                    completed_at=document.completed_at,
                    fetched_at=datetime.now(UTC).replace(microsecond=0),
                    verdict=self._verdict,
                )
                # Finish even if cancelled: a file that is placed needs its line.
                return await finish(keep(entry))
        except SigningError:
            raise
        except OSError as error:
            message = f"cannot keep a download: {error.strerror}: {error.filename}"
            raise ArchiveError(message, transient=is_transient(error)) from None


def _decode_pending(claim: Claim) -> dict[str, ArchivedDocument]:
    """Return the manifest lines of files that an earlier run placed, or was about to place, by document id."""
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        pending = json.loads(claim.state or "{}")["pending"].items()
        return {id_: ArchivedDocument.from_dict(fields) for id_, fields in pending}
    return {}  # if the entry cannot be decoded, its files are downloaded again


def _failed(signing: Signing, document: Document | None, error: Exception) -> ArchiveResult:
    """Log an error and return it as a result; raise it if other signings would fail too."""
    raise_if_client_wide(error)
    level = logging.INFO if isinstance(error, NotYetSigned) else logging.WARNING
    of_document = "" if document is None else f"document {one_line(document.id)} of "
    log.log(level, "%ssigning %s was not archived: %s", of_document, one_line(signing.id), error)
    return ArchiveFailure(signing, document, error)


def raise_if_client_wide(error: Exception) -> None:
    """Raise the error if other signings would fail with it too."""
    if isinstance(error, ClaimLost) or (isinstance(error, SigningError) and error.client_wide):
        raise error
