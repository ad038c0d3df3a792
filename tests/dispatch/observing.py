"""Packages for the tests of a dispatch, and what they left in the sandbox and in the journal."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from signing_async import (
    Claim,
    DispatchResult,
    NewRecipient,
    PdfSource,
    Signing,
    SigningClient,
    SigningPackage,
    SqliteJournal,
)
from signing_async.sandbox import Sandbox
from tests.dispatch.parcels import Parcel, judge
from tests.pdfs import make_pdf


def parcel_of(documents: int = 2, recipients: int = 2, name: str = "Lease", **fields: object) -> Parcel:
    """Return a package with this number of documents and recipients."""
    files = tuple((f"part {number}.pdf", make_pdf(text=f"{name} {number}")) for number in range(documents))
    people = tuple((f"r{number}@example.com", number + 1) for number in range(recipients))
    package = SigningPackage(
        name,
        "EN",
        [PdfSource(data, filename) for filename, data in files],
        [NewRecipient(email, "Anna", "Berg") for email, _ in people],
        **{"signing_order": "sequential", **fields},  # type: ignore[arg-type]  # the fields of a package
    )
    return Parcel(package, files, people)


def sent_well(sandbox: Sandbox, *parcels: Parcel, spare: int = 0) -> None:
    """Assert that each package was sent once, exactly as it is, and that at most ``spare`` drafts are left unsent."""
    verdict = judge(sandbox, parcels)
    assert verdict.wrong == []
    assert verdict.sent == len(parcels)
    assert verdict.spare <= spare


def state_of(path: Path) -> dict[str, Any]:
    """Return the state of the only package in a journal."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        ((state,),) = database.execute("SELECT state FROM packages").fetchall()
    found: dict[str, Any] = json.loads(state)
    return found


@dataclass
class Office:
    """A client of a sandbox, and the journal of what the client dispatches."""

    sandbox: Sandbox
    client: SigningClient
    path: Path

    async def dispatch(self, parcel: Parcel, **options: Any) -> Signing:
        """Dispatch a package with the journal."""
        return await self.client.dispatch(parcel.package, self.path, **options)

    async def dispatch_many(self, *parcels: Parcel, **options: Any) -> list[DispatchResult]:
        """Return the results of a run over packages with the journal."""
        return await all_of(self.client.dispatch_many([each.package for each in parcels], self.path, **options))

    def fail(self, operation: str, kind: Any, **details: Any) -> Any:
        """Let the next request of an operation fail, and return the fault."""
        return self.sandbox.faults.add(operation, kind, **details)

    def sent_well(self, *parcels: Parcel, spare: int = 0) -> None:
        """Assert that each package was sent once, exactly as it is, with at most ``spare`` unsent drafts."""
        sent_well(self.sandbox, *parcels, spare=spare)

    def state(self) -> dict[str, Any]:
        """Return the state of the only package in the journal."""
        return state_of(self.path)

    def count(self) -> Counter[str | None]:
        """Return the number of requests of each operation."""
        return Counter(record.operation for record in self.sandbox.requests)


def abandoned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log messages about abandoned drafts."""
    return [message for message in caplog.messages if "abandoned" in message]


async def all_of(results: Any, into: list[DispatchResult] | None = None) -> list[DispatchResult]:
    """Return all results of a run, or append them to ``into``, which keeps them if the run fails."""
    into = [] if into is None else into
    async for result in results:
        into.append(result)
    return into


class Failing:
    """A journal whose operation number ``at`` fails, and all later ones unless ``once``.

    Only operations that match ``only`` are counted: "claim", "write" or "release", then the key and a written state.
    """

    def __init__(
        self, journal: SqliteJournal, at: int, error: Exception, only: str = "", *, once: bool = False
    ) -> None:
        self._journal = journal
        self._at = range(at, at + 1) if once else range(at, 1_000_000)
        self._error = error
        self._only = only
        self.steps = 0

    def _fail_if_due(self, operation: str) -> None:
        if re.match(self._only, operation):
            self.steps += 1
            if self.steps in self._at:
                raise self._error

    async def claim(self, key: str) -> Claim | None:
        self._fail_if_due(f"claim {key}")
        return await self._journal.claim(key)

    async def write(self, claim: Claim, state: str) -> None:
        self._fail_if_due(f"write {claim.key} {state}")
        await self._journal.write(claim, state)

    async def release(self, claim: Claim) -> None:
        self._fail_if_due(f"release {claim.key}")
        await self._journal.release(claim)

    async def aclose(self) -> None: ...
