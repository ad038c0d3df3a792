"""Every value that the service's specification leaves open, with a name and a default that can be replaced.

Example::

    client = SigningClient(base_url, token, assumptions=Assumptions(cursor_param="after", limit_param="per_page"))
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Self, cast

import attrs

from . import _checks
from ._toml import did_you_mean, read_toml
from .errors import ConfigurationError

__all__ = ["Assumptions"]


def _to_names(value: str | Iterable[str]) -> tuple[str, ...]:
    try:
        return (value,) if isinstance(value, str) else tuple(value)
    except TypeError:
        return cast("tuple[str, ...]", (value,))  # rejected by the check of its items


def _to_statuses(value: int | Iterable[int]) -> frozenset[int]:
    try:
        return frozenset((value,) if isinstance(value, int) else value)
    except TypeError:
        raise ConfigurationError(f"expired_token_statuses: must be integers from 400 to 499, got {value!r}") from None


def _check(name: str, value: Any, default: object) -> None:
    """Check a value by the type of its default."""
    match default:
        case str():
            _checks.string(name, value)
        case bool():
            if not isinstance(value, bool):
                raise ConfigurationError(f"{name}: must be true or false, got {value!r}")
        case int():
            _checks.integer(name, value)
        case float():
            _checks.number(name, value, above=0)
        case tuple():
            for each in value:
                _checks.string(name, each)
        case frozenset():
            for each in value:
                _checks.integer(name, each, at_least=400, at_most=499)
        case _:
            _check_error_paths(name, value)


def _check_error_paths(name: str, value: object) -> None:
    paths = value if isinstance(value, Mapping) else {"": ""}
    is_valid = all(isinstance(path, str) and path for path in paths.values())
    if not is_valid or not {*paths} <= {"code", "message", "fields"}:
        raise ConfigurationError(f"{name}: must be paths of code, message or fields, got {value!r}")


@attrs.frozen(kw_only=True)
class Assumptions:
    """What this package assumes where the specification says "not shown".

    Paths are dotted (``"meta.next_cursor"``). Of several names, the first one in a response counts.
    """

    def __repr__(self) -> str:
        return _checks.short_repr(self)

    cursor_param: str = "cursor"
    """Query parameter that carries the cursor of a list."""

    limit_param: str = "limit"
    """Query parameter that asks for a page size."""

    item_paths: tuple[str, ...] = attrs.field(
        default=("data", "signings", "items", "results", "recipients"), converter=_to_names
    )
    """Where a page that is not a bare list holds its items."""

    next_paths: tuple[str, ...] = attrs.field(
        default=(
            "meta.next_cursor",
            "next_cursor",
            "pagination.next_cursor",
            "links.next",
            "next_page_url",
            "next",
        ),
        converter=_to_names,
    )
    """Where a page holds the next cursor or the URL of the next page; after these, a ``Link`` header."""

    has_more_paths: tuple[str, ...] = attrs.field(
        default=("has_more", "meta.has_more", "pagination.has_more"), converter=_to_names
    )
    """Where a page says whether more follow. If so, and without a next cursor, the last item's id is the cursor."""

    record_paths: tuple[str, ...] = attrs.field(
        default=("data", "signing", "document", "recipient", "user", "result"),
        converter=_to_names,
    )
    """Where a response holds a single record, if it is not the record itself."""

    recipient_done_fields: tuple[str, ...] = attrs.field(default=("completed_at", "signed_at"), converter=_to_names)
    """Fields of a recipient, any of which is set once the recipient has finished: `Recipient.completed_at`."""

    document_size_fields: tuple[str, ...] = attrs.field(
        default=("size", "file_size", "size_bytes"), converter=_to_names
    )
    """Fields of a document that hold the size of the uploaded file in bytes."""

    document_sha256_fields: tuple[str, ...] = attrs.field(default=("sha256", "checksum", "hash"), converter=_to_names)
    """Fields of a document that may hold the sha256 of the uploaded file in hexadecimal."""

    request_id_headers: tuple[str, ...] = attrs.field(
        default=("request_id", "X-Request-Id", "Request-Id"), converter=_to_names
    )
    """Headers that may carry the request id; after these, the body."""

    request_id_paths: tuple[str, ...] = attrs.field(
        default=("request_id", "meta.request_id", "error.request_id", "requestId"),
        converter=_to_names,
    )
    """Where a body may hold the request id."""

    error_paths: Mapping[str, str] = attrs.field(factory=dict, hash=False)
    """Where an error body of no common shape holds its ``code``, ``message`` and messages for ``fields``.

    Such as ``{"code": "fault.ref", "message": "fault.text", "fields": "fault.problems"}``.
    """

    expired_token_statuses: frozenset[int] = attrs.field(default=frozenset({401}), converter=_to_statuses)
    """Statuses that may mean that the access token has expired: the SDK refreshes it and retries once."""

    refresh_rejected_codes: tuple[str, ...] = attrs.field(default=("invalid_grant",), converter=_to_names)
    """Error codes, in any case, that mean that the token endpoint has rejected the refresh token for good."""

    expires_in_seconds: float = 1.0
    """Seconds in one unit of the token response's ``expires_in``."""

    pkce: bool = True
    """Whether a login sends the parameters of PKCE (RFC 7636), which the service may ignore."""

    refresh_margin: float = 30.0
    """How many seconds before its expiry a token is refreshed; at most a tenth of its lifetime."""

    max_pdf_bytes: int = 10 * 1024 * 1024
    """The largest PDF that is uploaded; "10 MB" in the specification."""

    download_accept: str = "application/pdf, application/json"
    """Accept header of a download: a sealed PDF, or an error in JSON. All other requests accept JSON."""

    max_sealed_bytes: int = 100 * 1024 * 1024
    """The largest sealed PDF that is downloaded."""

    max_answer_bytes: int = 32 * 1024 * 1024
    """The largest JSON response that is read."""

    # One check: a validator for each field would double the time to build this class.
    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(type(self)):
            _check(field.name, getattr(self, field.name), field.default)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read assumptions from a TOML file with the names above as keys; the others keep their defaults. ::

        client = SigningClient(base_url, token, assumptions=Assumptions.from_file("assumptions.toml"))
        """
        return cls.from_mapping(read_toml(path), os.fspath(path))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], place: str) -> Self:
        """Read assumptions from a mapping; errors name its ``place``."""
        names = [field.name for field in attrs.fields(cls)]
        for name, value in values.items():
            if name not in names:
                raise ConfigurationError(f"{place}: unknown assumption {name!r}{did_you_mean(name, names)}")
            if isinstance(value, Mapping) and name != "error_paths":
                raise ConfigurationError(f"{place}: {name}: must not be a table")
        try:
            return cls(**values)
        except ConfigurationError as error:
            raise ConfigurationError(f"{place}: {error}") from None
