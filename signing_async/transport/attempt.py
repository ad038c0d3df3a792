"""One attempt of a call: acquire a token and the rate limiter, send the request, receive its response.

Only a cancellation is raised: every other end of an attempt is an `Outcome`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs
from multidict import CIMultiDict

from .. import errors
from .._foreign import safe_text
from .._secret import hide_fields
from ..models import Token
from . import retry, urls, wire
from .decode import Unreadable
from .operation import Attempt, Observer, Operation, Options, Shared, log
from .problems import error_from
from .redaction import redact_data
from .response import Response
from .retry import Kind, Safety

if TYPE_CHECKING:
    import aiohttp

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

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 5
_READING = frozenset({"GET", "HEAD"})
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
class Context:
    """The circumstances of the attempts of one call; all times are in loop time."""

    observer: Observer
    deadline: float
    last_start: float
    """The latest time to send a request."""
    reserve: float
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


def attempt(operation: Operation[T], shared: Shared, options: Options, context: Context) -> Awaitable[Outcome[T]]:
    """Make one request, within the context's time limits; a rejected token is replaced if the context allows it."""
    return _Attempt(operation, shared, options, context).make()


@attrs.define(eq=False, repr=False, slots=False, field_transformer=hide_fields)
class _Attempt(Generic[T]):
    _operation: Operation[T]
    _shared: Shared
    _options: Options
    _context: Context
    _outcome: Outcome[T] = attrs.field(factory=Outcome, init=False)

    async def make(self) -> Outcome[T]:
        """Acquire a token and the rate limiter, and make the request."""
        shared, context, outcome = self._shared, self._context, self._outcome
        observer, body, limiter, deadline = context.observer, context.body, shared.rate_limiter, context.deadline
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(deadline) as bound:
                session = shared.sessions.get()  # a closed client does not refresh its token
                # Before the rate limiter, so that a refresh does not use up a place there.
                token = await shared.auth.token(observer)
                asked_at = loop.time()
                is_acquired = await limiter.acquire(context.last_start)
                acquired_at = now = loop.time()
                observer.span.wait(acquired_at - asked_at, is_acquired)
                if not is_acquired:
                    self._fail_unacquired(limiter.next_at - loop.time())
                    return outcome
                try:
                    if acquired_at - asked_at > _BRIEF_WAIT:
                        # The token of a call that waited for its place may be too old.
                        token = await shared.auth.token(observer)
                        now = loop.time()
                    if bound.expired() or now >= deadline:
                        raise TimeoutError  # the limiter or the token store swallowed the cancellation
                    if context.reserve:
                        deadline -= min((deadline - acquired_at) * RESERVED_SHARE, context.reserve)
                        bound.reschedule(deadline)
                    await self._exchange(session, token, bound, deadline, now)
                    status = None if outcome.response is None else outcome.response.status
                    may_refresh = context.may_refresh and status in self._options.assumptions.expired_token_statuses
                    # The service refused the request: nothing is ambiguous while the token is refreshed.
                    if may_refresh and token is not None and await shared.auth.renewed(token, observer):
                        outcome.kind = Kind.REJECTED_TOKEN
                    return outcome
                finally:
                    accepted = None if outcome.response is None else outcome.response.status != 429
                    shared.accepted += accepted is True
                    limiter.release(acquired_at, accepted)
        except TimeoutError as error:
            if bound.expired() or loop.time() >= deadline:
                was_sent = body is not None and body.may_have_taken_effect
                outcome.fail(Kind.LOST if was_sent else Kind.UNSENT, self._timeout_error(), may_retry=False)
            else:
                outcome.fail(Kind.RAISED, error, may_retry=False)
        except Exception as error:  # also what the caller's own rate limiter, token store or file raises
            outcome.fail(Kind.RAISED, error, may_retry=False)
        return outcome

    async def _exchange(
        self, session: aiohttp.ClientSession, token: Token | None, bound: asyncio.Timeout, deadline: float, now: float
    ) -> None:
        """Send the request, and receive its response. A read follows redirects to its own origin."""
        operation, shared, context, outcome = self._operation, self._shared, self._context, self._outcome
        method, body, timeouts = operation.method, context.body, self._options.timeouts
        request = wire.Request(
            method, shared.origin, operation.path, operation.params, body, operation.accept, operation.headers
        )
        span = context.observer.span.attempt(operation.name, method, shared.origin, operation.path, context.number)
        head: wire.Response | None = None
        failure: BaseException | None = None
        connect = max(min(timeouts.connect, 0.9 * (deadline - now)), 0.001)
        # The silence while an upload is processed must not be taken for a lost response.
        silence = timeouts.call if operation.stream else None
        refusal = f"more than {_MAX_REDIRECTS} redirects"
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                head = await wire.send(shared.sessions, session, request, token, connect=connect, silence=silence)
                if head.status not in _REDIRECTS or method not in _READING:
                    refusal = ""
                    break
                path = urls.resolve(request, head.headers.get("Location", ""))
                if path is None:
                    refusal = "a redirect to another origin is not followed"
                    break
                head.finish()
                request = attrs.evolve(request, path=path, params={})
            assert head is not None
            response = outcome.response = response_of(operation, shared, self._options, head)
            if body is not None:
                body.was_refused = 400 <= head.status < 500 and head.status != 408
            if refusal:
                identity = response.request_id
                error = errors.APIError(refusal, status=head.status, operation=operation.name, request_id=identity)
                outcome.fail(Kind.REFUSED, error)
            elif 200 <= head.status < 300:
                await self._receive(response, head, deadline)
            else:
                response.bytes = await head.read_start(deadline)
                outcome.is_whole = True
                self._fail_refused(response, head.reason)
        except Unreadable as unreadable:
            # A write that succeeded is reconciled if possible.
            kind = Kind.REFUSED if operation.safety in (Safety.READ, Safety.CREATE) else Kind.LOST
            outcome.fail(kind, response.decode_error(str(unreadable)), may_retry=False)
        except wire.BrokenResponse as broken:
            lost = transport_error(operation, broken, outcome.response)
            outcome.fail(broken.kind, lost, may_retry=broken.transient)
        except BaseException as raised:
            failure = self._timeout_error() if bound.expired() else raised
            raise
        finally:
            if head is not None:
                head.finish()
            span.end(
                outcome.response,
                failure or outcome.error,
                sent=body.size or 0 if body is not None and body.started else 0,
                received=0 if head is None or head.detached else head.received,
            )

    async def _receive(self, response: Response, head: wire.Response, deadline: float) -> None:
        """Receive the body of a successful response, and decode it."""
        operation, outcome = self._operation, self._outcome
        decode = operation.decode
        if operation.stream and decode is not None:
            outcome.value = await decode(head)
        else:
            # If the status suffices, it does not matter if the body is cut off or hangs.
            limit = self._options.assumptions.max_answer_bytes
            response.bytes = await (head.read_start(deadline) if decode is None else head.read(limit))
            outcome.is_whole = True
            if _is_html_page(response) and "html" not in operation.headers.get("Accept", ""):
                raise Unreadable("it is an HTML page")
            if decode is not None:
                outcome.value = decode(response)
        outcome.kind = Kind.SUCCESS

    def _fail_refused(self, response: Response, reason: str) -> None:
        """End the attempt with a response that has an error status."""
        operation, outcome, status, headers = self._operation, self._outcome, response.status, response.headers
        error = error_from(
            status,
            headers,
            response.bytes,
            reason=reason,
            operation=operation.name,
            not_found=operation.not_found,
            retry_after=retry.read_retry_after(headers.get("Retry-After"), date=headers.get("Date"), now=time.time),
            secrets=self._shared.auth.secrets(),
            assumptions=self._options.assumptions,
        )
        if status == 429:
            outcome.fail(Kind.THROTTLED, error, error.retry_after)
        elif error.transient:
            # A 408, 502 or 504, or a proxy's page, says nothing about the service behind it.
            is_own_error = status in (500, 503) and error.code is not None
            outcome.fail(Kind.FAILED if is_own_error else Kind.GATEWAY, error, error.retry_after)
        elif 400 <= status < 500 or operation.method in _READING:
            outcome.fail(Kind.REFUSED, error)
        else:
            # Some server received the request, and its outcome is unknown.
            outcome.fail(Kind.LOST, error, may_retry=False)

    def _fail_unacquired(self, wait: float) -> None:
        """End the attempt without a request: the rate limiter would delay it for longer than the call may take."""
        if wait <= 0:
            # No limit is known: the earlier requests are still waiting for their responses.
            self._outcome.fail(Kind.UNSENT, self._timeout_error(), may_retry=False)
            return
        text = "the rate limiter would delay this attempt for longer than the call may take; it was not sent"
        error = errors.RateLimited(text, status=429, operation=self._operation.name, retry_after=wait)
        self._outcome.fail(Kind.THROTTLED, error, wait, may_retry=False)

    def _timeout_error(self) -> errors.RequestTimeout:
        return timeout_error(self._operation, self._options, self._outcome.response)


def report(
    outcome: Outcome[Any],
    operation: Operation[Any],
    shared: Shared,
    options: Options,
    context: Context,
    seconds: float,
    delay: float | None = None,
    *,
    ambiguous: bool = False,
) -> None:
    """Log an attempt, and call the hooks."""
    response, name, number = outcome.response, operation.name, context.number
    if options.on_response is not None and response is not None and outcome.is_whole:
        _call_hook("on_response", options.on_response, response)
    is_token_rejected = outcome.kind is Kind.REJECTED_TOKEN
    level = logging.DEBUG if delay is None or is_token_rejected else logging.INFO
    if options.on_attempt is None and not log.isEnabledFor(level):
        return
    error = None if outcome.error is None else safe_text(outcome.error)
    if is_token_rejected:
        error = "the token was rejected and has been refreshed"
    status, identity = (None, None) if response is None else (response.status, response.request_id)
    suffix = f", request id {identity}" if identity else ""
    suffix += f": {error}" if error else ""
    suffix += "" if delay is None else f"; retry in {delay:.3f} s"
    log.log(level, "%s attempt %d: %s in %.3f s%s", name, number, status or "no response", seconds, suffix)
    if options.on_attempt is not None:
        headers: CIMultiDict[str] = CIMultiDict()
        if response is not None:
            values = redact_data(list(response.headers.values()), shared.auth.secrets())
            headers = CIMultiDict(zip(response.headers, values, strict=True))
        record = Attempt(name, number, status, seconds, identity, delay, error, ambiguous, headers)
        _call_hook("on_attempt", options.on_attempt, record)


def response_of(operation: Operation[Any], shared: Shared, options: Options, head: wire.Response) -> Response:
    """Return the response with this head and without its body."""
    return Response(
        operation.name,
        head.status,
        head.headers,
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
    return errors.TransportError(
        f"{operation.name}: {broken}",
        operation=operation.name,
        transient=broken.transient,
        client_wide=broken.client_wide,
        **_facts(response),
    )


def _facts(response: Response | None) -> dict[str, Any]:
    return {} if response is None else {"status": response.status, "request_id": response.request_id}


def _is_html_page(response: Response) -> bool:
    """Return whether the response is an HTML page, such as a proxy's login, not an empty one of that type."""
    return response.bytes.lstrip().startswith(b"<") and "html" in response.headers.get("Content-Type", "").lower()


def _call_hook(name: str, hook: Any, value: object) -> None:
    try:
        hook(value)
    except Exception:
        log.exception("the %s hook failed", name)
