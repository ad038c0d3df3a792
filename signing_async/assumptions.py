"""Every value that the service's specification leaves open, named, with a sensible default, replaceable.

Example::

    client = SigningClient(base_url, token, assumptions=Assumptions(cursor_param="after", limit_param="per_page"))
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, Self

import attrs

from ._toml import closest, read_toml
from .errors import ConfigurationError

__all__ = ["Assumptions"]


def _names(value: str | Iterable[str]) -> tuple[str, ...]:
    try:
        return (value,) if isinstance(value, str) else tuple(value)
    except TypeError:
        return (value,)  # type: ignore[return-value]  # what is no name is refused by the validator


def _statuses(value: int | Iterable[int]) -> frozenset[int]:
    try:
        return frozenset((value,) if isinstance(value, int) else value)
    except TypeError:
        raise ConfigurationError(
            f"Assumptions.expired_token_statuses must hold statuses from 400 to 499, not {value!r}"
        ) from None


def _check_name(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"Assumptions.{attribute.name} must be a name, not {value!r}")


def _check_names(instance: object, attribute: attrs.Attribute[tuple[str, ...]], value: tuple[object, ...]) -> None:
    for name in value:
        _check_name(instance, attribute, name)


def _check_statuses(instance: object, attribute: attrs.Attribute[frozenset[int]], value: frozenset[object]) -> None:
    for status in value:
        if not isinstance(status, int) or not 400 <= status <= 499:
            raise ConfigurationError(f"Assumptions.{attribute.name} must hold statuses from 400 to 499, not {status!r}")


def _check_switch(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"Assumptions.{attribute.name} must be true or false, not {value!r}")


def _check_positive(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigurationError(f"Assumptions.{attribute.name} must be a number above 0, not {value!r}")


def _check_count(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"Assumptions.{attribute.name} must be a whole number above 0, not {value!r}")


@attrs.frozen(kw_only=True)
class Assumptions:
    """What this package takes for granted where the specification says "not shown".

    Paths are dotted (``"meta.next_cursor"``); of several names the first that an answer carries counts.
    """

    cursor_param: str = attrs.field(default="cursor", validator=_check_name)
    """Query parameter that carries the cursor of a list."""

    limit_param: str = attrs.field(default="limit", validator=_check_name)
    """Query parameter that asks for a page size."""

    item_paths: tuple[str, ...] = attrs.field(
        default=("data", "signings", "items", "results", "recipients"), converter=_names, validator=_check_names
    )
    """Where a page that is no bare list holds its items."""

    next_paths: tuple[str, ...] = attrs.field(
        default=(
            "meta.next_cursor",
            "next_cursor",
            "pagination.next_cursor",
            "links.next",
            "next_page_url",
            "next",
        ),
        converter=_names,
        validator=_check_names,
    )
    """Where a page holds the next cursor, or the address of the next page; after these, a ``Link`` header."""

    has_more_paths: tuple[str, ...] = attrs.field(
        default=("has_more", "meta.has_more", "pagination.has_more"), converter=_names, validator=_check_names
    )
    """Where a page says that there are more; with no next cursor the last item's id is then the cursor."""

    record_paths: tuple[str, ...] = attrs.field(
        default=("data", "signing", "document", "recipient", "user", "result"),
        converter=_names,
        validator=_check_names,
    )
    """Where an answer holds a single record, if it is not the record itself."""

    recipient_done_fields: tuple[str, ...] = attrs.field(
        default=("completed_at", "signed_at"), converter=_names, validator=_check_names
    )
    """Fields of a recipient, any of which is filled in once the recipient has finished."""

    document_size_fields: tuple[str, ...] = attrs.field(
        default=("size", "file_size", "size_bytes"), converter=_names, validator=_check_names
    )
    """Fields of a document that hold the size of the uploaded file in bytes."""

    document_sha256_fields: tuple[str, ...] = attrs.field(
        default=("sha256", "checksum", "hash"), converter=_names, validator=_check_names
    )
    """Fields of a document that may hold the sha256 of the uploaded file in hexadecimal."""

    request_id_headers: tuple[str, ...] = attrs.field(
        default=("request_id", "X-Request-Id", "Request-Id"), converter=_names, validator=_check_names
    )
    """Headers that may carry the request id; after these, the body's ``request_id``."""

    expired_token_statuses: frozenset[int] = attrs.field(
        default=frozenset({401}), converter=_statuses, validator=_check_statuses
    )
    """Statuses that may mean that the access token has expired: the SDK refreshes it once and tries again."""

    expires_in_seconds: float = attrs.field(default=1.0, validator=_check_positive)
    """How many seconds one unit of the token response's ``expires_in`` is."""

    pkce: bool = attrs.field(default=True, validator=_check_switch)
    """Whether the service takes PKCE's parameters (RFC 7636) or ignores them: ``signing-async login`` sends them."""

    refresh_margin: float = attrs.field(default=30.0, validator=_check_positive)
    """Seconds before its expiry at which a token is refreshed; never more than a tenth of its lifetime."""

    max_pdf_bytes: int = attrs.field(default=10 * 1024 * 1024, validator=_check_count)
    """The largest PDF that is uploaded; "10 MB" in the specification."""

    download_accept: str = attrs.field(default="application/pdf, application/json", validator=_check_name)
    """The Accept header of a download: a sealed PDF, or an error in JSON. Of all other requests it is JSON."""

    max_sealed_bytes: int = attrs.field(default=100 * 1024 * 1024, validator=_check_count)
    """The largest sealed PDF that is downloaded."""

    max_answer_bytes: int = attrs.field(default=32 * 1024 * 1024, validator=_check_count)
    """The largest JSON answer that is read."""

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Those of a TOML file, whose keys are the names above; what it does not name keeps its default. ::

        client = SigningClient(base_url, token, assumptions=Assumptions.from_file("assumptions.toml"))
        """
        return cls.from_mapping(read_toml(path), os.fspath(path))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], place: str) -> Self:
        """Those of a table that stands at ``place``, which an error names."""
        names = [field.name for field in attrs.fields(cls)]
        for name, value in values.items():
            if name not in names:
                raise ConfigurationError(f"{place}: there is no assumption {name!r}{closest(name, names)}")
            if isinstance(value, Mapping):
                raise ConfigurationError(f"{place}: {name} must not be a table")
        try:
            return cls(**values)
        except ConfigurationError as error:
            raise ConfigurationError(f"{place}: {error}") from None
