"""Every detail that the service's specification leaves open, as one named setting with real alternatives.

Example::

    Sandbox(profile=Profile(pagination="link_header", timestamps="epoch_millis"))
    Sandbox(profile=Profile.rfc9457())
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

_CHOICES: dict[str, tuple[Any, ...]] = {
    "pagination": ("meta_cursor", "top_cursor", "next_url", "link_header", "has_more", "bare"),
    "list_order": ("newest_first", "oldest_first"),
    "over_page_size": ("clamp", "refuse"),
    "recipients_list": ("envelope", "paged", "bare"),
    "error_shape": ("flat", "nested", "rfc9457", "list"),
    "token_error_shape": ("oauth", "profile"),
    "timestamps": ("iso_z", "iso_micros", "iso_offset", "epoch_seconds", "epoch_millis"),
    "ids": ("uuid", "ulid", "integer"),
    "request_id": ("both", "header", "body", "none"),
    "missing_token_status": (401, 403, 400),
    "expired_token_status": (401, 403, 400),
    "created_status": (201, 200),
    "send_status": (200, 202, 204),
    "remind_status": (200, 202, 204),
    "not_editable_status": (400, 409, 422),
    "expires_in_unit": ("seconds", "minutes", "milliseconds"),
    "signature": ("hex", "base64", "sha256", "timestamped"),
    "event_names": ("dotted", "snake", "upper"),
    "event_shape": ("nested", "flat"),
    "default_signing_order": ("parallel", "sequential"),
    "unique_order": ("sequential", "always"),
    "document_name": ("filename", "stem"),
    "megabyte": (2**20, 10**6),
    "remind_finished": ("skip", "refuse"),
    "remind_expired": ("refuse", "renew"),
    "decline_effect": ("cancels", "nothing"),
}
_NAMES = (
    "cursor_param",
    "limit_param",
    "items_field",
    "request_id_header",
    "recipient_completed_field",
    "phone_field",
    "identification_field",
)
_COUNTS = {"page_size": 1, "max_page_size": 1, "max_documents": 1, "max_recipients": 1, "invitation_days": 1}
_SECONDS = {"access_token_lifetime": 1, "refresh_token_lifetime": 1, "code_lifetime": 1, "replay_grace": 0}
_LONGEST = 10 * 365 * 86_400
_SWITCHES = (
    "documents_in_list",
    "accept_exact_limit",
    "pkce",
    "issue_refresh_tokens",
    "rotate_refresh_tokens",
    "revoke_family_on_replay",
    "refresh_revokes_access_tokens",
    "expiry_blocks_signing",
)
_SETS: dict[str, tuple[str, ...] | None] = {
    "required_signing_fields": ("signing_order", "message"),
    "required_recipient_fields": ("first_name", "last_name", "order", "signing_method"),
    "signing_methods": None,
    "phone_methods": None,
    "identification_methods": None,
}
_RECIPIENT_FIELDS = {"id", "first_name", "last_name", "email", "signing_method", "order", "declined_at"}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How this sandbox answers where the specification says "not shown". A wrong value is a ValueError naming it."""

    pagination: Literal["meta_cursor", "top_cursor", "next_url", "link_header", "has_more", "bare"] = "meta_cursor"
    """Where a page of signings says how to go on: `meta.next_cursor`, `next_cursor`, the address in `links.next`, a
    bare list with a `Link` header, `has_more` (the last item's id is the cursor), or a bare list of everything."""
    cursor_param: str = "cursor"
    """Query parameter that carries the cursor; for example `after` or `starting_after`."""
    limit_param: str = "limit"
    """Query parameter that asks for a page size; for example `per_page` or `page_size`."""
    items_field: str = "data"
    """Where a page holds its items; for example `items` or `results`."""
    page_size: int = 25
    """Signings on a page when nothing is asked for."""
    max_page_size: int = 100
    """The most signings on a page."""
    over_page_size: Literal["clamp", "refuse"] = "clamp"
    """A larger page asked for: the largest is given, or 400."""
    list_order: Literal["newest_first", "oldest_first"] = "newest_first"
    """Order of the list of signings, by creation."""
    documents_in_list: bool = False
    """Whether the signings of a list carry their documents."""
    recipients_list: Literal["envelope", "paged", "bare"] = "envelope"
    """The list of recipients: all in an envelope, in pages like the signings, or a bare list."""
    record_field: str | None = None
    """Member that wraps a single record, such as `data`; None: the record itself."""

    error_shape: Literal["flat", "nested", "rfc9457", "list"] = "flat"
    """`{code, message, errors: {field: [..]}}`, `{error: {code, message, details: [{field, message}]}}`,
    `application/problem+json`, or `{errors: [{code, message, field}]}`."""
    token_error_shape: Literal["oauth", "profile"] = "oauth"
    """Errors of the token endpoint: RFC 6749's `{error, error_description}`, or like all others."""
    timestamps: Literal["iso_z", "iso_micros", "iso_offset", "epoch_seconds", "epoch_millis"] = "iso_z"
    """`2026-01-31T12:00:00Z`, with microseconds, with an offset (`+01:00`), or numbers since the epoch."""
    ids: Literal["uuid", "ulid", "integer"] = "uuid"
    """Identifiers: UUIDs, 26 letters and digits that sort by age, or numbers as strings."""
    request_id: Literal["both", "header", "body", "none"] = "both"
    """Where answers carry the request id."""
    request_id_header: str = "request_id"
    """Name of that header; for example `X-Request-Id`."""

    missing_token_status: Literal[401, 403, 400] = 401
    """Status without an access token."""
    expired_token_status: Literal[401, 403, 400] = 401
    """Status for an access token that is expired, revoked or unknown."""
    created_status: Literal[201, 200] = 201
    """Status of creating a signing, a document or a recipient."""
    send_status: Literal[200, 202, 204] = 200
    """Status of sending; with 204 there is no body, else it is the signing."""
    remind_status: Literal[200, 202, 204] = 200
    """Status of reminding; with 204 there is no body, else it is the recipient."""
    not_editable_status: Literal[400, 409, 422] = 400
    """Status of adding a document or recipient to a signing that is no longer editable."""

    pkce: bool = True
    """Whether a code asked for with a `code_challenge` (S256) needs its `code_verifier`; else both are ignored."""
    expires_in_unit: Literal["seconds", "minutes", "milliseconds"] = "seconds"
    """Unit of the token response's `expires_in`."""
    access_token_lifetime: float = 3600
    """Seconds an access token is valid."""
    refresh_token_lifetime: float = 30 * 86_400
    """Seconds a refresh token is valid."""
    code_lifetime: float = 600
    """Seconds an authorization code is valid."""
    issue_refresh_tokens: bool = True
    """Whether there are refresh tokens at all."""
    rotate_refresh_tokens: bool = True
    """Whether a refresh gives a new refresh token and ends the old one."""
    revoke_family_on_replay: bool = True
    """Whether an old refresh token (or code), used again, ends all tokens that came from the same consent."""
    replay_grace: float = 0
    """Seconds in which an old refresh token may still be used again without harm."""
    refresh_revokes_access_tokens: bool = False
    """Whether a refresh ends the access tokens issued before."""

    signature: Literal["hex", "base64", "sha256", "timestamped"] = "hex"
    """X-Signature: hex or base64 of the HMAC over the raw body, `sha256=` and hex, `t=..,v1=..` over `{t}.{body}`."""
    event_names: Literal["dotted", "snake", "upper"] = "dotted"
    """`signing.completed`, `signing_completed` or `SIGNING_COMPLETED`."""
    event_shape: Literal["nested", "flat"] = "nested"
    """Payload: `{"event": {"id", "type"}, ...}`, or `{"event.id": .., "event.type": .., ...}`."""

    required_signing_fields: tuple[str, ...] = ()
    """Which of `signing_order` and `message` must be given."""
    default_signing_order: Literal["parallel", "sequential"] = "parallel"
    """`signing_order` when it is not given."""
    required_recipient_fields: tuple[str, ...] = ()
    """Which of `first_name`, `last_name`, `order` and `signing_method` must be given."""
    unique_order: Literal["sequential", "always"] = "sequential"
    """Whether `order` must be unique in sequential signings only, or in all."""
    signing_methods: tuple[str, ...] = ("email", "bankid", "approval", "sms")
    """The signing methods; the first is taken when none is given."""
    phone_methods: tuple[str, ...] = ("sms",)
    """Methods that need the phone field."""
    phone_field: str = "phone"
    """For example `phone_number` or `mobile`."""
    identification_methods: tuple[str, ...] = ("bankid",)
    """Methods that need the identification field."""
    identification_field: str = "personal_number"
    """For example `identification_number` or `ssn`."""
    recipient_completed_field: str = "completed_at"
    """For example `signed_at`."""

    megabyte: Literal[1048576, 1000000] = 1_048_576
    """What MB means in "10 MB"."""
    accept_exact_limit: bool = True
    """Whether a file of exactly 10 MB is accepted."""
    document_name: Literal["filename", "stem"] = "filename"
    """A document's name: the file's, with or without `.pdf`."""
    max_documents: int | None = None
    """The most documents of a signing."""
    max_recipients: int | None = None
    """The most recipients of a signing."""

    invitation_days: int = 14
    """Days an invitation is valid; the specification says 14."""
    expiry_blocks_signing: bool = True
    """Whether a recipient can no longer sign after that."""
    remind_expired: Literal["refuse", "renew"] = "refuse"
    """A reminder after that: 400 `invitation_expired`, or a new invitation."""
    remind_finished: Literal["skip", "refuse"] = "skip"
    """A reminder to who has finished or is not yet invited: nothing is sent, or 400."""
    decline_effect: Literal["cancels", "nothing"] = "cancels"
    """What a declined signing comes to: it is cancelled, or the others may still sign, and it is never completed."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices or isinstance(value, bool):
                raise _wrong(name, value, "one of " + ", ".join(repr(choice) for choice in choices))
        for name in _NAMES:
            _check_name(name, getattr(self, name))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "True or False")
        self._check_numbers()
        self._check_sets()
        if self.record_field is not None:
            _check_name("record_field", self.record_field)
        if self.cursor_param == self.limit_param:
            raise _wrong("cursor_param", self.cursor_param, "another name than limit_param")
        own = (self.phone_field, self.identification_field, self.recipient_completed_field)
        if len(set(own) - _RECIPIENT_FIELDS) < len(own):
            fields = "phone_field, identification_field and recipient_completed_field"
            raise ValueError(f"Profile: {fields} must be new names, each another one, not {own!r}")

    def _check_numbers(self) -> None:
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if value is None and name in {"max_documents", "max_recipients"}:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 1_000_000:
                raise _wrong(name, value, f"a whole number from {least} to 1000000")
        for name, least in _SECONDS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= _LONGEST:
                raise _wrong(name, value, f"a number of seconds from {least} to {_LONGEST}")
        if self.page_size > self.max_page_size:
            raise _wrong("page_size", self.page_size, f"at most max_page_size ({self.max_page_size})")

    def _check_sets(self) -> None:
        for name, among in _SETS.items():
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(item, str) and item for item in value):
                raise _wrong(name, value, "a tuple of names")
            if name == "signing_methods" and not value:
                raise _wrong(name, value, "at least one method")
            allowed = self.signing_methods if among is None else among
            if value == getattr(type(self), name):  # a default names methods that another setting may have taken away
                value = [item for item in value if item in allowed]
            if unknown := [item for item in value if item not in allowed]:
                raise _wrong(name, unknown[0], "one of " + ", ".join(repr(item) for item in allowed))
            object.__setattr__(self, name, tuple(value))

    @property
    def max_pdf_bytes(self) -> int:
        """The largest file that is accepted."""
        return 10 * self.megabyte - (0 if self.accept_exact_limit else 1)

    @classmethod
    def laravel(cls, **changes: Any) -> Profile:
        """As a service written with Laravel and its API resources would answer."""
        settings: dict[str, Any] = {
            "pagination": "next_url",
            "limit_param": "per_page",
            "page_size": 15,
            "record_field": "data",
            "recipients_list": "paged",
            "timestamps": "iso_micros",
            "request_id": "header",
            "request_id_header": "X-Request-Id",
            "send_status": 202,
            "remind_status": 204,
            "refresh_revokes_access_tokens": True,
        }
        return cls(**settings | changes)

    @classmethod
    def rfc9457(cls, **changes: Any) -> Profile:
        """As a service made of standards would answer: problem details, Link headers, numbered ids."""
        settings: dict[str, Any] = {
            "pagination": "link_header",
            "recipients_list": "bare",
            "error_shape": "rfc9457",
            "timestamps": "iso_offset",
            "ids": "ulid",
            "request_id": "header",
            "send_status": 204,
            "remind_status": 202,
            "not_editable_status": 409,
            "signature": "sha256",
            "recipient_completed_field": "signed_at",
        }
        return cls(**settings | changes)

    @classmethod
    def numeric(cls, **changes: Any) -> Profile:
        """As a service would answer that likes numbers: epochs, counted ids, `has_more`, nested errors."""
        settings: dict[str, Any] = {
            "pagination": "has_more",
            "cursor_param": "starting_after",
            "items_field": "items",
            "list_order": "oldest_first",
            "error_shape": "nested",
            "token_error_shape": "profile",
            "timestamps": "epoch_millis",
            "ids": "integer",
            "request_id": "body",
            "created_status": 200,
            "expired_token_status": 403,
            "expires_in_unit": "minutes",
            "signature": "base64",
            "event_names": "upper",
            "document_name": "stem",
            "megabyte": 10**6,
            "accept_exact_limit": False,
        }
        return cls(**settings | changes)

    @classmethod
    def preset(cls, name: str) -> Profile:
        """One of the named combinations: default, laravel, rfc9457, numeric."""
        makers: dict[str, Callable[[], Profile]] = {
            "default": cls,
            "laravel": cls.laravel,
            "rfc9457": cls.rfc9457,
            "numeric": cls.numeric,
        }
        if name not in makers:
            raise ValueError(f"there is no profile {name!r}; there are {', '.join(makers)}")
        return makers[name]()

    def replace(self, **changes: Any) -> Profile:
        """This profile with other values for some settings."""
        return dataclasses.replace(self, **changes)


def _wrong(name: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"Profile.{name} must be {wanted}, not {value!r}")


def _check_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", value):
        raise _wrong(name, value, "a name of letters, digits and _ . -")
