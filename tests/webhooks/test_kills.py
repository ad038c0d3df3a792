"""SIGKILL of receivers and workers at any moment loses no event, and repeats none that was acknowledged."""

from __future__ import annotations

from pathlib import Path

import pytest

from signing_async.webhooks import EventStatus
from tests.webhooks import crash, inbox_kill


async def test_sigkill_of_a_receiver_loses_no_event_and_repeats_none_that_was_acknowledged(tmp_path: Path) -> None:
    outcome = await crash.run(events=200, kills=1, seed=11, directory=tmp_path)
    assert (outcome.kills, len(outcome.acknowledged)) == (1, 200)
    assert outcome.deliveries > 200 + outcome.repeats > 205
    assert outcome.lost() == set()
    assert outcome.late() == []
    # At a kill, at most one event per sender is between its handler and its confirmation.
    assert outcome.twice() <= crash.SENDERS


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
async def test_sigkill_of_receivers_and_workers_of_an_inbox_loses_no_event_and_skips_none(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Every repeated handling is explained by a kill, and the events of a signing are handled in order of arrival."""
    if store == "postgres":
        (tmp_path / "dsn").write_text(await request.getfixturevalue("postgres").new_schema())
    outcome = await inbox_kill.run(events=200, kills=1, seed=5, directory=tmp_path)
    assert (outcome.kills, len(outcome.acknowledged)) == (1, 200)
    assert outcome.deliveries > 200 + outcome.repeats > 200
    assert {stored.status for stored in outcome.stored} == {EventStatus.HANDLED}
    assert outcome.lost() == outcome.skipped() == set()
    assert outcome.unexplained() == outcome.out_of_order() == []
