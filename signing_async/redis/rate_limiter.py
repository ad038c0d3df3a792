"""A rate limit that all workers share through Redis: one worker's 429 pauses all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any, Self

from .. import _checks
from .._secret import Secret, hide
from ..errors import ConfigurationError
from ..transport.rate_limit import LocalRateLimiter, RateLimiter, as_rate_limiter
from .connection import Connection, RedisClient, cancel_and_wait, decoded

__all__ = ["RedisRateLimiter"]

log: logging.Logger = logging.getLogger("signing_async")

_POLL = 0.2  # seconds between two exchanges with Redis about the pause
_RECONNECT = 1.0  # seconds between them while Redis is unavailable
_BATCH = 0.1  # seconds for which slots are reserved at a time
_SAME_END = 0.05  # pauses that end within this many seconds of each other count as one

# KEYS: pause. ARGV: milliseconds of a new pause, or 0. Returns the milliseconds of the pause that ends last.
_EXCHANGE = """
if tonumber(ARGV[1]) > math.max(0, redis.call('PTTL', KEYS[1])) then
    redis.call('SET', KEYS[1], 'paused', 'PX', ARGV[1])
end
return redis.call('PTTL', KEYS[1])
"""
# KEYS: rate. ARGV: number of slots, requests per second, seconds of unused slots that may be used later (the burst).
# Reserves the next slots of all workers; returns the seconds until the first one (negative: in the past).
_RESERVE = """
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


class RedisRateLimiter:
    """A `RateLimiter` for clients on any number of machines whose requests the service counts together. ::

        async with RedisRateLimiter("redis://redis.example.com", "tenant-7", rate=50) as limiter:
            client = SigningClient(base_url, oauth, rate_limiter=limiter)

    A 429 for one worker pauses all workers within a fifth of a second. With a ``rate``, all workers together send at
    most that many requests per second, and up to ``burst`` at once after an idle time; each worker reserves slots for
    its waiting requests, for at most a tenth of a second. Everything else is decided by ``local``, by default a
    `LocalRateLimiter`.

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
        self._connection = Connection(redis, timeout, _Unavailable)
        self.name: str = _checks.string("name", name)
        prefix = _checks.string("prefix", prefix, may_be_empty=True)
        if burst is not None and rate is None:
            raise ConfigurationError("burst: needs a rate")
        self.rate: float | None = None if rate is None else _checks.number("rate", rate, above=0)
        burst = max(1, round(_BATCH * (rate or 0))) if burst is None else _checks.integer("burst", burst)
        self._burst_seconds = 0.0 if rate is None else (burst - 1) / rate
        self._local: RateLimiter = LocalRateLimiter() if local is None else as_rate_limiter(local, "local")
        self._key = f"{prefix}gate:{name}".encode()
        self._rate_key = f"{prefix}gate-rate:{name}".encode()
        self._is_shared: bool | None = None
        """Whether Redis responded last time; None before the first time."""
        self._paused_until = 0.0
        self._watcher: asyncio.Task[None] | None = None
        # Made again for each event loop.
        self._synchronized = asyncio.Event()
        """Set when a pause that began earlier is known."""
        self._paused = asyncio.Event()
        """Set when a pause has to be published."""
        self._reserving = asyncio.Lock()
        self._slots: deque[float] = deque()
        """Reserved points in time (loop time) at which a request may be sent."""
        self._waiting = 0
        self._next_alone = 0.0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._connection.address!r}, {self.name!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_connection"):
            self._connection.warn_if_open(self)

    async def aclose(self) -> None:
        """Stop watching and close the connections, except a given client."""
        await cancel_and_wait(self._watcher)
        self._watcher = None
        await self._connection.aclose()

    # The protocol

    @property
    def next_at(self) -> float:
        """The earliest known time (loop time) for a request made now."""
        return max(self._local.next_at, self._slots[0] if self._slots else 0.0)

    def pause(self, seconds: float) -> None:
        """Pause all workers for at least ``seconds``."""
        self._watch()
        self._paused_until = max(self._paused_until, _now() + seconds)
        self._local.pause(seconds)
        self._paused.set()

    async def acquire(self, deadline: float) -> bool:
        """Wait until a request may be sent; return False if none may be sent before the deadline."""
        self._watch()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(deadline - _now(), self._connection.timeout)):
                await self._synchronized.wait()
        if self.rate is not None:
            # Slots acquired during a pause would all be used at its end.
            while self._paused_until > _now():
                if self._paused_until >= deadline:
                    return False
                await asyncio.sleep(self._paused_until - _now())
            slot = await self._take_slot(self.rate, deadline)
            if slot is None:
                return False
            await asyncio.sleep(max(slot - _now(), 0.0))
        return await self._local.acquire(deadline)

    def release(self, acquired_at: float, accepted: bool | None) -> None:
        """Record the end of a request."""
        self._local.release(acquired_at, accepted)

    # The rate

    async def _take_slot(self, rate: float, deadline: float) -> float | None:
        """Return the next slot, reserving more for all waiting requests; None if it comes after the deadline."""
        self._waiting += 1
        try:
            async with asyncio.timeout_at(deadline), self._reserving:
                if not self._slots:
                    count = max(1, min(self._waiting, round(_BATCH * rate)))
                    first = await self._reserve(rate, count)
                    self._slots.extend(first + number / rate for number in range(count))
                return self._slots.popleft() if self._slots[0] < deadline else None
        except TimeoutError:
            return None
        finally:
            self._waiting -= 1

    async def _reserve(self, rate: float, count: int) -> float:
        """Reserve slots and return the time of the first one."""
        delay = None
        if self._is_shared:
            delay = await self._run(_RESERVE, self._rate_key, count, rate, self._burst_seconds)
        if delay is not None:
            return _now() + float(decoded(delay))
        first = max(self._next_alone, _now() - self._burst_seconds)
        self._next_alone = first + count / rate
        return first

    # The pause

    def _watch(self) -> None:
        """Start to watch, unless this event loop does already."""
        if self._watcher is None or self._watcher.get_loop() is not asyncio.get_running_loop():
            self._synchronized, self._paused, self._reserving = asyncio.Event(), asyncio.Event(), asyncio.Lock()
            self._watcher = asyncio.create_task(self._exchange_pauses(), name="signing_async rate limiter")

    async def _exchange_pauses(self) -> None:
        while True:
            is_new = self._paused.is_set()
            self._paused.clear()
            left = max(0, round((self._paused_until - _now()) * 1000)) if is_new else 0
            found = await self._run(_EXCHANGE, self._key, left)
            self._synchronized.set()
            if found is None:
                await asyncio.sleep(_RECONNECT)
                if is_new:
                    self._paused.set()
                continue
            if self._is_shared is False:
                log.info("%r: Redis is back, the rate limit is shared again", self)
            self._is_shared = True
            if found > 0 and _now() + found / 1000 > self._paused_until + _SAME_END:
                self._paused_until = _now() + found / 1000
                self._local.pause(found / 1000)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL):
                    await self._paused.wait()

    async def _run(self, script: str, key: bytes, *arguments: Any) -> Any:
        """Return the script's result, or None if Redis is unavailable: this worker continues alone."""
        try:
            return await self._connection.script(script, [key], *arguments)
        except _Unavailable as error:
            if self._is_shared is not False:
                text = "%r: the rate limit is not shared for now, this worker continues alone: %s"
                log.warning(text, self, error)
            self._is_shared = False


class _Unavailable(Exception):  # never leaves this module
    """Redis did not respond in time, refused the command, or cannot be reached."""

    def __init__(self, message: str, transient: bool) -> None:
        super().__init__(message)


def _now() -> float:
    return asyncio.get_running_loop().time()
