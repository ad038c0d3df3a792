"""Runs whose process dies or is paused at a chosen moment: before or after a request or journal operation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp

from signing_async import Claim, ClaimLost, Journal, RetryPolicy, SigningClient
from signing_async.sandbox import Sandbox

T = TypeVar("T")


class Died(BaseException):
    """The process is dead: nothing that it tries has an effect."""


class Fate:
    """Counts the moments of a run, and kills or pauses it at one of them."""

    def __init__(self, at: int | None = None, *, pause: bool = False) -> None:
        self.moments = 0
        self.is_dead = False
        self.paused = asyncio.Event()
        self.resumed = asyncio.Event()
        self._at = at
        self._pauses = pause

    async def moment(self) -> None:
        if self.is_dead:
            raise Died
        self.moments += 1
        if self.moments != self._at:
            return
        if self._pauses:
            self.paused.set()
            await self.resumed.wait()
            return
        self.is_dead = True
        raise Died


class MemoryJournal:
    """A journal in memory with leases: `expire` frees the claims of a paused run."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.fences: dict[str, int] = {}
        self.taken: set[str] = set()

    async def claim(self, key: str) -> Claim | None:
        if key in self.taken:
            return None
        self.taken.add(key)
        self.fences[key] = self.fences.get(key, 0) + 1
        return Claim(key, self.states.get(key), self.fences[key])

    async def write(self, claim: Claim, state: str) -> None:
        await asyncio.sleep(0)
        self._check(claim)
        self.states[claim.key] = state

    async def release(self, claim: Claim) -> None:
        self._check(claim)
        self.taken.discard(claim.key)

    async def aclose(self) -> None: ...

    def expire(self) -> None:
        """End all leases."""
        for key in self.taken:
            self.fences[key] += 1
        self.taken.clear()

    def _check(self, claim: Claim) -> None:
        if self.fences[claim.key] != claim.fence or claim.key not in self.taken:
            raise ClaimLost(claim.key)


class Fated:
    """A journal whose operations have two moments each: before and after."""

    def __init__(self, journal: Journal, fate: Fate) -> None:
        self._journal = journal
        self._fate = fate

    async def claim(self, key: str) -> Claim | None:
        return await self._around(lambda: self._journal.claim(key))

    async def write(self, claim: Claim, state: str) -> None:
        await self._around(lambda: self._journal.write(claim, state))

    async def release(self, claim: Claim) -> None:
        await self._around(lambda: self._journal.release(claim))

    async def aclose(self) -> None: ...

    async def _around(self, step: Callable[[], Awaitable[T]]) -> T:
        await self._fate.moment()
        done = await step()
        await self._fate.moment()
        return done


@asynccontextmanager
async def fated_client(sandbox: Sandbox, fate: Fate) -> AsyncIterator[SigningClient]:
    """Yield a client whose requests have two moments each: before they are sent, and after they took effect."""

    async def moment(*_: object) -> None:
        await fate.moment()

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(moment)
    trace.on_request_end.append(moment)
    async with (
        aiohttp.ClientSession(trace_configs=[trace]) as session,
        SigningClient(
            sandbox.base_url, sandbox.access_token(), session=session, retry=RetryPolicy(base_delay=0.005, settle=0.1)
        ) as client,
    ):
        yield client
