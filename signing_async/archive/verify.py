"""Check an archive against its manifest, offline."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import attrs

from .. import telemetry
from ..bulk import Progress, ProgressReporter
from ..errors import InvalidRequest
from ..telemetry.names import ARCHIVE_FINDINGS, FINDING
from .manifest import FIRST, MANIFEST, ArchivedDocument, decode_line, digest, hash_of, read_lines
from .stores import ArchiveStore, ListedStore, MissingBytes, as_store

__all__ = ["ArchiveReport", "Finding", "verify_archive"]

FindingKind = Literal["missing_file", "changed_file", "extra_file", "removed_line", "changed_line", "torn_line"]


@attrs.frozen
class Finding:
    """One difference between an archive and its manifest. ``text`` is for people.

    ``missing_file`` and ``changed_file``: a file that the manifest names. ``extra_file``: no line names the file.
    ``removed_line``: a line's ``previous`` is not the hash of the line before it. ``changed_line``: the line's hash
    does not match its content. ``torn_line``: the last line is incomplete, as after a power cut; the next append
    removes it.
    """

    kind: FindingKind
    text: str
    path: str | None = None
    line: int | None = None
    """The number of the line in the manifest, from 1 on."""


@attrs.frozen
class ArchiveReport:
    """The result of `verify_archive`."""

    documents: int
    """The number of documents whose file matches its line."""
    size: int
    """The number of bytes of these files."""
    lines: int
    """The number of lines of the manifest."""
    head: str
    """The hash of the last line. Store it elsewhere: a later manifest that does not contain it was rewritten."""
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether the archive matches its manifest."""
        return not self.findings


async def verify_archive(
    archive: ArchiveStore | str | os.PathLike[str], on_progress: Callable[[Progress], None] | None = None
) -> ArchiveReport:
    """Read the manifest and all files, and report every difference. Change nothing, and do not use the signing service.

    Raises `ArchiveError` if something can't be read. Files that a run places in the meantime may count as extra.
    ``on_progress`` receives the documents and bytes that were read. ::

        report = await verify_archive("archive/")
        assert report.ok, report.findings
    """
    store, reporter = as_store(archive), ProgressReporter(on_progress)
    findings: list[Finding] = []
    paths: set[bytes] = set()
    number = end = documents = size = 0
    head, is_cut = FIRST, False
    try:
        async for line in read_lines(store):
            if not line.endswith(b"\n"):
                text = f"line {number + 1} is incomplete: its writer was interrupted"
                findings.append(Finding("torn_line", text, line=number + 1))
                break
            number, end = number + 1, end + len(line)
            try:
                document, previous = decode_line(line)
            except ValueError as error:
                findings.append(Finding("changed_line", f"line {number} was changed: {error}", line=number))
            else:
                if previous != head:
                    after = f"line {number - 1}" if number > 1 else "the start"
                    text = f"line {number} does not follow {after}: lines were removed or replaced"
                    findings.append(Finding("removed_line", text, line=number))
                paths.add(digest(document.path))
                finding = await _check_file(store, document, number)
                if finding is None:
                    documents, size = documents + 1, size + document.size
                else:
                    findings.append(finding)
                reporter.add(1, document.size)
            head = hash_of(line)
    except MissingBytes as error:
        is_cut = True
        findings.append(Finding("removed_line", str(error), line=number + 1))

    if isinstance(store, ListedStore) and not is_cut:
        unknown = [name async for name in store.names() if name != MANIFEST and digest(name) not in paths]
        # A run may have placed them since the manifest was read.
        async for line in read_lines(store, end):
            with suppress(ValueError):
                paths.add(digest(decode_line(line)[0].path))
        extra = sorted(name for name in unknown if digest(name) not in paths)
        findings += [Finding("extra_file", f"{name!r} is in no line of the manifest", name) for name in extra]

    recorder = telemetry.active(telemetry.is_enabled())
    for finding in findings:
        recorder.record(ARCHIVE_FINDINGS, 1, {FINDING: finding.kind})
    return ArchiveReport(documents, size, number, head, tuple(findings))


async def _check_file(store: ArchiveStore, document: ArchivedDocument, number: int) -> Finding | None:
    """Return how a document's file differs from its line, None if it does not."""
    path, found, size = document.path, hashlib.sha256(), 0
    try:
        async for chunk in store.read(path):
            found.update(chunk)
            size += len(chunk)
    except (FileNotFoundError, InvalidRequest):
        return Finding("missing_file", f"{path!r} is missing", path, number)
    if found.hexdigest() == document.sha256:
        return None
    text = f"{path!r} was changed: sha256 mismatch, {size} bytes instead of {document.size}"
    return Finding("changed_file", text, path, number)
