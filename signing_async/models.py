"""The records of the service, frozen, and its enumerations, open to values that are not known yet."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NoReturn, Self

import attrs

from .errors import ConfigurationError

__all__ = [
    "Document",
    "Language",
    "NewRecipient",
    "Recipient",
    "Signing",
    "SigningMethod",
    "SigningOrder",
    "SigningState",
    "Token",
    "User",
]


class _Open(StrEnum):
    """An enumeration that keeps a value which it does not list as it came: equal to its text, usable, picklable."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        text = str(value)  # of another enumeration's member its text
        member = str.__new__(cls, text)
        member._name_ = member._value_ = text
        return member


class Language(_Open):
    """Language of a signing."""

    EN = "EN"
    SV = "SV"


class SigningOrder(_Open):
    """Whether recipients sign one after the other or all at once."""

    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"


class SigningMethod(_Open):
    """How a recipient signs."""

    EMAIL = "email"
    BANKID = "bankid"
    APPROVAL = "approval"


class SigningState(StrEnum):
    """Where a signing stands, derived from ``is_draft``, ``is_completed`` and ``cancelled_at``."""

    DRAFT = "draft"
    SENT = "sent"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """The record does not carry what tells: some answers hold only a few fields."""


_ZERO_DATE = "0000-00-00"  # null, as some databases write it


# Instances with a dict: a frozen class with slots costs more than twice as much to make, and lists make thousands.
@attrs.frozen(slots=False)
class Document:
    """A PDF in a signing. ``extra`` holds the fields that the specification does not name.

    A timestamp in an unknown form is None, and ``extra`` holds its value under the field's name.
    """

    id: str
    name: str = ""
    completed_at: datetime | None = None
    signed_file_path: str | None = None
    extra: Mapping[str, Any] = attrs.field(factory=dict, hash=False)


@attrs.frozen(slots=False)
class Signing:
    """A signing package. ``extra`` holds the fields that the specification does not name.

    A timestamp in an unknown form is None, and ``extra`` holds its value under the field's name.
    """

    id: str
    name: str = ""
    language: Language | None = None
    signing_order: SigningOrder | None = None
    message: str | None = None
    is_draft: bool | None = None
    is_completed: bool | None = None
    cancelled_at: datetime | None = None
    updated_at: datetime | None = None
    documents: tuple[Document, ...] = ()
    extra: Mapping[str, Any] = attrs.field(factory=dict, hash=False)

    @property
    def state(self) -> SigningState:
        """Cancelled before completed, completed before draft or sent."""
        unread = self.extra.get("cancelled_at")  # a timestamp in an unknown form
        if isinstance(unread, str) and unread.startswith(_ZERO_DATE):
            unread = None
        if self.cancelled_at is not None or unread:
            return SigningState.CANCELLED
        if self.is_completed:
            return SigningState.COMPLETED
        if self.is_draft is None:
            return SigningState.UNKNOWN
        return SigningState.DRAFT if self.is_draft else SigningState.SENT


@attrs.frozen(slots=False)
class Recipient:
    """Someone who has to sign. ``extra`` holds the fields that the specification does not name."""

    id: str
    email: str = ""
    first_name: str | None = None
    last_name: str | None = None
    signing_method: SigningMethod | None = None
    order: int | None = None
    extra: Mapping[str, Any] = attrs.field(factory=dict, hash=False)


@attrs.frozen(slots=False)
class User:
    """Who the access token belongs to. The specification names none of its fields: ``extra`` holds the rest."""

    id: str | None = None
    email: str | None = None
    name: str | None = None
    extra: Mapping[str, Any] = attrs.field(factory=dict, hash=False)


def _moment(value: datetime | float | None) -> datetime | None:
    if isinstance(value, bool) or not isinstance(value, datetime | float | int | None):
        raise ConfigurationError(f"Token.expires_at must be a datetime or seconds since 1970, not {value!r}")
    try:
        if isinstance(value, float | int):
            return datetime.fromtimestamp(value, UTC)
    except (OverflowError, OSError, ValueError):
        raise ConfigurationError(f"Token.expires_at is out of range: {value!r}") from None
    if value is not None and value.tzinfo is None:
        raise ConfigurationError(f"Token.expires_at needs a time zone: {value!r}")
    return value


def _check_token(instance: Token, attribute: attrs.Attribute[str], value: object) -> None:
    if not isinstance(value, str) or not value or not value.isascii() or not value.isprintable() or " " in value:
        raise ConfigurationError(f"Token.{attribute.name} must be a text of printable ASCII without spaces")


@attrs.frozen
class Token:
    """An access token, and what renews it. Its text shows neither, and it refuses to be pickled: a store keeps it.

    ``expires_at`` is an aware datetime (or seconds since 1970); None when the service did not say. ``origin`` is the
    tenant that issued the token: an `OAuth` uses it there and nowhere else. None fits any tenant.
    """

    access_token: str = attrs.field(repr=False, validator=_check_token)
    refresh_token: str | None = attrs.field(default=None, repr=False, validator=attrs.validators.optional(_check_token))
    expires_at: datetime | None = attrs.field(default=None, converter=_moment)
    token_type: str = attrs.field(default="Bearer", validator=_check_token)
    # A store of the user's own may not keep it.
    origin: str | None = attrs.field(
        default=None, kw_only=True, repr=False, eq=False, validator=attrs.validators.optional(_check_token)
    )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Token is not pickled, so that it does not end up where secrets do not belong; use a TokenStore"
        )

    def __copy__(self) -> Token:
        return self

    def __deepcopy__(self, memo: object) -> Token:
        return self


@attrs.frozen
class NewRecipient:
    """A recipient to add. ``extra`` holds fields that the specification does not name, such as a phone number."""

    email: str
    first_name: str | None = None
    last_name: str | None = None
    signing_method: SigningMethod | str = SigningMethod.EMAIL
    order: int | None = None
    extra: Mapping[str, Any] = attrs.field(factory=dict, hash=False)
