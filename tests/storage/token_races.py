"""Races of real processes for one token: ``python -m tests.storage.token_races postgres --workers 6 --down 1 10 30``.

The command kills the server of the token store, and starts it again after so many seconds: once between two refreshes,
and once while a refresh waits for its response. In the end no refresh token must have been used twice, and every worker
must have continued after each outage.

Tokens live for one second. The sandbox is the authorization server, which revokes all tokens of a user when a refresh
token is reused.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime
from multiprocessing.process import BaseProcess
from typing import Any

import attrs

from signing_async import FileTokenStore, OAuth, RetryPolicy, SigningClient, SigningError, TokenStore, Unauthorized
from signing_async.postgres import PostgresTokenStore
from signing_async.redis import RedisTokenStore
from signing_async.sandbox import Profile, Sandbox
from tests.postgres.server import PostgresServer
from tests.redis.server import running_redis

REDIRECT = "https://app.example.com/callback"
QUICK = RetryPolicy(base_delay=0.01, settle=0.1)
LIFETIME = 1.0
# A token is replaced after nine tenths of its lifetime. Two refreshes for one expiry would come closer together.
APART = 0.3


def open_store(where: str, *, lease: float = 1.0) -> contextlib.AbstractAsyncContextManager[TokenStore]:
    """Open the store: a URL of Redis, a DSN or a path."""
    if where.startswith("redis:"):
        return RedisTokenStore(where, "race", lease=lease, timeout=5)
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
    lease: float
    clock_wrong_by: float = 0.0

    def oauth(self, store: TokenStore) -> OAuth:
        known: Any = {"client_id": self.client_id, "client_secret": self.client_secret, "redirect_uri": REDIRECT}
        return OAuth(self.base_url, store=store, retry=QUICK, **known)


@attrs.define
class Report:
    """What one process did."""

    done: int
    """Its successful calls."""
    last_at: float
    """When the last of them ended, by the monotonic clock of the machine."""
    errors: list[str]
    final: list[str]
    """The errors that are not transient."""


@attrs.define
class Race:
    """A running race, and then its result."""

    sandbox: Sandbox
    where: str
    workers: list[BaseProcess]
    over: Any
    """An event: the processes make no further calls."""
    requests: list[Any] = attrs.field(factory=list)
    """The refreshes that the server has received."""
    reports: list[Report] = attrs.field(factory=list)
    """Those of the processes that finished."""

    def read(self) -> int:
        """Read what the server has received, and return the number of refreshes."""
        self.requests = self.sandbox.requests_of("oauth.token")[1:]
        return len(self.requests)

    @property
    def done(self) -> list[int]:
        """The successful calls of each process that finished."""
        return [report.done for report in self.reports]

    @property
    def errors(self) -> list[str]:
        return [error for report in self.reports for error in report.errors]

    @property
    def final(self) -> list[str]:
        return [error for report in self.reports for error in report.final]

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
        await self.refreshed()
        await asyncio.sleep(0.3)

    async def refreshed(self, times: int = 1) -> None:
        """Wait for so many further refreshes."""
        enough = self.read() + times
        async with asyncio.timeout(100):
            while self.read() < enough:
                await asyncio.sleep(0.02)

    async def refreshing(self) -> None:
        """Wait until a refresh has been sent, and leave it waiting for its response."""
        fault = self.sandbox.faults.add("oauth.token", "slow", seconds=0.3)
        async with asyncio.timeout(30):
            while not fault.hits:
                await asyncio.sleep(0.005)

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
    lease: float = 1.0,
    wrong_clocks: tuple[float, ...] = (),
    meanwhile: Callable[[Race], Awaitable[None]],
) -> Race:
    """Let each process make its calls, one every 80 ms; run ``meanwhile`` beside them."""
    async with Sandbox(seed=5, profile=Profile(access_token_lifetime=LIFETIME)) as sandbox:
        app = sandbox.register_app(REDIRECT)
        assert app.client_secret is not None
        task = Task(where, sandbox.base_url, app.client_id, app.client_secret, calls, 0.08, lease)
        # Processes with fewer calls find tokens that others have refreshed, and must tell whether these are valid.
        wrong = [attrs.evolve(task, clock_wrong_by=by, calls=calls // 4, every=0.32) for by in wrong_clocks]
        tasks = (wrong + [task] * workers)[:workers]
        async with open_store(where) as store, task.oauth(store) as oauth:
            await oauth.exchange(sandbox.authorize(app))
        fork = multiprocessing.get_context("fork")
        results, over = fork.SimpleQueue(), fork.Event()
        run = Race(sandbox, where, [fork.Process(target=work, args=(each, results, over)) for each in tasks], over)
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
                    run.reports.append(results.get())
        finally:
            for worker in run.workers:
                worker.kill()
                worker.join()
        run.read()
        return run


# In the worker processes


def work(task: Task, results: Any, over: Any) -> None:
    """Make the calls, and report their results."""
    logging.disable()
    if task.clock_wrong_by:
        right = time.time
        time.time = lambda: right() + task.clock_wrong_by
    results.put(asyncio.run(make_calls(task, over)))


async def make_calls(task: Task, over: Any) -> Report:
    """Make calls until there are enough, or the race is over."""
    report = Report(0, 0.0, [], [])
    async with (
        open_store(task.where, lease=task.lease) as store,
        task.oauth(store) as oauth,
        SigningClient(task.base_url, oauth, retry=QUICK) as client,
    ):
        for _ in range(task.calls):
            if over.is_set():
                break
            try:
                # On a busy machine a token may expire on its way, twice in a row. A revoked one cannot be refreshed.
                while not await is_accepted(client):
                    pass
                report.done, report.last_at = report.done + 1, time.monotonic()
            except SigningError as error:
                text = f"{type(error).__name__}: {error}"
                report.errors.append(text)
                report.final += [] if error.transient else [text]
            await asyncio.sleep(task.every)
    return report


async def is_accepted(client: SigningClient) -> bool:
    """Return whether the service accepts the token."""
    with contextlib.suppress(Unauthorized):
        await client.me()
        return True
    return False


# The command


async def race_through_outages(where: str, server: Any, workers: int, down: float) -> tuple[bool, str]:
    """Race while the server is killed twice for so many seconds; return whether all went well, and a line about it."""
    back_at = 0.0
    served: list[int] = []

    async def fail(run: Race) -> None:
        nonlocal back_at
        for wait in (run.quiet, run.refreshing):
            await wait()
            with server.down():
                await asyncio.sleep(down)
            back_at = time.monotonic()
            before = run.read()
            await run.refreshed(3)
            served.append(run.read() - before)
        run.over.set()

    # The lease of a Redis lock is the default: its grace of 45 s is longer than the outages.
    run = await race(where, workers=workers, calls=sys.maxsize, lease=5.0, meanwhile=fail)
    idle = sum(report.last_at < back_at for report in run.reports)
    is_right = (run.refused, run.doubled, idle, len(run.final), len(run.reports)) == (0, 0, 0, 0, workers)
    text = (
        f"down for {down:g} s twice: {sum(run.done)} calls, {len(run.requests)} refreshes, {served} of them after an"
        f" outage; {run.refused} refused, {run.doubled} doubled, {len(run.errors)} calls failed ({len(run.final)} with"
        f" an error that is not transient), {idle} workers without a call after the last outage"
    )
    for error, count in Counter(run.final).most_common(5):
        text += f"\n  {count} times: {error}"
    return is_right, text


async def run_all(server: Any, workers: int, downs: list[float]) -> bool:
    """Race through all outages; return whether all went well."""
    is_right = True
    for down in downs:
        where = await server.new_schema() if isinstance(server, PostgresServer) else server.url
        is_this_right, text = await race_through_outages(where, server, workers, down)
        is_right &= is_this_right
        print(text, flush=True)
    return is_right


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=("postgres", "redis"), help="where the token is")
    parser.add_argument("--workers", type=int, default=6, help="processes that share the token")
    parser.add_argument(
        "--down", type=float, nargs="+", default=[1.0], help="seconds of the outages, one race for each"
    )
    given = parser.parse_args()
    with PostgresServer() if given.engine == "postgres" else running_redis() as server:
        sys.exit(not asyncio.run(run_all(server, given.workers, given.down)))


if __name__ == "__main__":
    main()
