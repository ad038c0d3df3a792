"""Faults on demand, each with an operation, a kind and a number of times."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

from .. import _checks

OPERATIONS = (
    "me",
    "signings.create",
    "signings.list",
    "signings.get",
    "signings.send",
    "documents.upload",
    "documents.download_signed",
    "recipients.add",
    "recipients.list",
    "recipients.remind",
    "oauth.authorize",
    "oauth.token",
    "signings.cancel",
    "signings.delete",
)
DELIVERY = "webhooks.deliver"

KINDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "429": {"retry_after": (int, float, str, type(None)), "http_date": bool},
    "503": {"retry_after": (int, float, str, type(None)), "http_date": bool},
    "500": {},
    "500-after-commit": {},
    "502-html": {},
    "502-html-after-commit": {},
    "drop-before-commit": {},
    "drop-after-commit": {},
    "truncate": {},
    "truncate-after-commit": {},
    "slow": {"seconds": (int, float)},
    "expired-token": {},
    "empty": {},
    "not-json": {},
    "hang": {},
}
"""The kinds of request faults and their details. `truncate`, `empty` and `not-json` apply after the effect."""

DELIVERY_KINDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "duplicate": {},
    "reorder": {},
    "wrong-signature": {},
    "slow": {"seconds": (int, float)},
    "drop": {},
    "lose": {},
}
"""The kinds of faults of webhook deliveries (operation `webhooks.deliver`), in order: sent twice, sent after the next
delivery, with a wrong signature, with a pause in the body, dropped halfway (and retried), never sent."""


@dataclass(eq=False)
class Fault:
    """One arranged fault; `hits` counts the requests it was applied to."""

    operation: str
    kind: str
    times: int | None
    probability: float
    skip: int
    details: dict[str, Any]
    _random: random.Random
    _owner: Faults
    id: str
    hits: int = field(default=0, init=False)

    def remove(self) -> None:
        """Remove the fault."""
        if self in self._owner.arranged:
            self._owner.arranged.remove(self)

    def covers(self, operation: str) -> bool:
        """Return whether the fault is for this operation; "*" is all of /api/1.0."""
        return self.operation == operation or (self.operation == "*" and operation in OPERATIONS[:10])

    def strikes(self) -> bool:
        """Return whether the fault applies to this request; if so, count it."""
        if self.times is not None and self.hits >= self.times:
            return False
        if self._random.random() >= self.probability:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.hits += 1
        return True


class Faults:
    """The arranged faults; the first that matches a request applies."""

    def __init__(self) -> None:
        self.arranged: list[Fault] = []
        self._ids = itertools.count(1)

    def add(
        self,
        operation: str,
        kind: str,
        times: int | None = 1,
        probability: float = 1.0,
        seed: int | str | None = None,
        *,
        skip: int = 0,
        **details: Any,
    ) -> Fault:
        """Arrange a fault for the next `times` requests of an operation (None: all), after `skip` requests.

        With a probability below 1, each request is chosen at random; the same `seed` makes the same choices in every
        run. Details: `retry_after=` (429, 503) is seconds, text, or None for no header; `http_date=True` sends the
        seconds as a date; `seconds=` (slow) is the delay. Raise ValueError for an unknown or invalid argument.
        """
        kinds = DELIVERY_KINDS if operation == DELIVERY else KINDS
        if operation not in (*OPERATIONS, DELIVERY, "*"):
            valid = ", ".join((*OPERATIONS, DELIVERY, "*"))
            raise ValueError(f"operation: unknown operation {operation!r}; use one of {valid}")
        if kind not in kinds:
            raise ValueError(f"kind: {operation} has no fault {kind!r}; use one of {', '.join(kinds)}")
        if kind == "expired-token" and operation.startswith("oauth."):
            raise ValueError(f"kind: 'expired-token' needs an operation that takes a token, got {operation}")
        if times is not None:
            _checks.integer("times", times, error=ValueError)
        _checks.number("probability", probability, at_least=0, at_most=1, error=ValueError)
        _checks.integer("skip", skip, at_least=0, error=ValueError)
        _check_details(kind, kinds[kind], details)
        fault = Fault(
            operation, kind, times, probability, skip, details, random.Random(seed), self, str(next(self._ids))
        )
        self.arranged.append(fault)
        return fault

    def clear(self) -> None:
        """Remove all faults."""
        self.arranged.clear()

    def take(self, operation: str) -> Fault | None:
        """Return the fault that applies to this request, or None, and count it."""
        for fault in self.arranged:
            if fault.covers(operation) and fault.strikes():
                return fault
        return None


def _check_details(kind: str, known: dict[str, Any], details: dict[str, Any]) -> None:
    for name, value in details.items():
        if name not in known:
            valid = f"its details are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{name}: unknown detail of the fault {kind!r}; {valid}")
        if not isinstance(value, known[name]) or (isinstance(value, bool) and known[name] is not bool):
            raise ValueError(f"{name}: wrong type for the fault {kind!r}, got {value!r}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            _checks.number(name, value, at_least=0, at_most=1e9, error=ValueError)
    if details.get("http_date") and isinstance(details.get("retry_after"), str):
        raise ValueError("retry_after: must be a number with http_date=True, got a string")
