"""Answers of success: any body becomes a record that can be used, or is said to be unreadable."""

from __future__ import annotations

from contextlib import nullcontext

from signing_async import Assumptions, Document, Recipient, Signing, User
from signing_async.transport.decode import Unreadable, decode_record, parse, record
from tests.fuzz.promises import check_record, check_text
from tests.fuzz.running import Target

MODELS = (Signing, Document, Recipient, User)


def attack(data: bytes) -> None:
    model = MODELS[data[0] % 4] if data else Signing
    try:
        found = decode_record(record(parse(data[1:]), Assumptions()), model)
    except Unreadable as error:
        check_text(str(error))
        return
    check_record(found)
    assert not isinstance(found, Signing) or found.state
    assert type(found) is model


SEEDS = (
    b'\x00{"id": "s1", "name": "Lease", "language": "EN", "signing_order": "parallel", "message": null, "is_draft": 1,'
    b'"is_completed": false, "cancelled_at": "2026-01-02T03:04:05Z", "updated_at": 1767322445.5,'
    b'"documents": [{"id": "d1", "name": "a", "completed_at": "2026-01-02 03:04:05,25+01", "x": {"y": [1]}}]}',
    b'\x01{"data": {"id": 7, "name": "a.pdf", "completed_at": "20260102T030405.123456789+0130"}}',
    b'\x02{"id": "r1", "email": "a@b", "order": "3", "signing_method": "fax", "first_name": "A", "phone": [[[1]]]}',
    b'\x03\xef\xbb\xbf{"user": {"id": 5, "email": null}}',
)
WORDS = (
    b'"id":', b'"name":', b'"documents":', b'"order":', b'"language":', b'"completed_at":', b'"x":', b'"data":', b"{",
    b"}", b"[", b"]", b'"', b",", b":", b"null", b"true", b"1e308", b"-0", b"9" * 400, b"NaN", b"\\ud83d", b"\\u0000",
    b"\xff", b"\xef\xbb\xbf", b"2026-W01-1", b"T24:00", b"+14:00", b"23:59:60", b"Z", b"[" * 70, b"[" * 1100, b"\xc3",
)  # fmt: skip
TARGET = Target("answers", lambda: nullcontext(attack), SEEDS, WORDS)
