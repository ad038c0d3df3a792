"""The real core keeps its promises in every history, and the enumeration finds a bug in each of its rules."""

from __future__ import annotations

import gc
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

from signing_async.reconcile import Creation, RecipientMatch, Reconciliation  # bugs are planted in them
from signing_async.transport.call import _Call  # and in it

from . import histories
from .histories import FAR, NEAR, Case, Violation, cases, enumerate_histories


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Log nothing, and collect no garbage: both would take most of the time."""
    logger = logging.getLogger("signing_async")
    logger.disabled = True
    gc.disable()
    yield
    gc.enable()
    logger.disabled = False


@pytest.fixture
def untraced() -> Iterator[None]:
    """Measure no coverage, which would take three times as long: the short histories are measured."""
    module: Any = sys.modules.get("coverage")
    current = None if module is None else module.Coverage.current()
    if current is not None:
        current.stop()
    yield
    if current is not None:
        current.start()


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("untraced")
def test_every_history_keeps_the_promises(capsys: pytest.CaptureFixture[str]) -> None:
    """No second effect goes unnoticed, nothing is denied that may still happen, and the deadline is kept."""
    total: Counter[str] = Counter()
    for case in cases():
        counts: Counter[str] = Counter()
        enumerate_histories(case, counts)
        gc.collect()
        total += counts
        with capsys.disabled():
            print(f"\n{case}: {_summary(counts)}; {dict(counts)}")
        # Not everything is called unknown.
        assert min(counts["value"], counts["none"]) > 0, case
        assert case != Case("send", FAR) or counts["histories"] > 25_000
    with capsys.disabled():
        print(f"\nall cases: {_summary(total)}")
    assert total["histories"] >= 100_000


def _summary(counts: Counter[str]) -> str:
    return f"{counts['histories']:,} histories, {counts['impossible']:,} of them impossible"


@pytest.mark.parametrize("case", [Case(operation, FAR, max_attempts=2) for operation in ("send", "upload")], ids=str)
def test_histories_that_are_left_out_are_equal_to_those_that_are_played(case: Case) -> None:
    played, every = Counter[str](), Counter[str]()
    enumerate_histories(case, played)
    enumerate_histories(attrs.evolve(case, leaves_out_twins=False), every)
    assert {**played, "runs": 0} == {**every, "runs": 0}


Patch = Callable[[pytest.MonkeyPatch], None]


def _repeat_without_reading(patch: pytest.MonkeyPatch) -> None:
    async def settle(self: Any) -> None:
        return None

    patch.setattr(_Call, "_settle", settle)


def _read_after_the_first_attempt_only(patch: pytest.MonkeyPatch) -> None:
    settle = _Call._settle

    async def settle_once(self: Any) -> Any:
        return await settle(self) if self._context.number < 2 else None

    patch.setattr(_Call, "_settle", settle_once)


def _trust_an_early_reading(patch: pytest.MonkeyPatch) -> None:
    poll = Reconciliation._poll

    async def poll_early(self: Any, find: Any, first: float, last: float, counts_from: float) -> Any:
        return await poll(self, find, first, last, -math.inf)

    patch.setattr(Reconciliation, "_poll", poll_early)


def _do_not_confirm_a_success(patch: pytest.MonkeyPatch) -> None:
    async def confirm(self: Any, value: Any) -> Any:
        return value

    patch.setattr(_Call, "confirm", confirm)


def _forget_unexplained_attempts(patch: pytest.MonkeyPatch) -> None:
    settle = Reconciliation.settle

    async def settle_and_forget(self: Any, retry_at: float) -> Any:
        found = await settle(self, retry_at)
        for late in self._unexplained:
            self._effect.unexplained[late] -= 1
        self._unexplained.clear()
        return found

    patch.setattr(Reconciliation, "settle", settle_and_forget)


def _match_the_first_of_several(patch: pytest.MonkeyPatch) -> None:
    select = RecipientMatch.select

    async def select_first(self: Any, unknown: Any, expected: Any) -> Any:
        candidates, fitting = await select(self, unknown, expected)
        return candidates[:1], fitting[:1]

    patch.setattr(RecipientMatch, "select", select_first)


def _forget_unresolved_calls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Creation, "note_unresolved", lambda self: None)


def _recognize_any_record(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(histories, "has_reference", lambda record, reference: record.id != "known")


def _forget_created_records(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Creation, "note_created", lambda self, record: None)


BUGS: dict[str, tuple[Patch, Case]] = {
    "rule 1: no reading precedes a repeat or an error": (_repeat_without_reading, Case("send", FAR)),
    "rule 1: a reading follows only the first attempt": (_read_after_the_first_attempt_only, Case("add", FAR)),
    "rule 2: the first effect counts after two ambiguous attempts": (_trust_an_early_reading, Case("upload", FAR)),
    "rule 3: a success after an ambiguous attempt is not confirmed": (_do_not_confirm_a_success, Case("upload", FAR)),
    "rule 4: an unexplained attempt leaves no taint": (_forget_unexplained_attempts, Case("add", FAR)),
    "rule 4: an own send forgets an unexplained attempt": (_forget_unexplained_attempts, Case("send own", FAR)),
    "matching: the first of several recipients is the effect": (_match_the_first_of_several, Case("add", FAR)),
    "ledger: an unresolved call is forgotten": (_forget_unresolved_calls, Case("upload", NEAR, True)),
    "ledger: a record that a call returned is forgotten": (_forget_created_records, Case("add", FAR, True)),
    "request: the caller's function recognizes any record": (_recognize_any_record, Case("request", FAR, True)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A history of at most three attempts shows the bug; histories of fewer attempts are played first."""
    plant, case = BUGS[bug]
    plant(monkeypatch)
    counterexample = _first_violation(case)
    assert counterexample is not None
    with capsys.disabled():
        print(f"\n{bug}: {counterexample}")


def _first_violation(case: Case) -> Violation | None:
    try:
        for attempts in (1, 2, 3):
            enumerate_histories(attrs.evolve(case, max_attempts=attempts), Counter())
    except Violation as violation:
        return violation
    return None
