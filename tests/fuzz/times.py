"""Timestamps and Retry-After: any text is a time, or is said to be none."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext

from signing_async.transport.decode import Unreadable, timestamp
from signing_async.transport.retry import Kind, Retries, RetryPolicy, Safety, read_retry_after
from tests.fuzz.promises import check_text
from tests.fuzz.running import Target


def attack(data: bytes) -> None:
    text, _, date = data.decode("utf-8", "surrogateescape").partition("|")
    for value in (text, _value(text)):
        try:
            moment = timestamp(value)
        except Unreadable as error:
            check_text(str(error))
        else:
            assert moment is None or moment.tzinfo is not None
            assert repr(moment)
    waited = read_retry_after(text, date=date or None, now=lambda: 1.8e9)
    if waited is not None:
        assert math.isfinite(waited)
        assert waited >= 0
        decision = Retries(RetryPolicy(), Safety.READ).decide(Kind.FAILED, waited, remaining=60.0)
        assert decision.delay is None or waited <= decision.delay < 60


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


SEEDS = (
    b"2026-01-02T03:04:05.678+02:00", b"20260102T030405Z", b"2026-W01-5 24:00", b"1767322445123", b"1767322445.25",
    b"Fri, 31 Dec 1999 23:59:59 GMT|Fri, 31 Dec 1999 23:59:00 GMT", b"120", b"Sunday, 06-Nov-94 08:49:37 GMT|",
    b"Sun Nov  6 08:49:37 1994|Sun, 06 Nov 1994 08:49:37 -0000", b"0001-01-01T00:00:00+23:59", b"9999-12-31T24:00",
)  # fmt: skip
WORDS = (
    b"T", b"Z", b"-", b":", b".", b",", b"+", b" ", b"W", b"GMT", b"UTC", b"Fri, ", b"Feb", b"Dec", b"99999", b"0000",
    b"24:00", b":60", b"e308", b"-1", b"\xe2\x88\x92", b"\xd9\xa3", b"(", b")", b"9" * 30, b"9" * 5000, b"|", b"null",
    b"true", b"[]", b"{}", b"NaN", b"Infinity", b'"', b"\x00", b"\xff",
)  # fmt: skip
TARGET = Target("times", lambda: nullcontext(attack), SEEDS, WORDS)
