"""One call: attempts until one decides, with a reading before each repeat and each error once one was ambiguous."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

from .. import errors, telemetry
from ..models import Signing
from ..reconcile import Found, Reconciliation, Undecidable
from ..telemetry import names
from . import retry
from .attempt import RESERVED_SHARE, Context, Outcome, attempt, report
from .operation import Observer, Operation, Options, Shared, log
from .redaction import redact
from .retry import Decision, Kind, Retries, RetryBudget, RetryRequested, Safety, Step

__all__ = ["Transport"]

T = TypeVar("T")
R = TypeVar("R")

# Seconds that a call keeps before its deadline for a response, and for a reading.
_RESPONSE_TIME = _READING_TIME = 1.0
_LATE = "the deadline passed before it could be reconciled"


class Transport:
    """Makes calls for one view of a client: every operation goes through `call`."""

    def __init__(
        self,
        shared: Shared,
        options: Options,
        attempt: Callable[[Context[Any]], Awaitable[Outcome[Any]]] = attempt,
    ) -> None:
        self.shared = shared
        self.options = options
        self.attempt = attempt

    async def call(self, operation: Operation[T], deadline: float | None = None) -> T:
        """Carry out an operation within the call's deadline; retry it as the policy and the retry table allow."""
        budget = self.shared.budget
        with telemetry.active(self.options.telemetry).call(operation.name, operation.path) as span:
            call = _Call(self, operation, deadline or self.deadline(transfer=operation.transfer), span, budget)
            budget.add(budget.DEPOSIT)
            try:
                result = await call.run()
            except BaseException as error:
                call.note_unresolved(error)
                raise
            if operation.safety is Safety.CREATE and isinstance(result, Signing):
                span.set({names.SIGNING_ID: result.id})
            return result

    async def find_effect(self, operation: Operation[T]) -> Found[T] | None:
        """Return the effect that the operation had in an earlier process; None if there is none.

        Only reads, for the settle time even if the timeout is shorter: else no repetition could ever tell. Raises
        `OutcomeUnknown` if the service can't be read or doesn't tell.
        """
        # Twice: the time of the last reading, and the time that is kept for it.
        settled = asyncio.get_running_loop().time() + self.options.retry.settle + 2 * _READING_TIME
        with telemetry.active(self.options.telemetry).call(f"{operation.name}.find_effect", operation.path) as span:
            return await _Call(self, operation, max(self.deadline(), settled), span).find_effect()

    async def confirm_effect(self, operation: Operation[T], value: T) -> T:
        """Return the effect of an operation that returned ``value``; raise `OutcomeUnknown` if no effect shows."""
        with telemetry.active(self.options.telemetry).call(f"{operation.name}.verify_effect", operation.path) as span:
            return await _Call(self, operation, self.deadline(), span).confirm(value)

    def deadline(self, *, transfer: bool = False) -> float:
        """Return the deadline of a call that begins now, in loop time."""
        timeouts = self.options.timeouts
        return asyncio.get_running_loop().time() + (timeouts.transfer if transfer else timeouts.call)

    def redacted(self, text: str) -> str:
        """Return the text without tokens and secrets."""
        return redact(text, self.shared.auth.secrets())


class _Call(Generic[T]):
    """The attempts of one call, and what they share. Without a ``budget``, its retries are free."""

    _reconciliation: Reconciliation[T] | None = None
    """Made after the first attempt that is ambiguous or refused, or by a method that only reads."""
    _was_ambiguous = False
    _last_failure: errors.SigningError | None = None
    """The error of the last attempt that was neither refused nor rejected for its token."""

    def __init__(
        self,
        transport: Transport,
        operation: Operation[T],
        deadline: float,
        span: telemetry.Span,
        budget: RetryBudget | None = None,
    ) -> None:
        self._transport = transport
        self._operation = operation
        self._deadline = deadline
        self._span = span
        options, now = transport.options, asyncio.get_running_loop().time()
        is_reconciled = operation.effect is not None
        for_rest = _RESPONSE_TIME + (_READING_TIME if is_reconciled else 0.0)
        may_read = is_reconciled and options.retry.max_attempts > 1
        for_readings = options.retry.settle + _READING_TIME if may_read else 0.0
        last_start = deadline - min(for_rest, RESERVED_SHARE * (deadline - now))
        observer = Observer(options.on_attempt, options.telemetry, span)
        self._context = Context(operation, transport.shared, options, observer, deadline, last_start, for_readings)
        self._retries = Retries(options.retry, operation.safety, budget)
        self._retry_at = now

    async def run(self) -> T:
        """Make attempts until one returns or raises."""
        try:
            # Most calls need no more than this, and backoff would be a tenth of a small call's cost.
            return await self._step()
        except RetryRequested as request:
            delay = request.delay
        await asyncio.sleep(delay)
        result = await retry.run(self._step)
        self._retries.succeed()
        return result

    async def _step(self) -> T:
        """Make one attempt, after a reading if an earlier one was ambiguous; raise `RetryRequested` for another one."""
        if self._reconciliation is not None and (found := await self._settle()) is not None:
            return found.value
        operation, context, shared = self._operation, self._context, self._transport.shared
        loop = asyncio.get_running_loop()
        context.number += 1
        context.body = None if operation.body is None else operation.body()
        accepted, began = shared.accepted, loop.time()
        outcome: Outcome[T] = await self._transport.attempt(context)
        self._retry_at = loop.time()
        seconds = self._retry_at - began
        if outcome.kind is Kind.SUCCESS:
            report(context, outcome, seconds)
            value: T = outcome.value  # type: ignore[assignment]  # None only if T allows it
            return value if self._reconciliation is None else await self.confirm(value)
        decision = self._retries.decide(
            outcome.kind,
            context.number,
            outcome.retry_after,
            context.last_start - self._retry_at,
            may_retry=outcome.may_retry,
            others_accepted=shared.accepted > accepted,
        )
        if decision.pause is not None:
            shared.rate_limiter.pause(decision.pause)
        report(context, outcome, seconds, decision.delay, ambiguous=decision.step in (Step.RECONCILE, Step.UNKNOWN))
        self._note(outcome)
        if decision.step is Step.UNKNOWN:
            # Nothing was read; a reading may tell.
            late = isinstance(outcome.error, errors.RequestTimeout)
            can_read = operation.effect is not None
            raise self._unknown(f"{outcome.error}; {decision.reason}", timed_out=late, may_clear=can_read)
        if decision.delay is None:
            return await self._finish(outcome, decision)
        self._retry_at += decision.delay
        if outcome.kind is Kind.REJECTED_TOKEN:
            context.may_refresh = False
        else:
            assert outcome.error is not None
            self._span.retry(decision.delay, outcome.error)
        # An ambiguous call spends the delay on readings.
        raise RetryRequested(0.0 if decision.step is Step.RECONCILE else decision.delay)

    def _note(self, outcome: Outcome[T]) -> None:
        """Note how an attempt failed."""
        kind, error = outcome.kind, outcome.error
        if kind is Kind.RAISED:
            return
        self._context.body = None  # what the request may have caused is noted here
        if kind not in (Kind.REFUSED, Kind.REJECTED_TOKEN) and isinstance(error, errors.SigningError):
            self._last_failure = error
        if kind.is_ambiguous:
            self._was_ambiguous = True
            if self._operation.effect is not None:
                self._note_ambiguous(kind)

    async def _finish(self, outcome: Outcome[T], decision: Decision) -> T:
        """Return the effect after all, or raise the error: no attempt follows."""
        error, effect = outcome.error, self._operation.effect
        assert error is not None
        is_final = outcome.kind in (Kind.REFUSED, Kind.RAISED)
        is_under_way = self._is_under_way
        if effect is None:
            is_harmful = retry.effect_of(self._operation.safety) == "unknown"
            may_show_late = is_harmful and (self._was_ambiguous or is_under_way)
        else:
            if self._reconciliation is not None or effect.may_cause(error):
                if is_final:
                    # An earlier attempt may have taken effect late, and caused a refusal: give its effect time to show.
                    self._reconcile().wait(self._transport.options.retry.settle)
                found = await self._settle()
                if found is not None:
                    return found.value
            may_show_late = effect.may_show_late or is_under_way
        if not isinstance(error, errors.SigningError) and may_show_late:
            can_read = effect is not None
            raise self._unknown(f"the call failed ({type(error).__name__})", may_clear=can_read) from error
        if isinstance(error, errors.SigningError) and (may_show_late or not is_final):
            flags: errors.Flags = {"effect": "unknown"} if may_show_late else {}
            raise errors.amended(error, reason=decision.reason, attempts=self._context.number, **flags)
        raise error

    @property
    def _is_under_way(self) -> bool:
        """Whether the request of an attempt whose end was not noted may have been sent as a whole."""
        return self._context.body is not None and self._context.body.may_have_taken_effect

    def note_unresolved(self, error: BaseException) -> None:
        """Note that the call ended with an error while its effect may still show."""
        if self._operation.effect is None:
            return
        if isinstance(error, errors.SigningError):
            is_unknown = error.effect == "unknown"
        else:
            # The call was cancelled, or the caller's own code failed.
            is_unknown = self._is_under_way or (self._reconciliation is not None and self._reconciliation.is_ambiguous)
        if is_unknown:
            self._operation.effect.note_unresolved()

    # Reconciliation

    async def find_effect(self) -> Found[T] | None:
        """Return the effect of an earlier process's request; None if it had none."""
        self._note_ambiguous(Kind.LOST)
        return await self._settle()

    async def confirm(self, value: T) -> T:
        """Return the effect of the attempt that succeeded; raise `OutcomeUnknown` unless it shows exactly once."""
        text = "the request succeeded, but could not be verified"
        confirming = self._reconcile().confirm(value, self._transport.options.retry.settle)
        confirmed = await self._decide_by(confirming, text, f"{text}: ", () if value is None else (value,))
        self._span.verdict("verified")
        return confirmed

    def _reconcile(self) -> Reconciliation[T]:
        if self._reconciliation is None:
            assert self._operation.effect is not None
            left = max(0.0, self._deadline - asyncio.get_running_loop().time())
            last_reading = self._deadline - min(_READING_TIME, RESERVED_SHARE * left)
            self._reconciliation = Reconciliation(self._operation.effect, self._read, last_reading)
        return self._reconciliation

    def _note_ambiguous(self, kind: Kind) -> None:
        settle = retry.settle_time(self._transport.options.retry, kind)
        self._reconcile().note(settle, may_be_late=kind.may_be_late)

    async def _settle(self) -> Found[T] | None:
        """Return the effect of an earlier attempt; None if a repeat is safe."""
        text_if_late = str(self._last_failure or "no response came")
        found = await self._decide_by(self._reconcile().settle(self._retry_at), text_if_late)
        self._span.verdict("no_effect" if found is None else "effect")
        return found

    async def _decide_by(
        self, reading: Awaitable[R], text_if_late: str, prefix: str = "", known: Iterable[object] = ()
    ) -> R:
        """Return what the reconciliation finds; raise `OutcomeUnknown` if it cannot tell."""
        reason: BaseException | None = None
        try:
            async with asyncio.timeout_at(self._deadline):
                return await reading
        except Undecidable as error:
            # The caller's own function may have raised the cause.
            reason, known = error.__cause__, (*known, *error.known)
            unknown = self._unknown(f"{prefix}{error}", known, may_clear=error.may_clear)
        except (errors.SigningError, TimeoutError) as error:
            # The readings share the time that is left: one that times out has used it up.
            failure = error if isinstance(error, errors.SigningError) else None
            is_late = isinstance(error, TimeoutError) and not (failure and failure.client_wide)
            text = f"{text_if_late}; {_LATE}" if is_late else f"{prefix}the service could not be read: {error}"
            may_clear, client_wide = (True, False) if failure is None else (failure.transient, failure.client_wide)
            unknown = self._unknown(text, known, timed_out=is_late, may_clear=may_clear, client_wide=client_wide)
            reason = failure
        except Exception as error:
            # The caller's own rate limiter may raise anything.
            text = f"{prefix}the service could not be read ({type(error).__name__})"
            unknown = self._unknown(text, known, may_clear=True)
        self._span.verdict("unknown")
        raise unknown from reason

    async def _read(self, operation: Operation[Any]) -> Any:
        """Carry out a reading as a part of this call."""
        # A reading that hangs must leave time for others.
        now = asyncio.get_running_loop().time()
        seconds = min(RESERVED_SHARE * (self._deadline - now), self._transport.options.timeouts.call)
        self._span.reading(operation.name)
        return await _Call(self._transport, operation, now + seconds, self._span).run()

    def _unknown(
        self, cause: str, known: Iterable[object] = (), *, timed_out: bool = False, **flags: Any
    ) -> errors.OutcomeUnknown:
        is_late = timed_out or asyncio.get_running_loop().time() >= self._deadline
        name = self._operation.name
        unknown = (errors.OutcomeUnknownTimeout if is_late else errors.OutcomeUnknown)(
            f"{name}: the outcome is unknown: {cause.removeprefix(f'{name}: ')}",
            operation=name,
            attempts=self._context.number,
            known=known,
            after_transient=self._last_failure is None or self._last_failure.transient,
            **flags,
        )
        log.warning("%s", unknown)
        return unknown
