"""A killed receiver loses no event, and handles none again that it acknowledged."""

from __future__ import annotations

from pathlib import Path

from tests.webhooks.crash import run


async def test_sigkill_loses_no_event_and_repeats_none_that_was_acknowledged(tmp_path: Path) -> None:
    outcome = await run(events=1500, kills=3, seed=11, directory=tmp_path)
    assert outcome.kills == 3
    assert len(outcome.acknowledged) == 1500
    assert outcome.deliveries > 1500 + outcome.repeats > 1550
    assert outcome.lost() == []
    assert outcome.repeated() == []
    # At a kill, at most one event per sender is between its handler and its confirmation.
    assert outcome.twice() <= 3 * 32
