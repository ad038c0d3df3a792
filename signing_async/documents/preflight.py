"""Find PDFs that the service is sure to refuse, before anything is sent: with bounded work and no dependency.

The checks cover the trailer (`/Encrypt`), the catalog and its form (signature fields with a value). A file that
exhausts the budget, or that cannot be parsed, is left to the service.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

from .pdf_objects import START, TAIL_WINDOW, Document, signature_values
from .pdf_syntax import (
    FLAT,
    OBJECT,
    ROW,
    SPACE,
    STEP,
    STRING,
    WINDOW,
    Budget,
    Dict,
    Read,
    Ref,
    Text,
    UnreadablePdf,
    Value,
)

__all__ = ["Verdict", "glance", "preflight"]

Verdict: TypeAlias = Literal["not_pdf", "protected", "already_signed"]

BUDGET: Final = 2 * 2**20
"""The budget of one file."""

HEADER_WINDOW: Final = 1024
"""Readers look for `%PDF-` in this many bytes at the start."""

GLANCE_BUDGET: Final = 128 * 2**10
"""The budget of `glance`, about two milliseconds: it runs on the event loop."""

_HEADER = b"%PDF-"
_TRAILER = re.compile(rb"trailer")
_OBJ = re.compile(rb"obj")

# The parts of the simplest files, each parsed by one pattern: dictionaries with unescaped keys that contain only flat
# arrays and dictionaries. `Document` parses all others.
_PLAIN = rb"[^\x00\t\n\f\r ()<>\[\]{}/%#]"
_NAME = rb"/%b*+" % _PLAIN
_REFERENCE = rb"[0-9]{1,10}+%b{1,9}+[0-9]{1,5}+%b{1,9}+R" % (SPACE, SPACE)
_GAP = rb"(?:%b++|%%[^\r\n]*+)*+" % SPACE
_VALUE = b"|".join((_REFERENCE, _NAME, _PLAIN + b"++", STRING, FLAT))
_ENTRY = rb"%b%b*+(?:%b)%b" % (_NAME, SPACE, _VALUE, _GAP)
_TABLE = re.compile(
    rb"%b{0,64}+xref%b{1,64}+([0-9]{1,10})%b{1,64}+([0-9]{1,10})%b{1,64}+" % (SPACE, SPACE, SPACE, SPACE)
)
_OTHER = rb"(?:(?!/Root|/Encrypt|/XRefStm)%b)*+" % _ENTRY
# At the start of a line, where programs that repair a damaged file find it too.
_PLAIN_TRAILER = re.compile(
    rb"%b{1,65}+(?<=[\r\n])trailer%b*+<<%b*+%b/Root%b++([0-9]{1,10})%b{1,9}+([0-9]{1,5})%b{1,9}+R%b%b>>"
    % (SPACE, SPACE, SPACE, _OTHER, SPACE, SPACE, SPACE, _GAP, _OTHER)
)
_PLAIN_CATALOG = re.compile(
    rb"%b%b*+<<%b*+(?:(?!/AcroForm|/Perms)%b)*+>>%b{0,64}+endobj" % (OBJECT.pattern, SPACE, SPACE, _ENTRY, SPACE)
)


def preflight(data: bytes | bytearray | memoryview | mmap.mmap) -> Verdict | None:
    """Return why the service is sure to refuse this file, or None.

    "not_pdf": no header, or nothing that could be an object. "protected": encrypted, with any password.
    "already_signed": a signature field has a signature; empty fields and Adobe's usage rights do not count.
    None promises nothing: if the preflight cannot tell for certain and cheaply, the service decides. The size is not
    checked.

    >>> preflight(b"Dear Sir or Madam")
    'not_pdf'
    """
    with memoryview(data) as whole, whole.cast("B") as view:
        header = bytes(view[:HEADER_WINDOW]).find(_HEADER)
        if header < 0:
            return "not_pdf"
        if _is_plain(lambda at, least: view[at : at + least], len(view)):
            return None
        return _look_closely(view, header)


def glance(read: Read, size: int) -> bool:
    """Return whether a few parts of a file show that `preflight` would accept it.

    If False, `preflight` has to see the whole file.
    """
    if _is_plain(read, size):
        return True
    header = bytes(read(0, min(size, HEADER_WINDOW))).find(_HEADER)
    if header < 0:
        return False
    text = Text(b"", Budget(GLANCE_BUDGET), size - header, lambda at, least: read(header + at, least))
    try:
        return _verdict(Document(text)) is None
    except UnreadablePdf:
        return False


def _is_plain(read: Read, size: int) -> bool:
    """Return whether the file is simple and gives no reason to refuse it.

    Its newest cross-reference is one table, its trailer has no `/Encrypt`, and its catalog has no form.
    """
    tail_at = max(0, size - TAIL_WINDOW)
    tail = bytes(read(tail_at, size - tail_at))

    def window(at: int) -> bytes:
        if at >= tail_at:
            return tail[at - tail_at :]
        return bytes(read(at, min(WINDOW, size - at)))

    start = START.match(tail, max(0, tail.rfind(b"startxref")))
    if not start or bytes(read(0, min(size, len(_HEADER)))) != _HEADER:
        return False
    table_at = int(start[1])
    table = _TABLE.match(window(table_at))
    if not table:
        return False
    first, count, rows_at = int(table[1]), int(table[2]), table_at + table.end()
    trailer = _PLAIN_TRAILER.match(window(rows_at + 20 * count - 1))  # from the last row's end
    if not trailer:
        return False
    number, generation = int(trailer[1]), int(trailer[2])
    row = ROW.match(window(rows_at + 20 * (number - first))) if first <= number < first + count else None
    if not row or row[3] != b"n" or int(row[2]) != generation:
        return False
    catalog = _PLAIN_CATALOG.match(window(int(row[1])))
    return catalog is not None and (int(catalog[1]), int(catalog[2])) == (number, generation)


def _look_closely(view: memoryview, header: int) -> Verdict | None:
    """Return the verdict on a file whose `%PDF-` is at the offset ``header``."""
    budget = Budget(BUDGET)
    for start in sorted({0, header}, reverse=True):  # offsets count from the header; in sloppy files from 0
        with view[start:] as data_from_start:
            try:
                return _judge(Document(Text(data_from_start, budget)))
            except UnreadablePdf:
                continue
    return _judge_damaged(Text(view, budget))


def _judge(document: Document) -> Verdict | None:
    """Return the verdict on a file whose newest trailer can be read."""
    try:
        verdict = _verdict(document)
        if verdict:
            document.verify()  # a reader that repairs a damaged file may see another document
    except UnreadablePdf:
        return None
    return verdict


def _verdict(document: Document) -> Verdict | None:
    if isinstance(document.get(document.trailer, b"/Encrypt"), dict):
        return "protected"
    return "already_signed" if _is_signed(document, document.get_dict(document.trailer, b"/Root")) else None


def _is_signed(document: Document, catalog: Dict) -> bool:
    rights = document.get_dict(catalog, b"/Perms")
    if _is_signature(document.get(rights, b"/DocMDP")):
        return True
    usage = [rights[key] for key in (b"/UR", b"/UR3") if isinstance(rights.get(key), Ref)]
    fields = signature_values(document, document.get_dict(catalog, b"/AcroForm"))
    return any(value not in usage and _is_signature(document.resolve(value)) for value in fields)


def _is_signature(value: Value) -> bool:
    return isinstance(value, dict) and b"/ByteRange" in value and b"/Contents" in value


def _judge_damaged(text: Text) -> Verdict | None:
    """Return the verdict on a damaged file: protected if each trailer's root and `/Encrypt` are defined once."""
    if not _OBJ.search(text.data) and not _TRAILER.search(text.data):
        return "not_pdf"
    try:
        trailers = [trailer for trailer in _trailers(text) if b"/Root" in trailer]
        defined = [_is_defined(text, trailer[key]) for trailer in trailers for key in (b"/Root", b"/Encrypt")]
    except (UnreadablePdf, KeyError):
        return None
    return "protected" if defined and all(defined) else None


def _trailers(text: Text) -> Iterator[Dict]:
    for found in _TRAILER.finditer(text.data):
        text.budget.spend(STEP)
        if text.data[found.start() - 1] in b"\r\n":
            value, _ = text.value(found.end())
            if isinstance(value, dict):
                yield value


def _is_defined(text: Text, entry: Value) -> bool:
    """Return whether an entry refers to a dictionary that the file defines exactly once."""
    if not isinstance(entry, Ref):
        return False
    text.budget.spend(len(text.data) // 16)
    places = [found.start() for found in re.finditer(rb"(?<=[\r\n])%d %d obj" % entry, text.data)]
    return len(places) == 1 and isinstance(text.numbered(places[0], entry)[0], dict)
