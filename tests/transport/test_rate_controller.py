"""The adaptive rate, against simulated services in virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable

import attrs
import pytest

from signing_async.transport.rate_limit import RateController  # simulated in virtual time, for thousands of requests

START = 4096.0
"""An event loop's clock does not begin at zero."""


class TokenBucket:
    """Accepts ``burst`` requests at once, and ``rate`` per second."""

    def __init__(self, rate: float, burst: int) -> None:
        self.rate, self.burst, self.content, self.at = rate, burst, float(burst), START

    def wait(self, now: float) -> float | None:
        self.content = min(self.burst, self.content + (now - self.at) * self.rate)
        self.at = now
        if self.content >= 1:
            self.content -= 1
            return None
        return (1 - self.content) / self.rate


class Unlimited:
    """Accepts every request."""

    def wait(self, now: float) -> float | None:
        return None


Pausing = Callable[[float, random.Random], float]
PAUSES: dict[str, Pausing] = {
    "exact": lambda wait, chance: math.ceil(wait * 1000) / 1000,
    "whole seconds": lambda wait, chance: max(1.0, math.ceil(wait)),
    # The delay of a first retry.
    "none": lambda wait, chance: 0.5 * chance.random(),
}
"""Seconds of the pause after a 429, by the Retry-After that the service gives."""


@attrs.define
class Outcome:
    """The result of a simulation."""

    seconds: float = 0.0
    requests: int = 0
    rejected: int = 0
    early: float = 0.0
    """The most by which a request was sent before the end of a pause."""


def simulate(
    limiter: RateController,
    service: TokenBucket | Unlimited,
    *,
    calls: int = 500,
    concurrency: int = 32,
    latency: float = 0.02,
    work: float = 0.0005,
    pausing: Pausing = PAUSES["exact"],
    began: float = START,
) -> Outcome:
    """Make calls until the service accepts them; it has one core, with ``work`` seconds to do for each request."""
    chance, ticket = random.Random(1), itertools.count()
    now, free_at, wake_at, paused_until = began, 0.0, math.inf, 0.0
    events: list[tuple[float, int, str, float, float | None]] = []
    waiting, to_start, outcome = min(concurrency, calls), calls - min(concurrency, calls), Outcome()

    def push(at: float, kind: str, sent_at: float = 0.0, wait: float | None = None) -> None:
        heapq.heappush(events, (at, next(ticket), kind, sent_at, wait))

    while True:
        while waiting:
            ready_at = limiter.ready_at(now)
            if ready_at > now:
                if ready_at < wake_at or wake_at <= now:
                    wake_at = ready_at
                    push(wake_at, "timer")
                break
            limiter.acquire(now)
            outcome.early = max(outcome.early, paused_until - now)
            waiting, outcome.requests = waiting - 1, outcome.requests + 1
            free_at = max(now + latency / 2, free_at) + work
            push(free_at, "arrival", now)
        if not events:
            return outcome
        now, _, kind, sent_at, wait = heapq.heappop(events)
        assert now - began < 3000, "the calls do not end"
        if kind == "arrival":
            push(now + latency / 2, "response", sent_at, service.wait(now))
        elif kind == "response" and wait is None:
            limiter.release(now, sent_at, True)
            outcome.seconds = now - began
            if to_start:
                to_start, waiting = to_start - 1, waiting + 1
        elif kind == "response" and wait is not None:
            seconds = pausing(wait, chance)
            limiter.release(now, sent_at, False)
            limiter.pause(now, seconds)
            paused_until = max(paused_until, now + seconds)
            outcome.rejected, waiting = outcome.rejected + 1, waiting + 1


RATES = (1, 5, 20, 50, 100, 200, 500)
"""Requests per second; each rate is used for 10 seconds or more."""


@pytest.mark.parametrize(
    ("burst", "retry_after", "latency", "seconds"),
    [
        *((1, "exact", 0.02, 160), (1, "whole seconds", 0.1, 185)),
        *((10, "exact", 0.1, 135), (10, "none", 0.02, 145)),
        *((50, "whole seconds", 0.02, 85), (50, "none", 0.1, 75)),
    ],
)
def test_rate_limit_is_used_and_few_requests_are_rejected(
    burst: int, retry_after: str, latency: float, seconds: float
) -> None:
    """At all rates together, for 8,900 calls; without a limiter's mistakes it would take 58 to 121 seconds."""
    outcomes = [
        simulate(
            RateController(),
            TokenBucket(rate, burst),
            calls=max(60, 10 * rate),
            latency=latency,
            pausing=PAUSES[retry_after],
        )
        for rate in RATES
    ]
    assert sum(outcome.seconds for outcome in outcomes) <= seconds
    assert sum(outcome.rejected for outcome in outcomes) <= 0.03 * sum(outcome.requests for outcome in outcomes)
    assert max(outcome.early for outcome in outcomes) == 0.0


def wait(controller: RateController, now: float) -> float:
    """Return the time of the next request."""
    while (ready_at := controller.ready_at(now)) > now:
        now = ready_at
    return now


def test_requests_that_hang_hold_up_no_others_for_long() -> None:
    controller, now, sent = RateController(), START, 0
    while now < START + 2.0:
        controller.acquire(now)
        sent += 1
        now = wait(controller, now)
    assert 40 <= sent <= 60


@pytest.mark.parametrize(
    ("calls", "interval", "rejections", "seconds"), [(0, 0.0, 1, 4.0), (100, 0.02, 1, 6.0), (10, 1.0, 3, 12.0)]
)
def test_rate_recovers_within_seconds_after_stray_429s(
    calls: int, interval: float, rejections: int, seconds: float
) -> None:
    """After slow calls they show no limit: the next 200 calls are soon made."""
    controller, now = RateController(), START
    for _ in range(calls):
        now = wait(controller, now)
        controller.acquire(now)
        controller.release(now, now, True)
        now += interval
    for _ in range(rejections):
        controller.acquire(now)
        controller.release(now, now, False)
        controller.pause(now, 0.25)
        now = wait(controller, now + 0.25)
    assert simulate(controller, Unlimited(), calls=200, began=now).seconds <= seconds
