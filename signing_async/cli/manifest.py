"""Manifests of signing packages: read and checked before anything is sent, and written as reports of failures.

A row of a CSV manifest becomes an object like a line of a JSON manifest, and both are checked in the same way.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from .._files import unusable
from .._toml import did_you_mean
from ..dispatch.package import NewRecipient, SigningPackage, prepare
from ..documents.source import PdfSource
from ..errors import InvalidRequest
from .command_base import replace_file

_FIELDS = ("key", "name", "language", "signing_order", "message")
_RECIPIENT_FIELDS = ("email", "first_name", "last_name", "signing_method", "order")
_MEMBERS = (*_FIELDS, "documents", "recipients", "error")
_RECIPIENT = re.compile(rf"recipient([1-9]\d{{0,3}})_({'|'.join(_RECIPIENT_FIELDS)}|extra_.+)")


@attrs.frozen
class Entry:
    """One row of a manifest: a package, or the problems that keep it from being one."""

    line: int
    row: Mapping[str, Any] = {}
    package: SigningPackage | None = None
    problems: Sequence[str] = ()
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
        if path.exists() and not path.is_file():
            raise InvalidRequest(f"{path}: not a regular file")
        try:
            content = path.read_bytes()
            self.mode: int = path.stat().st_mode
        except OSError as error:
            raise unusable(f"{path}: cannot be opened: {error.strerror}", error) from None
        try:
            self._text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise InvalidRequest(
                f"{path}, line {line}: not UTF-8; save the manifest as UTF-8 (in Excel: 'CSV UTF-8')"
            ) from None
        self.is_json: bool = self._text.lstrip().startswith(("{", "["))
        self.columns: list[str] = []
        """The normalized names of a CSV manifest's columns, once it was read."""
        first = next((line for line in self._text.splitlines() if line.strip()), "")
        self.delimiter: str = max(",;\t|", key=first.count)

    def entries(self) -> Iterator[Entry]:
        return self._json_entries() if self.is_json else self._csv_entries()

    def _csv_entries(self) -> Iterator[Entry]:
        reader = csv.DictReader(io.StringIO(self._text, newline=""), restval="", delimiter=self.delimiter, strict=True)
        try:
            header = list(reader.fieldnames or ())
            self.columns = [_normalize(name) for name in header]
            # Columns without a name are told apart by a number. No name contains a space.
            reader.fieldnames = [name or f" {number}" for number, name in enumerate(self.columns)]
            if problems := _check_header(header, self.columns):
                yield Entry(1, problems=problems)
                if any(problem.startswith("missing") for problem in problems):
                    return
            for row in reader:
                surplus = [*(row.pop(None, None) or ()), *(row.pop(name) for name in list(row) if " " in name)]
                # A cell may span several lines.
                line = reader.line_num - sum(cell.count("\n") for cell in (*row.values(), *surplus))
                if any(map(str.strip, surplus)):
                    yield Entry(line, problems=[f"{next(filter(str.strip, surplus))!r} has no column"])
                elif any(map(str.strip, row.values())):
                    yield self._csv_entry(line, {name: cell.strip() for name, cell in row.items()})
        except csv.Error as error:
            problem = f"invalid CSV: {error}; nothing after it was checked"
            yield Entry(reader.reader.line_num, problems=[problem])

    def _csv_entry(self, line: int, row: Mapping[str, str]) -> Entry:
        recipients: dict[int, dict[str, Any]] = {}
        for name, cell in row.items():
            match = _RECIPIENT.fullmatch(name)
            if not cell or not match:
                continue
            recipient = recipients.setdefault(int(match[1]), {"extra": {}})
            if match[2].startswith("extra_"):
                recipient["extra"][match[2].removeprefix("extra_")] = cell
            else:
                # Spreadsheets write 1 as 1.0.
                is_number = match[2] == "order" and re.fullmatch(r"[0-9]{1,9}(\.0)?", cell)
                recipient[match[2]] = int(float(cell)) if is_number else cell
        numbers = sorted(recipients)
        fields: dict[str, Any] = {name: row.get(name) or None for name in _FIELDS}
        fields["documents"] = _split_paths(row["documents"])
        fields["recipients"] = [recipients[number] for number in numbers]
        return self._entry(line, row, fields, numbers or (1,))

    def _json_entries(self) -> Iterator[Entry]:
        is_first = True
        for line, content in enumerate(self._text.split("\n"), 1):  # strings may contain other line separators
            if not content.strip():
                continue
            if is_first and not content.strip().startswith("{"):
                # A JSON array: every line would be a problem.
                yield Entry(line, problems=["not one JSON object; a JSON manifest has one object per line"])
                return
            try:
                row = json.loads(content)
                json.dumps(row, ensure_ascii=False).encode()  # escapes such as \ud800 are not text
            except (ValueError, RecursionError) as error:
                yield Entry(line, problems=[f"invalid JSON: {error}; a JSON manifest has one object per line"])
                if is_first:  # an object of several lines: every line would be a problem
                    return
                continue
            finally:
                is_first = False
            if isinstance(row, dict):
                yield self._entry(line, row, row)
            else:
                yield Entry(line, problems=[f"must be an object, got {_shorten(row)}"])

    def _entry(
        self, line: int, row: Mapping[str, Any], fields: Mapping[str, Any], numbers: Sequence[int] = ()
    ) -> Entry:
        """Return the entry of a row; ``fields`` holds its values by the names of a JSON manifest."""
        problems = [f"{name}: unknown member{did_you_mean(name, _MEMBERS)}" for name in fields if name not in _MEMBERS]
        values: dict[str, Any] = {name: fields.get(name) for name in _FIELDS}
        makers: dict[str, tuple[Callable[[str, Any], Any], Any]] = {
            "documents": (self._document, PdfSource(b"")),
            "recipients": (_recipient, NewRecipient("")),
        }
        for name, (make, placeholder) in makers.items():
            values[name], given = [], fields.get(name, [])
            if not isinstance(given, list):
                problems.append(f"{name}: must be a list, got {_shorten(given)}")
                continue
            for index, each in enumerate(given):
                try:
                    values[name].append(make(f"{name}[{index}]", each))
                except ValueError as error:
                    problems.append(str(error))
                    values[name].append(placeholder)  # the other values are checked too
        return Entry(line, row, SigningPackage(**values), problems, numbers)  # of any types: `prepare` checks them

    def _document(self, name: str, given: Any) -> PdfSource:
        given = {"path": given} if isinstance(given, str) else given
        if not isinstance(given, dict) or not isinstance(given.get("path"), str) or not given["path"]:
            raise ValueError(f"{name}: must be a path, or an object with a path, got {_shorten(given)}")
        _check_members(f"{name}: ", given, ("path", "filename"))
        return PdfSource(self.folder / given["path"], given.get("filename"))


def _recipient(name: str, given: Any) -> NewRecipient:
    if not isinstance(given, dict):
        raise InvalidRequest(f"{name}: must be an object, got {_shorten(given)}")
    _check_members(f"{name}: ", given, (*_RECIPIENT_FIELDS, "extra"))
    return NewRecipient(**{"email": None, **{name: value for name, value in given.items() if value is not None}})


def _check_members(where: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{where}unknown member {name!r}{did_you_mean(name, known)}")


def _normalize(name: str) -> str:
    """Return a column's name for comparison: people write "Signing order". Names of extra fields keep their case."""
    name = re.sub(r"[\s-]+", "_", name.strip())
    extra = re.match(r"recipient\d+_extra_", name, re.IGNORECASE)
    return extra[0].lower() + name[extra.end() :] if extra else name.lower()


def _check_header(cells: Sequence[str], names: Sequence[str]) -> list[str]:
    problems = []
    for number, (cell, name) in enumerate(zip(cells, names, strict=True)):
        if name and name in names[:number]:
            problems.append(f"duplicate column {cell.strip()!r}")
        elif name and name not in _MEMBERS and not _RECIPIENT.fullmatch(name):
            recipient = re.search(r"\d+", name)
            known = [f"recipient{recipient[0] if recipient else 1}_{field}" for field in _RECIPIENT_FIELDS]
            meant = f"recipient1_{name}" if name in _RECIPIENT_FIELDS else name
            hint = did_you_mean(meant, [*_MEMBERS, *known])
            field = re.fullmatch(r"(recipient\d+)_(.+)", name)
            if field and not did_you_mean(field[2], _RECIPIENT_FIELDS):
                hint = f"; a field that your tenant adds is {field[1]}_extra_{field[2]}"
            problems.append(f"unknown column {cell.strip()!r}{hint}")
    required = ("name", "language", "documents", "recipient1_email")
    return problems + [f"missing column {name!r}" for name in required if name not in names]


def _split_paths(documents: str) -> list[str]:
    return [path.strip() for path in re.split(r"[;\r\n]", documents) if path.strip()]


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


@attrs.define
class CheckedManifest:
    """The totals of a valid manifest."""

    lines: dict[str, int] = attrs.field(factory=dict)
    """The line of each package, by its key or the hash of its content."""
    documents: int = 0
    size: int = 0


async def check_manifest(manifest: Manifest, max_pdf_bytes: int, on_entry: Callable[[bool], None]) -> CheckedManifest:
    """Check a manifest and all of its PDFs; raise `InvalidRequest` with all problems."""
    checked, problems = CheckedManifest(), list[str]()
    for entry in manifest.entries():
        found = list(entry.problems)
        if entry.package is not None:
            key = entry.package.key
            if key is not None and (first := checked.lines.setdefault(str(key), entry.line)) != entry.line:
                found.append(f"key: {key!r} is also the key of line {first}")
            try:
                prepared = await prepare(entry.package, max_pdf_bytes)
            except InvalidRequest as error:
                for problem in error.problems:
                    field, _, text = problem.partition(": ")
                    if any(one.startswith(field.partition(".")[0]) for one in entry.problems):
                        continue  # the value is a placeholder
                    text = re.sub(r".*, got None$|^must not be empty$", "is empty", text)
                    found.append(f"{entry.column_of(field)}: {text}")
            else:
                prepared.close()
                checked.documents += len(prepared.documents)
                checked.size += sum(document.size for document in prepared.documents)
                if key is None and (first := checked.lines.setdefault(prepared.key, entry.line)) != entry.line:
                    words = f"missing, and this is the same package as line {first}"
                    found.append(f"key: {words}; if both are to be sent, give each a key")
        problems += [f"{manifest.path}, line {entry.line}, {text}" for text in found]
        on_entry(bool(found))
        # Small files are read without suspending; this lets Ctrl-C through.
        await asyncio.sleep(0)
    if not checked.lines and not problems:
        problems = [f"{manifest.path}: the manifest has no packages"]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        message = "\n  ".join([f"{count} in {manifest.path}; nothing was sent:", *problems])
        raise InvalidRequest(message, problems=problems)
    return checked


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
        """Raise `InvalidRequest` if the folder is missing, or the report would replace another kind of file."""
        if not self.path.absolute().parent.is_dir():
            raise InvalidRequest(f"--failures: {str(self.path)!r} cannot be written: No such file or directory")
        if self.path.exists() and not self.path.samefile(self._manifest.path):
            first = b""
            if self.path.is_file():
                with self.path.open("rb") as file:
                    first = file.readline(2**20)
            if not {b"key", b"error"} <= set(re.findall(rb"\w+", first)):
                raise InvalidRequest(f"--failures: {str(self.path)!r} exists and is not a report of failures")

    def add(self, row: Mapping[str, Any], key: str, error: str) -> None:
        """Add a failed package; when the report is dispatched, the error is ignored."""
        given: Any = row["documents"]
        if isinstance(given, str):
            documents: Any = ";".join(str(self._folder / path) for path in _split_paths(given))
        else:
            objects = [one if isinstance(one, dict) else {"path": one} for one in given]
            documents = [{**one, "path": str(self._folder / one["path"])} for one in objects]
        self._failed.append({**row, "documents": documents, "key": key, "error": " ".join(error.split())})

    def write(self) -> bool:
        """Put the report in place, and return whether there is one. If no package failed, remove an older report.

        Raises `OSError` if the report can't be written; an older one then stays as it was.
        """
        if not self._failed:
            self.path.unlink(missing_ok=True)
            return False
        text = io.StringIO(newline="")
        if self._manifest.is_json:
            text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in self._failed)
        else:
            text.write("\ufeff")
            columns = dict.fromkeys([*self._manifest.columns, "key", "error"])
            writer = csv.DictWriter(text, list(columns), delimiter=self._manifest.delimiter)
            writer.writeheader()
            writer.writerows(self._failed)
        # The report names the same people as the manifest, so it gets the same permissions.
        replace_file(self.path, text.getvalue(), self._manifest.mode)
        return True
