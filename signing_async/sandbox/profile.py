"""Every detail that the specification marks "not shown", as a named setting with realistic alternatives.

Example::

    Sandbox(profile=Profile(pagination="link_header", timestamps="epoch_millis"))
    Sandbox(profile=Profile.rfc9457())
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .. import _checks

_COUNTS = {"page_size", "max_page_size", "max_documents", "max_recipients", "invitation_days"}
_SECONDS = {"access_token_lifetime": 1, "refresh_token_lifetime": 1, "code_lifetime": 1, "replay_grace": 0}
_LONGEST = 10 * 365 * 86_400
_OPTIONAL = {"max_documents", "max_recipients", "record_field"}
_REQUIRABLE = {
    "required_signing_fields": ("signing_order", "message"),
    "required_recipient_fields": ("first_name", "last_name", "order", "signing_method"),
}
_RECIPIENT_FIELDS = {"id", "first_name", "last_name", "email", "signing_method", "order", "declined_at"}
_PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "laravel": {
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
    },
    "rfc9457": {
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
    },
    "numeric": {
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
    },
}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How the sandbox behaves where the specification says "not shown". Raise ValueError for a wrong value."""

    pagination: Literal["meta_cursor", "top_cursor", "next_url", "link_header", "has_more", "bare"] = "meta_cursor"
    """Where a page of signings has its cursor: in `meta.next_cursor`, in `next_cursor`, in the URL `links.next`, in a
    `Link` header beside a bare list, in the last item's id with `has_more`; or there is one bare list of them all."""
    cursor_param: str = "cursor"
    """Query parameter of the cursor; for example `after` or `starting_after`."""
    limit_param: str = "limit"
    """Query parameter of the page size; for example `per_page` or `page_size`."""
    items_field: str = "data"
    """Member that holds a page's items; for example `items` or `results`."""
    page_size: int = 25
    """Default page size."""
    max_page_size: int = 100
    """Largest page size."""
    over_page_size: Literal["clamp", "refuse"] = "clamp"
    """A request for a larger page gets the largest page, or 400."""
    list_order: Literal["newest_first", "oldest_first"] = "newest_first"
    """Order of the list of signings, by creation."""
    documents_in_list: bool = False
    """Whether the signings of a list include their documents."""
    recipients_list: Literal["envelope", "paged", "bare"] = "envelope"
    """The list of recipients: all of them in an object, pages like those of signings, or a bare list."""
    record_field: str | None = None
    """Member that wraps a single record, such as `data`; None for no wrapper."""

    error_shape: Literal["flat", "nested", "rfc9457", "list"] = "flat"
    """`{code, message, errors: {field: [..]}}`, `{error: {code, message, details: [{field, message}]}}`,
    `application/problem+json`, or `{errors: [{code, message, field}]}`."""
    token_error_shape: Literal["oauth", "profile"] = "oauth"
    """Errors of the token endpoint: RFC 6749's `{error, error_description}`, or as everywhere else."""
    timestamps: Literal["iso_z", "iso_micros", "iso_offset", "epoch_seconds", "epoch_millis"] = "iso_z"
    """`2026-01-31T12:00:00Z`, with microseconds, with an offset (`+01:00`), or seconds or
    milliseconds since the epoch."""
    ids: Literal["uuid", "ulid", "integer"] = "uuid"
    """Identifiers: UUIDs, 26 letters and digits that sort by age, or numbers as strings."""
    request_id: Literal["both", "header", "body", "none"] = "both"
    """Where responses carry the request id."""
    request_id_header: str = "request_id"
    """Name of the header with the request id; for example `X-Request-Id`."""

    missing_token_status: Literal[401, 403, 400] = 401
    """Status without an access token."""
    expired_token_status: Literal[401, 403, 400] = 401
    """Status for an access token that is expired, revoked or unknown."""
    created_status: Literal[201, 200] = 201
    """Status of creating a signing, a document or a recipient."""
    send_status: Literal[200, 202, 204] = 200
    """Status of sending. The body is the signing; 204 has no body."""
    remind_status: Literal[200, 202, 204] = 200
    """Status of reminding. The body is the recipient; 204 has no body."""
    not_editable_status: Literal[400, 409, 422] = 400
    """Status of adding a document or recipient to a signing that is no longer editable."""

    pkce: bool = True
    """Whether a code requested with a `code_challenge` (S256) needs its `code_verifier`; if not, both are ignored."""
    expires_in_unit: Literal["seconds", "minutes", "milliseconds"] = "seconds"
    """Unit of the token response's `expires_in`."""
    access_token_lifetime: float = 3600
    """Seconds an access token is valid."""
    refresh_token_lifetime: float = 30 * 86_400
    """Seconds a refresh token is valid."""
    code_lifetime: float = 600
    """Seconds an authorization code is valid."""
    issue_refresh_tokens: bool = True
    """Whether refresh tokens are issued at all."""
    rotate_refresh_tokens: bool = True
    """Whether a refresh issues a new refresh token and invalidates the old one."""
    revoke_family_on_replay: bool = True
    """Whether reuse of an old refresh token (or code) revokes all tokens of the same consent."""
    replay_grace: float = 0
    """Seconds after a refresh in which the old refresh token still works."""
    refresh_revokes_access_tokens: bool = False
    """Whether a refresh revokes the access tokens issued before."""

    signature: Literal["hex", "base64", "sha256", "timestamped"] = "hex"
    """X-Signature: the HMAC of the raw body in hex, base64, or `sha256=` and hex; or `t=..,v1=..` over `{t}.{body}`."""
    event_names: Literal["dotted", "snake", "upper"] = "dotted"
    """`signing.completed`, `signing_completed` or `SIGNING_COMPLETED`."""
    event_shape: Literal["nested", "flat"] = "nested"
    """Payload: `{"event": {"id", "type"}, ...}`, or `{"event.id": .., "event.type": .., ...}`."""

    required_signing_fields: tuple[str, ...] = ()
    """Which of `signing_order` and `message` are required."""
    default_signing_order: Literal["parallel", "sequential"] = "parallel"
    """`signing_order` if the request does not give it."""
    required_recipient_fields: tuple[str, ...] = ()
    """Which of `first_name`, `last_name`, `order` and `signing_method` are required."""
    unique_order: Literal["sequential", "always"] = "sequential"
    """Whether `order` must be unique in sequential signings only, or always."""
    signing_methods: tuple[str, ...] = ("email", "bankid", "approval", "sms")
    """The signing methods; the first is the default."""
    phone_methods: tuple[str, ...] = ("sms",)
    """Methods that need the phone field."""
    phone_field: str = "phone"
    """Name of the phone field; for example `phone_number` or `mobile`."""
    identification_methods: tuple[str, ...] = ("bankid",)
    """Methods that need the identification field."""
    identification_field: str = "personal_number"
    """Name of the identification field; for example `identification_number` or `ssn`."""
    recipient_completed_field: str = "completed_at"
    """Name of the field with the time of signing; for example `signed_at`."""

    megabyte: Literal[1048576, 1000000] = 1_048_576
    """Bytes per MB in the limit of 10 MB."""
    accept_exact_limit: bool = True
    """Whether a file of exactly 10 MB is accepted."""
    document_name: Literal["filename", "stem"] = "filename"
    """A document's name: the file name with or without `.pdf`."""
    max_documents: int | None = None
    """Largest number of documents of a signing."""
    max_recipients: int | None = None
    """Largest number of recipients of a signing."""

    invitation_days: int = 14
    """Days an invitation is valid; the specification says 14."""
    expiry_blocks_signing: bool = True
    """Whether a recipient whose invitation expired can no longer sign or decline."""
    remind_expired: Literal["refuse", "renew"] = "refuse"
    """A reminder of an expired invitation: 400 `invitation_expired`, or the invitation is renewed."""
    remind_finished: Literal["skip", "refuse"] = "skip"
    """A reminder to a recipient who has finished or is not invited yet sends nothing, or is refused with 400."""
    decline_effect: Literal["cancels", "nothing"] = "cancels"
    """Whether declining cancels the signing; if not, the others may sign, but the signing is never completed."""

    def __post_init__(self) -> None:
        for name, kind in _types().items():
            self._check(name, getattr(self, name), kind)
        if self.page_size > self.max_page_size:
            raise _wrong("page_size", self.page_size, f"at most max_page_size ({self.max_page_size})")
        if self.cursor_param == self.limit_param:
            raise _wrong("cursor_param", self.cursor_param, "different from limit_param")
        own = (self.phone_field, self.identification_field, self.recipient_completed_field)
        if len(set(own) - _RECIPIENT_FIELDS) < len(own):
            fields = "phone_field, identification_field and recipient_completed_field"
            raise ValueError(f"Profile: {fields} must be distinct names that no other field has, got {own!r}")

    def _check(self, name: str, value: Any, kind: Any) -> None:
        if value is None and name in _OPTIONAL:
            return
        if get_origin(kind) is Literal or kind is bool:
            choices = (True, False) if kind is bool else get_args(kind)
            if value not in choices or isinstance(value, bool) != (kind is bool):
                raise _wrong(name, value, f"one of {', '.join(map(repr, choices))}")
        elif name in _COUNTS:
            _checks.integer(f"Profile.{name}", value, at_most=1_000_000, error=ValueError)
        elif name in _SECONDS:
            bounds = {"at_least": _SECONDS[name], "at_most": _LONGEST}
            _checks.number(f"Profile.{name}", value, **bounds, error=ValueError)
        elif get_origin(kind) is tuple:
            object.__setattr__(self, name, self._names(name, value))
        elif not isinstance(value, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", value):
            raise _wrong(name, value, "a name of letters, digits and _ . -")

    def _names(self, name: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str) or not all(isinstance(item, str) and item for item in value):
            raise _wrong(name, value, "a tuple of names")
        if name == "signing_methods":
            if not value:
                raise _wrong(name, value, "at least one method")
            return tuple(value)
        allowed = _REQUIRABLE.get(name, self.signing_methods)
        if value == getattr(Profile, name):  # a default may name methods that signing_methods no longer has
            return tuple(item for item in value if item in allowed)
        if unknown := [item for item in value if item not in allowed]:
            raise _wrong(name, unknown[0], f"one of {', '.join(map(repr, allowed))}")
        return tuple(value)

    @property
    def max_pdf_bytes(self) -> int:
        """The size of the largest accepted file."""
        return 10 * self.megabyte - (0 if self.accept_exact_limit else 1)

    @classmethod
    def laravel(cls, **changes: Any) -> Profile:
        """Return the profile of a service written with Laravel and its API resources."""
        return cls(**_PRESETS["laravel"] | changes)

    @classmethod
    def rfc9457(cls, **changes: Any) -> Profile:
        """Return the profile of a service built on standards: problem details, Link headers, sortable ids."""
        return cls(**_PRESETS["rfc9457"] | changes)

    @classmethod
    def numeric(cls, **changes: Any) -> Profile:
        """Return the profile of a service with epoch timestamps, integer ids, `has_more` and nested errors."""
        return cls(**_PRESETS["numeric"] | changes)

    @classmethod
    def preset(cls, name: str) -> Profile:
        """Return a profile by name: default, laravel, rfc9457 or numeric."""
        if name not in _PRESETS:
            raise ValueError(f"profile: unknown profile {name!r}; use one of {', '.join(_PRESETS)}")
        return cls(**_PRESETS[name])

    def replace(self, **changes: Any) -> Profile:
        """Return this profile with some settings changed."""
        return dataclasses.replace(self, **changes)


@cache
def _types() -> dict[str, Any]:
    return get_type_hints(Profile)


def _wrong(name: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"Profile.{name}: must be {wanted}, got {value!r}")
