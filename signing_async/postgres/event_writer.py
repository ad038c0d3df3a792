"""Add events to a table, and commit concurrent ones together."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any

from ..errors import InboxError
from ..webhooks.event import Event
from .event_statements import PAGE

__all__ = ["EventWriter"]

_BATCH_BYTES = 8 * 1024 * 1024
"""The most bytes of bodies in a statement of several events: it has to end within the timeout."""
_Addition = tuple[Event, bytes, asyncio.Future[bool]]
"""An event, its body, and the future of the caller that adds it."""


class EventWriter:
    """Adds events, and commits concurrent ones together.

    ``insert`` takes the columns of several events, adds the events whose ids are new, and returns their rows.
    """

    def __init__(self, insert: Callable[..., Awaitable[Any]]) -> None:
        self._insert = insert
        self._adding: list[_Addition] = []
        self._writer: asyncio.Task[None] | None = None

    async def add(self, event: Event, body: bytes) -> bool:
        """Add an event; return False if its id is known."""
        added = asyncio.get_running_loop().create_future()
        self._adding.append((event, body, added))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_all(), name="signing_async events")
        stored: bool = await added
        return stored

    async def drain(self) -> None:
        """Wait until all events are written."""
        if self._writer is not None:
            await asyncio.wait([self._writer])

    async def _write_all(self) -> None:
        while self._adding:
            await self._write(self._next_batch())

    async def _write(self, batch: list[_Addition]) -> None:
        rows = [
            (one.key, one.type, one.signing_key, body, one.received_at, one.trace_context) for one, body, _ in batch
        ]
        columns = [list(column) for column in zip(*rows, strict=True)]
        failure, new = None, set()
        try:
            new = {row["id"] for row in await self._insert(*columns)}
        except Exception as error:
            if isinstance(error, InboxError) and not error.transient and len(batch) > 1:
                # The server may refuse only one of the events.
                for each in batch:
                    await self._write([each])
                return
            failure = error
            # In an outage, senders time out and deliver again: drop the additions whose senders are gone.
            self._adding = [each for each in self._adding if not each[2].done()]
        for event, _, added in batch:
            is_new = event.key in new
            new.discard(event.key)
            if added.done():
                continue  # the caller was cancelled
            if failure is None:
                added.set_result(is_new)
            else:
                added.set_exception(copy.copy(failure))

    def _next_batch(self) -> list[_Addition]:
        count = size = 0
        for _, body, _ in self._adding[:PAGE]:
            size += len(body)
            if count and size > _BATCH_BYTES:
                break
            count += 1
        batch, self._adding = self._adding[:count], self._adding[count:]
        return batch
