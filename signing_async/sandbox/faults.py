"""Faults on demand: which operation goes wrong, how, how often."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

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
"""What can happen to a request, and the details each takes. Truncated, empty and not-json answers follow the work."""

DELIVERY_KINDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "duplicate": {},
    "reorder": {},
    "wrong-signature": {},
    "slow": {"seconds": (int, float)},
    "drop": {},
    "lose": {},
}
"""What can happen to a webhook delivery (operation `webhooks.deliver`): sent twice, after the next one, with a wrong
signature, with a pause in its body, broken off halfway (and retried), never sent at all."""


@dataclass(eq=False)
class Fault:
    """One arranged fault; `hits` counts how often it struck."""

    operation: str
    kind: str
    times: int | None
    probability: float
    skip: int
    details: dict[str, Any]
    _random: random.Random
    _owner: Faults
    hits: int = field(default=0, init=False)

    def remove(self) -> None:
        """Let it strike no more."""
        if self in self._owner.arranged:
            self._owner.arranged.remove(self)

    def covers(self, operation: str) -> bool:
        """Whether it concerns this operation; "*" is all of /api/1.0."""
        return self.operation == operation or (self.operation == "*" and operation in OPERATIONS[:10])

    def strikes(self) -> bool:
        """Whether it is this request's turn; if so it is counted."""
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
    """The arranged faults; the first that fits a request strikes it."""

    def __init__(self) -> None:
        self.arranged: list[Fault] = []

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
        """Arrange a fault for the next `times` requests of an operation (None: for all), after letting `skip` pass.

        With a probability below 1 each request is a throw of dice, the same in every run with the same seed. Details:
        `retry_after=` seconds, text, or None for no header, and `http_date=True` for its date form (429, 503);
        `seconds=` (slow). What is not known is a ValueError.
        """
        kinds = DELIVERY_KINDS if operation == DELIVERY else KINDS
        if operation not in (*OPERATIONS, DELIVERY, "*"):
            valid = ", ".join((*OPERATIONS, DELIVERY, "*"))
            raise ValueError(f"there is no operation {operation!r}; there are {valid}")
        if kind not in kinds:
            raise ValueError(f"there is no fault {kind!r} for {operation}; there are {', '.join(kinds)}")
        if kind == "expired-token" and operation.startswith("oauth."):
            raise ValueError(f"the fault 'expired-token' is for operations that take a token, not for {operation}")
        if times is not None and (isinstance(times, bool) or not isinstance(times, int) or times < 1):
            raise ValueError(f"times must be a whole number from 1, or None for always, not {times!r}")
        if isinstance(probability, bool) or not isinstance(probability, int | float) or not 0 <= probability <= 1:
            raise ValueError(f"probability must be from 0 to 1, not {probability!r}")
        if isinstance(skip, bool) or not isinstance(skip, int) or skip < 0:
            raise ValueError(f"skip must be a whole number from 0, not {skip!r}")
        _check_details(kind, kinds[kind], details)
        fault = Fault(operation, kind, times, probability, skip, details, random.Random(seed), self)  # dice
        self.arranged.append(fault)
        return fault

    def clear(self) -> None:
        """Remove them all."""
        self.arranged.clear()

    def take(self, operation: str) -> Fault | None:
        """The fault that strikes this request, if any does."""
        for fault in self.arranged:
            if fault.covers(operation) and fault.strikes():
                return fault
        return None


def _check_details(kind: str, known: dict[str, Any], details: dict[str, Any]) -> None:
    for name, value in details.items():
        if name not in known:
            valid = ", ".join(known) if known else "none"
            raise ValueError(f"the fault {kind!r} has no detail {name!r}; it has {valid}")
        if not isinstance(value, known[name]) or (isinstance(value, bool) and known[name] is not bool):
            raise ValueError(f"the fault {kind!r} cannot have {name}={value!r}")
        if isinstance(value, int | float) and not 0 <= value <= 1e9:
            raise ValueError(f"the fault {kind!r} takes {name} from 0 to 1e9, not {value!r}")
    if details.get("http_date") and isinstance(details.get("retry_after"), str):
        raise ValueError(f"the fault {kind!r} takes a number as retry_after= with http_date=True")
