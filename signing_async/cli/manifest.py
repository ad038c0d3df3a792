"""Read a manifest of signing packages, CSV or JSON lines, row by row; what is wrong is told by line and column.

A CSV file has one row for each package, and the columns ``key``, ``name``, ``language``, ``signing_order``,
``message``, ``documents`` (paths, with ``;`` or line breaks between them), and for each recipient, from 1,
``recipient1_email``, ``recipient1_first_name``, ``recipient1_last_name``, ``recipient1_signing_method``,
``recipient1_order``, and ``recipient1_extra_NAME`` for fields that the specification does not name. It may be separated
by commas, semicolons or tabs, with or without a byte order mark, as Excel's "CSV UTF-8" is. A file whose first
character is ``{`` holds an object a line, with the same names, ``documents`` and ``recipients`` as lists. Paths start
from the manifest's folder.
"""

from __future__ import annotations

import csv
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self, TypeVar

import attrs

from .._files import open_regular, sync_folder
from .._toml import closest
from ..dispatch.package import NewRecipient, SigningPackage
from ..documents.source import PdfSource
from ..errors import InvalidRequest, SigningError

__all__ = ["Entry", "Manifest", "Problem", "Report"]

T = TypeVar("T")

LONGEST_LINE = 1024 * 1024

_BOM = b"\xef\xbb\xbf"
_FIELDS = ("key", "name", "language", "signing_order", "message")
_OF_RECIPIENTS = ("email", "first_name", "last_name", "signing_method", "order")
_RECIPIENT = re.compile(r"recipient([1-9]\d{0,3})_(?:(email|first_name|last_name|signing_method|order)|extra_(.+))")
_PLACE = re.compile(r"(recipients)\[(\d+)\]\.(.+)|documents\[\d+\]")
_HALF = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
_DELIMITERS = ",;\t|"
_LONGEST_SHOWN = 200


@attrs.frozen
class Problem:
    """One thing that is wrong with a manifest; ``column`` is empty where it is the whole line."""

    line: int
    column: str
    words: str

    def __str__(self) -> str:
        return f"line {self.line}" + (f", {self.column}" if self.column else "") + f": {self.words}"


@attrs.frozen
class Entry:
    """One package of a manifest as it stands there, and what it says; None where it cannot be made out."""

    line: int
    row: Mapping[str, Any]
    package: SigningPackage | None
    problems: tuple[Problem, ...] = ()
    columns: tuple[int, ...] = ()
    """The numbers that the recipients have in a CSV file's columns; in JSON they are counted as they stand."""

    def found(self, problems: Iterable[str]) -> tuple[Problem, ...]:
        """What is wrong with it in all, with what `packages.prepare` has against it by the manifest's own names."""
        told = {problem.column for problem in self.problems}
        found = list(self.problems)
        for problem in problems:
            field, _, words = problem.partition(": ")
            placed = Problem(self.line, self._column(field), words)
            if placed.column not in told and field.partition(".")[0] not in told:
                found.append(placed)
        return tuple(found)

    def _column(self, field: str) -> str:
        if not self.columns:
            return field
        if field == "recipients":
            return "recipient1_email"
        place = _PLACE.fullmatch(field)
        if place is None:
            return field
        return f"recipient{self.columns[int(place[2])]}_{place[3]}" if place[1] else "documents"


class _Format(Protocol):
    """How the rows of a manifest are written."""

    def entries(self, lines: _Lines, folder: Path) -> Iterator[Entry]: ...

    def head(self) -> str: ...

    def written(self, row: Mapping[str, Any], key: str, error: str, folder: Path | None) -> str: ...


class Manifest:
    """A manifest, open: it can be read from its start as often as it takes. Close it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise InvalidRequest(f"{path}: cannot be opened: {error.strerror}") from None
        if descriptor is None:
            raise InvalidRequest(f"{path}: is not a file")
        self._file = os.fdopen(descriptor, "rb")
        self._status = os.fstat(descriptor)
        self.folder: Path = path.absolute().parent
        start = self._file.read(4096)
        self.format: _Format = Json() if start.removeprefix(_BOM).lstrip()[:1] == b"{" else Csv()
        if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
            self._file.close()
            raise InvalidRequest(f"{path}: is UTF-16: save it as UTF-8, in Excel as 'CSV UTF-8'")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def entries(self) -> Iterator[Entry]:
        """All of its rows. What cannot be made out is an entry with problems and without a package."""
        self._file.seek(0)
        return self.format.entries(_Lines(self._file), self.folder)

    def is_at(self, path: Path) -> bool:
        """Whether it is the file at this path, whatever that is called."""
        return os.path.samestat(path.stat(), self._status)

    @property
    def mode(self) -> int:
        """Who may read and write it."""
        return stat.S_IMODE(self._status.st_mode) & 0o666

    def check_unchanged(self) -> None:
        """An error if it was written to since it was opened."""
        status = os.fstat(self._file.fileno())
        if (status.st_size, status.st_mtime_ns) != (self._status.st_size, self._status.st_mtime_ns):
            raise SigningError(f"{self.path}: was changed while it was read: run the command again")


class _Lines:
    """The lines of a file as text, counted; which of them are not UTF-8, or too long, is remembered until asked."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.number: int = 0
        self._wrong: list[Problem] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline(LONGEST_LINE + 1)
        if not line:
            raise StopIteration
        self.number += 1
        if self.number == 1:
            line = line.removeprefix(_BOM)
        if len(line) > LONGEST_LINE:
            self._wrong.append(Problem(self.number, "", f"is longer than {LONGEST_LINE} bytes"))
            while (rest := self._file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                pass
            return "\n"
        try:
            return line.decode()
        except UnicodeDecodeError:
            self._wrong.append(Problem(self.number, "", "is not UTF-8: save the manifest as UTF-8"))
            return line.decode("utf-8", "replace")

    def wrong(self) -> tuple[Problem, ...]:
        """What was wrong since it was last asked."""
        found, self._wrong = tuple(self._wrong), []
        return found


# CSV


@attrs.define
class _Columns:
    """What the header's cells mean."""

    header: list[str]
    names: dict[str, int] = attrs.field(factory=dict)
    """Field: where its cell is."""
    recipients: dict[int, dict[str, int]] = attrs.field(factory=dict)
    extras: dict[int, dict[str, int]] = attrs.field(factory=dict)
    problems: list[Problem] = attrs.field(factory=list)


class Csv:
    """Comma (or semicolon, or tab) separated values with a header."""

    def __init__(self) -> None:
        self._header: list[str] = []
        self._delimiter = ","

    def entries(self, lines: _Lines, folder: Path) -> Iterator[Entry]:
        first = next((line for line in lines if line.strip()), "")
        if not first:
            return
        try:
            columns = self._columns(first, lines)
        except csv.Error as error:
            yield Entry(lines.number, {}, None, (*lines.wrong(), _no_csv(lines.number, error)))
            return
        at = lines.number
        self._header = columns.header
        if columns.problems:
            yield Entry(at, {}, None, (*lines.wrong(), *columns.problems))
        if not _is_complete(columns):
            return
        reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
        while True:
            start = lines.number + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield Entry(start, {}, None, (*lines.wrong(), _no_csv(start, error)))
                continue
            wrong = lines.wrong()
            if wrong:
                yield Entry(start, {}, None, wrong)
            elif any(cell.strip() for cell in cells):
                yield _read_row(columns, cells, start, folder)

    def _columns(self, first: str, lines: _Lines) -> _Columns:
        """What the header says, which the line that Excel puts before it may be followed by."""
        if (found := re.fullmatch(rf"sep=([{_DELIMITERS}])\s*", first, re.IGNORECASE)) is not None:
            self._delimiter = found[1]
            first = next(lines, "")
        else:
            self._delimiter = max(_DELIMITERS, key=lambda delimiter: _known(first, delimiter))
        return _read_header(_cells(first, self._delimiter), lines.number)

    def head(self) -> str:
        names = [name for name in self._header if name]
        present = {_plain(name) for name in names}
        return "\ufeff" + self._line([*names, *(name for name in ("key", "error") if name not in present)])

    def written(self, row: Mapping[str, Any], key: str, error: str, folder: Path | None) -> str:
        cells = dict(row)
        names = {_plain(name): name for name in row}
        cells[names.get("key", "key")] = key
        cells[names.get("error", "error")] = error
        if folder is not None:
            at = names["documents"]
            cells[at] = ";".join(str(folder / part) for part in _parts(cells[at]))
        return self._line(list(cells.values()))

    def _line(self, cells: Sequence[str]) -> str:
        from io import StringIO

        out = StringIO()
        csv.writer(out, delimiter=self._delimiter).writerow(cells)
        return out.getvalue()


def _plain(name: str) -> str:
    """A column's name as it is compared: people write "Signing order". A field's own name stays as it is."""
    name = re.sub(r"[\s-]+", "_", name.strip())
    head = re.match(r"recipient\d+_extra_", name, re.IGNORECASE)
    return head[0].lower() + name[head.end() :] if head else name.lower()


def _is_known(name: str) -> bool:
    return name in _FIELDS or name in ("documents", "error") or _RECIPIENT.fullmatch(name) is not None


def _cells(header: str, delimiter: str) -> list[str]:
    if "\r" in header.rstrip("\r\n"):
        raise csv.Error("it has the line ends of old Macs: save it as 'CSV UTF-8'")
    return next(csv.reader([header], delimiter=delimiter), [])


def _no_csv(line: int, error: csv.Error) -> Problem:
    return Problem(line, "", f"is no CSV: {error}")


def _known(header: str, delimiter: str) -> int:
    return sum(_is_known(_plain(name)) for name in _cells(header, delimiter))


def _read_header(cells: list[str], line: int) -> _Columns:
    columns = _Columns(cells)
    for at, cell in enumerate(cells):
        name = _plain(cell)
        found = _RECIPIENT.fullmatch(name)
        if found is not None:
            among = columns.recipients if found[2] else columns.extras
            names, name = among.setdefault(int(found[1]), {}), found[2] or found[3]
        else:
            names = columns.names
        if cell.strip() and not _is_known(_plain(cell)):
            columns.problems.append(Problem(line, "", f"there is no column {cell!r}{_hint(name)}"))
        elif cell.strip() and name in names:
            columns.problems.append(Problem(line, "", f"the column {cell!r} stands there twice"))
        names[name] = at
    needed = [name for name in ("name", "language", "documents") if name not in columns.names]
    if not any("email" in names for names in columns.recipients.values()):
        needed.append("recipient1_email")
    columns.problems += [Problem(line, "", f"the column {name!r} is missing") for name in needed]
    return columns


def _hint(name: str) -> str:
    if name in _OF_RECIPIENTS:
        return f"; did you mean 'recipient1_{name}'?"
    number = re.search(r"\d+", name)
    fields = [f"recipient{number[0] if number else 1}_{field}" for field in _OF_RECIPIENTS]
    return closest(name, [*_FIELDS, "documents", *fields])


def _is_complete(columns: _Columns) -> bool:
    return not any("is missing" in problem.words for problem in columns.problems)


def _read_row(columns: _Columns, cells: list[str], line: int, folder: Path) -> Entry:
    problems = [
        Problem(line, "", f"the cell {_shown(text)} has no column: it is number {at + 1}")
        for at, text in enumerate(cells)
        if text.strip() and not (at < len(columns.header) and columns.header[at].strip())
    ]

    def cell(at: int | None) -> str | None:
        return (cells[at].strip() or None) if at is not None and at < len(cells) else None

    fields = {name: cell(columns.names.get(name)) for name in _FIELDS}
    recipients, numbers = [], []
    for number in sorted(columns.recipients.keys() | columns.extras.keys()):
        named = {name: cell(at) for name, at in columns.recipients.get(number, {}).items()}
        extra = {name: text for name, at in columns.extras.get(number, {}).items() if (text := cell(at)) is not None}
        if extra or any(text is not None for text in named.values()):
            recipients.append(_recipient(named, extra, f"recipient{number}_order", line, problems))
            numbers.append(number)
    documents = [PdfSource(folder / part) for part in _parts(cell(columns.names["documents"]) or "")]
    row = {name: cells[at] if at < len(cells) else "" for at, name in enumerate(columns.header) if name}
    return Entry(line, row, _package(fields, documents, recipients), tuple(problems), tuple(numbers) or (1,))


def _parts(documents: str) -> list[str]:
    return [part.strip() for part in re.split(r"[;\r\n]", documents) if part.strip()]


def _recipient(
    cells: Mapping[str, str | None], extra: Mapping[str, Any], column: str, line: int, problems: list[Problem]
) -> NewRecipient:
    given: dict[str, Any] = {name: text for name, text in cells.items() if text is not None}
    text = given.pop("order", None)
    if text is not None and re.fullmatch(r"\d{1,9}(\.0)?", text, re.ASCII):
        given["order"] = int(text.partition(".")[0])
    elif text is not None:
        problems.append(Problem(line, column, f"must be a whole number, not {_shown(text)}"))
    return NewRecipient(**{"email": None, **given}, extra=extra)


def _package(
    fields: Mapping[str, Any], documents: Iterable[PdfSource], recipients: Iterable[NewRecipient]
) -> SigningPackage:
    return SigningPackage(**{**fields, "documents": documents, "recipients": recipients})


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"


# JSON lines


class Json:
    """An object a line."""

    def entries(self, lines: _Lines, folder: Path) -> Iterator[Entry]:
        for text in lines:
            wrong = lines.wrong()
            if wrong or text.strip():
                yield Entry(lines.number, {}, None, wrong) if wrong else _read_object(text, lines.number, folder)

    def head(self) -> str:
        return ""

    def written(self, row: Mapping[str, Any], key: str, error: str, folder: Path | None) -> str:
        row = {**row, "key": key, "error": error}
        if folder is not None:
            row["documents"] = [
                {**given, "path": str(folder / given["path"])} if isinstance(given, dict) else str(folder / given)
                for given in row["documents"]
            ]
        return json.dumps(row, ensure_ascii=False) + "\n"


class _Wrong(Exception):
    """A field is not what it must be."""


def _read_object(text: str, line: int, folder: Path) -> Entry:
    try:
        row = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError, _Wrong) as error:
        words = str(error) if isinstance(error, _Wrong) else f"is no JSON: {error}"
        return Entry(line, {}, None, (Problem(line, "", words),))
    if _HALF.search(text) and not _is_whole(row):
        words = "holds half a character, which JSON writes as \\ud800 to \\udfff"
        return Entry(line, {}, None, (Problem(line, "", words),))
    if not isinstance(row, dict):
        return Entry(line, {}, None, (Problem(line, "", f"must be an object, not {_shown(row)}"),))
    problems = [
        Problem(line, name, f"is unknown{closest(name, [*_FIELDS, 'documents', 'recipients'])}")
        for name in row
        if name not in (*_FIELDS, "documents", "recipients", "error")
    ]
    documents = _each(row, "documents", line, problems, lambda given: _document(given, folder), PdfSource(b""))
    recipients = _each(row, "recipients", line, problems, _recipient_of, NewRecipient(""))
    package = _package({name: row.get(name) for name in _FIELDS}, documents, recipients)
    return Entry(line, row, package, tuple(problems))


def _is_whole(row: object) -> bool:
    """Whether it can be written in UTF-8."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Wrong(f"the name {twice!r} stands twice in one object")
    return found


def _each(
    row: Mapping[str, Any], name: str, line: int, problems: list[Problem], read: Callable[[Any], T], wrong: T
) -> list[T]:
    """What is read of each in a list, with something in the place of what cannot be read."""
    given = row.get(name, [])
    if not isinstance(given, list):
        problems.append(Problem(line, name, f"must be a list, not {_shown(given)}"))
        return []
    made: list[T] = []
    for number, each in enumerate(given):
        try:
            made.append(read(each))
        except _Wrong as error:
            problems.append(Problem(line, f"{name}[{number}]", str(error)))
            made.append(wrong)
    return made


def _document(given: object, folder: Path) -> PdfSource:
    if isinstance(given, str):
        given = {"path": given}
    if not isinstance(given, dict) or not isinstance(given.get("path"), str) or not given["path"]:
        raise _Wrong(f"must be a path, or an object with a path, not {_shown(given)}")
    _check_names(given, ("path", "filename"))
    filename = given.get("filename")
    if filename is not None and (not isinstance(filename, str) or not filename.strip()):
        raise _Wrong(f"filename must be a name, not {_shown(filename)}")
    return PdfSource(folder / given["path"], filename)


def _recipient_of(given: object) -> NewRecipient:
    if not isinstance(given, dict):
        raise _Wrong(f"must be an object, not {_shown(given)}")
    _check_names(given, (*_OF_RECIPIENTS, "extra"))
    return NewRecipient(**{"email": None, **{name: value for name, value in given.items() if value is not None}})


def _check_names(given: Mapping[str, object], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise _Wrong(f"{name!r} is unknown{closest(name, known)}")


# What failed


def _is_report(path: Path) -> bool:
    """Whether it looks like one: its header, or its first object, has a key and an error."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return {b"key", b"error"} <= set(re.findall(rb"\w+", file.readline(LONGEST_LINE).lower()))


class Report:
    """A manifest of what failed, to be run again. It takes the place of an older one when it is complete."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self._manifest = manifest
        # Paths that start from another folder would lead elsewhere.
        elsewhere = path.absolute().parent.resolve() != manifest.folder.resolve()
        self._folder = manifest.folder if elsewhere else None
        self._file: IO[str] | None = None
        self._part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")

    def check(self) -> None:
        """An error, before anything is sent, if it could not be written or would take the place of something else."""
        self._opened().close()
        self._part.unlink()
        if self.path.exists() and not self._manifest.is_at(self.path) and not _is_report(self.path):
            raise InvalidRequest(f"--failures: {str(self.path)!r} is there already, and is no report of failures")

    def add(self, row: Mapping[str, Any], key: str, error: str) -> None:
        """One package that failed, under its key, and why; the reason is passed over when it is read."""
        if self._file is None:
            self._file = self._opened()
            self._file.write(self._manifest.format.head())
        self._file.write(self._manifest.format.written(row, key, " ".join(error.split()), self._folder))

    def _opened(self) -> IO[str]:
        try:
            # Nobody may read it who may not read the manifest: it holds the same people.
            descriptor = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._manifest.mode)
            return os.fdopen(descriptor, "w", encoding="utf-8", newline="")
        except OSError as error:
            raise InvalidRequest(f"--failures: {str(self.path)!r} cannot be written: {error.strerror}") from None

    def finish(self, *, remove_old: bool = True) -> bool:
        """Put the report in place and return whether there is one; without failures, remove an old one if asked to."""
        if self._file is None:
            if remove_old:
                self.path.unlink(missing_ok=True)
            return False
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self.path)
        sync_folder(self.path.absolute().parent)
        return True

    def drop(self) -> None:
        """Leave everything as it was."""
        if self._file is not None:
            self._file.close()
            self._part.unlink(missing_ok=True)
