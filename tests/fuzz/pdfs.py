"""PDFs to upload: the preflight answers for any bytes."""

from __future__ import annotations

from contextlib import nullcontext

from signing_async.documents.preflight import preflight  # a fuzz target needs thousands of calls a second
from tests import pdfs
from tests.fuzz.running import LONGEST, Target


def attack(data: bytes) -> None:
    verdict = preflight(lambda at, count: data[at : at + count], len(data))
    assert verdict in (None, "not_pdf", "protected", "already_signed")


FILES = (
    pdfs.make_pdf(),
    pdfs.with_form(),
    pdfs.with_signature_field(b"/V 7 0 R"),
    pdfs.with_usage_rights(),
    pdfs.hybrid_pdf(b"/Encrypt 4 0 R"),
    pdfs.xref_stream_pdf(entries=b"/Encrypt 4 0 R"),
    pdfs.xref_stream_pdf(predictor=True),
    pdfs.xref_stream_pdf(entries=b"/Encrypt 4 0 R", filters=False),
    pdfs.update(pdfs.with_signature_field(b"/V 7 0 R"), {6: pdfs.FIELD + b">>"}),
    pdfs.nested_pages(),
)
LOCKED = pdfs.assemble(pdfs.basic_objects() | {6: b"<</Filter/Standard/V 1>>"}, trailer=b"/Encrypt 6 0 R")
SEEDS = tuple(data for data in (*FILES, LOCKED, pdfs.by_reportlab(form=False)) if len(data) <= LONGEST)
WORDS = (
    b"/Encrypt", b"/V", b"null", b"/Root", b"trailer", b"startxref", b"endobj", b" obj", b"<<", b">>", b"(", b")",
    b"[", b"]", b"0", b"7", b"6 0 R", b"/Sig", b"/FT", b"/Kids", b"/Fields", b"stream\n", b"%", b"\n", b"/Prev",
    b"xref", b"-1", b"/Perms", b"/UR3", b"/AcroForm", b"#", b"99", b"endstream", b"/Type", b"/Length", b"/W",
    b"/Index", b"/N", b"/First", b" ", b"9" * 18, b"9" * 5000, b"/XRefStm", b"/DecodeParms", b"/Predictor", b"%PDF-",
    b"%%EOF", b"#zz", b"<", b">", b"/Filter/FlateDecode", b"/ObjStm", b"65535", b"4294967296", b"\x00", b"/Enc#72ypt",
    b"%x\r", b"\ntrailer<</Root 1 0 R/Encrypt 6 0 R>>", b" trailer<</Root 1 0 R>>", b"/Encrypt 6 0 R", b"/Size null",
    b"/ByteRange", b"\\",
)  # fmt: skip
TARGET = Target("pdfs", lambda: nullcontext(attack), SEEDS, WORDS)
