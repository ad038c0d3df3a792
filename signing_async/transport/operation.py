"""What a call is made of: the operation, the options of the client, and what all calls of a client share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import attrs

from .. import _checks
from .._secret import hide_fields
from ..assumptions import Assumptions
from ..errors import NotFound
from ..models import Token
from ..reconcile import Effect
from ..telemetry import Span
from . import wire
from .rate_limit import RateLimiter
from .response import Response
from .retry import RetryBudget, RetryPolicy, Safety

__all__ = ["Attempt", "Auth", "Observer", "Operation", "Options", "Shared", "Timeouts", "log"]

T = TypeVar("T")
log: logging.Logger = wire.log

_NO_SPAN = Span()
_check_seconds = _checks.field(_checks.number, "timeout.", above=0)


@attrs.frozen
class Timeouts:
    """Seconds for a whole call, including its waits and retries; for a call that moves a file; and for a connection.

    A download is also cut off, and retried, if nothing arrives for ``call`` seconds.
    """

    def __repr__(self) -> str:
        return _checks.short_repr(self)

    call: float = attrs.field(default=60.0, validator=_check_seconds)
    transfer: float = attrs.field(default=300.0, validator=_check_seconds)
    connect: float = attrs.field(default=10.0, validator=_check_seconds)


@attrs.frozen
class Attempt:
    """One attempt of a call, as the ``on_attempt`` hook sees it afterwards."""

    operation: str
    """Such as ``"signings.send"``."""
    attempt: int
    """The number of the attempt in its call, from 1."""
    status: int | None
    """The status of the response; None if there was none."""
    seconds: float
    """The duration of the attempt, including the waits for the rate limiter and for a token."""
    request_id: str | None
    delay: float | None
    """Seconds until the next attempt; None if there is none."""
    error: str | None
    """What failed, without secrets; None after a success."""
    ambiguous: bool = False
    """Whether the attempt failed and may have taken effect, now or later."""
    headers: Mapping[str, str] = attrs.field(factory=dict, repr=False, hash=False)
    """The headers of the response, with case-insensitive names and without secrets; empty if there was no response."""


@attrs.define(eq=False, repr=False, slots=False, field_transformer=hide_fields)
class Observer:
    """What observes a call, and the token requests that the call causes."""

    on_attempt: Callable[[Attempt], None] | None = None
    telemetry: bool = True
    span: Span = _NO_SPAN


class Auth(Protocol):
    """The source of the bearer token."""

    async def token(self, observer: Observer) -> Token | None:
        """Return a token to use now; None for a request without one."""

    async def renewed(self, rejected: Token, observer: Observer) -> bool:
        """Replace a token that the service rejected; return whether that was possible."""

    def secrets(self) -> Iterable[str]:
        """Return the secrets to redact from every text."""


# Not frozen: making a frozen instance takes a fortieth of a small call's time.
@attrs.define(eq=False, repr=False, slots=False, field_transformer=hide_fields)
class Operation(Generic[T]):
    """One operation of the service: what is sent, what a repeat would do, and how its response is decoded."""

    name: str
    method: str
    path: str
    safety: Safety
    decode: Callable[[Any], Any] | None = None
    """Return the result from the `Response`, or raise `Unreadable`; None if only the status counts.

    With ``stream`` it is an async function of the open `wire.Response`, which it reads or detaches.
    """
    stream: bool = False
    effect: Effect[T] | None = None
    """For `Safety.RECONCILED`: recognizes the effect of the request."""
    params: Mapping[str, str] = {}
    body: Callable[[], wire.Body] | None = None
    """Makes a new body for each attempt."""
    not_found: type[NotFound] = NotFound
    transfer: bool = False
    accept: str = wire.JSON
    headers: Mapping[str, str] = {}
    """Further headers of the request, which replace those of the same name."""


@attrs.define(eq=False, repr=False, slots=False, field_transformer=hide_fields)
class Options:
    """The options of one view of a client."""

    retry: RetryPolicy
    timeouts: Timeouts
    assumptions: Assumptions
    on_attempt: Callable[[Attempt], None] | None = None
    on_response: Callable[[Response], None] | None = None
    telemetry: bool = True


@attrs.define(eq=False, repr=False, slots=False, field_transformer=hide_fields)
class Shared:
    """What all views of a client share."""

    origin: str
    auth: Auth
    sessions: wire.Sessions
    rate_limiter: RateLimiter
    accepted: int = attrs.field(default=0, init=False)
    """The number of requests with a response other than 429."""
    budget: RetryBudget = attrs.field(factory=RetryBudget, init=False)
