"""A signing with its documents and recipients: checked as a whole before it is sent, and identified by its content."""

from __future__ import annotations

import asyncio
import hashlib
import json
import unicodedata
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import attrs

from ..documents.source import PdfSource, Source, is_seekable
from ..errors import InvalidRequest
from ..models import Language, NewRecipient, SigningOrder
from ..recipients import check_recipient
from ..signings import check_signing
from .journal import check_key

__all__ = ["CheckedPdf", "NewRecipient", "Prepared", "SigningPackage", "prepare"]

T = TypeVar("T")

_RECIPIENT_FIELDS = ("email", "first_name", "last_name", "signing_method", "order")


def _documents(value: Iterable[Source | PdfSource]) -> tuple[Source | PdfSource, ...]:
    return _as_tuple(value)


def _recipients(value: Iterable[NewRecipient]) -> tuple[NewRecipient, ...]:
    return _as_tuple(value)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """Return the items as a tuple, which can be read twice. A single source or a wrong value is kept for `prepare`."""
    single = isinstance(value, str | bytes | bytearray | memoryview) or hasattr(value, "read")
    items: tuple[Any, ...] = tuple(value) if isinstance(value, Iterable) and not single else value
    return items


@attrs.frozen
class SigningPackage:
    """A signing with its documents and recipients, to be sent in one call. It is checked when it is dispatched.

    ``documents`` are paths, bytes, binary files, async iterators or `PdfSource`. In a sequential signing the recipients
    sign by their ``order``; if none has one, in the order of the list. ``key`` identifies the package in a journal:
    each key (at most 1,000 bytes) is sent once. Without a key, a hash of the content identifies it: the fields, the
    recipients, and the documents' names and bytes. Identical packages need keys: without keys, the second one is
    refused in one `dispatch_many`; in a later call it counts as a repetition and returns the signing of the first. ::

        SigningPackage("Lease 2031", "EN", ["lease.pdf"], [NewRecipient("anna@example.com", "Anna", "Berg")],
                       key="lease-2031")
    """

    name: str
    language: Language | str
    documents: tuple[Source | PdfSource, ...] = attrs.field(converter=_documents, repr=False)
    recipients: tuple[NewRecipient, ...] = attrs.field(converter=_recipients)
    signing_order: SigningOrder | str | None = None
    message: str | None = None
    key: str | None = None


@attrs.frozen
class CheckedPdf:
    """A document that was checked and can be opened again. Its file is not kept open."""

    source: PdfSource
    """The source with its sha256, which the upload verifies."""
    size: int


@attrs.frozen
class Prepared:
    """A valid package. Close it after use."""

    key: str
    content: str
    """The hash of the content."""
    fields: Mapping[str, Any]
    documents: Sequence[CheckedPdf]
    recipients: Sequence[Mapping[str, Any]]
    """The arguments of `Recipients.add`."""
    buffers: ExitStack
    """Closes the copies of sources that can be read only once."""

    @property
    def label(self) -> str:
        """The key, or the name of a package without a key, for messages."""
        return repr(self.key if self.key != self.content else self.fields["name"])

    def close(self) -> None:
        self.buffers.close()


class _Problems:
    """The problems of a package."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.all_transient = True

    @contextmanager
    def of(self, field: str = "") -> Iterator[None]:
        """Collect the problems of an `InvalidRequest` that the block raises, with ``field`` before each of them."""
        try:
            yield
        except InvalidRequest as error:
            self.found += [field + problem.removeprefix("source: ") for problem in error.problems]
            self.all_transient = self.all_transient and error.transient

    def items(self, field: str, values: tuple[T, ...]) -> Iterator[tuple[int, T]]:
        """Yield the values with their numbers; note the problem if they are not a list, or an empty one."""
        if isinstance(values, tuple) and values:
            yield from enumerate(values)
        else:
            problem = "not be empty" if values == () else f"be a list, got {type(values).__name__}"
            self.found.append(f"{field}: must {problem}")
            self.all_transient = False


async def prepare(package: object, max_pdf_bytes: int) -> Prepared:
    """Check a package and determine its key; raise one `InvalidRequest` that lists all problems."""
    if not isinstance(package, SigningPackage):
        raise InvalidRequest(f"package: must be a SigningPackage, got {type(package).__name__}")
    fields = {name: getattr(package, name) for name in ("name", "language", "signing_order", "message")}
    problems, recipients, documents = _Problems(), list[dict[str, Any]](), list[CheckedPdf]()
    with problems.of():
        check_signing(fields)
    with problems.of():
        if package.key is not None:
            check_key(package.key)
    for number, recipient in problems.items("recipients", package.recipients):
        separator = "." if isinstance(recipient, NewRecipient) else ": "
        with problems.of(f"recipients[{number}]{separator}"):
            recipients.append(_check_recipient(recipient))
    if package.signing_order == SigningOrder.SEQUENTIAL and isinstance(package.recipients, tuple):
        with problems.of():
            orders = _check_orders([getattr(recipient, "order", None) for recipient in package.recipients])
            recipients = [{**recipient, "order": order} for recipient, order in zip(recipients, orders, strict=False)]
    with ExitStack() as buffers:
        for number, source in problems.items("documents", package.documents):
            with problems.of(f"documents[{number}]: "):
                documents.append(await _check_document(source, max_pdf_bytes, buffers))
        if problems.found:
            raise InvalidRequest("; ".join(problems.found), problems=problems.found, transient=problems.all_transient)
        content = _hash_content(fields, documents, recipients)
        return Prepared(package.key or content, content, fields, documents, recipients, buffers.pop_all())


def _check_recipient(recipient: object) -> dict[str, Any]:
    """Return the arguments of `Recipients.add`."""
    if not isinstance(recipient, NewRecipient):
        raise InvalidRequest(f"must be a NewRecipient, got {type(recipient).__name__}")
    named = {name: getattr(recipient, name) for name in _RECIPIENT_FIELDS}
    check_recipient(named, recipient.extra)
    try:
        # A copy: the caller may change the mapping later.
        return {**named, "extra": json.loads(json.dumps(dict(recipient.extra), allow_nan=False))}
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"extra: cannot be sent as JSON: {error}") from None


def _check_orders(orders: list[int | None]) -> list[int | None]:
    """Return the orders of sequential recipients: as given, or in the order of the list if none is given."""
    if all(order is None for order in orders):
        return [*range(1, len(orders) + 1)]
    problems = []
    for number, order in enumerate(orders):
        if order is None:
            problems.append(f"recipients[{number}].order: missing, though other recipients have one")
        elif order in orders[:number]:
            problems.append(f"recipients[{number}].order: {order!r} is the order of recipients[{orders.index(order)}]")
    if problems:
        raise InvalidRequest("; ".join(problems), problems=problems)
    return orders


async def _check_document(given: Source | PdfSource, max_pdf_bytes: int, buffers: ExitStack) -> CheckedPdf:
    """Check one document and hash it. Its file isn't kept open, unless its source can be read only once."""
    source = PdfSource(given)
    pdf = await source.open(max_pdf_bytes)
    with ExitStack() as stack:
        stack.callback(pdf.close)
        digest = await asyncio.to_thread(pdf.digest)
        if source.sha256 not in (None, digest):
            raise InvalidRequest(f"{source.filename}: sha256 mismatch: expected {source.sha256}, found {digest}")
        if not _is_single_use(source.source):
            return CheckedPdf(source.pinned(digest), pdf.size)
        buffers.push(stack.pop_all())
        return CheckedPdf(source.pinned(digest, pdf), pdf.size)


def _is_single_use(source: Any) -> bool:
    """Return whether the source can be read only once, such as a pipe."""
    return isinstance(source, AsyncIterable) or (hasattr(source, "read") and not is_seekable(source))


def _hash_content(
    fields: Mapping[str, Any], documents: Iterable[CheckedPdf], recipients: Iterable[Mapping[str, Any]]
) -> str:
    """Return a hash that is the same for the same package on every machine. Paths are not part of it."""
    content = {
        **fields,
        # File systems differ in the Unicode normal form of names.
        "documents": [(unicodedata.normalize("NFC", pdf.source.filename), pdf.source.sha256) for pdf in documents],
        "recipients": [{name: value for name, value in each.items() if value is not None} for each in recipients],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
