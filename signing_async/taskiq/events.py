"""Handle an inbox's events in Taskiq workers: the inbox records an event as handled when its task has ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from typing import Any, TypeVar

from taskiq import Context, TaskiqDepends, TaskiqEvents, TaskiqState
from taskiq.exceptions import NoResultError

from ..errors import SigningError
from ..webhooks import Drop, Event, EventFilter, EventStatus, Inbox, RetryLater, StoredEvent
from ..webhooks.inbox import EventHandler
from .streams import call_broker, hold_message, poll_broker, report, should_redeliver

__all__ = ["event_task"]

log: logging.Logger = logging.getLogger("signing_async")

H = TypeVar("H", bound=EventHandler)

_POLL = 0.1
_CONTEXT: Any = TaskiqDepends()


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
    name = f"signing_async:event:{pattern}"

    def register(handler: H) -> H:
        async def work(event_id: str, fence: int | None, context: Context = _CONTEXT) -> dict[str, Any]:
            async with hold_message(context):
                return await _work(inbox, handler, event_id, fence, context)

        async def enqueue_and_wait(event: Event) -> None:
            stored = await inbox.get(event.id)
            assert stored is not None
            enqueued = await call_broker(task.kiq(event.id, stored.fence))
            _raise_end(await poll_broker(partial(_end_of, enqueued), _POLL))

        async def close(state: TaskiqState) -> None:
            await inbox.aclose()

        inbox.on(pattern)(enqueue_and_wait)
        task = broker.register_task(work, task_name=name, ack_type="manual")
        broker.add_event_handler(TaskiqEvents.WORKER_SHUTDOWN, close)
        return handler

    return register


# In the process that runs the inbox


async def _end_of(enqueued: Any) -> dict[str, Any] | None:
    """Return how a task ended; None if it has not ended, or was interrupted and is delivered again."""
    if not await call_broker(enqueued.is_ready()):
        return None
    result = await call_broker(enqueued.get_result())
    return None if result.is_err else result.return_value


def _raise_end(end: dict[str, Any]) -> None:
    """Raise what the handler raised."""
    match end:
        case {"end": "dropped", "text": text}:
            raise Drop(text)
        case {"end": "later", "seconds": seconds, "text": text}:
            raise RetryLater(seconds, text)
        case {"end": "failed", "text": text}:
            # A worker of an older version does not say whether the error is client-wide.
            raise TaskFailed(text, end.get("client_wide", False))


# In a worker


async def _work(
    inbox: Inbox, handler: EventHandler, event_id: str, fence: int | None, context: Context
) -> dict[str, Any]:
    began = time.monotonic()
    try:
        stored = await _find_attempt(inbox, event_id, fence)
    except SigningError as error:
        log.warning("event %s cannot be read: %s", event_id, error)
        # The inbox does not count an attempt that may succeed later or in another worker.
        end = _failed(error, client_wide=should_redeliver(error))
    else:
        if stored is None:
            log.info("an attempt of event %s is over: its message is dropped", event_id)
            end = {"end": "stale"}
        else:
            end = await _call(handler, stored, inbox.handler_timeout)
    if context.is_ackable and not await report(end, time.monotonic() - began, context):
        log.warning("the end of event %s could not be reported: it is handled again", event_id)
        raise NoResultError
    return end


async def _find_attempt(inbox: Inbox, event_id: str, fence: int | None) -> StoredEvent | None:
    """Return the event; None if the attempt with this fencing token is over."""
    async for stored in inbox.store.select(EventFilter(ids=[event_id], status=EventStatus.PENDING)):
        # Decrypted only here: a message whose attempt is over is dropped even if this worker lacks the key.
        return inbox.decrypt(stored) if stored.fence == fence else None
    return None


async def _call(handler: EventHandler, stored: StoredEvent, timeout: float) -> dict[str, Any]:
    """Call the handler, and return how it ended."""
    try:
        async with asyncio.timeout(timeout):
            if iscoroutinefunction(handler):
                await handler(stored.event)
            elif isawaitable(result := await asyncio.to_thread(handler, stored.event)):
                await result
    except Drop as drop:
        return {"end": "dropped", "text": str(drop)}
    except RetryLater as later:
        return {"end": "later", "seconds": later.seconds, "text": later.reason}
    except Exception as error:
        log.warning("the handler of event %s failed", stored.id, exc_info=error)
        return _failed(error, client_wide=bool(getattr(error, "client_wide", False)))
    return {"end": "handled"}


def _failed(error: Exception, *, client_wide: bool) -> dict[str, Any]:
    return {"end": "failed", "text": f"{type(error).__name__}: {error}", "client_wide": client_wide}
