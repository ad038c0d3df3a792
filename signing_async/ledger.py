"""What a client knows of each signing's documents, to tell its own upload from older ones after a lost answer."""

from __future__ import annotations

import asyncio
import math
import unicodedata
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from .errors import APIError, AuthError, ClientClosed, InvalidRequest, RateLimited, ServerError
from .models import Document
from .transport import Done, Undecided

__all__ = ["Ledger", "Upload"]

_MOST_SIGNINGS = 10_000

Listed = tuple[Document, ...] | None
"""The documents that an answer lists; None where it does not list them."""


def _stem(name: str) -> str:
    """A file's name as far as it counts here: with or without ``.pdf``, in whatever case and normal form."""
    return unicodedata.normalize("NFC", name).strip().casefold().removesuffix(".pdf")


class _Signing:
    """What is known of one signing."""

    def __init__(self, known: set[str] | None) -> None:
        self.known = known
        """Ids of its documents; None before the signing was read."""
        self.reading: asyncio.Lock = asyncio.Lock()
        self.turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.under_way: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        """Uploads that ended without an outcome: their documents may turn up at any time."""
        self.listed_at: float = -math.inf
        self.listed: Listed = None
        """What the signing held at that time, kept while uploads are under way."""


class Ledger:
    """The signings that this client uploads to, the least recently used forgotten first."""

    def __init__(self, most: int = _MOST_SIGNINGS) -> None:
        self._signings: OrderedDict[str, _Signing] = OrderedDict()
        self._most = most

    def created(self, signing_id: str) -> None:
        """A signing that was made just now has no documents."""
        self._entry(signing_id, set())

    @asynccontextmanager
    async def upload(
        self, signing_id: str, filename: str, documents: Callable[[], Awaitable[Listed]]
    ) -> AsyncIterator[Upload]:
        """One upload, from before it starts until its outcome is known.

        Uploads of one name to one signing take turns, so that no two of them can be mistaken for each other.
        """
        signing = self._entry(signing_id, None)
        stem = _stem(filename)
        signing.under_way[stem] += 1
        try:
            async with signing.reading:
                if signing.known is None:
                    signing.known = {document.id for document in await documents() or ()}
            async with signing.turns[stem]:
                yield Upload(signing, stem)
        finally:
            signing.under_way[stem] -= 1
            if not signing.under_way[stem]:
                del signing.under_way[stem]
                signing.turns.pop(stem, None)
            if not signing.under_way:
                signing.listed_at, signing.listed = -math.inf, None

    def _entry(self, signing_id: str, known: set[str] | None) -> _Signing:
        signing = self._signings.setdefault(signing_id, _Signing(known))
        self._signings.move_to_end(signing_id)
        if len(self._signings) > self._most:
            idle = next((key for key, entry in self._signings.items() if not entry.under_way), signing_id)
            if idle != signing_id:
                del self._signings[idle]
        return signing


class Upload:
    """An upload under way."""

    def __init__(self, signing: _Signing, stem: str) -> None:
        self._signing = signing
        self._stem = stem

    async def documents(self, read: Callable[[], Awaitable[Listed]], since: float) -> Listed:
        """What the signing held at some time after ``since``.

        Many uploads that fail together are settled by one reading: any that began after an upload's failure will do.
        """
        signing = self._signing
        async with signing.reading:
            if signing.listed_at < since:
                began = asyncio.get_running_loop().time()
                signing.listed = await read()
                signing.listed_at = began
            return signing.listed

    def done(self, document: Document) -> None:
        """It took effect, as this document."""
        assert self._signing.known is not None
        self._signing.known.add(document.id)

    def failed(self, error: BaseException) -> None:
        """It ended with an error; unless that is the service's no, its document may still turn up."""
        refused = isinstance(error, APIError) and not isinstance(error, ServerError)
        if not refused and not isinstance(error, InvalidRequest | AuthError | ClientClosed | RateLimited):
            self._signing.lost[self._stem] += 1

    def settle(self, documents: Listed) -> Done[Document] | None:
        """Whether this upload took effect, by the documents that are there now; `Undecided` if that cannot be told."""
        if documents is None:
            raise Undecided("the service does not list the signing's documents")
        assert self._signing.known is not None
        unknown = [document for document in documents if document.id not in self._signing.known]
        mine = [document for document in unknown if _stem(document.name) == self._stem]
        if len(mine) == 1 and not self._signing.lost[self._stem]:
            return Done(mine[0])
        if mine:
            raise Undecided("more than one upload may have made what is there under its name", unknown)
        expected = self._signing.under_way + self._signing.lost
        expected[self._stem] = 0
        if Counter(_stem(document.name) for document in unknown) - expected:
            raise Undecided("there is a document of another name that was not there before", unknown)
        return None
