"""Wake-ups: notify pollers that an event arrived, so that they poll now."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .event import Event


class Wakeups:
    """Fans events out to waiters. ``publish`` is a handler for a `Receiver`, or part of one.

    ``publish`` may be called from any thread. A subscription keeps the wake-ups between two waits. A wake-up only means
    *poll now*: keep polling slowly, and a lost one costs the time until the next poll::

        with wakeups.subscribe(signing_id) as subscription:
            while not (signing := await client.signings.get(signing_id)).is_completed:
                await subscription.wait(timeout=30)

    If the payload mentions the subject of a subscription, only the subscriptions it mentions wake up, and those without
    a subject. Otherwise all wake up, because a payload need not name its signing.
    """

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()

    def publish(self, event: Event) -> None:
        """Wake the subscriptions that the event may concern."""
        everyone = list(self._subscriptions)  # atomic: other threads subscribe meanwhile
        texts = set(_texts(event.payload))
        is_mentioned = any(subscription.subject in texts for subscription in everyone)
        for subscription in everyone:
            if not is_mentioned or subscription.subject is None or subscription.subject in texts:
                subscription.wake(event.signing_id)

    @contextmanager
    def subscribe(self, subject: str | None = None) -> Iterator[Subscription]:
        """Subscribe for the duration of the block. ``subject`` is an id that an event may mention."""
        subscription = Subscription(subject, asyncio.get_running_loop())
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    async def wait(self, timeout: float | None = None, *, subject: str | None = None) -> bool:
        """Wait for the next event. Return False if ``timeout`` seconds pass without one."""
        with self.subscribe(subject) as subscription:
            return await subscription.wait(timeout)


class Subscription:
    """One waiter's latch: all wake-ups since the last wait count as one."""

    def __init__(self, subject: str | None, loop: asyncio.AbstractEventLoop) -> None:
        self.subject = subject
        self.signings: frozenset[str | None] = frozenset()
        """The signing ids of the events that ended the last wait; None stands for an event without one."""
        self._events: set[str | None] = set()
        self._loop = loop
        self._woken = asyncio.Event()

    def wake(self, signing_id: str | None = None) -> None:
        """End the current wait, or the next one at once; from any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody is waiting
            self._loop.call_soon_threadsafe(self._wake, signing_id)

    def _wake(self, signing_id: str | None) -> None:
        self._events.add(signing_id)
        self._woken.set()

    async def wait(self, timeout: float | None = None) -> bool:
        """Return True once there was a wake-up since the last wait, or False after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._woken.wait()
        except TimeoutError:
            return False
        self._woken.clear()
        self.signings = frozenset(self._events)
        self._events.clear()
        return True


def _texts(payload: Any) -> Iterator[str]:
    if isinstance(payload, str):
        yield payload
    elif isinstance(payload, dict | list):
        for value in payload.values() if isinstance(payload, dict) else payload:
            yield from _texts(value)
