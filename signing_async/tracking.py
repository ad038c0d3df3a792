"""Track the documents, the recipients and the ambiguous requests of the signings that a client works on."""

from __future__ import annotations

import asyncio
import copy
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar, cast

from .errors import SigningError
from .models import Document, Signing
from .record_matching import stem

__all__ = ["Collection", "SharedReading", "TrackedSigning", "Tracker"]

T = TypeVar("T")

_MAX_SIGNINGS = 10_000
_NEVER = -math.inf


class SharedReading(Generic[T]):
    """A reading of the service that concurrent calls share."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._began_at = _NEVER
        self._value: T | None = None
        self._error: SigningError | None = None

    async def since(self, moment: float, read: Callable[[], Awaitable[T]]) -> T:
        """Return the value of a reading that began after ``moment``: the latest one, or a new one.

        The failure of a reading is shared as well, except a timeout, which concerns only the call that read.
        """
        async with self._lock:
            if self._began_at <= moment:
                began_at = asyncio.get_running_loop().time()
                self._error = None
                try:
                    self._value = await read()
                except SigningError as error:
                    if isinstance(error, TimeoutError):
                        raise
                    self._error = error
                self._began_at = began_at
            if self._error is not None:
                raise copy.copy(self._error)
            return cast("T", self._value)

    def forget(self) -> None:
        self._began_at, self._value, self._error = _NEVER, None, None


class Collection:
    """What this client knows of the documents, or the recipients, of one signing."""

    def __init__(self, known: set[str] | None) -> None:
        self.known: set[str] | None = known
        """Ids that are not the effect of a pending call; None before the first reading."""
        self.pending: Counter[str] = Counter()
        self.unresolved: Counter[str] = Counter()
        """Calls whose outcome is unknown; their records may still appear."""
        self.started: int = 0
        self.locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.first_reading: asyncio.Lock = asyncio.Lock()
        self.reading: SharedReading[Any] = SharedReading()

    @property
    def ids(self) -> set[str]:
        """The known ids. Those of documents exist only after the first reading."""
        assert self.known is not None
        return self.known

    def leave(self, key: str) -> None:
        self.pending[key] -= 1
        if not self.pending[key]:
            del self.pending[key]
            self.locks.pop(key, None)
        if not self.pending:
            self.reading.forget()


class TrackedSigning:
    """What this client knows of one signing."""

    def __init__(self, documents: set[str] | None) -> None:
        self.documents: Collection = Collection(documents)
        self.recipients: Collection = Collection(set())
        self.state: SharedReading[Signing] = SharedReading()
        self.ambiguities: Counter[bool] = Counter()
        """Ambiguous attempts to add to this signing whose effect was not found. True: the effect may still appear."""
        self.ambiguous_sends: Counter[bool] = Counter()
        """Ambiguous attempts to send this signing. True: the effect may still appear."""

    @property
    def may_change_late(self) -> bool:
        """Whether an ambiguous request may still add to this signing."""
        return self.ambiguities[True] > 0

    @property
    def is_busy(self) -> bool:
        return bool(self.documents.pending or self.recipients.pending)


class Tracker:
    """Tracks the documents and recipients this client has created, so that an ambiguous request can be reconciled.

    Signings are known by their paths; the least recently used ones are forgotten first.
    """

    def __init__(self, max_signings: int = _MAX_SIGNINGS) -> None:
        self._signings: OrderedDict[str, TrackedSigning] = OrderedDict()
        self._max_signings = max_signings

    def signing(self, path: str) -> TrackedSigning:
        """Return the signing's entry."""
        return self._entry(path, None)

    def note_created(self, path: str) -> None:
        """Note that a signing was just created, and has no documents."""
        self._entry(path, set())

    def observe(self, path: str) -> Callable[[Iterable[Document]], None]:
        """Return a function that marks documents as known. Call it with the documents of a reading that begins now.

        If an upload is pending at any time during the reading, the function does nothing: the document of a pending
        upload must not count as known.
        """
        signing = self._signings.get(path)
        if signing is None or signing.documents.pending:
            return lambda documents: None
        collection = signing.documents
        started = collection.started

        def note(documents: Iterable[Document]) -> None:
            if collection.started == started and collection.known is not None:
                for document in documents:
                    if document.id not in collection.known:
                        collection.known.add(document.id)
                        collection.unresolved -= Counter([stem(document.name)])

        return note

    def _entry(self, path: str, documents: set[str] | None) -> TrackedSigning:
        signing = self._signings.get(path)
        if signing is None:
            signing = self._signings[path] = TrackedSigning(documents)
        self._signings.move_to_end(path)
        if len(self._signings) > self._max_signings:
            idle = next((key for key, entry in self._signings.items() if not entry.is_busy), path)
            if idle != path:
                del self._signings[idle]
        return signing
