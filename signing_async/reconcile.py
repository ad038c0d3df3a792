"""Reconciliation: find out whether an ambiguous request took effect, before it is repeated.

The service has no idempotency keys. After an ambiguous attempt (a 408, a 5xx or a lost response) a `Reconciler` reads
the service until the effect shows, or has had enough time to show. Only if it did not show may the request be repeated.
An `Effect` recognizes what one call does: a draft that is sent, a document or a recipient that is created.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import attrs

from .errors import CannotBeSent, NotFound, RequestTimeout, SigningError
from .models import Document, Signing, SigningState
from .record_matching import Match, Record, Undecidable
from .tracking import Collection, TrackedSigning, Tracker

__all__ = [
    "Creation",
    "Effect",
    "Found",
    "Listed",
    "Read",
    "Recognized",
    "Reconciler",
    "Sent",
    "TrackedSigning",
    "Tracker",
    "Undecidable",
    "was_sent",
]

T = TypeVar("T")

Read = Callable[[Any], Awaitable[Any]]
"""Sends a reading operation as part of the call that is reconciled."""
Listed = tuple[Document, ...] | None
"""The documents in a response; None if the response does not list them."""

_FIRST_PAUSE = 0.2
_SIMILAR = "a similar record differs in its size, content or other fields"
_NEVER = -math.inf


@attrs.frozen
class Found(Generic[T]):
    """The effect of a call, read from the service. ``value`` is what the call returns."""

    value: T


class Effect(Protocol[T]):
    """Recognizes the effect of one call."""

    ambiguities: Counter[bool]
    """Counts ambiguous attempts whose effect was not found; the key says whether the effect may still show late."""
    reading: str
    """The name of the operation that `find` reads with."""
    adds_up: bool
    """Whether the effects of two attempts are two records."""

    @property
    def may_show_late(self) -> bool:
        """Whether a call that failed may still take effect: an ambiguous request may be carried out late."""

    async def find(self, read: Read, since: float) -> Found[T] | None:
        """Return the effect if a reading that began after ``since`` shows it; raise `Undecidable` if it cannot tell."""

    async def verify(self, read: Read, since: float, value: T) -> T:
        """Return the effect of a call that returned ``value``; raise `Undecidable` unless it took effect once."""

    def may_cause(self, error: Exception) -> bool:
        """Return whether an unambiguous attempt may end with this refusal although the call took effect."""

    def note_unresolved(self) -> None:
        """Note that the call ended while its effect may still show."""


class Reconciler(Generic[T]):
    """The ambiguity of one call: whether its attempts so far may have taken effect.

    Times are in loop time. A call is ambiguous from an attempt that may have taken effect until a reading shows the
    effect, or a reading that began after the settle time does not.
    """

    def __init__(self, effect: Effect[T], read: Read, deadline: float) -> None:
        self._effect = effect
        self._read = read
        self._deadline = deadline
        self._settled_at = _NEVER
        self._late: list[bool] = []
        """For each ambiguous attempt whose effect was not found: whether it may still show after the settle time."""
        self.ambiguous: bool = False
        self.was_ambiguous: bool = False

    def note(self, settle: float, *, may_be_late: bool) -> None:
        """Record an ambiguous attempt, whose effect may take ``settle`` seconds to show, or even longer."""
        self.ambiguous = self.was_ambiguous = True
        self.wait(settle)
        self._late.append(may_be_late)
        self._effect.ambiguities[may_be_late] += 1

    def may_cause(self, error: Exception) -> bool:
        """Return whether the call may have taken effect although it ended with this error."""
        is_unknown = isinstance(error, SigningError) and error.effect == "unknown"
        return not is_unknown and (self.was_ambiguous or self._effect.may_cause(error))

    def wait(self, settle: float) -> None:
        """Allow ``settle`` seconds from now for an effect to show."""
        self._settled_at = max(self._settled_at, asyncio.get_running_loop().time() + settle)

    async def settle(self, retry_at: float, *, reading_time: float) -> Found[T] | None:
        """Read with growing pauses until the effect shows, and return it; None if it did not show in time.

        The last reading begins at ``retry_at`` or later. Raises `TimeoutError` if the deadline is earlier, and
        the error of a reading that fails and is not repeated.
        """
        loop = asyncio.get_running_loop()
        due = loop.time() if self.ambiguous else retry_at
        self.ambiguous = True
        # Several attempts may have several effects: the first one that shows does not settle the others.
        found_at = self._settled_at if self._effect.adds_up and len(self._late) > 1 else _NEVER
        found = await self._poll(self._effect.find, due, max(self._settled_at, retry_at), found_at, reading_time)
        self._resolve(is_found=found is not None)
        return found

    async def verify(self, value: T, settle: float, *, reading_time: float) -> T:
        """Read until the service shows that the call, which returned ``value``, took effect once; return the effect.

        Raises `Undecidable` if it does not within ``settle`` seconds, and otherwise the same errors as `settle`.
        """

        async def verify(read: Read, since: float) -> Found[T]:
            return Found(await self._effect.verify(read, since, value))

        self.wait(settle)
        now = asyncio.get_running_loop().time()
        return cast("Found[T]", await self._poll(verify, now, self._settled_at, _NEVER, reading_time)).value

    async def _poll(
        self,
        find: Callable[[Read, float], Awaitable[Found[T] | None]],
        due: float,
        last: float,
        found_at: float,
        reading_time: float,
    ) -> Found[T] | None:
        """Read from ``due`` on. An effect counts if its reading began at ``found_at`` or later; None, at ``last``."""
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE
        # The last reading must come back before the deadline, even if the settle time ends after it.
        closing = min(last, self._deadline - reading_time)
        while True:
            await asyncio.sleep(due - loop.time())
            try:
                found = await find(self._read, due)
            except SigningError as error:
                if not error.transient or due >= closing:
                    raise
            except Undecidable as error:
                if not error.may_clear or due >= closing:
                    raise
            else:
                if due >= last or (found is not None and due >= found_at):
                    return found
            if due >= closing:
                raise TimeoutError
            following = min(due + pause, self._settled_at) if due < self._settled_at else last
            due = max(min(following, closing), loop.time())
            pause *= 2

    def _resolve(self, *, is_found: bool) -> None:
        self.ambiguous = False
        if is_found and self._late:
            # The reading explains one attempt, unknown which: remove one whose effect cannot be late, if there is one.
            late = all(self._late)
            self._late.remove(late)
            self._effect.ambiguities[late] -= 1


# Sending


def was_sent(signing: Signing) -> bool:
    """Return whether a signing was sent; raise `Undecidable` if its record does not tell."""
    if signing.is_draft is None:
        raise Undecidable("the service does not say whether the signing is still a draft", [signing])
    if signing.state is SigningState.CANCELLED:
        raise Undecidable("the signing is cancelled, and may have been sent before", [signing])
    return not signing.is_draft


class Sent:
    """The effect of `send`: the signing is no longer a draft.

    ``is_own``: no other client sends this signing. If the service then refuses to send it because it is no longer a
    draft, an earlier attempt has sent it, or a copy of the request made in transit. The owner reads the service before
    it sends the signing again, so its error says if the effect may show even after the settle time.
    """

    reading: str = "signings.get"
    adds_up: bool = False

    def __init__(
        self, signing: TrackedSigning, get: Callable[[Read], Awaitable[Signing]], *, is_own: bool = False
    ) -> None:
        self.ambiguities: Counter[bool] = signing.ambiguous_sends
        self._state = signing.state
        self._get = get
        self._is_own = is_own

    @property
    def may_show_late(self) -> bool:
        # The service's own 500 counts too, unlike in `may_change_late`. A reading finds a draft that holds too much
        # before it is sent. A draft that its owner replaces by another could be sent in addition to the other.
        return self._is_own and self.ambiguities.total() > 0

    async def find(self, read: Read, since: float) -> Found[Signing | None] | None:
        signing = await self._read_signing(read, since)
        return Found(signing) if was_sent(signing) else None

    async def verify(self, read: Read, since: float, value: Signing | None) -> Signing | None:
        # The service sends only drafts, so several attempts have at most one effect.
        signing = await self._read_signing(read, since)
        if not was_sent(signing):
            raise Undecidable("the service still shows a draft", [signing], may_clear=True)
        return signing

    async def _read_signing(self, read: Read, since: float) -> Signing:
        return await self._state.since(since, lambda: self._get(read))

    def may_cause(self, error: Exception) -> bool:
        return self._is_own and isinstance(error, CannotBeSent)

    def note_unresolved(self) -> None:
        """Nothing to track: the service refuses to send a signing twice."""


# Creating documents and recipients


@attrs.define(eq=False)
class Creation(Generic[Record]):
    """The effect of `upload` or `add`: a record that this client did not know, and that matches what was sent.

    A context manager around the call: calls with the same match key are made one after the other.
    """

    adds_up = True  # not annotated: attrs would make it a field
    may_show_late = False

    _operation: str
    reading: str
    _deadline: float
    ambiguities: Counter[bool]
    _collection: Collection
    _match: Match[Record]
    _list: Callable[[Read], Awaitable[tuple[Record, ...] | None]]
    _read_first: Callable[[], Awaitable[tuple[Record, ...] | None]] | None = None

    async def __aenter__(self) -> None:
        """Wait for earlier calls with the same match key; raise `RequestTimeout` if the deadline passes first."""
        try:
            async with asyncio.timeout_at(self._deadline) as waiting:
                await self._enter()
                return
        except TimeoutError:
            if not waiting.expired():
                raise
        # Raised here, the error does not have the `TimeoutError` as its context.
        text = f"{self._operation}: the deadline passed before anything was sent"
        raise RequestTimeout(text, operation=self._operation, attempts=0)

    async def _enter(self) -> None:
        collection, key = self._collection, self._match.key
        collection.pending[key] += 1
        collection.started += 1
        try:
            if collection.known is None:
                await self._read_known()
            await collection.locks[key].acquire()
        except BaseException:
            collection.leave(key)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._collection.locks[self._match.key].release()
        self._collection.leave(self._match.key)

    async def _read_known(self) -> None:
        async with self._collection.first_reading:
            if self._collection.known is not None:
                return  # another call has read it
            assert self._read_first is not None
            self._collection.known = {record.id for record in await self._read_first() or ()}

    async def find(self, read: Read, since: float) -> Found[Record] | None:
        unknown = await self._read_unknown(read, since)
        candidates, fitting = await self._select(unknown)
        if len(fitting) == 1 and not self._collection.unresolved[self._match.key]:
            return Found(fitting[0])
        if not candidates:
            return None
        if len(candidates) == 1 and not fitting:
            raise Undecidable(_SIMILAR, unknown, may_clear=True)
        raise Undecidable("more than one request may have created what the service shows", unknown)

    async def verify(self, read: Read, since: float, value: Record) -> Record:
        unknown = await self._read_unknown(read, since)
        shown = [record for record in unknown if record.id == value.id]
        if not shown and value.id not in self._collection.ids:
            # The reading is older than the record: it does not show what earlier attempts did either.
            raise Undecidable("the service does not list it", may_clear=True)
        rest = [record for record in unknown if record.id != value.id]
        candidates, others = await self._select(rest)
        if others:
            text = f"the service holds {len(others) + 1} such records: an earlier attempt took effect late"
            raise Undecidable(text, others)
        if rest and not (await self._select(shown or [value]))[1]:
            # The service stores what was sent in another form: a record of the rest may be an earlier attempt's.
            raise Undecidable(_SIMILAR, [value, *(candidates or rest)])
        return value

    def may_cause(self, error: Exception) -> bool:
        return False

    async def _read_unknown(self, read: Read, since: float) -> list[Record]:
        records = await self._collection.reading.since(since, lambda: self._list(read))
        if records is None:
            raise Undecidable("the service does not list the signing's documents")
        return [record for record in records if record.id not in self._collection.ids]

    async def _select(self, unknown: Sequence[Record]) -> tuple[list[Record], list[Record]]:
        return await self._match.select(unknown, self._collection.pending + self._collection.unresolved)

    def note_created(self, record: Record) -> None:
        """Note the record that the call returned."""
        self._collection.ids.add(record.id)

    def note_unresolved(self) -> None:
        self._collection.unresolved[self._match.key] += 1


# Any other request


class Recognized(Generic[T]):
    """The effect of a request to any endpoint, as the caller's own function ``recognize`` finds it.

    The function is called with a `Read`, and returns the effect or None. None counts only if the function read the
    service and no reading failed: the service must have shown that there is no effect. ``identify`` returns the id of
    an effect, if it has one.
    """

    adds_up: bool = True
    may_show_late: bool = False

    def __init__(
        self, reading: str, recognize: Callable[[Read], Awaitable[T | None]], identify: Callable[[T], object]
    ) -> None:
        self.ambiguities: Counter[bool] = Counter()
        self.reading: str = reading
        self._recognize = recognize
        self._identify = identify

    async def find(self, read: Read, since: float) -> Found[T] | None:
        has_read = False
        failure: SigningError | None = None

        async def watched(operation: Any) -> Any:
            nonlocal has_read, failure
            try:
                result = await read(operation)
            except NotFound:
                has_read = True
                raise
            except SigningError as error:
                failure = error
                raise
            has_read = True
            return result

        try:
            value = await self._recognize(watched)
        except (SigningError, Undecidable):
            raise
        except Exception as error:
            raise Undecidable(f"reconcile raised {type(error).__name__}") from error
        if value is not None:
            return Found(value)
        if failure is not None:
            raise failure
        if not has_read:
            raise Undecidable("reconcile returned None without reading the service")
        return None

    async def verify(self, read: Read, since: float, value: T) -> T:
        found = await self.find(read, since)
        if found is None:
            raise Undecidable("reconcile does not find the effect", may_clear=True)
        if len({self._identify(found.value), self._identify(value)} - {None}) > 1:
            raise Undecidable("reconcile finds another record: an earlier attempt took effect late", [found.value])
        return value

    def may_cause(self, error: Exception) -> bool:
        return False

    def note_unresolved(self) -> None:
        """Nothing to track: nothing is known of other calls to the endpoint."""
