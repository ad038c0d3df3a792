"""One attempt of a call: acquire a token and the rate limiter, make the request, decode or classify its response.

Only a cancellation is raised: every other end of an attempt is an `Outcome`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import attrs
from multidict import CIMultiDict

from .. import errors
from .._foreign import safe_text
from .._secret import hide_fields
from ..models import Token
from . import retry, wire
from .decode import Unreadable
from .operation import Attempt, Observer, Operation, Options, Shared, log
from .problems import error_from
from .redaction import redact_data
from .response import Response
from .retry import Kind, Safety

__all__ = [
    "RESERVED_SHARE",
    "Bearer",
    "Context",
    "Outcome",
    "attempt",
    "report",
    "response_of",
    "timeout_error",
    "transport_error",
]

T = TypeVar("T")

# At most this share of the remaining time is kept for what follows: a response, or a reading.
RESERVED_SHARE = 0.2
_BRIEF_WAIT = 0.01


class Bearer:
    """A fixed access token; or none, for requests with their own credentials, which ``secrets`` returns."""

    def __init__(self, access_token: str | None, secrets: Callable[[], Iterable[str]] = tuple) -> None:
        self._token = None if access_token is None else Token(access_token)
        self._secrets = secrets

    async def token(self, observer: Observer) -> Token | None:
        return self._token

    async def renewed(self, rejected: Token, observer: Observer) -> bool:
        return False

    def secrets(self) -> Iterable[str]:
        return self._secrets() if self._token is None else (self._token.access_token,)


@attrs.define(eq=False, repr=False, slots=False, field_transformer=hide_fields)
class Context(Generic[T]):
    """What the attempts of one call have in common, and the attempt that is under way. All times are in loop time."""

    operation: Operation[T]
    shared: Shared
    options: Options
    observer: Observer
    deadline: float
    last_start: float
    """The latest time to send a request."""
    for_readings: float
    """Seconds before the deadline, or a share of the remaining time, that are kept for reconciliation."""
    body: wire.Body | None = None
    """The body of the attempt that is under way, or that ended in an exception."""
    number: int = 0
    """The number of attempts begun."""
    may_refresh: bool = True
    """Whether a rejected token may be replaced."""


@attrs.define(eq=False, repr=False, slots=False, field_transformer=hide_fields)
class Outcome(Generic[T]):
    """How an attempt ended: with a value, or with an error that the call raises if no attempt follows."""

    kind: Kind = Kind.UNSENT
    value: T | None = None
    error: Exception | None = None
    retry_after: float | None = None
    may_retry: bool = True
    """Whether another attempt may follow in this call. The error's ``transient`` concerns later calls."""
    response: Response | None = None
    """The response, if its head arrived."""
    is_whole: bool = False
    """Whether the response's body was read."""

    def fail(self, kind: Kind, error: Exception, retry_after: float | None = None, *, may_retry: bool = True) -> None:
        self.kind, self.error, self.retry_after, self.may_retry = kind, error, retry_after, may_retry


async def attempt(context: Context[T]) -> Outcome[T]:
    """Make one request, within the context's time limits; a rejected token is replaced if the context allows it."""
    outcome: Outcome[T] = Outcome()
    operation, shared, options, observer = context.operation, context.shared, context.options, context.observer
    limiter, loop = shared.rate_limiter, asyncio.get_running_loop()
    try:
        async with asyncio.timeout_at(context.deadline) as bound:
            shared.sessions.get()  # a closed client does not refresh its token
            # Before the rate limiter, so that a refresh does not use up a place there.
            token = await shared.auth.token(observer)
            asked_at = loop.time()
            is_acquired = await limiter.acquire(context.last_start)
            acquired_at = loop.time()
            observer.span.wait(acquired_at - asked_at, is_acquired)
            if not is_acquired:
                if (wait := limiter.next_at - loop.time()) > 0:
                    text = (
                        "the rate limiter would delay this attempt for longer than the call may take; it was not sent"
                    )
                    limited = errors.RateLimited(text, status=429, operation=operation.name, retry_after=wait)
                    outcome.fail(Kind.THROTTLED, limited, wait, may_retry=False)
                else:  # no limit is known: the earlier requests are still waiting for their responses
                    outcome.fail(Kind.UNSENT, timeout_error(operation, options), may_retry=False)
                return outcome
            try:
                if acquired_at - asked_at > _BRIEF_WAIT:  # the token may have expired in the wait
                    token = await shared.auth.token(observer)
                if bound.expired():
                    raise TimeoutError  # the limiter or the token store swallowed the cancellation
                left = context.deadline - loop.time()
                if context.for_readings:
                    left -= min(left * RESERVED_SHARE, context.for_readings)
                    bound.reschedule(loop.time() + left)
                await _exchange(context, outcome, token, left)
                status = None if outcome.response is None else outcome.response.status
                may_refresh = context.may_refresh and status in options.assumptions.expired_token_statuses
                # The service refused the request: nothing is ambiguous while the token is refreshed.
                if may_refresh and token is not None and await shared.auth.renewed(token, observer):
                    outcome.kind = Kind.REJECTED_TOKEN
            finally:
                accepted = None if outcome.response is None else outcome.response.status != 429
                shared.accepted += accepted is True
                limiter.release(acquired_at, accepted)
    except Exception as error:  # also what the caller's own rate limiter, token store or file raises
        if isinstance(error, TimeoutError) and bound.expired():
            was_sent = context.body is not None and context.body.may_have_taken_effect
            late = timeout_error(operation, options, outcome.response)
            outcome.fail(Kind.LOST if was_sent else Kind.UNSENT, late, may_retry=False)
        else:
            outcome.fail(Kind.RAISED, error, may_retry=False)
    return outcome


async def _exchange(context: Context[T], outcome: Outcome[T], token: Token | None, left: float) -> None:
    """Make the request within the seconds ``left``; set the outcome from its response."""
    operation, options, body = context.operation, context.options, context.body
    decode, origin = operation.decode, context.shared.origin
    request = wire.Request(
        operation.method,
        origin,
        operation.path,
        operation.params,
        body,
        operation.accept,
        operation.headers,
        token,
        connect=min(options.timeouts.connect, 0.9 * left),
        # The silence while an upload is processed must not be taken for a lost response.
        silence=options.timeouts.call if operation.stream else None,
        limit=None if operation.stream else 0 if decode is None else options.assumptions.max_answer_bytes,
        deadline=asyncio.get_running_loop().time() + left,
    )
    raised: BaseException | None = None
    span = context.observer.span.attempt(operation.name, operation.method, origin, operation.path, context.number)
    try:
        head = await wire.exchange(context.shared.sessions, request)
        response = outcome.response = response_of(operation, context.shared, options, head)
        is_success = 200 <= head.status < 300
        outcome.is_whole = not head.refusal and not (is_success and operation.stream)
        if not is_success:
            _fail_refused(context, outcome, head)
            return
        if operation.stream and decode is not None:
            outcome.value = await decode(head)
        # An HTML page, such as a proxy's login, is no response, unless it was asked for.
        elif head.body.lstrip().startswith(b"<") and not _accepts_html(operation, head):
            raise Unreadable("it is an HTML page")
        elif decode is not None:
            outcome.value = decode(response)
        outcome.kind = Kind.SUCCESS
    except BaseException as error:
        if outcome.response is None and request.response is not None:
            outcome.response = response_of(operation, context.shared, options, request.response)
        if isinstance(error, wire.BrokenResponse):
            lost = transport_error(operation, error, outcome.response)
            outcome.fail(error.kind, lost, may_retry=error.transient)
        elif isinstance(error, Unreadable) and outcome.response is not None:
            # A write that succeeded is reconciled if possible.
            kind = Kind.REFUSED if operation.safety in (Safety.READ, Safety.CREATE) else Kind.LOST
            outcome.fail(kind, outcome.response.decode_error(str(error)), may_retry=False)
        else:
            is_late = asyncio.get_running_loop().time() >= request.deadline
            raised = timeout_error(operation, options, outcome.response) if is_late else error
            raise
    finally:
        received = 0
        if (arrived := request.response) is not None and not arrived.detached:
            received = arrived.received
            arrived.close()
        sent = body.size or 0 if body is not None and body.started else 0
        span.end(outcome.response, raised or outcome.error, sent=sent, received=received)


def _accepts_html(operation: Operation[Any], head: wire.Response) -> bool:
    is_html = "html" in head.headers.get("Content-Type", "").lower()
    return not is_html or "html" in operation.headers.get("Accept", "")


def _fail_refused(context: Context[Any], outcome: Outcome[Any], head: wire.Response) -> None:
    """End the attempt with a response that has an error status, or with a redirect that is not followed."""
    operation, status, headers = context.operation, head.status, head.headers
    if head.refusal:
        identity = None if outcome.response is None else outcome.response.request_id
        error = errors.APIError(head.refusal, status=status, operation=operation.name, request_id=identity)
        outcome.fail(Kind.REFUSED, error)
        return
    error = error_from(
        status,
        headers,
        head.body,
        reason=head.reason,
        operation=operation.name,
        not_found=operation.not_found,
        retry_after=retry.read_retry_after(headers.get("Retry-After"), date=headers.get("Date"), now=time.time),
        secrets=context.shared.auth.secrets(),
        assumptions=context.options.assumptions,
    )
    if status == 429:
        outcome.fail(Kind.THROTTLED, error, error.retry_after)
    elif error.transient:
        # A 408, 502 or 504, or a proxy's page, says nothing about the service behind it.
        is_own_error = status in (500, 503) and error.code is not None
        outcome.fail(Kind.FAILED if is_own_error else Kind.GATEWAY, error, error.retry_after)
    elif 400 <= status < 500 or operation.method in wire.READING:
        outcome.fail(Kind.REFUSED, error)
    else:
        # Some server received the request, and its outcome is unknown.
        outcome.fail(Kind.LOST, error, may_retry=False)


def report(
    context: Context[Any], outcome: Outcome[Any], seconds: float, delay: float | None = None, *, ambiguous: bool = False
) -> None:
    """Log an attempt, and call the hooks."""
    response, name, number, options = outcome.response, context.operation.name, context.number, context.options
    if options.on_response is not None and response is not None and outcome.is_whole:
        _call_hook("on_response", options.on_response, response)
    is_rejected = outcome.kind is Kind.REJECTED_TOKEN
    level = logging.DEBUG if delay is None or is_rejected else logging.INFO
    if options.on_attempt is None and not log.isEnabledFor(level):
        return
    error = None if outcome.error is None else safe_text(outcome.error)
    error = "the token was rejected and has been refreshed" if is_rejected else error
    status, identity = (None, None) if response is None else (response.status, response.request_id)
    suffix = f", request id {identity}" if identity else ""
    suffix += f": {error}" if error else ""
    suffix += "" if delay is None else f"; retry in {delay:.3f} s"
    log.log(level, "%s attempt %d: %s in %.3f s%s", name, number, status or "no response", seconds, suffix)
    if options.on_attempt is not None:
        headers: CIMultiDict[str] = CIMultiDict()
        if response is not None:
            values = redact_data(list(response.headers.values()), context.shared.auth.secrets())
            headers = CIMultiDict(zip(response.headers, values, strict=True))
        record = Attempt(name, number, status, seconds, identity, delay, error, ambiguous, headers)
        _call_hook("on_attempt", options.on_attempt, record)


def _call_hook(name: str, hook: Any, value: object) -> None:
    try:
        hook(value)
    except Exception:
        log.exception("the %s hook failed", name)


def response_of(operation: Operation[Any], shared: Shared, options: Options, head: wire.Response) -> Response:
    """Return the response as the caller sees it, without the body of a stream."""
    return Response(
        operation.name,
        head.status,
        head.headers,
        head.body,
        secrets=shared.auth.secrets,
        assumptions=options.assumptions,
        safety=operation.safety,
    )


def timeout_error(
    operation: Operation[Any], options: Options, response: Response | None = None
) -> errors.RequestTimeout:
    """Return the error for a response that did not arrive in time."""
    seconds = options.timeouts.transfer if operation.transfer else options.timeouts.call
    missing = "response" if response is None else "complete response"
    text = f"{operation.name}: no {missing} within its timeout of {seconds:g} s"
    return errors.RequestTimeout(text, operation=operation.name, **_facts(response))


def transport_error(
    operation: Operation[Any], broken: wire.BrokenResponse, response: Response | None = None
) -> errors.TransportError:
    """Return the error for a response that did not come, or was cut off."""
    flags: errors.Flags = {"transient": broken.transient, "client_wide": broken.client_wide}
    text = f"{operation.name}: {broken}"
    return errors.TransportError(text, operation=operation.name, **flags, **_facts(response))


def _facts(response: Response | None) -> dict[str, Any]:
    return {} if response is None else {"status": response.status, "request_id": response.request_id}
