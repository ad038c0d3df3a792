"""Makers of PDFs for the tests: written by hand, by other tools, signed, encrypted, and broken on purpose."""

from __future__ import annotations

import hashlib
import io
import os
import random
import re
import shutil
import subprocess
import zlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, Literal


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


def in_one_table(data: bytes) -> bytes:
    """The same with its cross-references in one piece, as most programs write them; no offset changes."""

    def joined(found: re.Match[bytes]) -> bytes:
        return b"xref\n0 %d\n%b" % (int(found[2]) + 1, found[1])

    return re.sub(rb"xref\n0 1\n(0000000000 65535 f \n)1 ([0-9]+)\n", joined, data)


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


def nested_pages() -> bytes:
    """Three pages in a tree of three levels; the last is rotated and has an odd, inherited media box."""
    objects = basic_objects()
    objects[2] = b"<</Type/Pages/Kids[4 0 R 6 0 R]/Count 3/MediaBox[-50 -20 350.5 420]/Resources<<>>>>"
    objects[6] = b"<</Type/Pages/Parent 2 0 R/Kids[7 0 R]/Count 2/Rotate 90>>"
    objects[7] = b"<</Type/Pages/Parent 6 0 R/Kids[8 0 R 9 0 R]/Count 2/UserUnit 2>>"
    objects[8] = b"<</Type/Page/Parent 7 0 R/Contents 5 0 R/Resources<</Font<</F1 3 0 R>>>>>>"
    objects[9] = b"<</Type/Page/Parent 7 0 R/Rotate 270/CropBox[0 0 200 200]>>"
    return assemble(objects)


def with_catalog(entries: bytes, more: Mapping[int, bytes] | None = None, **options: Any) -> bytes:
    """A one-page document with further entries in its catalog and further objects (numbers from 6)."""
    objects = basic_objects() | dict(more or {})
    objects[1] = b"<</Type/Catalog/Pages 2 0 R" + entries + b">>"
    return assemble(objects, **options)


def with_form() -> bytes:
    """A form with a text field, and no signature field."""
    field = b"<</Type/Annot/Subtype/Widget/FT/Tx/T(remark)/V(none)/Rect[72 600 300 620]/P 4 0 R/F 4/DA(/F1 12 Tf 0 g)>>"
    form = b"<</Fields[6 0 R]/DR<</Font<</F1 3 0 R>>>>/DA(/F1 12 Tf 0 g)>>"
    return with_catalog(b"/AcroForm 7 0 R", {6: field, 7: form, 4: _page(b"/Annots[6 0 R]")})


def _page(entries: bytes) -> bytes:
    return (
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 595 842]/Resources<</Font<</F1 3 0 R>>>>/Contents 5 0 R"
        + entries
        + b">>"
    )


SIGNATURE = b"<</Type/Sig/Filter/Adobe.PPKLite/SubFilter/adbe.pkcs7.detached/ByteRange[0 10 20 30]/Contents<3000>>>"
FIELD = b"<</Type/Annot/Subtype/Widget/FT/Sig/T(seal)/Rect[0 0 0 0]/F 132/P 4 0 R"


def with_signature_field(
    value: bytes = b"", *, catalog: bytes = b"", field: bytes = FIELD, more: Mapping[int, bytes] | None = None
) -> bytes:
    """A signature field whose further entries are `value`: none (an empty field), /V 7 0 R (a signature), ..."""
    objects = {6: field + value + b">>", 7: SIGNATURE, 4: _page(b"/Annots[6 0 R]")} | dict(more or {})
    return with_catalog(b"/AcroForm<</Fields[6 0 R]/SigFlags 3>>" + catalog, objects)


def with_usage_rights(*, key: bytes = b"UR3", in_field: bool = False) -> bytes:
    """A document that carries an Adobe usage-rights signature and no other, alone or also listed in the form."""
    perms = b"/Perms<</" + key + b" 7 0 R>>"
    return with_signature_field(b"/V 7 0 R" if in_field else b"", catalog=perms)


@cache
def decoys() -> dict[str, bytes]:
    """Valid, open, unsigned documents that carry the tell-tale words where they mean nothing."""
    words = b"trailer <</Encrypt 9 0 R/Root 1 0 R>> startxref 0 /ByteRange[0 1 2 3] /Contents<00> /FT/Sig /V 7 0 R "
    content = basic_objects()
    content[5] = stream_object(b"BT /F1 12 Tf 72 700 Td (" + words + b") Tj ET % " + words)
    string = basic_objects()
    string[6] = b"<</Title(" + words + b")>>"
    name = basic_objects()
    name[6] = b"<</#45ncrypt true/Encrypt/Encrypt>>"
    return {
        "words in a content stream": assemble(content),
        "words in a string": assemble(string, trailer=b"/Info 6 0 R"),
        "words in the trailer's strings": assemble(
            basic_objects(), trailer=b"/Note(/Encrypt 4 0 R)/More<</Encrypt 4 0 R>>"
        ),
        "words in comments": assemble(basic_objects(), header=b"%PDF-1.7\n%" + words + b"\n"),
        "words in names": assemble(name),
        "words after the end": make_pdf() + b"% " + words + b"\n",
        "a signature that nothing refers to": with_catalog(b"", {7: SIGNATURE}),
        "a signature outside any field": with_catalog(b"/Legal 7 0 R", {7: SIGNATURE}),
        "a signed field outside the form": with_catalog(
            b"/AcroForm<</Fields[]>>", {6: FIELD + b"/V 7 0 R>>", 7: SIGNATURE}
        ),
        "a text field with the signature's words": with_signature_field(
            b"/V 7 0 R", field=FIELD.replace(b"/Sig", b"/Tx")
        ),
        "an encryption entry that is null": assemble(basic_objects(), trailer=b"/Encrypt null"),
        "an encryption entry that leads nowhere": assemble(basic_objects(), trailer=b"/Encrypt 99 0 R"),
        "a signature field with a null value": with_signature_field(b"/V null"),
        "a signature field whose value leads nowhere": with_signature_field(b"/V 99 0 R"),
    }


def xref_stream_pdf(
    *,
    widths: tuple[int, int, int] = (1, 4, 2),
    predictor: bool = False,
    filters: bool = True,
    entries: bytes = b"",
    astray: int = 0,
) -> bytes:
    """A document whose cross-reference is a stream, with its catalog and pages in an object stream.

    `astray` is how far the offset of object 5 (the page's content) is wrong.
    """
    plain = basic_objects()
    hidden = [1, 2, 3, 4]
    bodies = [plain[number] for number in hidden]
    starts = [sum(len(body) + 1 for body in bodies[:index]) for index in range(len(bodies))]
    index = b" ".join(b"%d %d" % pair for pair in zip(hidden, starts, strict=True)) + b" "
    packed = index + b" ".join(bodies)
    head = b"/Type/ObjStm/N %d/First %d" % (len(hidden), len(index))
    out = bytearray(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n")
    rows = {0: (0, 0, 65535), **{number: (2, 6, at) for at, number in enumerate(hidden)}}
    for number, body in {5: plain[5], 6: deflated(packed, head) if filters else stream_object(packed, head)}.items():
        rows[number] = (1, len(out), 0)
        out += b"%d 0 obj\n" % number + body + b"\nendobj\n"
    rows[7] = (1, len(out), 0)
    rows[5] = (1, rows[5][1] + astray, 0)
    table = b"".join(
        b"".join(value.to_bytes(width, "big") for value, width in zip(rows[number], widths, strict=True))
        for number in sorted(rows)
    )
    info = b"/Type/XRef/Size 8/Root 1 0 R/W[%d %d %d]" % widths + entries
    if predictor:
        info += b"/DecodeParms<</Predictor 12/Columns %d>>" % sum(widths)
        table = _png_up(table, sum(widths))
    at = len(out)
    body = deflated(table, info) if filters else stream_object(table, info)
    return bytes(out) + b"7 0 obj\n" + body + b"\nendobj\nstartxref\n%d\n%%%%EOF\n" % at


def _png_up(table: bytes, columns: int) -> bytes:
    """The table's rows as differences to the row above, each behind the filter byte 2."""
    out = bytearray()
    above = bytes(columns)
    for at in range(0, len(table), columns):
        row = table[at : at + columns]
        out += b"\x02" + bytes((new - old) & 255 for new, old in zip(row, above, strict=True))
        above = row
    return bytes(out)


def hybrid_pdf(trailer: bytes = b"", *, listed: bool = True) -> bytes:
    """A file with a table for old readers and a stream (/XRefStm) that shows the objects hidden from them.

    The table lists the hidden objects as free, as the format wants it, or does not mention them.
    """
    objects = basic_objects()
    objects[1] = b"<</Type/Catalog/Pages 2 0 R/PieceInfo 6 0 R>>"
    out = bytearray(b"%PDF-1.5\n%\xe2\xe3\xcf\xd3\n")
    starts: dict[int, int] = {}
    for number, body in {**objects, 7: deflated(b"6 0 <</Note(hidden)>>", b"/Type/ObjStm/N 1/First 4")}.items():
        starts[number] = len(out)
        out += b"%d 0 obj\n" % number + body + b"\nendobj\n"
    stream_at = len(out)
    rows = b"\x02" + (7).to_bytes(4, "big") + b"\0" + b"\x01" + starts[7].to_bytes(4, "big") + b"\0"
    out += b"8 0 obj\n" + deflated(rows, b"/Type/XRef/Size 9/W[1 4 1]/Index[6 2]/Root 1 0 R") + b"\nendobj\n"
    table_at = len(out)
    out += b"xref\n0 %d\n0000000006 65535 f \n" % (9 if listed else 6)
    out += b"".join(b"%010d 00000 n \n" % starts[number] for number in range(1, 6))
    if listed:
        out += b"0000000007 00000 f \n0000000008 00000 f \n0000000000 00000 f \n"
    out += b"trailer\n<</Size 9/Root 1 0 R/XRefStm %d" % stream_at + trailer
    return bytes(out) + b">>\nstartxref\n%d\n%%%%EOF\n" % table_at


def update(
    data: bytes, objects: Mapping[int, bytes], *, trailer: bytes = b"", root: int = 1, size: int | None = None
) -> bytes:
    """`data` with one incremental update behind it that replaces or adds `objects`."""
    previous = int(data[data.rindex(b"startxref") + 9 : data.rindex(b"%%EOF")])
    tail = assemble(
        {**objects, (size or max(objects) + 1) - 1: objects.get((size or max(objects) + 1) - 1, b"null")},
        root=root,
        header=b"",
        trailer=b"/Prev %d" % previous + trailer,
        offset=len(data),
    )
    return data + tail


@cache
def hostile() -> dict[str, bytes]:
    """Files made to cost a parser time or memory; none is worth a signature, and some are valid all the same."""
    ten = 10 * 2**20
    deep = basic_objects()
    deep[6] = b"[" * 20_000 + b"]" * 20_000
    loop = b"<</FT/Sig/T(a)/Kids[6 0 R 8 0 R]>>"
    wide = b"<</T(a)/Kids[" + b"6 0 R " * 50_000 + b"]>>"
    inner = b"<</Root 1 0 R/Size 9/A" * 30_000
    bomb = zlib.compress(zlib.compress(bytes(40 * 2**20), 9), 9)
    return {
        "keywords: stream": b"%PDF-1.7\n" + b"stream\n" * ((ten - 9) // 7),
        "keywords: obj": b"%PDF-1.7\n" + b"1 0 obj\n" * (2**20 // 8),
        "keywords: trailer": b"%PDF-1.7\n1 0 obj\n" + b"trailer<<" * (2**20 // 9),
        "keywords: startxref": b"%PDF-1.7\n1 0 obj\n" + b"startxref\n9\n" * (2**20 // 12),
        "keywords: encrypt": b"%PDF-1.7\n1 0 obj\n" + b"trailer<</Encrypt 1 0 R>>" * (2**20 // 25),
        "open brackets": b"%PDF-1.7\n1 0 obj\n" + b"[" * (2**20),
        "open dictionaries": b"%PDF-1.7\n1 0 obj\n" + b"<</A" * (2**18),
        "open strings": b"%PDF-1.7\n1 0 obj\n" + b"(" * (2**20),
        "deep nesting": assemble(deep),
        "a trailer that nests for ever": b"%PDF-1.7\n1 0 obj null endobj\nxref\n0 1\n0000000000 65535 f \ntrailer\n"
        + inner
        + b"startxref\n29\n%%EOF\n",
        "fields in a circle": with_catalog(b"/AcroForm<</Fields[6 0 R]>>", {6: loop, 8: loop, 7: SIGNATURE}),
        "fields without end": with_catalog(b"/AcroForm<</Fields[6 0 R]>>", {6: wide, 7: SIGNATURE}),
        "a field that is its own value": with_catalog(b"/AcroForm<</Fields[6 0 R]>>", {6: b"6 0 R", 7: SIGNATURE}),
        "cross-references in a circle": assemble(basic_objects(), trailer=b"/Prev 15"),
        "pages in a circle": with_catalog(b"", {2: b"<</Type/Pages/Kids[2 0 R]/Count 1>>"}),
        "fields that share their kids": with_catalog(
            b"/AcroForm<</Fields 6 0 R>>",
            {6: b"[" + b"<</T(a)/Kids 6 0 R>>" * 20_000 + b"]", 7: SIGNATURE},
        ),
        "a compressed bomb": with_catalog(
            b"/AcroForm 9 0 R", {6: stream_object(bomb, b"/Filter[/FlateDecode/FlateDecode]")}
        ),
        "an object stream bomb": _object_stream_bomb(),
    }


def _object_stream_bomb() -> bytes:
    """The catalog is in an object stream of 160 MB that is 160 KB on disk."""
    packer = zlib.compressobj(9)
    packed = packer.compress(b"1 0 <</Type/Catalog/Pages 2 0 R>>")
    packed += b"".join(packer.compress(bytes(2**20)) for _ in range(160)) + packer.flush()
    out = bytearray(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n")
    rows = [(0, 0, 255), (2, 6, 0)]
    bodies = {n: body for n, body in basic_objects().items() if n > 1}
    for number, body in {**bodies, 6: stream_object(packed, b"/Type/ObjStm/N 1/First 4/Filter/FlateDecode")}.items():
        rows.append((1, len(out), 0))
        out += b"%d 0 obj\n" % number + body + b"\nendobj\n"
    rows.append((1, len(out), 0))
    table = b"".join(
        kind.to_bytes(1, "big") + at.to_bytes(4, "big") + more.to_bytes(1, "big") for kind, at, more in rows
    )
    stream = stream_object(table, b"/Type/XRef/Size 8/Root 1 0 R/W[1 4 1]")
    return bytes(out) + b"7 0 obj\n" + stream + b"\nendobj\nstartxref\n%d\n%%%%EOF\n" % len(out)


@cache
def damaged() -> dict[str, bytes]:
    """Files that a tolerant reader still opens."""
    good = make_pdf(3000)
    at = good.rindex(b"startxref")
    return {
        "no end": good[:at],
        "no table": good[: good.rindex(b"xref\n0")],
        "a wrong startxref": good[:at] + b"startxref\n17\n%%EOF\n",
        "a startxref a byte early": good[:at] + b"startxref\n%d\n%%%%EOF\n" % (good.rindex(b"xref\n0") - 1),
        "a startxref beyond the end": good[:at] + b"startxref\n99999999\n%%EOF\n",
        "a shifted table": good.replace(b"%\xe2\xe3\xcf\xd3\n", b"%\xe2\xe3\xcf\xd3\n% a line more\n", 1),
        "line ends changed": make_pdf(text="text only", size=0).replace(b"\n", b"\r\n"),
        "garbage after the end": good + b"\n<!-- page generated in 0.1 s -->\n" * 60,
    }


def prefixed(junk: bytes, *, absolute: bool) -> bytes:
    """A file with `junk` before its header; its offsets count from the file's start or from the header."""
    return junk + assemble(basic_objects(), offset=len(junk) if absolute else 0)


@cache
def not_pdfs() -> dict[str, bytes]:
    """Files that no reader opens."""
    return {
        "nothing": b"",
        "text": b"Dear Sir or Madam,\n" * 100,
        "html": b"<!doctype html><title>Sign in</title>" + b"<p>PDF</p>" * 50,
        "zip": b"PK\x03\x04" + bytes(range(256)) * 8,
        "png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8,
        "only a header": b"%PDF-1.7\n",
        "a header and noise": b"%PDF-1.4\n" + random.Random(1).randbytes(4000),
        "a header too late": b" " * 1100 + make_pdf(),
        "truncated early": make_pdf(4000)[:60],
        "no pages": assemble({1: b"<</Type/Catalog>>"}),
        "no page": assemble({1: b"<</Type/Catalog/Pages 2 0 R>>", 2: b"<</Type/Pages/Kids[]/Count 0>>"}),
        "no catalog": assemble({1: b"[1 2 3]"}),
    }


@cache
def by_reportlab(pages: int = 3, *, form: bool = True) -> bytes:
    """A report as reportlab writes it, with text, lines and, if there is to be a form, its text fields."""
    from reportlab.pdfgen.canvas import Canvas  # reportlab has no type hints

    out = io.BytesIO()
    canvas = Canvas(out, pagesize=(595, 842), invariant=True)
    for number in range(pages):
        canvas.drawString(72, 760, f"Page {number + 1}: the agreement")
        canvas.line(72, 750, 520, 750)
        if form:
            canvas.acroForm.textfield(name=f"remark{number}", x=72, y=600, width=200, height=20)
        canvas.showPage()
    canvas.save()
    return out.getvalue()


@cache
def by_fpdf2(pages: int = 2) -> bytes:
    """A report as fpdf2 writes it."""
    from fpdf import FPDF

    pdf = FPDF()
    pdf.set_creation_date(datetime(2024, 1, 1, tzinfo=UTC))
    for number in range(pages):
        pdf.add_page()
        pdf.set_font("helvetica", size=14)
        pdf.multi_cell(0, 8, f"Page {number + 1}: the agreement. " * 20)
    return bytes(pdf.output())


@cache
def rewritten(data: bytes, *, linearize: bool = False, object_streams: bool = False, **options: Any) -> bytes:
    """`data` as qpdf's library writes it anew."""
    import pikepdf

    out = io.BytesIO()
    mode = pikepdf.ObjectStreamMode.generate if object_streams else pikepdf.ObjectStreamMode.disable
    with pikepdf.open(io.BytesIO(data)) as pdf:
        pdf.save(out, linearize=linearize, object_stream_mode=mode, **options)
    return out.getvalue()


@cache
def encrypted(data: bytes, method: str = "AES-256", *, user: str = "", **options: bool) -> bytes:
    """`data` encrypted by qpdf's library with AES-256, AES-128, RC4-128 or RC4-40; an empty user password opens it."""
    import pikepdf

    revisions: dict[str, Literal[2, 3, 4, 6]] = {"AES-256": 6, "AES-128": 4, "RC4-128": 3, "RC4-40": 2}
    revision, aes = revisions[method], method.startswith("AES")
    settings = pikepdf.Encryption(owner="owner", user=user, R=revision, aes=aes, metadata=revision >= 4)
    return rewritten(data, encryption=settings, **options)


@cache
def _signing_material() -> tuple[Any, Any]:
    """A throw-away key and its self-signed certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Somebody Else")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2020, 1, 1, tzinfo=UTC) + timedelta(days=20_000))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


@cache
def _pkcs12(password: bytes = b"pw") -> bytes:
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, pkcs12

    key, certificate = _signing_material()
    return pkcs12.serialize_key_and_certificates(b"somebody", key, certificate, None, BestAvailableEncryption(password))


@cache
def signed_by_pyhanko(data: bytes, *, certify: bool = False, field: str = "Signature1") -> bytes:
    """`data` signed (or certified) by somebody else with pyHanko."""
    from pyhanko.pdf_utils.incremental_writer import IncrementalPdfFileWriter
    from pyhanko.sign import PdfSignatureMetadata, PdfSigner, SimpleSigner

    signer = SimpleSigner.load_pkcs12_data(_pkcs12(), other_certs=[], passphrase=b"pw")
    out = io.BytesIO()
    meta = PdfSignatureMetadata(field_name=field, certify=certify)
    PdfSigner(meta, signer).sign_pdf(IncrementalPdfFileWriter(io.BytesIO(data)), output=out)
    return out.getvalue()


def have(*tools: str) -> bool:
    """Whether all these programs are installed. In CI they must be: a test that needs one then fails without it."""
    return os.environ.get("CI") == "true" or all(shutil.which(tool) for tool in tools)


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """A program's end, with what it said as text."""
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60, check=False)


def signed_by_pdfsig(data: bytes, folder: Path) -> bytes:
    """`data` signed by Poppler's pdfsig, with a key made in an NSS database in `folder`."""
    database, noise = folder / "nss", folder / "noise"
    database.mkdir()
    noise.write_bytes(random.Random(5).randbytes(64))
    (folder / "in.pdf").write_bytes(data)
    run("certutil", "-N", "-d", database, "--empty-password")
    make = ["-n", "somebody", "-s", "CN=Somebody", "-x", "-t", "CT,CT,CT", "-k", "rsa", "-g", "2048"]
    run("certutil", "-S", "-d", database, *make, "-z", noise)
    done = run(
        "pdfsig", "-nssdir", database, "-add-signature", "-nick", "somebody", folder / "in.pdf", folder / "out.pdf"
    )
    assert done.returncode == 0, done.stderr
    return (folder / "out.pdf").read_bytes()


def signed_by_mutool(folder: Path) -> bytes:
    """A document with a signature field, signed by MuPDF's mutool."""
    (folder / "in.pdf").write_bytes(with_signature_field(field=FIELD.replace(b"[0 0 0 0]", b"[72 600 300 700]")))
    (folder / "key.p12").write_bytes(_pkcs12())
    done = run("mutool", "sign", "-s", folder / "key.p12", "-P", "pw", "-o", folder / "out.pdf", folder / "in.pdf", "6")
    assert done.returncode == 0, done.stderr
    return (folder / "out.pdf").read_bytes()
