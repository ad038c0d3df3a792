"""SIGKILL of receivers and workers at any moment loses no event, and repeats none that was acknowledged."""

from __future__ import annotations

from pathlib import Path

import pytest

from signing_async.webhooks import EventStatus
from tests.webhooks import crash, inbox_kill


async def test_sigkill_of_a_receiver_loses_no_event_and_repeats_none_that_was_acknowledged(tmp_path: Path) -> None:
    outcome = await crash.run(events=400, kills=2, seed=11, directory=tmp_path)
    assert (outcome.kills, len(outcome.acknowledged)) == (2, 400)
    assert outcome.deliveries > 400 + outcome.repeats > 410
    assert outcome.lost() == set()
    assert outcome.late() == []
    # At a kill, at most one event per sender is between its handler and its confirmation.
    assert outcome.twice() <= 2 * crash.SENDERS


@pytest.mark.timeout(300)
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
async def test_sigkill_of_receivers_and_workers_of_an_inbox_loses_no_event_and_skips_none(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Every repeated handling is explained by a kill, and the events of a signing are handled in order of arrival."""
    if store == "postgres":
        (tmp_path / "dsn").write_text(await request.getfixturevalue("postgres").new_schema())
    outcome = await inbox_kill.run(events=300, kills=3, seed=5, directory=tmp_path)
    assert (outcome.kills, len(outcome.acknowledged)) == (3, 300)
    assert outcome.deliveries > 300 + outcome.repeats > 300
    assert {stored.status for stored in outcome.stored} == {EventStatus.HANDLED}
    assert outcome.lost() == outcome.skipped() == set()
    assert outcome.unexplained() == outcome.out_of_order() == []
