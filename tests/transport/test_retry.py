"""The retry decisions: the table, the delays, the budget, Retry-After; and the runner that carries them out."""

from __future__ import annotations

import asyncio
import email.utils
import math
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from signing_async import ConfigurationError, RateLimited, RetryPolicy, ServerError
from signing_async.transport.retry import (
    Decision,
    FailedAttempt,
    Outcome,
    Repeat,
    Retries,
    RetryBudget,
    RetryRequested,
    Step,
    effect_of,
    read_retry_after,
    run,
    settle_time,
    step_after,
)

NOW = 1_800_000_000.0


def _failed(outcome: Outcome = Outcome.FAILED, retry_after: float | None = None) -> FailedAttempt:
    return FailedAttempt(outcome, ServerError("x", status=503), retry_after)


def _retries(
    policy: RetryPolicy | None = None,
    repeat: Repeat = Repeat.READ,
    budget: RetryBudget | None = None,
    attempts: int = 1,
) -> Retries:
    retries = Retries(policy or RetryPolicy(), repeat, budget)
    retries.attempts = attempts
    return retries


# The table


@pytest.mark.parametrize(
    ("outcome", "row"),
    [
        (Outcome.UNSENT, [Step.RETRY, Step.RETRY, Step.RETRY, Step.RETRY, Step.RETRY, Step.RETRY, Step.RAISE]),
        (Outcome.THROTTLED, [Step.RETRY, Step.RETRY, Step.RETRY, Step.RETRY, Step.RETRY, Step.RETRY, Step.RETRY]),
        (Outcome.FAILED, [Step.RETRY, Step.RECONCILE, Step.RETRY, Step.RETRY, Step.UNKNOWN, Step.RETRY, Step.RAISE]),
        (Outcome.GATEWAY, [Step.RETRY, Step.RECONCILE, Step.RETRY, Step.RETRY, Step.UNKNOWN, Step.RETRY, Step.RAISE]),
        (
            Outcome.CUT,
            [Step.RETRY, Step.RECONCILE, Step.RETRY, Step.UNKNOWN, Step.UNKNOWN, Step.RETRY_ONCE, Step.RAISE],
        ),
        (
            Outcome.LOST,
            [Step.RETRY, Step.RECONCILE, Step.RETRY, Step.UNKNOWN, Step.UNKNOWN, Step.RETRY_ONCE, Step.RAISE],
        ),
    ],
)
def test_step_after_each_outcome_is_that_of_the_table(outcome: Outcome, row: list[Step]) -> None:
    kinds = [
        Repeat.READ,
        Repeat.RECONCILED,
        Repeat.CREATE,
        Repeat.REMIND,
        Repeat.NEVER,
        Repeat.TOKEN,
        Repeat.PROBE,
    ]
    assert [step_after(outcome, kind) for kind in kinds] == row


def test_only_a_repeat_that_could_do_harm_makes_the_effect_unknown() -> None:
    """A spare draft is harmless, unless it was created for certain: then the error's body names it."""
    harmful = {Repeat.RECONCILED, Repeat.REMIND, Repeat.NEVER}
    assert {kind for kind in Repeat if effect_of(kind) == "unknown"} == harmful
    assert {kind for kind in Repeat if effect_of(kind, succeeded=True) == "unknown"} == {*harmful, Repeat.CREATE}


def test_reminder_is_not_repeated_after_a_lost_response() -> None:
    decision = _retries(repeat=Repeat.REMIND).decide(_failed(Outcome.LOST), remaining=60)
    assert decision == Decision(Step.UNKNOWN, None, "a repeat could take effect twice")


def test_token_request_is_repeated_once_after_a_lost_response() -> None:
    retries = _retries(repeat=Repeat.TOKEN)
    assert retries.decide(_failed(Outcome.LOST), remaining=60).delay is not None
    assert retries.decide(_failed(Outcome.FAILED), remaining=60).delay is not None
    decision = retries.decide(_failed(Outcome.LOST), remaining=60)
    assert (decision.delay, decision.reason) == (None, "the response was lost twice")


def test_ambiguous_write_with_a_single_attempt_is_unknown() -> None:
    decision = _retries(RetryPolicy.none(), Repeat.RECONCILED).decide(_failed(Outcome.LOST), remaining=60)
    assert decision == Decision(Step.UNKNOWN, None, "no retry is allowed")


def test_error_that_is_not_transient_is_not_retried() -> None:
    failed = FailedAttempt(Outcome.LOST, ServerError("x", status=503), may_retry=False)
    assert _retries().decide(failed, remaining=60) == Decision(Step.RETRY, None)


@pytest.mark.parametrize(
    ("outcome", "seconds", "may_be_late"),
    [(Outcome.FAILED, 0.5, False), (Outcome.CUT, 0.5, True), (Outcome.GATEWAY, 5.0, True), (Outcome.LOST, 5.0, True)],
)
def test_settle_time_is_shorter_where_an_effect_shows_at_once(
    outcome: Outcome, seconds: float, may_be_late: bool
) -> None:
    policy = RetryPolicy(base_delay=0.01)
    assert settle_time(policy, outcome) == seconds
    assert outcome.may_be_late is may_be_late
    assert _retries(policy, Repeat.RECONCILED).decide(_failed(outcome), remaining=60).delay == seconds


# Delays


@given(
    attempt=st.integers(1, 5000),
    chance=st.floats(0, 1, exclude_max=True),
    base=st.floats(0, 1e6),
    most=st.floats(0, 1e6),
    retry_after=st.none() | st.floats(0, 1e9),
    remaining=st.floats(-10, 1e9),
)
def test_delay_is_never_shorter_than_retry_after_and_never_past_the_deadline(
    attempt: int, chance: float, base: float, most: float, retry_after: float | None, remaining: float
) -> None:
    policy = RetryPolicy(max_attempts=10_000, base_delay=base, max_delay=most)
    failed = _failed(retry_after=retry_after)
    decision = _retries(policy, attempts=attempt).decide(failed, remaining=remaining, chance=chance)
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
        [
            _retries(policy, attempts=n).decide(_failed(), remaining=60, chance=chance).delay
            for chance in (0.0, 0.999999)
        ]
        for n in (1, 2, 3, 4)
    ]
    assert [round(high or 0, 3) for _, high in ends] == [1.0, 2.0, 4.0, 5.0]
    assert [low for low, _ in ends] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("attempts", "retry_after", "remaining", "reason"),
    [
        (5, None, 600.0, "5 attempts were made"),
        (1, 60.001, 600.0, "the wait of 60.001 s is longer than the policy's 60 s"),
        (1, None, 0.0, "the deadline leaves no time to wait"),
    ],
)
def test_decision_to_stop_names_its_reason(
    attempts: int, retry_after: float | None, remaining: float, reason: str
) -> None:
    decision = _retries(attempts=attempts).decide(_failed(retry_after=retry_after), remaining=remaining)
    assert (decision.delay, decision.reason) == (None, reason)


def test_retry_after_of_just_the_cap_is_waited_for() -> None:
    assert _retries().decide(_failed(retry_after=60.0), remaining=600) == Decision(Step.RETRY, 60.0)


def test_policy_none_allows_one_attempt() -> None:
    decision = _retries(RetryPolicy.none()).decide(_failed(), remaining=10)
    assert (decision.delay, decision.reason) == (None, "no retry is allowed")


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


# 429


def _throttled(retry_after: float | None) -> FailedAttempt:
    return FailedAttempt(Outcome.THROTTLED, RateLimited("x", status=429), retry_after)


def test_rate_limiter_pauses_for_the_delay_after_a_429() -> None:
    decision = _retries(attempts=2).decide(_throttled(3.0), remaining=60)
    assert decision.delay is not None
    assert decision.pause == decision.delay >= 3.0


def test_first_429_adds_no_jitter_to_its_retry_after() -> None:
    decision = _retries(RetryPolicy(base_delay=30.0)).decide(_throttled(3.0), remaining=60)
    assert decision == Decision(Step.RETRY, 3.0, pause=3.0)


def test_rate_limiter_pauses_although_the_call_cannot_wait() -> None:
    assert _retries().decide(_throttled(30.0), remaining=10).pause == 30.0
    assert _retries(RetryPolicy.none()).decide(_throttled(None), remaining=10).pause == 0.0


def test_wait_beyond_the_cap_does_not_pause_other_calls() -> None:
    decision = _retries().decide(_throttled(86_400.0), remaining=600)
    assert (decision.delay, decision.pause) == (None, 0.0)


def test_token_endpoint_pauses_for_the_cap_at_most() -> None:
    decision = _retries(repeat=Repeat.TOKEN).decide(_throttled(86_400.0), remaining=600)
    assert (decision.delay, decision.pause) == (None, 60.0)


def test_failed_probe_is_not_repeated() -> None:
    assert _retries(repeat=Repeat.PROBE).decide(_failed(), remaining=60) == Decision(Step.RAISE, None)


def test_429_does_not_count_while_other_requests_are_accepted() -> None:
    retries = _retries(RetryPolicy(max_attempts=2), attempts=0)
    for _ in range(10):
        retries.attempts += 1
        assert retries.decide(_throttled(1.0), remaining=60, others_accepted=True).delay is not None
    retries.attempts += 1
    assert retries.decide(_throttled(1.0), remaining=60).delay == 1.0
    retries.attempts += 1
    assert retries.decide(_throttled(1.0), remaining=60).reason == "2 attempts were made"


# The budget


def test_budget_allows_two_requests_a_call_in_an_outage() -> None:
    budget, requests = RetryBudget(), 0
    calls = 1000
    for _ in range(calls):
        budget.deposit()
        requests += 1
        for _ in range(4):
            requests += budget.withdraw()
    assert requests <= 2 * calls
    assert not budget.withdraw()


def test_budget_lets_a_lone_call_make_all_its_attempts() -> None:
    """Its success is refunded."""
    budget = RetryBudget()
    budget.deposit()
    assert all(budget.withdraw() for _ in range(8))
    budget.refund(8)
    assert sum(budget.withdraw() for _ in range(100)) == 20


def test_deposits_of_pending_calls_are_kept_beyond_the_maximum() -> None:
    budget = RetryBudget()
    for _ in range(200):
        budget.deposit()
    for _ in range(100):
        budget.refund(0)
        budget.end_call()
    assert sum(budget.withdraw() for _ in range(500)) == 90
    budget.refund(500)
    assert sum(budget.withdraw() for _ in range(500)) == 90
    budget.refund(500)
    for _ in range(100):
        budget.end_call()
    assert sum(budget.withdraw() for _ in range(500)) == 40
    budget.deposit()
    assert not budget.withdraw(), "a call deposits half a credit"
    budget.deposit()
    assert budget.withdraw()


def test_retry_withdraws_from_the_budget_and_a_success_refunds_it() -> None:
    budget = RetryBudget()
    retries = _retries(budget=budget)
    for _ in range(3):
        assert retries.decide(_failed(), remaining=60).delay is not None
    retries.succeed()
    assert sum(budget.withdraw() for _ in range(100)) == 20
    decision = retries.decide(_failed(), remaining=60)
    assert (decision.delay, decision.reason) == (None, "too many calls are failing: the retry budget is used up")


def test_retry_after_a_429_is_free_and_so_is_a_reading() -> None:
    budget = RetryBudget()
    while budget.withdraw():
        pass
    assert _retries(budget=budget).decide(_throttled(1.0), remaining=60).delay == 1.0
    reading = _retries()
    assert reading.decide(_failed(), remaining=60).delay is not None
    reading.succeed()


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


def test_retry_after_date_has_at_most_64_characters() -> None:
    date = email.utils.formatdate(NOW + 90, usegmt=True)
    assert read_retry_after(date + " " + "(x)".rjust(64 - len(date) - 1), now=lambda: NOW) == 90.0
    assert read_retry_after(date + " " + "(x)".rjust(65 - len(date) - 1), now=lambda: NOW) is None


@given(st.text(max_size=80))
def test_no_retry_after_raises(value: str) -> None:
    result = read_retry_after(value, now=lambda: NOW)
    assert result is None or result >= 0


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
def test_retry_after_date_is_utc_in_every_local_time_zone(zone: str) -> None:
    """Python reads a date in -0000 as one without a zone."""
    date = email.utils.formatdate(NOW + 90).replace("-0000", zone)
    assert read_retry_after(date, now=lambda: NOW) == 90.0


def test_retry_after_date_may_have_an_offset() -> None:
    """RFC 9110 allows only GMT."""
    date = email.utils.formatdate(NOW + 90 + 7200).replace("-0000", "+0200")
    assert read_retry_after(date, now=lambda: NOW) == 90.0


# The runner


async def test_runner_sleeps_exactly_the_requested_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    delays = [0.25, 7.0, 0.0]

    async def attempt() -> str:
        if delays:
            raise RetryRequested(delays.pop(0))
        return "done"

    assert await run(attempt) == "done"
    assert slept == [0.25, 7.0, 0.0]


async def test_runner_lets_every_other_exception_through() -> None:
    async def attempt() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await run(attempt)


PYTHON_3_14 = """
import asyncio, inspect, warnings

def iscoroutinefunction(function):
    warnings.warn(
        "'asyncio.iscoroutinefunction' is deprecated and slated for removal in Python 3.16;"
        " use inspect.iscoroutinefunction() instead",
        DeprecationWarning,
        stacklevel=2,
    )
    return inspect.iscoroutinefunction(function)

asyncio.iscoroutinefunction = iscoroutinefunction
import signing_async.transport.retry
"""


def test_import_raises_no_warning_where_python_deprecates_a_function_that_backoff_calls() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", PYTHON_3_14], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
