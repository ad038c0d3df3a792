"""SIGKILL of receivers and workers at any moment loses no event of an inbox, and skips none."""

from __future__ import annotations

from pathlib import Path

from signing_async.webhooks import EventStatus
from tests.webhooks.inbox_kill import run


async def test_sigkill_of_receivers_and_workers_loses_no_event_and_skips_none(tmp_path: Path) -> None:
    """Every repeated handling is explained by a kill, and the events of a signing are handled in order of arrival."""
    outcome = await run(events=1200, kills=6, seed=5, directory=tmp_path)
    assert (outcome.kills, len(outcome.acknowledged)) == (6, 1200)
    assert outcome.deliveries > 1200 + outcome.repeats > 1240
    assert {stored.status for stored in outcome.stored} == {EventStatus.HANDLED}
    assert outcome.lost() == outcome.skipped() == set()
    assert outcome.unexplained() == outcome.out_of_order() == []
