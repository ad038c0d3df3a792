"""Deduplication of webhook events for all receivers that share a Redis."""

from __future__ import annotations

import asyncio
import secrets
import warnings
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar

from .. import _checks
from ..errors import WebhookError
from ..webhooks.seen import DAY, Claim
from .connection import Connection, RedisClient, Script, decoded

__all__ = ["RedisSeenEvents"]

T = TypeVar("T")

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
    """Remembers handled events in Redis, for receivers on any number of machines. ::

        receiver = Receiver(verifier, save_event, seen=RedisSeenEvents("redis://redis.example.com"))

    If Redis does not respond within ``timeout`` seconds, a method raises `WebhookError` and the receiver responds with
    503, so the service delivers the event again: no event is lost, and none is handled twice. An event is forgotten
    ``ttl`` seconds after it was confirmed, or when Redis loses or evicts its key (set ``maxmemory-policy noeviction``);
    a later duplicate of a forgotten event is handled again. Only the claimer can release a claim.

    Where no event loop runs, as in a threaded server, every method is a plain call; this requires a URL, not a client.
    The keys are ``<prefix>seen:<event id>``. Close it with `aclose`, or with `close` where no event loop runs.
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
        self._connection = Connection(redis, timeout, _unavailable)
        del redis  # some tools show the variables of a traceback
        self.ttl: float = _checks.number("ttl", ttl, above=0)
        self.lease: float = _checks.number("lease", lease, above=0)
        self._prefix = _checks.string("prefix", prefix, may_be_empty=True) + "seen:"
        self._claimer = secrets.token_hex(8)

    def __repr__(self) -> str:
        return f"RedisSeenEvents({self._connection.address!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_connection") and self._connection.is_open:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)

    async def aclose(self) -> None:
        """Close the connections, except a given client."""
        await self._connection.aclose()

    def close(self) -> None:
        """Close the connections where no event loop runs."""
        self._connection.close()

    def claim(self, event_id: str) -> Claim | Awaitable[Claim]:
        return self._run(_CLAIM, event_id, _to_claim, self._claimer, _milliseconds(self.lease))

    def confirm(self, event_id: str) -> Awaitable[None] | None:
        return self._run(_CONFIRM, event_id, _to_none, _milliseconds(self.ttl))

    def release(self, event_id: str) -> Awaitable[None] | None:
        return self._run(_RELEASE, event_id, _to_none, self._claimer)

    def _run(self, script: Script, event_id: str, convert: Callable[[Any], T], *arguments: Any) -> T | Awaitable[T]:
        # JSON allows half a surrogate pair in an id.
        key = f"{self._prefix}{event_id}".encode("utf-8", "surrogatepass")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return convert(self._connection.script_blocking(script, [key], *arguments))

        async def run() -> T:
            return convert(await self._connection.script(script, [key], *arguments))

        return run()


def _unavailable(message: str) -> WebhookError:
    error = WebhookError(f"the seen events are unavailable: {message}")
    error.client_wide = True
    return error


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _to_claim(result: Any) -> Claim:
    return Claim(decoded(result))


def _to_none(result: Any) -> None:
    return None
