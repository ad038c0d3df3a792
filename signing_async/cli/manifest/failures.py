"""The report of failed packages: a manifest that can be dispatched again."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ..._files import sync_folder, unusable
from ...errors import InvalidRequest
from .manifest import Manifest
from .rows import MAX_LINE

__all__ = ["FailureReport"]


class FailureReport:
    """A manifest of the failed packages. It replaces an older report once it is complete."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self._manifest = manifest
        # Relative paths would point elsewhere from another folder.
        is_elsewhere = path.absolute().parent.resolve() != manifest.folder.resolve()
        self._folder = manifest.folder if is_elsewhere else None
        self._file: IO[str] | None = None
        self._failure: OSError | None = None
        self._partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")

    def check(self) -> None:
        """Raise `InvalidRequest` if the report can't be written, or would replace an unrelated file."""
        try:
            self._open().close()
            self._partial.unlink()
        except OSError as error:
            raise unusable(f"--failures: {str(self.path)!r} cannot be written: {error.strerror}", error) from None
        if self.path.exists() and not self._manifest.is_at(self.path) and not _is_report(self.path):
            raise InvalidRequest(f"--failures: {str(self.path)!r} exists and is not a report of failures")

    def add(self, row: Mapping[str, Any], key: str, error: str) -> None:
        """Add a failed package with its key and error; when the report is dispatched, the error is ignored.

        If the report can't be written, `finish` raises the error, so the other packages are still sent.
        """
        if self._failure is not None:
            return
        try:
            if self._file is None:
                self._file = self._open()
                self._file.write(self._manifest.format.header())
            self._file.write(self._manifest.format.format_row(row, key, " ".join(error.split()), self._folder))
        except OSError as failure:
            self._failure = failure
        except UnicodeEncodeError:
            self._failure = OSError(errno.EILSEQ, "the path of a document is not valid UTF-8", str(self.path))

    def _open(self) -> IO[str]:
        # The report names the same people as the manifest, so it gets the same permissions.
        descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._manifest.mode)
        return os.fdopen(descriptor, "w", encoding="utf-8", newline="")

    def finish(self) -> bool:
        """Put the report in place, and return whether there is one.

        If no package failed, an older report is removed. Raises `OSError` if the report can't be written; an older one
        then stays as it was.
        """
        if self._failure is not None:
            raise self._failure
        if self._file is None:
            self.path.unlink(missing_ok=True)
            return False
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self.path)
        sync_folder(self.path.absolute().parent)
        return True

    def discard(self) -> None:
        """Discard an unfinished report. An older report stays as it was."""
        if self._file is not None:
            with suppress(OSError):  # closing writes what is buffered
                self._file.close()
            self._partial.unlink(missing_ok=True)


def _is_report(path: Path) -> bool:
    """Return whether the file's first line has a key and an error."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return {b"key", b"error"} <= set(re.findall(rb"\w+", file.readline(MAX_LINE).lower()))
