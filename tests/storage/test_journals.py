"""Every journal of this package passes its suite, and a journal that errs does not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from signing_async.dispatch.journal import Claim, ClaimLost, Journal, JournalError, JournalRecord
from signing_async.postgres import PostgresJournal
from signing_async.storage.journal import SqliteJournal
from tests.postgres.server import PostgresServer
from tests.storage import journals
from tests.storage.journals import FencedJournalConformance, JournalConformance, ListedJournalConformance

OpenJournal = Callable[[], Journal]


class TestSqliteJournal(JournalConformance, FencedJournalConformance, ListedJournalConformance):
    """In a file, for one machine."""

    @pytest.fixture
    async def open_journal(self, tmp_path: Path) -> AsyncIterator[OpenJournal]:
        async with contextlib.AsyncExitStack() as opened:
            yield opener(opened, lambda: SqliteJournal(tmp_path / "journal"))

    @pytest.fixture
    def lapse(self, tmp_path: Path) -> Any:
        async def lapse(journal: Journal) -> None:
            for lock in tmp_path.glob("journal.*.lock"):
                lock.unlink()

        return lapse


class TestPostgresJournal(JournalConformance, FencedJournalConformance, ListedJournalConformance):
    """In a table, for many machines."""

    @pytest.fixture
    async def dsn(self, postgres: PostgresServer) -> str:
        return await postgres.new_schema()

    @pytest.fixture
    async def open_journal(self, dsn: str) -> AsyncIterator[OpenJournal]:
        async with contextlib.AsyncExitStack() as opened:
            yield opener(opened, lambda: PostgresJournal(dsn))

    @pytest.fixture
    def lapse(self, postgres: PostgresServer, dsn: str) -> Any:
        schema = dsn.rpartition("=")[2]

        async def lapse(journal: Journal) -> None:
            await postgres.execute(f"UPDATE {schema}.signing_packages SET leased_until = now() - interval '1 s'")

        return lapse


def opener(opened: contextlib.AsyncExitStack, make: Callable[[], Journal]) -> OpenJournal:
    """Makes journals, all of which are closed in the end."""

    def open_journal() -> Journal:
        journal = make()
        opened.push_async_callback(journal.aclose)
        return journal

    return open_journal


# Of a suite, too, it has to be seen that it can fail.


class Careless:
    """A journal in memory that can be told to break each promise."""

    def __init__(self, packages: dict[str, Any], fault: str) -> None:
        self.packages = packages
        self.fault = fault
        self.closed = False

    async def claim(self, key: str) -> Claim | None:
        if self.closed:
            raise JournalError("closed" if self.fault != "no word" else "gone")
        row = self.packages.setdefault(self._name(key), [None, None, 0])
        to_whom = "given to itself" if row[1] is self else "given twice"
        if row[1] is not None and self.fault not in ("given twice", to_whom):
            return None
        row[1] = self
        row[2] += self.fault != "no fence"
        if self.fault == "lost claims":
            await asyncio.sleep(0)
        return Claim(key, row[0], row[2])

    async def write(self, claim: Claim, state: str) -> None:
        row = self._row(claim)
        row[0] = state[: 1000 if self.fault == "short states" else None] if self.fault != "no writes" else None

    async def release(self, claim: Claim) -> None:
        row = self._row(claim)
        row[1] = None
        if self.fault == "emptied":
            row[0] = None

    async def records(self) -> AsyncIterator[JournalRecord]:
        for key in sorted(self.packages)[: 500 if self.fault == "lists half" else None]:
            state, owner, _ = self.packages[key]
            is_listed = owner is not None if self.fault == "lists claimed only" else state is not None
            if is_listed or self.fault == "lists without a text":
                yield JournalRecord(key, state, datetime.now(UTC))

    def _row(self, claim: Claim) -> Any:
        row = self.packages[self._name(claim.key)]
        if (row[1], row[2]) != (self, claim.fence) and self.fault != "no check":
            raise ClaimLost(claim.key)
        return row

    def _name(self, key: str) -> str:
        return key[:100] if self.fault == "short keys" else key

    async def aclose(self) -> None:
        self.closed = self.fault != "never closed"
        for row in self.packages.values():
            if row[1] is self and self.fault != "kept at the end":
                row[1] = None


FAULTS = {
    "": [],
    "given twice": ["test_claimed_package_cannot_be_claimed", "test_one_of_many_concurrent_claims_succeeds"],
    "given to itself": ["test_claimed_package_cannot_be_claimed", "test_one_of_many_concurrent_claims_succeeds"],
    "no fence": ["test_fence_grows_with_every_claim"],
    "short keys": ["test_keys_are_distinct_to_the_last_character"],
    "no writes": ["test_release_does_not_change_the_state", "test_concurrent_writes_are_all_kept"],
    "emptied": ["test_release_does_not_change_the_state"],
    "no check": ["test_released_claim_is_refused"],
    "lost claims": ["test_cancelled_claim_leaves_the_package_free"],
    "kept at the end": ["test_closing_releases_all_claims"],
    "never closed": ["test_closing_releases_all_claims"],
    "no word": ["test_closing_releases_all_claims"],
}
EVERY = [name for name in vars(JournalConformance) if name.startswith("test_") and "last_written" not in name]


@pytest.mark.parametrize("fault", FAULTS)
async def test_suite_detects_each_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "lost claims":
        # It would wait for a minute for what never comes.
        monkeypatch.setattr(journals, "_TIMEOUT", 0.05)
    failed = []
    for name in EVERY:
        packages: dict[str, Any] = {}
        try:
            await getattr(JournalConformance(), name)(partial(Careless, packages, fault))
        except (Exception, pytest.fail.Exception):
            failed.append(name)
    assert set(FAULTS[fault]) <= set(failed)
    assert bool(failed) == bool(fault)


@pytest.mark.parametrize("fault", ["", "lists claimed only", "lists without a text", "lists half"])
async def test_suite_detects_a_wrong_list(fault: str) -> None:
    packages: dict[str, Any] = {}
    finds = pytest.raises(AssertionError) if fault else contextlib.nullcontext()
    with finds:
        await ListedJournalConformance().test_last_written_states_are_listed_by_key(partial(Careless, packages, fault))


@pytest.mark.parametrize("fault", ["", "short states"])
async def test_suite_detects_a_truncated_text(fault: str) -> None:
    packages: dict[str, Any] = {}
    finds = pytest.raises(AssertionError) if fault else contextlib.nullcontext()
    with finds:
        await JournalConformance().test_last_written_state_is_returned_by_the_next_claim(
            partial(Careless, packages, fault), "k", "x" * 2000
        )
