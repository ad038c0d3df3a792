"""Eight processes, one token that lives a second, and a server that revokes all tokens at the first replay."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.auth.store_races import Race, kill_outside_a_refresh, race
from tests.redis.server import RedisServer, running_redis


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis for one test."""
    with running_redis() as server:
        yield server


@pytest.mark.parametrize(("kind", "wrong_clocks"), [("file", ()), ("redis", (3600.0, -3600.0))])
async def test_eight_processes_refresh_once_per_expiry_despite_kills_and_a_pause(
    kind: str, wrong_clocks: tuple[float, ...], redis: RedisServer, tmp_path: Path
) -> None:
    """All calls of the surviving processes succeed, although two are killed and one is stopped for a while.

    With Redis, one machine's clock is an hour fast and one is an hour slow; these processes make fewer calls.
    """
    where = str(tmp_path / "token.json") if kind == "file" else redis.url

    async def kill_and_stop(run: Race) -> None:
        await run.quiet()
        await kill_outside_a_refresh(run, 5, kind, where)
        run.send(6, signal.SIGSTOP)
        await run.quiet()
        await kill_outside_a_refresh(run, 7, kind, where)
        await asyncio.sleep(0.5)
        run.send(6, signal.SIGCONT)

    run = await race(kind, where, calls=60, wrong_clocks=wrong_clocks, meanwhile=kill_and_stop)
    assert sorted(run.done) == [15] * len(wrong_clocks) + [60] * (6 - len(wrong_clocks))
    assert not run.errors
    assert run.refused == 0
    assert len(run.refreshes) >= 3
    assert run.doubled == 0


async def test_eight_processes_use_no_refresh_token_twice_through_outages_of_redis(redis: RedisServer) -> None:
    """Redis is killed and started again, and stopped and resumed."""

    async def fail(run: Race) -> None:
        await run.quiet()
        await asyncio.to_thread(redis.kill)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(redis.start)
        await run.quiet()
        redis.stop()
        await asyncio.sleep(1.5)
        redis.wake()

    run = await race("redis", redis.url, calls=80, meanwhile=fail)
    assert run.refused == 0
    assert all("is unavailable" in error for error in run.errors), run.errors
    assert len(run.done) == 8
    assert min(run.done) >= 30, run.errors
    assert run.doubled == 0
