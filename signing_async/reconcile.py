"""Reconciliation: find out whether an ambiguous request took effect, before it is repeated.

The service has no idempotency keys. After an ambiguous attempt (a 408, a 5xx or a lost response) a `Reconciliation`
reads the service until the effect shows, or has had enough time to show. Only if it did not show may the request be
repeated. Four rules keep a request from taking effect twice unnoticed:

1. Once an attempt was ambiguous, a reading precedes every repeat and every error. (After a cancellation, and with
   `RetryPolicy.none()`, nothing is read, and the outcome stays unknown.)
2. After more than one ambiguous attempt, only a reading that began after the settle time counts. (For `send` any
   reading does: the service sends a draft once.)
3. A success after an ambiguous attempt is confirmed as the only effect.
4. An ambiguous attempt whose effect never showed taints the signing in the `Ledger`: a dispatch abandons its draft.

An effect recognizes what one call does: a draft that is sent, a document or a recipient that is created. An ambiguous
attempt is *unexplained* until a reading shows an effect. A call is *pending* while it is under way, and *unresolved* if
its outcome stays unknown.
"""

from __future__ import annotations

import asyncio
import math
import re
import unicodedata
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, Literal, Protocol, TypeVar

import attrs

from .assumptions import Assumptions
from .errors import CannotBeSent, NotFound, RequestTimeout, SigningError
from .models import Document, Recipient, Signing, SigningState

T = TypeVar("T")
Record = TypeVar("Record", bound=Document | Recipient)

Read = Callable[[Any], Awaitable[Any]]
"""Sends a reading operation as part of the call that is reconciled."""
Listed = tuple[Document, ...] | None
"""The documents in a response; None if the response does not list them."""

_FIRST_PAUSE = 0.2
_LONG_AGO = -math.inf
_MAX_NAME = 1000
_MAX_SIGNINGS = 10_000
_SIMILAR = "a similar record differs in its size, content or other fields"
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


@attrs.frozen(slots=False)
class Found(Generic[T]):
    """The effect of a call, read from the service. ``value`` is what the call returns."""

    value: T


class Undecidable(Exception):  # stays inside the package: callers see OutcomeUnknown
    """A reading cannot tell whether the call took effect.

    ``known`` is what the reading found; ``may_clear`` says whether a later reading may tell.
    """

    def __init__(self, message: str, known: Iterable[object] = (), *, may_clear: bool = False) -> None:
        super().__init__(message)
        self.known: tuple[object, ...] = tuple(known)
        self.may_clear: bool = may_clear


# The ledger


class Collection:
    """What this client knows of the documents, or the recipients, of one signing."""

    def __init__(self, known: set[str] | None) -> None:
        self.known: set[str] | None = known
        """Ids that are not the effect of a pending call; None before the first reading."""
        self.pending: Counter[str] = Counter()
        """Calls that are under way, by their match key."""
        self.unresolved: Counter[str] = Counter()
        """Calls whose outcome is unknown; their records may still appear."""
        self.started: int = 0
        self.locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.first_reading: asyncio.Lock = asyncio.Lock()

    @property
    def ids(self) -> set[str]:
        assert self.known is not None
        return self.known

    def leave(self, key: str) -> None:
        self.pending[key] -= 1
        if not self.pending[key]:
            del self.pending[key]
            self.locks.pop(key, None)


class SigningLedger:
    """What this client knows of one signing.

    ``additions`` and ``sends`` count ambiguous attempts whose effect has not shown. True: it may still show.
    """

    def __init__(self, documents: set[str] | None) -> None:
        self.documents: Collection = Collection(documents)
        self.recipients: Collection = Collection(set())
        self.additions: Counter[bool] = Counter()
        self.sends: Counter[bool] = Counter()

    @property
    def is_tainted(self) -> bool:
        """Whether an ambiguous request may still add to this signing."""
        return self.additions[True] > 0


class Ledger:
    """Records the documents and recipients this client has created, so that an ambiguous request can be reconciled.

    Signings are known by their paths; the least recently used ones are forgotten first.
    """

    def __init__(self) -> None:
        self._signings: OrderedDict[str, SigningLedger] = OrderedDict()

    def signing(self, path: str, documents: set[str] | None = None) -> SigningLedger:
        """Return the signing's entry. ``documents`` are those of a new entry; None if they are not known."""
        entry = self._signings.get(path)
        if entry is None:
            entry = self._signings[path] = SigningLedger(documents)
        self._signings.move_to_end(path)
        if len(self._signings) > _MAX_SIGNINGS:
            self._signings.popitem(last=False)
        return entry

    def observe(self, path: str) -> Callable[[Iterable[Document]], None]:
        """Return a function that marks the documents of a reading that begins now as known.

        It does nothing if an upload is pending during the reading: the upload's document must not count as known.
        """
        entry = self._signings.get(path)
        if entry is None or entry.documents.pending:
            return lambda documents: None
        collection = entry.documents
        started = collection.started

        def note(documents: Iterable[Document]) -> None:
            if collection.started == started and collection.known is not None:
                unknown = [document for document in documents if document.id not in collection.known]
                collection.known.update(document.id for document in unknown)
                collection.unresolved -= Counter(_stem(document.name) for document in unknown)

        return note


# Matching


class Match(Protocol[Record]):
    """Compares records of the service with what one call sent."""

    key: str
    """Calls with the same key on one signing have indistinguishable effects: they are made one after the other."""

    async def select(self, unknown: Sequence[Record], expected: Counter[str]) -> tuple[list[Record], list[Record]]:
        """Return the records that may be the call's effect, and those of them that agree in every compared field.

        ``expected`` counts the keys of all pending and unresolved calls. Raises `Undecidable` if it cannot tell.
        """


class DocumentMatch:
    """Compares documents by name, and by size and sha256 where the service reports them."""

    def __init__(self, filename: str, size: int, sha256: Callable[[], str], assumptions: Assumptions) -> None:
        self.key: str = _stem(filename)
        self._size = size
        self._sha256 = sha256
        self._assumptions = assumptions

    async def select(
        self, unknown: Sequence[Document], expected: Counter[str]
    ) -> tuple[list[Document], list[Document]]:
        named = [document for document in unknown if _stem(document.name) == self.key]
        if not named and Counter(_stem(document.name) for document in unknown) - expected:
            # The service may have renamed the file.
            raise Undecidable("there is a new document with another name", unknown, may_clear=True)
        return named, [document for document in named if await self._fits(document)]

    async def find(self, documents: Iterable[Document]) -> Document | None:
        """Return the first document with the file's name and, if the service reports them, its size and sha256."""
        for document in documents:
            if _stem(document.name) == self.key and await self._fits(document):
                return document
        return None

    async def _fits(self, document: Document) -> bool:
        sizes = (document.extra.get(field) for field in self._assumptions.document_size_fields)
        if any(type(size) is int and size != self._size for size in sizes):
            return False
        hashes = [document.extra.get(field) for field in self._assumptions.document_sha256_fields]
        given = [text.lower() for text in hashes if isinstance(text, str) and _SHA256.fullmatch(text)]
        return not given or given == [await asyncio.to_thread(self._sha256)] * len(given)


class RecipientMatch:
    """Compares recipients by e-mail address, and by the other fields that were given and that the service returns."""

    def __init__(self, named: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self.key: str = _address(named["email"])
        self._named = {field: value for field, value in named.items() if field != "email"}
        self._extra = extra

    async def select(
        self, unknown: Sequence[Recipient], expected: Counter[str]
    ) -> tuple[list[Recipient], list[Recipient]]:
        if not all(recipient.email for recipient in unknown):
            raise Undecidable("the service does not give the recipients' e-mail addresses", unknown)
        same = [recipient for recipient in unknown if _address(recipient.email) == self.key]
        if not same and any(self._has_name(one) for one in unknown if not expected[_address(one.email)]):
            # The service may have changed the address.
            raise Undecidable("there is a new recipient of this name with another address", unknown, may_clear=True)
        return same, [recipient for recipient in same if self._fits(recipient)]

    def _has_name(self, recipient: Recipient) -> bool:
        is_named = any(self._named.get(field) and getattr(recipient, field) for field in ("first_name", "last_name"))
        return is_named and self._fits(recipient)

    def _fits(self, recipient: Recipient) -> bool:
        """Return whether the service returned what was sent, apart from fields that it does not return."""
        returned = {**recipient.extra, **attrs.asdict(recipient)}
        sent = {field: value for field, value in {**self._extra, **self._named}.items() if value is not None}
        return all(_alike(returned[field], sent[field]) for field in sent if returned.get(field) not in (None, ""))


def _address(email: str) -> str:
    """Return what is compared of an address: case-folded, in normal form, with an internationalized domain encoded."""
    name, at, domain = normalized("NFC", email).strip().casefold().rpartition("@")
    with suppress(UnicodeError):
        domain = domain.encode("idna").decode()
    return name + at + domain


def _stem(name: str) -> str:
    """Return the part of a file name that is compared: without ``.pdf``, case-folded, in normal form."""
    return normalized("NFC", name).strip().casefold().removesuffix(".pdf")


def normalized(form: Literal["NFC", "NFKC"], text: str) -> str:
    """Return the text in a Unicode normal form; unchanged if it is very long, since that takes quadratic time."""
    return unicodedata.normalize(form, text) if len(text) <= _MAX_NAME else text


def _alike(returned: Any, sent: Any) -> bool:
    """Return whether the values agree, ignoring case, spaces and punctuation, which services normalize."""
    if isinstance(returned, str | int) and isinstance(sent, str | int):
        returned, sent = (
            [character for character in normalized("NFKC", str(value)).casefold() if character.isalnum()]
            for value in (returned, sent)
        )
    return bool(returned == sent)


# Effects


class Effect(Protocol[T]):
    """Recognizes the effect of one call."""

    unexplained: Counter[bool]
    """Counts ambiguous attempts whose effect was not found; the key says whether the effect may still show late."""
    adds_up: bool = True
    """Whether the effects of two attempts are two records."""

    @property
    def may_show_late(self) -> bool:
        """Whether a call that failed may still take effect, although the settle time has passed."""
        return False

    async def find(self, read: Read) -> Found[T] | None:
        """Return the effect if the service shows it; raise `Undecidable` if the service does not tell."""

    async def confirm(self, read: Read, value: T) -> T:
        """Return the effect of a call that returned ``value``; raise `Undecidable` unless it took effect once."""

    def may_cause(self, error: Exception) -> bool:
        """Return whether an unambiguous attempt may end with this refusal although the call took effect."""
        return False

    def note_unresolved(self) -> None:
        """Note that the call ended while its effect may still show."""
        return


def was_sent(signing: Signing) -> bool:
    """Return whether a signing was sent; raise `Undecidable` if its record does not tell."""
    if signing.is_draft is None:
        raise Undecidable("the service does not say whether the signing is still a draft", [signing])
    if signing.state is SigningState.CANCELLED:
        raise Undecidable("the signing is cancelled, and may have been sent before", [signing])
    return not signing.is_draft


class Sent(Effect[Signing | None]):
    """The effect of `send`: the signing is no longer a draft.

    ``is_own``: no other client sends this signing. If the service refuses because it is no longer a draft, an earlier
    attempt has sent it.
    """

    adds_up: bool = False  # the service sends only drafts

    def __init__(
        self, signing: SigningLedger, get: Callable[[Read], Awaitable[Signing]], *, is_own: bool = False
    ) -> None:
        self.unexplained: Counter[bool] = signing.sends
        self._get = get
        self._is_own = is_own

    @property
    def may_show_late(self) -> bool:
        # To send the same draft again is harmless. But an owner may replace the draft by another one, and then both
        # could be sent. So the service's own 500 counts too.
        return self._is_own and self.unexplained.total() > 0

    async def find(self, read: Read) -> Found[Signing | None] | None:
        signing = await self._get(read)
        return Found(signing) if was_sent(signing) else None

    async def confirm(self, read: Read, value: Signing | None) -> Signing | None:
        signing = await self._get(read)
        if not was_sent(signing):
            raise Undecidable("the service still shows a draft", [signing], may_clear=True)
        return signing

    def may_cause(self, error: Exception) -> bool:
        return self._is_own and isinstance(error, CannotBeSent)


@attrs.define(eq=False, repr=False, slots=False)
class Creation(Effect[Record]):
    """The effect of `upload` or `add`: a record that this client did not know, and that matches what was sent.

    A context manager around the call: calls with the same match key are made one after the other. It raises
    `RequestTimeout` if the deadline passes before it is the call's turn.
    """

    _operation: str
    _deadline: float
    unexplained: Counter[bool]
    _collection: Collection
    _match: Match[Record]
    _list: Callable[[Read], Awaitable[tuple[Record, ...] | None]]
    _read_first: Callable[[], Awaitable[tuple[Record, ...] | None]] | None = None

    async def __aenter__(self) -> None:
        collection, key = self._collection, self._match.key
        collection.pending[key] += 1
        collection.started += 1
        if collection.known is not None and collection.pending[key] == 1:
            await collection.locks[key].acquire()  # at once, and without a timer: it is the only call with this key
            return
        try:
            async with asyncio.timeout_at(self._deadline) as waiting:
                if collection.known is None:
                    await self._read_known()
                await collection.locks[key].acquire()
                return
        except BaseException as error:
            collection.leave(key)
            if not (isinstance(error, TimeoutError) and waiting.expired()):
                raise
        text = f"{self._operation}: the deadline passed before anything was sent"
        raise RequestTimeout(text, operation=self._operation, attempts=0)

    async def _read_known(self) -> None:
        async with self._collection.first_reading:
            if self._collection.known is not None:
                return  # another call has read it
            assert self._read_first is not None
            self._collection.known = {record.id for record in await self._read_first() or ()}

    async def __aexit__(self, *_: object) -> None:
        self._collection.locks[self._match.key].release()
        self._collection.leave(self._match.key)

    async def find(self, read: Read) -> Found[Record] | None:
        unknown = await self._read_unknown(read)
        candidates, fitting = await self._select(unknown)
        if len(fitting) == 1 and not self._collection.unresolved[self._match.key]:
            return Found(fitting[0])
        if not candidates:
            return None
        if len(candidates) == 1 and not fitting:
            raise Undecidable(_SIMILAR, unknown, may_clear=True)
        raise Undecidable("more than one request may have created what the service shows", unknown)

    async def confirm(self, read: Read, value: Record) -> Record:
        unknown = await self._read_unknown(read)
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

    async def _read_unknown(self, read: Read) -> list[Record]:
        records = await self._list(read)
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


class Recognized(Effect[T]):
    """The effect of a request to any endpoint, as the caller's own function ``recognize`` finds it.

    The function returns the effect or None. None counts only if the function read the service and no reading failed.
    ``identify`` returns the id of an effect, if it has one.
    """

    def __init__(self, recognize: Callable[[Read], Awaitable[T | None]], identify: Callable[[T], object]) -> None:
        self.unexplained: Counter[bool] = Counter()
        self._recognize = recognize
        self._identify = identify

    async def find(self, read: Read) -> Found[T] | None:
        failures: list[SigningError | None] = []

        async def watched(operation: Any) -> Any:
            try:
                result = await read(operation)
                failures.append(None)
                return result
            except SigningError as error:
                failures.append(None if isinstance(error, NotFound) else error)
                raise

        try:
            value = await self._recognize(watched)
        except (SigningError, Undecidable):
            raise
        except Exception as error:
            raise Undecidable(f"reconcile raised {type(error).__name__}") from error
        if value is not None:
            return Found(value)
        if failure := next(filter(None, failures), None):
            raise failure
        if not failures:
            raise Undecidable("reconcile returned None without reading the service")
        return None

    async def confirm(self, read: Read, value: T) -> T:
        found = await self.find(read)
        if found is None:
            raise Undecidable("reconcile does not find the effect", may_clear=True)
        if len({self._identify(found.value), self._identify(value)} - {None}) > 1:
            raise Undecidable("reconcile finds another record: an earlier attempt took effect late", [found.value])
        return value


# Settling


class Reconciliation(Generic[T]):
    """The ambiguity of one call: whether its attempts so far may have taken effect.

    Times are in loop time. A call is ambiguous from an attempt that may have taken effect until a reading shows the
    effect, or a reading that began after the settle time does not.
    """

    def __init__(self, effect: Effect[T], read: Read, last_reading: float) -> None:
        """``last_reading`` is the latest time at which a reading may begin and end before the call's deadline."""
        self._effect = effect
        self._read = read
        self._last_reading = last_reading
        self._settled_at = _LONG_AGO
        self._unexplained: list[bool] = []
        """For each ambiguous attempt whose effect was not found: whether it may still show after the settle time."""
        self.is_ambiguous: bool = False

    def note(self, settle: float, *, may_be_late: bool) -> None:
        """Record an ambiguous attempt, whose effect may take ``settle`` seconds to show, or even longer."""
        self.is_ambiguous = True
        self.wait(settle)
        self._unexplained.append(may_be_late)
        self._effect.unexplained[may_be_late] += 1

    def wait(self, settle: float) -> None:
        """Allow ``settle`` seconds from now for an effect to show."""
        self._settled_at = max(self._settled_at, asyncio.get_running_loop().time() + settle)

    async def settle(self, retry_at: float) -> Found[T] | None:
        """Read with growing pauses until the effect shows, and return it; None if it did not show in time.

        The last reading begins at ``retry_at`` or later. Raises `TimeoutError` if the deadline is earlier, and
        the error of a reading that fails and is not repeated.
        """
        first = asyncio.get_running_loop().time() if self.is_ambiguous else retry_at
        self.is_ambiguous = True  # until the readings end: a cancellation meanwhile leaves it unresolved
        # Several attempts may have several effects: finding one does not rule out the others.
        are_several = self._effect.adds_up and len(self._unexplained) > 1
        counts_from = self._settled_at if are_several else _LONG_AGO
        found = await self._poll(self._effect.find, first, max(self._settled_at, retry_at), counts_from)
        self.is_ambiguous = False
        if found is not None and self._unexplained:
            # The reading explains one attempt, unknown which: remove one whose effect cannot be late, if there is one.
            may_be_late = all(self._unexplained)
            self._unexplained.remove(may_be_late)
            self._effect.unexplained[may_be_late] -= 1
        return found

    async def confirm(self, value: T, settle: float) -> T:
        """Read until the service shows that the call, which returned ``value``, took effect once; return the effect.

        Raises `Undecidable` if it does not within ``settle`` seconds, and otherwise the same errors as `settle`.
        """

        async def find(read: Read) -> Found[T]:
            return Found(await self._effect.confirm(read, value))

        self.wait(settle)
        found = await self._poll(find, asyncio.get_running_loop().time(), self._settled_at, _LONG_AGO)
        assert found is not None
        return found.value

    async def _poll(
        self, find: Callable[[Read], Awaitable[Found[T] | None]], first: float, last: float, counts_from: float
    ) -> Found[T] | None:
        """Return what the readings find; the first begins at ``first``, the last at ``last``, or before the deadline.

        An effect counts if its reading began at ``counts_from`` or later. No effect counts only in a reading that began
        at ``last`` or later.
        """
        loop = asyncio.get_running_loop()
        begins_at, pause = first, _FIRST_PAUSE
        # The last reading must come back before the deadline, even if the settle time ends after it.
        last_possible = min(last, self._last_reading)
        while True:
            await asyncio.sleep(begins_at - loop.time())
            is_last = begins_at >= last_possible
            try:
                found = await find(self._read)
            except SigningError as error:
                if is_last or not error.transient:
                    raise
            except Undecidable as error:
                if is_last or not error.may_clear:
                    raise
            else:
                if begins_at >= last or (found is not None and begins_at >= counts_from):
                    return found
            if is_last:
                raise TimeoutError
            following = min(begins_at + pause, self._settled_at) if begins_at < self._settled_at else last
            begins_at = max(min(following, last_possible), loop.time())
            pause *= 2
