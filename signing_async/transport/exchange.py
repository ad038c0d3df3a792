"""One attempt of a call: a request and its response. Follows redirects, and replaces a rejected token."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import attrs
from multidict import CIMultiDict

from .. import errors
from . import custom_records, retry, urls, wire
from .decode import Unreadable, parse
from .error_response import error_from
from .operation import Attempt, CallContext, Operation, Options, Shared, call_hook, log, report, use_call_context
from .redaction import redact_data
from .response import Response
from .retry import FailedAttempt, Outcome, Repeat

if TYPE_CHECKING:
    from ..telemetry import calls as telemetry

__all__ = ["Exchange", "TokenReplaced", "report_attempt"]

T = TypeVar("T")

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 5
_READING = frozenset({"GET", "HEAD"})


class TokenReplaced:
    """The service rejected the token, and there is a new one: the request must be sent again."""


class Exchange(Generic[T]):
    """A request and what is known of its response."""

    body: wire.Body | None = None
    """The request's body, while the request may have taken effect."""
    sent_at: float = 0.0
    status: int | None = None
    _deadline: float = math.inf
    _attempt: telemetry.Attempt | None = None
    """Observes the request, while it is under way."""
    _head: wire.Response | None = None
    _headers: Mapping[str, str] = {}
    _content: bytes | None = None
    _data: Any = None
    _error_id: str | None = None

    def __init__(self, operation: Operation[T], shared: Shared, options: Options, context: CallContext) -> None:
        self.operation = operation
        self._shared = shared
        self.options = options
        self._context = context

    @property
    def request_id(self) -> str | None:
        """The request id of the response, looked up only when it is needed."""
        data = self._data
        if self.operation.respond is not None and self._content is not None:
            with contextlib.suppress(Unreadable):
                data = parse(self._content)
        return self._error_id or self._shared.request_id(self._headers, data, self.options.assumptions)

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of the response, without secrets."""
        values = redact_data(list(self._headers.values()), self._shared.auth.secrets())
        return CIMultiDict(zip(self._headers, values, strict=True))

    @property
    def response(self) -> Response | None:
        """The response; None if there is none, or if its body was not or could not be read."""
        status, content, operation = self.status, self._content, self.operation
        if status is None or content is None:
            return None
        return Response(
            operation.name, status, self._headers, content, self._shared, self.options.assumptions, operation.repeat
        )

    async def send(self, deadline: float, number: int, *, may_refresh: bool) -> T | FailedAttempt | TokenReplaced:
        """Send the request, and return what its response holds; ``deadline`` is the loop time at which it is cancelled.

        A rejected token is replaced if ``may_refresh``. ``number`` is the attempt's number in the call.
        """
        await custom_records.prepare()
        self._deadline = deadline
        operation, loop = self.operation, asyncio.get_running_loop()
        with use_call_context(self._context):
            token = await self._shared.auth.token()
        if self._context.observed is not None:
            method, origin = operation.method, self._shared.origin
            self._attempt = self._context.observed.attempt(operation.name, method, origin, operation.path, number)
        if operation.body is not None:
            self.body = operation.body()
        self.sent_at = loop.time()
        request = wire.Request(
            operation.method,
            self._shared.origin,
            operation.path,
            operation.params,
            self.body,
            operation.accept,
            operation.headers,
        )
        # The silence while an upload is processed must not be taken for a lost response.
        silence = self.options.timeouts.call if operation.receive is not None else None
        for _ in range(_MAX_REDIRECTS + 1):
            connect = max(min(self.options.timeouts.connect, 0.9 * (deadline - loop.time())), 0.001)
            response = await wire.send(self._shared.sessions, request, token, connect=connect, silence=silence)
            if isinstance(response, wire.Failure):
                return self._failed(response)
            try:
                self.note_head(response)
                if response.status in _REDIRECTS and operation.method in _READING:
                    request = self._redirected(request, response)
                    self.status, self._headers = None, {}
                    continue
                may_be_expired = response.status in self.options.assumptions.expired_token_statuses
                if may_refresh and token is not None and may_be_expired:
                    rejection = await self._error(response)
                    response.close()
                    # The request was refused: nothing is ambiguous while the token is refreshed.
                    self.body = None
                    self.end_attempt(rejection)
                    with use_call_context(self._context):
                        is_renewed = await self._shared.auth.renewed(token)
                    if is_renewed:
                        return TokenReplaced()
                    raise rejection
                return await self._receive(response)
            except wire.BrokenResponse as broken:
                failure = broken.failure
            finally:
                response.finish()
            return self._failed(failure)
        raise self._refused_redirect(f"more than {_MAX_REDIRECTS} redirects")

    def note_head(self, response: wire.Response) -> None:
        """Note the status and the headers of the response: the errors below contain them."""
        self.status = response.status
        self._headers = response.headers
        self._head = response

    def end_attempt(self, error: BaseException | None) -> None:
        """Tell telemetry that the request has ended."""
        if self._attempt is not None:
            attempt, self._attempt = self._attempt, None
            transmitted = self.body.size or 0 if self.body is not None and self.body.started else 0
            # The bytes of a stream are counted at its end.
            received = 0 if self._head is None or self._head.detached else self._head.received
            attempt.end(self.status, self.request_id, error, transmitted=transmitted, received=received)

    @property
    def may_have_taken_effect(self) -> bool:
        """Whether the whole request may have been sent, and the service did not refuse it.

        If the body's source failed, the request is incomplete, and no service carries it out.
        """
        body, status = self.body, self.status or 0
        is_refused = 400 <= status < 500 and status != 408
        return body is not None and body.started and body.failure is None and not is_refused

    # The errors of a response that is not usable

    def timeout_error(self) -> errors.RequestTimeout:
        """Return the error for a response that did not arrive in time."""
        operation, timeouts = self.operation, self.options.timeouts
        seconds = timeouts.transfer if operation.transfer else timeouts.call
        missing = "response" if self.status is None else "complete response"
        return errors.RequestTimeout(
            f"{operation.name}: no {missing} within its timeout of {seconds:g} s",
            operation=operation.name,
            status=self.status,
            request_id=self.request_id,
        )

    def transport_error(self, failure: wire.Failure) -> errors.TransportError:
        """Return the error for a response that did not come, or was cut off."""
        name = self.operation.name
        error = errors.TransportError(
            f"{name}: {failure.message}", operation=name, status=self.status, request_id=self.request_id
        )
        error.transient, error.client_wide = failure.transient, failure.client_wide
        return error

    def decode_error(self, problem: str) -> errors.DecodeError:
        """Return the error for a successful response that cannot be decoded."""
        assert self.status is not None
        return self._shared.decode_error(
            self.operation.name, problem, self.status, self.request_id, self._content or b""
        )

    # Failed attempts

    def timed_out(self) -> FailedAttempt:
        """Return the failure of an attempt that its deadline ended."""
        # A request that changes something has a body, and sends nothing before the body's first bytes.
        was_sent = self.body is not None and self.body.started
        return FailedAttempt(Outcome.LOST if was_sent else Outcome.UNSENT, self.timeout_error(), may_retry=False)

    def throttled(self, wait: float) -> FailedAttempt:
        """Return the failure of an attempt that the rate limiter would delay for too long."""
        error = errors.RateLimited(
            "the rate limiter would delay this attempt for longer than the call may take; it was not sent",
            status=429,
            operation=self.operation.name,
            retry_after=wait,
        )
        return FailedAttempt(Outcome.THROTTLED, self.operation.error_from(error, {}), wait, may_retry=False)

    def _redirected(self, request: wire.Request, response: wire.Response) -> wire.Request:
        """Return the request that a redirect asks for; raise an error if it leads to another origin."""
        target = urls.resolve(request, response.headers.get("Location", ""))
        if target is None:
            raise self._refused_redirect("a redirect to another origin is not followed")
        return attrs.evolve(request, path=target, params={})

    def _refused_redirect(self, reason: str) -> errors.APIError:
        return errors.APIError(
            reason, status=self.status or 302, operation=self.operation.name, request_id=self.request_id
        )

    def _failed(self, failure: wire.Failure) -> FailedAttempt:
        return FailedAttempt(failure.outcome, self.transport_error(failure), may_retry=failure.transient)

    async def _receive(self, response: wire.Response) -> T | FailedAttempt:
        operation = self.operation
        if not response.ok:
            return await self._fail(response)
        try:
            if operation.receive is not None:
                return await operation.receive(response)
            # No local variables: some tracebacks show those. Decoding uses up the data; errors need the content.
            if operation.decode is not None:
                self._content = await response.read(self.options.assumptions.max_answer_bytes)
                self._data = parse(self._content)
                return operation.decode(self._data, response)
            if operation.respond is not None:
                self._content = await response.read(self.options.assumptions.max_answer_bytes)
            else:
                # The status suffices: it does not matter if the body is cut off or hangs.
                self._content = await response.read_start(self._deadline)
            if _is_html_page(self._content, response) and "html" not in operation.headers.get("Accept", ""):
                raise Unreadable("it is an HTML page")
            if operation.respond is None:
                return cast("T", None)
            return operation.respond(cast("Response", self.response))
        except Unreadable as error:
            problem = str(error)
        unreadable = self.decode_error(problem)
        unreadable.effect = retry.effect_of(operation.repeat, succeeded=True)
        if operation.repeat in (Repeat.READ, Repeat.CREATE):
            raise unreadable
        # A write that succeeded is reconciled if possible.
        return FailedAttempt(Outcome.LOST, unreadable, may_retry=False)

    async def _fail(self, response: wire.Response) -> FailedAttempt:
        """Return the failure that a response other than 2xx means; raise the error if a repeat cannot help."""
        error, status = await self._error(response), response.status
        self._error_id = error.request_id
        if status == 429:
            return FailedAttempt(Outcome.THROTTLED, error, error.retry_after)
        if error.transient:
            # A 408, 502 or 504, or a proxy's page, says nothing about the service behind it.
            is_own_error = status in (500, 503) and error.code is not None
            return FailedAttempt(Outcome.FAILED if is_own_error else Outcome.GATEWAY, error, error.retry_after)
        if not 400 <= status < 500 and self.operation.method not in _READING:
            # Some server received the request, and its outcome is unknown.
            return FailedAttempt(Outcome.LOST, error, may_retry=False)
        raise error

    def _keep_for_hook(self, content: bytes) -> bytes:
        """Keep the body of an error for the ``on_response`` hook. Without a hook, as in token requests, don't."""
        if self.options.on_response is not None:
            self._content = content
        return content

    async def _error(self, response: wire.Response) -> errors.APIError | errors.AuthError:
        headers = response.headers
        error = error_from(
            response.status,
            headers,
            self._keep_for_hook(await response.read_start(self._deadline)),
            reason=response.reason,
            operation=self.operation.name,
            not_found=self.operation.not_found,
            retry_after=retry.read_retry_after(headers.get("Retry-After"), date=headers.get("Date"), now=time.time),
            secrets=self._shared.auth.secrets(),
            assumptions=self.options.assumptions,
        )
        return self.operation.error_from(error, headers)


def report_attempt(
    exchange: Exchange[Any],
    number: int,
    began: float,
    error: str | None = None,
    *,
    delay: float | None = None,
    ambiguous: bool = False,
    level: int | None = None,
) -> None:
    """Log an attempt and call the hooks. ``began`` is a time of `time.perf_counter`."""
    options, name = exchange.options, exchange.operation.name
    if level is None:
        level = logging.DEBUG if delay is None else logging.INFO
    if options.on_response is not None and (response := exchange.response) is not None:
        call_hook("on_response", options.on_response, response)
    hook = options.on_attempt
    if hook is None and not log.isEnabledFor(level):
        return
    headers = {} if hook is None else exchange.headers
    seconds = time.perf_counter() - began
    attempt = Attempt(name, number, exchange.status, seconds, exchange.request_id, delay, error, ambiguous, headers)
    report(attempt, level=level)
    call_hook("on_attempt", hook, attempt)


def _is_html_page(body: bytes, response: wire.Response) -> bool:
    """Return whether a proxy, such as one that requires a login, responded in the service's place.

    The content type alone does not tell: some frameworks set it on an empty response.
    """
    return body.lstrip().startswith(b"<") and "html" in response.headers.get("Content-Type", "").lower()
