"""A rate limit that all workers share through Redis: one worker's 429 pauses all."""

from __future__ import annotations

import asyncio
import logging
from typing import Self

from .. import _checks
from .._secret import Secret, hide
from ..errors import ConfigurationError
from ..transport.rate_limit import LocalRateLimiter, RateLimiter, as_rate_limiter
from .connection import Connection, RedisClient, decoded

__all__ = ["RedisRateLimiter"]

log: logging.Logger = logging.getLogger("signing_async")

_POLL = 0.2  # seconds for which the answer about a pause is used
_RECONNECT = 1.0  # seconds between two attempts while Redis is unavailable
_SAME_END = 0.05  # pauses that end within this many seconds of each other count as one
_DEFAULT_BURST = 0.1  # seconds

# KEYS: pause, slot. ARGV: milliseconds of a new pause, or 0; requests per second, or 0 to take no slot; seconds of
# unused slots that may be used later (the burst). Returns the milliseconds of the pause that ends last, and the seconds
# until the next free slot; if that is not in the future, the caller has it.
_EXCHANGE = """
local pause = math.max(0, redis.call('PTTL', KEYS[1]))
if tonumber(ARGV[1]) > pause then
    pause = tonumber(ARGV[1])
    redis.call('SET', KEYS[1], 'paused', 'PX', pause)
end
if pause > 0 or tonumber(ARGV[2]) == 0 then
    return {pause, tostring(pause / 1000)}
end
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
-- The next slot, and the time when the last one was taken. If the clock was set back, they keep their distance.
local slot, at = string.match(redis.call('GET', KEYS[2]) or '0 0', '(%S+) (%S+)')
local first = math.max(slot - math.max(at - now, 0), now - tonumber(ARGV[3]))
if first <= now then
    redis.call('SET', KEYS[2], string.format('%.6f %.6f', first + 1 / ARGV[2], now), 'PX', 60000 + 1000 / ARGV[2])
end
return {0, string.format('%.6f', first - now)}
"""


class RedisRateLimiter:
    """A `RateLimiter` for clients on any number of machines whose requests the service counts together. ::

        async with RedisRateLimiter("redis://redis.example.com", "tenant-7", rate=50) as limiter:
            client = SigningClient(base_url, oauth, rate_limiter=limiter)

    A 429 for one worker pauses all workers: none sends a request later than a fifth of a second after it. With a
    ``rate``, all workers together send at most that many requests per second, and up to ``burst`` at once after an idle
    time. Everything else is decided by ``local``, by default a `LocalRateLimiter`. If Redis does not respond within
    ``timeout`` seconds, each worker continues alone, with its own 429s and the whole ``rate``, and logs this once.
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
        self._connection = Connection(redis, timeout, lambda message, _: _Unavailable(message))
        self.name: str = _checks.string("name", name)
        prefix = _checks.string("prefix", prefix, may_be_empty=True)
        if burst is not None and rate is None:
            raise ConfigurationError("burst: needs a rate")
        self.rate: float | None = None if rate is None else _checks.number("rate", rate, above=0)
        burst = max(1, round(_DEFAULT_BURST * (rate or 0))) if burst is None else _checks.integer("burst", burst)
        self._burst_seconds = 0.0 if rate is None else (burst - 1) / rate
        self._local: RateLimiter = LocalRateLimiter() if local is None else as_rate_limiter(local, "local")
        self._keys = [f"{prefix}{part}:{name}".encode() for part in ("rate-limit-pause", "rate-limit-slot")]
        # All times are in loop time.
        self._paused_until = self._asked_at = self._next_at = self._next_alone = 0.0
        self._unpublished = 0.0
        """The end of an own pause that Redis does not know yet, or 0."""
        self._enter(None)

    def _enter(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop
        self._is_shared: bool | None = None
        """Whether Redis responded last time; None before the first time."""
        self._first_in_line = asyncio.Lock()
        self._background: asyncio.Task[None] | None = None

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
        """Close the connections, except a given client."""
        if self._background is not None and self._loop is asyncio.get_running_loop():
            self._background.cancel()
            await asyncio.wait([self._background])
        await self._connection.aclose()

    @property
    def next_at(self) -> float:
        """The earliest known time (loop time) for a request made now."""
        return max(self._local.next_at, self._next_at)

    def pause(self, seconds: float) -> None:
        """Pause all workers for at least ``seconds``."""
        self._enter_running_loop()
        until = _now() + seconds
        self._paused_until, self._unpublished = max(self._paused_until, until), max(self._unpublished, until)
        self._local.pause(seconds)
        self._start()

    async def acquire(self, deadline: float) -> bool:
        """Wait until a request may be sent; return False if none may be sent before the deadline."""
        self._enter_running_loop()
        try:
            async with asyncio.timeout_at(deadline), self._first_in_line:
                while (wait := await self._take_slot()) > 0:
                    self._next_at = _now() + wait
                    if self._next_at >= deadline:
                        return False
                    # A pause may begin meanwhile.
                    await asyncio.sleep(min(wait, _POLL))
        except TimeoutError:
            return False
        return await self._local.acquire(deadline)

    def release(self, acquired_at: float, accepted: bool | None) -> None:
        """Record the end of a request."""
        self._local.release(acquired_at, accepted)

    async def _take_slot(self) -> float:
        """Return the seconds until a request may be sent; if they are not above 0, it may be sent now."""
        now = _now()
        if self._is_shared is not False and (self.rate is not None or now >= self._asked_at + _POLL):
            wait = await self._exchange(self.rate or 0)
            if wait is not None:
                return wait
        wait = self._paused_until - now
        if self._is_shared is False and self.rate is not None and wait <= 0:
            slot = max(self._next_alone, now - self._burst_seconds)
            wait = slot - now
            if wait <= 0:
                self._next_alone = slot + 1 / self.rate
        return wait

    async def _exchange(self, rate: float) -> float | None:
        """Publish the own pause, learn the shared one, and take a slot; return None if Redis is unavailable."""
        own = self._unpublished
        milliseconds = max(0, round((own - _now()) * 1000))
        try:
            paused, wait = await self._connection.script(_EXCHANGE, self._keys, milliseconds, rate, self._burst_seconds)
        except _Unavailable as error:
            if self._is_shared is not False:
                text = "%r: the rate limit is not shared for now, this worker continues alone: %s"
                log.warning(text, self, error)
            self._is_shared = False
            self._start()
            return None
        if self._is_shared is False:
            log.info("%r: Redis is back, the rate limit is shared again", self)
        self._is_shared, self._asked_at = True, _now()
        self._unpublished = 0.0 if self._unpublished == own else self._unpublished
        until = self._asked_at + paused / 1000
        if paused and until > self._paused_until + _SAME_END:
            self._paused_until = until
            self._local.pause(paused / 1000)
        return float(decoded(wait))

    def _start(self) -> None:
        if self._background is None or self._background.done():
            self._background = asyncio.create_task(self._synchronize(), name="signing_async rate limiter")

    async def _synchronize(self) -> None:
        """Publish the own pauses; if Redis is unavailable, wait until it is back."""
        while self._unpublished or not self._is_shared:
            if await self._exchange(0) is None:
                await asyncio.sleep(_RECONNECT)

    def _enter_running_loop(self) -> None:
        if self._loop is not asyncio.get_running_loop():
            self._enter(asyncio.get_running_loop())


class _Unavailable(Exception):  # never leaves this module
    """Redis did not respond in time, refused the command, or cannot be reached."""


def _now() -> float:
    return asyncio.get_running_loop().time()
