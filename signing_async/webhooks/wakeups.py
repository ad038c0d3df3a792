"""Wake-ups: a receiver tells everybody who waits that now is a good time to look."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .event import Event


class Wakeups:
    """Fans events out to waiters; a hand-off for a receiver, or a part of one.

    ``publish`` may be called from any thread. A waiter holds on to a subscription, so that an event between two waits
    is not missed, and keeps polling slowly: a wake-up only says *look now*, and a lost one costs the time to the next
    poll::

        with wakeups.subscribe(signing_id) as woken:
            while not (signing := await client.signings.get(signing_id)).is_completed:
                await woken.wait(timeout=30)

    An event whose payload mentions the subject of some subscription wakes those alone; one that mentions none of them
    wakes all, since a payload need not name its signing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: set[Subscription] = set()

    def publish(self, event: Event) -> None:
        """Wake whom the event may concern."""
        with self._lock:
            everybody = list(self._subscriptions)
        mentioned = _texts(event.payload)
        named = [one for one in everybody if one.subject in mentioned]
        for subscription in named or everybody:
            subscription.wake()

    @contextmanager
    def subscribe(self, subject: str | None = None) -> Iterator[Subscription]:
        """Listen until the block is left, in a running event loop; ``subject`` is an id that an event may mention."""
        subscription = Subscription(subject, asyncio.get_running_loop())
        with self._lock:
            self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            with self._lock:
                self._subscriptions.discard(subscription)

    async def wait(self, timeout: float | None = None, *, subject: str | None = None) -> bool:
        """Wait for the next event; False when ``timeout`` seconds passed without one."""
        with self.subscribe(subject) as woken:
            return await woken.wait(timeout)


class Subscription:
    """One waiter's latch: any number of wake-ups since the last wait count as one."""

    def __init__(self, subject: str | None, loop: asyncio.AbstractEventLoop) -> None:
        self.subject = subject
        self._loop = loop
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """End the current wait, or the next one at once; from any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._woken.set)

    async def wait(self, timeout: float | None = None) -> bool:
        """True as soon as there was a wake-up since the last wait; False when ``timeout`` seconds passed first."""
        try:
            async with asyncio.timeout(timeout):
                await self._woken.wait()
        except TimeoutError:
            return False
        self._woken.clear()
        return True


def _texts(payload: Any) -> set[str]:
    texts: set[str] = set()
    rest = [payload]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            texts.add(value)
        elif isinstance(value, dict):
            rest.extend(value.values())
        elif isinstance(value, list):
            rest.extend(value)
    return texts
