"""The decisions about repeats: the table, the delays, Retry-After; and the runner that carries them out."""

from __future__ import annotations

import asyncio
import email.utils
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from signing_async import ConfigurationError, RetryPolicy
from signing_async.transport.retry import Again, Outcome, Repeat, Step, decide, read_retry_after, run, step

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("outcome", "row"),
    [
        (Outcome.UNSENT, [Step.RETRY, Step.RETRY, Step.RETRY, Step.RETRY, Step.RETRY, Step.RAISE]),
        (Outcome.THROTTLED, [Step.RETRY, Step.RETRY, Step.RETRY, Step.RETRY, Step.RETRY, Step.RETRY]),
        (Outcome.FAILED, [Step.RETRY, Step.RECONCILE, Step.RETRY, Step.RETRY, Step.RETRY, Step.RAISE]),
        (Outcome.GATEWAY, [Step.RETRY, Step.RECONCILE, Step.RETRY, Step.RETRY, Step.RETRY, Step.RAISE]),
        (Outcome.CUT, [Step.RETRY, Step.RECONCILE, Step.RETRY, Step.UNKNOWN, Step.RETRY_ONCE, Step.RAISE]),
        (Outcome.LOST, [Step.RETRY, Step.RECONCILE, Step.RETRY, Step.UNKNOWN, Step.RETRY_ONCE, Step.RAISE]),
    ],
)
def test_the_table(outcome: Outcome, row: list[Step]) -> None:
    """What follows each outcome, for reads, reconciled writes, create, remind and token requests."""
    kinds = [Repeat.READ, Repeat.RECONCILED, Repeat.CREATE, Repeat.REMIND, Repeat.TOKEN, Repeat.PROBE]
    assert [step(outcome, kind) for kind in kinds] == row


@given(
    attempt=st.integers(1, 5000),
    chance=st.floats(0, 1, exclude_max=True),
    base=st.floats(0, 1e6),
    most=st.floats(0, 1e6),
    retry_after=st.none() | st.floats(0, 1e9),
    remaining=st.floats(-10, 1e9),
)
def test_a_delay_keeps_its_promises(
    attempt: int, chance: float, base: float, most: float, retry_after: float | None, remaining: float
) -> None:
    """Never shorter than Retry-After, never past the deadline, never above the ceiling unless the service asks."""
    policy = RetryPolicy(max_attempts=10_000, base_delay=base, max_delay=most)
    decision = decide(policy, attempt=attempt, retry_after=retry_after, remaining=remaining, chance=chance)
    if retry_after is not None and retry_after > policy.max_retry_after:
        assert decision.delay is None
    elif decision.delay is not None:
        assert 0 <= decision.delay < remaining
        assert decision.delay >= (retry_after or 0)
        assert decision.delay <= max(most, retry_after or 0)
    else:
        assert max(chance * min(most, base * 2.0 ** min(attempt - 1, 60)), retry_after or 0) >= remaining


def test_delays_are_spread_over_the_whole_range() -> None:
    """Full jitter: from nothing to the doubled base."""
    policy = RetryPolicy(base_delay=1.0, max_delay=5.0)
    ends = [
        [decide(policy, attempt=n, retry_after=None, remaining=60, chance=chance).delay for chance in (0.0, 0.999999)]
        for n in (1, 2, 3, 4)
    ]
    assert [round(high or 0, 3) for _, high in ends] == [1.0, 2.0, 4.0, 5.0]
    assert [low for low, _ in ends] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"attempt": 5}, "5 attempts were made"),
        ({"retry_after": 61.0}, "longer than the policy's 60 s"),
        ({"remaining": 0.0}, "deadline leaves no time"),
    ],
)
def test_a_refusal_says_why(settings: dict[str, float], why: str) -> None:
    """A decision to stop names its reason."""
    asked = {"attempt": 1, "retry_after": None, "remaining": 10.0, "chance": 0.5, **settings}
    decision = decide(RetryPolicy(), **asked)  # type: ignore[arg-type]  # mixed keyword arguments
    assert decision.delay is None
    assert why in decision.why


def test_no_retry_policy() -> None:
    """none() allows one attempt."""
    decision = decide(RetryPolicy.none(), attempt=1, retry_after=None, remaining=10, chance=0.5)
    assert (decision.delay, decision.why) == (None, "no retry is allowed")


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
def test_a_policy_refuses_nonsense(field: str, value: object) -> None:
    """The error names the field and the value."""
    with pytest.raises(ConfigurationError, match=rf"RetryPolicy\.{field}.*{value!r}"):
        RetryPolicy(**{field: value})  # type: ignore[arg-type]  # that is the point


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
        ("Fri, 31 Dec 2026 23:59:59 GMT" + " " * 100 + "x", None),
        ("٣", None),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 253402300799.0 - NOW),
        ("Fri, 99 Dec 2026 23:59:59 GMT", None),
        (email.utils.formatdate(NOW + 90, usegmt=True), 90.0),
        (email.utils.formatdate(NOW + 90).replace("-0000", ""), 90.0),
        (email.utils.formatdate(NOW - 90, usegmt=True), 0.0),
    ],
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    """Seconds or an HTTP date; what is neither does not count."""
    assert read_retry_after(value, now=lambda: NOW) == seconds


def test_retry_after_by_the_servers_clock() -> None:
    """A date is taken against the answer's own, so that a clock that is an hour wrong here changes nothing."""
    value, date = email.utils.formatdate(NOW + 30, usegmt=True), email.utils.formatdate(NOW, usegmt=True)
    assert read_retry_after(value, date=date, now=lambda: NOW + 3600) == 30.0
    assert read_retry_after(value, date="garbage", now=lambda: NOW) == 30.0


@given(st.text(max_size=80))
def test_any_retry_after_is_read_or_ignored(value: str) -> None:
    """Nothing a server sends here raises."""
    result = read_retry_after(value, now=lambda: NOW)
    assert result is None or result >= 0


async def test_the_runner_waits_exactly_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt's own delay is slept, unchanged, and the result of the last is returned."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    delays = [0.25, 7.0, 0.0]

    async def attempt() -> str:
        if delays:
            raise Again(delays.pop(0))
        return "done"

    assert await run(attempt) == "done"
    assert slept == [0.25, 7.0, 0.0]


async def test_the_runner_lets_errors_through() -> None:
    """Only a wish for another attempt is caught."""

    async def attempt() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await run(attempt)
