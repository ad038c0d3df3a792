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
import time
from collections.abc import AsyncIterator
from typing import Any, Self

from .. import _checks
from .._encryption import Keys, Sealer, hide_keys
from .._secret import Secret, hide
from .._tasks import finish
from ..auth.token_stores import adjust_expiry, token_from_json, token_to_json
from ..errors import AuthError, TokenSuperseded
from ..models import Token
from .connection import Connection, RedisClient, decoded, milliseconds

__all__ = ["RedisTokenStore"]

log: logging.Logger = logging.getLogger("signing_async")

# KEYS of the scripts: token, lock. The token's hash holds ``record``, its ``fence``, ``ahead`` (how many seconds the
# saver's clock was ahead of Redis's) and ``fences``, the last fence. The lock's value is its holder and fence.
# ARGV: worker, milliseconds. A worker may acquire its own lock again, which an outage kept it from releasing.
# Returns the lock's value; or '', and how long another worker has the lock.
_LOCK = """
local held = redis.call('GET', KEYS[2])
if held and string.sub(held, 1, #ARGV[1]) ~= ARGV[1] then
    return {'', redis.call('PTTL', KEYS[2])}
end
held = ARGV[1] .. redis.call('HINCRBY', KEYS[1], 'fences', 1)
redis.call('SET', KEYS[2], held, 'PX', ARGV[2])
return {held, 0}
"""
# ARGV: lock's value, or '' outside the lock; the reader's clock. Returns whether the lock is held, the record, and how
# far the reader's clock is ahead of the saver's.
_LOAD = """
local is_held = ARGV[1] == '' or redis.call('GET', KEYS[2]) == ARGV[1]
local stored, time = redis.call('HMGET', KEYS[1], 'record', 'ahead'), redis.call('TIME')
local ahead = ARGV[2] - time[1] - time[2] / 1000000 - (stored[2] or 0)
return {is_held and 1 or 0, stored[1] or '', string.format('%.6f', ahead)}
"""
# ARGV: lock's value, or '' outside the lock; the saver's clock; record. Returns 0 if a newer token is stored.
_SAVE = """
local stored, time = redis.call('HMGET', KEYS[1], 'fence', 'fences'), redis.call('TIME')
local fence = tonumber(string.match(ARGV[1], '%d+$') or (stored[2] or 0) + 1)
if fence < tonumber(stored[1] or 0) then
    return 0
end
local ahead = string.format('%.6f', ARGV[2] - time[1] - time[2] / 1000000)
local last = math.max(fence, stored[2] or 0)
redis.call('HSET', KEYS[1], 'record', ARGV[3], 'ahead', ahead, 'fence', fence, 'fences', last)
return 1
"""
_RENEW = "return redis.call('GET', KEYS[2]) == ARGV[1] and redis.call('PEXPIRE', KEYS[2], ARGV[2])"
# ARGV: lock's value, or the worker for any lock of it.
_UNLOCK = """
local held = redis.call('GET', KEYS[2])
local is_worker = string.sub(ARGV[1], -1) == ':'
return held and (is_worker and string.sub(held, 1, #ARGV[1]) or held) == ARGV[1] and redis.call('DEL', KEYS[2])
"""


class RedisTokenStore:
    """Stores a user's token in Redis, for any number of workers on any number of machines. ::

        async with RedisTokenStore("rediss://:password@redis.example.com", "tenant-7/user-42") as store:
            oauth = OAuth(base_url, client_id=..., client_secret=..., redirect_uri=..., store=store)

    ``name`` identifies the token. With a ``key`` (32 random bytes or their base64, or several) the token is encrypted:
    the first key encrypts, all keys decrypt. A token that cannot be decrypted is an `AuthError`, and a refresh never
    overwrites it.

    The lock of a refresh is renewed while it is held. If its worker disappears, it expires after the ``grace`` (by
    default nine leases; at least one ``lease``), and the others log a warning and wait so long. A former holder cannot
    overwrite a newer token: its save raises `TokenSuperseded`, and its `OAuth` continues with the newer token. If Redis
    does not respond within ``timeout`` seconds, `AuthError` is raised. ``redis/README.md`` says what this does not
    cover.
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
        self._grace = max(lease, 9 * lease if grace is None else _checks.number("grace", grace, above=0))
        self._sealer = Sealer(key, owner="RedisTokenStore")
        self._place = f"{prefix}token:{name}"
        self._keys = [f"{prefix}{part}:{name}".encode() for part in ("token", "token-lock")]
        self._id = secrets.token_hex(8)
        self._local_lock = asyncio.Lock()
        self._held = ""
        """The value of the lock while it is held."""
        self._unsaved: tuple[str, Secret[bytes]] | None = None
        """A record whose save failed, and the lock's value at that time."""

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
        """Close the connections, except a given client. Close the `OAuth` first: it saves an unsaved token."""
        await self._connection.aclose()

    async def load(self) -> Token | None:
        is_held, record, ahead = await self._run(_LOAD, self._held, f"{time.time():.6f}")
        if not is_held:
            raise AuthError(f"{self!r}: the lock expired before the token was loaded", transient=True)
        if not record:
            return None
        try:
            record = decoded(record)
            # Base64 has no brace.
            data = record.encode() if record.startswith("{") else base64.b64decode(record)
            return adjust_expiry(token_from_json(self._sealer.unseal(data, self._place)), float(ahead))
        except ValueError as error:
            problem = str(error)
        raise AuthError(f"{self!r}: the stored token cannot be read and was not changed: {problem}")

    async def save(self, token: Token) -> None:
        data = token_to_json(token)
        # The caller's client may decode responses as UTF-8.
        record = Secret(base64.b64encode(self._sealer.seal(data, self._place)) if self._sealer else data)
        if self._held:
            self._unsaved = self._held, record
        if not await self._save(self._held, record):
            raise TokenSuperseded(f"{self!r} holds a newer token, which was not overwritten")

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Hold the lock: one worker at a time."""
        async with self._local_lock:
            try:
                held = await self._acquire()
            except BaseException:
                # The response may have been lost after the lock was set.
                await finish(self._release(self._worker))
                raise
            renewing = asyncio.create_task(self._renew(held), name="signing_async token lock")
            try:
                if self._unsaved is not None:
                    await self._save(*self._unsaved)
                self._held = held
                yield
            finally:
                self._held = ""
                renewing.cancel()
                await finish(self._release(held))

    @property
    def _worker(self) -> str:
        # The store's forks in other processes have the same id.
        return f"{self._id}:{os.getpid()}:"

    async def _acquire(self) -> str:
        warn_at = time.monotonic() + self._lease
        while True:
            held, left = await self._run(_LOCK, self._worker, milliseconds(self._grace))
            if held:
                return decoded(held)
            if time.monotonic() > warn_at:
                text = "%r: waiting for the lock, which another worker holds; it expires in %.1f s"
                log.warning(text, self, left / 1000)
                warn_at = math.inf
            await asyncio.sleep(random.uniform(0.01, 0.04))

    async def _renew(self, held: str) -> None:
        while True:
            await asyncio.sleep(self._grace / 3)
            with contextlib.suppress(AuthError):
                await self._run(_RENEW, held, milliseconds(self._grace))

    async def _release(self, held: str) -> None:
        # While a token is not saved, another worker would send the used refresh token again.
        if self._unsaved is None:
            with contextlib.suppress(AuthError):
                await self._run(_UNLOCK, held)

    async def _save(self, held: str, record: Secret[bytes]) -> bool:
        """Save the record; return False if a newer token is stored."""
        is_saved = await self._run(_SAVE, held, f"{time.time():.6f}", record)
        self._unsaved = None
        return bool(is_saved)

    async def _run(self, script: str, *arguments: Any) -> Any:
        return await self._connection.script(script, self._keys, *arguments)


def _unavailable(message: str, transient: bool) -> AuthError:
    return AuthError(f"the token store is unavailable: {message}", transient=transient)
