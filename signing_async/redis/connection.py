"""The connection to Redis that all parts use: every operation is bounded in time, and no error shows a secret."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable
from urllib.parse import parse_qsl, unquote, urlsplit

from .. import _checks
from .._connections import certificate_problem, roots_problem
from .._foreign import is_transient
from .._secret import Secret, hide
from .._tasks import run_within
from ..errors import ConfigurationError
from ..transport.redaction import redact

__all__ = ["Connection", "RedisClient", "decoded", "milliseconds"]


@runtime_checkable
class RedisClient(Protocol):
    """The methods of a client that are used; ``redis.asyncio.Redis`` has them."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Run one command."""


class Connection:
    """A connection to a URL, opened on first use, or the caller's client. No operation exceeds ``timeout`` seconds.

    An operation that fails raises ``failure``, made of a message and whether the failure is transient.
    """

    def __init__(
        self, redis: str | Secret[str] | RedisClient, timeout: float, failure: Callable[[str, bool], Exception]
    ) -> None:
        redis = hide(redis)
        self.timeout: float = _checks.number("timeout", timeout, above=0)
        self.address: str = "the given client"
        self.is_given: bool = not isinstance(redis, Secret)
        self._failure = failure
        self._passwords: list[Secret[str]] = []
        self._client: Any = redis if self.is_given else None
        self._loop: asyncio.AbstractEventLoop | None = None
        if isinstance(redis, Secret):
            self._url = redis
            if problem := self._check_url():
                raise ConfigurationError(f"invalid Redis URL: {problem}")
        elif not isinstance(redis, RedisClient):
            raise ConfigurationError(f"redis: must be a URL or a client of redis.asyncio, got {type(redis).__name__}")

    def _check_url(self) -> str:
        """Find the address and the passwords; return what is wrong with the URL, or "".

        redis-py itself checks the URL, and its files, only when it connects.
        """
        scheme = self._url.reveal().partition("://")[0]
        if scheme not in ("redis", "rediss", "unix"):
            return "must begin with redis://, rediss:// or unix://"
        try:
            parts = urlsplit(self._url.reveal())
            passwords = [parts.password or "", *(value for name, value in parse_qsl(parts.query) if name == "password")]
            self._passwords = [Secret(text) for each in passwords if each for text in (each, unquote(each))]
            host = f"{parts.hostname or ''}:{parts.port or 6379}" if scheme != "unix" else ""
        except ValueError:
            return "invalid host or port"
        self.address = self._redact(f"{scheme}://{host}{parts.path}")
        try:
            from redis.asyncio.connection import parse_url

            settings: Any = parse_url(self._url.reveal())
        except ModuleNotFoundError:
            return "redis-py is not installed; pip install 'signing-async[redis]'"
        except ValueError as error:
            return self._redact(str(error))
        pair = settings.get("ssl_certfile"), settings.get("ssl_keyfile")
        return roots_problem(settings.get("ssl_ca_certs")) or certificate_problem(*pair, settings.get("ssl_password"))

    def _redact(self, text: str) -> str:
        return redact(text, [password.reveal() for password in self._passwords])

    @property
    def client(self) -> Any:
        """The caller's client, or one for the running event loop."""
        loop = asyncio.get_running_loop()
        if not self.is_given and (self._client is None or self._loop is not loop):
            from redis.asyncio import BlockingConnectionPool, Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff

            settings: dict[str, Any] = {
                "max_connections": 64,
                "timeout": self.timeout,
                "socket_connect_timeout": self.timeout,
                "socket_timeout": None,  # `script` limits reads and writes
                # By default redis-py retries, which turns a timeout of one second into many.
                "retry": Retry(NoBackoff(), 0),
                "protocol": 2,
            }
            self._client = Redis.from_pool(BlockingConnectionPool.from_url(self._url.reveal(), **settings))
            self._loop = loop
        return self._client

    async def script(self, source: str, keys: list[bytes], *arguments: Any) -> Any:
        """Run a Lua script and return its result, or raise the failure. An argument may be a `Secret`."""

        async def work() -> Any:
            opened = (each.reveal() if isinstance(each, Secret) else each for each in arguments)
            return await self.client.execute_command("EVAL", source, len(keys), *keys, *opened)

        attempt = await run_within(work(), self.timeout)
        error = attempt.exception() if attempt.done() else TimeoutError()
        if not isinstance(error, Exception):
            return attempt.result()
        message = f"{type(error).__name__}: {str(error).rstrip('.')[:200]}"
        if type(error).__name__ == "TimeoutError":  # redis-py has one of its own
            message = f"no response within {self.timeout:g} s"
        raise self._failure(self._redact(f"{self.address}: {message}"), is_transient(error))

    async def aclose(self) -> None:
        """Close the connections opened here; the next operation opens them again."""
        if not self.is_given and self._client is not None:
            client, self._client = self._client, None
            await run_within(client.aclose(), self.timeout)

    def warn_if_open(self, owner: object) -> None:
        """Warn that ``owner`` was not closed; for its ``__del__``."""
        if not self.is_given and self._client is not None:
            warnings.warn(f"{owner!r} was not closed", ResourceWarning, stacklevel=3, source=owner)


def decoded(value: Any) -> str:
    """Return a string from Redis as ``str``; the caller's client may have decoded it already."""
    return value.decode() if isinstance(value, bytes) else str(value)


def milliseconds(seconds: float) -> int:
    """Return the seconds as Redis takes them: at least one millisecond."""
    return max(1, round(seconds * 1000))
