"""Frozen records. Their fields are the columns of the tables, in the same order.

Times are microseconds since the epoch on the sandbox's clock. A time of None means "not yet".
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from .redaction import redact_body


@dataclass(frozen=True, slots=True)
class User:
    """A user of the service's API, in one tenant."""

    id: str
    tenant: str
    name: str
    email: str


@dataclass(frozen=True, slots=True)
class App:
    """A registered application. The secret is returned only on registration."""

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
        """Whether the signing is editable and unsent."""
        return self.sent_at is None and self.cancelled_at is None

    @property
    def is_completed(self) -> bool:
        """Whether all recipients have signed."""
        return self.completed_at is not None

    @property
    def state(self) -> str:
        """The state: draft, sent, completed or cancelled."""
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
    """Someone who is invited to sign. `order` is the position in a sequential signing."""

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
        """First and last name, or the e-mail address if both are missing."""
        return " ".join(part for part in (self.first_name, self.last_name) if part) or self.email

    @property
    def is_done(self) -> bool:
        """Whether the recipient has signed or declined."""
        return self.completed_at is not None or self.declined_at is not None


@dataclass(frozen=True, slots=True)
class Notification:
    """A message to a recipient; `kind` is invitation or reminder."""

    seq: int
    kind: str
    signing_id: str
    recipient_id: str
    email: str
    sent_at: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A webhook receiver's URL and the secret shared with it."""

    id: str
    url: str
    secret: str
    created_at: int


@dataclass(frozen=True, slots=True)
class Event:
    """A lifecycle event and the exact bytes that are delivered."""

    seq: int
    id: str
    type: str
    signing_id: str
    body: bytes
    created_at: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """The delivery of one event to one endpoint; `state` is pending, delivered, failed or lost."""

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
    """One attempt at a delivery: the endpoint's response, or the error in `error`.

    `response_headers` is a JSON object without secrets; `response_body` is cut after 16 KiB.
    """

    seq: int
    delivery_id: str
    event_id: str
    at: int
    status: int | None
    error: str | None
    fault: str | None
    seconds: float | None
    signature: str | None
    response_headers: str | None
    response_body: bytes | None

    @property
    def headers(self) -> dict[str, str] | None:
        """The headers of the response, without secrets; None if there was no response."""
        return None if self.response_headers is None else json.loads(self.response_headers)

    @property
    def body(self) -> str | None:
        """The body of the response, without secrets; None if there was no response."""
        return None if self.response_body is None else redact_body(self.response_body)
