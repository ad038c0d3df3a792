"""A pure model of the service, and the attempts that talk to it.

Modelled: how each attempt of a write ends, when it takes effect, and whether the readings after it work. What happens
is not fixed beforehand: where it matters, `Script.choose` is asked. An effect stays open until a reading, or the judge,
looks at it, so one run covers all histories that differ only in unobserved effects.

Not modelled: connections and bytes, tokens and their refresh, the rate limiter, cancelled calls, readings that are
behind, records that the service renames or that another client creates.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache, partial
from typing import Any, TypeVar

import attrs

from signing_async import errors
from signing_async.models import Signing
from signing_async.transport import attempt, retry, wire  # attempts are modelled, instead of connections
from signing_async.transport.attempt import Context, Outcome
from signing_async.transport.operation import Shared
from signing_async.transport.retry import Kind, RetryPolicy

T = TypeVar("T")

RESPONSE_TIME = 0.05
READING_TIME = 0.02
_LONG = 50.0
"""The Retry-After of a reading that fails: the reading is not repeated by itself."""


class End(Enum):
    """How an attempt of a write ends, as the client sees it."""

    UNSENT = Kind.UNSENT
    THROTTLED = Kind.THROTTLED
    SUCCESS = Kind.SUCCESS
    REFUSED = Kind.REFUSED
    FAILED = Kind.FAILED
    GATEWAY = Kind.GATEWAY
    LOST = Kind.LOST
    SILENT = "no response until the deadline"
    COPIED = "refused, since a copy of the request took effect first"


TWINS = {End.THROTTLED: End.UNSENT, End.GATEWAY: End.LOST}
"""Ends that one call cannot tell apart from another end: see `histories`."""


class Reading(Enum):
    """What happens to the readings that follow an attempt."""

    WORK = "work"
    FAIL = "fail"
    HANG = "hang"


class Script:
    """The choices of one history: those given, and the first option of each further one."""

    def __init__(self, given: Sequence[int] = ()) -> None:
        self._given = given
        self.choices: list[int] = []
        self.options: list[Sequence[Any]] = []

    def choose(self, options: Sequence[T]) -> T:
        number = len(self.choices)
        choice = self._given[number] if number < len(self._given) else 0
        self.choices.append(choice)
        self.options.append(options)
        return options[choice]

    def next(self) -> Script | None:
        """Return the next history in depth-first order; None after the last one."""
        for number in reversed(range(len(self.choices))):
            if self.choices[number] + 1 < len(self.options[number]):
                return Script([*self.choices[:number], self.choices[number] + 1])
        return None


@attrs.define(eq=False)
class Request:
    """One attempt of a write."""

    caller: Caller
    end: End
    kind: Kind
    sent_at: float
    ended_at: float
    settled_at: float
    effects_at: tuple[float, ...]
    """When it may take effect, in order: one time as soon as it is decided."""

    @property
    def effect_at(self) -> float:
        return self.effects_at[0]

    @property
    def histories(self) -> int:
        """The number of histories that differ only in this request: in its open effects, or by the twin of its end."""
        return len(self.effects_at) * (1 + (self.end in self.caller.service.twins.values()))

    @property
    def record_id(self) -> str:
        return f"{self.caller.name}{self.caller.requests.index(self)}"


@attrs.define(eq=False)
class Caller:
    """One call of the client, as the service sees it."""

    name: str
    service: Service
    requests: list[Request] = attrs.field(factory=list)
    reading: Reading | None = None
    """The mode of the readings since the last attempt; None before the first of them."""
    last_reading_at: float = -math.inf
    """When the last reading began that worked."""
    throttled: int = 0


@attrs.define(eq=False)
class Service:
    """The state of one signing, in which every request of a history has the same effect."""

    script: Script
    policy: RetryPolicy
    make_record: Callable[[str], Any] | None
    """Makes the record that a request creates; None if the request sends the signing."""
    max_requests: int
    delays: Sequence[float]
    """When an ambiguous attempt may take effect besides at once and never: seconds after its settle time."""
    readings: Sequence[Reading] = tuple(Reading)
    is_copying: bool = False
    """Whether a copy of a request, made in transit, may take effect before the request."""
    twins: Mapping[End, End] = {}
    """Ends that are left out, since another end stands for them."""
    requests: list[Request] = attrs.field(factory=list)

    def shown(self, now: float) -> list[Request]:
        """Return the requests whose effects show now; choose where that is open. A signing is sent once."""
        shown: list[Request] = []
        for request in self.requests:
            if shown and self.make_record is None:
                break
            past = bisect_right(request.effects_at, now)
            if 0 < past < len(request.effects_at):
                request.effects_at = self.script.choose((request.effects_at[:past], request.effects_at[past:]))
            if request.effect_at <= now:
                shown.append(request)
        return shown

    def decide(self) -> list[Request]:
        """Choose every effect, and return the requests that take effect in the end."""
        for request in self.requests:
            if len(request.effects_at) > 1:
                request.effects_at = (self.script.choose(request.effects_at),)
        effective = [request for request in self.requests if request.effect_at < math.inf]
        return effective if self.make_record else sorted(effective, key=lambda one: one.effect_at)[:1]

    def read(self, now: float) -> Any:
        """Return the response to a reading."""
        shown = self.shown(now)
        if self.make_record is None:
            return Signing("s", is_draft=not shown, is_completed=False)
        return tuple(self.make_record(record_id) for record_id in ("known", *(one.record_id for one in shown)))

    def ends(self, now: float) -> Sequence[End]:
        """Return the ways in which a request that arrives now may end."""
        if len(self.requests) >= self.max_requests:
            return (End.REFUSED,)
        is_repeated_send = self.make_record is None and bool(self.shown(now))
        impossible = {End.SUCCESS} if is_repeated_send else set()
        if is_repeated_send or not self.is_copying:
            impossible.add(End.COPIED)
        return _ends(frozenset(impossible.union(self.twins)))


@cache
def _ends(impossible: frozenset[End]) -> Sequence[End]:
    return tuple(end for end in End if end not in impossible)


@attrs.define(eq=False)
class Attempts:
    """Makes the attempts of one call against the model, instead of `signing_async.transport.attempt.attempt`."""

    caller: Caller

    async def __call__(self, context: Context[Any]) -> Outcome[Any]:
        operation, shared, options = context.operation, context.shared, context.options
        outcome: Outcome[Any] = Outcome()
        body, deadline = context.body, context.deadline
        now = asyncio.get_running_loop().time()
        late = partial(attempt.timeout_error, operation, options)
        if deadline <= now:
            outcome.fail(Kind.UNSENT, late(), may_retry=False)
        elif body is None:
            await self._read(outcome, shared, now, deadline, late)
        else:
            deadline -= min((deadline - now) * attempt.RESERVED_SHARE, context.for_readings)
            await self._write(outcome, shared, body, now, deadline, late)
        return outcome

    async def _read(
        self,
        outcome: Outcome[Any],
        shared: Shared,
        now: float,
        deadline: float,
        late: Callable[[], errors.SigningError],
    ) -> None:
        caller, service = self.caller, self.caller.service
        if caller.reading is None:
            caller.reading = service.script.choose(service.readings)
        ends_at = math.inf if caller.reading is Reading.HANG else now + READING_TIME
        shown = service.read(now) if caller.reading is Reading.WORK else None
        await asyncio.sleep(min(ends_at, deadline) - now)
        if ends_at > deadline:
            outcome.fail(Kind.UNSENT, late(), may_retry=False)
            return
        shared.accepted += 1
        if shown is None:
            outcome.fail(Kind.GATEWAY, errors.ServerError("", status=502), retry_after=_LONG)
            return
        caller.last_reading_at = now
        outcome.kind, outcome.value = Kind.SUCCESS, shown

    async def _write(
        self,
        outcome: Outcome[Any],
        shared: Shared,
        body: wire.Body,
        now: float,
        deadline: float,
        late: Callable[[], errors.SigningError],
    ) -> None:
        caller, service = self.caller, self.caller.service
        end = service.script.choose(service.ends(now))
        caller.reading = None
        ends_at = deadline if end is End.SILENT else min(now + RESPONSE_TIME, deadline)
        is_late = end is End.SILENT or now + RESPONSE_TIME > deadline
        kind = Kind.REFUSED if end is End.COPIED else Kind.LOST if is_late and end is not End.UNSENT else end.value
        body.started = end is not End.UNSENT
        settled_at = ends_at + retry.settle_time(service.policy, kind)
        effects_at: tuple[float, ...] = (math.inf,)
        if end in (End.SUCCESS, End.COPIED):
            effects_at = (now,)
        elif kind.is_ambiguous and (service.make_record is not None or not service.shown(now)):
            effects_at = (now, *(settled_at + delay for delay in service.delays), math.inf)
        request = Request(caller, end, kind, now, ends_at, settled_at, effects_at)
        caller.requests.append(request)
        service.requests.append(request)
        accepted = shared.accepted
        await asyncio.sleep(ends_at - now)
        if is_late:
            outcome.fail(Kind.LOST if body.may_have_taken_effect else Kind.UNSENT, late(), may_retry=False)
            return
        if kind is Kind.THROTTLED:
            caller.throttled += shared.accepted > accepted
        elif kind not in (Kind.UNSENT, Kind.LOST):
            shared.accepted += 1
        body.was_refused = kind in (Kind.THROTTLED, Kind.REFUSED)
        if kind is Kind.SUCCESS:
            outcome.kind = kind
            outcome.value = None if service.make_record is None else service.make_record(request.record_id)
        else:
            outcome.fail(kind, _error(kind, sends=service.make_record is None))


def _error(kind: Kind, *, sends: bool) -> errors.SigningError:
    """Return the error of an attempt that failed; ``sends``: of `send`."""
    if kind is Kind.THROTTLED:
        return errors.RateLimited("", status=429)
    if kind is Kind.REFUSED:
        return errors.CannotBeSent("", status=400) if sends else errors.Forbidden("", status=403)
    if kind in (Kind.FAILED, Kind.GATEWAY):
        return errors.ServerError("", status=500 if kind is Kind.FAILED else 504)
    return errors.TransportError("")
