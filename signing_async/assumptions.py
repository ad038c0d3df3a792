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
        return cast("tuple[str, ...]", (value,))  # the field's validator rejects it


def _to_statuses(value: int | Iterable[int]) -> frozenset[int]:
    try:
        return frozenset((value,) if isinstance(value, int) else value)
    except TypeError:
        raise ConfigurationError(f"expired_token_statuses: must be integers from 400 to 499, got {value!r}") from None


def _check_flag(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{attribute.name}: must be true or false, got {value!r}")


_check_name = _checks.field(_checks.string)
_check_names = attrs.validators.deep_iterable(_check_name)
_check_statuses = attrs.validators.deep_iterable(_checks.field(_checks.integer, at_least=400, at_most=499))
_check_positive = _checks.field(_checks.number, above=0)
_check_count = _checks.field(_checks.integer)


@attrs.frozen(kw_only=True)
class Assumptions:
    """What this package assumes where the specification says "not shown".

    Paths are dotted (``"meta.next_cursor"``). Of several names, the first one in a response counts.
    """

    cursor_param: str = attrs.field(default="cursor", validator=_check_name)
    """Query parameter that carries the cursor of a list."""

    limit_param: str = attrs.field(default="limit", validator=_check_name)
    """Query parameter that asks for a page size."""

    item_paths: tuple[str, ...] = attrs.field(
        default=("data", "signings", "items", "results", "recipients"), converter=_to_names, validator=_check_names
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
        validator=_check_names,
    )
    """Where a page holds the next cursor or the URL of the next page; after these, a ``Link`` header."""

    has_more_paths: tuple[str, ...] = attrs.field(
        default=("has_more", "meta.has_more", "pagination.has_more"), converter=_to_names, validator=_check_names
    )
    """Where a page says whether more follow. If so, and without a next cursor, the last item's id is the cursor."""

    record_paths: tuple[str, ...] = attrs.field(
        default=("data", "signing", "document", "recipient", "user", "result"),
        converter=_to_names,
        validator=_check_names,
    )
    """Where a response holds a single record, if it is not the record itself."""

    recipient_done_fields: tuple[str, ...] = attrs.field(
        default=("completed_at", "signed_at"), converter=_to_names, validator=_check_names
    )
    """Fields of a recipient, any of which is set once the recipient has finished."""

    document_size_fields: tuple[str, ...] = attrs.field(
        default=("size", "file_size", "size_bytes"), converter=_to_names, validator=_check_names
    )
    """Fields of a document that hold the size of the uploaded file in bytes."""

    document_sha256_fields: tuple[str, ...] = attrs.field(
        default=("sha256", "checksum", "hash"), converter=_to_names, validator=_check_names
    )
    """Fields of a document that may hold the sha256 of the uploaded file in hexadecimal."""

    request_id_headers: tuple[str, ...] = attrs.field(
        default=("request_id", "X-Request-Id", "Request-Id"), converter=_to_names, validator=_check_names
    )
    """Headers that may carry the request id; after these, the body."""

    request_id_paths: tuple[str, ...] = attrs.field(
        default=("request_id", "meta.request_id", "error.request_id", "requestId"),
        converter=_to_names,
        validator=_check_names,
    )
    """Where a body may hold the request id."""

    error_code_paths: tuple[str, ...] = attrs.field(
        default=(
            "code",
            "error.code",
            "error_code",
            "error.error_code",
            "error.status",
            "error.type",
            "error",
            "detail.code",
            "errors.0.code",
            "0.code",
        ),
        converter=_to_names,
        validator=_check_names,
    )
    """Where an error body holds its code; after these, the last segment of a ``type`` (RFC 9457)."""

    error_message_paths: tuple[str, ...] = attrs.field(
        default=(
            "message",
            "error.message",
            "detail",
            "error.detail",
            "detail.message",
            "error_description",
            "error_message",
            "title",
            "error.title",
            "error",
        ),
        converter=_to_names,
        validator=_check_names,
    )
    """Where an error body holds its message."""

    error_list_paths: tuple[str, ...] = attrs.field(
        default=(
            "errors",
            "error.errors",
            "error.details",
            "error.fields",
            "details",
            "messages",
            "fields",
            "violations",
            "invalid-params",
            "invalid_params",
            "detail",
            "message",
        ),
        converter=_to_names,
        validator=_check_names,
    )
    """Where an error body holds the messages for its fields.

    They are a list or an object, but only a list at a path that is also in ``error_message_paths``.
    """

    error_field_keys: tuple[str, ...] = attrs.field(
        default=(
            "field",
            "name",
            "property",
            "propertyPath",
            "param",
            "parameter",
            "pointer",
            "path",
            "loc",
            "source",
        ),
        converter=_to_names,
        validator=_check_names,
    )
    """Keys of a message in such a list that name its field."""

    error_path_keys: tuple[str, ...] = attrs.field(default=("path", "loc"), converter=_to_names, validator=_check_names)
    """Keys among ``error_field_keys`` whose value may be a list of the steps to the field: ``["recipients", 0]``."""

    error_text_keys: tuple[str, ...] = attrs.field(
        default=("message", "messages", "detail", "msg", "reason", "description", "title", "code", "error"),
        converter=_to_names,
        validator=_check_names,
    )
    """Keys of a message in such a list that hold its text."""

    expired_token_statuses: frozenset[int] = attrs.field(
        default=frozenset({401}), converter=_to_statuses, validator=_check_statuses
    )
    """Statuses that may mean that the access token has expired: the SDK refreshes it and retries once."""

    refresh_rejected_codes: tuple[str, ...] = attrs.field(
        default=("invalid_grant",), converter=_to_names, validator=_check_names
    )
    """Error codes, in any case, that mean that the token endpoint has rejected the refresh token for good."""

    expires_in_seconds: float = attrs.field(default=1.0, validator=_check_positive)
    """Seconds in one unit of the token response's ``expires_in``."""

    pkce: bool = attrs.field(default=True, validator=_check_flag)
    """Whether ``signing-async login`` sends the parameters of PKCE (RFC 7636), which the service may ignore."""

    refresh_margin: float = attrs.field(default=30.0, validator=_check_positive)
    """How many seconds before its expiry a token is refreshed; at most a tenth of its lifetime."""

    max_pdf_bytes: int = attrs.field(default=10 * 1024 * 1024, validator=_check_count)
    """The largest PDF that is uploaded; "10 MB" in the specification."""

    download_accept: str = attrs.field(default="application/pdf, application/json", validator=_check_name)
    """Accept header of a download: a sealed PDF, or an error in JSON. All other requests accept JSON."""

    max_sealed_bytes: int = attrs.field(default=100 * 1024 * 1024, validator=_check_count)
    """The largest sealed PDF that is downloaded."""

    max_answer_bytes: int = attrs.field(default=32 * 1024 * 1024, validator=_check_count)
    """The largest JSON response that is read."""

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
            if isinstance(value, Mapping):
                raise ConfigurationError(f"{place}: {name}: must not be a table")
        try:
            return cls(**values)
        except ConfigurationError as error:
            raise ConfigurationError(f"{place}: {error}") from None
