"""Decisions about repeats at their very limits, and in another time zone."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Iterator

import pytest

from signing_async import RetryPolicy
from signing_async.transport.retry import Decision, decide, read_retry_after

NOW = 1_800_000_000.0


def _decide(**given: float) -> Decision:
    asked = {"attempt": 1, "retry_after": None, "remaining": 600.0, "chance": 0.5, **given}
    return decide(RetryPolicy(max_attempts=2), **asked)  # type: ignore[arg-type]  # mixed keyword arguments


def test_the_last_wait_that_is_allowed() -> None:
    """A Retry-After of just the policy's cap is waited for, and one above it is not."""
    assert _decide(retry_after=60.0) == Decision(60.0)
    assert _decide(retry_after=60.001).delay is None


def test_the_words_of_a_decision() -> None:
    """They end an error's message."""
    assert _decide(attempt=2).why == "2 attempts were made"
    assert _decide(remaining=0.0).why == "its deadline leaves no time to wait"
    assert _decide(retry_after=61.0).why == "the wait of 61 s is longer than the policy's 60 s"
    assert _decide().why == ""


def test_number_of_any_length_is_read_and_a_date_of_64_characters() -> None:
    """No date is longer."""
    assert read_retry_after("7".rjust(5000, "0"), now=lambda: NOW) == 7.0
    date = email.utils.formatdate(NOW + 90, usegmt=True)
    assert read_retry_after(date + " " + "(x)".rjust(64 - len(date) - 1), now=lambda: NOW) == 90.0
    assert read_retry_after(date + " " + "(x)".rjust(65 - len(date) - 1), now=lambda: NOW) is None


@pytest.fixture
def tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process nine hours ahead of UTC."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "UTC-9")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("tokyo")
@pytest.mark.parametrize("zone", ["GMT", "-0000", "+0000"])
def test_a_date_is_utc_wherever_the_process_runs(zone: str) -> None:
    """Python reads a date in -0000 as one of no zone, which is not this machine's."""
    date = email.utils.formatdate(NOW + 90).replace("-0000", zone)
    assert read_retry_after(date, now=lambda: NOW) == 90.0


def test_a_date_in_another_zone() -> None:
    """Its offset counts, against RFC 9110, which wants GMT alone."""
    date = email.utils.formatdate(NOW + 90 + 7200).replace("-0000", "+0200")
    assert read_retry_after(date, now=lambda: NOW) == 90.0
