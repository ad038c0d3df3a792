"""A token in Redis: refreshed by one worker at a time, wherever the others run, and never replaced by an older one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import random
import secrets
import socket
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import attrs

from .. import checks
from ..encryption import Sealer
from ..errors import AuthError, TokenSuperseded
from ..models import Token
from ..token_stores import carried_through, token_from_json, token_to_json
from .connection import Connection, RedisClient, Script, Unreachable, end, text_of

__all__ = ["RedisTokenStore"]

log: logging.Logger = logging.getLogger("signing_async")

_LONGEST_WAIT_FOR_LOST = 2.0
_SAVE_AGAIN = 0.2
_CLOCKS_AGREE = 2.0

# All times are of Redis's own clock. A token's fence is when it was saved, in microseconds, and always grows.
_NOW = """
local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]
local now = micros / 1000000
"""
# A worker that knows a newer token than there is puts it back: Redis has lost it. One that has expired is kept back
# for as long as a token lives, since another worker may yet come with a newer one.
_RESTORE = """
local function restore(key, known, record, doubt)
    if known ~= '' and tonumber(known) > tonumber(redis.call('HGET', key, 'fence') or '0') then
        redis.call('HSET', key, 'fence', known, 'record', record)
        redis.call('HDEL', key, 'doubt')
        if tonumber(doubt) > 0 then
            redis.call('HSET', key, 'doubt', string.format('%.6f', now + tonumber(doubt)))
        end
    end
end
"""
# KEYS: token, lock. ARGV: owner, seconds until it is renewed, known fence, its record, its doubt.
# A lock whose lease is over is taken, unless its holder has read the token and is still connected: it is paused, and
# may have used the refresh token. Who may not take it is told the seconds that are left (negative: paused since).
_ACQUIRE = Script(
    _NOW
    + _RESTORE
    + """
restore(KEYS[1], ARGV[3], ARGV[4], ARGV[5])
local lock = redis.call('HMGET', KEYS[2], 'owner', 'until', 'read')
if lock[1] and lock[1] ~= ARGV[1] then
    local left = tonumber(lock[2]) - now
    if left > 0 or (lock[3] and redis.call('PUBSUB', 'NUMSUB', KEYS[2] .. ':' .. lock[1])[2] > 0) then
        return {0, string.format('%.6f', left), lock[1]}
    end
end
redis.call('DEL', KEYS[2])
redis.call('HSET', KEYS[2], 'owner', ARGV[1], 'until', string.format('%.6f', now + tonumber(ARGV[2])))
return {1, redis.call('HGET', KEYS[1], 'fence') or '0'}
"""
)
# KEYS: token, lock. ARGV: owner of the lock or '', known fence, its record, its doubt.
_LOAD = Script(
    _NOW
    + _RESTORE
    + """
if ARGV[1] ~= '' then
    if redis.call('HGET', KEYS[2], 'owner') ~= ARGV[1] then
        return {0}
    end
    redis.call('HSET', KEYS[2], 'read', '1')
end
restore(KEYS[1], ARGV[2], ARGV[3], ARGV[4])
local kept = redis.call('HMGET', KEYS[1], 'record', 'fence', 'doubt')
return {1, kept[1] or '', kept[2] or '0', string.format('%.6f', now), string.format('%.6f', (kept[3] or now) - now)}
"""
)
# KEYS: token. ARGV: the newest fence that it may replace or '', record.
_SAVE = Script(
    _NOW
    + """
local fence = tonumber(redis.call('HGET', KEYS[1], 'fence') or '0')
if ARGV[1] ~= '' and fence > tonumber(ARGV[1]) then
    return ''
end
local newer = string.format('%.0f', math.max(micros, fence + 1))
redis.call('HSET', KEYS[1], 'fence', newer, 'record', ARGV[2])
redis.call('HDEL', KEYS[1], 'doubt')
return newer
"""
)
# KEYS: lock. ARGV: owner, lease. Tells how many connections show that the owner lives; -1 where the lock is lost.
_RENEW = Script(
    _NOW
    + """
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then
    return -1
end
redis.call('HSET', KEYS[1], 'until', string.format('%.6f', now + tonumber(ARGV[2])))
return redis.call('PUBSUB', 'NUMSUB', KEYS[1] .. ':' .. ARGV[1])[2]
"""
)
# KEYS: lock. ARGV: owner.
_RELEASE = Script(
    """
if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then
    redis.call('DEL', KEYS[1])
end
return 1
"""
)


@attrs.frozen
class _Known:
    """The newest token that this worker has seen."""

    fence: str = ""
    record: str = attrs.field(default="", repr=False)
    token: Token | None = attrs.field(default=None, repr=False)
    lives: float = 0.0

    def arguments(self, lease: float) -> tuple[str, str, float]:
        """For `_RESTORE`. While it is valid, a newer one can only be a refresh that is under way."""
        expiry = None if self.token is None else self.token.expires_at
        valid = expiry is None or expiry.timestamp() > time.time()
        return self.fence, self.record, min(self.lives, lease) if valid else self.lives


@attrs.define(eq=False)
class _Hold:
    """The lock, held by this worker."""

    store: RedisTokenStore
    owner: str
    fence: str = ""
    silent: bool = False
    """Redis did not answer when it was last asked for it."""
    listener: Any = None
    keeper: asyncio.Task[None] | None = None
    unsaved: Token | None = attrs.field(default=None, repr=False)


# Seen by whatever runs inside the lock, and by nobody else.
_holding: ContextVar[tuple[_Hold, ...]] = ContextVar("signing_async_redis_locks", default=())


class RedisTokenStore:
    """Keeps a user's token in Redis, for any number of workers on any number of machines. ::

        async with RedisTokenStore("rediss://:password@redis.example.com", "tenant-7/user-42") as store:
            oauth = OAuth(base_url, client_id=..., client_secret=..., redirect_uri=..., store=store)

    ``name`` says whose token it is. With a ``key`` (32 random bytes or their base64, or several) it is encrypted at
    rest: the first key encrypts, all of them decrypt, so a new one is put in front, and the old one taken away after
    the next refresh. What cannot be decrypted is an `AuthError`, and a refresh never writes over it.

    The lock has a ``lease``, renewed while it is held. When that is over, the holder is dead or paused. From the dead
    it is taken. A holder that is paused after it has read the token may have used the refresh token, and a server that
    sees that again may revoke all tokens of the user: so for as long as its connection to Redis lives, nobody takes
    its place, and the error names its machine and process. A worker that lost the lock saves nothing over a newer
    token (`TokenSuperseded`; an `OAuth` then goes on with the newer one).

    Where Redis does not answer within ``timeout`` seconds, that is an `AuthError`, and an `OAuth` serves the token in
    hand while it is valid. A token that was refreshed and cannot be saved is saved as soon as Redis is back, and the
    lock is kept until then. Where Redis comes back without its data, workers put the newest token back that they know.

    A refresh token may be worth a person's time, so let Redis keep it: ``appendonly yes``, ``noeviction``. With
    replicas a failover may lose the last save; ``min-replicas-to-write`` narrows that, and nothing in Redis closes it.
    The keys are ``<prefix>token:<name>`` and ``<prefix>token-lock:<name>``; the channels begin with the latter. All
    times are of Redis's clock: a worker's may be wrong.
    """

    def __init__(
        self,
        redis: str | RedisClient,
        name: str,
        *,
        key: str | bytes | Sequence[str | bytes] | None = None,
        prefix: str = "signing:",
        lease: float = 5.0,
        timeout: float = 1.0,
    ) -> None:
        self._connection = Connection("RedisTokenStore", redis, timeout)
        # Variables are shown in some tracebacks.
        del redis
        checks.text("RedisTokenStore", "name", name)
        checks.text("RedisTokenStore", "prefix", prefix, may_be_empty=True)
        checks.seconds("RedisTokenStore", "lease", lease)
        self._sealed = key is not None
        self._sealer = Sealer(key, owner="RedisTokenStore")
        del key
        self.name = name
        self._place = f"{prefix}token:{name}"
        self._key = self._place.encode()
        self._lock_key = f"{prefix}token-lock:{name}".encode()
        self._lease = lease
        self._local = asyncio.Lock()
        self._known = _Known()
        self._finishing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"RedisTokenStore({self._connection.place!r}, {self.name!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_connection") and self._connection.is_open:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)

    async def aclose(self) -> None:
        """Close the connections, but not a client that was given; a save that waits for Redis is tried once more."""
        if self._finishing is not None:
            await asyncio.wait([self._finishing], timeout=self._connection.timeout)
            if not self._finishing.done():
                log.error("%r is closed, and a refreshed token was never saved: its user may have to authorize", self)
                await end(self._finishing)
        await self._connection.aclose()

    async def load(self) -> Token | None:
        hold = self._hold()
        began = time.monotonic()
        while True:
            owner = "" if hold is None else hold.owner
            answer = await self._ask(hold, _LOAD, owner, *self._known.arguments(self._lease))
            if not answer[0]:
                assert hold is not None
                # Paused for longer than the lease. Nothing was read yet, so it may queue again.
                await self._acquire(hold)
                continue
            record, fence, now, doubt = map(text_of, answer[1:])
            token = self._learn(record, fence, float(now)) if record else None
            if hold is None:
                return token
            if float(doubt) <= 0:
                hold.fence = fence
                return token
            if time.monotonic() - began + float(doubt) > _LONGEST_WAIT_FOR_LOST:
                raise AuthError(
                    f"{self!r} lost its data: the token that is known here is kept back for {float(doubt):.0f} s more,"
                    " for a worker that knows a newer one; or authorize again"
                )
            await asyncio.sleep(min(float(doubt), _SAVE_AGAIN))

    async def save(self, token: Token) -> None:
        hold = self._hold()
        try:
            await self._put(token, "" if hold is None else hold.fence)
        except Unreachable as error:
            words = str(error)
        else:
            if hold is not None:
                hold.unsaved, hold.fence, hold.silent = None, self._known.fence, False
            return
        if hold is not None:
            hold.unsaved = token
        raise AuthError(f"the token cannot be saved: {words}")

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Held by one worker; waits for as long as others hold it, but not for one that is paused."""
        await self._finished()
        async with self._local:
            hold = _Hold(self, f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}")
            try:
                await self._acquire(hold)
                mark = _holding.set((hold, *_holding.get()))
                try:
                    yield
                finally:
                    _holding.reset(mark)
            finally:
                if hold.unsaved is None:
                    await carried_through(self._let_go(hold))
                else:
                    self._finishing = asyncio.create_task(self._finish(hold), name="signing_async token save")

    # The lock

    def _hold(self) -> _Hold | None:
        return next((hold for hold in _holding.get() if hold.store is self), None)

    async def _acquire(self, hold: _Hold) -> None:
        patience: float | None = None
        # Redis that was stopped does when it wakes what nobody waits for any more: such a lock is not renewed.
        begin = min(self._lease, 2 * self._connection.timeout)
        while True:
            answer = await self._ask(hold, _ACQUIRE, hold.owner, begin, *self._known.arguments(self._lease))
            if answer[0]:
                break
            left, now = float(text_of(answer[1])), time.monotonic()
            # Redis may have been away itself: a holder that is well renews its lease before another one is over.
            patience = None if left > 0 else patience or now + self._lease
            if patience is not None and now > patience:
                host, process, _ = text_of(answer[2]).rsplit(":", 2)
                raise AuthError(
                    f"{self!r} is locked by process {process} on {host}, which has been paused for {-left:.0f} s in a"
                    " refresh and may have used the refresh token: let it go on, or end it"
                )
            await asyncio.sleep(random.uniform(0.01, 0.04))
        hold.fence = text_of(answer[1])
        await self._listen(hold)
        await end(hold.keeper)
        hold.keeper = asyncio.create_task(self._keep(hold), name="signing_async token lock")

    async def _listen(self, hold: _Hold) -> None:
        """Hold a connection open that shows the others that this worker lives, be it paused."""
        channel = self._lock_key + f":{hold.owner}".encode()

        async def listen() -> None:
            hold.listener = self._connection.client.pubsub()
            await hold.listener.subscribe(channel)
            await hold.listener.get_message(timeout=None)

        await self._hush(hold)
        try:
            await self._connection.bounded(listen)
        except Unreachable as error:
            words = str(error)
        else:
            return
        hold.silent = True
        raise AuthError(f"the token's lock cannot be held: {words}")

    async def _hush(self, hold: _Hold) -> None:
        listener, hold.listener = hold.listener, None
        if listener is not None:
            with contextlib.suppress(Unreachable):
                await self._connection.bounded(listener.aclose)

    async def _keep(self, hold: _Hold) -> None:
        """Renew the lease until the lock is given back or lost."""
        listeners = 1
        while True:
            with contextlib.suppress(Unreachable, AuthError):
                if not listeners:
                    await self._listen(hold)
                listeners = await self._connection.script(_RENEW, [self._lock_key], hold.owner, self._lease)
            if listeners < 0:
                return
            await asyncio.sleep(self._lease / 3)

    async def _let_go(self, hold: _Hold) -> None:
        await end(hold.keeper)
        # Redis that has just not answered is not waited for again: the lease ends by itself.
        if not hold.silent:
            with contextlib.suppress(Unreachable):
                await self._connection.script(_RELEASE, [self._lock_key], hold.owner)
        await self._hush(hold)

    # A save that waits for Redis

    async def _finish(self, hold: _Hold) -> None:
        """Save what could not be saved. Until then the lock is kept: another worker would use the old refresh token."""
        assert hold.unsaved is not None
        try:
            while True:
                try:
                    await self._put(hold.unsaved, hold.fence)
                    break
                except TokenSuperseded:
                    # By another worker, or by this very token: only the answer to its save had been lost.
                    break
                except Unreachable:
                    await asyncio.sleep(_SAVE_AGAIN)
            hold.silent = False
        finally:
            await self._let_go(hold)

    async def _finished(self) -> None:
        if self._finishing is None:
            return
        await asyncio.wait([self._finishing], timeout=self._connection.timeout)
        if not self._finishing.done():
            raise AuthError(f"{self._connection.place} does not answer, and a refreshed token waits to be saved there")
        self._finishing = None

    # What is kept

    async def _ask(self, hold: _Hold | None, script: Script, *arguments: Any) -> Any:
        try:
            answer = await self._connection.script(script, [self._key, self._lock_key], *arguments)
        except Unreachable as error:
            words = str(error)
        else:
            if hold is not None:
                hold.silent = False
            return answer
        if hold is not None:
            hold.silent = True
        raise AuthError(f"the token store cannot be used: {words}")

    async def _put(self, token: Token, fence: str) -> None:
        expiry = token.expires_at
        lives = 0.0 if expiry is None else max(expiry.timestamp() - time.time(), 0.0)
        record = self._write(token, lives)
        newer = text_of(await self._connection.script(_SAVE, [self._key], fence, record))
        if not newer:
            raise TokenSuperseded(f"{self!r} holds a newer token than the one that was to be replaced: that one stays")
        self._known = _Known(newer, record, token, lives)

    def _write(self, token: Token, lives: float) -> str:
        fields = {"token": token_to_json(token).decode(), "clock": time.time(), "lives": lives}
        data = json.dumps(fields).encode()
        return base64.b64encode(self._sealer.seal(data, self._place)).decode() if self._sealed else data.decode()

    def _learn(self, record: str, fence: str, now: float) -> Token:
        """The token of what Redis holds; remembered if it is newer than what was known."""
        if record == self._known.record and self._known.token is not None:
            return self._known.token
        token, lives = self._read(record, float(fence) / 1e6, now)
        if float(fence) > float(self._known.fence or 0):
            self._known = _Known(fence, record, token, lives)
        return token

    def _read(self, record: str, saved: float, now: float) -> tuple[Token, float]:
        """The token of a record that was saved at this time, and how long it lived then; times are of Redis's clock."""
        try:
            token, clock, lives = self._unpack(record)
        except ValueError as error:
            problem = str(error)
        else:
            # Its expiry is by the clock of the worker that saved it; that may be wrong, or this one's.
            shift = (time.time() - now) - (clock - saved)
            if token.expires_at is not None and abs(shift) > _CLOCKS_AGREE:
                token = attrs.evolve(token, expires_at=token.expires_at + timedelta(seconds=shift))
            return token, lives
        raise AuthError(f"{self!r}: what is kept there cannot be used, and was left as it is: {problem}")

    def _unpack(self, record: str) -> tuple[Token, float, float]:
        # In base64 there is no brace.
        plain = record.startswith("{")
        data = self._sealer.unseal(record.encode() if plain else _from_base64(record), self._place)
        # What went wrong in here is not kept as a cause: json's error holds the whole text.
        with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError, RecursionError):
            fields = json.loads(data)
            return token_from_json(fields["token"].encode()), float(fields["clock"]), float(fields["lives"])
        raise ValueError("no token in it")


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""
