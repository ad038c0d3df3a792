"""The retry decisions: the table, the delays, the budget, Retry-After; and the runner that carries them out."""

from __future__ import annotations

import email.utils
import math
import sys
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from signing_async import ConfigurationError, RetryPolicy
from signing_async.transport.retry import (
    Kind,
    Retries,
    RetryBudget,
    RetryRequested,
    Safety,
    read_retry_after,
    run,
)

NOW = 1_800_000_000.0


# Decisions


@given(
    attempt=st.integers(1, 5000),
    jitter=st.floats(0, 1, exclude_max=True),
    base=st.floats(0, 1e6),
    most=st.floats(0, 1e6),
    retry_after=st.none() | st.floats(0, 1e9),
    remaining=st.floats(-10, 1e9),
)
def test_delay_is_never_shorter_than_retry_after_and_never_past_the_deadline(
    attempt: int, jitter: float, base: float, most: float, retry_after: float | None, remaining: float
) -> None:
    """Full jitter: from nothing to the doubled base."""
    policy = RetryPolicy(max_attempts=10_000, base_delay=base, max_delay=most)
    retries = Retries(policy, Safety.READ)
    retries.attempts = attempt
    delay = retries.decide(Kind.FAILED, retry_after, remaining=remaining, jitter=jitter).delay
    expected = max(jitter * min(most, base * 2.0 ** min(attempt - 1, 60)), retry_after or 0)
    is_allowed = expected < remaining and (retry_after or 0) <= policy.max_retry_after
    assert delay == (expected if is_allowed else None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_attempts", 0),
        ("max_attempts", True),
        ("max_attempts", 2.5),
        ("base_delay", -1),
        ("max_delay", math.inf),
        ("max_retry_after", math.nan),
        ("base_delay", "1"),
        ("base_delay", True),
    ],
)
def test_policy_refuses_invalid_fields_by_name_and_value(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"^RetryPolicy\.{field}: must be an? .*, got {value!r}$"):
        RetryPolicy(**{field: value})  # type: ignore[arg-type]  # that is the point


# The budget


def test_budget_allows_two_requests_a_call_in_an_outage() -> None:
    budget, calls = RetryBudget(), 1000
    requests = calls
    for _ in range(calls):
        budget.deposit()
        requests += sum(budget.withdraw() for _ in range(4))
    assert requests <= 2 * calls
    assert not budget.withdraw()


# Retry-After


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("0", 0.0),
        ("7", 7.0),
        (" 1.5 ", 1.5),
        ("-1", None),
        ("1e9", None),
        ("soon", None),
        ("1000000000", 1e9),
        ("9" * 1000, sys.float_info.max),
        ("7".rjust(5000, "0"), 7.0),
        ("Fri, 31 Dec 2026 23:59:59 GMT" + " " * 100 + "x", None),
        ("٣", None),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 253402300799.0 - NOW),
        ("Fri, 99 Dec 2026 23:59:59 GMT", None),
        (email.utils.formatdate(NOW + 90, usegmt=True), 90.0),
        (email.utils.formatdate(NOW + 90).replace("-0000", ""), 90.0),
        (email.utils.formatdate(NOW + 90 + 7200).replace("-0000", "+0200"), 90.0),
        (email.utils.formatdate(NOW - 90, usegmt=True), 0.0),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(value: str | None, seconds: float | None) -> None:
    assert read_retry_after(value, now=lambda: NOW) == seconds


def test_retry_after_date_is_compared_with_the_servers_own_date() -> None:
    """A local clock that is an hour wrong changes nothing."""
    value, date = email.utils.formatdate(NOW + 30, usegmt=True), email.utils.formatdate(NOW, usegmt=True)
    assert read_retry_after(value, date=date, now=lambda: NOW + 3600) == 30.0
    assert read_retry_after(value, date="garbage", now=lambda: NOW) == 30.0


@given(st.text(max_size=80))
def test_no_retry_after_raises(value: str) -> None:
    result = read_retry_after(value, now=lambda: NOW)
    assert result is None or result >= 0


# The runner


async def test_repeated_call_leaves_the_filters_of_warnings_alone() -> None:
    async def once() -> None:
        if not attempts:
            attempts.append(1)
            raise RetryRequested(0)

    attempts: list[int] = []
    await run(once)  # the first call may change them, while it imports
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(2):
            warnings.warn("shown once", UserWarning, stacklevel=1)
            attempts.clear()
            await run(once)
    assert len(shown) == 1
