"""Eight processes, one token that lives a second, and a server that revokes everything at the first replay."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.auth.store_races import Race, race
from tests.redis.server import RedisServer, running_redis


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis of the test's own."""
    with running_redis() as server:
        yield server


@pytest.mark.parametrize(("kind", "wrong_clocks"), [("file", ()), ("redis", (3600.0, -3600.0))])
async def test_eight_processes_with_kills_and_a_pause(
    kind: str, wrong_clocks: tuple[float, ...], redis: RedisServer, tmp_path: Path
) -> None:
    """Fifty calls each go well, with one refresh for each expiry, though two are killed and one is stopped for a while.

    With Redis, machines may differ: one clock is an hour fast there, and one an hour slow. These make fewer calls.
    """

    async def kill_and_stop(run: Race) -> None:
        await run.quiet()
        run.send(5, signal.SIGKILL)
        run.send(6, signal.SIGSTOP)
        await run.quiet()
        run.send(7, signal.SIGKILL)
        await asyncio.sleep(0.5)
        run.send(6, signal.SIGCONT)

    where = str(tmp_path / "token.json") if kind == "file" else redis.url
    run = await race(kind, where, wrong_clocks=wrong_clocks, meanwhile=kill_and_stop)
    assert sorted(run.done) == [12] * len(wrong_clocks) + [50] * (6 - len(wrong_clocks))
    assert not run.errors
    assert run.refused == 0
    assert len(run.refreshes) >= 3
    assert run.doubled == 0


async def test_eight_processes_and_redis_fails(redis: RedisServer) -> None:
    """It is killed and started again, stopped and woken, emptied: no refresh token is used twice, and all goes on."""

    async def fail(run: Race) -> None:
        await run.quiet()
        await asyncio.to_thread(redis.kill)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(redis.start)
        await run.quiet()
        redis.stop()
        await asyncio.sleep(1.5)
        redis.wake()
        await run.quiet()
        await asyncio.to_thread(redis.kill)
        redis.empty()
        await asyncio.to_thread(redis.start)

    run = await race("redis", redis.url, calls=80, meanwhile=fail)
    assert run.refused == 0
    assert all("cannot be" in error or "answer" in error or "lost its data" in error for error in run.errors), (
        run.errors
    )
    assert len(run.done) == 8
    assert min(run.done) >= 30, run.errors
    assert run.doubled == 0
