"""A thread with an event loop and a store, for callers without an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

from ..errors import InboxError
from ..webhooks.event import Event
from ..webhooks.event_store import EventStore

__all__ = ["StoreThread"]


class StoreThread:
    """The thread of one store. It starts at the first `add`, and again in a forked child."""

    def __init__(self, open_store: Callable[[], EventStore], name: str) -> None:
        self._open_store = open_store
        self._name = name
        self._closed = False
        self._lock = threading.Lock()
        self._process = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._store: EventStore | None = None

    def add(self, event: Event, body: bytes) -> bool:
        with self._lock:  # `close` waits for what was submitted before it
            if self._closed:
                raise InboxError(f"{self._name} is closed", transient=False)
            loop, store = self._start()
            adding = asyncio.run_coroutine_threadsafe(store.add(event, body), loop)
        return adding.result()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
            if loop is None or self._process != os.getpid():
                return
            assert self._store is not None
            asyncio.run_coroutine_threadsafe(self._store.aclose(), loop).result()
            loop.call_soon_threadsafe(loop.stop)

    def _start(self) -> tuple[asyncio.AbstractEventLoop, EventStore]:
        # A forked child has the objects of its parent, but not its thread.
        if self._loop is None or self._store is None or self._process != os.getpid():
            self._loop, self._store, self._process = asyncio.new_event_loop(), self._open_store(), os.getpid()
            threading.Thread(target=_run, args=(self._loop,), name="signing-inbox", daemon=True).start()
        return self._loop, self._store


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
