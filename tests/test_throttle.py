"""The limit that is learnt from 429s, on a clock moved by hand; the gate that holds calls to it, on the loop's."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable

import attrs
import pytest
from aiohttp import web

from signing_async import (
    ConfigurationError,
    Gate,
    LocalGate,
    RateLimited,
    RequestTimeout,
    RetryPolicy,
    SigningClient,
    TransportError,
)
from signing_async.limit import Limit
from signing_async.sandbox import Sandbox
from signing_async.throttle import Pause
from tests.servers import serving

FOREVER = 1e9

# The limit: many calls against services of several kinds, in simulated time


class Bucket:
    """A token bucket."""

    def __init__(self, rate: float, burst: int) -> None:
        self.rate, self.burst, self.content, self.at = rate, burst, float(burst), 0.0

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
) -> Told:
    """``at_once`` workers make calls until they are let through; the service's one core has ``work`` to do for each."""
    ticket, now, free_at, wake_at, opens_at = itertools.count(), 0.0, 0.0, math.inf, 0.0
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
        assert now < 600, "too slow to be waited for"
        if kind == "arrived":
            push(now + latency / 2, "answered", since, service.wait(now))
        elif kind == "answered" and wait is None:
            limit.left(now, since, True)
            told.seconds = now
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
    now = 100.0
    for _ in range(20_000):
        now = max(now, limit.ready_at(now))
        limit.go(now)
        limit.left(now, now, True)
    assert limit.rate > 1000


def test_a_rate_that_is_not_used_does_not_grow() -> None:
    """That few requests went well says nothing about many."""
    limit = Limit()
    simulate(limit, Bucket(50, 10), calls=200)
    limit.ready_at(100.0)
    before = limit.rate
    assert before is not None
    for number in range(1000):
        now = 100.0 + number
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
    assert limit.ready_at(now) - now <= 5.1


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
    limit = Limit()
    simulate(limit, Bucket(50, 10), calls=100)
    now = 100.0
    for _ in range(5000):
        now = max(now, limit.ready_at(now))
        limit.go(now)
        limit.left(now, now, True)
    pace = limit._pace
    assert pace is not None
    assert len(pace._sent) == pace.KEPT
    limit.left(now, now, False)
    limit.close(now, 1.0)
    limit.ready_at(now + 1.0)
    assert limit.rate is not None
    assert len(pace._sent) == 0


# The gate


@pytest.mark.parametrize("make", [Pause, LocalGate])
async def test_the_gate_opens_when_it_was_said(make: Callable[[], Pause | LocalGate]) -> None:
    """No sooner, whatever else is asked for meanwhile."""
    gate, loop = make(), asyncio.get_running_loop()
    assert await gate.passed(loop.time() + 60)
    began = loop.time()
    gate.close(0.2)
    gate.close(0.01)
    loop.call_later(0.1, gate.close, 0.2)
    assert await gate.passed(began + 60)
    assert loop.time() - began >= 0.3
    assert gate.opens_at <= loop.time()


@pytest.mark.parametrize("make", [Pause, LocalGate])
async def test_the_gate_turns_away_who_cannot_wait(make: Callable[[], Pause | LocalGate]) -> None:
    """At once, or as soon as it is closed for longer."""
    gate, loop = make(), asyncio.get_running_loop()
    gate.close(0.05)
    loop.call_later(0.02, gate.close, 60)
    began = loop.time()
    assert not await gate.passed(began + 10)
    assert not await gate.passed(began + 10)
    assert loop.time() - began < 5


async def learnt(gate: LocalGate, count: int) -> None:
    """Have the gate learn that so many may come at once, and then no more for a moment."""
    loop = asyncio.get_running_loop()
    for _ in range(count):
        assert await gate.passed(FOREVER)
        gate.left(loop.time(), True)
    since = loop.time()
    assert await gate.passed(FOREVER)
    gate.left(since, False)
    gate.close(0.01)
    await asyncio.sleep(0.02)
    assert await gate.passed(FOREVER)
    gate.left(loop.time(), True)
    assert gate.rate is not None


async def test_calls_wait_in_line() -> None:
    """None is overtaken, not even by one that finds the gate open."""
    gate, order = LocalGate(), list[int]()
    await learnt(gate, 100)

    async def go(number: int) -> None:
        assert await gate.passed(FOREVER)
        order.append(number)
        gate.left(asyncio.get_running_loop().time(), True)

    await asyncio.gather(*(go(number) for number in range(20)))
    assert order == list(range(20))
    assert len(gate._waiting) == 0


async def test_none_is_overtaken_where_the_gate_is_open() -> None:
    """One that comes when the next turn is due, and not yet given, joins the line."""
    gate, order = LocalGate(), list[str]()
    await learnt(gate, 20)

    async def go(name: str) -> None:
        assert await gate.passed(FOREVER)
        order.append(name)

    first, second = asyncio.create_task(go("first")), asyncio.create_task(go("second"))
    await asyncio.sleep(0)
    time.sleep(0.5)
    await asyncio.wait_for(go("late"), 30)
    await asyncio.gather(first, second)
    assert order == ["first", "second", "late"]


async def test_nobody_slips_through_before_a_429_closes_the_gate() -> None:
    """The place that a refused request leaves is given to nobody before it is known for how long to wait."""
    gate = LocalGate()
    for _ in range(8):
        assert await gate.passed(FOREVER)
    waiting = asyncio.create_task(gate.passed(FOREVER))
    await asyncio.sleep(0)
    gate.left(asyncio.get_running_loop().time(), False)
    gate.close(60)
    await asyncio.sleep(0.1)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_a_call_whose_turn_comes_too_late_is_told_so() -> None:
    """Where so many wait that its deadline passes, it is turned away then, and the gate says when its turn would be."""
    gate, loop = LocalGate(), asyncio.get_running_loop()
    await learnt(gate, 20)
    now = loop.time()
    others = [asyncio.create_task(gate.passed(FOREVER)) for _ in range(50)]
    await asyncio.sleep(0)
    assert not await gate.passed(now + 0.05)
    assert gate.opens_at > now + 0.5
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert len(gate._waiting) == 0


async def test_a_cancelled_call_gives_its_place_back() -> None:
    """Before its turn it leaves the line; with its turn in hand it lets another one go."""
    gate = LocalGate()
    for _ in range(8):
        assert await gate.passed(FOREVER)
    gate._limit._window.PATIENCE = FOREVER  # a constant for all but this test
    first, second, third = (asyncio.create_task(gate.passed(FOREVER)) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    assert len(gate._waiting) == 2
    gate.left(0.0, None)
    gate._let_through()  # the second's turn comes, and before it runs
    second.cancel()
    assert await third
    assert first.cancelled()
    assert second.cancelled()
    fourth, fifth = (asyncio.create_task(gate.passed(FOREVER)) for _ in range(2))
    await asyncio.sleep(0)
    fourth.cancel()
    gate.left(0.0, None)
    gate._let_through()  # before the fourth has left the line
    assert await fifth
    assert fourth.cancelled()
    assert len(gate._waiting) == 0


def test_a_gate_outlives_its_event_loop() -> None:
    """A worker that has one gate, and an event loop for each job: who waited in the last one holds up nobody."""
    gate = LocalGate()

    async def give_up() -> None:
        gate.close(0.05)
        waiting = [asyncio.create_task(gate.passed(math.inf)) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()

    async def wait() -> bool:
        async with asyncio.timeout(20):
            return await gate.passed(math.inf)

    asyncio.run(give_up())
    assert asyncio.run(wait())


async def test_a_gate_without_calls_does_nothing() -> None:
    """No timer is left when nobody waits."""
    gate = LocalGate()
    assert repr(gate) == "<LocalGate: no limit seen, 0 waiting>"
    await learnt(gate, 100)
    await asyncio.gather(*(gate.passed(FOREVER) for _ in range(3)))
    assert gate._timer is None
    assert "requests a second, 0 waiting" in repr(gate)


# The gate in a client


@pytest.mark.parametrize("gate", [LocalGate, 5, object()])
def test_what_is_no_gate_is_refused(gate: object) -> None:
    """A class is not taken for a gate either."""
    with pytest.raises(ConfigurationError, match=r"gate: must be a Gate, such as LocalGate\(\), not"):
        SigningClient("https://tenant.example.com", "token", gate=gate)  # type: ignore[arg-type]  # that is the test


async def test_one_gate_holds_back_many_clients(sandbox: Sandbox) -> None:
    """A 429 of one client holds back another that has the same gate, and none that has its own."""
    gate: Gate = LocalGate()
    token = sandbox.access_token()
    async with (
        SigningClient(sandbox.base_url, token, gate=gate) as one,
        SigningClient(sandbox.base_url, token, gate=gate, timeout=5) as other,
        SigningClient(sandbox.base_url, token) as stranger,
    ):
        sandbox.faults.add("me", "429", retry_after=30)
        with pytest.raises(RateLimited):
            await one.with_options(timeout=10).me()
        with pytest.raises(RateLimited, match="nothing was sent"):
            await other.me()
        await stranger.me()
    assert len(sandbox.requests_of("me")) == 2


class Recording(LocalGate):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[object] = []

    def close(self, seconds: float) -> None:
        self.told.append(seconds)
        super().close(seconds)

    async def passed(self, deadline: float) -> bool:
        self.told.append("passed")
        return await super().passed(deadline)

    def left(self, since: float, admitted: bool | None) -> None:
        assert since <= asyncio.get_running_loop().time()
        self.told.append(admitted)
        super().left(since, admitted)


async def test_a_gate_is_told_of_every_end(sandbox: Sandbox) -> None:
    """Of each request that has passed, once, and before it is closed."""
    gate = Recording()
    sandbox.faults.add("me", "429", retry_after=0.01)
    sandbox.faults.add("me", "503")
    async with SigningClient(
        sandbox.base_url, sandbox.access_token(), gate=gate, retry=RetryPolicy(base_delay=0)
    ) as client:
        await client.me()
        sandbox.faults.add("me", "hang")
        with pytest.raises(RequestTimeout):
            await client.with_options(timeout=0.2).me()
    assert gate.told == ["passed", False, 0.01, "passed", True, "passed", True, "passed", None]


async def test_429s_that_others_cause_do_not_exhaust_a_call() -> None:
    """While others are let through, a call goes on until its deadline, however often it is refused."""
    refusals, reads = 6, 0
    moved = asyncio.Condition()

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal refusals, reads
        if "signings" in request.path:
            reads += 1
            async with moved:
                moved.notify_all()
            return web.json_response({"id": "one", "name": "Lease"})
        if not refusals:
            return web.json_response({"id": "user"})
        refusals -= 1
        # The second that comes from now on shows that the first one's answer was read.
        until = reads + 2
        async with moved:
            await moved.wait_for(lambda: reads >= until)
        return web.Response(status=429, headers={"Retry-After": "0.01"})

    async with (
        serving(answer) as server,
        SigningClient(server.origin, "token", retry=RetryPolicy(max_attempts=2, base_delay=0)) as client,
    ):

        async def read() -> None:
            while True:
                await client.signings.get("one")

        reading = asyncio.create_task(read())
        try:
            await client.me()
        finally:
            reading.cancel()
            await asyncio.wait([reading])
    assert refusals == 0
    assert [request.path for request in server.requests].count("/api/1.0/me") == 7


async def test_429s_to_a_lone_call_are_counted(sandbox: Sandbox) -> None:
    """Where nothing is let through, a call gives up after its attempts."""
    sandbox.faults.add("me", "429", times=None, retry_after=0)
    async with SigningClient(
        sandbox.base_url, sandbox.access_token(), retry=RetryPolicy(max_attempts=3, base_delay=0)
    ) as client:
        with pytest.raises(RateLimited, match="3 attempts were made"):
            await client.me()
    assert len(sandbox.requests_of("me")) == 3


async def test_a_call_that_may_try_once_tries_once(sandbox: Sandbox) -> None:
    """Without retries a 429 is raised, whatever became of the others."""
    async with SigningClient(sandbox.base_url, sandbox.access_token(), retry=RetryPolicy.none()) as client:
        await client.me()
        sandbox.faults.add("me", "429", retry_after=0)
        with pytest.raises(RateLimited, match="no retry is allowed"):
            await client.me()


async def test_a_retry_after_is_not_drawn_out(sandbox: Sandbox) -> None:
    """Whoever was told how long to wait waits no longer because of the policy's delays."""
    sandbox.faults.add("me", "429", retry_after=0.05)
    patient = RetryPolicy(base_delay=10_000, max_delay=10_000)
    async with SigningClient(sandbox.base_url, sandbox.access_token(), timeout=10, retry=patient) as client:
        await client.me()


async def test_calls_behind_hanging_ones_time_out_unsent(sandbox: Sandbox) -> None:
    """More than may go out at once while none is answered: all end in time, and none as refused."""
    sandbox.faults.add("signings.send", "hang", times=None)
    async with SigningClient(sandbox.base_url, sandbox.access_token(), timeout=0.3, retry=RetryPolicy.none()) as client:
        ends = await asyncio.gather(
            *(client.signings.send("00000000-0000-4000-8000-000000000000") for _ in range(60)), return_exceptions=True
        )
    # On a slow machine some do not even get a connection.
    unsent = [end for end in ends if type(end) in (RequestTimeout, TransportError)]
    assert all(isinstance(end, TransportError) for end in ends)
    assert len(unsent) == 60 - len(sandbox.requests_of("signings.send"))
    assert unsent


async def test_many_uploads_within_a_limit(sandbox: Sandbox) -> None:
    """All calls get through a service that refuses most of what comes at once, and few are refused."""
    async with SigningClient(sandbox.base_url, sandbox.access_token(), timeout=60) as client:
        sandbox.rate_limit(100, burst=20, retry_after=0.05)
        await asyncio.gather(*(client.me() for _ in range(100)))
    statuses = [record.status for record in sandbox.requests_of("me")]
    assert statuses.count(200) == 100
    assert statuses.count(429) <= 40
