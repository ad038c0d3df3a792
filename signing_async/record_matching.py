"""Compare records of the service with what a call sent, to find the document or recipient that it created."""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeVar

import attrs

from .assumptions import Assumptions
from .models import Document, Recipient

__all__ = ["DocumentMatch", "Match", "RecipientMatch", "Record", "Undecidable", "normalized", "stem"]

Record = TypeVar("Record", bound=Document | Recipient)

_MAX_NAME = 1000
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


class Undecidable(Exception):  # stays inside the package: callers see OutcomeUnknown
    """A reading cannot tell whether the call took effect.

    ``known`` is what the reading found; ``may_clear`` says whether a later reading may tell.
    """

    def __init__(self, message: str, known: Iterable[object] = (), *, may_clear: bool = False) -> None:
        super().__init__(message)
        self.known: tuple[object, ...] = tuple(known)
        self.may_clear: bool = may_clear


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
        self.key: str = stem(filename)
        self._size = size
        self._sha256 = sha256
        self._assumptions = assumptions

    async def select(
        self, unknown: Sequence[Document], expected: Counter[str]
    ) -> tuple[list[Document], list[Document]]:
        named = self._named(unknown)
        if not named and Counter(stem(document.name) for document in unknown) - expected:
            # The service may have renamed the file.
            raise Undecidable("there is a new document with another name", unknown, may_clear=True)
        return named, [document for document in named if await self._fits(document)]

    async def find(self, documents: Sequence[Document]) -> Document | None:
        """Return the first document with the file's name and, if the service reports them, its size and sha256."""
        for document in self._named(documents):
            if await self._fits(document):
                return document
        return None

    def _named(self, documents: Sequence[Document]) -> list[Document]:
        return [document for document in documents if stem(document.name) == self.key]

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
        is_named = any(self._named[field] and getattr(recipient, field) for field in ("first_name", "last_name"))
        return is_named and self._fits(recipient)

    def _fits(self, recipient: Recipient) -> bool:
        return _agrees(attrs.asdict(recipient), self._named) and _agrees(recipient.extra, self._extra)


def _address(email: str) -> str:
    """Return what is compared of an address: case-folded, in normal form, with an internationalized domain encoded."""
    name, at, domain = normalized("NFC", email).strip().casefold().rpartition("@")
    with suppress(UnicodeError):
        domain = domain.encode("idna").decode()
    return name + at + domain


def stem(name: str) -> str:
    """Return the part of a file name that is compared: without ``.pdf``, case-folded, in normal form."""
    return normalized("NFC", name).strip().casefold().removesuffix(".pdf")


def normalized(form: Literal["NFC", "NFKC"], text: str) -> str:
    """Return the text in a Unicode normal form; unchanged if it is very long, since that takes quadratic time."""
    return unicodedata.normalize(form, text) if len(text) <= _MAX_NAME else text


def _agrees(returned: Mapping[str, Any], sent: Mapping[str, Any]) -> bool:
    return all(
        _alike(returned[field], value)
        for field, value in sent.items()
        if value is not None and returned.get(field) not in (None, "")
    )


def _alike(returned: Any, sent: Any) -> bool:
    """Return whether the values agree, ignoring case, spaces and punctuation, which services normalize."""
    if isinstance(returned, str | int) and isinstance(sent, str | int):
        return _normalize(str(returned)) == _normalize(str(sent))
    return bool(returned == sent)


def _normalize(text: str) -> str:
    return "".join(character for character in normalized("NFKC", text).casefold() if character.isalnum())
