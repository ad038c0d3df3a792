"""The limit that is learnt from 429s, on a clock moved by hand: against services of several kinds, and step by step."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable

import attrs
import pytest

from signing_async.transport.rate_learner import Limit

START = 4096.0
"""An event loop's clock does not begin at zero."""

# Many calls against services of several kinds, in simulated time


class Bucket:
    """A token bucket."""

    def __init__(self, rate: float, burst: int) -> None:
        self.rate, self.burst, self.content, self.at = rate, burst, float(burst), START

    def wait(self, now: float) -> float | None:
        """None if the request is let through, else the seconds until one is."""
        self.content = min(self.burst, self.content + (now - self.at) * self.rate)
        self.at = now
        if self.content >= 1:
            self.content -= 1
            return None
        return (1 - self.content) / self.rate


class Window:
    """So many in each second."""

    def __init__(self, rate: int) -> None:
        self.rate, self.second, self.count = rate, -1, 0

    def wait(self, now: float) -> float | None:
        now += 0.37
        if math.floor(now) != self.second:
            self.second, self.count = math.floor(now), 0
        self.count += 1
        return None if self.count <= self.rate else self.second + 1 - now


class Sliding:
    """So many in the second before."""

    def __init__(self, rate: int) -> None:
        self.rate, self.let_through = rate, deque[float]()

    def wait(self, now: float) -> float | None:
        while self.let_through and self.let_through[0] <= now - 1:
            self.let_through.popleft()
        if len(self.let_through) >= self.rate:
            return self.let_through[0] + 1 - now
        self.let_through.append(now)
        return None


class Open:
    """No limit."""

    def wait(self, now: float) -> float | None:
        return None


class Ungated:
    """What a limit is, without one."""

    def ready_at(self, now: float) -> float:
        return now

    def go(self, now: float) -> None:
        pass

    def left(self, now: float, since: float, admitted: bool | None) -> None:
        pass


@attrs.define
class Told:
    """How a simulation went."""

    seconds: float
    requests: int
    refused: int
    late: float
    """The most that any refused request was sent before its pause was over."""


def whole(wait: float) -> float:
    """A Retry-After in whole seconds."""
    return max(1.0, math.ceil(wait))


def exact(wait: float) -> float:
    """A Retry-After to the millisecond."""
    return math.ceil(wait * 1000) / 1000


def simulate(
    limit: Limit | Ungated,
    service: Bucket | Window | Sliding | Open,
    *,
    calls: int = 500,
    at_once: int = 32,
    latency: float = 0.001,
    work: float = 0.001,
    retry_after: Callable[[float], float] = whole,
    began: float = START,
) -> Told:
    """``at_once`` workers make calls until they are let through; the service's one core has ``work`` to do for each."""
    ticket, now, free_at, wake_at, opens_at = itertools.count(), began, 0.0, math.inf, 0.0
    events: list[tuple[float, int, str, float, float | None]] = []
    waiting, to_start, told = min(at_once, calls), calls - min(at_once, calls), Told(0.0, 0, 0, 0.0)

    def push(at: float, kind: str, since: float = 0.0, wait: float | None = None) -> None:
        heapq.heappush(events, (at, next(ticket), kind, since, wait))

    while True:
        while waiting:
            ready_at = limit.ready_at(now)
            if ready_at > now:
                if ready_at < wake_at or wake_at <= now:
                    wake_at = ready_at
                    push(ready_at, "wake")
                break
            limit.go(now)
            told.late = max(told.late, opens_at - now)
            waiting, told.requests = waiting - 1, told.requests + 1
            free_at = max(now + latency / 2, free_at) + work
            push(free_at, "arrived", now)
        if not events:
            return told
        now, _, kind, since, wait = heapq.heappop(events)
        assert now - began < 600, "too slow to be waited for"
        if kind == "arrived":
            push(now + latency / 2, "answered", since, service.wait(now))
        elif kind == "answered" and wait is None:
            limit.left(now, since, True)
            told.seconds = now - began
            if to_start:
                to_start, waiting = to_start - 1, waiting + 1
        elif kind == "answered":
            assert isinstance(limit, Limit)
            assert wait is not None
            limit.left(now, since, False)
            limit.close(now, retry_after(wait))
            opens_at = max(opens_at, now + retry_after(wait))
            told.refused, waiting = told.refused + 1, waiting + 1


def test_a_limit_is_used_and_kept() -> None:
    """50 a second are allowed: 500 calls take hardly longer than 10 s, and few are refused."""
    told = simulate(Limit(), Bucket(50, 50))
    assert told.seconds <= 1.15 * 9
    assert told.refused <= 0.03 * told.requests


@pytest.mark.parametrize(
    ("service", "retry_after", "slower", "refused"),
    [
        (lambda: Bucket(50, 50), exact, 1.1, 0.03),
        (lambda: Bucket(50, 10), whole, 1.4, 0.05),
        (lambda: Bucket(50, 10), exact, 1.1, 0.05),
        (lambda: Bucket(50, 1), whole, 1.7, 0.03),
        (lambda: Bucket(50, 1), exact, 1.3, 0.03),
        (lambda: Window(50), whole, 1.25, 0.03),
        (lambda: Window(50), exact, 1.25, 0.03),
        (lambda: Sliding(50), whole, 1.25, 0.03),
        (lambda: Sliding(50), exact, 1.25, 0.03),
    ],
)
def test_limits_of_all_kinds(
    service: Callable[[], Bucket | Window | Sliding],
    retry_after: Callable[[float], float],
    slower: float,
    refused: float,
) -> None:
    """However the service counts, and however it rounds its Retry-After."""
    told = simulate(Limit(), service(), retry_after=retry_after)
    assert told.seconds <= slower * 9.98
    assert told.refused <= refused * told.requests


@pytest.mark.parametrize("latency", [0.001, 0.02, 0.1, 0.2])
@pytest.mark.parametrize("burst", [1, 10, 50])
def test_limits_far_away(latency: float, burst: int) -> None:
    """The longer an answer takes, the more is under way when the first refusal comes; it is no more than that."""
    told = simulate(Limit(), Bucket(50, burst), latency=latency, retry_after=exact)
    assert told.seconds <= 2.2 * 10
    assert told.refused <= 0.08 * told.requests


def test_a_high_limit_is_found() -> None:
    """1000 a second of which 100 may come at once: the first guess is far too low, and soon corrected."""
    told = simulate(Limit(), Bucket(1000, 100), calls=8000, work=0.0003, retry_after=exact)
    assert told.seconds <= 2 * 8
    assert told.refused <= 0.01 * told.requests


def test_a_limit_that_was_lifted_is_left_behind() -> None:
    """The rate grows beyond all that was learnt while nothing is refused."""
    limit, service = Limit(), Bucket(50, 10)
    simulate(limit, service, calls=200)
    assert limit.rate is not None
    assert limit.rate < 60
    service.rate, service.burst = 1e6, 10**6
    now = START + 100.0
    for _ in range(20_000):
        now = max(now, limit.ready_at(now))
        limit.go(now)
        limit.left(now, now, True)
    assert limit.rate > 1000


def test_a_rate_that_is_not_used_does_not_grow() -> None:
    """That few requests went well says nothing about many."""
    limit = Limit()
    simulate(limit, Bucket(50, 10), calls=200)
    limit.ready_at(START + 100.0)
    before = limit.rate
    assert before is not None
    for number in range(1000):
        now = START + 100.0 + number
        assert limit.ready_at(now) <= now
        limit.go(now)
        limit.left(now, now, True)
    assert limit.rate is not None
    assert limit.rate <= 1.1 * before


@pytest.mark.parametrize("latency", [0.001, 0.05])
def test_nothing_is_slower_where_nothing_is_refused(latency: float) -> None:
    """Before the first 429 no more than the first moments are held back."""
    gated, plain = (simulate(limit, Open(), calls=5000, latency=latency) for limit in (Limit(), Ungated()))
    assert plain.seconds >= 0.97 * gated.seconds
    assert gated.refused == 0


HOUR = 3600.0


def one_by_one(limit: Limit, service: Bucket | Window, now: float, calls: int, apart: float) -> float:
    """So many calls with as much time between them, of which none is refused; the time after that."""
    for _ in range(calls):
        now = max(now, limit.ready_at(now))
        limit.go(now)
        assert service.wait(now) is None
        limit.left(now, now, True)
        now += apart
    return now


@pytest.mark.parametrize("service", [lambda: Bucket(50, 50), lambda: Bucket(50, 10), lambda: Window(50)])
@pytest.mark.parametrize(("calls", "apart"), [(3600, 1.0), (300, 60.0), (30, HOUR)])
def test_a_quiet_time_before_many_calls_says_nothing(
    service: Callable[[], Bucket | Window], calls: int, apart: float
) -> None:
    """That few were asked for is no limit: what comes then is as fast as it would have been at first."""
    limit, served = Limit(), service()
    now = one_by_one(limit, served, START, calls, apart)
    told, fresh = simulate(limit, served, calls=300, began=now), simulate(Limit(), service(), calls=300)
    assert told.refused
    assert told.seconds <= 1.1 * fresh.seconds + 1


def test_a_quiet_time_where_nothing_may_come_at_once() -> None:
    """Then the quiet time is all that was seen, but not believed for long."""
    limit, served = Limit(), Bucket(50, 1)
    now = one_by_one(limit, served, START, 3600, 1.0)
    assert simulate(limit, served, calls=60, began=now).seconds <= 12


def test_the_first_rate_after_a_quiet_time() -> None:
    """It is what came through at last, if that was more in a second than from the beginning on."""
    limit = Limit()
    now = one_by_one(limit, Bucket(50, 50), START, 30, HOUR)
    for _ in range(42):
        limit.go(now)
    for _ in range(41):
        limit.left(now, now, True)
    refuse(limit, now + 0.5, 1.5)
    assert limit.rate == pytest.approx(20.5)


def test_time_after_a_refusal_is_no_pause() -> None:
    """If nobody waited for the end of it, and the next calls come an hour later, they are not slower for that."""
    limit = Limit()
    now = burst(limit, 100, 1.0, 1.0, then=HOUR)
    assert limit.rate == pytest.approx(50.0)
    assert let_out(limit, now) == 1


@pytest.mark.parametrize("service", [lambda: Bucket(50, 50), lambda: Bucket(50, 10), lambda: Window(50)])
def test_a_quiet_time_between_two_refusals_says_nothing(service: Callable[[], Bucket | Window]) -> None:
    """However many were let through, in whatever time, since the last one: as fast as at first."""
    fresh = simulate(Limit(), service(), calls=300)
    limit, served = Limit(), service()
    simulate(limit, served, calls=300)
    now = one_by_one(limit, served, START + HOUR, 500, 1 / 40)
    for wait in (0.0, HOUR, HOUR):
        now += wait
        told = simulate(limit, served, calls=300, began=now)
        assert told.seconds <= 1.1 * fresh.seconds + 2
        now += told.seconds


def test_a_low_limit_is_kept() -> None:
    """One in two seconds, and five at once: that little is asked for is no quiet time."""
    told = simulate(Limit(), Bucket(0.5, 5), calls=60, retry_after=exact)
    assert told.seconds <= 1.1 * 110
    assert told.refused <= 40


def test_batches_within_a_limit_do_not_lower_it() -> None:
    """Few an hour, each of them at once: more than these were asked for the rate that was seen in them."""
    limit, served = Limit(), Bucket(50, 10)
    now = START + simulate(limit, served, calls=300).seconds
    for _ in range(30):
        now = one_by_one(limit, served, now + HOUR, 10, 0.0)
    assert simulate(limit, served, calls=300, began=now + HOUR).seconds <= 45


def test_nothing_goes_out_while_it_is_closed() -> None:
    """A Retry-After is kept to by all, whatever was learnt."""
    assert simulate(Limit(), Bucket(50, 10)).late == 0.0
    limit = Limit()
    limit.close(10.0, 5.0)
    limit.close(10.0, 1.0)
    assert limit.ready_at(14.9) == 15.0
    assert limit.ready_at(15.0) == 15.0


def test_refusals_of_one_burst_count_once() -> None:
    """All that was under way when the first was refused has the same to say."""
    limit = Limit()
    for _ in range(8):
        limit.go(0.0)
    for _ in range(8):
        limit.left(0.1, 0.0, False)
        limit.close(0.1, 1.0)
    limit.ready_at(1.1)
    rate = limit.rate
    limit.go(1.1)
    limit.left(1.2, 0.0, False)
    assert limit.ready_at(5.0) <= 5.0
    assert limit.rate == rate


def test_a_rate_is_never_given_up() -> None:
    """However often everything was refused, requests go out now and then."""
    limit, now = Limit(), 0.0
    for _ in range(200):
        assert limit.ready_at(now) <= now
        limit.go(now)
        limit.go(now)
        limit.left(now, now, False)
        limit.left(now, now, False)
        limit.close(now, 0.02)
        now += 0.02
    assert limit.ready_at(now) <= now
    limit.go(now)
    assert limit.ready_at(now) - now == pytest.approx(5.0)


def test_requests_that_hang_hold_up_nobody_for_long() -> None:
    """Others go out beside them, if not all in one moment."""
    limit = Limit()
    now, out = 0.0, 0
    while now < 2.0:
        ready_at = limit.ready_at(now)
        if ready_at <= now:
            limit.go(now)
            out += 1
        else:
            now = ready_at
    assert 40 <= out <= 60


def test_what_got_no_answer_says_nothing() -> None:
    """Neither of the rate nor against it; its place is free again."""
    limit = Limit()
    for _ in range(8):
        limit.go(0.0)
    assert limit.ready_at(0.0) > 0.0
    limit.left(0.01, 0.0, None)
    assert limit.ready_at(0.01) == 0.01
    assert limit.rate is None


def test_what_is_kept_is_bounded() -> None:
    """A million requests without a refusal leave no more behind than a thousand."""
    fresh, limit = Limit(), Limit()
    simulate(fresh, Open(), calls=5000)
    simulate(limit, Bucket(50, 10), calls=100)
    now = START + 100.0
    for _ in range(5000):
        now = max(now, limit.ready_at(now))
        limit.go(now)
        limit.left(now, now, True)
    pace = limit._pace
    assert pace is not None
    assert len(fresh._window.sent) == fresh._window.KEPT
    assert len(pace._sent) == pace.KEPT
    limit.left(now, now, False)
    limit.close(now, 1.0)
    limit.ready_at(now + 1.0)
    assert limit.rate is not None
    assert len(pace._sent) == 0


# The window: what goes out before the first refusal, moment by moment


def let_out(limit: Limit, now: float) -> int:
    """How many requests go out at this moment."""
    count = 0
    while limit.ready_at(now) <= now:
        limit.go(now)
        count += 1
    return count


def rounds(limit: Limit, seconds: list[float]) -> list[int]:
    """How many go out at once, each time after all of those before were answered, which takes so long."""
    now, sizes = START, [let_out(limit, START)]
    for wait in seconds:
        now += wait
        for _ in range(sizes[-1]):
            limit.left(now, now - wait, True)
        sizes.append(let_out(limit, now))
    return sizes


def test_eight_begin_and_one_more_goes_at_a_time() -> None:
    """However few are answered; and a window that was widened so stays as wide."""
    limit = Limit()
    assert let_out(limit, START) == 8
    now = limit.ready_at(START)
    assert now - START == pytest.approx(0.05)
    assert let_out(limit, now) == 1
    before, now = now, limit.ready_at(now)
    assert now - before == pytest.approx(0.05)
    assert let_out(limit, now) == 1
    for _ in range(10):
        limit.left(now, START, None)
    assert let_out(limit, now) == 10


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [
        ([1 / 32] * 5, [8, 8, 16, 32, 64, 128]),
        ([1 / 32, 1 / 32, 5 / 128], [8, 8, 16, 32]),
        ([1 / 32, 1 / 32, 3 / 64, 3 / 64], [8, 8, 16, 11, 11]),
        ([1 / 32, 1 / 32, 1 / 16, 1 / 32], [8, 8, 16, 8, 9]),
        ([1 / 32, 1 / 32, 1 / 8, 1 / 32], [8, 8, 16, 8, 9]),
    ],
)
def test_more_go_at_once_while_that_pays(seconds: list[float], sizes: list[int]) -> None:
    """Twice as many while that is much faster, else as many as it was faster; the first round makes connections."""
    assert rounds(Limit(), seconds) == sizes


def test_the_window_opens_with_each_answer() -> None:
    """It does not wait for the end of a round; and what is not faster is taken back at its end."""
    limit, now, under_way, sizes = Limit(), START, let_out(Limit(), START), list[int]()
    assert let_out(limit, now) == under_way
    for number in range(64):
        now += 1 / 1024 if number < 16 else 1 / 2048
        limit.left(now, now, True)
        under_way += let_out(limit, now) - 1
        sizes.append(under_way)
    assert sizes == [8] * 15 + list(range(16, 33)) + list(range(33, 64)) + [62]


def test_a_window_that_did_not_pay_is_widened_with_time() -> None:
    """By one in 32 answers, then faster and faster."""
    limit = Limit()
    under_way = rounds(limit, [1 / 32, 1 / 32, 1 / 8])[-1]
    now, sizes = START + 3 / 16, list[int]()
    for _ in range(96):
        limit.left(now, now, True)
        under_way += let_out(limit, now) - 1
        sizes.append(under_way)
    assert [sizes.index(size) + 1 for size in (9, 10, 11, 12, 13, 17)] == [1, 32, 45, 55, 64, 91]


# The pace: what one refusal and the next teach


def refuse(limit: Limit, now: float, pause: float, then: float = 0.0) -> float:
    """A request that is under way is refused; the time at which the pause is over, and somebody asks."""
    limit.left(now, now, False)
    limit.close(now, pause)
    assert limit.ready_at(now + pause / 2) == now + pause
    asked = now + pause + then
    assert limit.ready_at(asked) == now + pause
    return asked


def burst(limit: Limit, count: int, seconds: float, pause: float, then: float = 0.0) -> float:
    """So many are let through at once, as the first of all; one more is refused, after these seconds."""
    for _ in range(count + 1):
        limit.go(START)
    for _ in range(count):
        limit.left(START, START, True)
    return refuse(limit, START + seconds, pause, then)


def lesson(limit: Limit, now: float, count: int, rate: float, pause: float = 0.0) -> float:
    """So many are let through at this rate, and then one is refused; the time at which the pause is over."""
    for _ in range(count):
        now += 1 / rate
        limit.go(now)
        limit.left(now, now, True)
    limit.go(now)
    return refuse(limit, now, pause)


def settled() -> tuple[Limit, float]:
    """A limit that has seen 50 a second for a while, and ten at once; the time at which that was."""
    limit = Limit()
    return limit, lesson(limit, lesson(limit, burst(limit, 10, 0.2, 0.0), 25, 50.0), 100, 50.0)


def rate_of(limit: Limit) -> float:
    """The present rate, which is known."""
    assert limit.rate is not None
    return limit.rate


def use(limit: Limit, now: float, until: Callable[[float, float], bool]) -> tuple[float, float]:
    """Use the rate to the full until it is enough; the seconds that took, and the rate then."""
    began = now
    while not until(now - began, rate_of(limit)):
        now = limit.ready_at(now)
        limit.go(now)
        limit.left(now, now, True)
    return now - began, rate_of(limit)


@pytest.mark.parametrize(("let_through", "rate"), [(0, 1.0), (1, 1.0), (2, 2.0), (10, 10.0)])
def test_the_first_rate_after_few(let_through: int, rate: float) -> None:
    """Between what came through up to the refusal, within 0.5 s, and up to the end of the pause, within 2 s."""
    limit = Limit()
    burst(limit, let_through, 0.5, 1.5)
    assert limit.rate == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize(
    ("count", "seconds", "pause", "rate"),
    [
        (100, 2.0, 0.5, 40.0),
        (100, 0.1, 0.2, 100.0),
        (100, 0.0, 0.0, 100.0),
        (100, 0.5, 1.5, 50.0),
        (20, 0.1, 0.2, 20.0),
        (3000, 2.0, 1.0, 1000.0),
    ],
)
def test_the_first_rate_after_many(count: int, seconds: float, pause: float, rate: float) -> None:
    """What came through up to the end of the pause, as so many a second, and in a second at the least."""
    limit = Limit()
    burst(limit, count, seconds, pause)
    assert limit.rate == pytest.approx(rate)


def test_the_first_rate_after_no_time() -> None:
    """Where all came in one moment, the rate is high, and a number."""
    limit = Limit()
    now = burst(limit, 1, 0.0, 0.0)
    assert limit.rate == pytest.approx(1000.0)
    assert limit.ready_at(now) == now


@pytest.mark.parametrize(("pause", "plateau"), [(0.05, 0.5), (0.3, 1.5), (0.9, 4.5), (3.0, 5.0)])
def test_a_first_rate_is_kept_for_a_while(pause: float, plateau: float) -> None:
    """The dearer an error, the longer nothing beyond is tried; then it grows, hardly at first."""
    limit = Limit()
    now = burst(limit, 100, 0.1, pause)
    first = rate_of(limit)
    seconds, rate = use(limit, now, lambda seconds, rate: seconds >= 0.95 * plateau)
    assert rate == first
    _, rate = use(limit, now + seconds, lambda seconds, rate: seconds >= plateau)
    assert 1.05 * first <= rate <= 1.1 * first


@pytest.mark.parametrize(
    ("count", "span", "catches_up"),
    [(4, 0.5, False), (5, 0.5, True), (100, 0.5, True), (1, 1.0, False), (4, 0.015, False), (4, 0.0125, True)],
)
def test_what_a_timer_was_late_is_caught_up(count: int, span: float, catches_up: bool) -> None:
    """Up to 10 ms of it, where the service lets a few come at once, or the rate is so high that all is a burst."""
    limit = Limit()
    now = burst(limit, count, span, span)
    space = 1 / rate_of(limit)
    limit.go(now + 0.004)
    due = limit.ready_at(now)
    assert due - now == pytest.approx(space if catches_up else 0.004 + space)
    space = 1 / rate_of(limit)
    limit.go(due + 1.0)
    assert limit.ready_at(due) - due == pytest.approx(0.99 + space if catches_up else 1.0 + space)


def test_a_rate_at_which_all_is_refused_falls() -> None:
    """By a fifth for each refusal."""
    limit = Limit()
    now = burst(limit, 100, 1.0, 0.0)
    for rate in (80.0, 64.0, 51.2):
        limit.go(now)
        now = refuse(limit, now, 1.0)
        assert limit.rate == pytest.approx(rate)


def test_it_goes_on_a_little_below_what_was_seen() -> None:
    """What came through between two refusals is the rate, and is approached from below."""
    limit, now = settled()
    assert limit.rate == pytest.approx(0.95 * 50, rel=0.01)
    seconds, _ = use(limit, now, lambda seconds, rate: rate >= 49.9)
    assert seconds == pytest.approx(10.0, rel=0.05)


def test_few_do_not_refute_many() -> None:
    """What was learnt from a hundred is hardly changed by five."""
    limit, now = settled()
    lesson(limit, now, 5, 10.0)
    assert rate_of(limit) > 35


def test_a_few_more_are_averaged() -> None:
    """Five in one second, and five in the quarter of one: ten in one and a quarter."""
    limit = Limit()
    lesson(limit, lesson(limit, burst(limit, 10, 2.0, 0.0), 5, 5.0), 5, 20.0)
    assert rate_of(limit) == pytest.approx(0.95 * 8, rel=0.01)


def test_what_was_long_ago_is_forgotten() -> None:
    """Two hundred later nothing is left of a thousand at another rate."""
    limit, now = settled()
    for _ in range(20):
        now = lesson(limit, now, 50, 50.0)
    for _ in range(4):
        now = lesson(limit, now, 50, 25.0)
    assert rate_of(limit) == pytest.approx(0.95 * 25, rel=0.05)


def test_more_than_is_kept_is_counted() -> None:
    """Five hundred that came through in half a second are a thousand in one."""
    limit = Limit()
    now = burst(limit, 4, 0.001, 0.001)
    lesson(limit, now, 500, 1000.0)
    assert rate_of(limit) == pytest.approx(0.95 * 1000, rel=0.01)


@pytest.mark.parametrize(("pause", "rate", "plateau"), [(0.0, 33.5, 2.38), (1.0, 26.5, 7.0), (2.0, 25.8, 10.5)])
def test_dear_errors_are_avoided(pause: float, rate: float, plateau: float) -> None:
    """Of 25 a second that were seen and 45 that were tried, the longer the pause the less is tried, and the later."""
    limit, now = settled()
    now = lesson(limit, now, 100, 25.0, pause)
    assert rate_of(limit) == pytest.approx(0.95 * 25, rel=0.01)
    seconds, reached = use(limit, now, lambda seconds, rate: seconds >= plateau)
    assert reached == pytest.approx(rate, rel=0.03)
    more, _ = use(limit, now + seconds, lambda seconds, now: now >= 1.5 * rate)
    assert more == pytest.approx(1.84 * plateau, rel=0.05)


def test_what_is_much_less_than_was_hoped_is_not_believed_at_once() -> None:
    """Of 10 a second that were seen where 45 were tried, the truth may lie between: half of that is where it begins."""
    limit, now = settled()
    lesson(limit, now, 100, 10.0)
    assert rate_of(limit) == pytest.approx(10.6, rel=0.02)


def test_a_rate_grows_steadily_in_the_end() -> None:
    """No faster than by eight times itself in each plateau's time: of a service without a limit not all is asked."""
    limit = Limit()
    now = burst(limit, 2, 1.0, 0.0)
    first = rate_of(limit)
    seconds, rate = use(limit, now, lambda seconds, rate: seconds >= 10.5)
    assert rate / first == pytest.approx(1 + 8 * 20, rel=0.02)
    _, rate = use(limit, now + seconds, lambda seconds, rate: seconds >= 10.0)
    assert rate / first == pytest.approx(1 + 8 * 40, rel=0.02)


@pytest.mark.parametrize(
    ("count", "pause", "plateau"),
    [(1, 0.0, 0.5), (5, 0.0, 1.0), (10, 0.0, 2.0), (50, 0.0, 10.0), (19, 1.0, 3.8), (20, 1.0, 7.0)],
)
def test_the_more_was_seen_the_longer_it_is_believed(count: int, pause: float, plateau: float) -> None:
    """A fifth of a second for each request, and ten seconds at most; from twenty on longer than the error was dear."""
    limit = Limit()
    now = lesson(limit, burst(limit, 10, 0.1, 0.0), count, 100.0, pause)
    seconds, _ = use(limit, now, lambda seconds, rate: rate >= 200.0)
    assert seconds == pytest.approx(3.32 * plateau, rel=0.07)
