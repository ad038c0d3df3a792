"""Races of real processes for one token: none uses a refresh token twice."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.storage.token_races import Race, race

pytestmark = [
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="processes cannot be forked here"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
]


@pytest.fixture
async def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The place of the token: a path, the URL of a Redis or the DSN of a PostgreSQL."""
    if request.param == "file":
        return str(tmp_path / "token.json")
    server: Any = request.getfixturevalue(request.param)
    place: str = server.url if request.param == "redis" else await server.new_schema()
    return place


@pytest.mark.parametrize(
    ("where", "wrong_clocks"),
    [("file", ()), ("redis", (3600.0, -3600.0)), ("postgres", (3600.0, -3600.0))],
    indirect=["where"],
)
async def test_processes_refresh_once_per_expiry_despite_a_kill_and_a_pause(
    where: str, wrong_clocks: tuple[float, ...]
) -> None:
    """All calls of the surviving processes succeed.

    In a database, one machine's clock is an hour fast and one is an hour slow; these processes make fewer calls.
    """

    async def kill_and_stop(run: Race) -> None:
        await run.quiet()
        await run.kill_outside_a_refresh(3)
        await run.quiet()
        run.send(4, signal.SIGSTOP)
        await asyncio.sleep(1.5)
        run.send(4, signal.SIGCONT)

    run = await race(where, workers=5, calls=44, wrong_clocks=wrong_clocks, meanwhile=kill_and_stop)
    assert (run.refused, run.doubled, run.errors) == (0, 0, [])
    assert sorted(run.done) == [11] * len(wrong_clocks) + [44] * (4 - len(wrong_clocks))
    assert len(run.requests) >= 3


@pytest.mark.parametrize("where", ["redis", "postgres"], indirect=True)
async def test_processes_use_no_refresh_token_twice_through_outages_of_the_server(
    where: str, request: pytest.FixtureRequest
) -> None:
    """It is killed and started again, and stopped and resumed."""
    is_redis = where.startswith("redis")
    server: Any = request.getfixturevalue("redis" if is_redis else "postgres")

    async def fail(run: Race) -> None:
        await run.quiet()
        with server.down():
            await asyncio.sleep(0.5)
        await run.quiet()
        with server.frozen():
            await asyncio.sleep(0.5)

    run = await race(where, workers=4, calls=50, meanwhile=fail)
    assert (run.refused, run.doubled, len(run.done)) == (0, 0, 4)
    # Only a Redis that is down is an error: the stores wait for longer than the other outages.
    assert all(is_redis and "is unavailable" in error for error in run.errors), run.errors
    assert min(run.done) >= 15, run.errors
