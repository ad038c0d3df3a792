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
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Self

import attrs

from .. import _checks
from .._encryption import Keys, Sealer, hide_keys
from .._secret import Secret, hide
from .._tasks import finish
from ..auth.token_stores import adjust_expiry, token_from_json, token_to_json
from ..errors import AuthError, TokenSuperseded
from ..models import Token
from .connection import Connection, RedisClient, Script, cancel_and_wait, decoded

__all__ = ["RedisTokenStore"]

log: logging.Logger = logging.getLogger("signing_async")

_POLL = 0.2
_LEASES_OF_GRACE = 9

# KEYS of the scripts: token, lock, mark. The token's hash holds ``record``, ``fence``, ``ahead`` (how many seconds the
# saver's clock was ahead of Redis's) and ``run`` (the server's run id). The mark names the owner of the lock whose
# refresh may have used the refresh token.
_RUN = """
local function this_run()
    local info = redis.call('INFO', 'server')
    return string.match(info, 'run_id:(%x+)'), tonumber(string.match(info, 'uptime_in_seconds:(%-?%d+)'))
end
"""
# ARGV: owner of the lock, or '' outside it; milliseconds that the mark lasts; the reader's clock.
# Inside the lock a refresh follows: the script marks the token, or returns for how long the refresh has to wait.
_LOAD = Script(
    _RUN
    + """
local owner, longest = ARGV[1], tonumber(ARGV[2])
local kept = redis.call('HMGET', KEYS[1], 'record', 'fence', 'ahead', 'run')
if owner ~= '' then
    if redis.call('GET', KEYS[2]) ~= owner then
        return {'unlocked'}
    end
    local marked, run, uptime = redis.call('GET', KEYS[3]), this_run()
    if marked and marked ~= owner then
        local left = redis.call('PTTL', KEYS[3])
        if left > longest then  -- Redis's clock was set back
            redis.call('PEXPIRE', KEYS[3], longest)
        end
        return {'wait', math.min(left, longest), marked}
    end
    -- After a restart the last writes may be lost, also with an append-only file: the mark, for example.
    local left = longest - uptime * 1000
    if not marked and kept[4] and kept[4] ~= run and uptime >= 0 and left > 0 then
        return {'wait', left, ''}
    end
    redis.call('SET', KEYS[3], owner, 'PX', longest)
end
local time = redis.call('TIME')
local ahead = ARGV[3] - time[1] - time[2] / 1000000 - (kept[3] or 0)
return {'loaded', kept[1] or '', kept[2] or 0, string.format('%.6f', ahead)}
"""
)
# ARGV: fence of the token to replace, or '' for any; record; the saver's clock. Returns the new fence, or 0 if a newer
# token is stored.
_SAVE = Script(
    _RUN
    + """
local stored, replaced = tonumber(redis.call('HGET', KEYS[1], 'fence') or 0), tonumber(ARGV[1])
if replaced and stored > replaced then
    return 0
end
local time, fence = redis.call('TIME'), math.max(stored, replaced or 0) + 1
local ahead = string.format('%.6f', ARGV[3] - time[1] - time[2] / 1000000)
redis.call('HSET', KEYS[1], 'record', ARGV[2], 'fence', fence, 'ahead', ahead, 'run', (this_run()))
redis.call('DEL', KEYS[3])
return fence
"""
)
# ARGV: owner, milliseconds that the mark lasts from now on: 0 removes it.
_MARK = Script("return redis.call('GET', KEYS[3]) == ARGV[1] and redis.call('PEXPIRE', KEYS[3], ARGV[2])")
# ARGV: the lease in milliseconds. Returns the lock's owner. A longer lease means that Redis's clock was set back.
_HOLDER = Script(
    """
if redis.call('PTTL', KEYS[2]) > tonumber(ARGV[1]) then
    redis.call('PEXPIRE', KEYS[2], ARGV[1])
end
return redis.call('GET', KEYS[2]) or ''
"""
)


@attrs.define(eq=False)
class _Hold:
    """The lock as held by one worker."""

    store: RedisTokenStore
    owner: str
    lock: Any
    renewing: asyncio.Task[None] | None = None
    fence: int | None = None
    """The fence of the token that was loaded; None before the load."""
    is_marked: bool = False
    """Whether Redis may hold this owner's mark."""
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

    The lock is a ``lease``, renewed while it is held. If the lease expires, another worker takes the lock, and the
    former holder cannot overwrite a newer token: its save raises `TokenSuperseded`, and its `OAuth` continues with the
    newer token.

    A refresh is marked in Redis until its token is saved. If its worker disappears, or Redis is restarted, the others
    log a warning and wait for the save, at most for ``grace`` seconds (by default nine leases). ``redis/README.md``
    says what this does not cover.

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
        self._keys = [f"{prefix}{part}:{name}".encode() for part in ("token", "token-lock", "token-mark")]
        self._local_lock = asyncio.Lock()
        self._pending: asyncio.Task[None] | None = None
        """Repeats a save, or the removal of a mark, until Redis responds."""
        self._pending_problem = ""
        self._failure: AuthError | None = None
        """Why the last repetition failed."""

    def __repr__(self) -> str:
        return f"RedisTokenStore({self._connection.address!r}, {self.name!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_connection") and self._connection.is_open:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)

    async def aclose(self) -> None:
        """Close the connections, except a given client. A save that waits for Redis is given ``timeout`` seconds."""
        if self._pending is not None:
            await asyncio.wait([self._pending], timeout=self._connection.timeout)
            if not self._pending.done() and self._pending_problem == _UNSAVED:
                log.error(
                    "%r was closed before a refreshed token was saved: its user may have to authorize again", self
                )
            await cancel_and_wait(self._pending)
        await self._connection.aclose()

    async def load(self) -> Token | None:
        give_up: float | None = None
        while True:
            hold = self._current_hold()
            if hold is not None:
                hold.is_marked = True
            owner = "" if hold is None else hold.owner
            result = await self._run(_LOAD, owner, _milliseconds(self._grace), f"{time.time():.6f}")
            match [decoded(field) for field in result]:
                case ["loaded", record, fence, ahead]:
                    if hold is not None:
                        hold.fence = int(fence)
                    return self._decode(record, float(ahead)) if record else None
                case ["wait", left, refresher]:
                    now, seconds = time.monotonic(), int(left) / 1000
                    reason = f"{_describe(refresher)} began a refresh" if refresher else "Redis was restarted"
                    reason += ", and the refresh token may have been used"
                    if give_up is None:
                        give_up = now + self._grace + self._lease
                        log.warning("%r: waiting for up to %.1f s: %s", self, seconds, reason)
                    elif now > give_up:
                        raise AuthError(f"{self!r}: {reason}", transient=True)
                    await asyncio.sleep(min(seconds, _POLL))
                case _:
                    # The lease expired before the token was read.
                    assert hold is not None
                    await self._acquire(hold)

    async def save(self, token: Token) -> None:
        hold = self._current_hold()
        record = Secret(self._encode(token))
        replaced = "" if hold is None or hold.fence is None else hold.fence

        async def save() -> int:
            return int(await self._run(_SAVE, replaced, record, f"{time.time():.6f}"))

        try:
            fence = await save()
        except AuthError:
            if hold is not None:
                self._repeat(save, _UNSAVED)
            raise
        if not fence:
            raise TokenSuperseded(f"{self!r} holds a newer token, which was not overwritten")
        if hold is not None:
            hold.fence, hold.is_marked = fence, False

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Hold the lock: one worker at a time."""
        async with self._local_lock:
            await self._wait_for_pending()
            owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
            hold = _Hold(self, owner, self._connection.lock(self._keys[1], self._lease))
            try:
                await self._acquire(hold)
                mark = _holds.set((hold, *_holds.get()))
                try:
                    yield
                finally:
                    _holds.reset(mark)
            finally:
                hold.has_ended = True
                await finish(self._release(hold))

    # The lock

    def _current_hold(self) -> _Hold | None:
        """Return the hold of this task, or of the task that started it."""
        return next((hold for hold in _holds.get() if hold.store is self and not hold.has_ended), None)

    async def _acquire(self, hold: _Hold) -> None:
        warn_at = time.monotonic() + self._lease
        while not await self._connection.run(lambda: hold.lock.acquire(blocking=False, token=hold.owner)):
            if time.monotonic() > warn_at:
                holder = decoded(await self._run(_HOLDER, _milliseconds(self._lease)))
                log.warning("%r: waiting for the lock, which %s holds", self, _describe(holder))
                warn_at = math.inf
            await asyncio.sleep(random.uniform(0.01, 0.04))
        if hold.renewing is None:
            hold.renewing = asyncio.create_task(self._renew(hold), name="signing_async token lock")

    async def _renew(self, hold: _Hold) -> None:
        while True:
            await asyncio.sleep(self._lease / 3)
            # The mark is renewed even if the lock was lost: the refresh may be under way.
            with contextlib.suppress(AuthError):
                await self._connection.run(lambda: hold.lock.extend(self._lease, replace_ttl=True))
            with contextlib.suppress(AuthError):
                await self._run(_MARK, hold.owner, _milliseconds(self._grace))

    async def _release(self, hold: _Hold) -> None:
        """Remove the mark, unless a save is pending, and release the lock."""
        await cancel_and_wait(hold.renewing)
        if hold.is_marked and self._pending is None:

            async def unmark() -> None:
                await self._run(_MARK, hold.owner, 0)

            try:
                await unmark()
            except AuthError:
                self._repeat(unmark, "the lock is not released")
        # Otherwise the lease expires.
        with contextlib.suppress(AuthError):
            await self._connection.run(hold.lock.release)

    def _repeat(self, work: Callable[[], Awaitable[object]], problem: str) -> None:
        """Repeat the work in the background until Redis responds: until then this store begins no other refresh."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(_POLL)
                try:
                    await work()
                except AuthError as error:
                    self._failure = error
                else:
                    return

        self._failure, self._pending_problem = None, problem
        self._pending = asyncio.create_task(repeat(), name="signing_async token save")

    async def _wait_for_pending(self) -> None:
        if self._pending is not None:
            await asyncio.wait([self._pending], timeout=self._connection.timeout)
            if not self._pending.done():
                failure, problem = self._failure, self._pending_problem
                if failure is not None and not failure.transient:
                    raise AuthError(f"{failure}, and {problem} yet")
                raise _unavailable(f"{self._connection.address}: no response, and {problem} yet", transient=True)
            self._pending = None

    async def _run(self, script: Script, *arguments: Any) -> Any:
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
            token = token_from_json(self._sealer.unseal(data, self._place))
        except ValueError as error:
            problem = str(error)
        else:
            return adjust_expiry(token, ahead)
        raise AuthError(f"{self!r}: the stored token cannot be read and was not changed: {problem}")


_UNSAVED = "a refreshed token is not saved"


def _describe(owner: str) -> str:
    return "process {1} on {0}".format(*owner.split(":")) if owner else "another worker"


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _unavailable(message: str, transient: bool) -> AuthError:
    return AuthError(f"the token store is unavailable: {message}", transient=transient)
