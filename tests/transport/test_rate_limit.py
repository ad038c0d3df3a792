"""The gate that holds calls to what the service lets through, alone and in a client; the budget for repeats."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import pytest
from aiohttp import web

from signing_async import (
    ConfigurationError,
    Gate,
    LocalGate,
    OutcomeUnknown,
    RateLimited,
    RequestTimeout,
    RetryPolicy,
    SigningClient,
    TransportError,
)
from signing_async.sandbox import Sandbox
from signing_async.transport.rate_limit import Pause
from tests.servers import serving

FOREVER = 1e9

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
    assert await gate.passed(began + 10) is False
    assert await gate.passed(began + 10) is False
    assert loop.time() - began < 5
    async with asyncio.timeout(20):
        assert await gate.passed(gate.opens_at) is False


async def test_an_open_gate_costs_no_turn_of_the_event_loop() -> None:
    """Most calls find it open, and are not held up by what else the loop has to do."""
    with pytest.raises(StopIteration) as over:
        LocalGate().passed(FOREVER).send(None)
    assert over.value.value is True


async def turns_of_the_loop(count: int) -> None:
    """Let what is due be done: no more time is needed than that takes."""
    for _ in range(count):
        await asyncio.sleep(0)


async def full_gate(gate: LocalGate) -> None:
    """As many pass as may before one of them is answered, however long that takes."""
    gate._limit._window.PATIENCE = FOREVER  # a constant for all but these tests
    for _ in range(8):
        assert await gate.passed(FOREVER)


async def test_who_waits_goes_when_another_is_answered() -> None:
    """At once, and in as great numbers as were answered."""
    gate = LocalGate()
    await full_gate(gate)
    first, second = (asyncio.create_task(gate.passed(FOREVER)) for _ in range(2))
    await turns_of_the_loop(5)
    assert not first.done()
    gate.left(asyncio.get_running_loop().time(), True)
    await turns_of_the_loop(5)
    assert first.done()
    assert not second.done()
    gate.left(asyncio.get_running_loop().time(), None)
    await turns_of_the_loop(5)
    assert second.done()


async def test_who_waits_is_turned_away_when_the_gate_closes() -> None:
    """At once, where it closes for longer than that call can wait; the others stay in line."""
    gate, loop = LocalGate(), asyncio.get_running_loop()
    await full_gate(gate)
    hasty, patient = (asyncio.create_task(gate.passed(loop.time() + wait)) for wait in (30, 90))
    await turns_of_the_loop(5)
    gate.close(60)
    await turns_of_the_loop(5)
    assert hasty.done()
    assert await hasty is False
    assert not patient.done()
    patient.cancel()
    await asyncio.wait([patient])


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
    assert await gate.passed(now + 0.05) is False
    assert gate.opens_at > now + 0.5
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert len(gate._waiting) == 0


async def test_a_cancelled_call_gives_its_place_back() -> None:
    """Before its turn it leaves the line; with its turn in hand it lets another one go."""
    gate = Recording()
    await full_gate(gate)
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


async def test_a_call_cancelled_while_it_is_turned_away_gives_nothing_back() -> None:
    """It had no place."""
    gate = Recording()
    await full_gate(gate)
    waiting = asyncio.create_task(gate.passed(asyncio.get_running_loop().time() + 30))
    await turns_of_the_loop(5)
    gate.close(60)
    gate._let_through()  # it is turned away, and before it runs
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert gate.told == 9 * ["passed"] + [60]


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
    with pytest.raises(ConfigurationError, match=r"gate: must be a Gate, such as LocalGate\(\), got"):
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
    assert all(isinstance(end, TransportError | OutcomeUnknown) for end in ends)
    # What was cut off on its way may not have arrived; nothing that did arrive is called unsent.
    assert len(unsent) <= 60 - len(sandbox.requests_of("signings.send"))
    assert unsent


async def test_many_uploads_within_a_limit(sandbox: Sandbox) -> None:
    """All calls get through a service that refuses most of what comes at once, and few are refused."""
    async with SigningClient(sandbox.base_url, sandbox.access_token(), timeout=60) as client:
        sandbox.rate_limit(100, burst=20, retry_after=0.05)
        await asyncio.gather(*(client.me() for _ in range(100)))
    statuses = [record.status for record in sandbox.requests_of("me")]
    assert statuses.count(200) == 100
    assert statuses.count(429) <= 40
