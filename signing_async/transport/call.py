"""One call: rate limiter, attempts, deadline, reconciliation."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

from .. import errors
from .._foreign import safe_text
from ..reconcile import Found, Reconciler, Undecidable
from ..telemetry import switch
from . import retry
from .deadlines import Deadline
from .exchange import Exchange, TokenReplaced, report_attempt
from .operation import Anonymous, Attempt, Auth, Bearer, CallContext, Operation, Options, Shared, Timeouts, log
from .retry import FailedAttempt, Outcome, Repeat, Retries, RetryBudget, RetryRequested, Step

if TYPE_CHECKING:
    from ..models import Signing
    from ..telemetry.calls import Call as ObservedCall

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
R = TypeVar("R")

# At most this share of the remaining time is reserved for readings and for the response.
_RESERVED_SHARE = 0.25
_LATE = "the deadline passed before it could be reconciled"
_UNOBSERVED: AbstractContextManager[None] = nullcontext()


class Transport:
    """Makes calls for one view of a client: every operation goes through `call`."""

    def __init__(self, shared: Shared, options: Options) -> None:
        self.shared = shared
        self.options = options
        self._unobserved = CallContext(options.on_attempt, telemetry=options.telemetry)

    async def call(self, operation: Operation[T], deadline: float | None = None) -> T:
        """Carry out an operation within the call's deadline; retry it as the policy and the retry table allow."""
        if deadline is None:
            deadline = self.deadline(transfer=operation.transfer)
        budget = self.shared.budget
        budget.deposit()
        with self._observe(operation.name, operation.path) as observed:
            call = _Call(self.shared, self.options, operation, deadline, budget, self._context(observed))
            try:
                self.shared.sessions.get()
                result = await retry.run(call.attempt)
            except BaseException as error:
                call.abandon(error)
                raise
            finally:
                budget.end_call()
            if observed is not None and operation.repeat is Repeat.CREATE:
                observed.note_created(cast("Signing", result).id)
            return result

    async def find_effect(self, operation: Operation[T]) -> Found[T] | None:
        """Return the effect that the operation had in an earlier process; None if there is none.

        Only reads. Raises `OutcomeUnknown` if the service can't be read or doesn't tell.
        """
        with self._observe(f"{operation.name}.find_effect", operation.path) as observed:
            return await self._reading_call(operation, observed).find_effect()

    async def verify_effect(self, operation: Operation[T], value: T) -> T:
        """Return the effect of an operation that returned ``value``; raise `OutcomeUnknown` if no effect shows."""
        with self._observe(f"{operation.name}.verify_effect", operation.path) as observed:
            return await self._reading_call(operation, observed).verify(value)

    def _reading_call(self, operation: Operation[T], observed: ObservedCall | None) -> _Call[T]:
        return _Call(self.shared, self.options, operation, self.deadline(), None, self._context(observed))

    def _context(self, observed: ObservedCall | None) -> CallContext:
        return self._unobserved if observed is None else CallContext(self.options.on_attempt, observed)

    def _observe(self, name: str, path: str) -> AbstractContextManager[ObservedCall | None]:
        telemetry = switch.active() if self.options.telemetry else None
        if telemetry is None:
            return _UNOBSERVED
        from ..telemetry.calls import Call

        return Call(telemetry, name, path)

    def deadline(self, *, transfer: bool = False) -> float:
        """Return the deadline of a call that begins now, in loop time."""
        timeouts = self.options.timeouts
        return asyncio.get_running_loop().time() + (timeouts.transfer if transfer else timeouts.call)

    def redacted(self, text: str) -> str:
        return self.shared.redact(text)


class _Call(Generic[T]):
    """The attempts of one call, and their common state."""

    retry_at = 0.0
    accepted = 0
    """What `Shared.accepted` was when the last request was sent."""
    last_failure: errors.SigningError | None = None
    may_have_taken_effect = False
    may_refresh = True
    reconciler: Reconciler[T] | None = None
    """Made after the first attempt that is ambiguous or raises, or by a method that only reads."""

    def __init__(
        self,
        shared: Shared,
        options: Options,
        operation: Operation[T],
        deadline: float,
        budget: RetryBudget | None,
        context: CallContext,
    ) -> None:
        self.shared = shared
        self.options = options
        self.operation = operation
        self.deadline = deadline
        self.retries = Retries(options.retry, operation.repeat, budget)
        self.context = context
        self.observed = context.observed
        self.exchange: Exchange[T] = Exchange(operation, shared, options, self.context)
        self.started = asyncio.get_running_loop().time()

    async def attempt(self) -> T:
        """Make one attempt; raise `RetryRequested` if another is to follow."""
        if self.reconciler is not None and (found := await self._reconcile(self.reconciler, self.retry_at)) is not None:
            return self._succeed(found.value)
        self.retries.attempts += 1
        began = time.perf_counter()
        try:
            result = await (self._send() if self.observed is None else self._send_observed())
        except Exception as error:  # also what the caller's own rate limiter, token or file raises
            report_attempt(self.exchange, self.retries.attempts, began, safe_text(error))
            if self.operation.effect is not None and (reconciler := self._reconciler()).may_cause(error):
                if self.exchange.status is not None:
                    # The refusal may mean that an earlier attempt took effect late: give its effect time to show.
                    reconciler.wait(self.options.retry.settle)
                return await self._reconcile_or_raise(reconciler, error)
            raise
        if isinstance(result, TokenReplaced):
            self._retry_with_new_token(began)
        if isinstance(result, FailedAttempt):
            return await self._follow(result, began)
        report_attempt(self.exchange, self.retries.attempts, began)
        return self._succeed(result if self.reconciler is None else await self.verify(result))

    def _retry_with_new_token(self, began: float) -> NoReturn:
        self.may_refresh = False
        self.retries.uncounted += 1
        text = "the token was rejected and has been refreshed"
        report_attempt(self.exchange, self.retries.attempts, began, text, delay=0.0, level=logging.DEBUG)
        self.retry_at = asyncio.get_running_loop().time()
        raise RetryRequested(0.0)

    async def _follow(self, failed: FailedAttempt, began: float) -> T:
        """Do what follows a failed attempt: request another one, find its effect after all, or raise."""
        now = asyncio.get_running_loop().time()
        decision = self.retries.decide(
            failed, remaining=self._last_start() - now, others_accepted=self.shared.accepted > self.accepted
        )
        if decision.pause is not None:
            self.shared.rate_limiter.pause(decision.pause)
        is_ambiguous = decision.step in (Step.RECONCILE, Step.UNKNOWN)
        attempts, text = self.retries.attempts, str(failed.error)
        report_attempt(self.exchange, attempts, began, text, delay=decision.delay, ambiguous=is_ambiguous)
        self.last_failure = failed.error
        self.may_have_taken_effect |= failed.outcome.is_ambiguous
        if self.operation.effect is not None and is_ambiguous:
            self._note_ambiguous(failed.outcome)
        if decision.step is Step.UNKNOWN:
            text = f"{failed.error}; {decision.reason}"
            may_clear = self.operation.effect is not None  # nothing was read; a reading may tell
            raise _unknown(self, text, timed_out=isinstance(failed.error, errors.RequestTimeout), may_clear=may_clear)
        # From here on the call, not the exchange, tracks whether the attempt may have taken effect.
        self.exchange.body = None
        if decision.delay is not None:
            self.retry_at = now + decision.delay
            if self.observed is not None:
                self.observed.note_retry(decision.delay, failed.error)
            # An ambiguous call spends the delay on readings.
            raise RetryRequested(0.0 if decision.step is Step.RECONCILE else decision.delay)
        error = _complete(failed.error, decision.reason, self.retries.attempts)
        if self.reconciler is not None:
            return await self._reconcile_or_raise(self.reconciler, error)
        raise error

    def abandon(self, error: BaseException) -> None:
        """Note whether a call that raised may still take effect; if so, raise `OutcomeUnknown` for a foreign error."""
        effect, may_take_effect = self.operation.effect, _may_take_effect(self)
        if isinstance(error, errors.SigningError):
            if may_take_effect:
                error.effect = "unknown"
            is_unknown = error.effect == "unknown"
        else:
            # The call was cancelled, or the caller's own code failed.
            is_unknown = may_take_effect or bool(self.reconciler and self.reconciler.ambiguous)
        if is_unknown and effect is not None:
            effect.note_unresolved()
        if may_take_effect and isinstance(error, Exception) and not isinstance(error, errors.SigningError):
            raise _unknown(self, f"the call failed ({type(error).__name__})", may_clear=effect is not None) from error

    def _succeed(self, value: T) -> T:
        self.retries.succeed()
        return value

    # One attempt

    async def _send_observed(self) -> T | FailedAttempt | TokenReplaced:
        try:
            result = await self._send()
        except BaseException as error:
            self.exchange.end_attempt(error)
            raise
        self.exchange.end_attempt(result.error if isinstance(result, FailedAttempt) else None)
        return result

    async def _send(self) -> T | FailedAttempt | TokenReplaced:
        """Acquire from the rate limiter, send the request and read its response, within the deadline."""
        shared, operation = self.shared, self.operation
        exchange = self.exchange = Exchange(operation, shared, self.options, self.context)
        loop = asyncio.get_running_loop()
        began = loop.time()
        is_acquired = await shared.rate_limiter.acquire(self._last_start())
        since = loop.time()
        if self.observed is not None:
            self.observed.note_wait(since - began, passed=is_acquired)
        if not is_acquired:
            wait = shared.rate_limiter.next_at - loop.time()
            # Without a wait no limit is known: the earlier requests are still waiting for their responses.
            return exchange.throttled(wait) if wait > 0 else exchange.timed_out()
        self.accepted = shared.accepted
        deadline = self.deadline
        if operation.effect is not None and self.options.retry.max_attempts > 1:
            # If no response comes, there must be time left to reconcile.
            deadline -= min((deadline - since) * _RESERVED_SHARE, self.options.retry.settle + self._reading_time())
        try:
            with Deadline(deadline) as attempt_deadline:
                result = await exchange.send(deadline, self.retries.attempts, may_refresh=self.may_refresh)
                if exchange.status is not None and not (operation.transfer or isinstance(result, TokenReplaced)):
                    shared.response_times.note(operation.name, loop.time() - exchange.sent_at)
                return result
        except TimeoutError:
            if not attempt_deadline.expired:
                raise
        finally:
            was_accepted = None if exchange.status is None else exchange.status != 429
            shared.accepted += was_accepted is True
            shared.rate_limiter.release(since, was_accepted)
        return exchange.timed_out()

    def _last_start(self) -> float:
        """Return the latest loop time for a request to start and leave time for its response and one reading."""
        needed = self.shared.response_times.expected(self.operation.name)
        if self.operation.effect is not None:
            needed += self._reading_time()
        return self.deadline - min(needed, _RESERVED_SHARE * max(0.0, self.deadline - self.started))

    # Reconciliation

    async def find_effect(self) -> Found[T] | None:
        """Return the effect of an earlier process's request; None if it had none."""
        self._note_ambiguous(Outcome.LOST)
        return await self._reconcile(self._reconciler(), asyncio.get_running_loop().time())

    async def verify(self, value: T) -> T:
        """Return the effect of the attempt that succeeded; raise `OutcomeUnknown` unless it shows exactly once."""
        unverified = "the request succeeded, but could not be verified"
        verifying = self._reconciler().verify(value, self.options.retry.settle, reading_time=self._reading_time())
        verified = await self._decide_by(verifying, unverified, f"{unverified}: ", () if value is None else (value,))
        self._note_verdict("verified")
        return verified

    def _reconciler(self) -> Reconciler[T]:
        if self.reconciler is None:
            assert self.operation.effect is not None
            self.reconciler = Reconciler(self.operation.effect, self._read, self.deadline)
        return self.reconciler

    def _note_ambiguous(self, outcome: Outcome) -> None:
        settle = retry.settle_time(self.options.retry, outcome)
        self._reconciler().note(settle, may_be_late=outcome.may_be_late)

    async def _reconcile(self, reconciler: Reconciler[T], retry_at: float) -> Found[T] | None:
        """Return the effect of an earlier attempt; None if a repeat is safe."""
        settling = reconciler.settle(retry_at, reading_time=self._reading_time())
        found = await self._decide_by(settling, str(self.last_failure or "no response came"))
        self._note_verdict("no_effect" if found is None else "effect")
        return found

    async def _reconcile_or_raise(self, reconciler: Reconciler[T], error: Exception) -> T:
        """No attempt follows: return the effect of an earlier one, or raise the error if there is none."""
        found = await self._reconcile(reconciler, asyncio.get_running_loop().time())
        if found is not None:
            return self._succeed(found.value)
        raise error

    async def _decide_by(self, reading: Awaitable[R], late: str, cause: str = "", known: Iterable[object] = ()) -> R:
        """Return what the reconciler finds; raise `OutcomeUnknown` if it cannot tell."""
        try:
            async with asyncio.timeout_at(self.deadline):
                return await reading
        except Undecidable as error:
            unknown = _unknown(self, f"{cause}{error}", known=(*known, *error.known), may_clear=error.may_clear)
            # What the caller's own function raised.
            unknown.__cause__ = error.__cause__
        except errors.SigningError as error:
            # The readings share the time that is left: one that times out has used it up.
            is_late = isinstance(error, TimeoutError) and not error.client_wide
            text = f"{late}; {_LATE}" if is_late else f"{cause}the service could not be read: {error}"
            unknown = _unknown(self, text, known=known, timed_out=is_late, may_clear=error.transient)
            unknown.client_wide, unknown.__cause__ = error.client_wide, error
        except TimeoutError:
            unknown = _unknown(self, f"{late}; {_LATE}", known=known, timed_out=True, may_clear=True)
        except Exception as error:
            # The caller's own rate limiter may raise anything.
            text = f"{cause}the service could not be read ({type(error).__name__})"
            unknown = _unknown(self, text, known=known, may_clear=True)
        self._note_verdict("unknown")
        raise unknown

    def _note_verdict(self, verdict: str) -> None:
        if self.observed is not None:
            self.observed.note_verdict(verdict)

    async def _read(self, operation: Operation[Any]) -> Any:
        """Carry out a reading as a part of this call."""
        # A reading that hangs must leave time for others.
        now = asyncio.get_running_loop().time()
        deadline = now + min(_RESERVED_SHARE * (self.deadline - now), self.options.timeouts.call)
        if self.observed is not None:
            self.observed.note_reading(operation.name)
        return await retry.run(_Call(self.shared, self.options, operation, deadline, None, self.context).attempt)

    def _reading_time(self) -> float:
        """Return the seconds to reserve for one reading."""
        assert self.operation.effect is not None
        remaining = max(0.0, self.deadline - asyncio.get_running_loop().time())
        return min(self.shared.response_times.expected(self.operation.effect.reading), _RESERVED_SHARE * remaining)


# Errors


def _may_take_effect(call: _Call[Any]) -> bool:
    """Return whether a failed call whose effect does not show may have taken effect, or may still do so."""
    effect, repeat = call.operation.effect, call.operation.repeat
    # A reminder is retried after a 5xx, although the first request may have taken effect.
    is_late = call.may_have_taken_effect if effect is None else effect.may_show_late
    return (is_late or call.exchange.may_have_taken_effect) and retry.effect_of(repeat) == "unknown"


def _unknown(
    call: _Call[Any], cause: str, known: Iterable[object] = (), *, timed_out: bool = False, may_clear: bool = False
) -> errors.OutcomeUnknown:
    timed_out |= asyncio.get_running_loop().time() >= call.deadline
    name = call.operation.name
    unknown = (errors.OutcomeUnknownTimeout if timed_out else errors.OutcomeUnknown)(
        f"{name}: the outcome is unknown: {cause.removeprefix(f'{name}: ')}",
        operation=name,
        attempts=call.retries.attempts,
        known=known,
        may_clear=may_clear,
    )
    unknown.after_transient = call.last_failure is None or call.last_failure.transient
    log.warning("%s", unknown)
    return unknown


def _complete(error: errors.SigningError, reason: str, attempts: int) -> errors.SigningError:
    """Add to the error of the last attempt what only the call knows."""
    if reason and isinstance(error, errors.APIError | errors.TransportError):
        error.message = f"{error.message} ({reason})" if error.message else reason
        error.args = (error.message,)
    if isinstance(error, errors.TransportError):
        error.attempts = attempts
    return error
