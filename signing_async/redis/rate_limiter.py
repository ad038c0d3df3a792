"""A rate limit that all workers share through Redis: one worker's 429 pauses all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import warnings
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Self

from .. import _checks
from .._secret import Secret, hide
from ..errors import ConfigurationError
from ..transport.rate_limit import LocalRateLimiter, RateLimiter, as_rate_limiter
from .connection import Connection, RedisClient, RedisUnavailable, Script, cancel_and_wait, decoded

__all__ = ["RedisRateLimiter"]

log: logging.Logger = logging.getLogger("signing_async")

_POLL = 0.2  # seconds between two exchanges with Redis about the pause
_RECONNECT = 1.0  # seconds between them while Redis is unavailable
_BATCH = 0.1  # seconds for which slots are reserved at a time
_SLOT_LIFETIME = 1.0  # seconds after which an unused slot has expired
_SAME_END = 0.05  # pauses that end within this many seconds of each other count as one

# KEYS: pause. ARGV: milliseconds and id of the pause that this worker knows. Returns the pause that ends last.
_EXCHANGE = Script(
    """
if tonumber(ARGV[1]) > math.max(0, redis.call('PTTL', KEYS[1])) then
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[1])
end
return {redis.call('GET', KEYS[1]) or '', redis.call('PTTL', KEYS[1])}
"""
)
# KEYS: rate. ARGV: number of slots, requests per second, seconds of unused slots that may be used later (the burst).
# Reserves the next slots of all workers; returns the seconds until the first one (negative: in the past).
_RESERVE = Script(
    """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
-- The next slot, and the time of the last reservation.
local slot, at = string.match(redis.call('GET', KEYS[1]) or '0 0', '(%S+) (%S+)')
-- If the clock was set back, the slots keep their distance from it.
local first = math.max(slot - math.max(at - now, 0), now - tonumber(ARGV[3]))
local following = first + tonumber(ARGV[1]) / tonumber(ARGV[2])
local milliseconds = math.ceil((following - now + 60) * 1000)
redis.call('SET', KEYS[1], string.format('%.6f %.6f', following, now), 'PX', milliseconds)
return string.format('%.6f', first - now)
"""
)


class _SharedRate:
    """Slots for requests, reserved ahead of their use so that a busy worker rarely waits for Redis.

    ``reserve`` takes a number of slots, and how many seconds of unused slots may be used later. It returns the seconds
    until the first slot, or None if Redis is unavailable: then this worker uses the whole rate.
    """

    def __init__(self, rate: float, burst: int, reserve: Callable[[int, float], Awaitable[float | None]]) -> None:
        self._slots: deque[float] = deque()
        """Reserved points in time (loop time) at which a request may be sent."""
        self._interval = 1 / rate
        self._burst_seconds = (burst - 1) / rate
        self._reserve = reserve
        self._waiting = 0
        self._batch = 0
        self._reserved_at = -math.inf
        self._next_alone = 0.0
        self._task: asyncio.Task[None] | None = None

    def next(self, now: float) -> float | None:
        """Return the first slot, if any. Unused slots soon expire, so an idle time does not end in a burst."""
        while self._slots and self._slots[0] < now - _SLOT_LIFETIME:
            self._slots.popleft()
        return self._slots[0] if self._slots else None

    async def acquire(self, deadline: float) -> bool:
        """Wait for a slot; return False as soon as it is known that none comes before the deadline."""
        loop, slots = asyncio.get_running_loop(), self._slots
        self._waiting += 1
        while (slot := self.next(loop.time())) is None:
            await asyncio.wait([self._refill()], timeout=max(deadline - loop.time(), 0.0))
            if loop.time() >= deadline:
                return False
        if slot >= deadline:
            return False
        slots.popleft()
        if 2 * len(slots) < self._batch:
            self._refill()
        if (delay := slot - loop.time()) > 0:
            await asyncio.sleep(delay)
        return True

    async def aclose(self) -> None:
        """Stop reserving."""
        await cancel_and_wait(self._task)

    def _refill(self) -> asyncio.Task[None]:
        if self._task is None or self._task.done() or self._task.get_loop() is not asyncio.get_running_loop():
            self._task = asyncio.create_task(self._reserve_batch(), name="signing_async rate limiter slots")
        return self._task

    async def _reserve_batch(self) -> None:
        """Reserve a slot for each waiting request, or twice the last batch if that was used up quickly."""
        loop = asyncio.get_running_loop()
        doubled = 2 * self._batch if loop.time() - self._reserved_at < 2 * _BATCH else 0
        count = max(1, min(max(self._waiting, doubled), round(_BATCH / self._interval)))
        self._waiting, self._batch, self._reserved_at = 0, count, loop.time()
        delay = await self._reserve(count, self._burst_seconds)
        if delay is None:
            first = max(self._next_alone, loop.time() - self._burst_seconds)
            self._next_alone = first + count * self._interval
        else:
            first = loop.time() + delay
        self._slots.extend(first + number * self._interval for number in range(count))


class RedisRateLimiter:
    """A `RateLimiter` for clients on any number of machines whose requests the service counts together. ::

        async with RedisRateLimiter("redis://redis.example.com", "tenant-7", rate=50) as limiter:
            client = SigningClient(base_url, oauth, rate_limiter=limiter)

    A 429 for one worker pauses all workers within a fifth of a second. With a ``rate``, all workers together send at
    most that many requests per second, and up to ``burst`` at once after an idle time; each worker reserves slots
    ahead, for at most a tenth of a second. Everything else is decided by ``local``, by default a `LocalRateLimiter`.

    If Redis does not respond within ``timeout`` seconds, each worker continues alone, with its own 429s and the whole
    ``rate``, and logs this once; they share again when Redis is back. The keys are ``<prefix>gate:<name>`` and
    ``<prefix>gate-rate:<name>``. Times are by Redis's clock.
    """

    def __init__(
        self,
        redis: str | Secret[str] | RedisClient,
        name: str = "default",
        *,
        rate: float | None = None,
        burst: int | None = None,
        local: RateLimiter | None = None,
        prefix: str = "signing:",
        timeout: float = 0.5,
    ) -> None:
        redis = hide(redis)
        self._connection = Connection(redis, timeout)
        self.name: str = _checks.string("name", name)
        prefix = _checks.string("prefix", prefix, may_be_empty=True)
        if burst is not None and rate is None:
            raise ConfigurationError("burst: needs a rate")
        self.rate: float | None = None if rate is None else _checks.number("rate", rate, above=0)
        burst = max(1, round(_BATCH * (rate or 0))) if burst is None else _checks.integer("burst", burst)
        self._slots = None if rate is None else _SharedRate(rate, burst, self._reserve)
        self._local: RateLimiter = LocalRateLimiter() if local is None else as_rate_limiter(local, "local")
        self._key = f"{prefix}gate:{name}".encode()
        self._rate_key = f"{prefix}gate-rate:{name}".encode()
        self._paused_until = 0.0
        self._pause_id = ""
        """The id of the pause that was applied last."""
        self._watcher: asyncio.Task[None] | None = None
        self._synchronized = asyncio.Event()
        """Set when a pause that began earlier is known."""
        self._paused = asyncio.Event()
        """Set when a pause has to be published."""
        self._is_shared: bool | None = None
        """Whether Redis responded last time; None before the first time."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._connection.address!r}, {self.name!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_watcher", None) is not None:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)

    async def aclose(self) -> None:
        """Stop watching and close the connections, except a given client."""
        await cancel_and_wait(self._watcher)
        if self._slots is not None:
            await self._slots.aclose()
        self._watcher = None
        await self._connection.aclose()

    # The protocol

    @property
    def next_at(self) -> float:
        """The earliest known time (loop time) for a request made now."""
        slot = None if self._slots is None else self._slots.next(asyncio.get_running_loop().time())
        return max(self._local.next_at, slot or 0.0)

    def pause(self, seconds: float) -> None:
        """Pause all workers for at least ``seconds``."""
        self._watch()
        self._pause_id = secrets.token_hex(8)
        self._paused_until = max(self._paused_until, asyncio.get_running_loop().time() + seconds)
        self._local.pause(seconds)
        self._paused.set()

    async def acquire(self, deadline: float) -> bool:
        """Wait until a request may be sent; return False if none may be sent before the deadline."""
        if not self._watch().is_set():
            left = deadline - asyncio.get_running_loop().time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, self._connection.timeout)):
                    await self._synchronized.wait()
        if self._slots is None:
            return await self._local.acquire(deadline)
        # Slots acquired during a pause would all be used at its end.
        if not await self._wait_for_pause(deadline) or not await self._slots.acquire(deadline):
            return False
        return await self._local.acquire(deadline)

    def release(self, acquired_at: float, accepted: bool | None) -> None:
        """Record the end of a request."""
        self._local.release(acquired_at, accepted)

    async def _wait_for_pause(self, deadline: float) -> bool:
        loop = asyncio.get_running_loop()
        while self._paused_until > loop.time():
            if self._paused_until >= deadline:
                return False
            await asyncio.sleep(self._paused_until - loop.time())
        return True

    # Redis

    async def _reserve(self, count: int, burst_seconds: float) -> float | None:
        """Reserve slots; return the seconds until the first one, or None if Redis is unavailable."""
        if not self._is_shared:
            return None
        arguments = (count, self.rate, burst_seconds)
        try:
            return float(decoded(await self._connection.script(_RESERVE, [self._rate_key], *arguments)))
        except RedisUnavailable as error:
            self._continue_alone(error)
            return None

    def _watch(self) -> asyncio.Event:
        """Start to watch, unless this event loop does already, and return the event `_synchronized`."""
        loop = asyncio.get_running_loop()
        if self._watcher is None or self._watcher.get_loop() is not loop:
            self._synchronized, self._paused = asyncio.Event(), asyncio.Event()
            self._watcher = loop.create_task(self._exchange_pauses(), name="signing_async rate limiter")
        return self._synchronized

    async def _exchange_pauses(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._paused.clear()
            left = max(0, round((self._paused_until - loop.time()) * 1000))
            try:
                pause_id, left = await self._connection.script(_EXCHANGE, [self._key], left, self._pause_id)
            except RedisUnavailable as error:
                self._continue_alone(error)
            else:
                self._apply(decoded(pause_id), left / 1000)
                if self._is_shared is False:
                    log.info("%r: Redis is back, the rate limit is shared again", self)
                self._is_shared = True
            self._synchronized.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL if self._is_shared else _RECONNECT):
                    await self._paused.wait()

    def _apply(self, pause_id: str, seconds: float) -> None:
        until = asyncio.get_running_loop().time() + seconds
        if seconds > 0 and pause_id != self._pause_id and until > self._paused_until + _SAME_END:
            self._pause_id, self._paused_until = pause_id, until
            self._local.pause(seconds)

    def _continue_alone(self, error: RedisUnavailable) -> None:
        if self._is_shared is not False:
            self._is_shared = False
            log.warning("%r: the rate limit is not shared for now, this worker continues alone: %s", self, error)
