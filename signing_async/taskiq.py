"""Dispatch by workers on many machines, through Taskiq: one task is one package, and the journal sends each once.

Start workers with Taskiq's own command. With Redis Streams, all settings may come from the environment: the broker from
``SIGNING_BROKER`` (``redis://...``), the journal from ``SIGNING_JOURNAL`` (``postgresql://...``), and the client from
the same settings as everywhere::

    taskiq worker --max-async-tasks 8 signing_async.taskiq:broker

Or use any Taskiq broker, in a module of your own::

    broker = add_dispatch(redis_streams("redis://..."), client=make_client, journal=make_journal)

This is also the way if workers on several machines use one OAuth token: their `OAuth` needs a `PostgresTokenStore` or a
`RedisTokenStore`, because the environment's token file belongs to one machine.

A message carries a package's fields, and each document's path and hash: workers read documents from storage that they
share with the enqueuing process, and reject a document that is missing or has changed. A message is acknowledged when
its package has been sent, or has failed permanently. It is delivered again if its worker died, or if the failure was
transient (the service, the journal or the token is unavailable). A package may therefore be delivered twice: the
journal then says that it was sent, or that another worker has claimed it, which is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs

from . import _checks
from .assumptions import Assumptions
from .client import SigningClient
from .dispatch.journal import Journal, SqliteJournal
from .dispatch.package import Prepared, prepare
from .dispatch.run import NewRecipient, SigningPackage
from .documents.source import PdfSource
from .errors import (
    ConfigurationError,
    InvalidRequest,
    SigningError,
    TransportError,
    WaitTimeout,
)
from .models import Signing
from .redis.connection import Connection

try:
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError
    from taskiq import AckableMessage, Context, TaskiqDepends, TaskiqEvents, TaskiqResult, TaskiqState
    from taskiq.exceptions import NoResultError
    from taskiq.serializers import JSONSerializer
    from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker
except ModuleNotFoundError as _missing:
    raise ModuleNotFoundError(
        f"signing_async.taskiq needs {_missing.name}: pip install 'signing-async[taskiq,postgres]'", name=_missing.name
    ) from None

__all__ = ["Enqueued", "Outcome", "add_dispatch", "broker", "enqueuing", "redis_streams"]

log: logging.Logger = logging.getLogger("signing_async")

_TASK = "signing_async:dispatch"
_VERSION = 1
_DAY = 86_400
_BLOCK = 1.0
_TIMEOUT = 2.0
_SCAN_START = (b"0-0", "0-0")
_FACTS = ("effect", "transient", "exit_code")
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
_CONTEXT: Any = TaskiqDepends()


@attrs.frozen
class Outcome:
    """The outcome of a package, as reported by its worker."""

    key: str
    signing: str | None
    """The id of the signing that was sent."""
    error: str | None
    kind: str | None
    """The name of the error's class."""
    effect: str = "none"
    """The error's ``effect``: ``"unknown"`` if the package may have been sent nevertheless."""
    transient: bool = False
    """The error's ``transient``."""
    exit_code: int = 1
    """The error's ``exit_code``."""

    @classmethod
    def of_error(cls, key: str, error: BaseException) -> Outcome:
        """Return the outcome of a package that failed."""
        facts = {name: getattr(error, name) for name in _FACTS} if isinstance(error, SigningError) else {}
        return cls(key, None, str(error), type(error).__name__, **facts)


class Enqueued:
    """An enqueued package, identified by its key in the journal."""

    def __init__(self, key: str, task: Any) -> None:
        self.key = key
        self._task = task

    def __repr__(self) -> str:
        return f"Enqueued({self.key!r})"

    async def outcome(self) -> Outcome | None:
        """Return the outcome, or None if no worker has reported it yet. Outcomes are kept for a day."""
        if not await _call_broker(self._task.is_ready()):
            return None
        result = await _call_broker(self._task.get_result())
        if result.is_err:
            # The task itself broke off, for example cancelled: its message is delivered again.
            outcome = Outcome.of_error(self.key, result.error)
            return attrs.evolve(outcome, effect="unknown", transient=True, exit_code=3)
        return Outcome(**result.return_value)

    async def wait(self, poll: float = 0.5, timeout: float | None = None) -> Outcome:
        """Return the outcome as soon as a worker reports it; raise `WaitTimeout` after ``timeout`` seconds.

        Asks every ``poll`` seconds. Without a ``timeout``, and without workers, this waits forever.
        """
        if timeout is not None:
            _checks.number("timeout", timeout, above=0)
        try:
            async with asyncio.timeout(timeout):
                while (outcome := await self.outcome()) is None:
                    await asyncio.sleep(poll)
                return outcome
        except TimeoutError:
            message = f"no worker reported on package {self.key!r} within {timeout:g} s: it may still be sent"
        raise WaitTimeout(message)


# Enqueuing


@contextlib.asynccontextmanager
async def enqueuing(
    broker: Any, *, max_pdf_bytes: int | None = None
) -> AsyncIterator[Callable[[SigningPackage], Awaitable[Enqueued]]]:
    """Yield a function that enqueues packages for workers. ::

        async with enqueuing(redis_streams("redis://...")) as enqueue:
            enqueued = await enqueue(package)
            outcome = await enqueued.wait()

    Each package is checked first. Its documents must be paths that lead to the same files wherever the workers run. A
    package that is enqueued again is not sent again.
    """
    most = Assumptions().max_pdf_bytes if max_pdf_bytes is None else max_pdf_bytes
    task = broker.find_task(_TASK) or broker.register_task(_dispatch, task_name=_TASK, ack_type="manual")

    async def enqueue(package: SigningPackage) -> Enqueued:
        prepared = await prepare(package, most)
        try:
            message = _message(prepared)
        finally:
            prepared.close()
        return Enqueued(prepared.key, await _call_broker(task.kiq(message)))

    await _call_broker(broker.startup())
    try:
        yield enqueue
    finally:
        try:
            await broker.shutdown()
        except Exception as error:
            log.warning("the broker could not be closed: %s", type(error).__name__)


def _message(prepared: Prepared) -> dict[str, Any]:
    return {
        "version": _VERSION,
        "key": prepared.key,
        **{name: None if value is None else str(value) for name, value in prepared.fields.items()},
        "documents": [_document(number, kept.source) for number, kept in enumerate(prepared.documents)],
        "recipients": [{**one, "signing_method": str(one["signing_method"])} for one in prepared.recipients],
    }


def _document(number: int, source: PdfSource) -> dict[str, Any]:
    path = source.source
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise InvalidRequest(
            f"documents[{number}]: must be a path that the workers can read, got {type(path).__name__}"
        )
    return {"path": str(Path(path).absolute()), "filename": source.filename, "sha256": source.sha256}


async def _call_broker(call: Awaitable[Any]) -> Any:
    """Await a call to the broker. The error does not show the URL, which may hold a password."""
    try:
        async with asyncio.timeout(_TIMEOUT):
            return await call
    except Exception as error:
        problem = type(error.__cause__ or error).__name__
    raise TransportError(f"the broker is unavailable ({problem})")


# Workers


def add_dispatch(broker: Any, *, client: Callable[[], SigningClient], journal: Callable[[], Journal]) -> Any:
    """Register the task that sends packages with a `taskiq.AsyncBroker`, and return the broker.

    Each worker calls ``client`` and ``journal`` when it starts, and closes both when it stops. Close what else they
    need, such as a token store, in a handler of the broker's ``WORKER_SHUTDOWN``.
    """

    async def start(state: TaskiqState) -> None:
        state.signing_journal = journal()
        state.signing_client = client()

    async def stop(state: TaskiqState) -> None:
        await state.signing_client.aclose()
        await state.signing_journal.aclose()

    broker.add_event_handler(TaskiqEvents.WORKER_STARTUP, start)
    broker.add_event_handler(TaskiqEvents.WORKER_SHUTDOWN, stop)
    broker.register_task(_dispatch, task_name=_TASK, ack_type="manual")
    return broker


def broker() -> Any:
    """Return a broker with its client and journal from the settings: ``taskiq worker signing_async.taskiq:broker``."""
    from .settings import Settings

    settings = Settings.load()
    url, place, auth = settings.broker, settings.journal, settings.auth()
    for name, value in (("SIGNING_BROKER", url), ("SIGNING_JOURNAL", place)):
        if not value:
            raise ConfigurationError(f"{name} is not set")

    def client() -> SigningClient:
        return SigningClient(
            settings.origin, auth, retry=settings.retry, timeout=settings.timeouts, assumptions=settings.assumptions
        )

    return add_dispatch(redis_streams(str(url)), client=client, journal=lambda: _journal(place))


def _journal(place: Any) -> Journal:
    if isinstance(place, Path):
        return SqliteJournal(place)
    from .postgres import PostgresJournal

    return PostgresJournal(place)


async def _dispatch(message: dict[str, Any], context: Context = _CONTEXT) -> dict[str, Any]:
    """Send one package: the task of a worker."""
    if not isinstance(context.broker, _StreamBroker):
        return await _dispatch_one(message, context)
    async with context.broker.renewed(context.message.labels[_ENTRY_LABEL]):
        return await _dispatch_one(message, context)


async def _dispatch_one(message: dict[str, Any], context: Context) -> dict[str, Any]:
    key, began = str(message.get("key")), time.monotonic()
    result = await _attempt(message, context.state)
    if isinstance(result, Signing):
        outcome = attrs.asdict(Outcome(key, result.id, None, None))
    elif _is_transient(result):
        log.warning("package %r is retried later: %s", key, result)
        # Not acknowledged, so delivered again.
        raise NoResultError
    else:
        log.error("package %r failed: %s", key, result)
        outcome = attrs.asdict(Outcome.of_error(key, result))
    if context.is_ackable and not await _report(outcome, time.monotonic() - began, context):
        log.warning("the outcome of package %r could not be reported: the message is handled again later", key)
        raise NoResultError
    return outcome


async def _report(outcome: dict[str, Any], seconds: float, context: Context) -> bool:
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


async def _attempt(message: dict[str, Any], state: TaskiqState) -> Signing | Exception:
    try:
        signing: Signing = await state.signing_client.dispatch(_decode_package(message), state.signing_journal)
    except Exception as error:
        return error
    return signing


def _is_transient(error: Exception) -> bool:
    """Return whether the same message may succeed later, or with another worker's client."""
    return isinstance(error, SigningError) and (error.transient or error.client_wide)


def _decode_package(message: dict[str, Any]) -> SigningPackage:
    if message.get("version") != _VERSION:
        raise InvalidRequest(
            f"message version {message.get('version')!r} is not supported; this worker supports version {_VERSION}"
        )
    return SigningPackage(
        key=message["key"],
        name=message["name"],
        language=message["language"],
        signing_order=message["signing_order"],
        message=message["message"],
        documents=[PdfSource(one["path"], one["filename"], sha256=one["sha256"]) for one in message["documents"]],
        recipients=[NewRecipient(**one) for one in message["recipients"]],
    )


# Redis Streams


def redis_streams(url: str, *, queue: str = "signing-dispatch", redeliver_after: float = 60.0) -> Any:
    """Return a Taskiq broker in Redis Streams. It redelivers the messages of dead workers.

    A live worker keeps its messages, however long a package takes. If a worker dies, or is paused for
    ``redeliver_after`` seconds, another worker gets them. Outcomes are kept for a day.
    """
    _checks.string("url", url)
    _checks.string("queue", queue)
    _checks.number("redeliver_after", redeliver_after, above=0)
    # Not connected: this rejects an invalid URL without showing its password.
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
        # Includes messages that are older than the first worker.
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
    """A broker that loses no message and survives an outage of Redis.

    Taskiq's own broker looks for abandoned messages only after a new one, and never deletes any. This one looks all the
    time, reads a message only when a worker is free, renews it during the work, and deletes it afterwards.
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
            # If Redis is unavailable, another worker may get the message; the journal then holds its package back.
            with contextlib.suppress(RedisError, OSError):
                async with Redis(connection_pool=self.connection_pool) as redis:
                    # A claim resets the idle time; JUSTID does not count as a delivery.
                    queue, group = self.queue_name, self.consumer_group_name
                    await redis.xclaim(queue, group, self._consumer, min_idle_time=0, message_ids=[entry], justid=True)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        consumer = self._consumer
        next_scan = next_cleanup = 0.0
        is_unavailable = False
        while True:
            try:
                if is_unavailable:
                    # Redis may have lost its data.
                    await self._declare_consumer_group()
                    is_unavailable = False
                    log.info("the broker is available again")
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
                if not is_unavailable:
                    log.warning("the broker is unavailable, retrying: %s", type(error).__name__)
                is_unavailable = True
                await asyncio.sleep(_BLOCK)
                continue
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
