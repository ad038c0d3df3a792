"""Bounded concurrency over a stream of items, and the progress reporter of bulk operations."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext, suppress
from typing import Any, Generic, Self, TypeVar

import attrs

from . import _checks
from .errors import InvalidRequest, SigningError, amended

__all__ = ["Deferrals", "FileProgress", "Progress", "ProgressReporter", "Results", "copy_unsent", "iterate"]

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)

log: logging.Logger = logging.getLogger("signing_async")

_FIRST_PAUSE, _MAX_PAUSE = 0.05, 1.0
_TRIES_BEFORE_LOG = 4


def copy_unsent(error: SigningError) -> SigningError:
    """Return a copy of the error that ended a bulk operation, for an item for which nothing was sent."""
    # An unknown outcome concerns only its own item. If its cause is fatal, that is what ended the operation.
    while isinstance(error.__cause__, SigningError) and error.__cause__.fatal:
        error = error.__cause__
    # One copy per result: a shared exception would collect a traceback from each place that raises it.
    return amended(error, effect="none")


@attrs.frozen
class Progress:
    """The progress of a transfer. Totals are None while unknown. A retry first subtracts the bytes it sends again."""

    files_done: int
    files_total: int | None
    bytes_done: int
    bytes_total: int | None


class ProgressReporter:
    """Adds up the progress of files and calls ``on_progress`` after each change.

    If ``on_progress`` raises, the error is logged and ``on_progress`` is not called again.
    """

    def __init__(self, on_progress: Callable[[Progress], None] | None, files_total: int | None = None) -> None:
        if on_progress is not None and not callable(on_progress):
            raise InvalidRequest(f"on_progress: must be callable, got {on_progress!r}")
        self._on_progress = on_progress
        self.files_total: int | None = files_total
        self.bytes_total: int | None = None
        self._files_done = self._bytes_done = 0

    @property
    def enabled(self) -> bool:
        return self._on_progress is not None

    def add(self, files: int, size: int) -> None:
        """Count files and bytes, and report."""
        self._files_done += files
        self._bytes_done += size
        if self._on_progress is None:
            return
        try:
            self._on_progress(Progress(self._files_done, self.files_total, self._bytes_done, self.bytes_total))
        except Exception:
            log.exception("on_progress failed and is not called again")
            self._on_progress = None


class FileProgress:
    """Reports the progress of one file to a `ProgressReporter`; also the ``on_progress`` of that file's upload."""

    def __init__(self, reporter: ProgressReporter) -> None:
        self._reporter = reporter
        self._files_done = self._bytes_done = 0
        self.size: int | None = None

    def __call__(self, progress: Progress) -> None:
        self.update(progress.files_done, progress.bytes_done, progress.bytes_total)

    def update(self, files_done: int, bytes_done: int, size: int | None) -> None:
        """Report how much of the file, of this size, is done."""
        self.size = size
        if self._reporter.files_total == 1:
            self._reporter.bytes_total = size
        self._set(files_done, bytes_done)

    def restart(self) -> None:
        """Subtract all bytes: they are sent again."""
        self._set(0, 0)

    def finish(self, size: int | None) -> None:
        """Count the file as done with all of its bytes; with the bytes sent so far if its size is unknown."""
        self._set(1, self._bytes_done if size is None else size)

    def _set(self, files: int, size: int) -> None:
        more_files, more_bytes = files - self._files_done, size - self._bytes_done
        if more_files or more_bytes:
            self._files_done, self._bytes_done = files, size
            self._reporter.add(more_files, more_bytes)


class Deferrals:
    """The growing pauses of one item that another run is working on."""

    def __init__(self, item: str) -> None:
        self._item = item
        self._count = 0

    async def wait(self) -> None:
        """Wait before the next attempt."""
        delay = min(_FIRST_PAUSE * 2.0 ** min(self._count, 20), _MAX_PAUSE) * random.uniform(0.5, 1.0)
        self._count += 1
        if self._count == _TRIES_BEFORE_LOG:
            log.info("waiting for %s: another run is working on it", self._item)
        await asyncio.sleep(delay)


async def iterate(items: Iterable[T] | AsyncIterable[T]) -> AsyncGenerator[T, None]:
    """Yield the items of a plain or asynchronous iterable."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


class Results(Generic[R_co]):
    """The results of ``work`` on each of ``items``, in completion order: an async iterator and a context manager.

    Nothing happens before the first result is requested. Then up to ``concurrency`` items are worked on at once. An
    item is pulled only when a worker is free for it, and no more than ``2 * concurrency`` items ahead of the results
    taken: a slow consumer slows the work down. A plain iterable is iterated on the event loop and must not block.

    ``work`` returns errors of single items as results. If it raises, or ``items`` does, no more items are pulled; the
    work in progress is finished, its results are returned, and then the exception is raised. With ``flat``, ``work``
    returns any number of results, which are returned one by one.

    The work is cancelled by `aclose`, at the end of ``async with``, when the object is dropped (as by ``break`` in
    ``async for result in make_results()``), and when the task that takes the results is cancelled or fails. After a
    cancelled ``anext``, as in ``asyncio.wait_for(anext(results), 1)``, the next one raises a `RuntimeError`. To wait
    for a result with a timeout and then continue, keep the ``anext`` in a task and call
    ``asyncio.wait({task}, timeout=1)``.

    ``around`` is entered before the first item is pulled and left when all work has ended. If ``work`` or ``items``
    raised, it is left with that exception.
    """

    def __init__(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        work: Callable[[Any], Awaitable[Any]],
        concurrency: int,
        *,
        around: AbstractAsyncContextManager[object] | None = None,
        flat: bool = False,
    ) -> None:
        _checks.integer("concurrency", concurrency, error=InvalidRequest)
        # The tasks hold the pool and not this object, so that it is collected when the caller drops it.
        self._pool = _Pool(items, work, concurrency, around or nullcontext(), flat)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> R_co:
        result: R_co = await self._pool.take()
        return result

    async def aclose(self) -> None:
        """Cancel the work in progress and wait until it has ended."""
        await self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # The garbage collector may run in any thread, after a failed constructor, or after the loop was closed.
        pool = getattr(self, "_pool", None)
        if pool is not None and pool.task is not None and not pool.task.done():
            with suppress(RuntimeError):
                pool.task.get_loop().call_soon_threadsafe(pool.cancel)


@attrs.define(eq=False)
class _Pool:
    """The tasks behind a `Results`: the workers, and one task that waits for them."""

    _items: Iterable[Any] | AsyncIterable[Any]
    _work: Callable[[Any], Awaitable[Any]]
    _concurrency: int
    _around: AbstractAsyncContextManager[object]
    _flat: bool
    task: asyncio.Task[None] | None = None
    _outbox: asyncio.Queue[Iterable[Any] | None] = attrs.field(factory=asyncio.Queue)
    """The results of each item; None marks the end."""
    _ready: deque[Any] = attrs.field(factory=deque)
    _untaken: asyncio.Semaphore = attrs.Factory(lambda self: asyncio.Semaphore(2 * self._concurrency), takes_self=True)
    """Acquired for each item that is pulled, and released when its result is taken."""
    _puller: asyncio.Task[Any] | None = None
    """The worker that waits for the next item."""
    _consumer: asyncio.Task[Any] | None = None
    _failure: BaseException | None = None
    _is_closed: bool = False
    _was_cancelled: bool = False

    async def take(self) -> Any:
        """Return the next result."""
        if self.task is None and not self._is_closed:
            self.task = asyncio.create_task(self._run(), name="signing_async bulk")
        self._watch(asyncio.current_task())
        while self._is_closed or not self._ready:
            try:
                results = await self._outbox.get()
            except asyncio.CancelledError:
                await self._cancel_and_wait()
                raise
            if self._is_closed or results is None:
                self._outbox.put_nowait(None)  # for the next call
                raise self._end()
            self._untaken.release()
            self._ready.extend(results)
        return self._ready.popleft()

    def _end(self) -> BaseException:
        """Return the exception that ends the stream."""
        failure, self._failure = self._failure, None
        if self._is_closed:
            return StopAsyncIteration()
        if self._was_cancelled:
            return RuntimeError("the result stream was cancelled with the task that took its results")
        return failure or StopAsyncIteration()

    def _watch(self, consumer: asyncio.Task[Any] | None) -> None:
        """Cancel the work if this task, which takes the results, is cancelled or fails."""
        if consumer is not self._consumer:
            if self._consumer is not None:
                self._consumer.remove_done_callback(self._consumer_ended)
            if consumer is not None:
                consumer.add_done_callback(self._consumer_ended)
            self._consumer = consumer

    def _consumer_ended(self, consumer: asyncio.Task[Any]) -> None:
        self._consumer = None
        # Only a failed task still has a stack. `Task.exception` would mark the exception as retrieved, and asyncio
        # would not log it.
        if consumer.cancelled() or consumer.get_stack(limit=1):
            self.cancel()

    async def close(self) -> None:
        """Cancel the work, return no more results, and wait until the work has ended."""
        self._is_closed = True
        self._outbox.put_nowait(None)
        await self._cancel_and_wait()

    def cancel(self) -> None:
        # Once: another cancellation would interrupt the cleanup.
        if self.task is not None and not self.task.done() and not self.task.cancelling():
            self._was_cancelled = True
            self.task.cancel()

    async def _cancel_and_wait(self) -> None:
        self.cancel()
        if self.task is not None:
            await asyncio.wait([self.task])

    async def _run(self) -> None:
        # A traceback keeps the locals of its frames: neither the pool nor a worker's frame keeps the source open.
        items, self._items = iterate(self._items), ()
        pulling = asyncio.Lock()
        try:
            async with self._around, aclosing(items):
                async with asyncio.TaskGroup() as workers:
                    for _ in range(self._concurrency):
                        workers.create_task(self._work_on(items, pulling))
                self._raise_failure()
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            self._watch(None)
            self._outbox.put_nowait(None)

    @property
    def _is_stopped(self) -> bool:
        return self._was_cancelled or self._failure is not None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _work_on(self, items: AsyncGenerator[Any, None], pulling: asyncio.Lock) -> None:
        """Pull an item and work on it, until there are no more, or a worker failed."""
        try:
            while True:
                async with pulling:
                    await self._untaken.acquire()
                    self._puller = asyncio.current_task()
                    item = None if self._is_stopped else await anext(items)
                    self._puller = None
                if self._is_stopped:  # maybe the source ignored its cancellation
                    return
                result = await self._work(item)
                self._outbox.put_nowait(result if self._flat else (result,))
        except StopAsyncIteration:
            return
        except GeneratorExit:
            raise  # the loop was closed before the work had ended
        except BaseException as error:
            self._failure = self._failure or error
            if self._puller is not None:
                self._puller.cancel()
