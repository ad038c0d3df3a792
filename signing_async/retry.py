"""What is repeated, when, and how often: pure decisions, and the one runner that carries them out.

======================================  =======  ============  ========  ========  =============
outcome                                 reads    checked       create    remind    token request
======================================  =======  ============  ========  ========  =============
nothing was sent                        again    again         again     again     again
429                                     again    again         again     again     again
5xx                                     again    check, again  again     again     again
the answer was lost after sending       again    check, again  again     unknown   again, once
======================================  =======  ============  ========  ========  =============

Checked are `send`, `upload` and `add`: the service knows no idempotency keys, so the state is read before the repeat.
"""

from __future__ import annotations

import email.utils
import math
import re
from collections.abc import Awaitable, Callable, Generator
from datetime import UTC
from enum import Enum
from typing import Any, TypeVar

import attrs
import backoff

from .errors import ConfigurationError, SigningError

__all__ = [
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
    "step",
]

T = TypeVar("T")


def _check_seconds(instance: object, attribute: attrs.Attribute[float], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigurationError(f"RetryPolicy.{attribute.name} must be seconds, 0 or more, not {value!r}")


def _check_attempts(instance: object, attribute: attrs.Attribute[int], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"RetryPolicy.{attribute.name} must be a whole number from 1, not {value!r}")


@attrs.frozen
class RetryPolicy:
    """How a call that failed for a passing reason is tried again.

    A delay is random between 0 and ``base_delay`` doubled for each attempt, at most ``max_delay``, and never shorter
    than the service's Retry-After. A Retry-After above ``max_retry_after``, or past the call's deadline, ends the call
    with the error, which carries ``retry_after``. A 429 counts as one of ``max_attempts`` only if nothing of the
    client's was let through since the call's last attempt: a busy service is waited for until the deadline.
    """

    max_attempts: int = attrs.field(default=5, validator=_check_attempts)
    base_delay: float = attrs.field(default=0.5, validator=_check_seconds)
    max_delay: float = attrs.field(default=30.0, validator=_check_seconds)
    max_retry_after: float = attrs.field(default=60.0, validator=_check_seconds)

    @classmethod
    def none(cls) -> RetryPolicy:
        """One request a call, whatever comes of it."""
        return cls(max_attempts=1)


class Outcome(Enum):
    """How an attempt failed for a reason that may pass."""

    UNSENT = "nothing was sent"
    THROTTLED = "429"
    FAILED = "5xx"
    LOST = "the answer was lost after sending"


@attrs.frozen
class Trouble:
    """A failed attempt: what it was, and the error to raise if nothing better follows."""

    outcome: Outcome
    error: SigningError
    retry_after: float | None = None
    passing: bool = True
    """Whether it makes sense to try again."""


class Repeat(Enum):
    """What repeating an operation would do, should the first attempt have taken effect."""

    READ = "nothing"
    CHECKED = "harm, so it is checked first"
    CREATE = "leave a spare draft"
    REMIND = "remind twice"
    TOKEN = "use a refresh token twice"


class Step(Enum):
    """What follows a failed attempt."""

    AGAIN = "again"
    CHECK = "check, then again"
    AGAIN_ONCE = "again, once"
    UNKNOWN = "give up: the outcome is unknown"


_STEPS = {
    (Outcome.FAILED, Repeat.CHECKED): Step.CHECK,
    (Outcome.LOST, Repeat.CHECKED): Step.CHECK,
    (Outcome.LOST, Repeat.REMIND): Step.UNKNOWN,
    (Outcome.LOST, Repeat.TOKEN): Step.AGAIN_ONCE,
}


def step(outcome: Outcome, repeat: Repeat) -> Step:
    """The table above."""
    return _STEPS.get((outcome, repeat), Step.AGAIN)


@attrs.frozen
class Decision:
    """Wait ``delay`` seconds and go on; or, where that is None, stop, because of ``why``."""

    delay: float | None
    why: str = ""


def decide(
    policy: RetryPolicy, *, attempt: int, retry_after: float | None, remaining: float, chance: float
) -> Decision:
    """Whether the ``attempt``-th failure is followed by another attempt; ``chance`` is a random number from 0 to 1."""
    if attempt >= policy.max_attempts:
        return Decision(None, f"{attempt} attempts were made" if attempt > 1 else "no retry is allowed")
    if retry_after is not None and retry_after > policy.max_retry_after:
        return Decision(None, f"the wait of {retry_after:g} s is longer than the policy's {policy.max_retry_after:g} s")
    # 2.0 ** 1024 overflows; no delay needs more than 2 ** 60 times the base.
    ceiling = min(policy.max_delay, policy.base_delay * 2.0 ** min(attempt - 1, 60))
    delay = max(chance * ceiling, retry_after or 0.0)
    if delay >= remaining:
        return Decision(None, "its deadline leaves no time to wait")
    return Decision(delay)


def read_retry_after(value: str | None, *, date: str | None = None, now: Callable[[], float]) -> float | None:
    """Seconds to wait, from a Retry-After header: a number or an HTTP date; None for what is neither.

    A date is taken against the answer's own ``Date`` where it has one, so that a wrong clock on this side does no harm.
    """
    if value is None or len(value) > 64:
        return None
    text = value.strip()
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII):
        return float(text)
    when = _read_date(text)
    if when is None:
        return None
    asked_at = _read_date(date or "")
    return max(0.0, when - (now() if asked_at is None else asked_at))


def _read_date(text: str) -> float | None:
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
