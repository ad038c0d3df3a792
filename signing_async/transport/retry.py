"""All retry decisions: what is retried, when, and how often; and the runner that carries the decisions out.

===================================  =====  ================  ======  =======  =======  =============
outcome                              reads  reconciled        create  remind   others   token request
===================================  =====  ================  ======  =======  =======  =============
nothing was sent                     retry  retry             retry   retry    retry    retry
429                                  retry  retry             retry   retry    retry    retry
408, 5xx                             retry  reconcile, retry  retry   retry    unknown  retry
the response was lost after sending  retry  reconcile, retry  retry   unknown  unknown  retry once
===================================  =====  ================  ======  =======  =======  =============

`send`, `upload` and `add` are reconciled: the service has no idempotency keys, so its state is read before a retry.
"Others" are writes made with `request`, about which the package knows nothing.
"""

from __future__ import annotations

import random
import re
import sys
import warnings
from collections.abc import Awaitable, Callable
from datetime import UTC
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, Literal, TypeVar

import attrs

from .. import _checks

__all__ = [
    "Decision",
    "Kind",
    "Retries",
    "RetryBudget",
    "RetryPolicy",
    "RetryRequested",
    "Safety",
    "Step",
    "effect_of",
    "read_retry_after",
    "run",
    "settle_time",
]

T = TypeVar("T")

_MAX_DATE = 64

_check_seconds = _checks.field(_checks.number, "RetryPolicy.", at_least=0)


@attrs.frozen
class RetryPolicy:
    """How a call that failed for a transient reason is retried.

    A delay is random between 0 and ``base_delay``, doubled for each further attempt, at most ``max_delay``, and never
    shorter than the service's Retry-After. A Retry-After above ``max_retry_after``, or past the call's deadline, ends
    the call with the error, which carries ``retry_after``. A 429 counts as one of ``max_attempts`` only if the service
    accepted none of the client's requests since the call's last attempt: a call waits for a busy service until its
    deadline.

    After an ambiguous `send`, `upload` or `add`, the service is read for ``settle`` seconds before the request is
    repeated: a backend may still carry it out. A tenth of that is enough after a 500 or 503 with the service's own
    error.
    """

    def __repr__(self) -> str:
        return _checks.short_repr(self)

    max_attempts: int = attrs.field(default=5, validator=_checks.field(_checks.integer, "RetryPolicy."))
    base_delay: float = attrs.field(default=0.5, validator=_check_seconds)
    max_delay: float = attrs.field(default=30.0, validator=_check_seconds)
    max_retry_after: float = attrs.field(default=60.0, validator=_check_seconds)
    settle: float = attrs.field(default=5.0, validator=_check_seconds)

    @classmethod
    def none(cls) -> RetryPolicy:
        """Return a policy without retries.

        An ambiguous `send`, `upload` or `add` then raises `OutcomeUnknown`, without a reading.
        """
        return cls(max_attempts=1)


# The table


class Kind(Enum):
    """How an attempt ended."""

    SUCCESS = "the service accepted the request"
    REFUSED = "the service, or this client, refused the request"
    REJECTED_TOKEN = "the service rejected the token, and there is a new one"
    RAISED = "an exception of the caller's own code, of the source of the token, or of a closed client"
    UNSENT = "nothing was sent"
    THROTTLED = "429"
    FAILED = "500 or 503 with the service's own error: it is done with the request"
    GATEWAY = "408, or any other 5xx: a backend may still be working on the request"
    LOST = "the response was lost after sending"

    @property
    def is_ambiguous(self) -> bool:
        """Whether the request may have taken effect."""
        return self in _AMBIGUOUS

    @property
    def may_be_late(self) -> bool:
        """Whether the effect of an ambiguous attempt may show even after its settle time."""
        return self is not Kind.FAILED


class Safety(Enum):
    """What repeating an operation does if the first attempt took effect."""

    READ = "nothing"
    RECONCILED = "harm, so the service is read first"
    CREATE = "leave a spare draft"
    REMIND = "remind twice"
    NEVER = "something that is not known"
    TOKEN = "use a refresh token twice"


class Step(Enum):
    """What follows a failed attempt."""

    RETRY = "retry"
    RECONCILE = "reconcile, then retry"
    RETRY_ONCE = "retry once"
    RAISE = "raise the error"
    UNKNOWN = "give up: the outcome is unknown"


_AMBIGUOUS = frozenset({Kind.FAILED, Kind.GATEWAY, Kind.LOST})
# Everything else is retried.
_STEPS: dict[tuple[Safety, Kind], Step] = {
    **{(Safety.RECONCILED, kind): Step.RECONCILE for kind in _AMBIGUOUS},
    **{(Safety.NEVER, kind): Step.UNKNOWN for kind in _AMBIGUOUS},
    (Safety.REMIND, Kind.LOST): Step.UNKNOWN,
    (Safety.TOKEN, Kind.LOST): Step.RETRY_ONCE,
    **{(safety, kind): Step.RAISE for safety in Safety for kind in (Kind.REFUSED, Kind.RAISED)},
}
_HARMFUL = frozenset({Safety.RECONCILED, Safety.REMIND, Safety.NEVER})


def effect_of(safety: Safety, *, succeeded: bool = False) -> Literal["none", "unknown"]:
    """Return the ``effect`` of a call's error after an unreconciled attempt that is ambiguous, or ``succeeded``.

    A spare draft is harmless. But if a draft's response cannot be decoded, its id may be in the error's body: the
    caller can use that draft instead of another.
    """
    return "unknown" if safety in _HARMFUL or (succeeded and safety is Safety.CREATE) else "none"


def settle_time(policy: RetryPolicy, kind: Kind) -> float:
    """Return the seconds for which the service is read after an ambiguous attempt."""
    return policy.settle if kind.may_be_late else 0.1 * policy.settle


# The decisions of one call


@attrs.frozen(slots=False)
class Decision:
    """What follows a failed attempt: another one after ``delay`` seconds, or none, with the ``reason``."""

    step: Step
    delay: float | None
    reason: str = ""
    pause: float | None = None
    """After a 429: the seconds for which the rate limiter holds back every call."""


class Retries:
    """Decides what follows each failed attempt of one call.

    Without a ``budget``, retries are free: a reading is part of the call that it reconciles.
    """

    _withdrawn = _uncounted = 0
    _has_lost_response = False

    def __init__(self, policy: RetryPolicy, safety: Safety, budget: RetryBudget | None = None) -> None:
        self._policy = policy
        self._safety = safety
        self._budget = budget

    def decide(
        self,
        kind: Kind,
        attempt: int,
        retry_after: float | None,
        remaining: float,
        *,
        may_retry: bool,
        others_accepted: bool,
    ) -> Decision:
        """Decide what follows a failed attempt; withdraw from the budget for a retry.

        ``attempt`` is its number in its call, from 1. ``remaining`` is the seconds in which another attempt may start.
        ``others_accepted``: the service accepted other requests of the client since the attempt began.
        """
        policy, step = self._policy, _STEPS.get((self._safety, kind), Step.RETRY)
        if kind is Kind.REJECTED_TOKEN:
            self._uncounted += 1
            return Decision(step, 0.0)
        if step is Step.UNKNOWN:
            return Decision(step, None, "a repeat could take effect twice")
        if step is Step.RECONCILE and policy.max_attempts == 1:
            return Decision(Step.UNKNOWN, None, "no retry is allowed")
        if step is Step.RAISE or not may_retry:
            return Decision(step, None)
        if step is Step.RETRY_ONCE and self._has_lost_response:
            return Decision(step, None, "the response was lost twice")
        self._has_lost_response |= step is Step.RETRY_ONCE
        is_throttled = kind is Kind.THROTTLED
        self._uncounted += is_throttled and others_accepted
        attempts = max(1, attempt - self._uncounted)

        # 2.0 ** 1024 overflows; no delay needs more than 2 ** 60 times the base.
        delay = random.random() * min(policy.max_delay, policy.base_delay * 2.0 ** min(attempts - 1, 60))
        if is_throttled and retry_after and attempts == 1:
            delay = 0.0  # the rate limiter spreads the calls that wait
        delay = max(delay, retry_after or 0.0, settle_time(policy, kind) if step is Step.RECONCILE else 0.0)

        reason = ""
        if attempts >= policy.max_attempts:
            reason = f"{attempts} attempts were made" if attempts > 1 else "no retry is allowed"
        elif retry_after is not None and retry_after > policy.max_retry_after:
            reason = f"the wait of {retry_after:g} s is longer than the policy's {policy.max_retry_after:g} s"
        elif delay >= remaining:
            reason = "the deadline leaves no time to wait"
        elif not is_throttled and self._budget is not None:
            if self._budget.withdraw():
                self._withdrawn += 1
            else:
                reason = "too many calls are failing: the retry budget is used up"

        pause = None
        if is_throttled:
            pause = (retry_after or 0.0) if reason else delay
            if pause > policy.max_retry_after:
                # Such a long wait may concern only this endpoint: the limiter just slows down, as after any 429.
                # The token endpoint has a limiter of its own.
                pause = policy.max_retry_after if self._safety is Safety.TOKEN else 0.0
        return Decision(step, None if reason else delay, reason, pause)

    def succeed(self) -> None:
        """Refund the budget: the call succeeded after all."""
        if self._budget is not None:
            self._budget.add(self._withdrawn)


class RetryBudget:
    """Limits the load in an outage to two requests a call on average, without the retries of calls that succeed.

    Every call adds half a credit, and every request beyond a call's first withdraws one; a call that succeeds after all
    returns what it withdrew. The budget starts with 20 credits, so that a few failing calls can make all of their
    attempts, and holds at most 100. A retry after a 429 is free: the rate limiter delays it.
    """

    DEPOSIT = 0.5
    _INITIAL, _MAX = 20.0, 100.0

    def __init__(self) -> None:
        self._credits = self._INITIAL

    def add(self, credits: float) -> None:
        """Add what a call deposits, or returns."""
        self._credits = min(self._credits + credits, self._MAX)

    def withdraw(self) -> bool:
        """Withdraw the credit for one more request; return whether there was one."""
        if self._credits < 1.0:
            return False
        self._credits -= 1.0
        return True


def read_retry_after(value: str | None, *, date: str | None = None, now: Callable[[], float]) -> float | None:
    """Return the seconds to wait, from a Retry-After header: a number or an HTTP date; None if it is neither.

    A date is compared with the response's own ``Date`` if there is one, so a wrong local clock does no harm.
    """
    text = (value or "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
        return min(float(text), sys.float_info.max)
    retry_at, responded_at = _read_date(text), _read_date(date or "")
    return None if retry_at is None else max(0.0, retry_at - (now() if responded_at is None else responded_at))


def _read_date(text: str) -> float | None:
    if not text or len(text) > _MAX_DATE:
        return None
    import email.utils  # a date is rare, and the import takes a while

    try:
        moment = email.utils.parsedate_to_datetime(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


# The runner


class RetryRequested(Exception):  # not an error: it asks `run` for another attempt
    """Raised by an attempt to be made again after ``delay`` seconds."""

    def __init__(self, delay: float) -> None:
        super().__init__(delay)
        self.delay = delay


async def run(attempt: Callable[[], Awaitable[T]]) -> T:
    """Make attempts until one returns, or raises anything but `RetryRequested`."""
    result: T = await _runner()(attempt)
    return result


@cache
def _runner() -> Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]:
    import backoff  # a client that never retries does not need it

    async def call(attempt: Callable[[], Awaitable[Any]]) -> Any:
        return await attempt()

    with warnings.catch_warnings():
        # backoff 2 calls this function while it decorates; Python 3.14 deprecates it.
        warnings.filterwarnings("ignore", "'asyncio.iscoroutinefunction' is deprecated", DeprecationWarning)
        # Without jitter, which would shorten the delay; without logger, which would log the exception.
        options: Any = {"value": attrgetter("delay"), "jitter": None, "logger": None}
        return backoff.on_exception(backoff.runtime, RetryRequested, **options)(call)
