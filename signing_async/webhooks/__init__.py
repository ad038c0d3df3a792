"""Webhooks: verify, parse, diagnose and receive deliveries, with the standard library alone.

::

    from signing_async.webhooks import WebhookVerifier

    event = WebhookVerifier(secret).parse(body, request.headers.get("X-Signature"))

A `Receiver` does the rest (limits, deduplication, a 202 only after the event is safe) behind aiohttp, Starlette,
FastAPI, Flask or Django. An `Inbox` stores events durably and calls typed handlers, with retries. A framework is
imported only when its adapter is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import InvalidSignature, MalformedEvent, WebhookError
from .event import Event
from .scheme import GITHUB, SLACK, STANDARD_WEBHOOKS, STRIPE, SVIX, Scheme, sign
from .verifier import WebhookVerifier

if TYPE_CHECKING:
    from .adapters import aiohttp_handler, asgi_app, django_view, wsgi_app
    from .doctor import Diagnosis, diagnose
    from .event_store import EventClaim, EventFilter, EventStatus, EventStore, InboxStats, StoredEvent
    from .inbox import Drop, HandlerRetryPolicy, Inbox, RetryLater
    from .receiver import Decision, Receiver, decide
    from .seen import Claim, MemorySeenEvents, SeenEvents, SQLiteSeenEvents
    from .wakeups import Wakeups

__all__ = [
    "GITHUB",
    "SLACK",
    "STANDARD_WEBHOOKS",
    "STRIPE",
    "SVIX",
    "Claim",
    "Decision",
    "Diagnosis",
    "Drop",
    "Event",
    "EventClaim",
    "EventFilter",
    "EventStatus",
    "EventStore",
    "HandlerRetryPolicy",
    "Inbox",
    "InboxStats",
    "InvalidSignature",
    "MalformedEvent",
    "MemorySeenEvents",
    "Receiver",
    "RetryLater",
    "SQLiteSeenEvents",
    "Scheme",
    "SeenEvents",
    "StoredEvent",
    "Wakeups",
    "WebhookError",
    "WebhookVerifier",
    "aiohttp_handler",
    "asgi_app",
    "decide",
    "diagnose",
    "django_view",
    "sign",
    "wsgi_app",
]

_MODULES = {
    "Claim": "seen",
    "Decision": "receiver",
    "Diagnosis": "doctor",
    "Drop": "inbox",
    "EventClaim": "event_store",
    "EventFilter": "event_store",
    "EventStatus": "event_store",
    "EventStore": "event_store",
    "HandlerRetryPolicy": "inbox",
    "Inbox": "inbox",
    "InboxStats": "event_store",
    "MemorySeenEvents": "seen",
    "Receiver": "receiver",
    "RetryLater": "inbox",
    "SQLiteSeenEvents": "seen",
    "SeenEvents": "seen",
    "StoredEvent": "event_store",
    "Wakeups": "wakeups",
    "aiohttp_handler": "adapters",
    "asgi_app": "adapters",
    "decide": "receiver",
    "diagnose": "doctor",
    "django_view": "adapters",
    "wsgi_app": "adapters",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
