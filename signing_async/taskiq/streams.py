"""A broker that keeps messages in Redis Streams until they are handled, and saves results before it acknowledges."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from taskiq import AckableMessage, Context, TaskiqResult
from taskiq.exceptions import TaskiqError
from taskiq.serializers import JSONSerializer
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from .. import _checks
from .._foreign import is_transient
from .._tasks import run_within
from ..errors import SigningError, TransportError
from ..redis.connection import Connection

__all__ = ["call_broker", "hold_message", "poll_broker", "redis_streams", "report", "should_redeliver"]

T = TypeVar("T")

log: logging.Logger = logging.getLogger("signing_async")

_DAY = 86_400
_BLOCK = 1.0
_TIMEOUT = 2.0
_SCAN_START = (b"0-0", "0-0")
_ENTRY_LABEL = "signing_async:entry"
# Deleting a consumer deletes its pending messages, so the check and the deletion are one script.
_DELETE_IDLE_CONSUMERS = """
for _, found in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
    local consumer = {}
    for at = 1, #found, 2 do consumer[found[at]] = found[at + 1] end
    if consumer.pending == 0 and consumer.idle >= tonumber(ARGV[2]) then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer.name)
    end
end
"""


async def call_broker(call: Awaitable[Any]) -> Any:
    """Await a call to the broker. The error does not show the URL, which may hold a password."""
    task = await run_within(call, _TIMEOUT)
    error = task.exception() if task.done() else TimeoutError()
    if not isinstance(error, Exception):
        return task.result()
    cause = error.__cause__ if isinstance(error, TaskiqError) else None
    failure = cause if isinstance(cause, Exception) else error
    name, transient = type(failure).__name__, is_transient(failure)
    unavailable = TransportError(f"the broker is unavailable ({name})")
    unavailable.transient, unavailable.client_wide = transient, True
    raise unavailable


async def poll_broker(read: Callable[[], Awaitable[T | None]], pause: float) -> T:
    """Return the first result of ``read`` that is not None. Polling continues during an outage of the broker."""
    while True:
        try:
            if (result := await read()) is not None:
                return result
        except TransportError as error:
            if not error.transient:
                raise
            log.debug("cannot read a result from the broker now: %s", error)
        await asyncio.sleep(pause)


async def report(outcome: dict[str, Any], seconds: float, context: Context) -> bool:
    """Save the outcome, then acknowledge the message; return whether both succeeded.

    Taskiq saves the result after it acknowledges: if the worker died in between, the outcome would be lost.
    """
    result: TaskiqResult[Any] = TaskiqResult(
        is_err=False, return_value=outcome, execution_time=round(seconds, 2), labels=context.message.labels
    )
    with contextlib.suppress(Exception):
        await context.broker.result_backend.set_result(context.message.task_id, result)
        await context.ack()
        return True
    return False


def should_redeliver(error: Exception) -> bool:
    """Return whether the task may succeed later, or with another worker's client and stores."""
    return isinstance(error, SigningError) and (error.transient or error.client_wide)


@contextlib.asynccontextmanager
async def hold_message(context: Context) -> AsyncIterator[None]:
    """Keep the task's message from other workers during the block, if it is in Redis Streams."""
    async with contextlib.AsyncExitStack() as renewing:
        if isinstance(context.broker, _StreamBroker):
            await renewing.enter_async_context(context.broker.renewed(context.message.labels[_ENTRY_LABEL]))
        yield


def redis_streams(url: str, *, queue: str = "signing-dispatch", redeliver_after: float = 60.0) -> Any:
    """Return a Taskiq broker in Redis Streams. It redelivers the messages of dead workers.

    A live worker keeps its messages, however long a package takes. If a worker dies, or is paused for
    ``redeliver_after`` seconds, another worker gets them. Outcomes are kept for a day.
    """
    _checks.string("url", url)
    _checks.string("queue", queue)
    _checks.number("redeliver_after", redeliver_after, above=0)
    # This only checks the URL, and its error does not show the password.
    Connection(url, _TIMEOUT)
    # By default redis-py retries for a quarter of a minute.
    bounds: dict[str, Any] = {
        "socket_connect_timeout": _TIMEOUT,
        "socket_timeout": _BLOCK + _TIMEOUT,
        "retry": Retry(NoBackoff(), 0),
    }
    streams = _StreamBroker(
        url,
        queue_name=queue,
        consumer_group_name=queue,
        # Read messages that are older than the first worker, too.
        consumer_id="0",
        idle_timeout=max(1, round(redeliver_after * 1000)),
        xread_block=int(_BLOCK * 1000),
        **bounds,
    )
    results: Any = RedisAsyncResultBackend(
        url, result_ex_time=_DAY, prefix_str=queue, serializer=JSONSerializer(), **bounds
    )
    return streams.with_result_backend(results)


class _StreamBroker(RedisStreamBroker):
    """A broker that keeps messages until they are handled, and survives an outage of Redis.

    Taskiq's own broker looks for abandoned messages only after a new one, and never deletes any. This one looks every
    second, reads a message only when a worker is free, renews it during the work, and deletes it afterwards.
    """

    @property
    def _consumer(self) -> str:
        return f"{socket.gethostname()}:{os.getpid()}:{self.consumer_name}"

    @contextlib.asynccontextmanager
    async def renewed(self, entry: str) -> AsyncIterator[None]:
        """Keep the message from other workers during the block."""
        done = asyncio.Event()
        renewing = asyncio.create_task(self._renew(entry, done))
        try:
            yield
        finally:
            # Not cancelled: redis-py can lose a cancellation at the end of its timeouts.
            done.set()
            await renewing

    async def _renew(self, entry: str, done: asyncio.Event) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.idle_timeout / 3000):
                    await done.wait()
                    return
            # If Redis is unavailable, another worker may get the message; the journal makes its worker wait.
            with contextlib.suppress(RedisError, OSError):
                async with Redis(connection_pool=self.connection_pool) as redis:
                    # A claim resets the idle time; JUSTID does not count as a delivery.
                    queue, group = self.queue_name, self.consumer_group_name
                    await redis.xclaim(queue, group, self._consumer, min_idle_time=0, message_ids=[entry], justid=True)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        consumer = self._consumer
        next_scan = next_cleanup = 0.0
        logged = logging.NOTSET  # the level of the latest message about an error that lasts
        while True:
            try:
                if logged:
                    # Redis may have lost its data.
                    await self._declare_consumer_group()
                async with Redis(connection_pool=self.connection_pool) as redis:
                    if time.monotonic() >= next_cleanup:
                        arguments = (self.consumer_group_name, str(self.idle_timeout))
                        await redis.eval(_DELETE_IDLE_CONSUMERS, 1, self.queue_name, *arguments)
                        next_cleanup = time.monotonic() + self.idle_timeout / 1000
                    found = []
                    if time.monotonic() >= next_scan:
                        found = await self._claim_abandoned(redis, consumer)
                        # Scan again at once: there may be more.
                        next_scan = 0.0 if found else time.monotonic() + _BLOCK
                    found = found or await self._read_new(redis, consumer)
            except (RedisError, OSError) as error:
                kind = type(error).__name__
                if not logged:
                    log.warning("the broker is unavailable, retrying: %s", kind)
                    logged = logging.WARNING
                # Not for the first error: Redis also refuses the first read after it lost its data.
                elif logged < logging.ERROR and not is_transient(error):
                    logged = logging.ERROR
                    # Without a traceback, which may show the URL with its password.
                    text = "the broker refuses this worker (%s): check login, permissions and certificate; retrying"
                    log.log(logged, text, kind)
                await asyncio.sleep(_BLOCK)
                continue
            if logged:
                log.info("the broker is available again")
                logged = logging.NOTSET
            for entry, fields in found:
                yield AckableMessage(
                    data=self._add_entry_label(entry, fields), ack=self._ack_generator(entry, self.queue_name)
                )

    def _add_entry_label(self, entry: Any, fields: dict[Any, Any]) -> bytes:
        """Return the message with the id of its stream entry as a label."""
        data: bytes = fields.get(b"data", b"")
        try:
            message = self.formatter.loads(data)
        except Exception:
            return data  # Taskiq logs that this is no message, and acknowledges it.
        message.labels[_ENTRY_LABEL] = entry.decode()
        return self.formatter.dumps(message).message

    async def _claim_abandoned(self, redis: Any, consumer: str) -> list[tuple[Any, Any]]:
        # Redis scans ten pending entries at a time, and returns where to continue.
        start: Any = None
        found: list[tuple[Any, Any]] = []
        while start not in _SCAN_START and not found:
            response = await redis.xautoclaim(
                self.queue_name,
                self.consumer_group_name,
                consumer,
                min_idle_time=self.idle_timeout,
                start_id=start or _SCAN_START[0],
                count=1,
            )
            start = response[0]
            found = [(entry, fields) for entry, fields in response[1] if fields]
        return found

    async def _read_new(self, redis: Any, consumer: str) -> list[tuple[Any, Any]]:
        response = await redis.xreadgroup(
            self.consumer_group_name, consumer, {self.queue_name: ">"}, count=1, block=self.block
        )
        return [entry for _, entries in response or [] for entry in entries]

    def _ack_generator(self, id: Any, queue_name: str) -> Callable[[], Awaitable[None]]:
        async def ack() -> None:
            async with Redis(connection_pool=self.connection_pool) as redis, redis.pipeline() as pipeline:
                pipeline.xack(queue_name, self.consumer_group_name, id)
                pipeline.xdel(queue_name, id)
                await pipeline.execute()

        return ack
