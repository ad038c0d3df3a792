"""Dispatch by workers on many machines, through Taskiq: one task is one package, and the journal sends each once.

Workers are started with Taskiq's own command. With Redis Streams, all of it may come from the environment: the broker
from ``SIGNING_BROKER`` (``redis://...``), the journal from ``SIGNING_JOURNAL`` (``postgresql://...``), and the client
from the settings that every client has::

    taskiq worker --max-async-tasks 8 signing_async.taskiq:broker

Or for any broker of Taskiq's, in a module of the application's::

    broker = add_dispatch(redis_streams("redis://..."), client=make_client, journal=make_journal)

so also where workers on several machines use one OAuth token: then the client's `OAuth` needs a `PostgresTokenStore` or
a `RedisTokenStore`, since the environment's token file is one machine's.

A message carries a package's fields, and of each document its path and hash: workers read it from storage that they
share with whoever enqueues, and refuse one that they cannot read, or that has other content. It is acknowledged when
its package is sent, or has failed for good. One of a worker that died, or that failed for a passing reason (the
service, the journal or the token cannot be reached), is delivered again. So a package may well come twice: then the
journal tells that it was sent, or that another worker has it, which is waited for.
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
    AuthError,
    ClientClosed,
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
_ANSWER = 2.0
_FROM_THE_FIRST = (b"0-0", "0-0")
_ENTRY = "signing_async:entry"
# Deleting a consumer takes its pending messages along, so both happen in one step.
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
# A client that is closed, or needs a new login, concerns the worker: the message waits.
_OF_THE_WORKER = (AuthError, ClientClosed)


@attrs.frozen
class Outcome:
    """What came of a package, as its worker tells it; the journal tells more."""

    key: str
    signing: str | None
    """The id of the signing that was sent."""
    error: str | None
    kind: str | None
    """The name of the error's class."""
    effect: str = "none"
    """The error's ``effect``: ``"unknown"`` if the package may have been sent all the same."""


class Enqueued:
    """A package on its way to a worker, under its key in the journal."""

    def __init__(self, key: str, task: Any) -> None:
        self.key = key
        self._task = task

    def __repr__(self) -> str:
        return f"Enqueued({self.key!r})"

    async def outcome(self) -> Outcome | None:
        """What came of it; None as long as no worker has told. It can be asked for a day."""
        if not await _reached(self._task.is_ready()):
            return None
        result = await _reached(self._task.get_result())
        if result.is_err:
            return Outcome(self.key, None, str(result.error), type(result.error).__name__)
        return Outcome(**result.return_value)

    async def wait(self, poll: float = 0.5, timeout: float | None = None) -> Outcome:
        """What came of it, as soon as a worker tells; `WaitTimeout` if none does within ``timeout`` seconds.

        It is asked for every ``poll`` seconds. Without a ``timeout`` that has no end where there are no workers.
        """
        if timeout is not None:
            _checks.seconds("Enqueued.wait", "timeout", timeout)
        try:
            async with asyncio.timeout(timeout):
                while (outcome := await self.outcome()) is None:
                    await asyncio.sleep(poll)
                return outcome
        except TimeoutError:
            words = f"no worker has told of package {self.key!r} within {timeout:g} s: it may be sent later"
        raise WaitTimeout(words)


# Whoever enqueues


@contextlib.asynccontextmanager
async def enqueuing(
    broker: Any, *, max_pdf_bytes: int | None = None
) -> AsyncIterator[Callable[[SigningPackage], Awaitable[Enqueued]]]:
    """Give packages to workers. ::

        async with enqueuing(redis_streams("redis://...")) as enqueue:
            enqueued = await enqueue(package)
            outcome = await enqueued.wait()

    Each is checked first; its documents have to be paths, which lead to the same files wherever the workers run. One
    that is enqueued again is not sent again.
    """
    most = Assumptions().max_pdf_bytes if max_pdf_bytes is None else max_pdf_bytes
    task = broker.find_task(_TASK) or broker.register_task(_dispatch, task_name=_TASK, ack_type="manual")

    async def enqueue(package: SigningPackage) -> Enqueued:
        prepared = await prepare(package, most)
        try:
            message = _message(prepared)
        finally:
            prepared.close()
        return Enqueued(prepared.key, await _reached(task.kiq(message)))

    await _reached(broker.startup())
    try:
        yield enqueue
    finally:
        try:
            await broker.shutdown()
        except Exception as error:
            log.warning("the broker was not closed as it should be: %s", type(error).__name__)


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
        words = f"documents[{number}]: must be a path that the workers can read, not {type(path).__name__}"
        raise InvalidRequest(words)
    return {"path": str(Path(path).absolute()), "filename": source.filename, "sha256": source.sha256}


async def _reached(step: Awaitable[Any]) -> Any:
    """What came of a step with the broker; what goes wrong is told without the URL, which may hold a password."""
    try:
        async with asyncio.timeout(_ANSWER):
            return await step
    except Exception as error:
        problem = type(error.__cause__ or error).__name__
    raise TransportError(f"the broker cannot be reached ({problem})")


# Workers


def add_dispatch(broker: Any, *, client: Callable[[], SigningClient], journal: Callable[[], Journal]) -> Any:
    """Have workers of this `taskiq.AsyncBroker` send packages; the broker is returned.

    ``client`` and ``journal`` make what a worker works with, when it starts; it closes both when it stops. What else
    they need, such as a token store, is closed by a handler of the broker's own ``WORKER_SHUTDOWN``.
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
    """Redis Streams, a client and a journal by the settings: ``taskiq worker signing_async.taskiq:broker``."""
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
    """The task of a worker: one package."""
    if not isinstance(context.broker, _Streams):
        return await _dispatch_one(message, context)
    async with context.broker.keeping(context.message.labels[_ENTRY]):
        return await _dispatch_one(message, context)


async def _dispatch_one(message: dict[str, Any], context: Context) -> dict[str, Any]:
    key, began = str(message.get("key")), time.monotonic()
    sent = await _sent(message, context.state)
    if isinstance(sent, Signing):
        outcome = Outcome(key, sent.id, None, None)
    elif _is_passing(sent):
        log.warning("package %r is left for later: %s", key, sent)
        # Not acknowledged, and so delivered again.
        raise NoResultError
    else:
        log.error("package %r has failed: %s", key, sent)
        effect = sent.effect if isinstance(sent, SigningError) else "none"
        outcome = Outcome(key, None, str(sent), type(sent).__name__, effect)
    told = attrs.asdict(outcome)
    if context.is_ackable and not await _told(told, time.monotonic() - began, context):
        log.warning("what came of package %r could not be told: it is done again later", key)
        raise NoResultError
    return told


async def _told(told: dict[str, Any], took: float, context: Context) -> bool:
    """Save what came of a package, and only then acknowledge its message; whether both went well.

    Taskiq itself would save it afterwards: of a worker that dies in between nobody would ever hear.
    """
    result: TaskiqResult[Any] = TaskiqResult(
        is_err=False, return_value=told, execution_time=round(took, 2), labels=context.message.labels
    )
    with contextlib.suppress(Exception):
        await context.broker.result_backend.set_result(context.message.task_id, result)
        await context.ack()
        return True
    return False


async def _sent(message: dict[str, Any], state: TaskiqState) -> Signing | Exception:
    sent = await _tried(message, state)
    if isinstance(sent, SigningError) and sent.effect == "unknown" and not _is_passing(sent):
        # With what the journal knows by now another try can mostly tell. What it cannot tell either is for a person.
        sent = await _tried(message, state)
    return sent


async def _tried(message: dict[str, Any], state: TaskiqState) -> Signing | Exception:
    try:
        signing: Signing = await state.signing_client.dispatch(_read(message), state.signing_journal)
    except Exception as error:
        return error
    return signing


def _is_passing(error: Exception) -> bool:
    """Return whether the same message may succeed later."""
    return isinstance(error, _OF_THE_WORKER) or (isinstance(error, SigningError) and error.transient)


def _read(message: dict[str, Any]) -> SigningPackage:
    if message.get("version") != _VERSION:
        raise InvalidRequest(f"the message is of version {message.get('version')!r}, this worker knows {_VERSION}")
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
    """A broker of Taskiq's in Redis Streams, that gives a message to another worker after ``redeliver_after`` seconds.

    A worker that is alive keeps its messages, however long a package takes: only one that died or stands still for so
    long loses them. Outcomes are kept for a day.
    """
    _checks.text("redis_streams", "url", url)
    _checks.text("redis_streams", "queue", queue)
    _checks.seconds("redis_streams", "redeliver_after", redeliver_after)
    # It is not connected to: this refuses a URL that cannot be used, without showing its password.
    Connection(url, _ANSWER)
    # redis-py would try again for a quarter of a minute.
    bounds: dict[str, Any] = {
        "socket_connect_timeout": _ANSWER,
        "socket_timeout": _BLOCK + _ANSWER,
        "retry": Retry(NoBackoff(), 0),
    }
    streams = _Streams(
        url,
        queue_name=queue,
        consumer_group_name=queue,
        # From the first message on, also where that came before the first worker.
        consumer_id="0",
        idle_timeout=max(1, round(redeliver_after * 1000)),
        xread_block=int(_BLOCK * 1000),
        **bounds,
    )
    results: Any = RedisAsyncResultBackend(
        url, result_ex_time=_DAY, prefix_str=queue, serializer=JSONSerializer(), **bounds
    )
    return streams.with_result_backend(results)


class _Streams(RedisStreamBroker):
    """Taskiq's own looks for what others have left behind only after something new has come, and keeps all messages.

    This one looks all the time, takes a message only when it can be worked on, keeps it while it is worked on, deletes
    what was done, and outlives a Redis that was away.
    """

    @property
    def _consumer(self) -> str:
        return f"{socket.gethostname()}:{os.getpid()}:{self.consumer_name}"

    @contextlib.asynccontextmanager
    async def keeping(self, entry: str) -> AsyncIterator[None]:
        """Let no other worker get this message while the block runs."""
        done = asyncio.Event()
        renewing = asyncio.create_task(self._renew(entry, done))
        try:
            yield
        finally:
            # Not cancelled: a cancellation at the very end of a timeout of redis-py's is lost.
            done.set()
            await renewing

    async def _renew(self, entry: str, done: asyncio.Event) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.idle_timeout / 3000):
                    await done.wait()
                    return
            # Who cannot reach Redis may lose the message; then the journal tells that the package is worked on.
            with contextlib.suppress(RedisError, OSError):
                async with Redis(connection_pool=self.connection_pool) as redis:
                    # To claim it anew makes it look fresh; JUSTID does not count that as a delivery.
                    queue, group = self.queue_name, self.consumer_group_name
                    await redis.xclaim(queue, group, self._consumer, min_idle_time=0, message_ids=[entry], justid=True)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        consumer = self._consumer
        sweep = tidy = 0.0
        was_away = False
        while True:
            try:
                if was_away:
                    # It may have come back empty.
                    await self._declare_consumer_group()
                    was_away = False
                    log.info("the broker answers again")
                async with Redis(connection_pool=self.connection_pool) as redis:
                    if time.monotonic() >= tidy:
                        arguments = (self.consumer_group_name, str(self.idle_timeout))
                        await redis.eval(_DELETE_IDLE_CONSUMERS, 1, self.queue_name, *arguments)
                        tidy = time.monotonic() + self.idle_timeout / 1000
                    found = []
                    if time.monotonic() >= sweep:
                        found = await self._left_behind(redis, consumer)
                        # There may be more of it.
                        sweep = 0.0 if found else time.monotonic() + _BLOCK
                    found = found or await self._new(redis, consumer)
            except (RedisError, OSError) as error:
                if not was_away:
                    log.warning("the broker does not answer, it is asked again and again: %s", type(error).__name__)
                was_away = True
                await asyncio.sleep(_BLOCK)
                continue
            for number, fields in found:
                yield AckableMessage(
                    data=self._labelled(number, fields), ack=self._ack_generator(number, self.queue_name)
                )

    def _labelled(self, number: Any, fields: dict[Any, Any]) -> bytes:
        """The message, with its entry's number as a label."""
        data: bytes = fields.get(b"data", b"")
        try:
            message = self.formatter.loads(data)
        except Exception:
            return data  # Of what is no message Taskiq says so, and acknowledges it.
        message.labels[_ENTRY] = number.decode()
        return self.formatter.dumps(message).message

    async def _left_behind(self, redis: Any, consumer: str) -> list[tuple[Any, Any]]:
        # Redis looks at ten of those that are being worked on, and tells where to look on.
        start: Any = None
        found: list[tuple[Any, Any]] = []
        while start not in _FROM_THE_FIRST and not found:
            answer = await redis.xautoclaim(
                self.queue_name,
                self.consumer_group_name,
                consumer,
                min_idle_time=self.idle_timeout,
                start_id=start or _FROM_THE_FIRST[0],
                count=1,
            )
            start = answer[0]
            found = [(number, fields) for number, fields in answer[1] if fields]
        return found

    async def _new(self, redis: Any, consumer: str) -> list[tuple[Any, Any]]:
        answer = await redis.xreadgroup(
            self.consumer_group_name, consumer, {self.queue_name: ">"}, count=1, block=self.block
        )
        return [entry for _, entries in answer or [] for entry in entries]

    def _ack_generator(self, id: Any, queue_name: str) -> Callable[[], Awaitable[None]]:
        async def ack() -> None:
            async with Redis(connection_pool=self.connection_pool) as redis, redis.pipeline() as done:
                done.xack(queue_name, self.consumer_group_name, id)
                done.xdel(queue_name, id)
                await done.execute()

        return ack
