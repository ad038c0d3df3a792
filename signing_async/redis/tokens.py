"""A token in Redis: refreshed by one worker at a time, wherever the others run, and never replaced by an older one."""

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
from types import TracebackType
from typing import Any, Self

import attrs

from .. import _checks
from ..auth.encryption import Sealer
from ..auth.token_stores import carried_through, token_from_json, token_to_json
from ..errors import AuthError, TokenSuperseded
from ..models import Token
from .connection import Connection, RedisClient, Script, Unreachable, end, text_of
from .token_scripts import ACQUIRE, LOAD, RELEASE, RENEW, SAVE

__all__ = ["RedisTokenStore"]

log: logging.Logger = logging.getLogger("signing_async")

_SAVE_AGAIN = 0.2
_LEASES_OF_GRACE = 9
_CLOCKS_AGREE = 2.0


@attrs.frozen
class _Known:
    """The newest token that this worker has seen."""

    fence: str = ""
    saved: str = "0"
    record: str = attrs.field(default="", repr=False)
    token: Token | None = attrs.field(default=None, repr=False)
    lives: float = 0.0

    def arguments(self, grace: float) -> tuple[str, str, str, float]:
        """Return what a script needs to restore the token, and for how long a newer one may still turn up.

        Until the last tenth of its life nobody refreshes a token unless the service rejects it. After that a newer one
        may be known to a worker that does not need Redis for as long as a token lives.
        """
        fresh = self.token is None or _seconds_left(self.token) > self.lives / 10
        return self.fence, self.saved, self.record, grace if fresh else max(self.lives, grace)


@attrs.define(eq=False)
class _Hold:
    """The lock, held by this worker."""

    store: RedisTokenStore
    owner: str
    fence: str = ""
    loaded: bool = False
    """A refresh may be under way: Redis was asked for the token."""
    silent: bool = False
    """Redis did not respond to the last command."""
    over: bool = False
    """The block that held the lock has ended."""
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

    The lock has a ``lease``, renewed while it is held; after that another worker takes the lock. A worker that lost the
    lock saves nothing over a newer token (`TokenSuperseded`; an `OAuth` then goes on with the newer one).

    A refresh token is not used twice: a server that detects reuse may revoke all tokens of the user. A load inside the
    lock marks the token as being refreshed; the save, or the end of the lock, removes the mark. If the refresher
    disappears in between, it may have used the refresh token and may yet come back to save the new one. So no other
    worker refreshes before that, or before the ``grace`` (by default nine leases) is over: counted from when the
    refresher was last heard of, and again from when Redis was restarted or lost its data. A refresher that is paused
    and still connected is waited for longer; the error names its machine and process.

    An outage of Redis that is longer than the grace, or a worker that is cut off from Redis for longer while the others
    are not, is beyond that promise. A worker that is killed between the token request and the save takes the new token
    with it: the others wait for the grace and then have only the used refresh token to try.

    If Redis does not respond within ``timeout`` seconds, that is an `AuthError`, and an `OAuth` serves the token in
    hand while it is valid. A token that was refreshed and cannot be saved is saved as soon as Redis is back. If Redis
    comes back without its data, workers put back the newest token that they know.

    Let Redis keep its data: ``appendonly yes``, ``noeviction``. With replicas a failover may lose the last save and the
    mark of a refresh; ``min-replicas-to-write`` narrows that, and nothing in Redis closes it. A user with an ACL needs
    the channels and ``+info``. The keys are ``<prefix>token:<name>`` and ``<prefix>token-lock:<name>``; the channels
    begin with the latter. All times are of Redis's clock: a worker's may be wrong.
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
        self._connection = Connection("RedisTokenStore", redis, timeout)
        # Variables are shown in some tracebacks.
        del redis
        _checks.text("RedisTokenStore", "name", name)
        _checks.text("RedisTokenStore", "prefix", prefix, may_be_empty=True)
        _checks.seconds("RedisTokenStore", "lease", lease)
        grace = _LEASES_OF_GRACE * lease if grace is None else grace
        _checks.seconds("RedisTokenStore", "grace", grace)
        self._sealed = key is not None
        self._sealer = Sealer(key, owner="RedisTokenStore")
        del key
        self.name = name
        self._place = f"{prefix}token:{name}"
        self._lock_key = f"{prefix}token-lock:{name}".encode()
        self._keys = [self._place.encode(), self._lock_key]
        self._lease = lease
        self._grace = grace
        self._local = asyncio.Lock()
        self._known = _Known()
        self._given = ""
        """The fence of the token that the caller loaded or saved last."""
        self._ended: _Hold | None = None
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
                if self._is_save_pending():
                    log.error(
                        "%r is closed, and a refreshed token was never saved: its user may have to authorize", self
                    )
                await end(self._finishing)
        await self._connection.aclose()

    async def load(self) -> Token | None:
        began = time.monotonic()
        while True:
            # The lock may end while a task that was made inside it waits here.
            hold, known = self._hold(), self._known
            if hold is not None:
                hold.loaded = True
            owner = "" if hold is None else hold.owner
            answer = await self._ask(hold, LOAD, owner, self._grace, *known.arguments(self._grace))
            if not answer[0]:
                assert hold is not None
                # Paused for longer than the lease. The token was not read yet, so this worker may queue again.
                await self._acquire(hold)
                if hold.over:
                    await self._end(hold)
                continue
            record, fence, saved, now, wait, refresher = map(text_of, answer[1:])
            token = self._learn(known, record, fence, saved, float(now)) if record else None
            left = float(wait)
            # A valid token that is new to the caller is adopted, and not refreshed.
            is_news = token is not None and fence != self._given and _seconds_left(token) > self._connection.timeout
            if left <= 0 or is_news:
                self._given = fence
                if hold is not None:
                    hold.fence = fence
                return token
            longest = self._grace + self._lease
            if left > longest or time.monotonic() - began > longest:
                raise AuthError(self._kept_back(left, refresher))
            await asyncio.sleep(min(left, _SAVE_AGAIN))

    async def save(self, token: Token) -> None:
        hold = self._hold()
        try:
            await self._put(token, hold)
        except Unreachable as error:
            words = str(error)
        else:
            self._given = self._known.fence
            if hold is not None:
                hold.unsaved, hold.fence, hold.silent = None, self._known.fence, False
            return
        if hold is not None:
            hold.unsaved = token
        raise AuthError(f"the token cannot be saved: {words}")

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Held by one worker; waits while others hold it, but not while a holder is paused."""
        async with self._local:
            await self._finished()
            hold = _Hold(self, f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}")
            try:
                await self._acquire(hold)
                mark = _holding.set((hold, *_holding.get()))
                try:
                    yield
                finally:
                    _holding.reset(mark)
            finally:
                hold.over = True
                await carried_through(self._end(hold))

    # The lock

    def _hold(self) -> _Hold | None:
        """Return the lock that this task, or the task that started it, holds."""
        return next((hold for hold in _holding.get() if hold.store is self and not hold.over), None)

    async def _acquire(self, hold: _Hold) -> None:
        patience: float | None = None
        # Redis that was stopped runs on waking what nobody waits for any more: such a lock is not renewed.
        begin = min(self._lease, 2 * self._connection.timeout)
        most = self._lease + self._grace
        while True:
            answer = await self._ask(hold, ACQUIRE, hold.owner, begin, most, *self._known.arguments(self._grace))
            if answer[0]:
                break
            left, now = float(text_of(answer[1])), time.monotonic()
            # Redis may have been away itself: a live holder renews its lease before another lease is over.
            patience = None if left > 0 else patience or now + self._lease
            if patience is not None and now > patience:
                raise AuthError(self._kept_back(left, text_of(answer[2])))
            await asyncio.sleep(random.uniform(0.01, 0.04))
        hold.fence = text_of(answer[1])
        await end(hold.keeper)
        await self._listen(hold)
        hold.keeper = asyncio.create_task(self._keep(hold), name="signing_async token lock")

    def _kept_back(self, left: float, refresher: str) -> str:
        """Say why the token is not refreshed: ``left`` seconds remain, or the refresher has been paused for them."""
        if not refresher:
            return (
                f"{self!r} lost its data: the token that is known here is kept back for {left:.0f} s more,"
                " for a worker that knows a newer one; or authorize again"
            )
        host, process, _ = refresher.rsplit(":", 2)
        paused = (
            f", which has been paused for {-left:.0f} s in a refresh" if left <= 0 else ", which is still connected"
        )
        return (
            f"{self!r} is locked by process {process} on {host}{paused} and may have used the refresh token:"
            " let it go on, or end it"
        )

    async def _listen(self, hold: _Hold) -> None:
        """Hold a connection open that shows the others that this worker lives, be it paused."""
        channel = self._lock_key + f":{hold.owner}".encode()

        async def listen() -> None:
            listener = self._connection.client.pubsub()
            try:
                await listener.subscribe(channel)
                await listener.get_message(timeout=None)
            except BaseException:
                await listener.aclose()
                raise
            hold.listener = listener

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
        """Renew the lease, and show that this worker is alive, until the lock is released."""
        listeners = 1
        while listeners >= 0:
            with contextlib.suppress(Unreachable, AuthError):
                if not listeners:
                    await self._listen(hold)
                listeners = await self._connection.script(RENEW, self._keys, hold.owner, self._lease)
            await asyncio.sleep(self._lease / 3)

    async def _end(self, hold: _Hold) -> None:
        """Release the lock. A save that failed, or a mark that cannot be removed, is left to a task of its own."""
        released = hold.unsaved is None and not hold.silent
        if released:
            await end(hold.keeper)
            try:
                await self._connection.script(RELEASE, self._keys, hold.owner)
            except Unreachable:
                released = False
        if released or not (hold.unsaved or hold.loaded):
            await end(hold.keeper)
            await self._hush(hold)
        else:
            self._ended = hold
            self._finishing = asyncio.create_task(self._finish(hold), name="signing_async token save")

    async def _finish(self, hold: _Hold) -> None:
        """Save what could not be saved, and remove the mark: until then no other worker refreshes."""
        try:
            while True:
                try:
                    if hold.unsaved is not None:
                        # Refused if another worker saved a newer token, or if only the answer to this save was lost.
                        with contextlib.suppress(TokenSuperseded):
                            await self._put(hold.unsaved, hold)
                        hold.unsaved = None
                    await end(hold.keeper)
                    await self._connection.script(RELEASE, self._keys, hold.owner)
                    return
                except Unreachable:
                    await asyncio.sleep(_SAVE_AGAIN)
        finally:
            await end(hold.keeper)
            await self._hush(hold)

    async def _finished(self) -> None:
        if self._finishing is None:
            return
        await asyncio.wait([self._finishing], timeout=self._connection.timeout)
        if not self._finishing.done():
            left = "a refreshed token waits to be saved" if self._is_save_pending() else "the lock waits to be released"
            raise AuthError(f"{self._connection.place} does not answer, and {left} there")
        self._finishing = self._ended = None

    def _is_save_pending(self) -> bool:
        return self._ended is not None and self._ended.unsaved is not None

    # What is kept

    async def _ask(self, hold: _Hold | None, script: Script, *arguments: Any) -> Any:
        try:
            answer = await self._connection.script(script, self._keys, *arguments)
        except Unreachable as error:
            words = str(error)
        else:
            if hold is not None:
                hold.silent = False
            return answer
        if hold is not None:
            hold.silent = True
        raise AuthError(f"the token store cannot be used: {words}")

    async def _put(self, token: Token, hold: _Hold | None) -> None:
        lives = 0.0 if token.expires_at is None else max(_seconds_left(token), 0.0)
        record = self._write(token, lives)
        replaced = "" if hold is None else hold.fence
        # What is saved without having been loaded comes from an authorization.
        is_refresh = int(hold is not None and hold.loaded)
        known = self._known.arguments(self._grace)
        answer = await self._connection.script(
            SAVE, self._keys, replaced, is_refresh, secrets.token_hex(4), record, *known
        )
        if not answer:
            raise TokenSuperseded(f"{self!r} holds a newer token than the one that was to be replaced: that one stays")
        fence, saved = map(text_of, answer)
        self._known = _Known(fence, saved, record, token, lives)

    def _write(self, token: Token, lives: float) -> str:
        fields = {"token": token_to_json(token).decode(), "clock": time.time(), "lives": lives}
        data = json.dumps(fields).encode()
        return base64.b64encode(self._sealer.seal(data, self._place)).decode() if self._sealed else data.decode()

    def _learn(self, known: _Known, record: str, fence: str, saved: str, now: float) -> Token:
        """Return the token of what Redis holds, and remember it unless a newer one was learned meanwhile."""
        if record == self._known.record and self._known.token is not None:
            return self._known.token
        token, lives = self._read(record, float(saved), now)
        if known is self._known:
            self._known = _Known(fence, saved, record, token, lives)
        return token

    def _read(self, record: str, saved: float, now: float) -> tuple[Token, float]:
        """Return a record's token, and how long it lived when it was saved; times are of Redis's clock."""
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


def _seconds_left(token: Token) -> float:
    return math.inf if token.expires_at is None else token.expires_at.timestamp() - time.time()


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""
