"""What the service holds, as frozen records: the fields are the columns of the tables.

Times are microseconds since the epoch by the sandbox's clock; None means that it has not happened.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class User:
    """Somebody who uses the service's API, in one tenant."""

    id: str
    tenant: str
    name: str
    email: str


@dataclass(frozen=True, slots=True)
class App:
    """A registered application. Its secret is known when it is registered and never again."""

    client_id: str
    name: str
    redirect_uri: str
    user_id: str
    created_at: int
    client_secret: str | None = None


@dataclass(frozen=True, slots=True)
class Signing:
    """A signing package."""

    seq: int
    id: str
    tenant: str
    user_id: str
    name: str
    language: str
    signing_order: str
    message: str | None
    created_at: int
    updated_at: int
    sent_at: int | None
    times_sent: int
    completed_at: int | None
    cancelled_at: int | None

    @property
    def is_draft(self) -> bool:
        """Editable and unsent."""
        return self.sent_at is None and self.cancelled_at is None

    @property
    def is_completed(self) -> bool:
        """All recipients have finished."""
        return self.completed_at is not None

    @property
    def state(self) -> str:
        """draft, sent, completed or cancelled."""
        if self.cancelled_at is not None:
            return "cancelled"
        if self.completed_at is not None:
            return "completed"
        return "draft" if self.sent_at is None else "sent"


@dataclass(frozen=True, slots=True)
class Document:
    """An uploaded document; `file` and `sealed_file` are names in the sandbox's folder of files."""

    seq: int
    id: str
    signing_id: str
    name: str
    size: int
    sha256: str
    file: str
    created_at: int
    completed_at: int | None
    sealed_file: str | None


@dataclass(frozen=True, slots=True)
class Recipient:
    """Somebody who is to sign; `order` is the position in a sequential signing."""

    seq: int
    id: str
    signing_id: str
    first_name: str | None
    last_name: str | None
    email: str
    signing_method: str
    order: int | None
    phone: str | None
    identification: str | None
    created_at: int
    invited_at: int | None
    expires_at: int | None
    reminders: int
    completed_at: int | None
    declined_at: int | None

    @property
    def full_name(self) -> str:
        """First and last name, or the address when there is none."""
        return " ".join(part for part in (self.first_name, self.last_name) if part) or self.email

    @property
    def is_done(self) -> bool:
        """Has signed or declined."""
        return self.completed_at is not None or self.declined_at is not None


@dataclass(frozen=True, slots=True)
class Notification:
    """What a recipient was sent: `kind` is invitation or reminder."""

    seq: int
    kind: str
    signing_id: str
    recipient_id: str
    email: str
    sent_at: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A webhook receiver's address and the secret shared with it."""

    id: str
    url: str
    secret: str
    created_at: int


@dataclass(frozen=True, slots=True)
class Event:
    """A lifecycle event and the very bytes that are delivered."""

    seq: int
    id: str
    type: str
    signing_id: str
    body: bytes
    created_at: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event on its way to one endpoint: `state` is pending, delivered, failed or lost."""

    seq: int
    id: str
    event_id: str
    event_type: str
    endpoint_id: str
    url: str
    state: str
    attempts: int
    due_at: int | None
    last_status: int | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a delivery; `status` is the receiver's answer, `error` says why there was none."""

    seq: int
    delivery_id: str
    event_id: str
    at: int
    status: int | None
    error: str | None
    fault: str | None


_COLUMNS: dict[type[Any], str] = {}


def columns_of(record: type[Any]) -> str:
    """The record's fields as a list of columns."""
    if record not in _COLUMNS:
        _COLUMNS[record] = ", ".join(f'"{field.name}"' for field in fields(record))
    return _COLUMNS[record]
