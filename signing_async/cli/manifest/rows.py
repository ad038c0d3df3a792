"""The rows of a manifest: lines of text in, packages and problems out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import attrs

from ...dispatch.package import NewRecipient, SigningPackage
from ...documents.source import PdfSource

__all__ = [
    "BOM",
    "FIELDS",
    "MAX_LINE",
    "RECIPIENT_FIELDS",
    "Entry",
    "Format",
    "Lines",
    "Problem",
    "make_package",
    "shorten",
]

BOM = b"\xef\xbb\xbf"
MAX_LINE = 1024 * 1024
FIELDS = ("key", "name", "language", "signing_order", "message")
RECIPIENT_FIELDS = ("email", "first_name", "last_name", "signing_method", "order")

_FIELD = re.compile(r"(recipients)\[(\d+)\]\.(.+)|documents\[\d+\]")
_MAX_SHOWN = 200


@attrs.frozen
class Problem:
    """One problem in a manifest. ``column`` is empty if it concerns the whole line."""

    line: int
    column: str
    message: str

    def __str__(self) -> str:
        return f"line {self.line}" + (f", {self.column}" if self.column else "") + f": {self.message}"


@attrs.frozen
class Entry:
    """One row of a manifest and its package, which is None if the row can't be read."""

    line: int
    row: Mapping[str, Any]
    package: SigningPackage | None
    problems: tuple[Problem, ...] = ()
    recipient_numbers: tuple[int, ...] = ()
    """The numbers of the recipients in a CSV file's column names; empty for JSON, where they are list indexes."""

    def merge_problems(self, problems: Iterable[str]) -> tuple[Problem, ...]:
        """Return the entry's problems and the ones that `prepare` found, under the manifest's own column names."""
        reported = {problem.column for problem in self.problems}
        found = list(self.problems)
        for problem in problems:
            field, _, message = problem.partition(": ")
            located = Problem(self.line, self._column(field), message)
            if located.column not in reported and field.partition(".")[0] not in reported:
                found.append(located)
        return tuple(found)

    def _column(self, field: str) -> str:
        if not self.recipient_numbers:
            return field
        if field == "recipients":
            return "recipient1_email"
        match = _FIELD.fullmatch(field)
        if match is None:
            return field
        return f"recipient{self.recipient_numbers[int(match[2])]}_{match[3]}" if match[1] else "documents"


class Lines:
    """The lines of a file as text. Lines that are not UTF-8 or too long are collected as problems."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.number: int = 0
        self._problems: list[Problem] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline(MAX_LINE + 1)
        if not line:
            raise StopIteration
        self.number += 1
        if self.number == 1:
            line = line.removeprefix(BOM)
        if len(line) > MAX_LINE:
            self._problems.append(Problem(self.number, "", f"longer than {MAX_LINE} bytes"))
            while (rest := self._file.readline(MAX_LINE)) and not rest.endswith(b"\n"):
                pass
            return "\n"
        try:
            return line.decode()
        except UnicodeDecodeError:
            self._problems.append(Problem(self.number, "", "not UTF-8; save the manifest as UTF-8"))
            return line.decode("utf-8", "replace")

    def take_problems(self) -> tuple[Problem, ...]:
        """Return the problems since the last call."""
        found, self._problems = tuple(self._problems), []
        return found


class Format(Protocol):
    """A manifest format: reads entries, and formats rows for a report."""

    def entries(self, lines: Lines, folder: Path) -> Iterator[Entry]: ...

    def header(self) -> str: ...

    def format_row(self, row: Mapping[str, Any], key: str, error: str, folder: Path | None) -> str: ...


def make_package(
    fields: Mapping[str, Any], documents: Iterable[PdfSource], recipients: Iterable[NewRecipient]
) -> SigningPackage:
    """Return the package, whose fields may still be invalid: `prepare` checks them."""
    return SigningPackage(**{**fields, "documents": documents, "recipients": recipients})


def shorten(value: object) -> str:
    """Return the value's `repr`, cut to fit a message."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
