"""Which webhook events were handed over already, known to every receiver that shares a Redis."""

from __future__ import annotations

import asyncio
import secrets
import warnings
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Self

from .. import _checks
from ..errors import ConfigurationError, WebhookError
from ..webhooks.seen import DAY, Claim
from .connection import Connection, RedisClient, Script, Unreachable, text_of

__all__ = ["RedisSeenEvents"]

# KEYS: event. ARGV: claimer, lease in milliseconds.
_CLAIM = Script(
    """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
    return 'new'
end
return redis.call('GET', KEYS[1]) == 'confirmed' and 'confirmed' or 'pending'
"""
)
# KEYS: event. ARGV: time to live in milliseconds.
_CONFIRM = Script("return redis.call('SET', KEYS[1], 'confirmed', 'PX', ARGV[1])")
# KEYS: event. ARGV: claimer.
_RELEASE = Script("if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end return 1")


class RedisSeenEvents:
    """Remembers events in Redis, for receivers on any number of machines. ::

        receiver = Receiver(verifier, save_event, seen=RedisSeenEvents("redis://redis.example.com"))

    Where Redis does not answer within ``timeout`` seconds a step raises a `WebhookError`; the receiver then answers
    503, and the sender delivers again: no event is lost, and none is taken twice. An event is forgotten ``ttl`` seconds
    after it was confirmed, and sooner where Redis loses its data or throws keys out (``noeviction`` keeps it from
    that): it could then be handed over again. A claim is given back by nobody but its claimer.

    In a server of threads, where no event loop runs, each step is a plain call; that takes a URL, not a client. The
    keys are ``<prefix>seen:<event id>``. Forgotten without `aclose` (or `close`, for threads) it warns.
    """

    def __init__(
        self,
        redis: str | RedisClient,
        *,
        prefix: str = "signing:",
        ttl: float = 30 * DAY,
        lease: float = 60.0,
        timeout: float = 1.0,
    ) -> None:
        self._connection = Connection("RedisSeenEvents", redis, timeout)
        # Variables are shown in some tracebacks.
        del redis
        _checks.text("RedisSeenEvents", "prefix", prefix, may_be_empty=True)
        _checks.seconds("RedisSeenEvents", "ttl", ttl)
        _checks.seconds("RedisSeenEvents", "lease", lease)
        self.ttl = ttl
        self.lease = lease
        self._prefix = f"{prefix}seen:"
        self._claimer = secrets.token_hex(8)

    def __repr__(self) -> str:
        return f"RedisSeenEvents({self._connection.place!r})"

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
        """Close the connections, but not a client that was given."""
        await self._connection.aclose()

    def close(self) -> None:
        """Close the connections where no event loop runs."""
        self._connection.close()

    def claim(self, event_id: str) -> Claim | Awaitable[Claim]:
        found: Claim | Awaitable[Claim] = self._do(
            _CLAIM, event_id, lambda answer: Claim(text_of(answer)), self._claimer, _millis(self.lease)
        )
        return found

    def confirm(self, event_id: str) -> Awaitable[None] | None:
        done: Awaitable[None] | None = self._do(_CONFIRM, event_id, _nothing, _millis(self.ttl))
        return done

    def release(self, event_id: str) -> Awaitable[None] | None:
        done: Awaitable[None] | None = self._do(_RELEASE, event_id, _nothing, self._claimer)
        return done

    def _do(self, script: Script, event_id: str, read: Any, *arguments: Any) -> Any:
        # An id comes out of JSON, where half a surrogate pair is possible.
        key = f"{self._prefix}{event_id}".encode("utf-8", "surrogatepass")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._do_blocking(script, key, read, arguments)
        return self._do_async(script, key, read, arguments)

    async def _do_async(self, script: Script, key: bytes, read: Any, arguments: tuple[Any, ...]) -> Any:
        try:
            return read(await self._connection.script(script, [key], *arguments))
        except Unreachable as error:
            words = str(error)
        raise WebhookError(f"the seen events cannot be used: {words}")

    def _do_blocking(self, script: Script, key: bytes, read: Any, arguments: tuple[Any, ...]) -> Any:
        if not self._connection.can_block:
            raise ConfigurationError("RedisSeenEvents: where no event loop runs it needs a URL, not a client")
        try:
            return read(self._connection.script_blocking(script, [key], *arguments))
        except Unreachable as error:
            words = str(error)
        raise WebhookError(f"the seen events cannot be used: {words}")


def _millis(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _nothing(answer: Any) -> None:
    return None
