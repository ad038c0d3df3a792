"""What a client knows of each signing, to tell what it added itself from what was there before a lost answer."""

from __future__ import annotations

import asyncio
import math
import unicodedata
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Literal

from .errors import DecodeError, OutcomeUnknown, ServerError
from .models import Document
from .transport import Done, Undecided

__all__ = ["Ledger", "Listed", "Upload", "normalized"]

_MOST_SIGNINGS = 10_000
_LONGEST_NAME = 1000

Listed = tuple[Document, ...] | None
"""The documents that an answer lists; None where it does not list them."""


def _stem(name: str) -> str:
    """A file's name as far as it counts here: with or without ``.pdf``, in whatever case and normal form."""
    return normalized("NFC", name).strip().casefold().removesuffix(".pdf")


def normalized(form: Literal["NFC", "NFKC"], text: str) -> str:
    """In this normal form; what is longer than any name stays as it is, since that can take quadratic time."""
    return unicodedata.normalize(form, text) if len(text) <= _LONGEST_NAME else text


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
        self.uploads = 0
        self.added: set[str] = set()
        """Ids of the recipients that this client has added."""
        self.listed_at: float = -math.inf
        self.listed: Listed = None
        """What the signing held at that time, kept while uploads are under way."""


class Ledger:
    """The signings that this client works on, the least recently used forgotten first; by their paths."""

    def __init__(self, most: int = _MOST_SIGNINGS) -> None:
        self._signings: OrderedDict[str, _Signing] = OrderedDict()
        self._most = most

    def created(self, path: str) -> None:
        """A signing that was made just now has no documents."""
        self._entry(path, set())

    def added(self, path: str) -> set[str]:
        """The ids of the recipients that this client has added, to be added to."""
        return self._entry(path, None).added

    def looking(self, path: str) -> Callable[[Iterable[Document]], None]:
        """Before the signing is read for another reason: what takes note of the documents that were there.

        Nothing is noted if an upload was under way meanwhile: its document must not pass for an older one.
        """
        signing = self._signings.get(path)
        if signing is None or signing.under_way:
            return lambda documents: None
        uploads = signing.uploads

        def note(documents: Iterable[Document]) -> None:
            if signing.uploads == uploads and signing.known is not None:
                for document in documents:
                    signing.known.add(document.id)
                    signing.lost.pop(_stem(document.name), None)

        return note

    def upload(self, path: str, filename: str, documents: Callable[[], Awaitable[Listed]]) -> Upload:
        """One upload, to be entered before it starts and left when its outcome is known.

        Uploads of one name to one signing take turns, so that no two of them can be mistaken for each other.
        """
        return Upload(self._entry(path, None), _stem(filename), documents)

    def _entry(self, path: str, known: set[str] | None) -> _Signing:
        signing = self._signings.get(path)
        if signing is None:
            signing = self._signings[path] = _Signing(known)
        self._signings.move_to_end(path)
        if len(self._signings) > self._most:
            idle = next((key for key, entry in self._signings.items() if not entry.under_way), path)
            if idle != path:
                del self._signings[idle]
        return signing


async def _read_once(signing: _Signing, documents: Callable[[], Awaitable[Listed]]) -> None:
    async with signing.reading:
        if signing.known is not None:
            return  # somebody else has read it meanwhile
        signing.known = {document.id for document in await documents() or ()}


class Upload:
    """An upload under way."""

    def __init__(self, signing: _Signing, stem: str, documents: Callable[[], Awaitable[Listed]]) -> None:
        self._signing = signing
        self._stem = stem
        self._documents = documents

    async def __aenter__(self) -> Upload:
        signing, stem = self._signing, self._stem
        signing.under_way[stem] += 1
        signing.uploads += 1
        try:
            if signing.known is None:
                await _read_once(signing, self._documents)
            await signing.turns[stem].acquire()
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._signing.turns[self._stem].release()
        self._leave()

    def _leave(self) -> None:
        signing, stem = self._signing, self._stem
        signing.under_way[stem] -= 1
        if not signing.under_way[stem]:
            del signing.under_way[stem]
            signing.turns.pop(stem, None)
        if not signing.under_way:
            signing.listed_at, signing.listed = -math.inf, None

    async def documents(self, read: Callable[[], Awaitable[Listed]], since: float) -> Listed:
        """What the signing held at some time after ``since``.

        Many uploads that fail together are settled by one reading: any that began after an upload's failure will do.
        """
        signing = self._signing
        async with signing.reading:
            if signing.listed_at <= since:
                began = asyncio.get_running_loop().time()
                signing.listed = await read()
                signing.listed_at = began
            return signing.listed

    def done(self, document: Document) -> None:
        """It took effect, as this document."""
        assert self._signing.known is not None
        self._signing.known.add(document.id)

    def failed(self, error: BaseException, *, checked: bool) -> None:
        """It ended with an error. Unless it is sure to have had no effect, its document may still turn up."""
        unsure = isinstance(error, OutcomeUnknown | DecodeError) or not isinstance(error, Exception)
        if unsure or (isinstance(error, ServerError) and not checked):
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
        if Counter(_stem(document.name) for document in unknown) - expected:
            raise Undecided("there is a document of another name that was not there before", unknown)
        return None
