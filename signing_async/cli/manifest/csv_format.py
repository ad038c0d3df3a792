"""CSV manifests: one row for each package.

The columns are ``key``, ``name``, ``language``, ``signing_order``, ``message``, ``documents`` (paths separated by ``;``
or line breaks) and for each recipient, from 1, ``recipient1_email``, ``recipient1_first_name``,
``recipient1_last_name``, ``recipient1_signing_method``, ``recipient1_order``, and ``recipient1_extra_NAME`` for fields
that the specification does not name. Commas, semicolons, tabs or vertical bars separate the cells. A byte order mark,
as in Excel's "CSV UTF-8", is accepted.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ..._toml import did_you_mean
from ...dispatch.package import NewRecipient
from ...documents.source import PdfSource
from .rows import FIELDS, RECIPIENT_FIELDS, Entry, Lines, Problem, make_package, shorten

__all__ = ["CsvFormat"]

_RECIPIENT = re.compile(rf"recipient([1-9]\d{{0,3}})_(?:({'|'.join(RECIPIENT_FIELDS)})|extra_(.+))")
_DELIMITERS = ",;\t|"
_REQUIRED = ("name", "language", "documents")


@attrs.define
class _Columns:
    """The meaning of the header's cells: for each field, the index of its cell."""

    header: list[str]
    fields: dict[str, int] = attrs.field(factory=dict)
    recipients: dict[int, dict[str, int]] = attrs.field(factory=dict)
    extras: dict[int, dict[str, int]] = attrs.field(factory=dict)
    problems: list[Problem] = attrs.field(factory=list)
    is_complete: bool = True


class CsvFormat:
    """CSV with a header, which determines the delimiter."""

    def __init__(self) -> None:
        self._header: list[str] = []
        self._delimiter = ","

    def entries(self, lines: Lines, folder: Path) -> Iterator[Entry]:
        first = next((line for line in lines if line.strip()), "")
        if not first:
            return
        try:
            columns = self._read_columns(first, lines)
        except csv.Error as error:
            yield Entry(lines.number, {}, None, (*lines.take_problems(), _invalid_csv(lines.number, error)))
            return
        self._header = columns.header
        if columns.problems:
            yield Entry(lines.number, {}, None, (*lines.take_problems(), *columns.problems))
        if columns.is_complete:
            yield from self._read_rows(columns, lines, folder)

    def _read_rows(self, columns: _Columns, lines: Lines, folder: Path) -> Iterator[Entry]:
        reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
        while True:
            start = lines.number + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield Entry(start, {}, None, (*lines.take_problems(), _invalid_csv(start, error)))
                continue
            problems = lines.take_problems()
            if problems:
                yield Entry(start, {}, None, problems)
            elif any(cell.strip() for cell in cells):
                yield _read_row(columns, cells, start, folder)

    def _read_columns(self, first: str, lines: Lines) -> _Columns:
        """Read the header, which may follow Excel's line ``sep=;``."""
        if (match := re.fullmatch(rf"sep=([{_DELIMITERS}])\s*", first, re.IGNORECASE)) is not None:
            self._delimiter = match[1]
            first = next(lines, "")
        else:
            self._delimiter = max(_DELIMITERS, key=lambda delimiter: _count_known(first, delimiter))
        return _read_header(_split_header(first, self._delimiter), lines.number)

    def header(self) -> str:
        names = [name for name in self._header if name]
        present = {_normalize(name) for name in names}
        return "\ufeff" + self._format_line([*names, *(name for name in ("key", "error") if name not in present)])

    def format_row(self, row: Mapping[str, Any], key: str, error: str, folder: Path | None) -> str:
        cells = dict(row)
        names = {_normalize(name): name for name in row}
        cells[names.get("key", "key")] = key
        cells[names.get("error", "error")] = error
        if folder is not None:
            column = names["documents"]
            cells[column] = ";".join(str(folder / path) for path in _split_paths(cells[column]))
        return self._format_line(list(cells.values()))

    def _format_line(self, cells: Sequence[str]) -> str:
        out = io.StringIO()
        csv.writer(out, delimiter=self._delimiter).writerow(cells)
        return out.getvalue()


def _normalize(name: str) -> str:
    """Return a column's name for comparison: people write "Signing order". Names of extra fields keep their case."""
    name = re.sub(r"[\s-]+", "_", name.strip())
    prefix = re.match(r"recipient\d+_extra_", name, re.IGNORECASE)
    return prefix[0].lower() + name[prefix.end() :] if prefix else name.lower()


def _is_known(name: str) -> bool:
    return name in FIELDS or name in ("documents", "error") or _RECIPIENT.fullmatch(name) is not None


def _split_header(header: str, delimiter: str) -> list[str]:
    if "\r" in header.rstrip("\r\n"):
        raise csv.Error("the file has the line endings of classic Mac OS; save it as 'CSV UTF-8'")
    return next(csv.reader([header], delimiter=delimiter), [])


def _count_known(header: str, delimiter: str) -> int:
    return sum(_is_known(_normalize(name)) for name in _split_header(header, delimiter))


def _invalid_csv(line: int, error: csv.Error) -> Problem:
    return Problem(line, "", f"invalid CSV: {error}")


def _read_header(cells: list[str], line: int) -> _Columns:
    columns = _Columns(cells)
    for index, cell in enumerate(cells):
        name = _normalize(cell)
        match = _RECIPIENT.fullmatch(name)
        if match is None:
            indexes = columns.fields
        else:
            group = columns.recipients if match[2] else columns.extras
            indexes, name = group.setdefault(int(match[1]), {}), match[2] or match[3]
        if cell.strip() and not _is_known(_normalize(cell)):
            columns.problems.append(Problem(line, "", f"unknown column {cell!r}{_hint(name)}"))
        elif cell.strip() and name in indexes:
            columns.problems.append(Problem(line, "", f"duplicate column {cell!r}"))
        indexes[name] = index
    missing = [name for name in _REQUIRED if name not in columns.fields]
    if not any("email" in indexes for indexes in columns.recipients.values()):
        missing.append("recipient1_email")
    columns.problems += [Problem(line, "", f"missing column {name!r}") for name in missing]
    columns.is_complete = not missing
    return columns


def _hint(name: str) -> str:
    if name in RECIPIENT_FIELDS:
        return f"; did you mean 'recipient1_{name}'?"
    number = re.search(r"\d+", name)
    fields = [f"recipient{number[0] if number else 1}_{field}" for field in RECIPIENT_FIELDS]
    return did_you_mean(name, [*FIELDS, "documents", *fields])


def _read_row(columns: _Columns, cells: list[str], line: int, folder: Path) -> Entry:
    problems = [
        Problem(line, "", f"cell {index + 1}, {shorten(text)}, has no column")
        for index, text in enumerate(cells)
        if text.strip() and not (index < len(columns.header) and columns.header[index].strip())
    ]

    def cell(index: int | None) -> str | None:
        return (cells[index].strip() or None) if index is not None and index < len(cells) else None

    fields = {name: cell(columns.fields.get(name)) for name in FIELDS}
    recipients, numbers = [], []
    for number in sorted(columns.recipients.keys() | columns.extras.keys()):
        named = {name: cell(index) for name, index in columns.recipients.get(number, {}).items()}
        extra = {name: text for name, at in columns.extras.get(number, {}).items() if (text := cell(at)) is not None}
        if extra or any(text is not None for text in named.values()):
            recipients.append(_read_recipient(named, extra, f"recipient{number}_order", line, problems))
            numbers.append(number)
    documents = [PdfSource(folder / path) for path in _split_paths(cell(columns.fields["documents"]) or "")]
    row = {name: cells[at] if at < len(cells) else "" for at, name in enumerate(columns.header) if name}
    return Entry(line, row, make_package(fields, documents, recipients), tuple(problems), tuple(numbers) or (1,))


def _split_paths(documents: str) -> list[str]:
    return [path.strip() for path in re.split(r"[;\r\n]", documents) if path.strip()]


def _read_recipient(
    cells: Mapping[str, str | None], extra: Mapping[str, Any], column: str, line: int, problems: list[Problem]
) -> NewRecipient:
    fields: dict[str, Any] = {name: text for name, text in cells.items() if text is not None}
    order = fields.pop("order", None)
    if order is not None and re.fullmatch(r"\d{1,9}(\.0)?", order, re.ASCII):
        fields["order"] = int(order.partition(".")[0])
    elif order is not None:
        problems.append(Problem(line, column, f"must be an integer, got {shorten(order)}"))
    return NewRecipient(**{"email": None, **fields}, extra=extra)
