"""The connection to Redis that all parts use: every operation is bounded in time, and no error shows a secret."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar, runtime_checkable
from urllib.parse import parse_qsl, unquote, urlsplit

import attrs

from .. import _checks
from .._connections import certificate_problem, roots_problem
from .._foreign import is_transient
from .._tasks import run_within
from ..errors import ConfigurationError, SigningError
from ..transport.redaction import redact

__all__ = ["Connection", "RedisClient", "RedisUnavailable", "Script", "cancel_and_wait", "decoded"]

T = TypeVar("T")

_MAX_CONNECTIONS = 64
_SCHEMES = ("redis", "rediss", "unix")


@runtime_checkable
class RedisClient(Protocol):
    """The methods of a client that are used; ``redis.asyncio.Redis`` has them."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Run one command."""

    def pubsub(self, **settings: Any) -> Any:
        """Return a connection that can subscribe to channels."""


class RedisUnavailable(Exception):  # never leaves the package
    """Redis did not respond in time, refused the command, or cannot be reached."""


class Script:
    """A Lua script, sent in full only if Redis does not know it yet."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.digest: str = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


@attrs.frozen
class _Failed:
    message: str
    transient: bool


class Connection:
    """A connection to a URL, opened on first use, or the caller's client. No operation exceeds ``timeout`` seconds.

    An operation that fails raises ``failure`` with a message.
    """

    def __init__(
        self, redis: str | RedisClient, timeout: float, failure: Callable[[str], Exception] = RedisUnavailable
    ) -> None:
        self.timeout: float = _checks.number("timeout", timeout, above=0)
        self._failure = failure
        self._given: RedisClient | None = None
        self._url = ""
        self._secrets: list[str] = []
        self._client: Any = None
        self._blocking_client: Any = None
        self._blocking_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        if isinstance(redis, str):
            self._url = redis
            del redis  # some tools show the variables of a traceback
            self.address: str = self._check_url()
        elif isinstance(redis, RedisClient) and not isinstance(redis, type):
            self._given = redis
            self.address = "the given client"
        else:
            raise ConfigurationError(f"redis: must be a URL or a client of redis.asyncio, got {type(redis).__name__}")

    def _check_url(self) -> str:
        """Return the server's address for messages; the URL itself may hold a password."""
        scheme = self._url.partition("://")[0]
        problem = address = ""
        if scheme not in _SCHEMES:
            raise ConfigurationError("invalid Redis URL: must begin with redis://, rediss:// or unix://")
        try:
            parts = urlsplit(self._url)
            passwords = [parts.password or "", *(value for name, value in parse_qsl(parts.query) if name == "password")]
            self._secrets = [secret for each in passwords if each for secret in (each, unquote(each))]
            host = f"{parts.hostname or ''}:{parts.port or 6379}" if scheme != "unix" else ""
            address = redact(f"{scheme}://{host}{parts.path}", self._secrets)
        except ValueError:
            problem = "invalid host or port"
        problem = problem or self._check_settings()
        if problem:
            raise ConfigurationError(f"invalid Redis URL: {problem}")
        return address

    def _check_settings(self) -> str:
        """Return what is wrong with the URL, or "". redis-py itself checks it, and its files, only when it connects."""
        try:
            from redis.asyncio.connection import parse_url
        except ModuleNotFoundError:
            return "redis-py is not installed; pip install 'signing-async[redis]'"
        try:
            settings: Any = parse_url(self._url)
        except ValueError as error:
            return redact(str(error), self._secrets)
        pair = settings.get("ssl_certfile"), settings.get("ssl_keyfile")
        return roots_problem(settings.get("ssl_ca_certs")) or certificate_problem(*pair, settings.get("ssl_password"))

    @property
    def is_open(self) -> bool:
        """Whether there is a connection to close."""
        return self._client is not None or self._blocking_client is not None

    @property
    def client(self) -> Any:
        """The client for the running event loop."""
        if self._given is not None:
            return self._given
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client, self._loop = self._connect(), loop
        return self._client

    async def script(self, script: Script, keys: list[bytes], *arguments: Any) -> Any:
        """Run a script and return its result."""

        async def run() -> Any:
            client = self.client
            try:
                return await client.execute_command("EVALSHA", script.digest, len(keys), *keys, *arguments)
            except Exception as error:
                if not _is_unknown_script(error):
                    raise
            return await client.execute_command("EVAL", script.source, len(keys), *keys, *arguments)

        return await self._bounded(run)

    async def subscribe(self, channel: bytes) -> Any:
        """Return a connection that is subscribed to the channel; end it with `unsubscribe`."""

        async def subscribe() -> Any:
            listener = self.client.pubsub()
            try:
                await listener.subscribe(channel)
                await listener.get_message(timeout=None)
            except BaseException:
                await listener.aclose()
                raise
            return listener

        return await self._bounded(subscribe)

    async def unsubscribe(self, listener: Any) -> None:
        """Close the connection of a subscription, whether or not Redis responds."""
        await self._attempt(listener.aclose)

    async def _bounded(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``work``, or raise the failure if it raises or takes longer than the timeout."""
        outcome = await self._attempt(work)
        # Raised here: as its context, the client's own error would keep frames that hold the password.
        if isinstance(outcome, _Failed):
            raise self._make_error(outcome)
        return outcome

    def _make_error(self, failed: _Failed) -> Exception:
        error = self._failure(failed.message)
        if isinstance(error, SigningError):
            error.transient = failed.transient
        return error

    async def _attempt(self, work: Callable[[], Awaitable[T]]) -> T | _Failed:
        return self._outcome(await run_within(work(), self.timeout))

    def _outcome(self, attempt: asyncio.Future[T] | Future[T]) -> T | _Failed:
        # Not raised: that would replace the error's context, which `is_transient` examines.
        error = attempt.exception() if attempt.done() else TimeoutError()
        return self._describe(error) if isinstance(error, Exception) else attempt.result()

    def script_blocking(self, script: Script, keys: list[bytes], *arguments: Any) -> Any:
        """Run a script in a thread that has no event loop."""
        if self._given is not None:
            raise ConfigurationError("redis: must be a URL where no event loop runs, got a client of redis.asyncio")

        def run() -> Any:
            with self._blocking_lock:
                if self._blocking_client is None:
                    self._blocking_client = self._connect_blocking()
                client = self._blocking_client
            try:
                return client.execute_command("EVALSHA", script.digest, len(keys), *keys, *arguments)
            except Exception as error:
                if not _is_unknown_script(error):
                    raise
            return client.execute_command("EVAL", script.source, len(keys), *keys, *arguments)

        outcome = self._attempt_blocking(run)
        if isinstance(outcome, _Failed):
            raise self._make_error(outcome)
        return outcome

    def _attempt_blocking(self, work: Callable[[], T]) -> T | _Failed:
        attempt = _run_in_thread(work)
        # redis-py's own timeouts are per response, and a script may need several.
        wait([attempt], self.timeout)
        return self._outcome(attempt)

    async def aclose(self) -> None:
        """Close the connections opened here; the next operation opens them again."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await self._attempt(client.aclose)
        self.close()

    def close(self) -> None:
        """Close the connections of threads without an event loop."""
        with self._blocking_lock:
            client, self._blocking_client = self._blocking_client, None
        if client is not None:
            client.close()

    def _describe(self, error: Exception) -> _Failed:
        text = str(error).rstrip(".")[:200]
        message = type(error).__name__ + (f": {text}" if text else "")
        if isinstance(error, TimeoutError) or type(error).__name__ == "TimeoutError":
            message = f"no response within {self.timeout:g} s"
        return _Failed(redact(f"{self.address}: {message}", self._secrets), transient=is_transient(error))

    def _settings(self, retry: Any) -> dict[str, Any]:
        # By default redis-py retries, which turns a timeout of one second into many.
        return {
            "max_connections": _MAX_CONNECTIONS,
            "timeout": self.timeout,
            "socket_connect_timeout": self.timeout,
            "retry": retry,
            "protocol": 2,
        }

    def _connect(self) -> Any:
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        # `_attempt` limits reads and writes, so the socket needs no timeout.
        settings = self._settings(Retry(NoBackoff(), 0)) | {"socket_timeout": None}
        return Redis.from_pool(BlockingConnectionPool.from_url(self._url, **settings))

    def _connect_blocking(self) -> Any:
        from redis import BlockingConnectionPool, Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        settings = self._settings(Retry(NoBackoff(), 0)) | {"socket_timeout": self.timeout}
        return Redis.from_pool(BlockingConnectionPool.from_url(self._url, **settings))


def _run_in_thread(work: Callable[[], T]) -> Future[T]:
    """Run ``work`` in a daemon thread: unlike an executor's, it does not delay the end of the program."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # the caller must always be woken
            outcome.set_exception(error)

    threading.Thread(target=run, name="signing_async redis", daemon=True).start()
    return outcome


def _is_unknown_script(error: Exception) -> bool:
    return type(error).__name__ == "NoScriptError" or str(error).startswith("NOSCRIPT")


async def cancel_and_wait(*tasks: asyncio.Task[None] | None) -> None:
    """Cancel the tasks and wait until they have ended."""
    running = {task for task in tasks if task is not None and not task.done()}
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


def decoded(value: Any) -> str:
    """Return a string from Redis as ``str``; the caller's client may have decoded it already."""
    return value.decode() if isinstance(value, bytes) else str(value)
