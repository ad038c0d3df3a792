"""The gate in Redis: one worker's 429 holds all, one rate for all, and each by itself while Redis is away."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from signing_async import AuthError, ConfigurationError, Gate, LocalGate, RateLimited, RetryPolicy, SigningClient
from signing_async.redis import RedisGate, RedisTokenStore
from signing_async.redis.gate import _Turns
from tests.auth.oauth_servers import Scripted, oauth_for, says
from tests.redis.server import RedisServer, running_redis, slow_way

ME = {"id": "1", "name": "Ada", "email": "ada@example.com"}


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    """A Redis for all tests that do it no harm."""
    with running_redis() as server:
        yield server


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis of the test's own, to be harmed."""
    with running_redis() as server:
        yield server


def now() -> float:
    """By the loop's clock."""
    return asyncio.get_running_loop().time()


async def open_for(gate: Gate, seconds: float) -> bool:
    """Whether a request may go out within so many seconds; it is answered at once."""
    passed = await gate.passed(now() + seconds)
    if passed:
        gate.left(now(), True)
    return passed


async def closed_soon(gate: Gate) -> float:
    """Wait until the gate has heard that it is closed; for how long."""
    async with asyncio.timeout(20):
        while gate.opens_at <= now():
            await asyncio.sleep(0.005)
    return gate.opens_at - now()


# Closings


async def test_it_is_a_gate(shared: RedisServer) -> None:
    """It fits where a gate is wanted, lets everything pass at first, and leaves the rest to the local one."""

    class Watched(LocalGate):
        ended: tuple[float, bool | None] | None = None

        def left(self, since: float, admitted: bool | None) -> None:
            self.ended = (since, admitted)

    local = Watched()
    async with RedisGate(shared.url, "fits", local=local) as gate:
        assert isinstance(gate, Gate)
        assert await gate.passed(now() + 5)
        gate.left(1.5, True)
        assert local.ended == (1.5, True)
        assert gate.opens_at <= now()


async def test_a_429_of_one_worker_holds_all(shared: RedisServer) -> None:
    """Another worker's call waits for as long as the service asked, without sending; nothing was said to it."""
    async with (
        Scripted(says({}, 429, **{"Retry-After": "1"}), says(ME)) as server,
        RedisGate(shared.url, "429") as gate,
        RedisGate(shared.url, "429") as other,
        SigningClient(server.base_url, "token", gate=gate) as client,
        SigningClient(server.base_url, "token", gate=other, timeout=0.3) as hasty,
        SigningClient(server.base_url, "token", gate=other) as patient,
    ):
        await open_for(other, 5)
        call = asyncio.create_task(client.me())
        assert 0.3 < await closed_soon(other) <= 1.1
        with pytest.raises(RateLimited) as caught:
            await hasty.me()
        assert caught.value.retry_after is not None
        assert len(server.requests) == 1
        began = now()
        waits = other.opens_at - began
        await patient.me()
        assert now() - began >= waits - 0.01
        await call


async def test_a_worker_that_begins_later_is_held_too(shared: RedisServer) -> None:
    """It asks before its first request; a longer closing is not shortened by a shorter one."""
    async with RedisGate(shared.url, "later") as gate:
        await open_for(gate, 5)
        gate.close(30)
        gate.close(2)
        await asyncio.gather(*gate._telling)
        async with RedisGate(shared.url, "later") as late, RedisGate(shared.url, "another") as apart:
            assert not await open_for(late, 20)
            assert 20 < late.opens_at - now() <= 30.1
            assert await open_for(apart, 5)


async def test_a_closing_does_not_creep(shared: RedisServer) -> None:
    """However often a worker hears of one closing, its own included, its local gate is closed once."""

    class Counting(LocalGate):
        closed = 0

        def close(self, seconds: float) -> None:
            self.closed += 1
            super().close(seconds)

    one, two = Counting(), Counting()
    async with RedisGate(shared.url, "creep", local=one) as gate, RedisGate(shared.url, "creep", local=two) as other:
        await open_for(gate, 5)
        await open_for(other, 5)
        gate.close(60)
        opens = gate.opens_at
        await asyncio.sleep(1.3)
        assert opens <= gate.opens_at <= opens + 0.1
        assert (one.closed, two.closed) == (1, 1)


async def test_a_clock_of_its_own(shared: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose clock is wrong by an hour is held as long as the others."""
    import time

    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + 3600)
    async with RedisGate(shared.url, "clock", rate=1000) as gate, RedisGate(shared.url, "clock") as other:
        assert await open_for(other, 5)
        assert await open_for(gate, 5)
        gate.close(5)
        assert 4 < await closed_soon(other) <= 5.1


async def test_a_client_that_was_given(shared: RedisServer) -> None:
    """A client of the caller's serves many gates, whatever its own time-outs are, and is left open."""
    from redis.asyncio import Redis

    async with Redis.from_url(shared.url, socket_timeout=0.1, decode_responses=True) as client:
        async with RedisGate(client, "given") as gate, RedisGate(client, "given", rate=1000) as other:
            assert await open_for(gate, 5)
            assert await open_for(other, 5)
            await asyncio.sleep(0.3)
            gate.close(5)
            assert 3 < await closed_soon(other) <= 5.1
        assert await client.ping()


# The rate


async def spend(gates: list[RedisGate], each: int) -> list[float]:
    """When each of the requests could go out, in seconds from now."""
    times: list[float] = []
    began = now()

    async def one(gate: RedisGate) -> None:
        assert await open_for(gate, 60)
        times.append(now())

    await asyncio.gather(*(one(gate) for gate in gates for _ in range(each)))
    return [time - began for time in sorted(times)]


@pytest.mark.parametrize("workers", [1, 3])
async def test_all_keep_to_one_rate(shared: RedisServer, workers: int) -> None:
    """At any time no more requests went out than the rate and the burst allow, and no worker is left out."""
    name = f"rate-{workers}"
    gates = [RedisGate(shared.url, name, rate=200, burst=10) for _ in range(workers)]
    times = await spend(gates, 120 // workers)
    for gate in gates:
        await gate.aclose()
    assert len(times) == 120
    assert times[-1] >= (120 - 10 - 1) / 200 * 0.95
    for place, time in enumerate(times):
        assert place <= 10 + time * 200 + 2


async def test_a_turn_that_comes_too_late_is_not_waited_for(shared: RedisServer) -> None:
    """A call whose deadline is before its turn is told at once, with when its turn is, and takes none."""
    async with RedisGate(shared.url, "late", rate=1, burst=1) as gate:
        assert await open_for(gate, 5)
        began = now()
        assert not await open_for(gate, 0.4)
        assert not await open_for(gate, 0.4)
        assert now() - began < 0.4
        assert 0.5 < gate.opens_at - began <= 1.1
        assert await open_for(gate, 5)
        assert now() - began > 0.5


async def test_while_it_is_closed_no_turns_are_taken(shared: RedisServer) -> None:
    """After a closing the requests that waited go out at the rate, not all at once."""
    async with RedisGate(shared.url, "closed", rate=100, burst=1) as gate:
        await open_for(gate, 5)
        gate.close(0.3)
        assert not await open_for(gate, 0.1)
        opens = gate.opens_at - now()
        times = await spend([gate], 20)
        # One or two turns may have been fetched ahead.
        assert times[-1] >= opens + 15 / 100


async def test_no_name_reaches_the_rate_of_another(shared: RedisServer) -> None:
    """A gate may be called as the rate of another would be: its closing leaves that one as it was."""
    async with RedisGate(shared.url, "named", rate=100) as gate, RedisGate(shared.url, "named:rate") as other:
        assert await open_for(gate, 5)
        other.close(60)
        async with RedisGate(shared.url, "named:rate") as late:
            async with asyncio.timeout(20):
                while await open_for(late, 0.01):
                    await asyncio.sleep(0.02)
        for _ in range(30):
            assert await open_for(gate, 5)
        assert gate._together


async def test_who_is_cancelled_leaves_no_trace(shared: RedisServer) -> None:
    """The others go on; what a cancelled one had waited for lapses."""
    async with RedisGate(shared.url, "cancelled", rate=20, burst=1) as gate:
        await open_for(gate, 5)
        tasks = [asyncio.create_task(open_for(gate, 60)) for _ in range(5)]
        await asyncio.sleep(0.02)
        for task in tasks[:4]:
            task.cancel()
        assert await tasks[4]


def test_turns_lapse() -> None:
    """Turns are used one after the other; what was not used in its second is gone, in each of the rows."""
    turns = _Turns(0.25)
    assert turns.next(5.0) is None
    turns.add(10.0, 2)
    turns.add(20.0, 8)
    assert turns.next(9.0) == 10.0
    turns.take()
    assert turns.next(9.0) == 10.25
    assert len(turns) == 9
    assert turns.next(21.5) == 20.5
    assert len(turns) == 6
    turns.take()
    assert turns.next(21.5) == 20.75
    assert turns.next(30.0) is None
    assert len(turns) == 0


async def test_a_clock_of_redis_that_was_set_back_does_not_stop_the_workers(shared: RedisServer) -> None:
    """A turn that is hours ahead is taken for what it is."""
    from redis.asyncio import Redis

    async with Redis.from_url(shared.url) as client, RedisGate(shared.url, "ahead", rate=100) as gate:
        await client.set("signing:gate-rate:ahead", "99999999999")
        assert await open_for(gate, 5)


# Redis at fault


def warned(caplog: pytest.LogCaptureFixture) -> int:
    """How often the log warned."""
    return len([record for record in caplog.records if record.levelno >= logging.WARNING])


@pytest.mark.parametrize("fault", ["stopped", "killed"])
async def test_each_by_itself_while_redis_is_away(
    redis: RedisServer, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No call hangs, each worker keeps to the rate and to its own 429s, the log says it once, and later they are
    together again; a closing that still lasts is told then."""
    caplog.set_level(logging.INFO)
    async with (
        RedisGate(redis.url, "a", rate=100, burst=1, timeout=0.5) as gate,
        RedisGate(redis.url, "a", timeout=0.5) as other,
    ):
        await spend([gate], 2)
        await open_for(other, 5)
        caplog.clear()
        redis.stop() if fault == "stopped" else redis.kill()
        began = now()
        times = await spend([gate], 90)
        assert now() - began < 3
        assert times[-1] > 0.5
        async with asyncio.timeout(20):
            while warned(caplog) < 2:
                await asyncio.sleep(0.02)
        gate.close(8)
        await asyncio.sleep(0.7)
        assert not await open_for(gate, 1)
        assert await open_for(other, 1)
        assert warned(caplog) == 2
        assert "this worker goes by itself" in caplog.text
        redis.wake() if fault == "stopped" else redis.start()
        assert 2 < await closed_soon(other) < 8
        async with asyncio.timeout(20):
            while caplog.text.count("Redis is back") < 2:
                await asyncio.sleep(0.02)
        assert warned(caplog) == 2


async def test_a_first_call_while_redis_is_away(redis: RedisServer) -> None:
    """It waits for the time-out, not longer, and passes; those after it do not wait at all."""
    redis.stop()
    async with RedisGate(redis.url, "a", rate=1000) as gate:
        began = now()
        assert await open_for(gate, 30)
        assert now() - began < 2
        began = now()
        assert [await open_for(gate, 30) for _ in range(20)] == [True] * 20
        assert now() - began < 0.8
        async with RedisGate(redis.url, "b") as late:
            assert await open_for(late, 0.1)
    redis.wake()


async def test_a_call_that_needs_two_things_of_redis_while_it_is_away(redis: RedisServer) -> None:
    """First its turn and then its token: both together are waited for less than two seconds."""
    redis.stop()
    async with (
        RedisTokenStore(redis.url, "a") as store,
        oauth_for("http://127.0.0.1:9", store=store) as oauth,
        RedisGate(redis.url, "a", rate=100) as gate,
        SigningClient("http://127.0.0.1:9", oauth, gate=gate) as client,
    ):
        began = now()
        with pytest.raises(AuthError, match="the token store cannot be used"):
            await client.me()
        assert now() - began < 2
    redis.wake()


async def test_a_closing_that_is_over_is_not_told(redis: RedisServer) -> None:
    """What could not be told in time is no news when Redis is back."""
    async with RedisGate(redis.url, "a", timeout=0.2) as gate:
        await open_for(gate, 5)
        redis.kill()
        gate.close(0.3)
        async with asyncio.timeout(20):
            while gate._telling:
                await asyncio.sleep(0.02)
        redis.start()
        async with RedisGate(redis.url, "a") as other:
            assert await open_for(other, 0.5)


async def test_no_turn_comes_before_the_deadline(shared: RedisServer) -> None:
    """While turns are on their way, a call that cannot wait for them is told at its deadline."""
    async with slow_way(shared.port) as way, RedisGate(way.url, "way", rate=50) as gate:
        await open_for(gate, 5)
        await asyncio.sleep(0.25)
        way.delay = 0.3
        answers = [await open_for(gate, 0.05) for _ in range(3)]
        assert answers[-1] is False


async def test_a_slow_redis_holds_up_nobody(shared: RedisServer) -> None:
    """Turns are fetched ahead: with 20 ms each way, hundreds of requests do not wait for hundreds of answers."""
    async with slow_way(shared.port, 0.02) as way, RedisGate(way.url, "slow", rate=2000, burst=200) as gate:
        await open_for(gate, 5)
        began = now()
        for _ in range(400):
            assert await open_for(gate, 5)
        assert now() - began < 400 * 0.04 / 2


# Settings and the end


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": ""}, "name must be a text that is not empty, in whole characters, not ''"),
        ({"name": "half-\ud800"}, r"name must be a text that is not empty, in whole characters, not 'half-\\ud800'"),
        ({"prefix": 5}, "prefix must be a text, in whole characters, not 5"),
        ({"rate": 0}, "rate must be requests per second above 0, not 0"),
        ({"rate": True}, "rate must be requests per second above 0, not True"),
        ({"rate": 5, "burst": 0}, "burst must be a number of requests from 1, not 0"),
        ({"burst": 5}, "burst needs a rate"),
        ({"local": LocalGate}, "local must be a Gate, such as LocalGate"),
        ({"timeout": True}, "timeout must be seconds above 0, not True"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], words: str) -> None:
    """The error names the setting and the value."""
    with pytest.raises(ConfigurationError, match=words):
        RedisGate("redis://127.0.0.1", **settings)


@pytest.mark.parametrize("ending", ["", "await gate.aclose()"])
def test_forgotten_it_warns(shared: RedisServer, ending: str) -> None:
    """A gate that was used and never closed says so when the program ends; one that is closed can be used again."""
    lines = [
        "import asyncio",
        "from signing_async.redis import RedisGate",
        "async def main():",
        f"    gate = RedisGate({shared.url!r}, rate=50)",
        "    for _ in range(2):",
        "        assert await gate.passed(asyncio.get_running_loop().time() + 5)",
        f"        {ending or 'pass'}",
        "asyncio.run(main())",
    ]
    command = [sys.executable, "-W", "always", "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (f"RedisGate({shared.url!r}, 'default') was not closed" in done.stderr) is not bool(ending)
    assert bool(done.stderr) is not bool(ending)


async def test_a_gate_in_use_warns_when_it_is_dropped(shared: RedisServer) -> None:
    """Collected while it is open it warns, and does nothing else."""
    async with RedisGate(shared.url, "dropped") as gate:
        gate.__del__()
        await open_for(gate, 5)
        with pytest.warns(ResourceWarning, match="'dropped'"):
            gate.__del__()


async def test_many_calls_of_a_client_pass(shared: RedisServer) -> None:
    """Two clients on one shared gate make their calls."""
    async with (
        Scripted(says(ME)) as server,
        RedisGate(shared.url, "calls", rate=5000) as gate,
        SigningClient(server.base_url, "token", gate=gate, retry=RetryPolicy.none()) as client,
        SigningClient(server.base_url, "token", gate=gate, retry=RetryPolicy.none()) as second,
    ):
        await asyncio.gather(*(each.me() for each in (client, second) for _ in range(30)))
        assert len(server.requests) == 60


def test_a_gate_that_was_not_closed_works_in_a_second_event_loop(shared: RedisServer) -> None:
    """It hears of another worker's 429, fetches its turns, and tells the others of its own 429."""
    code = f"""
import asyncio
from signing_async.redis import RedisGate

gate = RedisGate({shared.url!r}, "loops", rate=200)

def now():
    return asyncio.get_running_loop().time()

async def passed(gate):
    return await gate.passed(now() + 10)

async def hear():
    async with RedisGate({shared.url!r}, "loops") as other:
        print(await passed(gate), await passed(other))
        other.close(60)
        async with asyncio.timeout(20):
            while gate.opens_at <= now() + 20:
                await asyncio.sleep(0.01)
        print("heard")

async def tell():
    gate.close(120)
    async with asyncio.timeout(20), RedisGate({shared.url!r}, "loops") as other:
        await passed(other)
        while other.opens_at <= now() + 90:
            await asyncio.sleep(0.01)
    print("told")

print(asyncio.run(passed(gate)))
asyncio.run(hear())
asyncio.run(tell())
asyncio.run(gate.aclose())
"""
    # The connections of the first loop are lost with it, which is a warning.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["True", "True", "True", "heard", "told"], done.stderr
    assert "Traceback" not in done.stderr
