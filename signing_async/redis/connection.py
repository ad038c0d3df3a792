"""One way to Redis for all parts: bounded in time, and what fails is told in words without secrets."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, runtime_checkable
from urllib.parse import parse_qsl, unquote, urlsplit

from .. import _checks
from ..errors import ConfigurationError
from ..transport.redaction import redact

__all__ = ["Connection", "RedisClient", "Script", "Unreachable", "end", "text_of"]

T = TypeVar("T")

_MOST_CONNECTIONS = 64
_SCHEMES = ("redis", "rediss", "unix")


@runtime_checkable
class RedisClient(Protocol):
    """What is needed of a client: a ``redis.asyncio.Redis`` has it."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Run one command."""

    def pubsub(self, **settings: Any) -> Any:
        """A connection that listens."""


class Unreachable(Exception):  # stays inside the package: callers see what their part makes of it
    """Redis did not answer in time, refused, or cannot be reached."""


class Script:
    """A script that runs in Redis, sent whole only when Redis does not know it yet."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.digest: str = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class Connection:
    """A server by its URL, connected to on first use, or the caller's own client; nothing waits beyond ``timeout``."""

    def __init__(self, part: str, redis: str | RedisClient, timeout: float) -> None:
        _checks.seconds(part, "timeout", timeout)
        self.timeout = timeout
        self._given: RedisClient | None = None
        self._url: str | None = None
        self._secrets: list[str] = []
        self._client: Any = None
        self._blocking: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        if isinstance(redis, str):
            self._url = redis
            # Variables are shown in some tracebacks.
            del redis
            self.place: str = self._check_url(part)
        elif isinstance(redis, RedisClient) and not isinstance(redis, type):
            self._given = redis
            self.place = "the client that was given"
        else:
            raise ConfigurationError(
                f"{part}: redis must be a URL or a client of redis.asyncio, not {type(redis).__name__}"
            )

    def _check_url(self, part: str) -> str:
        """The server's place, for people; the URL itself may hold a password."""
        assert self._url is not None
        scheme = self._url.partition("://")[0]
        if scheme not in _SCHEMES:
            raise ConfigurationError(f"{part}: the URL must begin with redis://, rediss:// or unix://")
        try:
            parts = urlsplit(self._url)
            named = [value for name, value in parse_qsl(parts.query) if name == "password"]
            self._secrets = [text for text in (parts.password, unquote(parts.password or ""), *named) if text]
            place = f"{parts.hostname or ''}:{parts.port or 6379}" if scheme != "unix" else ""
            place = f"{scheme}://{place}{parts.path}"
            problem = ""
        except ValueError:
            problem = "its host or port cannot be read"
        if not problem:
            problem = self._check_settings()
        if problem:
            raise ConfigurationError(f"{part}: the URL is not usable: {problem}")
        return redact(place, self._secrets)

    def _check_settings(self) -> str:
        """What redis-py says against the URL; it makes its connections later."""
        assert self._url is not None
        try:
            from redis.asyncio.connection import parse_url
        except ModuleNotFoundError:
            return "the package redis is missing: pip install 'signing-async[redis]'"
        try:
            parse_url(self._url)
        except ValueError as error:
            return redact(str(error), self._secrets)
        return ""

    @property
    def can_block(self) -> bool:
        """Whether there is also a way for threads without an event loop: only to what is known by its URL."""
        return self._given is None

    @property
    def is_open(self) -> bool:
        """Whether there is something to close."""
        return self._client is not None or self._blocking is not None

    @property
    def client(self) -> Any:
        """The client for the running event loop."""
        if self._given is not None:
            return self._given
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client, self._loop = self._connect(), loop
        return self._client

    async def run(self, *command: Any) -> Any:
        """The answer to one command, or `Unreachable`."""
        return await self.bounded(lambda: self.client.execute_command(*command))

    async def script(self, script: Script, keys: list[bytes], *arguments: Any) -> Any:
        """The answer of a script, or `Unreachable`."""

        async def ask() -> Any:
            client = self.client
            try:
                return await client.execute_command("EVALSHA", script.digest, len(keys), *keys, *arguments)
            except Exception as error:
                if not _is_unknown_script(error):
                    raise
            return await client.execute_command("EVAL", script.source, len(keys), *keys, *arguments)

        return await self.bounded(ask)

    async def bounded(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What the function comes to within the time there is, or `Unreachable`."""
        # In a task of its own: a client may swallow a cancellation, and is not waited for then.
        asking = asyncio.ensure_future(ask())
        try:
            await asyncio.wait([asking], timeout=self.timeout)
            if not asking.done():
                raise TimeoutError
            return asking.result()
        except Exception as error:
            words = self._words(error)
        finally:
            asking.cancel()
        # Raised here, so that it does not hold the client's own error, whose frames know the password.
        raise Unreachable(words)

    def script_blocking(self, script: Script, keys: list[bytes], *arguments: Any) -> Any:
        """The same in a thread that has no event loop."""

        def ask() -> Any:
            if self._blocking is None:
                self._blocking = self._connect_blocking()
            client = self._blocking
            try:
                return client.execute_command("EVALSHA", script.digest, len(keys), *keys, *arguments)
            except Exception as error:
                if not _is_unknown_script(error):
                    raise
            return client.execute_command("EVAL", script.source, len(keys), *keys, *arguments)

        try:
            # redis-py's own time-outs are for each answer, and it may need several.
            return _aside(ask).result(self.timeout)
        except Exception as error:
            words = self._words(error)
        raise Unreachable(words)

    async def aclose(self) -> None:
        """Close what was opened here; the next use opens it again."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            with contextlib.suppress(Unreachable):
                await self.bounded(client.aclose)
        self.close()

    def close(self) -> None:
        """Close what threads without an event loop opened."""
        blocking, self._blocking = self._blocking, None
        if blocking is not None:
            blocking.close()

    def _words(self, error: Exception) -> str:
        if isinstance(error, TimeoutError) or type(error).__name__ == "TimeoutError":
            return f"{self.place} did not answer within {self.timeout:g} s"
        said = str(error).rstrip(".")[:200]
        return redact(f"{self.place}: {type(error).__name__}" + (f": {said}" if said else ""), self._secrets)

    def _settings(self, retry: Any) -> dict[str, Any]:
        # Without a retry of its own redis-py repeats what fails, and one second becomes many.
        return {
            "max_connections": _MOST_CONNECTIONS,
            "timeout": self.timeout,
            "socket_connect_timeout": self.timeout,
            "retry": retry,
            "protocol": 2,
        }

    def _connect(self) -> Any:
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        assert self._url is not None
        # Reads and writes are bounded by `bounded`, so that they need no time-out here.
        settings = self._settings(Retry(NoBackoff(), 0)) | {"socket_timeout": None}
        return Redis.from_pool(BlockingConnectionPool.from_url(self._url, **settings))

    def _connect_blocking(self) -> Any:
        from redis import BlockingConnectionPool, Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        assert self._url is not None
        settings = self._settings(Retry(NoBackoff(), 0)) | {"socket_timeout": self.timeout}
        return Redis.from_pool(BlockingConnectionPool.from_url(self._url, **settings))


def _aside(work: Callable[[], T]) -> Future[T]:
    """Done in a thread of its own, which keeps nobody waiting, not even the end of the program."""
    outcome: Future[T] = Future()

    def do() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # whatever it is: somebody waits to be told
            outcome.set_exception(error)

    threading.Thread(target=do, name="signing_async redis", daemon=True).start()
    return outcome


def _is_unknown_script(error: Exception) -> bool:
    return type(error).__name__ == "NoScriptError" or str(error).startswith("NOSCRIPT")


async def end(*tasks: asyncio.Task[None] | None) -> None:
    """Cancel tasks, and wait for them."""
    running = {task for task in tasks if task is not None and not task.done()}
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


def text_of(value: Any) -> str:
    """A string of Redis, which a client may have decoded already."""
    return value.decode() if isinstance(value, bytes) else str(value)
