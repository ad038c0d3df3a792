"""Dispatch by Taskiq workers on many machines: one task is one package, and the journal prevents a second send.

Start workers with Taskiq's own command. With Redis Streams, all settings may come from the environment: the broker from
``SIGNING_BROKER`` (``redis://...``), the journal from ``SIGNING_JOURNAL`` (``postgresql://...``), and the client from
the same settings as everywhere::

    taskiq worker --max-async-tasks 8 signing_async.taskiq:broker

Or use any Taskiq broker, in a module of your own::

    broker = add_dispatch(redis_streams("redis://..."), client=make_client, journal=make_journal)

Do this too if workers on several machines use one OAuth token: their `OAuth` needs a `PostgresTokenStore` or a
`RedisTokenStore`, because the environment's token file belongs to one machine.

A message carries a package's fields, and each document's path and hash: workers read documents from storage that they
share with the enqueuing process, and reject a document that is missing or has changed. A message is acknowledged when
its package has been sent, or has failed permanently. It is delivered again if its worker died, or if the failure was
transient (the service, the journal or the token is unavailable). A package may therefore be delivered twice: the
journal then says that it was sent, or that another worker has claimed it; the worker then waits.

Workers can also handle the events of an inbox: see `event_task`.
"""

from __future__ import annotations

try:
    from .dispatch import Enqueued, Outcome, add_dispatch, broker, enqueuing
    from .events import event_task
    from .streams import redis_streams
except ModuleNotFoundError as _missing:
    raise ModuleNotFoundError(
        f"signing_async.taskiq needs {_missing.name}: pip install 'signing-async[taskiq,postgres]'", name=_missing.name
    ) from None

__all__ = ["Enqueued", "Outcome", "add_dispatch", "broker", "enqueuing", "event_task", "redis_streams"]
