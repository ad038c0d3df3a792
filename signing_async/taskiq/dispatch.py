"""Dispatch by Taskiq workers: one task is one package, and the journal prevents a second send."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
from taskiq import Context, TaskiqDepends, TaskiqEvents, TaskiqState
from taskiq.exceptions import NoResultError

from .. import _checks
from ..assumptions import Assumptions
from ..client import SigningClient
from ..dispatch.journal import Journal, SqliteJournal
from ..dispatch.package import Prepared, prepare
from ..dispatch.run import NewRecipient, SigningPackage
from ..documents.source import PdfSource
from ..errors import (
    ConfigurationError,
    InvalidRequest,
    OutcomeUnknown,
    SigningError,
    TransportError,
    WaitTimeout,
)
from ..models import Signing
from .streams import call_broker, hold_message, poll_broker, redis_streams, report, should_redeliver

__all__ = ["Enqueued", "Outcome", "add_dispatch", "broker", "enqueuing"]

log: logging.Logger = logging.getLogger("signing_async")

_TASK = "signing_async:dispatch"
_VERSION = 1
_CONTEXT: Any = TaskiqDepends()
_FACTS = ("effect", "transient", "exit_code")


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
        """Return the outcome, or None if no worker has reported it yet. Outcomes are kept for a day.

        Raise `TransportError` if the broker is unavailable. Its ``effect`` is ``"unknown"``: the package may be sent.
        """
        try:
            if not await call_broker(self._task.is_ready()):
                return None
            result = await call_broker(self._task.get_result())
        except TransportError as error:
            if not error.transient:
                error.message += ": the package may still be sent"
            error.effect = "unknown"
            raise
        if result.is_err:
            # The task itself was interrupted, for example cancelled: its message is delivered again.
            unknown = OutcomeUnknown(str(result.error))
            unknown.transient = True
            return attrs.evolve(Outcome.of_error(self.key, unknown), kind=type(result.error).__name__)
        return Outcome(**result.return_value)

    async def wait(self, poll: float = 0.5, timeout: float | None = None) -> Outcome:
        """Return the outcome as soon as a worker reports it; raise `WaitTimeout` after ``timeout`` seconds.

        Asks the broker every ``poll`` seconds, also during an outage. Without a ``timeout``, and without workers,
        this waits forever.
        """
        if timeout is not None:
            _checks.number("timeout", timeout, above=0)
        try:
            async with asyncio.timeout(timeout):
                return await poll_broker(self.outcome, poll)
        except TimeoutError:
            message = f"no worker reported on package {self.key!r} within {timeout:g} s: it may still be sent"
        timed_out = WaitTimeout(message)
        timed_out.effect = "unknown"
        raise timed_out


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
        prepared = await prepare(package, max_bytes)
        try:
            message = _message(prepared)
        finally:
            prepared.close()
        try:
            return Enqueued(prepared.key, await call_broker(task.kiq(message)))
        except TransportError as error:
            if error.transient:
                error.effect = "unknown"
            raise

    await call_broker(broker.startup())
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
        "documents": [_document(number, document.source) for number, document in enumerate(prepared.documents)],
        "recipients": [{**one, "signing_method": str(one["signing_method"])} for one in prepared.recipients],
    }


def _document(number: int, source: PdfSource) -> dict[str, Any]:
    path = source.source
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise InvalidRequest(
            f"documents[{number}]: must be a path that the workers can read, got {type(path).__name__}"
        )
    return {"path": str(Path(path).absolute()), "filename": source.filename, "sha256": source.sha256}


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
    from ..settings import Settings

    settings = Settings.load()
    url, place, auth = settings.broker, settings.journal, settings.auth()
    for name, value in (("SIGNING_BROKER", url), ("SIGNING_JOURNAL", place)):
        if not value:
            raise ConfigurationError(f"{name} is not set")

    def client() -> SigningClient:
        return SigningClient(
            settings.origin,
            auth,
            retry=settings.retry,
            timeout=settings.timeouts,
            assumptions=settings.assumptions,
            telemetry=settings.telemetry,
        )

    return add_dispatch(redis_streams(str(url)), client=client, journal=lambda: _journal(place))


def _journal(place: Any) -> Journal:
    if isinstance(place, Path):
        return SqliteJournal(place)
    from ..postgres import PostgresJournal

    return PostgresJournal(place)


async def _dispatch(message: dict[str, Any], context: Context = _CONTEXT) -> dict[str, Any]:
    """Send one package: the task of a worker."""
    async with hold_message(context):
        return await _dispatch_one(message, context)


async def _dispatch_one(message: dict[str, Any], context: Context) -> dict[str, Any]:
    key, began = str(message.get("key")), time.monotonic()
    result = await _attempt(message, context.state)
    if isinstance(result, Signing):
        outcome = attrs.asdict(Outcome(key, result.id, None, None))
    elif should_redeliver(result):
        log.warning("package %r is retried later: %s", key, result)
        # Not acknowledged, so delivered again.
        raise NoResultError
    else:
        log.error("package %r failed: %s", key, result)
        outcome = attrs.asdict(Outcome.of_error(key, result))
    if context.is_ackable and not await report(outcome, time.monotonic() - began, context):
        log.warning("the outcome of package %r could not be reported: the message is handled again later", key)
        raise NoResultError
    return outcome


async def _attempt(message: dict[str, Any], state: TaskiqState) -> Signing | Exception:
    try:
        signing: Signing = await state.signing_client.dispatch(_decode_package(message), state.signing_journal)
    except Exception as error:
        return error
    return signing


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
