"""Taskiq workers on many machines, which dispatch packages and handle the events of an inbox: see ``taskiq.md``.

A message is acknowledged when its package has been sent, or has failed permanently. It is delivered again if its worker
died, or if the failure was transient, so a package may be delivered twice: the journal then says that it was sent, or
that another worker has claimed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from inspect import isawaitable, iscoroutinefunction
from pathlib import Path
from typing import Any, TypeVar

import attrs

from . import _checks
from ._foreign import is_transient
from ._tasks import run_within
from .assumptions import Assumptions
from .client import SigningClient
from .dispatch.journal import Journal
from .dispatch.package import Prepared, prepare
from .dispatch.run import NewRecipient, SigningPackage
from .documents.source import PdfSource
from .errors import (
    ConfigurationError,
    InboxError,
    InvalidRequest,
    SigningError,
    TransportError,
    WaitTimeout,
    amended,
)
from .redis.connection import Connection
from .storage.journal import SqliteJournal
from .webhooks import Drop, Event, EventStatus, Inbox, RetryLater
from .webhooks.inbox import EventHandler

try:
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError
    from taskiq import AckableMessage, Context, TaskiqDepends, TaskiqEvents, TaskiqResult, TaskiqState
    from taskiq.exceptions import NoResultError, TaskiqError
    from taskiq.serializers import JSONSerializer
    from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker
except ModuleNotFoundError as _missing:
    raise ModuleNotFoundError(
        f"signing_async.taskiq needs {_missing.name}: pip install 'signing-async[taskiq,postgres]'", name=_missing.name
    ) from None

__all__ = ["Enqueued", "Outcome", "add_dispatch", "broker", "enqueuing", "event_task", "redis_streams"]

T = TypeVar("T")
H = TypeVar("H", bound=EventHandler)

log: logging.Logger = logging.getLogger("signing_async")

_TASK = "signing_async:dispatch"
_VERSION = 1
_CONTEXT: Any = TaskiqDepends()
_DAY = 86_400
_BLOCK = 1.0
_TIMEOUT = 2.0
_POLL = 0.1
_ENTRY_LABEL = "signing_async:entry"


@attrs.frozen
class Outcome:
    """The outcome of a package, as reported by its worker. The last three attributes are those of the error."""

    key: str
    signing: str | None
    """The id of the signing that was sent."""
    error: str | None
    kind: str | None
    """The name of the error's class."""
    effect: str = "none"
    transient: bool = False
    exit_code: int = 1


class Enqueued:
    """An enqueued package, identified by its key in the journal."""

    def __init__(self, key: str, task: Any) -> None:
        self.key = key
        self._task = task

    def __repr__(self) -> str:
        return f"Enqueued({self.key!r})"

    async def outcome(self) -> Outcome | None:
        """Return the outcome, or None if no worker has reported it yet. Outcomes are kept for a day.

        Raise `TransportError` if the broker is unavailable. Its ``effect`` is ``"unknown"``: the package may be sent.
        """
        try:
            result = await _read_result(self._task)
        except TransportError as error:
            raise amended(error, effect="unknown") from None
        if result is None or not result.is_err:
            return None if result is None else Outcome(**result.return_value)
        # The task itself was interrupted, for example cancelled: its message is delivered again.
        return Outcome(self.key, None, str(result.error), type(result.error).__name__, "unknown", True, 3)

    async def wait(self, poll: float = 0.5, timeout: float | None = None) -> Outcome:
        """Return the outcome as soon as a worker reports it; raise `WaitTimeout` after ``timeout`` seconds.

        Asks the broker every ``poll`` seconds, also during an outage. Without a ``timeout``, and without workers,
        this waits forever.
        """
        if timeout is not None:
            _checks.number("timeout", timeout, above=0)
        try:
            async with asyncio.timeout(timeout):
                return await _poll(self.outcome, poll)
        except TimeoutError:
            message = f"no worker reported on package {self.key!r} within {timeout:g} s: it may still be sent"
            raise WaitTimeout(message, effect="unknown") from None


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
    package that is enqueued again is not sent again. If the broker fails for a transient reason, the error's ``effect``
    is ``"unknown"``: the package may have been enqueued.
    """
    max_bytes = Assumptions().max_pdf_bytes if max_pdf_bytes is None else max_pdf_bytes
    task = broker.find_task(_TASK) or broker.register_task(_dispatch, task_name=_TASK, ack_type="manual")

    async def enqueue(package: SigningPackage) -> Enqueued:
        with contextlib.closing(await prepare(package, max_bytes)) as prepared:
            message = _encode_package(prepared)
        try:
            return Enqueued(prepared.key, await _call(task.kiq(message)))
        except TransportError as error:
            raise amended(error, effect="unknown" if error.transient else "none") from None

    await _call(broker.startup())
    try:
        yield enqueue
    finally:
        with contextlib.suppress(TransportError):
            await _call(broker.shutdown())


def _encode_package(prepared: Prepared) -> dict[str, Any]:
    documents = []
    for number, document in enumerate(prepared.documents):
        source, path = document.source, document.source.source
        if not isinstance(path, str | os.PathLike):
            text = f"documents[{number}]: must be a path that the workers can read, got {type(path).__name__}"
            raise InvalidRequest(text)
        documents.append({"path": str(Path(path).absolute()), "filename": source.filename, "sha256": source.sha256})
    return {
        "version": _VERSION,
        "key": prepared.key,
        **{name: None if value is None else str(value) for name, value in prepared.fields.items()},
        "documents": documents,
        "recipients": [{**one, "signing_method": str(one["signing_method"])} for one in prepared.recipients],
    }


def _decode_package(message: dict[str, Any]) -> SigningPackage:
    if message.get("version") != _VERSION:
        raise InvalidRequest(
            f"message version {message.get('version')!r} is not supported; this worker supports version {_VERSION}"
        )
    return SigningPackage(
        **{name: message[name] for name in ("key", "name", "language", "signing_order", "message")},
        documents=[PdfSource(one["path"], one["filename"], sha256=one["sha256"]) for one in message["documents"]],
        recipients=[NewRecipient(**one) for one in message["recipients"]],
    )


# Workers


def add_dispatch(broker: Any, *, client: Callable[[], SigningClient], journal: Callable[[], Journal]) -> Any:
    """Register the task that sends packages on a `taskiq.AsyncBroker`, and return the broker.

    Each worker calls ``client`` and ``journal`` when it starts, and closes both when it stops. Close what else
    these need, such as a token store, in a handler of the broker's ``WORKER_SHUTDOWN``.
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
        return SigningClient(settings.origin, auth, **settings.client_options())

    def journal() -> Journal:
        if isinstance(place, Path):
            return SqliteJournal(place)
        from .postgres import PostgresJournal

        return PostgresJournal(str(place))

    return add_dispatch(redis_streams(str(url)), client=client, journal=journal)


async def _dispatch(message: dict[str, Any], context: Context = _CONTEXT) -> dict[str, Any]:
    """Send one package: the task of a worker."""
    key, state = str(message.get("key")), context.state
    async with _renewed(context):
        try:
            signing = await state.signing_client.dispatch(_decode_package(message), state.signing_journal)
            outcome = Outcome(key, signing.id, None, None)
        except Exception as error:
            details: dict[str, Any] = {}
            if isinstance(error, SigningError):
                if error.transient or error.client_wide:
                    # It may succeed later, or with another worker's client. Not acknowledged, so delivered again.
                    log.warning("package %r is retried later: %s", key, error)
                    raise NoResultError from None
                details = {"effect": error.effect, "transient": error.transient, "exit_code": error.exit_code}
            log.error("package %r failed: %s", key, error)  # noqa: TRY400  # a traceback is no use to an operator: the error's text says what failed
            outcome = Outcome(key, None, str(error), type(error).__name__, **details)
        return await _report(context, attrs.asdict(outcome))


def _renewed(context: Context) -> contextlib.AbstractAsyncContextManager[None]:
    """Keep the task's message from other workers during the block."""
    broker = context.broker
    if isinstance(broker, _StreamBroker):
        return broker.renewed(context.message.labels[_ENTRY_LABEL])
    return contextlib.nullcontext()


async def _report(context: Context, value: dict[str, Any]) -> dict[str, Any]:
    """Save the task's result, then acknowledge its message: Taskiq does it in the other order."""
    if context.is_ackable:
        labels = context.message.labels
        result: TaskiqResult[Any] = TaskiqResult(is_err=False, return_value=value, execution_time=0.0, labels=labels)
        try:
            await context.broker.result_backend.set_result(context.message.task_id, result)
            await context.ack()
        except Exception:
            log.warning("a result could not be reported: the message is handled again later")
            raise NoResultError from None
    return value


# Events


class TaskFailed(Exception):
    """The attempt failed in its worker. If the error is ``client_wide``, the attempt is not counted."""

    def __init__(self, text: str, client_wide: bool) -> None:
        super().__init__(text)
        self.client_wide = client_wide


def event_task(broker: Any, inbox: Inbox, pattern: str) -> Callable[[H], H]:
    """Register a handler that Taskiq workers call, instead of the process that runs the inbox. ::

        broker = redis_streams("redis://...", queue="signing-events")
        inbox = PostgresInbox("postgresql://...")

        @event_task(broker, inbox, "signing.completed")
        async def archive(event: Event) -> None: ...

    Start workers with ``taskiq worker tasks:broker``; they read events from the inbox, and close it when they stop. The
    process that runs the inbox enqueues a message with the event's id, and waits until the task has ended, at most for
    the inbox's ``handler_timeout``. The event is then recorded as handled, dropped or to be retried, as if the handler
    had been called there. A message of an attempt that is over is dropped.
    """

    def register(handler: H) -> H:
        async def work(event_id: str, fence: int | None, context: Context = _CONTEXT) -> dict[str, Any]:
            async with _renewed(context):
                return await _report(context, await _run_handler(inbox, handler, event_id, fence))

        async def enqueue_and_wait(event: Event) -> None:
            stored = await inbox.get(event.key)
            assert stored is not None
            enqueued = await _call(task.kiq(event.key, stored.fence))

            async def end_of_task() -> dict[str, Any] | None:
                result = await _read_result(enqueued)
                # A task that was interrupted is delivered again.
                return None if result is None or result.is_err else result.return_value

            match await _poll(end_of_task, _POLL):
                case {"end": "dropped", "text": text}:
                    raise Drop(text)
                case {"end": "later", "seconds": seconds, "text": text}:
                    raise RetryLater(seconds, text)
                case {"end": "failed", "text": text, "client_wide": client_wide}:
                    raise TaskFailed(text, client_wide)

        async def close(state: TaskiqState) -> None:
            await inbox.aclose()

        inbox.on(pattern)(enqueue_and_wait)
        task = broker.register_task(work, task_name=f"signing_async:event:{pattern}", ack_type="manual")
        broker.add_event_handler(TaskiqEvents.WORKER_SHUTDOWN, close)
        return handler

    return register


async def _run_handler(inbox: Inbox, handler: EventHandler, event_id: str, fence: int | None) -> dict[str, Any]:
    """Call the handler for the attempt with this fencing token, and return how it ended."""
    try:
        stored = await inbox.get(event_id)
        if stored is None or stored.status is not EventStatus.PENDING or stored.fence != fence:
            log.info("an attempt of event %s is over: its message is dropped", event_id)
            return {"end": "stale"}
        async with asyncio.timeout(inbox.handler_timeout):
            if iscoroutinefunction(handler):
                await handler(stored.event)
            elif isawaitable(result := await asyncio.to_thread(handler, stored.event)):
                await result
    except Drop as drop:
        return {"end": "dropped", "text": str(drop)}
    except RetryLater as later:
        return {"end": "later", "seconds": later.seconds, "text": later.reason}
    except Exception as error:
        log.warning("an attempt of event %s failed", event_id, exc_info=error)
        # The inbox does not count an attempt that failed with the worker's token or store.
        is_of_worker = getattr(error, "client_wide", False) or (isinstance(error, InboxError) and error.transient)
        return {"end": "failed", "text": f"{type(error).__name__}: {error}", "client_wide": bool(is_of_worker)}
    return {"end": "handled"}


# The broker


async def _call(call: Awaitable[Any]) -> Any:
    """Await a call to the broker. The error does not show the URL, which may hold a password."""
    task = await run_within(call, _TIMEOUT)
    error = task.exception() if task.done() else TimeoutError()
    if not isinstance(error, Exception):
        return task.result()
    cause = error.__cause__ if isinstance(error, TaskiqError) else None
    failure = cause if isinstance(cause, Exception) else error
    name, transient = type(failure).__name__, is_transient(failure)
    raise TransportError(f"the broker is unavailable ({name})", transient=transient, client_wide=True)


async def _read_result(task: Any) -> Any:
    """Return the result of an enqueued task; None if it has not ended."""
    return await _call(task.get_result()) if await _call(task.is_ready()) else None


async def _poll(read: Callable[[], Awaitable[T | None]], pause: float) -> T:
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


def redis_streams(url: str, *, queue: str = "signing-dispatch", redeliver_after: float = 60.0) -> Any:
    """Return a Taskiq broker in Redis Streams. It redelivers the messages of dead workers.

    A live worker keeps its messages, however long a package takes. If a worker dies, or is paused for
    ``redeliver_after`` seconds, another worker gets them. Outcomes are kept for a day.
    """
    for name, value in (("url", url), ("queue", queue)):
        _checks.string(name, value)
    _checks.number("redeliver_after", redeliver_after, above=0)
    # This only checks the URL, and its error does not show the password.
    Connection(url, _TIMEOUT, ValueError)
    bounds: dict[str, Any] = {
        "socket_connect_timeout": _TIMEOUT,
        "socket_timeout": _BLOCK + _TIMEOUT,
        # By default redis-py retries for a quarter of a minute.
        "retry": Retry(NoBackoff(), 0),
    }
    streams = _StreamBroker(
        url,
        queue_name=queue,
        consumer_group_name=queue,
        # All workers share a consumer name: redelivery depends on a message's idle time, not on its consumer.
        consumer_name=queue,
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
                    names = self.queue_name, self.consumer_group_name, self.consumer_name
                    await redis.xclaim(*names, min_idle_time=0, message_ids=[entry], justid=True)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        is_lost = False
        while True:
            try:
                if is_lost:
                    # Redis may have lost its data.
                    await self._declare_consumer_group()
                found = await self._read()
            except (RedisError, OSError) as error:
                if not is_lost:
                    # Without a traceback, which may show the URL with its password.
                    log.warning("the broker is unavailable, retrying: %s", type(error).__name__)
                is_lost = True
                await asyncio.sleep(_BLOCK)
                continue
            if is_lost:
                log.info("the broker is available again")
                is_lost = False
            for entry, fields in found:
                ack = self._ack_generator(entry, self.queue_name)
                yield AckableMessage(data=self._add_entry_label(entry, fields), ack=ack)

    async def _read(self) -> list[tuple[Any, Any]]:
        """Return one message: abandoned by a worker, or new."""
        place = self.queue_name, self.consumer_group_name
        async with Redis(connection_pool=self.connection_pool) as redis:
            idle = await redis.xpending_range(*place, "-", "+", 1, idle=self.idle_timeout)
            if idle:
                ids: Any = [idle[0]["message_id"]]
                claimed: Any = await redis.xclaim(*place, self.consumer_name, self.idle_timeout, ids)
                # Up to Redis 6.2, a message that was deleted from the stream is claimed without fields.
                return [(entry, fields) for entry, fields in claimed if fields]
            response: Any = await redis.xreadgroup(
                self.consumer_group_name, self.consumer_name, {self.queue_name: ">"}, count=1, block=self.block
            )
        return [entry for _, entries in response or [] for entry in entries]

    def _add_entry_label(self, entry: Any, fields: dict[Any, Any]) -> bytes:
        """Return the message with the id of its stream entry as a label."""
        data: bytes = fields.get(b"data", b"")
        try:
            message = self.formatter.loads(data)
        except Exception:
            return data  # Taskiq logs that this is no message, and acknowledges it.
        message.labels[_ENTRY_LABEL] = entry.decode()
        return self.formatter.dumps(message).message

    def _ack_generator(self, id: Any, queue_name: str) -> Callable[[], Awaitable[None]]:
        async def ack() -> None:
            async with Redis(connection_pool=self.connection_pool) as redis, redis.pipeline() as pipeline:
                pipeline.xack(queue_name, self.consumer_group_name, id)
                pipeline.xdel(queue_name, id)
                await pipeline.execute()

        return ack
