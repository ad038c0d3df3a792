"""The learnt rate limit, against simulated services in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from signing_async.transport.rate_limit import RateLearner
from tests.transport.rate_services import (
    PAUSES,
    SERVICES,
    START,
    FixedWindow,
    NoLimiter,
    Service,
    TokenBucket,
    Unlimited,
    simulate,
)

HOUR = 3600.0
RATES = (1, 5, 20, 50, 100, 200, 500)
"""Requests per second; each rate is used for 10 seconds or more."""


@pytest.mark.parametrize("latency", [0.02, 0.1])
@pytest.mark.parametrize(
    ("service", "retry_after", "seconds", "rejected"),
    [
        ("token bucket, burst 1", "exact", 165, 115),
        ("token bucket, burst 1", "whole seconds", 180, 100),
        ("token bucket, burst 1", "none", 165, 115),
        ("token bucket, burst 10", "exact", 130, 120),
        ("token bucket, burst 10", "whole seconds", 190, 80),
        ("token bucket, burst 10", "none", 145, 105),
        ("token bucket, burst 50", "exact", 75, 160),
        ("token bucket, burst 50", "whole seconds", 97, 125),
        ("token bucket, burst 50", "none", 77, 155),
        ("fixed window", "exact", 135, 185),
        ("fixed window", "whole seconds", 160, 155),
        ("fixed window", "none", 138, 180),
        ("sliding window", "exact", 150, 165),
        ("sliding window", "whole seconds", 175, 155),
        ("sliding window", "none", 157, 205),
    ],
)
def test_rate_limit_is_used_and_few_requests_are_rejected(
    service: str, retry_after: str, seconds: float, rejected: int, latency: float
) -> None:
    """At all rates together, out of 8,900 requests; without a limiter's mistakes it would take 58 to 121 seconds."""
    outcomes = [
        simulate(
            RateLearner(),
            SERVICES[service](rate),
            calls=max(60, 10 * rate),
            latency=latency,
            pausing=PAUSES[retry_after],
        )
        for rate in RATES
    ]
    assert sum(outcome.seconds for outcome in outcomes) <= seconds
    assert sum(outcome.rejected for outcome in outcomes) <= rejected
    assert max(outcome.early for outcome in outcomes) == 0.0


@pytest.mark.parametrize("service", SERVICES)
def test_late_timers_do_not_lower_the_rate(service: str) -> None:
    """Timers that fire up to 3 ms late cost a third of the time at most."""
    punctual, late = (simulate(RateLearner(), SERVICES[service](200), calls=2000, late=late) for late in (0.0, 0.003))
    assert late.seconds <= 1.34 * punctual.seconds
    assert late.rejected <= punctual.rejected + 20


def test_high_rate_limit_is_found() -> None:
    """A first rate that is far too low is corrected soon."""
    outcome = simulate(RateLearner(), TokenBucket(1000, 100), calls=8000, work=0.0003)
    assert outcome.seconds <= 2 * 8
    assert outcome.rejected <= 0.01 * outcome.requests


def test_low_rate_limit_is_kept() -> None:
    outcome = simulate(RateLearner(), TokenBucket(0.5, 5), calls=60)
    assert outcome.seconds <= 1.1 * 110
    assert outcome.rejected <= 25


@pytest.mark.parametrize("latency", [0.001, 0.05])
def test_calls_are_not_slower_if_no_request_is_rejected(latency: float) -> None:
    limited, plain = (
        simulate(limiter, Unlimited(), calls=5000, latency=latency, work=0.001)
        for limiter in (RateLearner(), NoLimiter())
    )
    assert limited.rejected == 0
    assert limited.seconds <= 1.03 * plain.seconds


def use(learner: RateLearner, now: float, count: int) -> float:
    """Send requests as fast as the learner allows, all accepted at once; return the time after them."""
    for _ in range(count):
        now = max(now, learner.ready_at(now))
        learner.acquire(now)
        learner.release(now, now, True)
    return now


def learnt(service: Service, calls: int = 200) -> RateLearner:
    learner = RateLearner()
    simulate(learner, service, calls=calls)
    assert learner.rate is not None
    return learner


def rate_of(learner: RateLearner) -> float:
    assert learner.rate is not None
    return learner.rate


def test_rate_grows_when_the_limit_is_lifted() -> None:
    learner = learnt(TokenBucket(50, 10))
    assert rate_of(learner) < 60
    use(learner, START + 100, 20_000)
    assert rate_of(learner) > 1000


def test_rate_does_not_grow_while_it_is_not_used() -> None:
    learner = learnt(TokenBucket(50, 10))
    before = rate_of(learner)
    for number in range(1000):
        now = START + 100 + number
        assert learner.ready_at(now) <= now
        use(learner, now, 1)
    assert rate_of(learner) <= 1.1 * before


# Idle times show no limit


def one_by_one(learner: RateLearner, service: Service, now: float, calls: int, interval: float) -> float:
    """Make calls at this interval, none of which is rejected; return the time after them."""
    for _ in range(calls):
        now = max(now, learner.ready_at(now))
        learner.acquire(now)
        assert service.wait(now) is None
        learner.release(now, now, True)
        now += interval
    return now


BURSTS = [lambda: TokenBucket(50, 50), lambda: TokenBucket(50, 10), lambda: FixedWindow(50)]


@pytest.mark.parametrize("service", BURSTS)
@pytest.mark.parametrize(("calls", "interval"), [(3600, 1.0), (300, 60.0), (30, HOUR)])
def test_idle_time_before_the_first_429_lowers_no_rate(
    service: Callable[[], Service], calls: int, interval: float
) -> None:
    learner, used = RateLearner(), service()
    now = one_by_one(learner, used, START, calls, interval)
    after, fresh = simulate(learner, used, calls=300, began=now), simulate(RateLearner(), service(), calls=300)
    assert after.rejected
    assert after.seconds <= 1.1 * fresh.seconds + 1


@pytest.mark.parametrize("service", BURSTS)
def test_idle_time_between_two_429s_lowers_no_rate(service: Callable[[], Service]) -> None:
    fresh = simulate(RateLearner(), service(), calls=300)
    learner, used = RateLearner(), service()
    simulate(learner, used, calls=300)
    now = one_by_one(learner, used, START + HOUR, 500, 1 / 40)
    for idle in (0.0, HOUR, HOUR):
        outcome = simulate(learner, used, calls=300, began=now + idle)
        assert outcome.seconds <= 1.1 * fresh.seconds + 2
        now += idle + outcome.seconds


def test_idle_time_of_a_service_without_burst_is_forgotten_soon() -> None:
    learner, service = RateLearner(), TokenBucket(50, 1)
    now = one_by_one(learner, service, START, 3600, 1.0)
    assert simulate(learner, service, calls=60, began=now).seconds <= 15


def test_small_batches_within_the_limit_do_not_lower_the_rate() -> None:
    learner, service = RateLearner(), TokenBucket(50, 10)
    now = START + simulate(learner, service, calls=300).seconds
    for _ in range(30):
        now = one_by_one(learner, service, now + HOUR, 10, 0.0)
    assert simulate(learner, service, calls=300, began=now + HOUR).seconds <= 45


def test_time_without_requests_after_a_pause_is_not_part_of_it() -> None:
    """Nobody asks for an hour: the rate is the same as if somebody had asked at the end of the pause."""
    rates = []
    for idle in (0.0, HOUR):
        learner = RateLearner()
        reject(learner, accepted=100, after=1.0, pause=1.0)
        assert learner.ready_at(START + 2.0 + idle) <= START + 2.0 + idle
        rates.append(rate_of(learner))
    assert rates == [50.0, 50.0]


# Step by step


def reject(learner: RateLearner, accepted: int, after: float, pause: float) -> None:
    """Send one request more than are accepted, all at `START`."""
    for _ in range(accepted + 1):
        learner.acquire(START)
    for _ in range(accepted):
        learner.release(START, START, True)
    learner.release(START + after, START, False)
    learner.pause(START + after, pause)


def sent_at_once(learner: RateLearner, now: float) -> int:
    """Send as many requests as the learner allows at this moment."""
    count = 0
    while learner.ready_at(now) <= now:
        learner.acquire(now)
        count += 1
    return count


def test_no_request_is_sent_during_a_pause() -> None:
    """A shorter pause does not end a longer one."""
    learner = RateLearner()
    learner.pause(10.0, 5.0)
    learner.pause(10.0, 1.0)
    assert learner.ready_at(14.9) == 15.0
    assert learner.ready_at(15.0) == 15.0


@pytest.mark.parametrize(
    ("accepted", "after", "pause", "rate"),
    [
        (100, 0.1, 0.2, 100.0),
        (100, 0.5, 1.5, 50.0),
        (100, 0.0, 0.0, 100.0),
        (20, 0.1, 0.2, 20.0),
        (10, 0.5, 1.5, 10.0),
        (0, 0.5, 1.5, 1.0),
        (0, 0.0, 0.0, 1000.0),
    ],
)
def test_first_rate_is_what_was_accepted_before_the_first_429(
    accepted: int, after: float, pause: float, rate: float
) -> None:
    """Of many: what came through per second. Of few: between the rates up to the 429 and up to the pause's end."""
    learner = RateLearner()
    reject(learner, accepted, after, pause)
    assert learner.ready_at(START + after + pause) <= START + after + pause
    assert learner.rate == pytest.approx(rate, rel=0.01)


def test_429s_of_requests_sent_together_count_once() -> None:
    learner = RateLearner()
    for _ in range(8):
        learner.acquire(0.0)
    for _ in range(8):
        learner.release(0.1, 0.0, False)
        learner.pause(0.1, 1.0)
    learner.ready_at(1.1)
    rate = learner.rate
    learner.acquire(1.1)
    learner.release(1.2, 0.0, False)
    assert learner.ready_at(5.0) <= 5.0
    assert learner.rate == rate


def test_one_measurement_leaves_at_least_a_third_of_the_rate() -> None:
    """Even if the service accepted a single request in a long time."""
    learner = RateLearner()
    reject(learner, accepted=100, after=1.0, pause=0.0)
    now = learner.ready_at(START + 1.0)
    assert learner.rate == 100.0
    use(learner, now, 1)
    now += 60.0
    learner.ready_at(now)
    learner.acquire(now)
    learner.release(now, now, False)
    learner.ready_at(now)
    assert rate_of(learner) >= 100 / 3


def test_rate_never_falls_below_one_request_in_five_seconds() -> None:
    learner, now = RateLearner(), 0.0
    for _ in range(300):
        assert learner.ready_at(now) <= now
        learner.acquire(now)
        learner.release(now, now, False)
        learner.pause(now, 0.02)
        now += 0.02
    assert learner.ready_at(now) <= now
    learner.acquire(now)
    assert learner.ready_at(now) - now == pytest.approx(5.0)


@pytest.mark.parametrize(("late", "made_up"), [(0.0, 0.0), (0.004, 0.004), (1.0, 0.01)])
def test_delay_of_a_timer_is_made_up_for(late: float, made_up: float) -> None:
    """Up to 10 ms of it: a pause in the calls does not end in a burst."""
    learner = RateLearner()
    reject(learner, accepted=100, after=0.5, pause=0.5)
    now = learner.ready_at(START + 1.0) + late
    interval = 1 / rate_of(learner)
    learner.acquire(now)
    assert learner.ready_at(now) - now == pytest.approx(interval - made_up)


def test_slow_start_sends_eight_at_once() -> None:
    """Another one goes out after 50 ms, and one for each response."""
    learner = RateLearner()
    assert sent_at_once(learner, START) == 8
    now = learner.ready_at(START)
    assert now - START == pytest.approx(0.05)
    assert sent_at_once(learner, now) == 1
    learner.release(now, START, True)
    assert sent_at_once(learner, now) == 1


def test_slow_start_sends_more_with_each_round_of_responses() -> None:
    """But not while fewer requests are made than may be."""
    learner, now, sizes = RateLearner(), START, list[int]()
    for _ in range(8):
        sizes.append(sent_at_once(learner, now))
        for _ in range(sizes[-1]):
            learner.release(now + 0.01, now, True)
        now += 0.01
    assert sizes[:4] == [8, 8, 8, 10]
    assert sizes == sorted(sizes)
    assert 20 <= sizes[-1] <= 24
    idle = RateLearner()
    use(idle, START, 1000)
    assert sent_at_once(idle, START) == 8


def test_requests_that_hang_hold_up_no_others_for_long() -> None:
    learner, now, sent = RateLearner(), 0.0, 0
    while now < 2.0:
        sent += sent_at_once(learner, now)
        now = learner.ready_at(now)
    assert 40 <= sent <= 60


def test_request_without_response_says_nothing_about_the_rate() -> None:
    """But another one may take its place."""
    learner = RateLearner()
    assert sent_at_once(learner, 0.0) == 8
    learner.release(0.01, 0.0, None)
    assert learner.ready_at(0.01) == 0.01
    assert learner.rate is None


def test_rate_above_what_is_remembered_is_measured() -> None:
    """Of 3,000 requests in two seconds the last 1,000 show the rate."""
    learner = RateLearner()
    now = use_at(learner, START, 3000, 1500.0)
    learner.acquire(now)
    learner.release(now, now, False)
    assert learner.ready_at(now) <= now
    assert learner.rate == pytest.approx(1000.0)
    now = use(learner, now, 5000)
    reached = rate_of(learner)
    learner.acquire(now)
    learner.release(now, now, False)
    learner.ready_at(now)
    assert reached / 3 <= rate_of(learner) <= reached


def use_at(learner: RateLearner, now: float, count: int, rate: float) -> float:
    """Send requests at this rate, all accepted at once; return the time after them."""
    for _ in range(count):
        assert learner.ready_at(now) <= now
        learner.acquire(now)
        learner.release(now, now, True)
        now += 1 / rate
    return now
