"""A rate limit that all workers share through Redis: one worker's 429 pauses all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import warnings
from collections import deque
from typing import Any, Self

from .. import _checks
from .._secret import Secret, hide
from ..errors import ConfigurationError
from ..transport.rate_limit import LocalRateLimiter, RateLimiter, as_rate_limiter
from .connection import Connection, RedisClient, RedisUnavailable, cancel_and_wait, decoded

__all__ = ["RedisRateLimiter"]

log: logging.Logger = logging.getLogger("signing_async")

_POLL = 0.2  # seconds between two exchanges with Redis about the pause
_RECONNECT = 1.0  # seconds between them while Redis is unavailable
_BATCH = 0.1  # seconds for which slots are reserved at a time
_SLOT_LIFETIME = 1.0  # seconds after which an unused slot has expired, so an idle time does not end in a burst
_SAME_END = 0.05  # pauses that end within this many seconds of each other count as one

# KEYS: pause. ARGV: milliseconds and id of the pause that this worker knows. Returns the pause that ends last.
_EXCHANGE = """
if tonumber(ARGV[1]) > math.max(0, redis.call('PTTL', KEYS[1])) then
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[1])
end
return {redis.call('GET', KEYS[1]) or '', redis.call('PTTL', KEYS[1])}
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
        self._burst_seconds = 0.0 if rate is None else (burst - 1) / rate
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
        self._slots: deque[float] = deque()
        """Reserved points in time (loop time) at which a request may be sent."""
        self._waiting = self._batch = 0
        self._reserved_at = -math.inf
        self._next_alone = 0.0
        self._reserving: asyncio.Task[None] | None = None

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
        await cancel_and_wait(self._reserving)
        self._watcher = None
        await self._connection.aclose()

    # The protocol

    @property
    def next_at(self) -> float:
        """The earliest known time (loop time) for a request made now."""
        return max(self._local.next_at, self._next_slot() or 0.0)

    def pause(self, seconds: float) -> None:
        """Pause all workers for at least ``seconds``."""
        self._watch()
        self._pause_id = secrets.token_hex(8)
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
            if not await self._acquire_slot(deadline):
                return False
        return await self._local.acquire(deadline)

    def release(self, acquired_at: float, accepted: bool | None) -> None:
        """Record the end of a request."""
        self._local.release(acquired_at, accepted)

    # The rate: slots for requests, reserved ahead of their use so that a busy worker rarely waits for Redis

    def _next_slot(self) -> float | None:
        while self._slots and self._slots[0] < _now() - _SLOT_LIFETIME:
            self._slots.popleft()
        return self._slots[0] if self._slots else None

    async def _acquire_slot(self, deadline: float) -> bool:
        self._waiting += 1
        while (slot := self._next_slot()) is None:
            await asyncio.wait([self._reserve()], timeout=max(deadline - _now(), 0.0))
            if _now() >= deadline:
                return False
        if slot >= deadline:
            return False
        self._slots.popleft()
        if 2 * len(self._slots) < self._batch:
            self._reserve()
        await asyncio.sleep(max(slot - _now(), 0.0))
        return True

    def _reserve(self) -> asyncio.Task[None]:
        if self._reserving is None or self._reserving.done() or _is_foreign(self._reserving):
            self._reserving = asyncio.create_task(self._reserve_batch(), name="signing_async rate limiter slots")
        return self._reserving

    async def _reserve_batch(self) -> None:
        """Reserve a slot for each waiting request, or twice the last batch if that was used up quickly."""
        assert self.rate is not None
        doubled = 2 * self._batch if _now() - self._reserved_at < 2 * _BATCH else 0
        count = max(1, min(max(self._waiting, doubled), round(_BATCH * self.rate)))
        self._waiting, self._batch, self._reserved_at = 0, count, _now()
        delay = None
        if self._is_shared:
            delay = await self._run(_RESERVE, self._rate_key, count, self.rate, self._burst_seconds)
        if delay is None:  # alone: the whole rate
            first = max(self._next_alone, _now() - self._burst_seconds)
            self._next_alone = first + count / self.rate
        else:
            first = _now() + float(decoded(delay))
        self._slots.extend(first + number / self.rate for number in range(count))

    # The pause

    def _watch(self) -> None:
        """Start to watch, unless this event loop does already."""
        if self._watcher is None or _is_foreign(self._watcher):
            self._synchronized, self._paused = asyncio.Event(), asyncio.Event()
            self._watcher = asyncio.create_task(self._exchange_pauses(), name="signing_async rate limiter")

    async def _exchange_pauses(self) -> None:
        while True:
            self._paused.clear()
            left = max(0, round((self._paused_until - _now()) * 1000))
            if (found := await self._run(_EXCHANGE, self._key, left, self._pause_id)) is not None:
                self._apply(decoded(found[0]), found[1] / 1000)
                if self._is_shared is False:
                    log.info("%r: Redis is back, the rate limit is shared again", self)
                self._is_shared = True
            self._synchronized.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL if self._is_shared else _RECONNECT):
                    await self._paused.wait()

    def _apply(self, pause_id: str, seconds: float) -> None:
        until = _now() + seconds
        if seconds > 0 and pause_id != self._pause_id and until > self._paused_until + _SAME_END:
            self._pause_id, self._paused_until = pause_id, until
            self._local.pause(seconds)

    async def _run(self, script: str, key: bytes, *arguments: Any) -> Any:
        """Return the script's result, or None if Redis is unavailable: this worker continues alone."""
        try:
            return await self._connection.script(script, [key], *arguments)
        except RedisUnavailable as error:
            if self._is_shared is not False:
                text = "%r: the rate limit is not shared for now, this worker continues alone: %s"
                log.warning(text, self, error)
            self._is_shared = False


def _now() -> float:
    return asyncio.get_running_loop().time()


def _is_foreign(task: asyncio.Task[None]) -> bool:
    """Return whether the task belongs to an earlier event loop."""
    return task.get_loop() is not asyncio.get_running_loop()
