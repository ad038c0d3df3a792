"""Find PDFs that the service is sure to refuse, by searching bytes: a file about which there is doubt passes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

__all__ = ["BLOCK", "Read", "Verdict", "preflight"]

Verdict: TypeAlias = Literal["not_pdf", "protected", "already_signed"]
Read: TypeAlias = Callable[[int, int], bytes | bytearray]
"""Returns the bytes of a file from an offset, up to a number of them."""

BLOCK: Final = 1024 * 1024
"""A file is searched in blocks of this size. A search holds the interpreter's lock for one block at most."""
_STEP = BLOCK - 64  # blocks overlap, so that each word is whole in one of them

# Readers look for the header, and for `startxref`, in this many bytes at the start and at the end.
_EDGE = 1024
_MARK_SIZE = 64
# A dictionary, or what precedes `/ByteRange` in one: the signature itself may come first, as hexadecimal digits.
_TRAILER_SIZE = 16 * 1024
_SIGNATURE_SIZE = 256 * 1024
_BYTE_RANGE = b"/ByteRange"
_STRING = rb"\((?:[^()\\]|\\.|\((?:[^()\\]|\\.)*+\))*+\)"
_START = re.compile(rb"startxref\s+([0-9]{1,12})")
_TABLE = re.compile(rb"\s*xref")
_TRAILER = re.compile(rb"trailer\s*<<")
_STREAM = re.compile(rb"\s*[0-9]{1,10}\s+[0-9]{1,5}\s+obj")
_STRINGS = re.compile(_STRING, re.DOTALL)
_PART = re.compile(
    rb"%b|%%[^\r\n]*+|(?P<open><<)|(?P<close>>>)"
    rb"|/Encrypt\s*+(?:(?P<here><<)|(?P<ref>[0-9]{1,10}\s++[0-9]{1,5})\s++R(?![^\s\0()<>\[\]{}/%%]))" % _STRING,
    re.DOTALL,
)
_ENTRY_OF_RIGHTS = re.compile(rb"/UR3?[^A-Za-z0-9]")
# What an update contains that may take a signature back: its field, all fields, or objects that are compressed.
_FIELDS = (b"/FT/Sig", b"/FT /Sig", b"/Fields", b"/ObjStm")


def preflight(read: Read, size: int) -> Verdict | None:
    """Return why the service is sure to refuse this file, or None.

    "not_pdf": no header, or no object. "protected": encrypted, with any password. "already_signed": signed, if the
    file bears no usage rights, and no later update may have removed the signature. The size is not checked.

    >>> preflight(lambda at, count: b"Dear Sir or Madam"[at : at + count], 17)
    'not_pdf'
    """
    header = read(0, _EDGE).find(b"%PDF-")
    if header < 0 or _find(read, size, b"obj", header) < 0:
        return "not_pdf"
    if _is_encrypted(read, size, header):
        return "protected"
    at = _rfind(read, size, _BYTE_RANGE)
    return "already_signed" if at > header and _is_signed(read, size, header, at) else None


def _find(read: Read, size: int, word: bytes, start: int = 0) -> int:
    """Return the offset of a word at or after ``start``, or -1."""
    for at in range(start, size, _STEP):
        if (found := read(at, BLOCK).find(word)) >= 0:
            return at + found
    return -1


def _rfind(read: Read, size: int, word: bytes) -> int:
    """Return the offset of the last occurrence of a word in the first ``size`` bytes, or -1.

    On average this takes half the time of `_find`.
    """
    for at in reversed(range(0, size, _STEP)):
        if (found := read(at, min(BLOCK, size - at)).rfind(word)) >= 0:
            return at + found
    return -1


def _is_encrypted(read: Read, size: int, header: int) -> bool:
    """Return whether the newest trailer, a dictionary of its own or of a stream, has an encryption dictionary."""
    tail = read(max(0, size - _EDGE), _EDGE)
    found = _START.match(tail, max(0, tail.rfind(b"startxref")))
    if found is None:
        return False
    for start in {header, 0}:  # offsets count from the header; in sloppy files from 0
        at = start + int(found[1])
        mark = read(at, _MARK_SIZE)
        if _TABLE.match(mark):
            at = _find(read, size, b"trailer", at)
            trailer = read(at, _TRAILER_SIZE) if at >= 0 else b""
            return _TRAILER.match(trailer) is not None and _has_encryption(read, size, trailer)
        if _STREAM.match(mark):
            return _has_encryption(read, size, read(at, _TRAILER_SIZE))
    return False


def _has_encryption(read: Read, size: int, dictionary: bytes | bytearray) -> bool:
    if b"/Encrypt" not in dictionary:
        return False
    depth = 0
    for part in _PART.finditer(dictionary):
        depth += (part.lastgroup in ("open", "here")) - (part.lastgroup == "close")
        if part.lastgroup == "here" and depth == 2:
            return True
        if part.lastgroup == "ref" and depth == 1:
            return any(_find(read, size, name) >= 0 for name in _spelled(part["ref"].split(), b"obj"))
        if part.lastgroup == "close" and not depth:
            break
    return False


def _is_signed(read: Read, size: int, header: int, at: int) -> bool:
    """Return whether the dictionary with the last `/ByteRange` is a signature that is in force."""
    before = read(max(0, at - _SIGNATURE_SIZE), min(at, _SIGNATURE_SIZE))
    start = before.rfind(b"obj")
    name = bytes(before[max(0, start - 20) : max(0, start)]).split()[-2:]
    entries = _STRINGS.sub(b"", before[start:])
    if len(name) < 2 or b"stream" in entries or b"(" in entries:
        return False
    for one in range(0, size, _STEP):
        block = read(one, BLOCK)
        if block.rfind(b"%PDF-", max(0, header + 1 - one), max(0, at - one)) >= 0:
            return False  # the signature may be that of an attached PDF
        # The plain search takes less time, and most files do not have the word.
        if block.rfind(b"/UR") >= 0 and _ENTRY_OF_RIGHTS.search(block):
            return False
    end = _find(read, size, b"%%EOF", at)
    if end >= 0 and any(_find(read, size, word, end) >= 0 for word in _FIELDS):
        return False
    return any(_rfind(read, size, word) >= 0 for word in (*_spelled(name, b"R"), b"/ObjStm"))


def _spelled(name: list[bytes], keyword: bytes) -> list[bytes]:
    """Return how a file may spell a reference to an object, or its start."""
    return [space + b" ".join((*name, keyword)) for space in (b" ", b"\n", b"\r", b"[")]
