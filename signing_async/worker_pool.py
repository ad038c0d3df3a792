"""Much work with few hands: items are pulled as workers become free, results are given in the order of completion."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import attrs

from .errors import InvalidRequest

__all__ = ["Progress", "Results", "Share", "Tally", "Teller"]

S = TypeVar("S")
R = TypeVar("R")

log: logging.Logger = logging.getLogger("signing_async")


@attrs.frozen
class Progress:
    """How far a transfer has come; totals are None while they are unknown. A repeat takes its bytes back first."""

    files_done: int
    files_total: int | None
    bytes_done: int
    bytes_total: int | None


class Teller:
    """Tells a listener of progress. One that fails is logged, and not called again: the work goes on without it."""

    def __init__(self, listener: Callable[[Progress], None] | None) -> None:
        if listener is not None and not callable(listener):
            raise InvalidRequest(f"on_progress: must be callable, not {listener!r}")
        self._listener = listener

    @property
    def listening(self) -> bool:
        return self._listener is not None

    def tell(self, progress: Progress) -> None:
        if self._listener is None:
            return
        try:
            self._listener(progress)
        except Exception:
            log.exception("on_progress failed; the work goes on without it")
            self._listener = None


class Tally:
    """Progress over many files, each of which is done once it has ended, well or not.

    A file that failed counts as done with all of its bytes, as far as its size is known: counts reach their totals.
    """

    def __init__(self, teller: Teller, files_total: int | None) -> None:
        self._teller = teller
        self._files_total = files_total
        self._files = self._bytes = 0
        self.bytes_total: int | None = None

    def share(self) -> Share:
        """One file's part in it."""
        return Share(self)

    def add(self, files: int, size: int) -> None:
        self._files += files
        self._bytes += size
        self._teller.tell(Progress(self._files, self._files_total, self._bytes, self.bytes_total))


class Share:
    """What one file has added to a tally."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._sent = 0
        self._size: int | None = None

    def listen(self, progress: Progress) -> None:
        """The listener of this file's upload."""
        self._size = progress.bytes_total
        if not progress.files_done:
            self._tally.add(0, progress.bytes_done - self._sent)
            self._sent = progress.bytes_done

    def done(self, size: Callable[[], int | None]) -> None:
        """The file has ended; ``size`` is asked where it was not told."""
        whole = size() if self._size is None else self._size
        self._tally.add(1, (whole or 0) - self._sent)


class Results(Generic[R]):
    """The results of ``work`` on each of ``items``, as they come: an async iterator that is also a context manager.

    Nothing happens before the first result is asked for. Then at most ``concurrency`` items are worked on at once, each
    pulled when there is a worker for it: a plain iterable on the event loop, which stands still where that blocks. A
    slow consumer slows the work down: no more than twice ``concurrency`` items are pulled ahead of what was taken.

    What ``work`` can make a result of, it returns as one. An exception that it raises, or that ``items`` raises, stops
    the pulling; what is under way is finished and its results are given before that exception is.

    Leaving early cancels the work: at the end of ``async with`` and in `aclose`, which wait for that; when the task
    that takes the results is cancelled or fails; or when the object is dropped, as by ``break`` in ``async for result
    in make_results()``. ``around`` is entered before the first item is pulled and left when all work has ended.
    """

    def __init__(
        self,
        items: Iterable[S] | AsyncIterable[S],
        work: Callable[[S], Awaitable[R]],
        concurrency: int,
        *,
        around: AbstractAsyncContextManager[object] | None = None,
    ) -> None:
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise InvalidRequest(f"concurrency: must be a whole number from 1, not {concurrency!r}")
        # What the workers hold is not this object, so that nothing keeps it once it is dropped.
        self._run: _Run[Any, R] = _Run(items, work, concurrency, around or nullcontext())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> R:
        try:
            return await self._run.take()
        except BaseException as error:
            run = self._run
            # A traceback keeps this frame, and must not keep the object.
            del self
            if isinstance(error, asyncio.CancelledError):
                await run.close()
            raise

    async def aclose(self) -> None:
        """Cancel what is under way, and return when it has come to its end."""
        await self._run.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # A constructor that raised leaves nothing to cancel.
        if hasattr(self, "_run"):
            self._run.abandon()


class _Run(Generic[S, R]):
    """The work under way, apart from the object that it is watched through."""

    def __init__(
        self,
        items: Iterable[S] | AsyncIterable[S],
        work: Callable[[S], Awaitable[R]],
        concurrency: int,
        around: AbstractAsyncContextManager[object],
    ) -> None:
        # Held here and by no frame, which a traceback may keep: a generator that is left early is closed at once.
        self._items: Iterable[S] | AsyncIterable[S] | None = items
        self._following: Callable[[], Awaitable[S]] | None = None
        self._work = work
        self._concurrency = concurrency
        self._around = around
        self._task: asyncio.Task[None] | None = None
        self._consumer: asyncio.Task[object] | None = None
        self._closed = False
        self._exhausted = False
        self._failure: BaseException | None = None
        self._outbox: asyncio.Queue[tuple[R] | None] = asyncio.Queue()
        """None is its end."""
        self._room = asyncio.Semaphore(2 * concurrency)
        self._turn = asyncio.Lock()

    async def take(self) -> R:
        if self._task is None or not self._task.done():
            self._follow(asyncio.current_task())
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._all(), name="signing_async bulk")
        taken = await self._outbox.get()
        if taken is not None and not self._closed:
            self._room.release()
            return taken[0]
        self._outbox.put_nowait(None)
        failure, self._failure = self._failure, None
        if failure is None or self._closed:
            raise StopAsyncIteration
        raise failure

    def _follow(self, consumer: asyncio.Task[object] | None) -> None:
        """Watch the task that takes the results; None ends that."""
        if consumer is self._consumer:
            return
        if self._consumer is not None:
            self._consumer.remove_done_callback(self._consumer_ended)
        self._consumer = consumer
        if consumer is not None:
            consumer.add_done_callback(self._consumer_ended)

    def _consumer_ended(self, consumer: asyncio.Task[object]) -> None:
        """Cancel the work if the task that took the last result was cancelled or failed."""
        self._consumer = None
        if consumer.cancelled():
            self._stop()
        elif (error := consumer.exception()) is not None:
            log.warning("the task that took the results failed (%s): the work left is cancelled", type(error).__name__)
            self._stop()

    def _stop(self) -> None:
        if self._task is not None and not self._closed:
            self._task.cancel()
        self._closed = True
        self._outbox.put_nowait(None)

    async def close(self) -> None:
        self._stop()
        if self._task is not None:
            await asyncio.wait([self._task])
        self._items = None

    def abandon(self) -> None:
        """From whatever thread the garbage collector runs in."""
        task = self._task
        if task is None or task.done() or self._closed:
            return
        # A loop that is closed has nothing under way.
        with suppress(RuntimeError):
            task.get_loop().call_soon_threadsafe(task.cancel)

    async def _all(self) -> None:
        try:
            async with self._around:
                await self._workers()
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._items = self._following = None
            self._follow(None)
            self._outbox.put_nowait(None)

    async def _workers(self) -> None:
        assert self._items is not None
        if isinstance(self._items, AsyncIterable):
            self._following = aiter(self._items).__anext__
        else:
            self._following = _stepping(iter(self._items))
        self._items = None
        workers = [asyncio.create_task(self._worker()) for _ in range(self._concurrency)]
        try:
            await asyncio.wait(workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)

    async def _worker(self) -> None:
        try:
            while True:
                await self._room.acquire()
                item = await self._pull()
                if item is None:
                    return
                self._outbox.put_nowait((await self._work(item[0]),))
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._exhausted = True

    async def _pull(self) -> tuple[S] | None:
        """The next item; None when there are no more. One at a time: an async generator cannot be asked twice."""
        async with self._turn:
            if self._exhausted or self._following is None:
                return None
            try:
                return (await self._following(),)
            except StopAsyncIteration:
                return None

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error


def _stepping(items: Iterator[S]) -> Callable[[], Awaitable[S]]:
    """A plain iterator, asked as an async one is."""

    async def following() -> S:
        for item in items:
            return item
        raise StopAsyncIteration

    return following
