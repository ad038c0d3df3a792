"""Open a manifest of signing packages, in CSV or JSON lines."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from ..._files import open_regular, unusable
from ...errors import InvalidRequest, SigningError
from .csv_format import CsvFormat
from .json_format import JsonFormat
from .rows import BOM, Entry, Format, Lines

__all__ = ["Manifest"]


class Manifest:
    """An open manifest, which can be read any number of times. Paths in it are relative to its folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise unusable(f"{path}: cannot be opened: {error.strerror}", error) from None
        if descriptor is None:
            raise InvalidRequest(f"{path}: not a regular file")
        self._file = os.fdopen(descriptor, "rb")
        self._status = os.fstat(descriptor)
        self.folder: Path = path.absolute().parent
        start = self._file.read(4096)
        if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
            self._file.close()
            raise InvalidRequest(f"{path}: encoded as UTF-16; save it as UTF-8 (in Excel: 'CSV UTF-8')")
        self.format: Format = JsonFormat() if start.removeprefix(BOM).lstrip().startswith((b"{", b"[")) else CsvFormat()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def entries(self) -> Iterator[Entry]:
        """Iterate over all rows. A row that can't be read is an entry with problems and without a package."""
        self._file.seek(0)
        return self.format.entries(Lines(self._file), self.folder)

    def is_at(self, path: Path) -> bool:
        """Return whether this path leads to the manifest's file."""
        return os.path.samestat(path.stat(), self._status)

    @property
    def mode(self) -> int:
        """The file's read and write permissions."""
        return stat.S_IMODE(self._status.st_mode) & 0o666

    def check_unchanged(self) -> None:
        """Raise `SigningError` if the file was written to since it was opened."""
        status = os.fstat(self._file.fileno())
        if (status.st_size, status.st_mtime_ns) != (self._status.st_size, self._status.st_mtime_ns):
            raise SigningError(f"{self.path}: changed while it was read; run the command again")
