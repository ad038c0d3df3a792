"""Error answers: any status, headers and body become an exception that can be shown."""

from __future__ import annotations

from contextlib import nullcontext

from multidict import CIMultiDict, CIMultiDictProxy

from signing_async import Assumptions, NotFound
from signing_async.transport.problems import error_from
from signing_async.transport.retry import read_retry_after
from tests.fuzz.promises import TOKEN, check_error, parted
from tests.fuzz.running import Target

ASSUMPTIONS = Assumptions()


def attack(data: bytes) -> None:
    status = 300 + data[0] if data else 500
    pairs, body = parted(data[1:])
    headers = CIMultiDictProxy(CIMultiDict(pairs))
    error = error_from(
        status,
        headers,
        body,
        reason=headers.get("reason", ""),
        operation="signings.create",
        not_found=NotFound,
        retry_after=read_retry_after(headers.get("Retry-After"), date=headers.get("Date"), now=lambda: 1.8e9),
        secrets=(TOKEN,),
        assumptions=ASSUMPTIONS,
    )
    assert error.message
    check_error(error, body + data)


SEEDS = (
    b"\x64X-Request-Id: r1\nRetry-After: 3\n\n" + b'{"code": "invalid", "message": "No.", "errors": {"name": ["x"]}}',
    b"\x64\n\n" + b'{"error": {"code": 400, "details": [{"field": "a", "message": "b"}]}, "request_id": "r"}',
    b'\x7a\n\n[{"loc": ["body", 0, "email"], "msg": "bad"}, "cannot_be_sent"]',
    b'\x64\n\n{"type": "https://x/cannot-be-sent", "title": "T", "errors": [{"source": {"pointer": "#/a/b"}}]}',
    b"\xcareason: Bad\n\n<html><title>502 &amp; &#106; Bad</title></html>",
    b"\x81Retry-After: Fri, 31 Dec 1999 23:59:59 GMT\nDate: Fri, 31 Dec 1999 23:59:00 GMT\n\n",
    b'\x64\n\n{"message": "' + TOKEN.encode() + b'", "request_id": "' + TOKEN.encode() + b'"}',
    b"\x64X-Request-Id: " + TOKEN.encode() + b"\n\nbearer " + TOKEN.encode(),
)
WORDS = (
    b'"errors":', b'"error":', b'"code":', b'"message":', b'"detail":', b'"field":', b'"source":', b'"loc":', b"null",
    b'"request_id":"', b"cannot_be_sent", b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\u001b[31m", b"\\ud800",
    b"\x1b", b"&#", b"&#x", b"9" * 4400, b";", b"<title>", b"<", b">", b"Bearer ", TOKEN.encode(),
    TOKEN.encode("utf-16-le"), b"\xef\xbb\xbf", b"\xc2\x9b", b"\xe2\x80\xae", b"\n", b"\n\n", b"X-Request-Id: ",
    b"1e999", b"[" * 1100, b"\x00",
)  # fmt: skip
TARGET = Target("errors", lambda: nullcontext(attack), SEEDS, WORDS)
