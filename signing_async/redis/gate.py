"""One worker's 429 holds them all, and a rate that all share: no request waits for Redis to be asked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import warnings
from collections import deque
from types import TracebackType
from typing import Any, Self

from .. import _checks
from ..errors import ConfigurationError
from ..transport.rate_limit import Gate, LocalGate
from .connection import Connection, RedisClient, Script, Unreachable, end, text_of

__all__ = ["RedisGate"]

log: logging.Logger = logging.getLogger("signing_async")

_LOOK_EVERY = 1.0
_SLICE = 0.1
_KEPT = 1.0
_SAME = 0.05
_LISTEN_AGAIN = 0.05

# KEYS: gate. ARGV: milliseconds, who closes it. What is closed for longer stays so.
_CLOSE = Script(
    """
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[1]) then
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[1])
    redis.call('PUBLISH', KEYS[1], ARGV[1] .. ' ' .. ARGV[2])
end
return 1
"""
)
# KEYS: rate. ARGV: how many, requests per second, seconds whose unused requests may be made up for.
# Takes the next turns of all workers, and tells in how many seconds the first of them comes (negative: it has come).
_TAKE = Script(
    """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local first = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), now - tonumber(ARGV[3]))
-- One that is far ahead was written before the clock was set back.
if first > now + 3600 then
    first = now
end
local following = first + tonumber(ARGV[1]) / tonumber(ARGV[2])
redis.call('SET', KEYS[1], string.format('%.6f', following), 'PX', math.ceil((following - now + 60) * 1000))
return string.format('%.6f', first - now)
"""
)


class _Turns:
    """Points in time, by the loop's clock, at which a request may go out; in rows of them, ``step`` apart."""

    def __init__(self, step: float) -> None:
        self.step = step
        self._rows: deque[tuple[float, int]] = deque()

    def add(self, first: float, count: int) -> None:
        """A row that begins at this time."""
        self._rows.append((first, count))

    def next(self, now: float) -> float | None:
        """The first of them. What was not used for a while has lapsed, so that a pause does not end in a burst."""
        while self._rows:
            first, count = self._rows[0]
            lapsed = max(0, math.ceil((now - _KEPT - first) / self.step))
            if lapsed < count:
                self._rows[0] = (first + lapsed * self.step, count - lapsed)
                return self._rows[0][0]
            self._rows.popleft()
        return None

    def take(self) -> None:
        """Use the first of them."""
        first, count = self._rows.popleft()
        if count > 1:
            self._rows.appendleft((first + self.step, count - 1))

    def __len__(self) -> int:
        return sum(count for _, count in self._rows)


class RedisGate:
    """A `Gate` for clients on any number of machines whose requests the service counts together. ::

        async with RedisGate("redis://redis.example.com", "tenant-7", rate=50) as gate:
            client = SigningClient(base_url, oauth, gate=gate)

    A 429 that one worker gets closes the gate of all within moments. With a ``rate``, all workers together make at most
    that many requests per second, and up to ``burst`` at once after a quiet time: each fetches turns ahead, a few or a
    tenth of a second's, as it needs them. The rest is left to ``local``, by default a `LocalGate`.

    Where Redis does not answer within ``timeout`` seconds each worker goes on by itself, with what its own requests
    tell it and with the whole ``rate``, which is said once in the log; and together again when Redis is back. The keys
    are ``<prefix>gate:<name>`` (also the channel) and ``<prefix>gate-rate:<name>``, times are of Redis's own clock.
    """

    def __init__(
        self,
        redis: str | RedisClient,
        name: str = "default",
        *,
        rate: float | None = None,
        burst: int | None = None,
        local: Gate | None = None,
        prefix: str = "signing:",
        timeout: float = 0.5,
    ) -> None:
        self._connection = Connection("RedisGate", redis, timeout)
        # Variables are shown in some tracebacks.
        del redis
        _checks.text("RedisGate", "name", name)
        _checks.text("RedisGate", "prefix", prefix, may_be_empty=True)
        if rate is not None and (
            isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf
        ):
            raise ConfigurationError(f"RedisGate: rate must be requests per second above 0, not {rate!r}")
        if burst is not None and not (type(burst) is int and burst >= 1):
            raise ConfigurationError(f"RedisGate: burst must be a number of requests from 1, not {burst!r}")
        if burst is not None and rate is None:
            raise ConfigurationError("RedisGate: burst needs a rate")
        if local is not None and (isinstance(local, type) or not isinstance(local, Gate)):
            raise ConfigurationError(f"RedisGate: local must be a Gate, such as LocalGate(), not {local!r}")
        self.name = name
        self.rate = rate
        self._burst = max(1, round(_SLICE * (rate or 0))) if burst is None else burst
        self._local = LocalGate() if local is None else local
        self._key = f"{prefix}gate:{name}".encode()
        self._rate_key = f"{prefix}gate-rate:{name}".encode()
        self._worker = secrets.token_hex(8)
        self._closed_until = 0.0
        self._turns = None if rate is None else _Turns(1 / rate)
        self._wanted = 0
        self._fetched = 0
        self._fetched_at = -math.inf
        self._alone_next = 0.0
        self._fetching: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self._looked = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._together: bool | None = None

    def __repr__(self) -> str:
        return f"RedisGate({self._connection.place!r}, {self.name!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_watching", None) is not None:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)

    async def aclose(self) -> None:
        """Stop watching, and close the connections, but not a client that was given."""
        self._forget_other_loop(asyncio.get_running_loop())
        await end(self._watching, self._fetching, *self._telling)
        self._watching = self._fetching = None
        self._looked.clear()
        await self._connection.aclose()

    # The gate

    @property
    def opens_at(self) -> float:
        """When a request that came now could go out, by the loop's clock, as far as this worker knows."""
        turn = None if self._turns is None else self._turns.next(asyncio.get_running_loop().time())
        return max(self._local.opens_at, turn or 0.0)

    def close(self, seconds: float) -> None:
        """Stay closed for at least this long from now, here and at all workers."""
        loop = asyncio.get_running_loop()
        self._forget_other_loop(loop)
        self._closed_until = max(self._closed_until, loop.time() + seconds)
        self._local.close(seconds)
        task = loop.create_task(self._tell(loop.time() + seconds), name="signing_async gate closing")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def passed(self, deadline: float) -> bool:
        """Wait for the gate to be open, and for a turn; False where that is not before the deadline."""
        self._forget_other_loop(asyncio.get_running_loop())
        if not self._looked.is_set():
            await self._look_first(deadline)
        if self._turns is not None and not await self._turn(self._turns, deadline):
            return False
        return await self._local.passed(deadline)

    def left(self, since: float, admitted: bool | None) -> None:
        """A request is over."""
        self._local.left(since, admitted)

    def _forget_other_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch anew in a second event loop: the tasks of the first one ended with it."""
        if self._loop is not loop:
            self._loop = loop
            self._watching = self._fetching = None
            self._telling = set()
            self._looked = asyncio.Event()

    # The rate

    async def _turn(self, turns: _Turns, deadline: float) -> bool:
        loop = asyncio.get_running_loop()
        # Who is held anyway takes no turn meanwhile: it would be used with many others at once.
        while self._closed_until > loop.time():
            if self._closed_until >= deadline:
                return False
            await asyncio.sleep(self._closed_until - loop.time())
        self._wanted += 1
        while (turn := turns.next(loop.time())) is None:
            await asyncio.wait([self._fetch_more(turns)], timeout=max(deadline - loop.time(), 0.0))
            if loop.time() >= deadline:
                return False
        if turn >= deadline:
            return False
        turns.take()
        if 2 * len(turns) < self._fetched:
            self._fetch_more(turns)
        if (wait := turn - loop.time()) > 0:
            await asyncio.sleep(wait)
        return True

    def _fetch_more(self, turns: _Turns) -> asyncio.Task[None]:
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.create_task(self._fetch(turns), name="signing_async gate turns")
        return self._fetching

    async def _fetch(self, turns: _Turns) -> None:
        """As many turns as are wanted, or twice as many as before if those were used at once; a moment's at most."""
        loop = asyncio.get_running_loop()
        doubled = 2 * self._fetched if loop.time() - self._fetched_at < 2 * _SLICE else 0
        count = max(1, min(max(self._wanted, doubled), round(_SLICE / turns.step)))
        self._wanted, self._fetched, self._fetched_at = 0, count, loop.time()
        spare = (self._burst - 1) * turns.step
        if self._together:
            try:
                ahead = await self._connection.script(_TAKE, [self._rate_key], count, self.rate, spare)
            except Unreachable as error:
                self._go_on_alone(str(error))
            else:
                turns.add(loop.time() + float(text_of(ahead)), count)
                return
        first = max(self._alone_next, loop.time() - spare)
        self._alone_next = first + count * turns.step
        turns.add(first, count)

    # The others

    async def _tell(self, until: float) -> None:
        """Close the gate of the others, as soon as Redis can be reached."""
        loop = asyncio.get_running_loop()
        while (left := until - loop.time()) > 0:
            try:
                await self._connection.script(_CLOSE, [self._key], max(1, round(left * 1000)), self._worker)
                return
            except Unreachable as error:
                self._go_on_alone(str(error))
            await asyncio.sleep(min(_LOOK_EVERY, left))

    async def _look_first(self, deadline: float) -> None:
        """A worker that begins while the gate is closed has to know."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="signing_async gate")
        left = deadline - asyncio.get_running_loop().time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(left, self._connection.timeout)):
                await self._looked.wait()

    async def _watch(self) -> None:
        while True:
            wait = _LISTEN_AGAIN
            try:
                await self._follow()
            except Unreachable as error:
                self._go_on_alone(str(error))
                wait = _LOOK_EVERY
            self._looked.set()
            await asyncio.sleep(wait)

    async def _follow(self) -> None:
        """Close the local gate whenever another worker tells to, until Redis or the connection is lost."""
        listener = await self._connection.bounded(self._listener)
        hearing = asyncio.create_task(self._hear(listener), name="signing_async gate listener")
        try:
            while not hearing.done():
                # What was told while nobody listened; and whether Redis is there at all.
                left = await self._connection.run("PTTL", self._key)
                self._hold(max(left, 0) / 1000)
                if self._together is False:
                    log.info("%r: Redis is back, the gate is shared again", self)
                self._together = True
                self._looked.set()
                await asyncio.wait([hearing], timeout=_LOOK_EVERY)
        finally:
            await end(hearing)
            with contextlib.suppress(Unreachable):
                await self._connection.bounded(listener.aclose)

    async def _listener(self) -> Any:
        listener = self._connection.client.pubsub()
        try:
            await listener.subscribe(self._key)
            await listener.get_message(timeout=None)
        except BaseException:
            await listener.aclose()
            raise
        return listener

    async def _hear(self, listener: Any) -> None:
        """Until the connection is lost, or a client's own time-out ends the waiting."""
        with contextlib.suppress(Exception):
            while True:
                message = await listener.get_message(ignore_subscribe_messages=True, timeout=None)
                millis, _, worker = text_of(message["data"]).partition(" ")
                if worker != self._worker:
                    self._hold(int(millis) / 1000)

    def _hold(self, seconds: float) -> None:
        until = asyncio.get_running_loop().time() + seconds
        # The same closing may be heard of several times, each a little later.
        if seconds > 0 and until > self._closed_until + _SAME:
            self._closed_until = until
            self._local.close(seconds)

    def _go_on_alone(self, words: str) -> None:
        if self._together is not False:
            self._together = False
            log.warning("%r: the gate is not shared for now, this worker goes by itself: %s", self, words)
