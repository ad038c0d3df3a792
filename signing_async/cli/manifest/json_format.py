"""JSON lines manifests: one object for each package.

The members are named like the columns of a CSV file; ``documents`` and ``recipients`` are lists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..._toml import did_you_mean
from ...dispatch.package import NewRecipient
from ...documents.source import PdfSource
from .rows import FIELDS, RECIPIENT_FIELDS, Entry, Lines, Problem, make_package, shorten

__all__ = ["JsonFormat"]

T = TypeVar("T")

_SURROGATE_ESCAPE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)


class JsonFormat:
    """One JSON object per line."""

    def entries(self, lines: Lines, folder: Path) -> Iterator[Entry]:
        is_first = True
        for text in lines:
            problems = lines.take_problems()
            if problems:
                yield Entry(lines.number, {}, None, problems)
            elif is_first and text.strip() and not _is_whole_object(text.strip()):
                # A JSON array or indented JSON: every line would be a problem.
                yield _invalid(lines.number, "not one JSON object; a JSON manifest has one object per line")
                return
            elif text.strip():
                is_first = False
                yield _read_object(text, lines.number, folder)

    def header(self) -> str:
        return ""

    def format_row(self, row: Mapping[str, Any], key: str, error: str, folder: Path | None) -> str:
        row = {**row, "key": key, "error": error}
        if folder is not None:
            row["documents"] = [
                {**given, "path": str(folder / given["path"])} if isinstance(given, dict) else str(folder / given)
                for given in row["documents"]
            ]
        return json.dumps(row, ensure_ascii=False) + "\n"


class _InvalidValueError(Exception):
    """A member has an invalid value."""


def _is_whole_object(line: str) -> bool:
    return line.startswith("{") and line.endswith("}")


def _read_object(text: str, line: int, folder: Path) -> Entry:
    try:
        row = json.loads(text, object_pairs_hook=_reject_duplicates)
    except (ValueError, RecursionError) as error:
        return _invalid(line, f"invalid JSON: {error}")
    except _InvalidValueError as error:
        return _invalid(line, str(error))
    if _SURROGATE_ESCAPE.search(text) and not _can_be_encoded(row):
        return _invalid(line, "lone surrogate (\\ud800 to \\udfff), which can't be encoded as UTF-8")
    if not isinstance(row, dict):
        return _invalid(line, f"must be an object, got {shorten(row)}")
    known = [*FIELDS, "documents", "recipients"]
    problems = [
        Problem(line, name, f"unknown member{did_you_mean(name, known)}")
        for name in row
        if name not in (*known, "error")
    ]
    documents = _read_list(row, "documents", line, problems, partial(_read_document, folder), PdfSource(b""))
    recipients = _read_list(row, "recipients", line, problems, _read_recipient, NewRecipient(""))
    package = make_package({name: row.get(name) for name in FIELDS}, documents, recipients)
    return Entry(line, row, package, tuple(problems))


def _invalid(line: int, message: str) -> Entry:
    return Entry(line, {}, None, (Problem(line, "", message),))


def _can_be_encoded(row: object) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise _InvalidValueError(f"duplicate member {duplicate!r}")
    return found


def _read_list(
    row: Mapping[str, Any], name: str, line: int, problems: list[Problem], read: Callable[[Any], T], placeholder: T
) -> list[T]:
    """Read each item of a list; an invalid one is replaced by the placeholder, so that later indexes stay right."""
    given = row.get(name, [])
    if not isinstance(given, list):
        problems.append(Problem(line, name, f"must be a list, got {shorten(given)}"))
        return []
    made: list[T] = []
    for index, each in enumerate(given):
        try:
            made.append(read(each))
        except _InvalidValueError as error:
            problems.append(Problem(line, f"{name}[{index}]", str(error)))
            made.append(placeholder)
    return made


def _read_document(folder: Path, given: object) -> PdfSource:
    if isinstance(given, str):
        given = {"path": given}
    if not isinstance(given, dict) or not isinstance(given.get("path"), str) or not given["path"]:
        raise _InvalidValueError(f"must be a path, or an object with a path, got {shorten(given)}")
    _check_names(given, ("path", "filename"))
    filename = given.get("filename")
    if filename is not None and (not isinstance(filename, str) or not filename.strip()):
        raise _InvalidValueError(f"filename must be a non-empty string, got {shorten(filename)}")
    return PdfSource(folder / given["path"], filename)


def _read_recipient(given: object) -> NewRecipient:
    if not isinstance(given, dict):
        raise _InvalidValueError(f"must be an object, got {shorten(given)}")
    _check_names(given, (*RECIPIENT_FIELDS, "extra"))
    return NewRecipient(**{"email": None, **{name: value for name, value in given.items() if value is not None}})


def _check_names(given: Mapping[str, object], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise _InvalidValueError(f"unknown member {name!r}{did_you_mean(name, known)}")
