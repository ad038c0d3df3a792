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
import contextlib
import csv
import io
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from .._files import sync_folder, unusable
from .._toml import did_you_mean
from ..dispatch.package import NewRecipient, SigningPackage, prepare
from ..documents.source import PdfSource
from ..errors import InvalidRequest

MAX_PROBLEMS = 1000
"""The number of problems that are listed; the others are counted."""
FIELDS = ("key", "name", "language", "signing_order", "message")
RECIPIENT_FIELDS = ("email", "first_name", "last_name", "signing_method", "order")
MEMBERS = (*FIELDS, "documents", "recipients", "error")

_COLUMN = re.compile(
    rf"{'|'.join(FIELDS)}|documents|error|recipient([1-9]\d{{0,3}})_({'|'.join(RECIPIENT_FIELDS)}|extra_.+)"
)


@attrs.frozen
class Entry:
    """One row of a manifest and its package, which is None if the row can't be read."""

    line: int
    row: Mapping[str, Any] = {}
    package: SigningPackage | None = None
    problems: Sequence[tuple[str, str]] = ()
    """The column and the text of each problem. The column is empty if the problem concerns the whole line."""
    recipient_numbers: Sequence[int] = ()
    """The numbers of the recipients in a CSV file's column names; empty for JSON, where they are list indexes."""

    def column_of(self, field: str) -> str:
        """Return the column of a package's field, such as ``recipient1_order`` of ``recipients[0].order``."""
        if not self.recipient_numbers:
            return field
        if match := re.fullmatch(r"recipients\[(\d+)\]\.(.+)", field):
            return f"recipient{self.recipient_numbers[int(match[1])]}_{match[2]}"
        return "recipient1_email" if field == "recipients" else field.partition("[")[0]


class Manifest:
    """A manifest as it is when this object is made. Paths in it are relative to its folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder: Path = path.absolute().parent
        try:
            self.mode: int = path.stat().st_mode
            content = path.read_bytes() if stat.S_ISREG(self.mode) else None
        except OSError as error:
            raise unusable(f"{path}: cannot be opened: {error.strerror}", error) from None
        if content is None:
            raise InvalidRequest(f"{path}: not a regular file")
        if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise InvalidRequest(f"{path}: encoded as UTF-16; save it as UTF-8 (in Excel: 'CSV UTF-8')")
        try:
            self._text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise InvalidRequest(f"{path}, line {line}: not UTF-8; save the manifest as UTF-8") from None
        self.is_json: bool = self._text.lstrip().startswith(("{", "["))
        self.header: dict[str, str] = {}
        """The columns of a CSV manifest by their normalized names, once it was read."""
        self.delimiter: str = ","

    def entries(self) -> Iterator[Entry]:
        """Iterate over all rows. A row that can't be read is an entry with problems and without a package."""
        text = io.StringIO(self._text, newline="")
        return self._json_entries(text) if self.is_json else self._csv_entries(text)

    def _csv_entries(self, text: io.StringIO) -> Iterator[Entry]:
        first = next((line for line in text if line.strip()), "")
        text.seek(0)
        # Excel may write the delimiter in a line before the header.
        separator = re.fullmatch(r"sep=([,;\t|])\s*", first, re.IGNORECASE)
        self.delimiter = separator[1] if separator else max(",;\t|", key=first.count)
        names: list[str] = []
        line = 1
        reader = csv.reader(text, delimiter=self.delimiter, strict=True)
        try:
            for cells in reader:
                number, line = line, reader.line_num + 1
                if not any(map(str.strip, cells)):
                    continue
                if separator:
                    separator = None
                elif names:
                    yield self._csv_entry(number, names, cells)
                else:
                    names = [_normalize(cell) for cell in cells]
                    self.header = {name: cell.strip() for name, cell in zip(names, cells, strict=True) if name}
                    if problems := _check_header(cells, names):
                        yield Entry(number, problems=[("", problem) for problem in problems])
                    if any(problem.startswith("missing") for problem in problems):
                        return
        except csv.Error as error:
            yield _unreadable(line, f"invalid CSV: {error}; nothing after it was checked")

    def _csv_entry(self, line: int, names: Sequence[str], cells: Sequence[str]) -> Entry:
        named = [*names, *[""] * (len(cells) - len(names))]
        row = dict.fromkeys(self.header, "")
        for name, cell in zip(named, cells, strict=False):
            if name:
                row[name] = cell.strip()
            elif cell.strip():
                return _unreadable(line, f"{_shorten(cell)} has no column")
        recipients: dict[int, dict[str, Any]] = {}
        for name, cell in row.items():
            match = _COLUMN.fullmatch(name)
            if cell and match and match[1]:
                recipient = recipients.setdefault(int(match[1]), {"extra": {}})
                if match[2].startswith("extra_"):
                    recipient["extra"][match[2].removeprefix("extra_")] = cell
                else:
                    # Spreadsheets write 1 as 1.0.
                    is_number = match[2] == "order" and re.fullmatch(r"[0-9]{1,9}(\.0)?", cell)
                    recipient[match[2]] = int(float(cell)) if is_number else cell
        numbers = sorted(recipients)
        fields: dict[str, Any] = {name: row.get(name) or None for name in FIELDS}
        fields["documents"] = _split_paths(row["documents"])
        fields["recipients"] = [recipients[number] for number in numbers]
        return _make_entry(line, row, fields, self.folder, numbers or (1,))

    def _json_entries(self, text: io.StringIO) -> Iterator[Entry]:
        is_first = True
        for line, content in enumerate(map(str.strip, text), 1):
            if is_first and content and not (content.startswith("{") and content.endswith("}")):
                # A JSON array or indented JSON: every line would be a problem.
                yield _unreadable(line, "not one JSON object; a JSON manifest has one object per line")
                return
            if content:
                is_first = False
                yield self._json_entry(line, content)

    def _json_entry(self, line: int, content: str) -> Entry:
        try:
            row = json.loads(content, object_pairs_hook=_without_duplicates)
        except (ValueError, RecursionError) as error:
            return _unreadable(line, f"invalid JSON: {error}")
        if not isinstance(row, dict):
            return _unreadable(line, f"must be an object, got {_shorten(row)}")
        return _make_entry(line, row, row, self.folder)


def _normalize(name: str) -> str:
    """Return a column's name for comparison: people write "Signing order". Names of extra fields keep their case."""
    name = re.sub(r"[\s-]+", "_", name.strip())
    extra = re.match(r"recipient\d+_extra_", name, re.IGNORECASE)
    return extra[0].lower() + name[extra.end() :] if extra else name.lower()


def _check_header(cells: Sequence[str], names: Sequence[str]) -> list[str]:
    problems = []
    for number, (cell, name) in enumerate(zip(cells, names, strict=True)):
        if name and not _COLUMN.fullmatch(name):
            recipient = re.search(r"\d+", name)
            known = [f"recipient{recipient[0] if recipient else 1}_{field}" for field in RECIPIENT_FIELDS]
            meant = f"recipient1_{name}" if name in RECIPIENT_FIELDS else name
            problems.append(f"unknown column {cell.strip()!r}{did_you_mean(meant, [*FIELDS, 'documents', *known])}")
        elif name and name in names[:number]:
            problems.append(f"duplicate column {cell.strip()!r}")
    problems += [f"missing column {name!r}" for name in ("name", "language", "documents") if name not in names]
    if not any(re.fullmatch(r"recipient\d+_email", name) for name in names):
        problems.append("missing column 'recipient1_email'")
    return problems


def _split_paths(documents: str) -> list[str]:
    return [path.strip() for path in re.split(r"[;\r\n]", documents) if path.strip()]


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate member {next(name for name in names if names.count(name) > 1)!r}")
    return members


def _unreadable(line: int, message: str) -> Entry:
    return Entry(line, problems=[("", message)])


def _shorten(value: object) -> str:
    """Return the value's `repr`, cut to fit a message."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


def _make_entry(
    line: int, row: Mapping[str, Any], fields: Mapping[str, Any], folder: Path, numbers: Sequence[int] = ()
) -> Entry:
    """Return the entry of a row; ``fields`` holds its values by the names of a JSON manifest."""
    if re.search("[\ud800-\udfff]", json.dumps(fields, ensure_ascii=False)):  # from an escape in JSON
        return _unreadable(line, "not UTF-8; save the manifest as UTF-8")
    problems = [(name, f"unknown member{did_you_mean(name, MEMBERS)}") for name in fields if name not in MEMBERS]
    values: dict[str, Any] = {name: fields.get(name) for name in FIELDS}
    for name in ("documents", "recipients"):
        given = fields.get(name, [])
        made: list[Any] = []
        if not isinstance(given, list):
            problems.append((name, f"must be a list, got {_shorten(given)}"))
            given = []
        for index, each in enumerate(given):
            value, problem = _read_document(each, folder) if name == "documents" else _read_recipient(each)
            made.append(value)  # also if it is invalid, so that later indexes stay right
            if problem:
                problems.append((f"{name}[{index}]", problem))
        values[name] = made
    return Entry(line, row, SigningPackage(**values), problems, numbers)  # of any types: `prepare` checks them


def _read_document(given: object, folder: Path) -> tuple[PdfSource, str | None]:
    """Return the document and its problem."""
    if isinstance(given, str):
        given = {"path": given}
    if not isinstance(given, dict) or not isinstance(given.get("path"), str) or not given["path"]:
        return PdfSource(b""), f"must be a path, or an object with a path, got {_shorten(given)}"
    filename = given.get("filename")
    if filename is not None and (not isinstance(filename, str) or not filename.strip()):
        return PdfSource(b""), f"filename must be a non-empty string, got {_shorten(filename)}"
    return PdfSource(folder / given["path"], filename), _unknown(given, ("path", "filename"))


def _read_recipient(given: object) -> tuple[NewRecipient, str | None]:
    """Return the recipient and its problem."""
    if not isinstance(given, dict):
        return NewRecipient(""), f"must be an object, got {_shorten(given)}"
    if problem := _unknown(given, (*RECIPIENT_FIELDS, "extra")):
        return NewRecipient(""), problem
    return NewRecipient(**{"email": None, **{name: value for name, value in given.items() if value is not None}}), None


def _unknown(given: Mapping[str, object], known: Sequence[str]) -> str | None:
    names = [name for name in given if name not in known]
    return f"unknown member {names[0]!r}{did_you_mean(names[0], known)}" if names else None


@attrs.define
class CheckedManifest:
    """The totals of a valid manifest."""

    lines: dict[str, int] = attrs.field(factory=dict)
    """The line of each package, by its key or the hash of its content."""
    documents: int = 0
    size: int = 0


async def check_manifest(manifest: Manifest, max_pdf_bytes: int, on_entry: Callable[[], None]) -> CheckedManifest:
    """Check a manifest and all of its PDFs; raise `InvalidRequest` with all problems."""
    checked, problems = CheckedManifest(), list[str]()
    transient = True
    for entry in manifest.entries():
        found, is_transient = await _check_entry(entry, max_pdf_bytes, checked)
        transient = transient and (is_transient or not found)
        problems += [f"line {entry.line}{', ' if column else ''}{column}: {text}" for column, text in found]
        on_entry()
        # Small files are read without suspending; this lets Ctrl-C through.
        await asyncio.sleep(0)
    if not checked.lines and not problems:
        problems, transient = ["line 1: the manifest has no packages"], False
    if problems:
        shown = [f"{manifest.path}, {problem}" for problem in problems[:MAX_PROBLEMS]]
        shown += [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        message = "\n  ".join([f"{count} in {manifest.path}; nothing was sent:", *shown])
        raise InvalidRequest(message, problems=shown, transient=transient)
    return checked


async def _check_entry(
    entry: Entry, max_pdf_bytes: int, checked: CheckedManifest
) -> tuple[list[tuple[str, str]], bool]:
    """Return the columns and texts of all problems, and whether all are transient; count a valid package."""
    found = list(entry.problems)
    if entry.package is None:
        return found, False
    try:
        prepared = await prepare(entry.package, max_pdf_bytes)
    except InvalidRequest as error:
        reported = {column for column, _ in found}
        for problem in error.problems:
            field, _, text = problem.partition(": ")
            if reported.isdisjoint((field, field.partition(".")[0])):
                found.append((entry.column_of(field), re.sub(r".*, got None$|^must not be empty$", "is empty", text)))
        return found, error.transient and not entry.problems
    prepared.close()
    checked.documents += len(prepared.documents)
    checked.size += sum(document.size for document in prepared.documents)
    first = checked.lines.setdefault(prepared.key, entry.line)
    if first != entry.line and entry.package.key is not None:
        found.append(("key", f"{prepared.key!r} is also the key of line {first}"))
    elif first != entry.line:
        text = f"missing, and this is the same package as line {first}; if both are to be sent, give each a key"
        found.append(("key", text))
    return found, False


class FailureReport:
    """A manifest of the failed packages, with their keys and errors. It replaces an older report."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self._manifest = manifest
        # Relative paths would point elsewhere from another folder.
        is_elsewhere = path.absolute().parent.resolve() != manifest.folder.resolve()
        self._folder = manifest.folder if is_elsewhere else Path()
        self._failed: list[dict[str, Any]] = []

    def check(self) -> None:
        """Raise `InvalidRequest` if the report can't be written, or would replace an unrelated file."""
        try:
            with tempfile.TemporaryFile(dir=self.path.absolute().parent):
                pass
        except OSError as error:
            raise unusable(f"--failures: {str(self.path)!r} cannot be written: {error.strerror}", error) from None
        if self.path.exists() and not self.path.samefile(self._manifest.path) and not _is_report(self.path):
            raise InvalidRequest(f"--failures: {str(self.path)!r} exists and is not a report of failures")

    def add(self, row: Mapping[str, Any], key: str, error: str) -> None:
        """Add a failed package; when the report is dispatched, the error is ignored."""
        documents: Any = row["documents"]
        if isinstance(documents, str):
            documents = ";".join(str(self._folder / path) for path in _split_paths(documents))
        else:
            documents = [
                {**one, "path": str(self._folder / one["path"])} if isinstance(one, dict) else str(self._folder / one)
                for one in documents
            ]
        self._failed.append({**row, "documents": documents, "key": key, "error": " ".join(error.split())})

    def write(self) -> bool:
        """Put the report in place, and return whether there is one. If no package failed, remove an older report.

        Raises `OSError` if the report can't be written; an older one then stays as it was.
        """
        if not self._failed:
            self.path.unlink(missing_ok=True)
            return False
        folder = self.path.absolute().parent
        descriptor, name = tempfile.mkstemp(".part", f".{self.path.name}.", folder)
        part = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
                if self._manifest.is_json:
                    file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in self._failed)
                else:
                    header = self._manifest.header
                    header |= {name: name for name in ("key", "error") if name not in header}
                    file.write("\ufeff")
                    writer = csv.DictWriter(file, list(header), delimiter=self._manifest.delimiter)
                    writer.writerows([header, *self._failed])
                file.flush()
                os.fsync(descriptor)
            # The report names the same people as the manifest, so it gets the same permissions.
            with contextlib.suppress(OSError):  # not every file system has modes
                part.chmod(stat.S_IMODE(self._manifest.mode) & 0o666)
            part.replace(self.path)
        finally:
            part.unlink(missing_ok=True)
        sync_folder(folder)
        return True


def _is_report(path: Path) -> bool:
    """Return whether the file's first line has a key and an error."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return {b"key", b"error"} <= set(re.findall(rb"\w+", file.readline(2**20).lower()))
