"""Plays histories of calls, and judges what the callers were told by what the service holds in the end.

Everything that a history may consist of:

=========  =============================================================================================
operation  send, send of an own draft, upload, add, request with ``reconcile=``
attempt    ends as one of `service.End`; up to four of them, and two of two calls together
effect     of an ambiguous attempt: at once, within its settle time (at the last moment, the hardest one),
           after it while a repeat is under way, after it and later, never
readings   after an attempt: one of `service.Reading`
deadline   far, or near: within the settle time of the first or the second attempt
beside it  nothing; or a second call by the same client: a send of the same signing, a file of the same name
           or a recipient with the same address; or a request with a reference of its own
budget     full; or enough for one retry, of a send or an upload
=========  =============================================================================================

Of histories that are equal by symmetry, one is played and all are counted: effects that no reading observes, and, if
there is one call and its budget is full, a 429 instead of an attempt that was not sent (nothing took effect, and the
next attempt follows at once), and a gateway's error instead of a lost response (both are read for the settle time).

A history is *impossible*, in the README's word, if an effect shows after its settle time, and too late for the last
reading of its call. No client can see it, so less is asserted: the ledger must be tainted, and the error of an own send
must be "unknown".
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import attrs

from signing_async.assumptions import Assumptions
from signing_async.errors import SigningError
from signing_async.models import Document, Recipient
from signing_async.reconcile import (  # the real core is played, without connections
    Creation,
    DocumentMatch,
    Ledger,
    Read,
    RecipientMatch,
    Recognized,
    Sent,
    SigningLedger,
    Undecidable,
)
from signing_async.transport import wire
from signing_async.transport.attempt import Bearer
from signing_async.transport.call import Transport
from signing_async.transport.operation import Operation, Options, Shared, Timeouts
from signing_async.transport.retry import Kind, RetryPolicy, Safety

from .loop import VirtualLoop
from .service import READING_TIME, RESPONSE_TIME, TWINS, Attempts, Caller, Script, Service

SETTLE = 0.2
FAR, NEAR = 30.0, 0.35
EPSILON = 1e-6
WITHIN, SOON, LATE = -0.001, READING_TIME + RESPONSE_TIME / 2, SETTLE / 2
"""When an attempt takes effect, in seconds after its settle time."""

_ASSUMPTIONS = Assumptions()
_AUTH = Bearer("token")
_TIMEOUTS = Timeouts()
_LOOP = VirtualLoop()  # type: ignore[abstract]


@attrs.frozen
class Case:
    """What does not change from one history to the next."""

    operation: str
    deadline: float = FAR
    is_second_beside: bool = False
    is_budget_low: bool = False
    max_attempts: int = 4
    leaves_out_twins: bool = True

    def __str__(self) -> str:
        deadline, beside = "near" if self.deadline == NEAR else "far", ", beside another" * self.is_second_beside
        return f"{self.operation}, deadline {deadline}{beside}{', low budget' * self.is_budget_low}"


def cases() -> Iterator[Case]:
    """Yield all cases.

    An add differs from an upload only in how its records are matched, and a budget does not depend on the operation.
    Two sends or requests do not wait for each other. No other client sends an own draft.
    """
    for operation in ("send", "send own", "upload", "add", "request"):
        yield Case(operation, FAR)
        yield Case(operation, NEAR)
    for operation in ("send", "upload"):
        yield Case(operation, FAR, is_budget_low=True)
    for operation in ("send", "upload", "add", "request"):
        yield Case(operation, FAR, True, max_attempts=2)
    for operation in ("upload", "request"):
        yield Case(operation, NEAR, True, max_attempts=2)


class NoLimiter:
    """A rate limiter that lets every request pass."""

    next_at = 0.0

    async def acquire(self, deadline: float) -> bool:
        return True

    def release(self, acquired_at: float, accepted: bool | None) -> None:
        pass

    def pause(self, seconds: float) -> None:
        pass


@attrs.define(eq=False)
class Told:
    """What one call told its caller."""

    caller: Caller
    deadline: float
    ended_at: float = 0.0
    value: Any = None
    error: SigningError | None = None

    @property
    def effect(self) -> str:
        return "value" if self.error is None else self.error.effect


# Calls


def _document(record_id: str) -> Document:
    return Document(record_id, "lease.pdf", extra={"size": 7})


def _recipient(record_id: str) -> Recipient:
    return Recipient(record_id, "anna@example.com", "Anna")


_RECORDS: dict[str, Callable[[str], Any] | None] = {
    "send": None,
    "send own": None,
    "upload": _document,
    "add": _recipient,
    "request": _document,
}
_LIST: Operation[Any] = Operation("list", "GET", "/s", Safety.READ)


def _list(read: Read) -> Any:
    return read(_LIST)


def has_reference(record: Document, reference: str) -> bool:
    """Return whether a request with this reference created the record."""
    return record.id.startswith(reference)


async def _recognize(reference: str, read: Read) -> Document | None:
    """Recognize the effect as a caller should: by a reference of its own."""
    found = [record for record in await read(_LIST) if has_reference(record, reference)]
    if len(found) > 1:
        raise Undecidable("several records match", found)
    return found[0] if found else None


def _effect(operation: str, signing: SigningLedger, told: Told) -> Any:
    if operation.startswith("send"):
        return Sent(signing, _list, is_own=operation == "send own")
    if operation == "request":
        return Recognized(partial(_recognize, told.caller.name), lambda record: record.id)
    if operation == "upload":
        match: Any = DocumentMatch("lease.pdf", 7, str, _ASSUMPTIONS)
        return Creation("upload", told.deadline, signing.additions, signing.documents, match, _list)
    match = RecipientMatch({"email": "anna@example.com", "first_name": "Anna"}, {})
    return Creation("add", told.deadline, signing.additions, signing.recipients, match, _list)


async def _call(case: Case, told: Told, shared: Shared, options: Options, signing: SigningLedger) -> None:
    """Make one call, as the resources make it."""
    transport = Transport(shared, options, Attempts(told.caller))
    effect = _effect(case.operation, signing, told)
    operation: Operation[Any] = Operation("write", "POST", "/s", Safety.RECONCILED, effect=effect, body=wire.bytes_body)
    try:
        if isinstance(effect, Creation):
            async with effect:
                told.value = await transport.call(operation, told.deadline)
                effect.note_created(told.value)
        else:
            told.value = await transport.call(operation, told.deadline)
    except SigningError as error:
        told.error = error
    told.ended_at = asyncio.get_running_loop().time()


@cache
def _options(max_attempts: int) -> Options:
    policy = RetryPolicy(max_attempts=max_attempts, base_delay=0.0, settle=SETTLE)
    return Options(policy, _TIMEOUTS, _ASSUMPTIONS, telemetry=False)


async def _play(case: Case, script: Script) -> tuple[Service, SigningLedger, list[Told]]:
    options = _options(case.max_attempts)
    sessions: Any = None
    shared = Shared("", _AUTH, sessions, NoLimiter())
    if case.is_budget_low:
        shared.budget._credits = 0.5  # the call deposits another half
    signing = Ledger().signing("/s", {"known"})
    signing.recipients.ids.add("known")
    record = _RECORDS[case.operation]
    service = Service(script, options.retry, record, case.max_attempts, (WITHIN, SOON, LATE))
    service.is_copying = case.operation == "send own"
    if case.leaves_out_twins and not case.is_second_beside and not case.is_budget_low:
        service.twins = TWINS
    told = [Told(Caller("a", service), case.deadline)]
    if not case.is_second_beside:
        await _call(case, told[0], shared, options, signing)
        return service, signing, told
    told.append(Told(Caller("b", service), FAR))
    first = asyncio.create_task(_call(case, told[0], shared, options, signing))
    await asyncio.sleep(0.4 * RESPONSE_TIME)
    await _call(case, told[1], shared, options, signing)
    await first
    return service, signing, told


# Judgement


class Violation(AssertionError):
    """A history that breaks a promise."""


def _last_seen_at(caller: Caller) -> float:
    """Return the time up to which effects show to a call: its last reading begins no earlier."""
    last = caller.requests[-1]
    return last.settled_at if last.kind.is_ambiguous or last.kind is Kind.REFUSED else last.ended_at


def _judge(case: Case, service: Service, signing: SigningLedger, told: list[Told]) -> bool:
    """Raise `Violation` if a promise is broken; return whether the history is possible."""
    is_open = all(one.effect == "unknown" for one in told)
    effects = service.requests if is_open else service.decide()
    is_possible = True
    for one in told:
        caller, requests = one.caller, one.caller.requests
        own = [request for request in effects if request.caller is caller]
        ambiguous = [request for request in requests if request.kind.is_ambiguous]
        if one.ended_at > one.deadline + EPSILON:
            raise Violation(f"{caller.name} ends after its deadline")
        if len(requests) - caller.throttled > case.max_attempts:
            raise Violation(f"{caller.name} makes more attempts than the policy allows")
        if one.effect == "unknown":
            if not (ambiguous or (case.operation == "send own" and requests[-1].kind is Kind.REFUSED)):
                raise Violation(f"{caller.name} says unknown although no attempt was ambiguous")
            continue
        seen = [request for request in own if request.effect_at <= max(request.settled_at, _last_seen_at(caller))]
        unseen = [request for request in own if request not in seen]
        # A later call may take the late effect of an earlier one for its own.
        is_first_impossible = is_possible and bool(unseen)
        is_possible &= not unseen
        if one.error is not None and seen:
            raise Violation(f"{caller.name} says none, and its attempt takes effect")
        if one.error is not None and ambiguous and case.operation == "send own":
            raise Violation(f"{caller.name} says none of an own send that may take effect late")
        if one.error is not None and ambiguous:
            settled_at = max(request.settled_at for request in ambiguous)
            if caller.last_reading_at < settled_at - EPSILON:
                raise Violation(f"{caller.name} says none before an effect had enough time to show")
        if one.error is None and service.make_record is None:
            if not effects or effects[0].effect_at > one.ended_at:
                raise Violation(f"{caller.name} returns, and the signing is a draft")
        elif one.error is None:
            if len(seen) > 1:
                raise Violation(f"{caller.name} returns a record, and its attempts create two")
            if is_possible and one.value.id not in [
                request.record_id for request in own if request.effect_at <= one.ended_at
            ]:
                raise Violation(f"{caller.name} returns a record that it did not create")
        is_late = any(request.kind.may_be_late for request in unseen)
        if is_first_impossible and is_late and case.operation in ("upload", "add") and not signing.is_tainted:
            raise Violation(f"{caller.name} leaves no taint, and its attempt takes effect late")
    if case.is_budget_low:
        repeats = [
            request for one in told for request in one.caller.requests[:-1] if request.kind is not Kind.THROTTLED
        ]
        if len(repeats) > 1:
            raise Violation("the calls make more attempts than the budget allows")
    return is_possible


def _describe(case: Case, service: Service, told: list[Told]) -> str:
    lines = [str(case)]
    for request in sorted(service.requests, key=lambda one: one.sent_at):
        effect = "" if request.effect_at == math.inf else f", takes effect at {request.effect_at:.3f}"
        lines.append(
            f"{request.caller.name}: {request.sent_at:.3f} to {request.ended_at:.3f}: {request.end.name}{effect}"
        )
    lines += [f"{one.caller.name}: ended at {one.ended_at:.3f}: {one.error or one.value!r}" for one in told]
    return "\n".join(lines)


def enumerate_histories(case: Case, counts: Counter[str]) -> None:
    """Play and judge every history of a case; count them, and what their calls told.

    A run counts as all of the histories that are equal to it.
    """
    script: Script | None = Script()
    while script is not None:
        service, signing, told = _LOOP.run(_play(case, script))
        try:
            is_possible = _judge(case, service, signing, told)
        except Violation as violation:
            raise Violation(f"{violation}\n{_describe(case, service, told)}") from None
        histories = math.prod(request.histories for request in service.requests)
        counts["runs"] += 1
        counts["histories"] += histories
        counts["possible" if is_possible else "impossible"] += histories
        for one in told:
            counts[one.effect] += histories
        script = script.next()
