"""A token in Redis: refreshed by one worker at a time on any machine, never replaced by an older one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import math
import os
import random
import secrets
import socket
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Self

import attrs

from .. import _checks
from .._encryption import Sealer
from .._tasks import finish
from ..auth.token_stores import token_from_json, token_to_json
from ..errors import AuthError, TokenSuperseded
from ..models import Token
from .connection import Connection, RedisClient, Script, cancel_and_wait, decoded
from .token_scripts import ACQUIRE, LOAD, RELEASE, RENEW, SAVE

__all__ = ["RedisTokenStore"]

log: logging.Logger = logging.getLogger("signing_async")

_POLL = 0.2
_LEASES_OF_GRACE = 9
_CLOCK_TOLERANCE = 2.0


@attrs.frozen
class _Known:
    """The newest token that this worker has seen."""

    fence: str = ""
    saved: str = "0"
    record: str = attrs.field(default="", repr=False)
    token: Token | None = attrs.field(default=None, repr=False)
    lifetime: float = 0.0

    def arguments(self, grace: float) -> tuple[str, str, str, float]:
        """Return what a script needs to restore the token, and for how long a newer token may still appear.

        Before the last tenth of its lifetime a token is refreshed only if the service rejects it. After that another
        worker might have a newer token, and not contact Redis until that token expires.
        """
        fresh = self.token is None or _seconds_left(self.token) > self.lifetime / 10
        return self.fence, self.saved, self.record, grace if fresh else max(self.lifetime, grace)


class _Records:
    """Converts tokens to records, encrypted if there is a key, and back."""

    def __init__(self, key: str | bytes | Sequence[str | bytes] | None, place: str) -> None:
        self._is_encrypted = key is not None
        self._sealer = Sealer(key, owner="RedisTokenStore")
        self._place = place

    def encode(self, token: Token, lifetime: float) -> str:
        fields = {"token": token_to_json(token).decode(), "clock": time.time(), "lives": lifetime}
        data = json.dumps(fields).encode()
        if not self._is_encrypted:
            return data.decode()
        return base64.b64encode(self._sealer.seal(data, self._place)).decode()

    def decode(self, record: str, saved: float, now: float) -> tuple[Token, float]:
        """Return the token and its lifetime when it was saved; ``saved`` and ``now`` are by Redis's clock."""
        token, clock, lifetime = self._parse(record)
        # The expiry is by the clock of the worker that saved the token; either clock may be wrong.
        shift = (time.time() - now) - (clock - saved)
        if token.expires_at is not None and abs(shift) > _CLOCK_TOLERANCE:
            token = attrs.evolve(token, expires_at=token.expires_at + timedelta(seconds=shift))
        return token, lifetime

    def _parse(self, record: str) -> tuple[Token, float, float]:
        # Base64 has no brace.
        data = record.encode() if record.startswith("{") else _from_base64(record)
        data = self._sealer.unseal(data, self._place)
        # The error is not kept as a cause: json's holds the whole text.
        with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError, RecursionError):
            fields = json.loads(data)
            return token_from_json(fields["token"].encode()), float(fields["clock"]), float(fields["lives"])
        raise ValueError("no token in it")


class _Hold:
    """The lock as held by one worker: a lease that is renewed, and a connection that shows that the worker is alive."""

    def __init__(self, store: RedisTokenStore, connection: Connection, keys: list[bytes], lease: float) -> None:
        self.store = store
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self.fence = ""
        self.loaded = False
        """Whether the token was read: a refresh may be in progress."""
        self.no_response = False
        """Whether Redis did not respond to the last command."""
        self.ended = False
        """Whether the block that held the lock has ended."""
        self.unsaved: Token | None = None
        self.failure: AuthError | None = None
        """Why the last attempt of the background task failed."""
        self._connection = connection
        self._keys = keys
        self._lease = lease
        self._channel = keys[1] + f":{self.owner}".encode()
        self._subscription: Any = None
        self._renewing: asyncio.Task[None] | None = None

    async def run(self, script: Script, *arguments: Any) -> Any:
        """Run a script, and remember whether Redis responded."""
        try:
            result = await self._connection.script(script, self._keys, *arguments)
        except AuthError:
            self.no_response = True
            raise
        self.no_response = False
        return result

    async def start(self) -> None:
        """Renew the lease from now on, and keep a connection that shows that this worker lives, even if paused."""
        await self.stop_renewing()
        try:
            await self._subscribe()
        except AuthError:
            self.no_response = True
            raise
        self._renewing = asyncio.create_task(self._renew(), name="signing_async token lock")

    async def stop(self) -> None:
        """Stop renewing the lease, and close the connection."""
        await self.stop_renewing()
        await self._unsubscribe()

    async def stop_renewing(self) -> None:
        await cancel_and_wait(self._renewing)

    async def _subscribe(self) -> None:
        await self._unsubscribe()
        self._subscription = await self._connection.subscribe(self._channel)

    async def _unsubscribe(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await self._connection.unsubscribe(subscription)

    async def _renew(self) -> None:
        subscribers = 1
        while subscribers >= 0:
            with contextlib.suppress(AuthError):
                if not subscribers:
                    await self._subscribe()
                subscribers = await self._connection.script(RENEW, self._keys, self.owner, self._lease)
            await asyncio.sleep(self._lease / 3)


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

    No refresh token is used twice: if a refresher disappears, no other worker refreshes until it has saved, or until
    ``grace`` (by default nine leases) has passed since its last sign of life, and since Redis restarted or lost its
    data. Other workers wait even longer for a paused refresher that is still connected; the error names its machine and
    process. ``redis/README.md`` says why, and what this does not cover.

    If Redis does not respond within ``timeout`` seconds, `AuthError` is raised, and an `OAuth` uses its current token
    while it is valid. A refreshed token that cannot be saved is saved as soon as Redis is back. If Redis comes back
    without its data, the workers restore the newest token that they know. All times are by Redis's clock.
    """

    def __init__(
        self,
        redis: str | RedisClient,
        name: str,
        *,
        key: str | bytes | Sequence[str | bytes] | None = None,
        prefix: str = "signing:",
        lease: float = 5.0,
        grace: float | None = None,
        timeout: float = 1.0,
    ) -> None:
        self._connection = Connection(redis, timeout, _unavailable)
        del redis  # some tools show the variables of a traceback
        self.name: str = _checks.string("name", name)
        prefix = _checks.string("prefix", prefix, may_be_empty=True)
        self._lease = _checks.number("lease", lease, above=0)
        self._grace = _checks.number("grace", _LEASES_OF_GRACE * lease if grace is None else grace, above=0)
        place = f"{prefix}token:{name}"
        self._records = _Records(key, place)
        del key
        self._keys = [place.encode(), f"{prefix}token-lock:{name}".encode()]
        self._local_lock = asyncio.Lock()
        self._known = _Known()
        self._seen_fence = ""
        """The fence of the token that the caller loaded or saved last."""
        self._unfinished: _Hold | None = None
        self._finishing: asyncio.Task[None] | None = None

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
        if self._finishing is not None:
            _, pending = await asyncio.wait([self._finishing], timeout=self._connection.timeout)
            if pending and self._is_save_pending():
                log.error(
                    "%r was closed before a refreshed token was saved: its user may have to authorize again", self
                )
            await cancel_and_wait(self._finishing)
        await self._connection.aclose()

    async def load(self) -> Token | None:
        began = time.monotonic()
        while True:
            # The lock may be released while a task that was started inside it waits here.
            hold, known = self._current_hold(), self._known
            arguments = (self._grace, *known.arguments(self._grace))
            if hold is None:
                result = await self._connection.script(LOAD, self._keys, "", *arguments)
            else:
                hold.loaded = True
                result = await hold.run(LOAD, hold.owner, *arguments)
                if not result[0]:
                    # The lease expired before the token was read, so this worker may acquire the lock again.
                    await self._acquire(hold)
                    if hold.ended:
                        await self._release(hold)
                    continue
            record, fence, saved, now, wait, refresher = map(decoded, result[1:])
            token = self._learn(known, record, fence, saved, float(now)) if record else None
            left = float(wait)
            # A valid token that is new to the caller is adopted, not refreshed.
            is_new = token is not None and fence != self._seen_fence and _seconds_left(token) > self._connection.timeout
            if left <= 0 or is_new:
                self._seen_fence = fence
                if hold is not None:
                    hold.fence = fence
                return token
            longest = self._grace + self._lease
            if left > longest or time.monotonic() - began > longest:
                raise AuthError(_describe_wait(self, left, refresher), transient=True)
            await asyncio.sleep(min(left, _POLL))

    async def save(self, token: Token) -> None:
        hold = self._current_hold()
        try:
            await self._save(token, hold)
        except TokenSuperseded:
            raise
        except AuthError:
            if hold is not None:
                hold.unsaved = token
            raise
        self._seen_fence = self._known.fence
        if hold is not None:
            hold.unsaved, hold.fence, hold.no_response = None, self._known.fence, False

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Hold the lock: one worker at a time. Raises `AuthError` if a paused refresher keeps it for too long."""
        async with self._local_lock:
            await self._wait_for_unfinished()
            hold = _Hold(self, self._connection, self._keys, self._lease)
            try:
                await self._acquire(hold)
                mark = _holds.set((hold, *_holds.get()))
                try:
                    yield
                finally:
                    _holds.reset(mark)
            finally:
                hold.ended = True
                await finish(self._release(hold))

    # The lock

    def _current_hold(self) -> _Hold | None:
        """Return the hold of this task, or of the task that started it."""
        return next((hold for hold in _holds.get() if hold.store is self and not hold.ended), None)

    async def _acquire(self, hold: _Hold) -> None:
        give_up: float | None = None
        # A stopped Redis executes abandoned commands when it resumes: such a lock is not renewed and soon expires.
        begin = min(self._lease, 2 * self._connection.timeout)
        longest = self._lease + self._grace
        while True:
            arguments = (begin, longest, *self._known.arguments(self._grace))
            result = await hold.run(ACQUIRE, hold.owner, *arguments)
            if result[0]:
                break
            left, now = float(decoded(result[1])), time.monotonic()
            # Redis itself may have been stopped: a live holder renews within another lease.
            give_up = None if left > 0 else give_up or now + self._lease
            if give_up is not None and now > give_up:
                raise AuthError(_describe_wait(self, left, decoded(result[2])), transient=True)
            await asyncio.sleep(random.uniform(0.01, 0.04))
        hold.fence = decoded(result[1])
        await hold.start()

    async def _release(self, hold: _Hold) -> None:
        """Release the lock. If Redis does not respond, a background task saves the token and releases the lock."""
        released = hold.unsaved is None and not hold.no_response
        if released:
            await hold.stop_renewing()
            try:
                await self._connection.script(RELEASE, self._keys, hold.owner)
            except AuthError:
                released = False
        if released or not (hold.unsaved or hold.loaded):
            await hold.stop()
        else:
            self._unfinished = hold
            self._finishing = asyncio.create_task(self._finish(hold), name="signing_async token save")

    async def _finish(self, hold: _Hold) -> None:
        """Save the unsaved token and release the lock: until then no other worker refreshes."""
        try:
            while True:
                try:
                    if hold.unsaved is not None:
                        # Another worker saved a newer token, or the response to an earlier attempt was lost.
                        with contextlib.suppress(TokenSuperseded):
                            await self._save(hold.unsaved, hold)
                        hold.unsaved = None
                    await hold.stop_renewing()
                    await self._connection.script(RELEASE, self._keys, hold.owner)
                    return
                except AuthError as error:
                    hold.failure = error
                    await asyncio.sleep(_POLL)
        finally:
            await hold.stop()

    async def _wait_for_unfinished(self) -> None:
        if self._finishing is None:
            return
        assert self._unfinished is not None
        await asyncio.wait([self._finishing], timeout=self._connection.timeout)
        if not self._finishing.done():
            pending = "a refreshed token is not saved" if self._is_save_pending() else "the lock is not released"
            failure = self._unfinished.failure
            if failure is not None and not failure.transient:
                raise AuthError(f"{failure}, and {pending} yet")
            raise _unavailable(f"{self._connection.address}: no response, and {pending} yet")
        self._finishing = self._unfinished = None

    def _is_save_pending(self) -> bool:
        return self._unfinished is not None and self._unfinished.unsaved is not None

    # The record

    async def _save(self, token: Token, hold: _Hold | None) -> None:
        lifetime = 0.0 if token.expires_at is None else max(_seconds_left(token), 0.0)
        record = self._records.encode(token, lifetime)
        replaced = "" if hold is None else hold.fence
        # A token saved without a load comes from an authorization.
        is_refresh = int(hold is not None and hold.loaded)
        arguments = (secrets.token_hex(4), record, *self._known.arguments(self._grace))
        result = await self._connection.script(SAVE, self._keys, replaced, is_refresh, *arguments)
        if not result:
            raise TokenSuperseded(f"{self!r} holds a newer token, which was not overwritten")
        fence, saved = map(decoded, result)
        self._known = _Known(fence, saved, record, token, lifetime)

    def _learn(self, known: _Known, record: str, fence: str, saved: str, now: float) -> Token:
        """Return the record's token, and remember it unless a newer one was learned since ``known``."""
        if record == self._known.record and self._known.token is not None:
            return self._known.token
        try:
            token, lifetime = self._records.decode(record, float(saved), now)
        except ValueError as error:
            problem = str(error)
        else:
            if known is self._known:
                self._known = _Known(fence, saved, record, token, lifetime)
            return token
        raise AuthError(f"{self!r}: the stored token cannot be read and was not changed: {problem}")


def _describe_wait(store: RedisTokenStore, left: float, refresher: str) -> str:
    """Return why the token is not refreshed. A negative ``left`` is how long the refresher has been paused."""
    if not refresher:
        return (
            f"{store!r} lost its data: the known token may be outdated and is not refreshed for another {left:.0f} s,"
            " until a worker with a newer token restores it; or authorize again"
        )
    host, process, _ = refresher.rsplit(":", 2)
    state = f"has been paused for {-left:.0f} s during a refresh" if left <= 0 else "is still connected"
    return (
        f"{store!r} is locked by process {process} on {host}, which {state} and may have used the refresh token:"
        " resume that process, or end it"
    )


def _unavailable(message: str) -> AuthError:
    return AuthError(f"the token store is unavailable: {message}", transient=True)


def _seconds_left(token: Token) -> float:
    return math.inf if token.expires_at is None else token.expires_at.timestamp() - time.time()


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""
