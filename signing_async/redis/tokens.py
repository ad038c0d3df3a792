"""A token in Redis: refreshed by one worker at a time on any machine, never replaced by an older one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import math
import os
import random
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any, Self

import attrs

from .. import _checks
from .._encryption import Keys, Sealer, hide_keys
from .._secret import Secret, hide
from .._tasks import finish
from ..auth.token_stores import adjust_expiry, token_from_json, token_to_json
from ..auth.unfinished import Unfinished
from ..errors import AuthError, TokenSuperseded
from ..models import Token
from .connection import Connection, RedisClient, cancel_and_wait, decoded, milliseconds

__all__ = ["RedisTokenStore"]

log: logging.Logger = logging.getLogger("signing_async")

_LEASES_OF_GRACE = 9

# KEYS of the scripts: token, lock. The token's hash holds ``record``, ``fence``, ``ahead`` (how many seconds the
# saver's clock was ahead of Redis's) and ``run`` (the server's run id). The lock holds its owner.
# ARGV: owner of the lock, or '' outside it; the grace in milliseconds; the reader's clock.
_LOAD = """
local stored = redis.call('HMGET', KEYS[1], 'record', 'fence', 'ahead', 'run')
if ARGV[1] ~= '' then
    if redis.call('GET', KEYS[2]) ~= ARGV[1] then
        return {'unlocked'}
    end
    -- After a restart the last writes may be lost, also with an append-only file: the lock of a refresh, for example.
    local info = redis.call('INFO', 'server')
    local uptime = tonumber(string.match(info, 'uptime_in_seconds:(%-?%d+)'))  -- negative: the clock was set back
    local left = ARGV[2] - uptime * 1000
    if stored[4] and stored[4] ~= string.match(info, 'run_id:(%x+)') and uptime >= 0 and left > 0 then
        return {'wait', left}
    end
    redis.call('PEXPIRE', KEYS[2], ARGV[2])  -- from here on, the refresh token may be used
end
local time = redis.call('TIME')
local ahead = ARGV[3] - time[1] - time[2] / 1000000 - (stored[3] or 0)
return {'loaded', stored[1] or '', stored[2] or 0, string.format('%.6f', ahead)}
"""
# ARGV: fence of the token to replace, or '' for any; record; the saver's clock. Returns the new fence, 0 if superseded.
_SAVE = """
local stored, replaced = tonumber(redis.call('HGET', KEYS[1], 'fence') or 0), tonumber(ARGV[1])
if replaced and stored > replaced then
    return 0
end
local time, fence = redis.call('TIME'), math.max(stored, replaced or 0) + 1
local ahead = string.format('%.6f', ARGV[3] - time[1] - time[2] / 1000000)
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
redis.call('HSET', KEYS[1], 'record', ARGV[2], 'fence', fence, 'ahead', ahead, 'run', run)
return fence
"""
# ARGV: owner, lease in milliseconds. Returns 1, or 0 with the holder and the milliseconds until the lock expires.
_LOCK = """
if redis.call('SET', KEYS[2], ARGV[1], 'NX', 'PX', ARGV[2]) then
    return {1, '', 0}
end
return {0, redis.call('GET', KEYS[2]) or '', redis.call('PTTL', KEYS[2])}
"""
_RENEW = "return redis.call('GET', KEYS[2]) == ARGV[1] and redis.call('PEXPIRE', KEYS[2], ARGV[2])"
_UNLOCK = "return redis.call('GET', KEYS[2]) == ARGV[1] and redis.call('DEL', KEYS[2])"


@attrs.define(eq=False)
class _Hold:
    """The lock as held by one worker."""

    store: RedisTokenStore
    owner: str
    duration: float
    """Seconds that the lock lasts without renewal: a lease, and from the load on the grace."""
    fence: int | str = ""
    """The fence of the loaded token."""
    unsaved: Secret[bytes] | None = None
    """A record whose save failed."""
    has_ended: bool = False


# Inherited by the tasks that start inside the lock.
_holds: ContextVar[tuple[_Hold, ...]] = ContextVar("signing_async_redis_holds", default=())


class RedisTokenStore:
    """Stores a user's token in Redis, for any number of workers on any number of machines. ::

        async with RedisTokenStore("rediss://:password@redis.example.com", "tenant-7/user-42") as store:
            oauth = OAuth(base_url, client_id=..., client_secret=..., redirect_uri=..., store=store)

    ``name`` identifies the token. With a ``key`` (32 random bytes or their base64, or several) the token is encrypted:
    the first key encrypts, all keys decrypt. A token that cannot be decrypted is an `AuthError`, and a refresh never
    overwrites it.

    The lock lasts for a ``lease``, and from the load in a refresh on for the ``grace`` (by default nine leases). It is
    renewed while it is held. If its worker disappears, or Redis is restarted, the others log a warning and wait until
    it expires. A former holder cannot overwrite a newer token: its save raises `TokenSuperseded`, and its `OAuth`
    continues with the newer token. ``redis/README.md`` says what this does not cover.

    If Redis does not respond within ``timeout`` seconds, `AuthError` is raised, and an `OAuth` uses its current token
    while it is valid. A refreshed token that cannot be saved is saved as soon as Redis is back. All times are by
    Redis's clock.
    """

    def __init__(
        self,
        redis: str | Secret[str] | RedisClient,
        name: str,
        *,
        key: Keys = None,
        prefix: str = "signing:",
        lease: float = 5.0,
        grace: float | None = None,
        timeout: float = 1.0,
    ) -> None:
        redis, key = hide(redis), hide_keys(key)
        self._connection = Connection(redis, timeout, _unavailable)
        self.name: str = _checks.string("name", name)
        prefix = _checks.string("prefix", prefix, may_be_empty=True)
        self._lease = _checks.number("lease", lease, above=0)
        self._grace = _checks.number("grace", _LEASES_OF_GRACE * lease if grace is None else grace, above=0)
        self._sealer = Sealer(key, owner="RedisTokenStore")
        self._place = f"{prefix}token:{name}"
        self._keys = [f"{prefix}{part}:{name}".encode() for part in ("token", "token-lock")]
        self._local_lock = asyncio.Lock()
        self._unfinished = Unfinished(timeout)

    def __repr__(self) -> str:
        return f"RedisTokenStore({self._connection.address!r}, {self.name!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_connection"):
            self._connection.warn_if_open(self)

    async def aclose(self) -> None:
        """Close the connections, except a given client. A save that waits for Redis is given ``timeout`` seconds."""
        await self._unfinished.close(self)
        await self._connection.aclose()

    async def load(self) -> Token | None:
        while True:
            hold = self._current_hold()
            owner = "" if hold is None else hold.owner
            if hold is not None:
                hold.duration = self._grace
            result = await self._run(_LOAD, owner, milliseconds(self._grace), f"{time.time():.6f}")
            match [decoded(field) for field in result]:
                case ["loaded", record, fence, ahead]:
                    if hold is not None:
                        hold.fence = int(fence)
                    return self._decode(record, float(ahead)) if record else None
                case ["wait", left]:
                    text = "%r: waiting for %.1f s: Redis was restarted, and the refresh token may have been used"
                    log.warning(text, self, int(left) / 1000)
                    await asyncio.sleep(int(left) / 1000)
                case _:
                    raise AuthError(f"{self!r}: the lock expired before the token was loaded", transient=True)

    async def save(self, token: Token) -> None:
        hold = self._current_hold()
        record = Secret(self._encode(token))
        if hold is not None:
            hold.unsaved = record
        fence = await self._save(hold, record)
        if hold is not None:
            hold.fence, hold.unsaved = fence or hold.fence, None
        if not fence:
            raise TokenSuperseded(f"{self!r} holds a newer token, which was not overwritten")

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Hold the lock: one worker at a time."""
        async with self._local_lock:
            await self._unfinished.wait(f"the token store is unavailable: {self._connection.address}")
            hold = _Hold(self, f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}", self._lease)
            renewing: asyncio.Task[None] | None = None
            before = _holds.get()
            try:
                await self._acquire(hold)
                renewing = asyncio.create_task(self._renew(hold), name="signing_async token lock")
                _holds.set((hold, *before))
                yield
            finally:
                _holds.set(before)
                hold.has_ended = True
                await finish(self._release(hold, renewing))

    # The lock

    def _current_hold(self) -> _Hold | None:
        """Return the hold of this task, or of the task that started it."""
        return next((hold for hold in _holds.get() if hold.store is self and not hold.has_ended), None)

    async def _acquire(self, hold: _Hold) -> None:
        warn_at = time.monotonic() + self._lease
        while True:
            acquired, holder, left = await self._run(_LOCK, hold.owner, milliseconds(self._lease))
            if acquired:
                return
            if time.monotonic() > warn_at:
                text = "%r: waiting for the lock, which %s holds; it expires in %.1f s unless it is renewed"
                log.warning(text, self, _describe(decoded(holder)), max(left, 0) / 1000)
                warn_at = math.inf
            await asyncio.sleep(random.uniform(0.01, 0.04))

    async def _renew(self, hold: _Hold) -> None:
        while True:
            await asyncio.sleep(self._lease / 3)
            with contextlib.suppress(AuthError):
                await self._run(_RENEW, hold.owner, milliseconds(hold.duration))

    async def _release(self, hold: _Hold, renewing: asyncio.Task[None] | None) -> None:
        """Release the lock. If that fails, or a token is not saved yet, do both in the background."""
        await cancel_and_wait(renewing)
        if hold.unsaved is None:
            with contextlib.suppress(AuthError):
                await self._end(hold)
                return
        self._unfinished.start(lambda: self._end(hold), unsaved=hold.unsaved is not None)

    async def _end(self, hold: _Hold) -> None:
        if hold.unsaved is not None:
            await self._save(hold, hold.unsaved)
            hold.unsaved = None
        await self._run(_UNLOCK, hold.owner)

    # The token

    async def _save(self, hold: _Hold | None, record: Secret[bytes]) -> int:
        """Save the record and return its fence; return 0 if a newer token is stored."""
        return int(await self._run(_SAVE, "" if hold is None else hold.fence, record, f"{time.time():.6f}"))

    async def _run(self, script: str, *arguments: Any) -> Any:
        return await self._connection.script(script, self._keys, *arguments)

    def _encode(self, token: Token) -> bytes:
        data = token_to_json(token)
        # The caller's client may decode responses as UTF-8.
        return base64.b64encode(self._sealer.seal(data, self._place)) if self._sealer else data

    def _decode(self, record: str, ahead: float) -> Token:
        """Return the token, with its expiry by the reader's clock, which is ``ahead`` of the saver's."""
        try:
            # Base64 has no brace.
            data = record.encode() if record.startswith("{") else base64.b64decode(record)
            return adjust_expiry(token_from_json(self._sealer.unseal(data, self._place)), ahead)
        except ValueError as error:
            problem = str(error)
        raise AuthError(f"{self!r}: the stored token cannot be read and was not changed: {problem}")


def _describe(owner: str) -> str:
    return "process {1} on {0}".format(*owner.split(":")) if owner else "another worker"


def _unavailable(message: str, transient: bool) -> AuthError:
    return AuthError(f"the token store is unavailable: {message}", transient=transient)
