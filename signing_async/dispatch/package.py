"""A signing with all that belongs to it: checked as a whole before anything of it is sent, and named by its content."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
import unicodedata
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from typing import IO, Any, TypeVar, cast

import attrs

from .. import _checks
from ..documents.source import OpenPdf, PdfSource, Source
from ..errors import InvalidRequest
from ..models import Language, NewRecipient, SigningOrder
from ..recipients import check_recipient
from ..signings import check_signing

__all__ = ["KeptPdf", "NewRecipient", "Prepared", "SigningPackage", "prepare"]

T = TypeVar("T")

_BLOCK = 256 * 1024
_Seen = tuple[int, ...]


def _documents(value: Iterable[Source | PdfSource]) -> tuple[Source | PdfSource, ...]:
    return _listed(value)


def _recipients(value: Iterable[NewRecipient]) -> tuple[NewRecipient, ...]:
    return _listed(value)


def _listed(value: Iterable[T]) -> tuple[T, ...]:
    """As a tuple, so that it can be read more than once; what is no list is kept, and refused with all else later."""
    given: Any = value
    single = isinstance(given, str | bytes | bytearray | memoryview | os.PathLike) or hasattr(given, "read")
    return cast("tuple[T, ...]", tuple(given) if isinstance(given, Iterable) and not single else given)


def _shown(documents: object) -> str:
    """Without the bytes of those that are in memory."""
    if not isinstance(documents, tuple):
        return repr(documents)
    in_memory = bytes | bytearray | memoryview
    return f"[{', '.join(f'<{len(one)} bytes>' if isinstance(one, in_memory) else repr(one) for one in documents)}]"


@attrs.frozen
class SigningPackage:
    """A signing with all that belongs to it, to be sent in one call. It is checked when it is dispatched.

    ``documents`` are paths, bytes, binary files, async iterators or `PdfSource`. The recipients of a sequential signing
    sign by their ``order``, or, where none of them has one, as they are listed. ``key`` names the package in a journal:
    one key is sent once. Without it the package is named by a hash of all that is in it: the fields, the documents'
    names and their bytes, but not where they lie. ::

        SigningPackage("Lease 2031", "EN", ["lease.pdf"], [NewRecipient("anna@example.com", "Anna", "Berg")],
                       key="lease-2031")
    """

    name: str
    language: Language | str
    documents: tuple[Source | PdfSource, ...] = attrs.field(converter=_documents, repr=_shown)
    recipients: tuple[NewRecipient, ...] = attrs.field(converter=_recipients)
    signing_order: SigningOrder | str | None = None
    message: str | None = None
    key: str | None = None


@attrs.frozen
class KeptPdf:
    """A document that was checked, and can be opened again: no file is held open for it meanwhile."""

    source: PdfSource
    """Bears the hash that what is uploaded has to have."""
    size: int
    seen: _Seen | None

    async def check_again(self) -> None:
        """An error, before anything is sent, if it is not what it was when it was checked."""
        if self.seen is not None and _look_at(self.source.source) == self.seen:
            return
        with await self.source.open() as pdf:
            same = await asyncio.to_thread(_hash, pdf, None) == self.source.sha256
        if not same:
            raise InvalidRequest(f"source: {self.source.filename} was changed since it was checked")


@attrs.frozen
class Prepared:
    """A package that was found good. Close it."""

    key: str
    content: str
    """A hash of all that is in it."""
    fields: Mapping[str, Any]
    documents: tuple[KeptPdf, ...]
    recipients: tuple[Mapping[str, Any], ...]
    aside: _Aside

    def close(self) -> None:
        self.aside.close()


async def prepare(package: object, most: int) -> Prepared:
    """Check a package and name it. All that is wrong with it is told at once, in one `InvalidRequest`."""
    if not isinstance(package, SigningPackage):
        raise InvalidRequest(f"package: must be a SigningPackage, not {type(package).__name__}")
    fields = {
        "name": package.name,
        "language": package.language,
        "signing_order": package.signing_order,
        "message": package.message,
    }
    problems = [*_problems("", lambda: check_signing(fields)), *_key_problems(package.key)]
    recipients = _check_recipients(package, problems)
    aside = _Aside()
    try:
        documents = await _check_documents(package.documents, most, aside, problems)
        if problems:
            raise InvalidRequest("; ".join(problems), problems=problems)
    except BaseException:
        aside.close()
        raise
    content = _content(fields, documents, recipients)
    return Prepared(package.key or content, content, fields, documents, recipients, aside)


def _problems(where: str, check: Any) -> list[str]:
    try:
        check()
    except InvalidRequest as error:
        return [where + problem for problem in error.problems]
    return []


def _key_problems(key: str | None) -> list[str]:
    if key is None:
        return []
    if _checks.is_text(key) and key.strip() and "\0" not in key:
        return []
    return [f"key: must be a text that is not empty, without null characters, not {key!r}"]


# Recipients


def _check_recipients(package: SigningPackage, problems: list[str]) -> tuple[Mapping[str, Any], ...]:
    """What `Recipients.add` is to be given for each."""
    if not _are_listed("recipients", package.recipients, problems):
        return ()
    checked = [
        _check_recipient(f"recipients[{number}]", recipient, problems)
        for number, recipient in enumerate(package.recipients)
    ]
    if package.signing_order == SigningOrder.SEQUENTIAL:
        _put_in_order(checked, problems)
    return tuple(checked)


def _check_recipient(where: str, recipient: object, problems: list[str]) -> dict[str, Any]:
    if not isinstance(recipient, NewRecipient):
        problems.append(f"{where}: must be a NewRecipient, not {type(recipient).__name__}")
        return {"order": None}
    named = {
        field: getattr(recipient, field) for field in ("email", "first_name", "last_name", "signing_method", "order")
    }
    found = _problems(f"{where}.", lambda: check_recipient(named, recipient.extra))
    problems += found
    if found:
        return named
    try:
        # As it is now, whatever becomes of the caller's mapping.
        return {**named, "extra": json.loads(json.dumps(dict(recipient.extra), allow_nan=False))}
    except (TypeError, ValueError, RecursionError) as error:
        problems.append(f"{where}.extra: cannot be sent as JSON: {error}")
        return named


def _put_in_order(recipients: list[dict[str, Any]], problems: list[str]) -> None:
    orders = [recipient["order"] for recipient in recipients]
    if all(order is None for order in orders):
        for number, recipient in enumerate(recipients, 1):
            recipient["order"] = number
        return
    for number, order in enumerate(orders):
        if order is None:
            problems.append(f"recipients[{number}].order: is missing, while other recipients have one")
        elif order in orders[:number]:
            problems.append(f"recipients[{number}].order: {order!r} is taken by recipients[{orders.index(order)}]")


def _are_listed(field: str, values: object, problems: list[str]) -> bool:
    if not isinstance(values, tuple):
        problems.append(f"{field}: must be a list, not {type(values).__name__}")
    elif not values:
        problems.append(f"{field}: there is none, and at least one is needed")
    return isinstance(values, tuple)


# Documents


async def _check_documents(
    sources: tuple[Source | PdfSource, ...], most: int, aside: _Aside, problems: list[str]
) -> tuple[KeptPdf, ...]:
    kept = []
    if _are_listed("documents", sources, problems):
        for number, source in enumerate(sources):
            try:
                kept.append(await _keep(source, most, aside))
            except InvalidRequest as error:
                problems += [f"documents[{number}]: {problem.removeprefix('source: ')}" for problem in error.problems]
    return tuple(kept)


async def _keep(given: Source | PdfSource, most: int, aside: _Aside) -> KeptPdf:
    """Check one document and take its hash. It is not kept open: there may be many."""
    pdf_source = PdfSource(given)
    source, name = pdf_source.source, pdf_source.filename
    seen = _look_at(source)
    with await pdf_source.open(most) as pdf:
        if _comes_once(source):
            start = aside.size
            digest = await asyncio.to_thread(_hash, pdf, aside)
            source = _Part(aside, start, pdf.size)
        elif pdf.size <= _BLOCK:
            digest = _hash(pdf, None)
        else:
            digest = await asyncio.to_thread(_hash, pdf, None)
        if pdf_source.sha256 not in (None, digest):
            raise InvalidRequest(f"{name} has not the sha256 that it should have")
        return KeptPdf(PdfSource(source, name, sha256=digest), pdf.size, seen)


def _hash(pdf: OpenPdf, aside: _Aside | None) -> str:
    """The hash of its content; what can be had only once is kept aside as well."""
    digest = hashlib.sha256()
    for block in pdf.blocks():
        digest.update(block)
        if aside is not None:
            aside.add(block)
    return digest.hexdigest()


def _look_at(source: Source) -> _Seen | None:
    """What tells that a file is still the same; None where only its bytes do."""
    if isinstance(source, bytes):
        return ()
    if not isinstance(source, str | os.PathLike):
        return None
    try:
        status = os.stat(source)  # noqa: PTH116  # a source may also be a path of bytes
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _comes_once(source: Any) -> bool:
    """Whether it can be read only once, such as a pipe."""
    return isinstance(source, AsyncIterable) or (hasattr(source, "read") and not source.seekable())


class _Aside:
    """A file without a name, for whatever of a package comes once."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self.size: int = 0

    def add(self, block: memoryview) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # closed by `close`
        while block:
            written = self._file.write(block)
            self.size += written
            block = block[written:]

    def read(self, size: int, at: int) -> bytes:
        assert self._file is not None
        return os.pread(self._file.fileno(), size, at)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Part:
    """What was kept aside of one source: an async iterable, and this one can be read again and again."""

    def __init__(self, aside: _Aside, start: int, size: int) -> None:
        self._aside = aside
        self._start = start
        self._end = start + size

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(self._start, self._end, _BLOCK):
            yield await asyncio.to_thread(self._aside.read, min(_BLOCK, self._end - at), at)


def _content(fields: Mapping[str, Any], documents: Iterable[KeptPdf], recipients: Iterable[Mapping[str, Any]]) -> str:
    """The same for the same package, whenever and wherever it is made; not of paths."""
    whole = {
        **fields,
        # Some file systems keep names in another normal form than others.
        "documents": [(unicodedata.normalize("NFC", kept.source.filename), kept.source.sha256) for kept in documents],
        "recipients": [{name: value for name, value in one.items() if value is not None} for one in recipients],
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
