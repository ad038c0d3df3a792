"""What a call is made of: the operation, the client's options, and what all calls of a client share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import attrs

from .. import _checks
from ..assumptions import Assumptions
from ..errors import APIError, AuthError, DecodeError, NotFound
from ..models import Token
from ..reconcile import Effect
from . import wire
from .decode import Unreadable, parse
from .lookup import request_id
from .rate_limit import LocalRateLimiter, RateLimiter
from .redaction import redact, redact_data
from .response_times import ResponseTimes
from .retry import Repeat, RetryBudget, RetryPolicy

if TYPE_CHECKING:
    from ..telemetry.calls import Call
    from .response import Response

__all__ = [
    "Anonymous",
    "Attempt",
    "Auth",
    "Bearer",
    "CallContext",
    "Operation",
    "Options",
    "Shared",
    "Timeouts",
    "call_hook",
    "current_call_context",
    "log",
    "report",
    "use_call_context",
]

T = TypeVar("T")

log: logging.Logger = logging.getLogger("signing_async")


_check_seconds = _checks.field(_checks.number, "timeout.", above=0)


@attrs.frozen
class Timeouts:
    """Seconds for a whole call, including its waits and retries; for a call that moves a file; and for a connection.

    A download is also cut off, and retried, if nothing arrives for ``call`` seconds.
    """

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

    @property
    def in_doubt(self) -> bool:
        """Deprecated: use `ambiguous`."""
        return self.ambiguous


def report(attempt: Attempt, *, level: int) -> None:
    """Log an attempt."""
    log.log(
        level,
        "%s attempt %d: %s in %.3f s%s%s%s",
        attempt.operation,
        attempt.attempt,
        attempt.status or "no response",
        attempt.seconds,
        f", request id {attempt.request_id}" if attempt.request_id else "",
        f": {attempt.error}" if attempt.error else "",
        f"; retry in {attempt.delay:.3f} s" if attempt.delay is not None else "",
    )


def call_hook(name: str, hook: Callable[[T], None] | None, value: T) -> None:
    """Call the caller's hook, if there is one; log any exception."""
    if hook is not None:
        try:
            hook(value)
        except Exception:
            log.exception("the %s hook failed", name)


@attrs.frozen(eq=False)
class CallContext:
    """What a call shares with the token requests that it causes: its ``on_attempt`` hook and, if observed, its span."""

    on_attempt: Callable[[Attempt], None] | None
    observed: Call | None = None
    telemetry: bool = True


_call_context: ContextVar[CallContext | None] = ContextVar("signing_async.call_context", default=None)


@contextlib.contextmanager
def use_call_context(context: CallContext) -> Iterator[None]:
    """Give this context to the token requests that the block causes, in any task."""
    reset = _call_context.set(context)
    try:
        yield
    finally:
        _call_context.reset(reset)


def current_call_context() -> CallContext | None:
    """Return the context of the call that causes a token request; None if no call does."""
    return _call_context.get()


class Auth(Protocol):
    """The source of the bearer token."""

    async def token(self) -> Token | None:
        """Return a token to use now; None for a request without one."""

    async def renewed(self, rejected: Token) -> bool:
        """Replace a token that the service rejected; return whether that was possible."""

    def secrets(self) -> Iterable[str]:
        """Return the secrets to redact from every text."""


class Bearer:
    """A fixed access token."""

    def __init__(self, access_token: str) -> None:
        self._token = Token(access_token)

    async def token(self) -> Token:
        return self._token

    async def renewed(self, rejected: Token) -> bool:
        return False

    def secrets(self) -> Iterable[str]:
        return (self._token.access_token,)


class Anonymous:
    """No access token, for requests without one or with their own credentials, which ``secrets`` returns."""

    def __init__(self, secrets: Callable[[], Iterable[str]]) -> None:
        self.secrets: Callable[[], Iterable[str]] = secrets

    async def token(self) -> None:
        return None

    async def renewed(self, rejected: Token) -> bool:
        return False


# Not frozen: making a frozen instance takes a fortieth of a small call's time.
@attrs.define(eq=False)
class Operation(Generic[T]):
    """One operation of the service: what is sent, what a repeat would do, and how its response is read."""

    name: str
    method: str
    path: str
    repeat: Repeat
    decode: Callable[[Any, wire.Response], T] | None = None
    """Makes the result from the parsed response. Without this and the next two, only the status counts."""
    respond: Callable[[Response], T] | None = None
    """Makes the result from the whole response, whose body need not be JSON."""
    receive: Callable[[wire.Response], Awaitable[T]] | None = None
    """Reads the body itself: a file."""
    convert_error: Callable[[APIError, Mapping[str, str]], APIError | AuthError] | None = None
    """Converts the error of an error response; called with the error and the response's headers."""
    effect: Effect[T] | None = None
    """For `Repeat.RECONCILED`: recognizes the effect of the request."""
    params: Mapping[str, str] = {}
    body: Callable[[], wire.Body] | None = None
    """Makes a new body for each attempt."""
    not_found: type[NotFound] = NotFound
    transfer: bool = False
    accept: str = wire.JSON
    headers: Mapping[str, str] = attrs.field(default={}, repr=False)
    """Further headers of the request, which replace those of the same name."""

    def error_from(self, error: APIError, headers: Mapping[str, str]) -> APIError | AuthError:
        """Return the error to raise for an error response."""
        return error if self.convert_error is None else self.convert_error(error, headers)


@attrs.frozen
class Options:
    """The options of one view of a client."""

    retry: RetryPolicy
    timeouts: Timeouts
    assumptions: Assumptions
    on_attempt: Callable[[Attempt], None] | None
    on_response: Callable[[Response], None] | None = None
    telemetry: bool = True


class Shared:
    """What all views of a client share."""

    def __init__(
        self, origin: str, auth: Auth, sessions: wire.Sessions, rate_limiter: RateLimiter | None = None
    ) -> None:
        self.origin = origin
        self.auth = auth
        self.sessions = sessions
        self.rate_limiter: RateLimiter = LocalRateLimiter() if rate_limiter is None else rate_limiter
        self.accepted: int = 0
        """The number of requests with a response other than 429."""
        self.budget: RetryBudget = RetryBudget()
        self.response_times: ResponseTimes = ResponseTimes()

    def redact(self, text: str) -> str:
        """Return the text without tokens and secrets."""
        return redact(text, self.auth.secrets())

    def request_id(self, headers: Mapping[str, str], data: Any, assumptions: Assumptions) -> str | None:
        """Return the request id of a response, without secrets: a server may echo anything in it."""
        found = request_id(headers, data, assumptions)
        return None if found is None else self.redact(found)

    def decode_error(
        self, operation: str, problem: str, status: int, request_id: str | None, content: bytes = b""
    ) -> DecodeError:
        """Return the error for a successful response that cannot be decoded; ``content`` is its body."""
        body = None
        with contextlib.suppress(Unreadable):
            body = redact_data(parse(content), self.auth.secrets())
        suffix = f", request id {request_id}" if request_id else ""
        text = self.redact(f"{operation}: the response cannot be read: {problem} (HTTP {status}{suffix})")
        return DecodeError(text, operation=operation, status=status, request_id=request_id, body=body)
