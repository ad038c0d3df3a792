"""Webhooks: verify, parse, diagnose and receive deliveries, with the standard library alone.

::

    from signing_async.webhooks import WebhookVerifier

    event = WebhookVerifier(secret).parse(body, request.headers.get("X-Signature"))

A `Receiver` does the rest (limits, deduplication, a 202 only after the event is safe) behind aiohttp, Starlette,
FastAPI, Flask or Django. An `Inbox` stores events durably and calls typed handlers, with retries. A framework is
imported only when its adapter is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ..errors import InvalidSignature as InvalidSignature
    from ..errors import MalformedEvent as MalformedEvent
    from ..errors import WebhookError as WebhookError
    from .adapters import aiohttp_handler as aiohttp_handler
    from .adapters import asgi_app as asgi_app
    from .adapters import django_view as django_view
    from .adapters import wsgi_app as wsgi_app
    from .doctor import Diagnosis as Diagnosis
    from .doctor import diagnose as diagnose
    from .event import Event as Event
    from .event_store import EventClaim as EventClaim
    from .event_store import EventFilter as EventFilter
    from .event_store import EventStatus as EventStatus
    from .event_store import EventStore as EventStore
    from .event_store import InboxStats as InboxStats
    from .event_store import StoredEvent as StoredEvent
    from .inbox import Drop as Drop
    from .inbox import HandlerRetryPolicy as HandlerRetryPolicy
    from .inbox import Inbox as Inbox
    from .inbox import RetryLater as RetryLater
    from .receiver import Decision as Decision
    from .receiver import Receiver as Receiver
    from .receiver import decide as decide
    from .scheme import GITHUB as GITHUB
    from .scheme import SLACK as SLACK
    from .scheme import STANDARD_WEBHOOKS as STANDARD_WEBHOOKS
    from .scheme import STRIPE as STRIPE
    from .scheme import SVIX as SVIX
    from .scheme import Scheme as Scheme
    from .scheme import sign as sign
    from .seen import Claim as Claim
    from .seen import MemorySeenEvents as MemorySeenEvents
    from .seen import SeenEvents as SeenEvents
    from .seen import SQLiteSeenEvents as SQLiteSeenEvents
    from .verifier import WebhookVerifier as WebhookVerifier
    from .wakeups import Wakeups as Wakeups
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "..errors": ("InvalidSignature", "MalformedEvent", "WebhookError"),
            ".adapters": ("aiohttp_handler", "asgi_app", "django_view", "wsgi_app"),
            ".doctor": ("Diagnosis", "diagnose"),
            ".event": ("Event",),
            ".event_store": ("EventClaim", "EventFilter", "EventStatus", "EventStore", "InboxStats", "StoredEvent"),
            ".inbox": ("Drop", "HandlerRetryPolicy", "Inbox", "RetryLater"),
            ".receiver": ("Decision", "Receiver", "decide"),
            ".scheme": ("GITHUB", "SLACK", "STANDARD_WEBHOOKS", "STRIPE", "SVIX", "Scheme", "sign"),
            ".seen": ("Claim", "MemorySeenEvents", "SQLiteSeenEvents", "SeenEvents"),
            ".verifier": ("WebhookVerifier",),
            ".wakeups": ("Wakeups",),
        },
    )
