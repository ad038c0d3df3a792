"""Sealed PDFs: whatever a file or the signature in it holds, there is a report that can be shown, or it is no PDF.

The judge is attacked in this process, without the limits of its worker.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator

from tests import pdfs
from tests.fuzz.running import LONGEST, Attack, Target
from tests.sealed import pdfs as sealed_pdfs

ROOM = 4_000


def attack(data: bytes) -> None:
    if data[:1] < b"\x80":
        _inspect(b"%PDF-" + data[1:])
    else:
        signature, entries = data[1 : 1 + ROOM // 2], b"/M(%s)" % data[-20:].translate(None, b"()\\\r\n")
        _inspect(sealed_pdfs.signed_pdf(lambda _: signature, room=ROOM, entries=entries))


def _inspect(data: bytes) -> None:
    for trust in (None, sealed_pdfs.sandbox_authority().certificate_pem):
        report = sealed_pdfs.judged(data, trust)
        assert report.sound == (not report.problems)
        assert (report.trusted is None) == (trust is None)
        assert report.sound or not report.trusted
        assert repr(report)
        assert json.loads(json.dumps(report.as_dict()))["size"] == len(data)
        texts = [*report.problems, *report.trust_problems, *report.signers]
        for seal in report.seals:
            texts += [seal.field, seal.subfilter, seal.subject or "", seal.issuer or "", *seal.changes]
        assert all(text.isprintable() and len(text) < 20_000 for text in texts), texts


@contextlib.contextmanager
def attacking() -> Iterator[Attack]:
    """The attack; pyHanko's log is switched off meanwhile, as in the worker."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield attack
    finally:
        logging.disable(before)


SIGNATURES = (
    sealed_pdfs.cms(b"data"),
    sealed_pdfs.cms(b"data", by_key=True),
    sealed_pdfs.cms(b"data", attributes=False, kind="rsa"),
    sealed_pdfs.cms(b"data", pss=True, kind="rsa"),
    sealed_pdfs.cms(b"data", kind="ed25519", algorithm="sha512"),
    sealed_pdfs.cms(b"data", certificates=False),
    sealed_pdfs.cms(b"data", content=b"wrapped"),
)
SIGNED = sealed_pdfs.signed_pdf(sealed_pdfs.cms, room=ROOM)
FILES = (
    SIGNED,
    sealed_pdfs.signed_pdf(sealed_pdfs.timestamp, room=ROOM, kind=sealed_pdfs.TIMESTAMP),
    sealed_pdfs.signed_pdf(lambda data: sealed_pdfs.as_ber(sealed_pdfs.cms(data)), room=ROOM),
    pdfs.update(SIGNED, {1: b"<</Type/Catalog/Pages 2 0 R/AcroForm<</Fields[6 0 R]/SigFlags 3>>/DSS<</Certs[]>>>>"}),
    pdfs.update(SIGNED, {6: pdfs.FIELD + b"/V 7 0 R/AP<</N 5 0 R>>>>"}),
)
SEEDS = (
    *(b"\x00" + data for data in FILES if len(data) < LONGEST),
    *(b"\x80" + data for data in SIGNATURES if len(data) < ROOM // 2),
    b"\x80" + sealed_pdfs.as_ber(SIGNATURES[0])[: ROOM // 2],
)
WORDS = (
    b"/ByteRange", b"/Contents", b"/M(D:", b"/Type/Sig", b"/SubFilter", b"/V", b"/Perms", b"/DSS", b"<", b">", b"<<",
    b">>", b"[", b"]", b"0", b"-1", b"99999999999", b" ", b"\n", b"7 0 R", b"startxref", b"%%EOF", b"xref", b"/Prev",
    b"/DocMDP", b"/Reference", b"/TransformMethod", b"/Lock", b"/SV", b"/Kids", b"/AcroForm", b"/Type/DocTimeStamp",
    b"/OCSPs", b"/CRLs", b"/VRI", b"/ETSI.RFC3161", b"/ETSI.CAdES.detached", b"/FieldMDP", b"/Encrypt", b"/ObjStm",
    b"20260304", b"+99'99'", b"Z", b"\x30\x80", b"\x30\x84\xff\xff\xff\xff", b"\x30\x88", b"\x00\x00", b"\x31\x00",
    b"\xa0\x80",
    b"\x24\x80", b"\x04\x00", b"\x02\x01\x01", b"\x06\x01\x80", b"\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x07\x02",
    b"\x17\x0d99", b"\x18\x0f0000", b"\x1c\x04\x00\x11\x00\x00", b"\x1e\x02\xd8\x00", b"\x0c\x02\xc3\x28", b"\x1f\xff",
)  # fmt: skip
TARGET = Target("sealed", attacking, SEEDS, WORDS)
