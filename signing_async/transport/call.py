"""One call: rate limiter, token, attempts, reconciliation, errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar, cast

import attrs

from .. import errors
from ..assumptions import Assumptions
from ..models import Token
from ..reconcile import Effect, Found, Reconciler, Undecidable
from . import retry, wire
from .deadlines import until
from .decode import Unreadable, parse
from .error_response import error_from, request_id
from .rate_limit import Budget, Gate, LocalGate, ResponseTimes
from .redaction import redact, redact_data
from .retry import Outcome, Repeat, RetryPolicy, Step, Trouble

__all__ = [
    "Anonymous",
    "Attempt",
    "Auth",
    "Bearer",
    "Operation",
    "Options",
    "Shared",
    "Timeouts",
    "Transport",
    "log",
]

T = TypeVar("T")

log: logging.Logger = logging.getLogger("signing_async")

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 5
_BUDGET_SPENT = "too many calls are failing: the retry budget is used up"
# Of the time that is left, at most this share is kept for readings and for the response.
_RESERVED_SHARE = 0.25


def _check_seconds(instance: object, attribute: attrs.Attribute[float], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise errors.ConfigurationError(f"timeout: {attribute.name} must be seconds above 0, not {value!r}")


@attrs.frozen
class Timeouts:
    """Seconds for a whole call, its waits and repeats included; for one that moves a file; for making a connection.

    A download is also given up, and begun again, when nothing of it has arrived for ``call`` seconds.
    """

    call: float = attrs.field(default=60.0, validator=_check_seconds)
    transfer: float = attrs.field(default=300.0, validator=_check_seconds)
    connect: float = attrs.field(default=10.0, validator=_check_seconds)


@attrs.frozen
class Attempt:
    """What the ``on_attempt`` hook is told of each attempt, after it."""

    operation: str
    """Such as ``"signings.send"``."""
    attempt: int
    """From 1."""
    status: int | None
    """None when no answer came."""
    seconds: float
    """Of the whole attempt: waiting at a closed gate and for a token is part of it."""
    request_id: str | None
    delay: float | None
    """Seconds until the next attempt; None when there is none."""
    error: str | None
    """What went wrong, in words without secrets; None when nothing did."""
    in_doubt: bool = False
    """Whether it may have taken effect all the same, or still may."""


class Auth(Protocol):
    """Where the bearer token comes from."""

    async def token(self) -> Token | None:
        """A token to use now; None for a request without one."""

    async def renewed(self, rejected: Token) -> bool:
        """Whether a token that the service rejected could be replaced."""

    def secrets(self) -> Iterable[str]:
        """What must appear in no text."""


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
    """No access token, for requests that carry none or their own credentials, which ``secrets`` returns."""

    def __init__(self, secrets: Callable[[], Iterable[str]]) -> None:
        self.secrets: Callable[[], Iterable[str]] = secrets

    async def token(self) -> None:
        return None

    async def renewed(self, rejected: Token) -> bool:
        return False


# Not frozen, as the request is not: to make frozen ones would take a fortieth of a small call's time.
@attrs.define(eq=False)
class Operation(Generic[T]):
    """One operation of the service: what is sent, what a repeat would do, and how its answer is read."""

    name: str
    method: str
    path: str
    repeat: Repeat
    decode: Callable[[Any, wire.Response], T] | None = None
    """From the parsed answer, and the response for its headers; without it the answer's body does not matter."""
    receive: Callable[[wire.Response], Awaitable[T]] | None = None
    """Reads the answer's body itself, for what is no JSON."""
    convert_error: Callable[[errors.APIError, Mapping[str, str]], errors.APIError | errors.AuthError] | None = None
    """Makes another error of the one for an error response, from it and the response's headers."""
    effect: Effect[T] | None = None
    """For `Repeat.RECONCILED`: how the effect is recognized."""
    params: Mapping[str, str] = {}
    body: Callable[[], wire.Body] | None = None
    """Makes the body anew for each attempt."""
    not_found: type[errors.NotFound] = errors.NotFound
    transfer: bool = False
    accept: str = wire.JSON
    was_begun: bool = False
    """Whether an earlier process may have sent the same request just before."""


@attrs.frozen
class Options:
    """What a view of a client may have of its own."""

    retry: RetryPolicy
    timeouts: Timeouts
    assumptions: Assumptions
    on_attempt: Callable[[Attempt], None] | None


class Shared:
    """What all views of a client share."""

    def __init__(self, origin: str, auth: Auth, sessions: wire.Sessions, gate: Gate | None = None) -> None:
        self.origin = origin
        self.auth = auth
        self.sessions = sessions
        self.gate: Gate = LocalGate() if gate is None else gate
        self.let_through = 0
        """How many requests were answered otherwise than with a 429."""
        self.budget: Budget = Budget()
        self.response_times: ResponseTimes = ResponseTimes()


class Transport:
    """Makes calls: `call` is the way of every operation."""

    def __init__(self, shared: Shared, options: Options) -> None:
        self.shared = shared
        self.options = options

    async def call(self, operation: Operation[T], deadline: float | None = None) -> T:
        """Carry out an operation, within the call's deadline, as often as the retry table allows."""
        self.shared.sessions.get()
        if deadline is None:
            deadline = self.deadline(transfer=operation.transfer)
        self.shared.budget.bring()
        call = _Call(self, operation, deadline)
        try:
            return await retry.run(call.attempt)
        except BaseException:
            call.abandon()
            raise
        finally:
            self.shared.budget.leave()

    def deadline(self, *, transfer: bool = False) -> float:
        """When a call that begins now has to end, by the loop's clock."""
        timeouts = self.options.timeouts
        return asyncio.get_running_loop().time() + (timeouts.transfer if transfer else timeouts.call)

    def redacted(self, text: str) -> str:
        return redact(text, self.shared.auth.secrets())

    def unreadable(
        self, operation: str, problem: str, status: int, identity: str | None, answer: bytes = b""
    ) -> errors.DecodeError:
        """The error for an answer of success that cannot be read."""
        body = None
        with contextlib.suppress(Unreadable):
            body = redact_data(parse(answer), self.shared.auth.secrets())
        known = f", request id {identity}" if identity else ""
        text = f"{operation}: the answer cannot be read: {problem} (HTTP {status}{known})"
        return errors.DecodeError(
            self.redacted(text), operation=operation, status=status, request_id=identity, body=body
        )


class _Renewed:
    """The token was rejected and there is a new one: the same request again."""


class _Call(Generic[T]):
    """The attempts of one call, and what they have in common."""

    attempts = 0
    spared = 0
    """Attempts that do not count, since others were let through meanwhile: the service is there, and busy."""
    let_through = 0
    trouble: Trouble | None = None
    retry_at = 0.0
    may_have_reminded = False
    may_renew = True
    lost_responses = 0
    taken = 0
    # Of the last answer:
    body: wire.Body | None = None
    status: int | None = None
    headers: Mapping[str, str] = {}
    answer: bytes = b""
    data: Any = None
    rejected_as: str | None = None

    def __init__(
        self, transport: Transport, operation: Operation[T], deadline: float, payer: _Call[Any] | None = None
    ) -> None:
        self.transport = transport
        self.shared = transport.shared
        self.options = transport.options
        self.operation = operation
        self.deadline = deadline
        # A reading is no call of its own: its requests belong to the call that is reconciled.
        self.payer = payer
        self.reconciler: Reconciler[T] | None = None
        if operation.effect is not None:
            self.reconciler = Reconciler(operation.effect, self._read, deadline)
            if operation.was_begun:
                self.reconciler.note(Outcome.LOST, retry.settle_time(transport.options.retry, Outcome.LOST))
        self.started = asyncio.get_running_loop().time()

    @property
    def request_id(self) -> str | None:
        """That of the last answer. A call that goes well is seldom asked for it, so it is looked for only then."""
        found = request_id(self.headers, self.data, self.options.assumptions)
        # A server may echo anything in it.
        return self.rejected_as or (None if found is None else self.transport.redacted(found))

    @property
    def was_ambiguous(self) -> bool:
        return self.reconciler is not None and self.reconciler.was_ambiguous

    async def attempt(self) -> T:
        if self.was_ambiguous and (found := await self._reconcile(self.retry_at)) is not None:
            return self._succeed(found.value)
        self._pay()
        self.attempts += 1
        began = time.perf_counter()
        try:
            answer = await self._exchange()
        except errors.SigningError as error:
            self._report(began, None, str(error))
            if self.was_ambiguous and error.effect == "none":
                # A response may be a refusal because an earlier attempt took effect late: give that time to show.
                return await self._reconcile_or_raise(error, None if self.status is None else Outcome.FAILED)
            raise
        if isinstance(answer, Trouble):
            return await self._go_on(answer, began)
        if isinstance(answer, Found):
            return self._succeed(answer.value)
        self._report(began, None, None)
        if self.was_ambiguous:
            await self._verify(answer)
        return self._succeed(answer)

    async def _go_on(self, trouble: Trouble, began: float) -> T:
        """After a failed attempt: ask for another one, find that it took effect after all, or raise."""
        policy = self.options.retry
        following = retry.step(trouble.outcome, self.operation.repeat)
        self.may_have_reminded |= trouble.outcome in retry.AMBIGUOUS
        decision = self._decide(trouble, following)
        self._report(began, decision.delay, str(trouble.error), in_doubt=following in (Step.RECONCILE, Step.UNKNOWN))
        self.trouble = trouble
        if following is Step.UNKNOWN:
            raise self._unknown(f"{trouble.error}; {decision.why}")
        if following is Step.RECONCILE:
            assert self.reconciler is not None
            self.reconciler.note(trouble.outcome, retry.settle_time(policy, trouble.outcome))
            if policy.max_attempts == 1:
                raise self._unknown(trouble.error)
        # From here on the reconciler knows what the attempt may have done.
        self.body = None
        if decision.delay is not None:
            self.retry_at = asyncio.get_running_loop().time() + decision.delay
            # An ambiguous call spends the delay on readings.
            raise retry.Again(0.0 if following is Step.RECONCILE else decision.delay)
        error = self._finally(trouble.error, decision.why)
        if self.operation.repeat is Repeat.REMIND and self.may_have_reminded:
            error.effect = "unknown"
        if self.was_ambiguous:
            return await self._reconcile_or_raise(error)
        raise error

    def abandon(self) -> None:
        """The call ends with an exception: the effect that it may have had stays unresolved."""
        if self.reconciler is None:
            return
        sent = self.body is not None and self.body.started
        refused = self.status is not None and 400 <= self.status < 500
        if self.reconciler.ambiguous or (sent and not refused):
            self.reconciler.note_unresolved()

    def _succeed(self, value: T) -> T:
        if self.taken:
            self.shared.budget.give_back(self.taken)
        return value

    # What comes next, and whether it can be afforded

    def _decide(self, trouble: Trouble, following: Step) -> retry.Decision:
        if following is Step.UNKNOWN:
            return retry.Decision(None, "a repeat could take effect twice")
        if not trouble.passing or following is Step.RAISE:
            return retry.Decision(None)
        if following is Step.RETRY_ONCE:
            self.lost_responses += 1
            if self.lost_responses > 1:
                return retry.Decision(None, "the response was lost twice")
        throttled = trouble.outcome is Outcome.THROTTLED
        if throttled:
            self.spared += self.shared.let_through > self.let_through
        attempt = max(1, self.attempts - self.spared)
        # A limiter spreads the calls that wait for it. The token endpoint's is a plain pause of its own.
        own_limiter = self.operation.repeat is Repeat.TOKEN
        spread = throttled and trouble.retry_after and attempt == 1 and not own_limiter
        reconciles = following is Step.RECONCILE
        decision = retry.decide(
            self.options.retry,
            attempt=attempt,
            retry_after=trouble.retry_after,
            remaining=self._last_start() - asyncio.get_running_loop().time(),
            chance=0.0 if spread else random.random(),
            at_least=retry.settle_time(self.options.retry, trouble.outcome) if reconciles else 0.0,
        )
        if throttled:
            # Every call of the client waits, this one's own delay included. A wait beyond the policy's cap may be of
            # this endpoint alone: then the limiter slows down as after any 429.
            wait, cap = trouble.retry_after or 0.0, self.options.retry.max_retry_after
            wait = wait if decision.delay is None else decision.delay
            self.shared.gate.close(wait if wait <= cap else cap if own_limiter else 0.0)
        elif decision.delay is not None and self.payer is None and not self.shared.budget.any_left:
            return retry.Decision(None, _BUDGET_SPENT)
        return decision

    def _pay(self) -> None:
        """Withdraw from the retry budget for a repeat, but not after a 429, which the rate limiter holds.

        A reading is free: it is what makes the repeat safe, or needless.
        """
        if self.trouble is None or self.trouble.outcome is Outcome.THROTTLED or self.payer is not None:
            return
        if not self.shared.budget.take():
            raise self._finally(self.trouble.error, _BUDGET_SPENT)
        self.taken += 1

    # Reconciling

    async def _reconcile(self, retry_at: float) -> Found[T] | None:
        """Return the effect of an earlier attempt; None if a repeat is safe."""
        assert self.reconciler is not None
        try:
            with until(self.deadline):
                return await self.reconciler.settle(retry_at, reading_time=self._reading_time())
        except Undecidable as error:
            unknown = self._unknown(str(error), known=error.known)
        except TimeoutError:
            said = "no response came" if self.trouble is None else str(self.trouble.error)
            unknown = self._unknown(f"{said}; its deadline left no time to find out", timed_out=True)
        except errors.SigningError as error:
            unknown = self._unknown(f"the service could not be read: {error}")
        except Exception as error:
            # A token store may raise anything.
            unknown = self._unknown(f"the service could not be read ({type(error).__name__})")
        raise unknown

    async def _reconcile_or_raise(self, error: errors.SigningError, outcome: Outcome | None = None) -> T:
        """No attempt follows: return the effect of an earlier one, or raise the error if there is none."""
        assert self.reconciler is not None
        if outcome is not None:
            self.reconciler.note(outcome, retry.settle_time(self.options.retry, outcome))
        found = await self._reconcile(asyncio.get_running_loop().time())
        if found is not None:
            return self._succeed(found.value)
        raise error

    async def _verify(self, value: T) -> None:
        """After an earlier ambiguous attempt: raise `OutcomeUnknown` if that one took effect as well."""
        assert self.reconciler is not None
        unverified = "the request succeeded, and it could not be verified that no earlier attempt took effect as well"
        try:
            with until(self.deadline):
                others = await self.reconciler.verify(value)
            if not others:
                return
            words = f"the service holds {len(others) + 1} records of it: an earlier attempt took effect late"
            unknown = self._unknown(words, known=(value, *others))
        except Undecidable as error:
            unknown = self._unknown(f"{unverified}: {error}", known=(value, *error.known))
        except TimeoutError:
            unknown = self._unknown(f"{unverified}: its deadline left no time", known=(value,), timed_out=True)
        except errors.SigningError as error:
            unknown = self._unknown(f"{unverified}: {error}", known=(value,))
        raise unknown

    async def _read(self, operation: Operation[Any]) -> Any:
        # A reading that hangs leaves time for others.
        now = asyncio.get_running_loop().time()
        deadline = now + min(_RESERVED_SHARE * (self.deadline - now), self.options.timeouts.call)
        return await retry.run(_Call(self.transport, operation, deadline, payer=self).attempt)

    def _reading_time(self) -> float:
        """The time to keep for one reading."""
        assert self.operation.effect is not None
        left = max(0.0, self.deadline - asyncio.get_running_loop().time())
        return min(self.shared.response_times.expected(self.operation.effect.reading), _RESERVED_SHARE * left)

    def _last_start(self) -> float:
        """The time until which a request may start, so that its response and one reading are back at the deadline."""
        needed = self.shared.response_times.expected(self.operation.name)
        if self.operation.effect is not None:
            needed += self._reading_time()
        return self.deadline - min(needed, _RESERVED_SHARE * max(0.0, self.deadline - self.started))

    def _unknown(
        self, said: errors.SigningError | str, known: Iterable[object] = (), *, timed_out: bool = False
    ) -> errors.OutcomeUnknown:
        text = str(said).removeprefix(f"{self.operation.name}: ")
        timed_out |= isinstance(said, errors.RequestTimeout) or asyncio.get_running_loop().time() >= self.deadline
        kind = errors.OutcomeUnknownTimeout if timed_out else errors.OutcomeUnknown
        return kind(
            f"{self.operation.name}: it is not known whether this took effect: {text}",
            operation=self.operation.name,
            attempts=self.attempts,
            known=known,
        )

    def _finally(self, error: errors.SigningError, why: str) -> errors.SigningError:
        if why and isinstance(error, errors.APIError | errors.TransportError):
            error.message = f"{error.message} ({why})" if error.message else why
            error.args = (error.message,)
        if isinstance(error, errors.TransportError):
            error.attempts = self.attempts
        return error

    # One attempt

    async def _exchange(self) -> T | Trouble | Found[T]:
        """Make one attempt; once more if the token was rejected and could be renewed."""
        while True:
            result = await self._request()
            if not isinstance(result, _Renewed):
                return result
            if self.was_ambiguous and (found := await self._reconcile(asyncio.get_running_loop().time())) is not None:
                return found

    async def _request(self) -> T | Trouble | _Renewed:
        """Send the request and read its response, within what is left of the deadline."""
        self._forget_answer()
        self.body = None
        if not await self.shared.gate.passed(self._last_start()):
            return self._gated()
        loop = asyncio.get_running_loop()
        since = loop.time()
        self.let_through = self.shared.let_through
        limit = self.deadline
        if self.operation.effect is not None and self.options.retry.max_attempts > 1:
            # If no response comes there must be time to see what the request did.
            limit -= min((limit - since) * _RESERVED_SHARE, self.options.retry.settle + self._reading_time())
        try:
            with until(limit) as bound:
                token = await self.shared.auth.token()
                self.body = self.operation.body() if self.operation.body is not None else None
                sent_at = loop.time()
                result = await self._once(token, limit)
                if self.status is not None and not (self.operation.transfer or isinstance(result, _Renewed)):
                    self.shared.response_times.note(self.operation.name, loop.time() - sent_at)
                return result
        except TimeoutError:
            if not bound.expired:
                raise
        finally:
            self._leave(since)
        return self._timed_out()

    def _leave(self, since: float) -> None:
        admitted = None if self.status is None else self.status != 429
        if admitted:
            self.shared.let_through += 1
        self.shared.gate.left(since, admitted)

    def _forget_answer(self) -> None:
        self.status = self.data = self.rejected_as = None
        self.headers = {}

    def _timed_out(self) -> Trouble:
        timeouts = self.options.timeouts
        seconds = timeouts.transfer if self.operation.transfer else timeouts.call
        error = errors.RequestTimeout(
            f"{self.operation.name}: no answer came within its deadline of {seconds:g} s",
            operation=self.operation.name,
            attempts=self.attempts,
            status=self.status,
            request_id=self.request_id,
        )
        # What changes something has a body, and sends nothing before its first bytes.
        lost = self.body is not None and self.body.started
        return Trouble(Outcome.LOST if lost else Outcome.UNSENT, error, passing=False)

    def _gated(self) -> Trouble:
        wait = self.shared.gate.opens_at - asyncio.get_running_loop().time()
        if wait <= 0:
            # No limit is known of: those that went out before are not answered.
            return self._timed_out()
        error = errors.RateLimited(
            "the service asked all calls to wait for longer than this call may take; nothing was sent",
            status=429,
            operation=self.operation.name,
            retry_after=wait,
        )
        return Trouble(Outcome.THROTTLED, self._converted(error, {}), wait, passing=False)

    async def _once(self, token: Token | None, limit: float) -> T | Trouble | _Renewed:
        """One request with this token."""
        operation = self.operation
        request = wire.Request(
            operation.method, self.shared.origin, operation.path, operation.params, self.body, operation.accept
        )
        for _ in range(_MOST_REDIRECTS + 1):
            remaining = limit - asyncio.get_running_loop().time()
            connect = max(min(self.options.timeouts.connect, 0.9 * remaining), 0.001)
            # While an upload is worked on there is silence; it must not be taken for a lost answer.
            silence = self.options.timeouts.call if operation.receive is not None else None
            response = await wire.send(self.shared.sessions, request, token, connect=connect, silence=silence)
            if isinstance(response, wire.Failure):
                return self._failed(response)
            try:
                self.status = response.status
                self.headers = response.headers
                if response.status in _REDIRECTS and operation.method == "GET":
                    request = self._redirected(request, response)
                    self._forget_answer()
                    continue
                expired = response.status in self.options.assumptions.expired_token_statuses
                if self.may_renew and token is not None and expired:
                    self.may_renew = False
                    rejection = await self._rejection(response)
                    response.close()
                    # It was refused: nothing is ambiguous while the token is renewed.
                    self.body = None
                    if await self.shared.auth.renewed(token):
                        return _Renewed()
                    raise rejection
                return await self._receive(response)
            except wire.Broken as broken:
                failure = broken.failure
            finally:
                response.finish()
            return self._failed(failure)
        raise self._refused_redirect(f"more than {_MOST_REDIRECTS} redirects")

    def _redirected(self, request: wire.Request, response: wire.Response) -> wire.Request:
        """The request that a redirect asks for: on the same origin, or an error."""
        target = wire.resolve(request, response.headers.get("Location", ""))
        if target is None:
            raise self._refused_redirect("a redirect to another origin is not followed")
        return attrs.evolve(request, path=target, params={})

    def _refused_redirect(self, why: str) -> errors.APIError:
        return errors.APIError(
            why, status=self.status or 302, operation=self.operation.name, request_id=self.request_id
        )

    def _failed(self, failure: wire.Failure) -> Trouble:
        error = errors.TransportError(
            f"{self.operation.name}: {failure.words}",
            operation=self.operation.name,
            attempts=self.attempts,
            status=self.status,
            request_id=self.request_id,
        )
        error.transient = failure.passing
        return Trouble(failure.outcome, error, passing=failure.passing)

    async def _receive(self, response: wire.Response) -> T | Trouble:
        operation, assumptions = self.operation, self.options.assumptions
        if not response.ok:
            error = await self._rejection(response)
            self.rejected_as = error.request_id
            if response.status == 429:
                return Trouble(Outcome.THROTTLED, error, error.retry_after)
            if 500 <= response.status < 600:
                # A 502 or 504, and any page of a proxy, says nothing of the service behind it.
                own = response.status in (500, 503) and error.code is not None
                return Trouble(Outcome.FAILED if own else Outcome.GATEWAY, error, error.retry_after)
            if response.status < 400 and operation.method != "GET":
                # Somebody has taken the request, and where it went is not known.
                return Trouble(Outcome.LOST, error, passing=False)
            raise error
        if operation.decode is None and operation.receive is None:
            # The status says it all: an answer that breaks off or hangs after it changes nothing.
            if not _is_page(await response.start(), response):
                return cast("T", None)
            words = "it is a page of HTML"
            strange = self.transport.unreadable(operation.name, words, response.status, self.request_id)
            return Trouble(Outcome.LOST, strange, passing=False)
        try:
            if operation.receive is not None:
                return await operation.receive(response)
            assert operation.decode is not None
            # No variables of this frame: some tracebacks show those. Decoding uses up the data, and an error needs it.
            self.answer = await response.read(assumptions.max_answer_bytes)
            self.data = parse(self.answer)
            return operation.decode(self.data, response)
        except Unreadable as error:
            problem = str(error)
        identity = self.request_id
        unreadable = self.transport.unreadable(operation.name, problem, response.status, identity, self.answer)
        if operation.repeat is not Repeat.READ:
            unreadable.effect = "unknown"
        raise unreadable

    async def _rejection(self, response: wire.Response) -> errors.APIError | errors.AuthError:
        headers = response.headers
        error = error_from(
            response.status,
            headers,
            await response.start(),
            reason=response.reason,
            operation=self.operation.name,
            not_found=self.operation.not_found,
            retry_after=retry.read_retry_after(headers.get("Retry-After"), date=headers.get("Date"), now=time.time),
            secrets=self.shared.auth.secrets(),
            assumptions=self.options.assumptions,
        )
        return self._converted(error, headers)

    def _converted(self, error: errors.APIError, headers: Mapping[str, str]) -> errors.APIError | errors.AuthError:
        convert = self.operation.convert_error
        return error if convert is None else convert(error, headers)

    # Telling

    def _report(self, began: float, delay: float | None, error: str | None, *, in_doubt: bool = False) -> None:
        """Tell the hook and the log of an attempt that is over."""
        hook = self.options.on_attempt
        if hook is None and not log.isEnabledFor(logging.DEBUG):
            return
        seconds = time.perf_counter() - began
        name = self.operation.name
        told = Attempt(name, self.attempts, self.status, seconds, self.request_id, delay, error, in_doubt)
        log.debug(
            "%s attempt %d: %s in %.3f s%s%s",
            told.operation,
            told.attempt,
            told.status or "no answer",
            told.seconds,
            f", request id {told.request_id}" if told.request_id else "",
            (f": {error}" if error else "") + (f"; again in {delay:.3f} s" if delay is not None else ""),
        )
        if hook is not None:
            try:
                hook(told)
            except Exception:
                log.exception("the on_attempt hook failed")


def _is_page(body: bytes, response: wire.Response) -> bool:
    """Whether somebody in the way has answered in the service's place, such as a proxy that wants a login.

    Not by the type alone: some frameworks give it to an empty answer.
    """
    return body.lstrip().startswith(b"<") and "html" in response.headers.get("Content-Type", "").lower()
