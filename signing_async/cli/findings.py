"""The doctor's findings, and the assumptions that it learned."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import attrs

from ..assumptions import Assumptions
from ..transport.error_response import one_line

__all__ = ["Finding", "Learned", "State"]

State = Literal["ok", "warning", "failed", "unknown"]

NAME = re.compile(r"[A-Za-z0-9_.\[\]$:-]{1,60}")


@attrs.frozen
class Finding:
    """The result of one check."""

    check: str
    state: State
    message: str
    facts: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class _Value:
    name: str
    value: Any
    """None: not determined, so the default applies."""
    evidence: str


class Learned:
    """Values for `Assumptions`, each with the evidence for it."""

    def __init__(self, known: Assumptions) -> None:
        self.known: Assumptions = known
        self._values: list[_Value] = []

    @property
    def values(self) -> dict[str, Any]:
        """The values that were determined, by the names of `Assumptions`."""
        return {one.name: one.value for one in self._values if one.value is not None}

    @property
    def assumptions(self) -> Assumptions:
        """The known assumptions with the learned values."""
        return attrs.evolve(self.known, **self.values)

    def add(self, name: str, value: Any, evidence: str) -> None:
        self._values.append(_Value(name, value, evidence))

    def add_first(self, name: str, value: str, evidence: str) -> None:
        """Put a new value in front of the known ones; a known value keeps its place."""
        known: tuple[str, ...] = getattr(self.assumptions, name)
        if value not in known and all(NAME.fullmatch(part) for part in value.split(".")):
            self._values = [one for one in self._values if one.name != name]
            self.add(name, [value, *known], evidence)
        elif value in known and not any(one.name == name for one in self._values):
            self.add(name, list(known), f"{evidence}: {value}")

    def to_toml(self, origin: str) -> str:
        """Return a file of assumptions, with the evidence for each as a comment."""
        lines = [
            f"# How {origin} responds, observed by `signing-async doctor` at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
            "# To use it, set SIGNING_ASSUMPTIONS or the setting `assumptions`, or call Assumptions.from_file(...).",
        ]
        for one in self._values:
            # The evidence may quote the service.
            evidence = one_line(one.evidence)
            value = getattr(Assumptions(), one.name) if one.value is None else one.value
            lines += ["", f"# {evidence[0].upper()}{evidence[1:]}."]
            lines.append(f"{'# ' if one.value is None else ''}{one.name} = {json.dumps(value)}")
        return "\n".join(lines) + "\n"
