"""A bounded worker pool over a stream of items, and the progress reporter of bulk operations."""

from __future__ import annotations

import asyncio
import copy
import logging
import random
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Any, Generic, Self, TypeVar

import attrs

from . import _checks
from .errors import InvalidRequest, SigningError

__all__ = ["Deferrals", "Deferred", "FileProgress", "Progress", "ProgressReporter", "Results", "Several", "copy_unsent"]

S = TypeVar("S")
R = TypeVar("R")

log: logging.Logger = logging.getLogger("signing_async")

_FIRST_PAUSE, _MAX_PAUSE = 0.05, 1.0
_TRIES_BEFORE_LOG = 4


def copy_unsent(error: SigningError) -> SigningError:
    """Return a copy of the error that ended a bulk operation, for an item for which nothing was sent."""
    # An unknown outcome concerns only its own item. If its cause is fatal, that is what ended the operation.
    while isinstance(error.__cause__, SigningError) and error.__cause__.fatal:
        error = error.__cause__
    # One copy per result: a shared exception would collect a traceback from each place that raises it.
    copied = copy.copy(error)
    copied.effect = "none"
    return copied


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

    def __init__(
        self,
        on_progress: Callable[[Progress], None] | None,
        files_total: int | None = None,
        bytes_total: int | None = None,
    ) -> None:
        if on_progress is not None and not callable(on_progress):
            raise InvalidRequest(f"on_progress: must be callable, got {on_progress!r}")
        self._on_progress = on_progress
        self.files_total: int | None = files_total
        self.bytes_total: int | None = bytes_total
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
        self.size = progress.bytes_total
        self._set(progress.files_done, progress.bytes_done)

    def restart(self) -> None:
        """Subtract all bytes: they are sent again."""
        self._set(0, 0)

    def add(self, size: int) -> None:
        """Count bytes that were sent."""
        self._set(0, self._bytes_done + size)

    def finish(self, size: int | None) -> None:
        """Count the file as done with all of its bytes; with the bytes sent so far if its size is unknown."""
        self._set(1, self._bytes_done if size is None else size)

    def _set(self, files: int, size: int) -> None:
        more_files, more_bytes = files - self._files_done, size - self._bytes_done
        if more_files or more_bytes:
            self._files_done, self._bytes_done = files, size
            self._reporter.add(more_files, more_bytes)


@attrs.frozen
class Deferred:
    """Returned by ``work`` instead of a result: work on the item again after ``delay`` seconds."""

    delay: float


class Deferrals:
    """The growing pauses of one item that another run is working on."""

    def __init__(self) -> None:
        self._count = 0

    def next(self, item: str) -> Deferred:
        """Return the next pause. ``item`` names the item in the log."""
        delay = min(_FIRST_PAUSE * 2.0 ** min(self._count, 20), _MAX_PAUSE) * random.uniform(0.5, 1.0)
        self._count += 1
        if self._count == _TRIES_BEFORE_LOG:
            log.info("waiting for %s: another run is working on it", item)
        return Deferred(delay)


@attrs.frozen
class Several(Generic[R]):
    """Returned by ``work`` instead of a result: any number of results of one item."""

    results: Sequence[R]


class Results(Generic[R]):
    """The results of ``work`` on each of ``items``, in completion order: an async iterator and a context manager.

    Nothing happens before the first result is requested. Then up to ``concurrency`` items are worked on at once. An
    item is pulled only when a worker is free for it, and no more than ``2 * concurrency`` items ahead of the results
    taken: a slow consumer slows the work down. A plain iterable is iterated on the event loop and must not block.

    ``work`` returns errors of single items as results. If it raises, or ``items`` does, no more items are pulled; the
    work in progress is finished, its results are returned, and then the exception is raised. If ``work`` returns
    `Deferred`, its worker is free for another item until the delay is over. Deferred items don't count as pulled ahead:
    up to ``6 * concurrency`` can wait. They are dropped if ``work`` raises. If ``work`` returns `Several`, these
    results are returned one by one.

    The work is cancelled by `aclose`, at the end of ``async with``, when the object is dropped (as by ``break`` in
    ``async for result in make_results()``), and when the task that takes the results is cancelled or fails. After a
    cancelled ``anext``, as in ``asyncio.wait_for(anext(results), 1)``, the next one raises a `RuntimeError` with the
    number of items without a result. To wait for a result with a timeout and then continue, keep the ``anext`` in a
    task and call ``asyncio.wait({task}, timeout=1)``.

    ``around`` is entered before the first item is pulled and left when all work has ended. If ``work`` or ``items``
    raised, it is left with that exception.
    """

    def __init__(
        self,
        items: Iterable[S] | AsyncIterable[S],
        work: Callable[[S], Awaitable[R | Deferred | Several[R]]],
        concurrency: int,
        *,
        around: AbstractAsyncContextManager[object] | None = None,
    ) -> None:
        _checks.integer("concurrency", concurrency, error=InvalidRequest)
        # The workers hold the pool and not this object, so that it is collected when the caller drops it.
        self._pool: _WorkerPool[Any, R] = _WorkerPool(items, work, concurrency, around or nullcontext())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> R:
        try:
            return await self._pool.take()
        except BaseException as error:
            pool = self._pool
            # The traceback keeps this frame, which must not keep the object.
            del self
            if isinstance(error, asyncio.CancelledError):
                pool.cancel()
                await pool.wait()
            raise

    async def aclose(self) -> None:
        """Cancel the work in progress and wait until it has ended."""
        self._pool.close()
        await self._pool.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # If the constructor raised, there is nothing to cancel.
        if hasattr(self, "_pool"):
            self._pool.abandon()


class _WorkerPool(Generic[S, R]):
    """The tasks behind a `Results`: one task pulls items, and each item runs in its own task."""

    def __init__(
        self,
        items: Iterable[S] | AsyncIterable[S],
        work: Callable[[S], Awaitable[R | Deferred | Several[R]]],
        concurrency: int,
        around: AbstractAsyncContextManager[object],
    ) -> None:
        # Stored only here: a traceback keeps the locals of its frames, and would keep a generator open.
        self._items: Iterable[S] | AsyncIterable[S] | None = items
        self._pull: Callable[[], Awaitable[S]] | None = None
        self._work = work
        self._around = around
        self._result_slots = asyncio.Semaphore(2 * concurrency)
        self._worker_slots = asyncio.Semaphore(concurrency)
        self._pulled = asyncio.Semaphore(6 * concurrency)
        self._task: asyncio.Task[None] | None = None
        self._children: set[asyncio.Task[None]] = set()
        self._idle: set[asyncio.Task[Any]] = set()
        """The children that pull items or wait: a failure cancels them."""
        self._consumer: asyncio.Task[Any] | None = None
        self._outbox: asyncio.Queue[tuple[R, bool] | None] = asyncio.Queue()
        """Results, and whether each is the last of its item; None marks the end."""
        self._unfinished = 0
        """The number of items that were pulled, and whose results were not all taken."""
        self._failure: BaseException | None = None
        self._stopped = self._closed = self._cancelled = False

    async def take(self) -> R:
        """Return the next result."""
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._run(), name="signing_async worker pool")
            self._task.add_done_callback(self._ended)
        if self._is_running:
            self._watch(asyncio.current_task())
        taken = await self._outbox.get()
        if taken is not None and not self._closed:
            result, is_last = taken
            if is_last:
                self._finish_item()
            return result
        self._outbox.put_nowait(None)
        failure, self._failure = self._failure, None
        if self._closed:
            raise StopAsyncIteration
        if self._cancelled:
            raise RuntimeError(
                "the result stream was cancelled because the task that took its results was cancelled or failed;"
                f" items without a result: {self._unfinished}"
            )
        raise failure or StopAsyncIteration

    def _finish_item(self) -> None:
        """Allow another item to be pulled: all results of an item were taken."""
        self._unfinished -= 1
        self._result_slots.release()
        self._pulled.release()

    @property
    def _is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def _watch(self, consumer: asyncio.Task[Any] | None) -> None:
        """Cancel the work if this task, which takes the results, is cancelled or fails."""
        if consumer is self._consumer:
            return
        if self._consumer is not None:
            self._consumer.remove_done_callback(self._consumer_ended)
        self._consumer = consumer
        if consumer is not None:
            consumer.add_done_callback(self._consumer_ended)

    def _consumer_ended(self, consumer: asyncio.Task[Any]) -> None:
        self._consumer = None
        # Only a failed task still has a stack when it is done. `Task.exception` is not called: it would mark the
        # exception as retrieved, and asyncio would not log it.
        if consumer.cancelled() or consumer.get_stack(limit=1):
            self.cancel()

    def cancel(self) -> None:
        """Cancel the work because its consumer is gone, unless it has ended already."""
        if self._is_running:
            self._cancelled = True
            self._stop()

    def close(self) -> None:
        """Cancel the work and return no more results."""
        self._closed = True
        self._items = None
        self._outbox.put_nowait(None)
        if self._task is not None:
            self._stop()

    def _stop(self) -> None:
        assert self._task is not None
        if not self._task.cancelling():
            self._task.cancel()

    async def wait(self) -> None:
        """Wait until all work has ended."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def abandon(self) -> None:
        """Cancel the work, from any thread: the garbage collector may run in any of them."""
        task = self._task
        if task is None or task.done() or task.cancelling():
            return
        # A closed loop has no work in progress.
        with suppress(RuntimeError):
            task.get_loop().call_soon_threadsafe(task.cancel)

    async def _run(self) -> None:
        try:
            async with self._around:
                await self._run_children()
        except BaseException as error:
            self._fail(error)

    def _ended(self, _: object = None) -> None:
        self._items = self._pull = None
        self._idle.clear()
        self._watch(None)
        self._outbox.put_nowait(None)

    async def _run_children(self) -> None:
        self._idle.add(self._start(self._feed()))
        try:
            await self._join()
        except asyncio.CancelledError:
            for child in self._children:
                child.cancel()
            await self._join()
            raise
        if self._failure is not None:
            raise self._failure

    async def _join(self) -> None:
        while self._children:
            await asyncio.wait(self._children)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        child = asyncio.create_task(coroutine)
        self._children.add(child)
        child.add_done_callback(self._children.discard)
        return child

    async def _feed(self) -> None:
        """Pull items while there are workers for them."""
        assert self._items is not None
        try:
            if isinstance(self._items, AsyncIterable):
                self._pull = aiter(self._items).__anext__
            else:
                self._pull = _as_async(iter(self._items))
            self._items = None
            while True:
                await self._pulled.acquire()
                await self._acquire_slots()
                self._start(self._handle(await self._pull()))
                self._unfinished += 1
        except StopAsyncIteration:
            self._release_slots()
        except BaseException as error:
            self._failure = self._failure or error
            self._release_slots()

    async def _acquire_slots(self) -> None:
        """Wait for a result slot, then for a free worker."""
        await self._result_slots.acquire()
        await self._worker_slots.acquire()

    def _release_slots(self) -> None:
        # If the loop is closed, there are no waiters to wake.
        with suppress(RuntimeError):
            self._result_slots.release()
            self._worker_slots.release()

    async def _handle(self, item: S) -> None:
        """Work on one item until it has a result."""
        try:
            while isinstance(result := await self._work(item), Deferred):
                if self._stopped:
                    return
                await self._wait_deferred(result.delay)
            results = result.results if isinstance(result, Several) else (result,)
            for number, one in enumerate(results, start=1):
                self._outbox.put_nowait((one, number == len(results)))
            if not results:
                self._finish_item()
            self._worker_slots.release()
        except BaseException as error:
            self._fail(error)

    async def _wait_deferred(self, delay: float) -> None:
        child = asyncio.current_task()
        assert child is not None
        self._idle.add(child)
        self._release_slots()
        await asyncio.sleep(delay)
        await self._acquire_slots()
        self._idle.discard(child)

    def _fail(self, error: BaseException) -> None:
        """Store an error for the consumer, and start no more work. The pool's own tasks do not raise it."""
        self._failure = self._failure or error
        self._stopped = True
        # If the loop is closed, there is nothing to cancel.
        with suppress(RuntimeError):
            for child in self._idle:
                child.cancel()


def _as_async(items: Iterator[S]) -> Callable[[], Awaitable[S]]:
    """Return the ``__anext__`` of a plain iterator."""

    async def pull() -> S:
        for item in items:
            return item
        raise StopAsyncIteration

    return pull
