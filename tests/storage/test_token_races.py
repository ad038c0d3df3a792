"""Races of real processes for one token.

Tokens live for one second. The sandbox is the authorization server, which revokes all tokens of a user when a refresh
token is reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import attrs
import pytest

from signing_async import FileTokenStore, OAuth, RetryPolicy, SigningClient, SigningError, TokenStore, Unauthorized
from signing_async.postgres import PostgresTokenStore
from signing_async.redis import RedisTokenStore
from signing_async.sandbox import Profile, Sandbox

REDIRECT = "https://app.example.com/callback"
QUICK = RetryPolicy(base_delay=0.01, settle=0.1)
LIFETIME = 1.0
# A token is replaced after nine tenths of its lifetime. Two refreshes for one expiry would come closer together.
APART = 0.3


def open_store(where: str) -> contextlib.AbstractAsyncContextManager[TokenStore]:
    """Open the store: a URL of Redis, a DSN or a path."""
    if where.startswith("redis:"):
        return RedisTokenStore(where, "race", lease=1.0, timeout=5)
    if where.startswith("postgresql:"):
        # A server that restarts on a busy machine is away for a while.
        return PostgresTokenStore(where, "race", timeout=20)
    return contextlib.nullcontext(FileTokenStore(where))


@attrs.frozen
class Task:
    """The work of one process."""

    where: str
    base_url: str
    client_id: str
    client_secret: str
    calls: int
    every: float
    clock_wrong_by: float = 0.0

    def oauth(self, store: TokenStore) -> OAuth:
        known = {"client_id": self.client_id, "client_secret": self.client_secret, "redirect_uri": REDIRECT}
        return OAuth(self.base_url, store=store, retry=QUICK, **known)


@attrs.define
class Race:
    """A running race, and then its result."""

    sandbox: Sandbox
    where: str
    workers: list[BaseProcess]
    requests: list[Any] = attrs.field(factory=list)
    """The refreshes that the server has received."""
    done: list[int] = attrs.field(factory=list)
    """The successful calls of each process that finished."""
    errors: list[str] = attrs.field(factory=list)

    def read(self) -> int:
        """Read what the server has received, and return the number of refreshes."""
        self.requests = self.sandbox.requests_of("oauth.token")[1:]
        return len(self.requests)

    @property
    def refused(self) -> int:
        """The refreshes that the server refused: each with a reused or revoked refresh token."""
        return sum(record.status != 200 for record in self.requests)

    @property
    def doubled(self) -> int:
        """The refreshes right after another one, for the same expiry."""
        times: list[datetime] = [record.received_at for record in self.requests]
        gaps = [(late - early).total_seconds() for early, late in itertools.pairwise(times)]
        return sum(gap < APART for gap in gaps)

    async def quiet(self) -> None:
        """Wait for a moment between two refreshes: a process killed then takes no new token with it."""
        before = self.read()
        async with asyncio.timeout(30):
            while self.read() == before:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)

    def send(self, worker: int, number: signal.Signals) -> None:
        """Send a signal to one of the processes."""
        os.kill(self.workers[worker].pid or 0, number)

    async def kill_outside_a_refresh(self, worker: int) -> None:
        """Kill a process that is not refreshing, so that it takes no new token with it."""
        async with open_store(self.where) as store:
            while True:
                self.send(worker, signal.SIGSTOP)
                # If others can acquire the lock, the stopped process does not hold it.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.8), store.lock():
                        self.send(worker, signal.SIGKILL)
                        return
                self.send(worker, signal.SIGCONT)
                await asyncio.sleep(0.2)


async def race(
    where: str,
    *,
    workers: int,
    calls: int,
    wrong_clocks: tuple[float, ...] = (),
    meanwhile: Callable[[Race], Awaitable[None]],
) -> Race:
    """Let each process make its calls, one every 80 ms; run ``meanwhile`` beside them."""
    async with Sandbox(seed=5, profile=Profile(access_token_lifetime=LIFETIME)) as sandbox:
        app = sandbox.register_app(REDIRECT)
        assert app.client_secret is not None
        task = Task(where, sandbox.base_url, app.client_id, app.client_secret, calls, 0.08)
        # Processes with fewer calls find tokens that others have refreshed, and must tell whether these are valid.
        wrong = [attrs.evolve(task, clock_wrong_by=by, calls=calls // 4, every=0.32) for by in wrong_clocks]
        tasks = (wrong + [task] * workers)[:workers]
        async with open_store(where) as store, task.oauth(store) as oauth:
            await oauth.exchange(sandbox.authorize(app))
        fork = multiprocessing.get_context("fork")
        results = fork.SimpleQueue()
        run = Race(sandbox, where, [fork.Process(target=work, args=(each, results)) for each in tasks])
        try:
            for worker in run.workers:
                worker.start()
            await meanwhile(run)
            async with asyncio.timeout(100):
                # A process that reports many errors does not end before they are read.
                while any(worker.is_alive() for worker in run.workers) or not results.empty():
                    if results.empty():
                        await asyncio.sleep(0.02)
                        continue
                    done, errors = results.get()
                    run.done.append(done)
                    run.errors += errors
        finally:
            for worker in run.workers:
                worker.kill()
                worker.join()
        run.read()
        return run


# In the worker processes


def work(task: Task, results: Any) -> None:
    """Make the calls, and report their results."""
    logging.disable()
    if task.clock_wrong_by:
        right = time.time
        time.time = lambda: right() + task.clock_wrong_by
    results.put(asyncio.run(make_calls(task)))


async def make_calls(task: Task) -> tuple[int, list[str]]:
    """Return the number of successful calls, and the errors."""
    done, errors = 0, []
    async with (
        open_store(task.where) as store,
        task.oauth(store) as oauth,
        SigningClient(task.base_url, oauth, retry=QUICK) as client,
    ):
        for _ in range(task.calls):
            try:
                # On a busy machine a token may expire on its way, twice in a row. A revoked one cannot be refreshed.
                while not await is_accepted(client):
                    pass
                done += 1
            except SigningError as error:
                errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(task.every)
    return done, errors


async def is_accepted(client: SigningClient) -> bool:
    """Return whether the service accepts the token."""
    with contextlib.suppress(Unauthorized):
        await client.me()
        return True
    return False


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
