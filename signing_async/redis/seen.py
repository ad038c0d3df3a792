"""Deduplication of webhook events for all receivers that share a Redis."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable
from copy import copy
from typing import Any, Self
from urllib.parse import quote

from .. import _checks
from .._secret import Secret, hide
from ..errors import ConfigurationError, WebhookError
from ..webhooks.seen import DAY, Claim
from .connection import Connection, RedisClient, decoded, milliseconds

__all__ = ["RedisSeenEvents"]

# KEYS: event. ARGV: claimer, lease in milliseconds.
_CLAIM = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
    return 'new'
end
return redis.call('GET', KEYS[1]) == 'confirmed' and 'confirmed' or 'pending'
"""
# KEYS: event. ARGV: claimer, time to live in milliseconds.
_CONFIRM = "redis.call('SET', KEYS[1], 'confirmed', 'PX', ARGV[2])"
# KEYS: event. ARGV: claimer.
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class RedisSeenEvents:
    """Remembers handled events in Redis, for receivers on any number of machines. ::

        receiver = Receiver(verifier, save_event, seen=RedisSeenEvents("redis://redis.example.com"))

    If Redis does not respond within ``timeout`` seconds, a method raises `WebhookError`. Events are forgotten ``ttl``
    seconds after they were confirmed; claims expire after the ``lease``. Event ids are unique only within a
    ``namespace``. Where no event loop runs, every method is a plain call with a connection of its own, to a URL.
    """

    def __init__(
        self,
        redis: str | Secret[str] | RedisClient,
        *,
        prefix: str = "signing:",
        ttl: float = 30 * DAY,
        lease: float = 60.0,
        timeout: float = 1.0,
        namespace: str | None = None,
    ) -> None:
        redis = hide(redis)
        self._connection = Connection(redis, timeout, _unavailable)
        self.ttl: float = _checks.number("ttl", ttl, above=0)
        self.lease: float = _checks.number("lease", lease, above=0)
        self.namespace: str | None = None if namespace is None else _checks.string("namespace", namespace)
        place = "seen" if namespace is None else f"seen@{quote(namespace, safe='')}"
        self._prefix = f"{_checks.string('prefix', prefix, may_be_empty=True)}{place}:"
        self._claimer = secrets.token_hex(8)

    def __repr__(self) -> str:
        return f"RedisSeenEvents({self._connection.address!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_connection"):
            self._connection.warn_if_open(self)

    async def aclose(self) -> None:
        """Close the connections, except a given client."""
        await self._connection.aclose()

    def close(self) -> None:
        """Do nothing: where no event loop runs, no connection stays open."""

    def claim(self, event_id: str) -> Claim | Awaitable[Claim]:
        claim: Claim | Awaitable[Claim] = self._run(_CLAIM, event_id, self.lease)
        return claim

    def confirm(self, event_id: str) -> Awaitable[None] | None:
        confirmed: Awaitable[None] | None = self._run(_CONFIRM, event_id, self.ttl)
        return confirmed

    def release(self, event_id: str) -> Awaitable[None] | None:
        released: Awaitable[None] | None = self._run(_RELEASE, event_id)
        return released

    def _run(self, script: str, event_id: str, seconds: float = 0) -> Any:
        # JSON allows half a surrogate pair in an id.
        key = f"{self._prefix}{event_id}".encode("utf-8", "surrogatepass")

        async def run(connection: Connection) -> Claim | None:
            state = await connection.script(script, [key], self._claimer, milliseconds(seconds))
            return None if state is None else Claim(decoded(state))

        async def run_alone() -> Claim | None:
            async with contextlib.aclosing(copy(self._connection)) as connection:
                return await run(connection)

        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            return run(self._connection)
        if self._connection.is_given:
            raise ConfigurationError("redis: must be a URL where no event loop runs, got a client of redis.asyncio")
        return asyncio.run(run_alone())


def _unavailable(message: str, transient: bool) -> WebhookError:
    return WebhookError(f"the seen events are unavailable: {message}", transient=transient, client_wide=True)
