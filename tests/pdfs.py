"""Makers of PDFs for the tests: written by hand, by other tools, signed, encrypted, and broken on purpose."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Iterable, Mapping


def pdf_string(text: str) -> bytes:
    """The literal string object for `text`, as Latin-1 where that is possible and question marks where it is not."""
    raw = text.encode("latin-1", "replace")
    return b"(" + raw.replace(b"\\", b"\\\\").replace(b"(", b"\\(").replace(b")", b"\\)") + b")"


def stream_object(data: bytes, entries: bytes = b"") -> bytes:
    """A stream object's body with a correct /Length."""
    return b"<<" + entries + b"/Length %d>>\nstream\n" % len(data) + data + b"\nendstream"


def assemble(
    objects: Mapping[int, bytes],
    *,
    root: int = 1,
    header: bytes = b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n",
    trailer: bytes = b"",
    offset: int = 0,
) -> bytes:
    """A file with a classic cross-reference table; `offset` counts what comes before it."""
    out = bytearray(header)
    starts: dict[int, int] = {}
    for number, body in objects.items():
        starts[number] = len(out) + offset
        out += b"%d 0 obj\n" % number + body + b"\nendobj\n"
    size = max(objects) + 1
    at = len(out) + offset
    out += b"xref\n0 1\n0000000000 65535 f \n"
    for first, numbers in _runs(sorted(starts)):
        out += b"%d %d\n" % (first, len(numbers)) + b"".join(b"%010d 00000 n \n" % starts[n] for n in numbers)
    out += b"trailer\n<</Size %d/Root %d 0 R" % (size, root) + trailer + b">>\nstartxref\n%d\n%%%%EOF\n" % at
    return bytes(out)


def _runs(numbers: Iterable[int]) -> list[tuple[int, list[int]]]:
    runs: list[tuple[int, list[int]]] = []
    for number in numbers:
        if runs and runs[-1][1][-1] == number - 1:
            runs[-1][1].append(number)
        else:
            runs.append((number, [number]))
    return runs


def basic_objects(text: str = "A contract", *, pages: int = 1) -> dict[int, bytes]:
    """The objects of a small document: 1 catalog, 2 pages, 3 font, then a page and its content, page by page."""
    kids = b" ".join(b"%d 0 R" % (4 + 2 * index) for index in range(pages))
    objects = {
        1: b"<</Type/Catalog/Pages 2 0 R>>",
        2: b"<</Type/Pages/Kids[" + kids + b"]/Count %d>>" % pages,
        3: b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
    }
    for index in range(pages):
        shown = pdf_string(text if pages == 1 else f"{text} ({index + 1} of {pages})")
        objects[4 + 2 * index] = (
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 595 842]/Resources<</Font<</F1 3 0 R>>>>/Contents %d 0 R>>"
            % (5 + 2 * index)
        )
        objects[5 + 2 * index] = stream_object(b"BT /F1 18 Tf 72 760 Td " + shown + b" Tj ET")
    return objects


def make_pdf(size: int = 1500, *, pages: int = 1, text: str = "A contract", seed: int = 0) -> bytes:
    """A valid PDF of `size` bytes (more only when the pages alone need more), distinct for each `seed` and `text`."""
    objects = basic_objects(text, pages=pages)
    filler = max(objects) + 1
    identity = hashlib.md5(f"{seed}/{pages}/{text}".encode()).hexdigest().encode()
    trailer = b"/ID[<" + identity + b"><" + identity + b">]"
    room = 0
    for _ in range(4):  # the length of /Length and of startxref depend on the filler's own size
        objects[filler] = stream_object(random.Random(seed).randbytes(room))
        data = assemble(objects, trailer=trailer)
        if len(data) == size or (len(data) > size and not room):
            break
        room = max(0, room + size - len(data))
    return data


def deflated(data: bytes, entries: bytes = b"") -> bytes:
    """A FlateDecode stream object's body."""
    return stream_object(zlib.compress(data), b"/Filter/FlateDecode" + entries)
