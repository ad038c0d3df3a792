"""Manifests of signing packages: read and checked before anything is sent, and written as reports of failures.

A CSV manifest has one row per package. The columns are ``key``, ``name``, ``language``, ``signing_order``, ``message``,
``documents`` (paths separated by ``;`` or line breaks) and for each recipient, from 1, ``recipient1_email``,
``recipient1_first_name``, ``recipient1_last_name``, ``recipient1_signing_method``, ``recipient1_order``, and
``recipient1_extra_NAME`` for fields that the specification does not name. Commas, semicolons, tabs or vertical bars
separate the cells. A JSON manifest has one object per line, with the same names; ``documents`` and ``recipients`` are
lists.
"""

from __future__ import annotations

import asyncio
import csv
import errno
import io
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import attrs

from .._files import open_regular, sync_folder, unusable
from .._toml import did_you_mean
from ..dispatch.package import NewRecipient, SigningPackage, prepare
from ..documents.source import PdfSource
from ..errors import InvalidRequest, SigningError

T = TypeVar("T")

MAX_PROBLEMS = 1000
"""The number of problems that are listed; the others are counted."""
DELIMITERS = ",;\t|"
FIELDS = ("key", "name", "language", "signing_order", "message")
RECIPIENT_FIELDS = ("email", "first_name", "last_name", "signing_method", "order")
MEMBERS = (*FIELDS, "documents", "recipients")

_RECIPIENT = re.compile(rf"recipient([1-9]\d{{0,3}})_({'|'.join(RECIPIENT_FIELDS)}|extra_.+)")
_SURROGATES = re.compile("[\ud800-\udfff]")


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
            column = self._column(field)
            if self.recipient_numbers and (message.endswith(", got None") or message == "must not be empty"):
                message = "is empty"
            if not {column, field.partition(".")[0]} & reported:
                found.append(Problem(self.line, column, message))
        return tuple(found)

    def _column(self, field: str) -> str:
        if not self.recipient_numbers:
            return field
        if match := re.fullmatch(r"recipients\[(\d+)\]\.(.+)", field):
            return f"recipient{self.recipient_numbers[int(match[1])]}_{match[2]}"
        return "recipient1_email" if field == "recipients" else field.partition("[")[0]


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
        self.is_json: bool = start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith((b"{", b"["))
        self.header: list[str] = []
        """The column names of a CSV manifest, once it was read."""
        self.delimiter: str = ","

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def entries(self) -> Iterator[Entry]:
        """Iterate over all rows. A row that can't be read is an entry with problems and without a package."""
        self._file.seek(0)
        text = io.TextIOWrapper(self._file, "utf-8-sig", "surrogateescape", newline="")
        try:
            yield from _json_entries(text, self.folder) if self.is_json else self._csv_entries(text)
        finally:
            text.detach()

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

    def _csv_entries(self, text: IO[str]) -> Iterator[Entry]:
        line, done = 0, -1
        try:
            line, header = next(((number, line) for number, line in enumerate(text, 1) if line.strip()), (1, ""))
            # Excel may write the delimiter in a line before the header.
            if match := re.fullmatch(rf"sep=([{DELIMITERS}])\s*", header, re.IGNORECASE):
                self.delimiter, header, line = match[1], next(text, ""), line + 1
            else:
                self.delimiter = max(DELIMITERS, key=lambda each: sum(map(_is_known, _split(header, each))))
            self.header = _split(header, self.delimiter)
            names = [_normalize(cell) for cell in self.header]
            problems = _check_header(self.header, names) if header else []
            if problems:
                yield Entry(line, {}, None, tuple(Problem(line, "", problem) for problem in problems))
            if not header or any(problem.startswith("missing") for problem in problems):
                return
            done = 0
            reader = csv.DictReader(text, self.header, restval="", delimiter=self.delimiter, strict=True)
            for row in reader:
                surplus = [cell for cell in (*row.pop(None, []), row.pop("", "")) if cell.strip()]
                cells = {name: row[cell].strip() for name, cell in zip(names, self.header, strict=True) if name}
                start = line + reader.line_num - sum(cell.count("\n") for cell in row.values())
                done = reader.line_num
                if surplus:
                    yield _unreadable(start, f"{_shorten(surplus[0])} has no column")
                elif any(cells.values()):
                    yield _read_csv_row(start, row, cells, self.folder)
        except csv.Error as error:
            yield _unreadable(line + done + 1, f"invalid CSV: {error}; nothing after it was checked")


# CSV


def _split(header: str, delimiter: str) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([header.strip("\r\n")], delimiter=delimiter), [])]


def _normalize(name: str) -> str:
    """Return a column's name for comparison: people write "Signing order". Names of extra fields keep their case."""
    name = re.sub(r"[\s-]+", "_", name)
    prefix = re.match(r"recipient\d+_extra_|", name, re.IGNORECASE)
    assert prefix is not None
    return prefix[0].lower() + name[prefix.end() :] if prefix[0] else name.lower()


def _is_known(name: str) -> bool:
    name = _normalize(name)
    return name in (*FIELDS, "documents", "error") or _RECIPIENT.fullmatch(name) is not None


def _check_header(header: Sequence[str], names: Sequence[str]) -> list[str]:
    problems = []
    for number, (cell, name) in enumerate(zip(header, names, strict=True)):
        if name and not _is_known(name):
            problems.append(f"unknown column {cell!r}{_hint(name)}")
        elif name and name in names[:number]:
            problems.append(f"duplicate column {cell!r}")
    problems += [f"missing column {name!r}" for name in ("name", "language", "documents") if name not in names]
    if not any(re.fullmatch(r"recipient\d+_email", name) for name in names):
        problems.append("missing column 'recipient1_email'")
    return problems


def _hint(name: str) -> str:
    number = re.search(r"\d+", name)
    fields = [f"recipient{number[0] if number else 1}_{field}" for field in RECIPIENT_FIELDS]
    if name in RECIPIENT_FIELDS:
        return f"; did you mean 'recipient1_{name}'?"
    return did_you_mean(name, [*FIELDS, "documents", *fields])


def _read_csv_row(line: int, row: Mapping[str, str], cells: Mapping[str, str], folder: Path) -> Entry:
    found: dict[int, dict[str, Any]] = {}
    for name, cell in cells.items():
        if cell and (match := _RECIPIENT.fullmatch(name)):
            found.setdefault(int(match[1]), {})[match[2]] = cell
    numbers = sorted(found)
    recipients = []
    for number in numbers:
        named = found[number]
        extra = {name.removeprefix("extra_"): cell for name, cell in named.items() if name.startswith("extra_")}
        recipient = {name: cell for name, cell in named.items() if not name.startswith("extra_")}
        if re.fullmatch(r"\d{1,9}(\.0)?", recipient.get("order", ""), re.ASCII):
            recipient["order"] = int(float(recipient["order"]))
        recipients.append({**recipient, "extra": extra})
    fields: dict[str, Any] = {name: cells.get(name) or None for name in FIELDS}
    fields |= {"documents": _split_paths(cells["documents"]), "recipients": recipients}
    return _make_entry(line, row, fields, folder, tuple(numbers) or (1,))


def _split_paths(documents: str) -> list[str]:
    return [path.strip() for path in re.split(r"[;\r\n]", documents) if path.strip()]


# JSON


class _InvalidValueError(Exception):
    """A member has an invalid value."""


def _json_entries(lines: Iterable[str], folder: Path) -> Iterator[Entry]:
    is_first = True
    for number, text in enumerate(map(str.strip, lines), 1):
        if is_first and text and not (text.startswith("{") and text.endswith("}")):
            # A JSON array or indented JSON: every line would be a problem.
            yield _unreadable(number, "not one JSON object; a JSON manifest has one object per line")
            return
        if text:
            is_first = False
            yield _read_object(number, text, folder)


def _read_object(line: int, text: str, folder: Path) -> Entry:
    try:
        row = json.loads(text, object_pairs_hook=_reject_duplicates)
    except (ValueError, RecursionError) as error:
        return _unreadable(line, f"invalid JSON: {error}")
    except _InvalidValueError as error:
        return _unreadable(line, str(error))
    if not isinstance(row, dict):
        return _unreadable(line, f"must be an object, got {_shorten(row)}")
    return _make_entry(line, row, row, folder)


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise _InvalidValueError(f"duplicate member {name!r}")
    return dict(pairs)


# Both


def _unreadable(line: int, message: str) -> Entry:
    return Entry(line, {}, None, (Problem(line, "", message),))


def _shorten(value: object) -> str:
    """Return the value's `repr`, cut to fit a message."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


def _make_entry(
    line: int, row: Mapping[str, Any], fields: Mapping[str, Any], folder: Path, numbers: tuple[int, ...] = ()
) -> Entry:
    """Return the entry of a row; ``fields`` holds its values by the names of a JSON manifest."""
    if _SURROGATES.search(json.dumps(fields, ensure_ascii=False, default=str)):
        return _unreadable(line, "not UTF-8; save the manifest as UTF-8")
    problems = [
        Problem(line, name, f"unknown member{did_you_mean(name, MEMBERS)}")
        for name in fields
        if name not in (*MEMBERS, "error")
    ]
    entry = Entry(line, row, None, (), numbers)

    def read_list(name: str, read: Callable[[Any], T], placeholder: T) -> list[T]:
        """Read each item; an invalid one is replaced by the placeholder, so that later indexes stay right."""
        given = fields.get(name, [])
        if not isinstance(given, list):
            problems.append(Problem(line, name, f"must be a list, got {_shorten(given)}"))
            return []
        made = []
        for index, each in enumerate(given):
            try:
                made.append(read(each))
            except _InvalidValueError as error:
                problems.append(Problem(line, entry._column(f"{name}[{index}]"), str(error)))
                made.append(placeholder)
        return made

    documents = read_list("documents", lambda given: _read_document(given, folder), PdfSource(b""))
    recipients = read_list("recipients", _read_recipient, NewRecipient(""))
    named: dict[str, Any] = {name: fields.get(name) for name in FIELDS}
    package = SigningPackage(**named, documents=documents, recipients=recipients)
    return attrs.evolve(entry, package=package, problems=tuple(problems))


def _read_document(given: object, folder: Path) -> PdfSource:
    if isinstance(given, str):
        given = {"path": given}
    if not isinstance(given, dict) or not isinstance(given.get("path"), str) or not given["path"]:
        raise _InvalidValueError(f"must be a path, or an object with a path, got {_shorten(given)}")
    _check_names(given, ("path", "filename"))
    filename = given.get("filename")
    if filename is not None and (not isinstance(filename, str) or not filename.strip()):
        raise _InvalidValueError(f"filename must be a non-empty string, got {_shorten(filename)}")
    return PdfSource(folder / given["path"], filename)


def _read_recipient(given: object) -> NewRecipient:
    if not isinstance(given, dict):
        raise _InvalidValueError(f"must be an object, got {_shorten(given)}")
    _check_names(given, (*RECIPIENT_FIELDS, "extra"))
    return NewRecipient(**{"email": None, **{name: value for name, value in given.items() if value is not None}})


def _check_names(given: Mapping[str, object], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise _InvalidValueError(f"unknown member {name!r}{did_you_mean(name, known)}")


# Checks


@attrs.define
class CheckedManifest:
    """The totals of a valid manifest."""

    lines: dict[str, int] = attrs.field(factory=dict)
    """The line of each package, by its key or the hash of its content."""
    documents: int = 0
    size: int = 0


async def check_manifest(manifest: Manifest, max_pdf_bytes: int, on_entry: Callable[[], None]) -> CheckedManifest:
    """Check a manifest and all of its PDFs; raise `InvalidRequest` with all problems."""
    checked, problems = CheckedManifest(), list[Problem]()
    transient = True
    for entry in manifest.entries():
        found, is_transient = entry.problems, False
        if entry.package is not None:
            try:
                prepared = await prepare(entry.package, max_pdf_bytes)
            except InvalidRequest as error:
                is_transient = error.transient and not found
                found = entry.merge_problems(error.problems)
            else:
                prepared.close()
                checked.documents += len(prepared.documents)
                checked.size += sum(document.size for document in prepared.documents)
                first = checked.lines.setdefault(prepared.key, entry.line)
                if first != entry.line:
                    text = f"missing, and this is the same package as line {first}"
                    text += "; if both are to be sent, give each a key"
                    if entry.package.key is not None:
                        text = f"{prepared.key!r} is also the key of line {first}"
                    found = (*found, Problem(entry.line, "key", text))
        transient = transient and (is_transient or not found)
        problems += found
        on_entry()
        # Small files are read without suspending; this lets Ctrl-C through.
        await asyncio.sleep(0)
    if not checked.lines and not problems:
        problems, transient = [Problem(1, "", "the manifest has no packages")], False
    if problems:
        shown = [f"{manifest.path}, {problem}" for problem in problems[:MAX_PROBLEMS]]
        shown += [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        message = "\n  ".join([f"{count} in {manifest.path}; nothing was sent:", *shown])
        raise InvalidRequest(message, problems=shown, transient=transient)
    return checked


# Reports


class FailureReport:
    """A manifest of the failed packages, with their keys and errors. It replaces an older report."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self._manifest = manifest
        # Relative paths would point elsewhere from another folder.
        is_elsewhere = path.absolute().parent.resolve() != manifest.folder.resolve()
        self._folder = manifest.folder if is_elsewhere else Path()
        self._failed: list[tuple[Mapping[str, Any], str, str]] = []

    def check(self) -> None:
        """Raise `InvalidRequest` if the report can't be written, or would replace an unrelated file."""
        try:
            with self._partial():
                pass
        except OSError as error:
            raise unusable(f"--failures: {str(self.path)!r} cannot be written: {error.strerror}", error) from None
        if self.path.exists() and not self._manifest.is_at(self.path) and not _is_report(self.path):
            raise InvalidRequest(f"--failures: {str(self.path)!r} exists and is not a report of failures")

    def add(self, row: Mapping[str, Any], key: str, error: str) -> None:
        """Add a failed package; when the report is dispatched, the error is ignored."""
        self._failed.append((row, key, " ".join(error.split())))

    def write(self) -> bool:
        """Put the report in place, and return whether there is one. If no package failed, remove an older report.

        Raises `OSError` if the report can't be written; an older one then stays as it was.
        """
        if not self._failed:
            self.path.unlink(missing_ok=True)
            return False
        try:
            with self._partial() as (path, file):
                (self._write_json if self._manifest.is_json else self._write_csv)(file)
                file.flush()
                os.fsync(file.fileno())
                path.replace(self.path)
        except UnicodeEncodeError:
            problem = "the path of a document is not valid UTF-8"
            raise OSError(errno.EILSEQ, problem, str(self.path)) from None
        sync_folder(self.path.absolute().parent)
        return True

    @contextmanager
    def _partial(self) -> Iterator[tuple[Path, IO[str]]]:
        """Open a temporary file beside the report, and remove it unless it was renamed."""
        path = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.part")
        # The report names the same people as the manifest, so it gets the same permissions.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._manifest.mode)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
                yield path, file
        finally:
            path.unlink(missing_ok=True)

    def _write_json(self, file: IO[str]) -> None:
        for row, key, error in self._failed:
            documents = [
                {**given, "path": str(self._folder / given["path"])}
                if isinstance(given, dict)
                else str(self._folder / given)
                for given in row["documents"]
            ]
            row = {**row, "documents": documents, "key": key, "error": error}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _write_csv(self, file: IO[str]) -> None:
        columns = {_normalize(name): name for name in self._manifest.header if name}
        columns |= {name: name for name in ("key", "error") if name not in columns}
        file.write("\ufeff")
        writer = csv.writer(file, delimiter=self._manifest.delimiter)
        writer.writerow(columns.values())
        for row, key, error in self._failed:
            documents = ";".join(str(self._folder / path) for path in _split_paths(row[columns["documents"]]))
            replaced = {"key": key, "error": error, "documents": documents}
            writer.writerow([replaced.get(name) or row[column] for name, column in columns.items()])


def _is_report(path: Path) -> bool:
    """Return whether the file's first line has a key and an error."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return {b"key", b"error"} <= set(re.findall(rb"\w+", file.readline(2**20).lower()))
