"""Sealed PDFs: whatever a file or the signature in it holds, there is a report that can be shown, or it is no PDF."""

from __future__ import annotations

import contextlib
import json
from contextlib import nullcontext

from signing_async import PdfRejected
from signing_async.sealed import inspect_sealed
from tests import sealed_pdfs
from tests.fuzz.promises import check_error
from tests.fuzz.running import LONGEST, Target

ROOM = 6_000


def attack(data: bytes) -> None:
    if data[:1] < b"\x80":
        _inspect(data[1:])
    else:
        signature, entries = data[1 : 1 + ROOM // 2], b"/M(%s)" % data[-20:].translate(None, b"()\\\r\n")
        _inspect(sealed_pdfs.signed_pdf(lambda _: signature, room=ROOM, entries=entries))


def _inspect(data: bytes) -> None:
    with contextlib.suppress(PdfRejected):
        report = inspect_sealed(data)
        assert report.sound == (not report.problems)
        assert repr(report)
        told = json.loads(json.dumps(report.as_dict()))
        assert told["size"] == len(data)
        for text in (*report.problems, *report.signers, *(seal.subject or "" for seal in report.seals)):
            assert text.isprintable(), text
            assert len(text) < 20_000
        return
    try:
        inspect_sealed(data)
    except PdfRejected as error:
        check_error(error)


SIGNATURES = tuple(
    sealed_pdfs.cms(b"data", **options)
    for options in (
        {},
        {"by_key": True},
        {"attributes": False, "kind": "rsa"},
        {"pss": True, "kind": "rsa"},
        {"kind": "ed25519", "algorithm": "sha512"},
        {"certificates": False},
        {"content": b"wrapped"},
    )
)  # fmt: skip
FILES = (
    sealed_pdfs.signed_pdf(sealed_pdfs.cms, room=ROOM),
    sealed_pdfs.signed_pdf(sealed_pdfs.timestamp, room=ROOM),
    sealed_pdfs.signed_pdf(lambda data: sealed_pdfs.as_ber(sealed_pdfs.cms(data)), room=ROOM),
)
SEEDS = (
    *(b"\x00" + data for data in FILES if len(data) < LONGEST),
    *(b"\x80" + data for data in SIGNATURES if len(data) < ROOM // 2),
    b"\x80" + sealed_pdfs.as_ber(SIGNATURES[0])[: ROOM // 2],
)
WORDS = (
    b"/ByteRange", b"/Contents", b"/M(D:", b"/Type/Sig", b"/SubFilter", b"/V", b"/Perms", b"/DSS", b"<", b">", b"<<",
    b">>", b"[", b"]", b"0", b"-1", b"99999999999", b" ", b"\n", b"7 0 R", b"startxref", b"%%EOF", b"xref", b"/Prev",
    b"20260304", b"+99'99'", b"Z", b"\x30\x80", b"\x30\x84\xff\xff\xff\xff", b"\x30\x88", b"\x00\x00", b"\x31\x00",
    b"\xa0\x80",
    b"\x24\x80", b"\x04\x00", b"\x02\x01\x01", b"\x06\x01\x80", b"\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x07\x02",
    b"\x17\x0d99", b"\x18\x0f0000", b"\x1c\x04\x00\x11\x00\x00", b"\x1e\x02\xd8\x00", b"\x0c\x02\xc3\x28", b"\x1f\xff",
)  # fmt: skip
TARGET = Target("sealed", lambda: nullcontext(attack), SEEDS, WORDS)
