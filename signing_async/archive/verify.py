"""Check an archive against its manifest, offline."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Literal

import attrs

from .. import telemetry
from ..bulk import FileProgress, Progress, ProgressReporter
from ..errors import InvalidRequest
from ..telemetry.names import ARCHIVE_FINDINGS, FINDING
from .manifest import FIRST, MANIFEST, ArchivedDocument, decode_line, digest, hash_of, split_lines
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
    check = _Check(as_store(archive), ProgressReporter(on_progress))
    await check.chain()
    await check.files()
    await check.extra_files()
    recorder = telemetry.active(telemetry.is_enabled())
    for finding in check.findings:
        recorder.record(ARCHIVE_FINDINGS, 1, {FINDING: finding.kind})
    return ArchiveReport(check.documents, check.size, check.lines, check.head, tuple(check.findings))


class _Check:
    """One verification: the chain of lines first, then the files."""

    def __init__(self, store: ArchiveStore, reporter: ProgressReporter) -> None:
        self._store = store
        self._reporter = reporter
        self.findings: list[Finding] = []
        self.documents = self.size = self.lines = self._end = 0
        self.head = FIRST
        self._paths = set[bytes]()
        self._is_cut = False

    async def chain(self) -> None:
        files = size = 0
        async for line in self._read_lines():
            number = self.lines + 1
            if not line.endswith(b"\n"):
                self._report("torn_line", f"line {number} is incomplete: its writer was interrupted", line=number)
                break
            self.lines, self._end = number, self._end + len(line)
            try:
                document, previous = decode_line(line)
            except ValueError as error:
                self._report("changed_line", f"line {number} was changed: {error}", line=number)
            else:
                if previous != self.head:
                    after = f"line {number - 1}" if number > 1 else "the start"
                    text = f"line {number} does not follow {after}: lines were removed or replaced"
                    self._report("removed_line", text, line=number)
                files, size = files + 1, size + document.size
                self._paths.add(digest(document.path))
            self.head = hash_of(line)
        self._reporter.files_total, self._reporter.bytes_total = files, size
        self._reporter.add(0, 0)

    async def files(self) -> None:
        number = 0
        async for line in self._read_lines():
            number += 1
            if number > self.lines:
                return  # appended since the chain was read
            with suppress(ValueError):
                await self._check_file(decode_line(line)[0], number)

    async def _check_file(self, document: ArchivedDocument, number: int) -> None:
        path, progress = document.path, FileProgress(self._reporter)
        found, size = hashlib.sha256(), 0
        try:
            async for chunk in self._store.read(path):
                found.update(chunk)
                size += len(chunk)
                progress.add(len(chunk))
        except (FileNotFoundError, InvalidRequest):
            self._report("missing_file", f"{path!r} is missing", path, number)
        else:
            if found.hexdigest() == document.sha256:
                self.documents, self.size = self.documents + 1, self.size + size
            else:
                text = f"{path!r} was changed: sha256 mismatch, {size} bytes instead of {document.size}"
                self._report("changed_file", text, path, number)
        progress.finish(document.size)

    async def extra_files(self) -> None:
        if self._is_cut or not isinstance(self._store, ListedStore):
            return
        unknown = [name async for name in self._store.names() if name != MANIFEST and digest(name) not in self._paths]
        # A run may have placed them since the manifest was read.
        async for line in self._read_lines(self._end):
            with suppress(ValueError):
                self._paths.add(digest(decode_line(line)[0].path))
        for name in sorted(unknown):
            if digest(name) not in self._paths:
                self._report("extra_file", f"{name!r} is in no line of the manifest", name)

    async def _read_lines(self, offset: int = 0) -> AsyncIterator[bytes]:
        try:
            async for line in split_lines(self._store.read(MANIFEST, offset)):
                yield line
        except FileNotFoundError:
            pass
        except MissingBytes as error:
            if not self._is_cut:
                self._report("removed_line", str(error), line=self.lines + 1)
            self._is_cut = True

    def _report(self, kind: FindingKind, text: str, path: str | None = None, line: int | None = None) -> None:
        self.findings.append(Finding(kind, text, path, line))
