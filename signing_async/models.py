"""The service's records, frozen, and its enumerations, open to unknown values."""

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


class _OpenEnum(StrEnum):
    """An enumeration that accepts unknown values. Each member equals its string, and is hashable and picklable."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        string = str(value)  # the value may be a member of another enumeration
        member = str.__new__(cls, string)
        member._name_ = member._value_ = string
        return member

    def __reduce_ex__(self, protocol: object) -> tuple[type[Self], tuple[str]]:
        # Some releases of Python 3.11 would look up the member by its name.
        return type(self), (self._value_,)


class Language(_OpenEnum):
    """Language of a signing."""

    EN = "EN"
    SV = "SV"


class SigningOrder(_OpenEnum):
    """Whether recipients sign one after the other or all at once."""

    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"


class SigningMethod(_OpenEnum):
    """How a recipient signs."""

    EMAIL = "email"
    BANKID = "bankid"
    APPROVAL = "approval"


class SigningState(StrEnum):
    """State of a signing, derived from ``is_draft``, ``is_completed`` and ``cancelled_at``."""

    DRAFT = "draft"
    SENT = "sent"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """The record lacks these fields: some responses hold only a few."""


_ZERO_DATE = "0000-00-00"  # null in some databases


@attrs.frozen(slots=False)
class Document:
    """A PDF in a signing. ``extra`` holds the fields that the specification does not name.

    An unreadable timestamp is None, and ``extra`` holds its value.
    """

    id: str
    name: str = ""
    completed_at: datetime | None = None
    signed_file_path: str | None = None
    extra: Mapping[str, Any] = attrs.field(factory=dict, hash=False)


@attrs.frozen(slots=False)
class Signing:
    """A signing package. ``extra`` holds the fields that the specification does not name.

    An unreadable timestamp is None, and ``extra`` holds its value.
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
        """The state. Cancelled takes precedence over completed, and completed over draft and sent."""
        unreadable = self.extra.get("cancelled_at")
        if isinstance(unreadable, str) and unreadable.startswith(_ZERO_DATE):
            unreadable = None
        if self.cancelled_at is not None or unreadable:
            return SigningState.CANCELLED
        if self.is_completed:
            return SigningState.COMPLETED
        if self.is_draft is None:
            return SigningState.UNKNOWN
        return SigningState.DRAFT if self.is_draft else SigningState.SENT


@attrs.frozen(slots=False)
class Recipient:
    """A signer. ``extra`` holds the fields that the specification does not name.

    ``completed_at`` is read from one of these, by `Assumptions.recipient_done_fields`.
    """

    id: str
    email: str = ""
    first_name: str | None = None
    last_name: str | None = None
    signing_method: SigningMethod | None = None
    order: int | None = None
    extra: Mapping[str, Any] = attrs.field(factory=dict, hash=False)
    completed_at: datetime | None = attrs.field(default=None, kw_only=True)


@attrs.frozen(slots=False)
class User:
    """The user of the access token. The specification names no fields; ``extra`` holds all except these."""

    id: str | None = None
    email: str | None = None
    name: str | None = None
    extra: Mapping[str, Any] = attrs.field(factory=dict, hash=False)


RECORDS: tuple[type[Any], ...] = (Document, Signing, Recipient, User)
"""The records of responses. `transport.decode` generates the code that decodes them, by the annotations."""


def _to_datetime(value: datetime | float | None) -> datetime | None:
    if isinstance(value, bool) or not isinstance(value, datetime | float | int | None):
        raise ConfigurationError(f"expires_at: must be a datetime or seconds since 1970, got {value!r}")
    try:
        if isinstance(value, float | int):
            return datetime.fromtimestamp(value, UTC)
    except (OverflowError, OSError, ValueError):
        raise ConfigurationError(f"expires_at: out of range, got {value!r}") from None
    if value is not None and value.tzinfo is None:
        raise ConfigurationError(f"expires_at: must have a time zone, got {value!r}")
    return value


def _check_token(instance: Token, attribute: attrs.Attribute[str], value: object) -> None:
    if not isinstance(value, str) or not value or not value.isascii() or not value.isprintable() or " " in value:
        # The value is not shown: it may be a real token with a typing error.
        raise ConfigurationError(f"{attribute.name}: must be a string of printable ASCII characters without spaces")


@attrs.frozen
class Token:
    """An access token with its refresh token. Its repr shows neither, and it cannot be pickled: use a `TokenStore`.

    ``expires_at`` is an aware datetime (or seconds since 1970), or None if unknown. ``origin`` is that of
    the tenant that issued the token: an `OAuth` of another tenant refuses the token. None fits any tenant.
    """

    access_token: str = attrs.field(repr=False, validator=_check_token)
    refresh_token: str | None = attrs.field(default=None, repr=False, validator=attrs.validators.optional(_check_token))
    expires_at: datetime | None = attrs.field(default=None, converter=_to_datetime)
    token_type: str = attrs.field(default="Bearer", validator=_check_token)
    # Not compared: a user's own store may not keep it.
    origin: str | None = attrs.field(
        default=None, kw_only=True, repr=False, eq=False, validator=attrs.validators.optional(_check_token)
    )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Token cannot be pickled, because it holds secrets: use a TokenStore")

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
