"""A whole signing package in one call, and thousands of them, resumable: each is sent once, however often it is tried."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from .models import Language, Signing, SigningMethod, SigningOrder
from .pdf import PdfSource, Source

__all__ = ["DispatchResult", "NewRecipient", "SigningPackage"]


def _documents(value: Iterable[Source | PdfSource]) -> tuple[Source | PdfSource, ...]:
    return _listed(value)


def _recipients(value: Iterable[NewRecipient]) -> tuple[NewRecipient, ...]:
    return _listed(value)


def _listed(value: Any) -> Any:
    """As a tuple, so that it can be read more than once; what is no list is kept, and refused with all else later."""
    single = isinstance(value, str | bytes | bytearray | memoryview | os.PathLike) or hasattr(value, "read")
    return tuple(value) if isinstance(value, Iterable) and not single else value


@attrs.frozen
class NewRecipient:
    """Somebody who is to sign. ``extra`` holds the fields that the specification does not name, such as a phone number."""

    email: str
    first_name: str | None = None
    last_name: str | None = None
    signing_method: SigningMethod | str = SigningMethod.EMAIL
    order: int | None = None
    extra: Mapping[str, Any] = attrs.field(factory=dict, hash=False)


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
    documents: tuple[Source | PdfSource, ...] = attrs.field(converter=_documents)
    recipients: tuple[NewRecipient, ...] = attrs.field(converter=_recipients)
    signing_order: SigningOrder | str | None = None
    message: str | None = None
    key: str | None = None


@attrs.frozen
class DispatchResult:
    """What came of one package: ``error`` is None when it was sent, now or by an earlier run.

    ``signing`` is the signing as sent; with an error, the draft as far as one is known.
    """

    package: SigningPackage
    signing: Signing | None = None
    error: Exception | None = None
