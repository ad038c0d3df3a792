"""What is retried, when, and how often: pure decisions, and the one runner that carries them out.

======================================  =======  ================  ========  ========  =============  =======
outcome                                 reads    reconciled        create    remind    token request  probes
======================================  =======  ================  ========  ========  =============  =======
nothing was sent                        retry    retry             retry     retry     retry          raise
429                                     retry    retry             retry     retry     retry          retry
5xx                                     retry    reconcile, retry  retry     retry     retry          raise
the response was lost after sending     retry    reconcile, retry  retry     unknown   retry once     raise
======================================  =======  ================  ========  ========  =============  =======

`send`, `upload` and `add` are reconciled: the service has no idempotency keys, so its state is read before a retry.
"""

from __future__ import annotations

import email.utils
import math
import re
import sys
from collections.abc import Awaitable, Callable, Generator
from datetime import UTC
from enum import Enum
from typing import Any, TypeVar

import attrs
import backoff

from ..errors import ConfigurationError, SigningError

__all__ = [
    "AMBIGUOUS",
    "Again",
    "Decision",
    "Outcome",
    "Repeat",
    "RetryPolicy",
    "Step",
    "Trouble",
    "decide",
    "read_retry_after",
    "run",
    "settle_time",
    "step",
]

T = TypeVar("T")

_MAX_DATE = 64


def _check_seconds(instance: object, attribute: attrs.Attribute[float], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigurationError(f"RetryPolicy.{attribute.name} must be seconds, 0 or more, not {value!r}")


def _check_attempts(instance: object, attribute: attrs.Attribute[int], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"RetryPolicy.{attribute.name} must be a whole number from 1, not {value!r}")


@attrs.frozen
class RetryPolicy:
    """How a call that failed for a transient reason is retried.

    A delay is random between 0 and ``base_delay`` doubled for each attempt, at most ``max_delay``, and never shorter
    than the service's Retry-After. A Retry-After above ``max_retry_after``, or past the call's deadline, ends the call
    with the error, which carries ``retry_after``. A 429 counts as one of ``max_attempts`` only if nothing of the
    client's was let through since the call's last attempt: a busy service is waited for until the deadline.

    ``settle`` is how long an ambiguous `send`, `upload` or `add` is read before it is repeated: so many seconds after a
    502, a 504 or a lost response, where a backend may still carry the request out, and a tenth of that after a 500 or
    503 with the service's own error, and where an idle connection was closed as the request went out.
    """

    max_attempts: int = attrs.field(default=5, validator=_check_attempts)
    base_delay: float = attrs.field(default=0.5, validator=_check_seconds)
    max_delay: float = attrs.field(default=30.0, validator=_check_seconds)
    max_retry_after: float = attrs.field(default=60.0, validator=_check_seconds)
    settle: float = attrs.field(default=5.0, validator=_check_seconds)

    @classmethod
    def none(cls) -> RetryPolicy:
        """One request for each call. An ambiguous failure is `OutcomeUnknown`, without a reading."""
        return cls(max_attempts=1)


class Outcome(Enum):
    """How an attempt failed for a reason that may be transient."""

    UNSENT = "nothing was sent"
    THROTTLED = "429"
    FAILED = "500 or 503 with the service's own error: it is done with the request"
    GATEWAY = "any other 5xx: a backend may still be working on the request"
    CUT = "an idle connection was closed as the request went out"
    LOST = "the response was lost after sending"


@attrs.frozen
class Trouble:
    """A failed attempt: what it was, and the error to raise if nothing better follows."""

    outcome: Outcome
    error: SigningError
    retry_after: float | None = None
    passing: bool = True
    """Whether another attempt makes sense."""


class Repeat(Enum):
    """What repeating an operation would do if the first attempt took effect."""

    READ = "nothing"
    RECONCILED = "harm, so the service is read first"
    CREATE = "leave a spare draft"
    REMIND = "remind twice"
    TOKEN = "use a refresh token twice"
    PROBE = "nothing, but a failure is a finding"


class Step(Enum):
    """What follows a failed attempt."""

    RETRY = "retry"
    RECONCILE = "reconcile, then retry"
    RETRY_ONCE = "retry once"
    RAISE = "raise the error"
    UNKNOWN = "give up: the outcome is unknown"


AMBIGUOUS = frozenset({Outcome.FAILED, Outcome.GATEWAY, Outcome.CUT, Outcome.LOST})
_NO_RESPONSE = frozenset({Outcome.CUT, Outcome.LOST})
# The effect of these shows at once, or never.
_PROMPT = frozenset({Outcome.FAILED, Outcome.CUT})
_PROMPT_SHARE = 0.1


def step(outcome: Outcome, repeat: Repeat) -> Step:
    """Return the entry of the table above."""
    if repeat is Repeat.RECONCILED and outcome in AMBIGUOUS:
        return Step.RECONCILE
    if outcome in _NO_RESPONSE and repeat is Repeat.REMIND:
        return Step.UNKNOWN
    if outcome in _NO_RESPONSE and repeat is Repeat.TOKEN:
        return Step.RETRY_ONCE
    if repeat is Repeat.PROBE and outcome is not Outcome.THROTTLED:
        return Step.RAISE
    return Step.RETRY


def settle_time(policy: RetryPolicy, outcome: Outcome) -> float:
    """Return how long the effect of an ambiguous attempt may take to show."""
    return policy.settle * (_PROMPT_SHARE if outcome in _PROMPT else 1.0)


@attrs.frozen
class Decision:
    """Wait ``delay`` seconds and go on; or, where that is None, stop, because of ``why``."""

    delay: float | None
    why: str = ""


def decide(
    policy: RetryPolicy,
    *,
    attempt: int,
    retry_after: float | None,
    remaining: float,
    chance: float,
    at_least: float = 0.0,
) -> Decision:
    """Decide whether the ``attempt``-th failure is followed by another attempt.

    ``chance`` is a random number from 0 to 1; ``at_least`` is the shortest delay besides the Retry-After.
    """
    if attempt >= policy.max_attempts:
        return Decision(None, f"{attempt} attempts were made" if attempt > 1 else "no retry is allowed")
    if retry_after is not None and retry_after > policy.max_retry_after:
        return Decision(None, f"the wait of {retry_after:g} s is longer than the policy's {policy.max_retry_after:g} s")
    # 2.0 ** 1024 overflows; no delay needs more than 2 ** 60 times the base.
    ceiling = min(policy.max_delay, policy.base_delay * 2.0 ** min(attempt - 1, 60))
    delay = max(chance * ceiling, retry_after or 0.0, at_least)
    if delay >= remaining:
        return Decision(None, "its deadline leaves no time to wait")
    return Decision(delay)


def read_retry_after(value: str | None, *, date: str | None = None, now: Callable[[], float]) -> float | None:
    """Seconds to wait, from a Retry-After header: a number or an HTTP date; None for what is neither.

    A date is taken against the answer's own ``Date`` where it has one, so that a wrong clock on this side does no harm.
    """
    if value is None:
        return None
    text = value.strip()
    if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
        return min(float(text), sys.float_info.max)
    when = _read_date(text)
    if when is None:
        return None
    asked_at = _read_date(date or "")
    return max(0.0, when - (now() if asked_at is None else asked_at))


def _read_date(text: str) -> float | None:
    if len(text) > _MAX_DATE:
        return None
    try:
        moment = email.utils.parsedate_to_datetime(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


class Again(Exception):  # no error: it asks the runner below for another attempt
    """Raised by an attempt that wants to be made again after ``delay`` seconds."""

    def __init__(self, delay: float) -> None:
        super().__init__(delay)
        self.delay = delay


def _delays() -> Generator[float, Any, None]:
    again = yield 0.0
    while True:
        again = yield again.delay


async def run(attempt: Callable[[], Awaitable[T]]) -> T:
    """Make attempts until one returns, or raises anything but `Again`."""
    try:
        # Most calls need no more than this, and the runner would be a tenth of a small call's cost.
        return await attempt()
    except Again as error:
        again = [error]
    return await _go_on(attempt, again)


# Without jitter and max_time, which would shorten the delay; without logger, which would print the exception.
@backoff.on_exception(_delays, Again, jitter=None, logger=None)
async def _go_on(attempt: Callable[[], Awaitable[T]], again: list[Again]) -> T:
    """Begin with the first wait, and make attempts."""
    if again:
        raise again.pop()
    return await attempt()
